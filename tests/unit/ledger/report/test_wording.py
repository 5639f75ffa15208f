"""Every sort of finding, and every doubt, has words; and a finding itself has none."""

from pathlib import Path

import msgspec
import pytest

from ledger.report.wording import say
from ledger.report.wording.words import worded
from ledger.verdicts import all_kinds, all_verdicts
from ledger.verdicts.base import Doubt, Facts, Finding

ROOT = Path(__file__).parents[4]


def leaves(kind: type) -> set[type]:
    """The types below `kind`, also of other rooms, that findings are made of."""
    below = {each for each in kind.__subclasses__() if each.__module__.startswith("ledger.")}
    return below.union(*(leaves(each) for each in below)) if below else set()


def some_finding() -> Finding:
    """A finding of facts that are not known, so that asking for its words loads them all."""
    return Finding(of=next(iter(all_kinds().values())), certainty="proven", facts=Facts(), since_seq=1)


def test_whatever_a_verdict_finds_or_doubts_can_be_said():
    assert all_verdicts()
    with pytest.raises(KeyError, match="Facts"):  # facts without words are a fault that is seen at once
        say(some_finding())
    unworded = {each.__qualname__ for each in leaves(Facts) | leaves(Doubt)} - {each.__qualname__ for each in worded()}
    used_as_a_base = {each.__qualname__ for each in leaves(Facts) | leaves(Doubt) if each.__subclasses__()}
    assert unworded <= used_as_a_base


def test_verdicts_hold_no_words():
    for path in (ROOT / "ledger" / "verdicts").rglob("*.py"):
        assert "import words" not in path.read_text(), f"{path.name} makes words; ledger/report/wording does that"


def test_a_finding_is_data():
    assert not {"title", "culprit", "advice"} & set(Finding.__struct_fields__)
    assert msgspec.structs.replace(some_finding(), since_seq=2).since_seq == 2
