"""What is said of a finding: `Words`, and `say`, which finds the function that words it.

Each sort of finding has a type of facts in its verdict's file, and one function here, in the file of its kind:

    @wording.of(Facts)
    def ...(finding: Finding, facts: Facts) -> Words

This file knows findings; it knows no kind of them.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from ledger.verdicts.base import Doubt, Facts, Finding


class Answers(msgspec.Struct, frozen=True):
    """Requests whose answers cannot be trusted, in one clause about impact that others of its sort can join.

    Attributes:
        how: what happened to them, as a relative clause: `which loaded these keys`.
        proven: whether it is known that what they got was wrong.
    """

    requests: tuple[str, ...]
    how: str
    proven: bool


class SameForJob(msgspec.Struct, frozen=True):
    """A step that is the same as for the cause, for the keys of another job."""

    job: int


Clause: TypeAlias = str | Answers
"""A part of what is said of the impact; `;` joins them."""

NextStep: TypeAlias = str | SameForJob
"""What is to be done."""


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a finding, in whole sentences and clauses.

    Attributes:
        title: one sentence for someone who was just woken up.
        brief: the title in fewer words, where it is long.
        culprit: who or what to look at.
        advice: what to do next.
        also: what is to be done about it as well, when it is the consequence of another finding.
        other_log: what the log of the other side would show; moot once it is replayed together with this one.
        shown: what of the culprit and title the events show, where they show a part of it only.
        inferred: the part that is concluded from them.
        doubt: why it is not proven, and what would decide. Empty when it is.
        impact: who suffers from it and how, as far as the log shows.
        notes: lines of text that the report adds, e.g. the time line of a block.
    """

    title: str
    brief: str = ""
    culprit: str = ""
    advice: str = ""
    also: NextStep = ""
    other_log: str = ""
    shown: str = ""
    inferred: str = ""
    doubt: str = ""
    impact: tuple[Clause, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """The title in as few words as there are."""
        return self.brief or self.title

    @property
    def not_proven(self) -> str:
        """What is not proven of it: the doubt, and what is concluded."""
        return "; ".join(part for part in (self.doubt, self.inferred) if part)


F = TypeVar("F", bound=Facts)
D = TypeVar("D", bound=Doubt)

_FINDINGS: dict[type[Facts], Callable[[Finding, Any], Words]] = {}
_DOUBTS: dict[type[Doubt], Callable[[Any], str]] = {}


def of(facts: type[F]) -> Callable[[Callable[[Finding, F], Words]], Callable[[Finding, F], Words]]:
    """Register the function that words findings with facts of this type."""

    def register(function: Callable[[Finding, F], Words]) -> Callable[[Finding, F], Words]:
        _FINDINGS[facts] = function
        return function

    return register


def of_doubt(doubt: type[D]) -> Callable[[Callable[[D], str]], Callable[[D], str]]:
    """Register the function that words doubts of this type."""

    def register(function: Callable[[D], str]) -> Callable[[D], str]:
        _DOUBTS[doubt] = function
        return function

    return register


def worded() -> frozenset[type]:
    """Return the types of facts and doubts that can be worded."""
    return frozenset((*_FINDINGS, *_DOUBTS))


def words_of(finding: Finding) -> Words:
    """Return what is said of a finding by itself."""
    said = _FINDINGS[type(finding.facts)](finding, finding.facts)
    if finding.doubt is None:
        return said
    return msgspec.structs.replace(said, doubt=_DOUBTS[type(finding.doubt)](finding.doubt))
