"""The incidents that ship with kvledger, recorded on the real engine.

What replay says of them, and that they are whole.
"""

from pathlib import Path

import pytest

from ledger.demo import incidents
from ledger.file.verify import verify
from ledger.replay.case import Case, replay_files
from ledger.report.wording import say


def case(name: str) -> Case:
    """Return the replay of a shipped incident."""
    (path,) = [path for path in incidents() if path.stem == name]
    return replay_files([path])


@pytest.mark.parametrize("path", incidents(), ids=lambda path: path.stem)
def test_a_shipped_incident_is_sealed_and_unchanged(path: Path) -> None:
    report = verify(path)
    assert report.sealed
    assert report.ok


def test_the_hanging_put_is_a_stall_that_names_the_rank_and_the_call() -> None:
    kinds = {finding.kind: finding for _, finding in case("hanging-put").findings}
    stall = kinds["stall"]
    assert tuple(stall.ranks) == (1,)
    assert stall.jobs[0] == 2
    assert "rank 1 began put #2" in say(stall).culprit
    assert kinds["torn_log"].certainty == "proven"


def test_the_poisoned_keys_are_found_with_both_owners() -> None:
    findings = [finding for _, finding in case("poisoned-keys").findings]
    assert {finding.kind for finding in findings} == {"poison"}
    assert all(finding.jobs and finding.blocks and len(finding.requests) >= 2 for finding in findings)
