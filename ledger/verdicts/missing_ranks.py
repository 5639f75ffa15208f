"""`missing_ranks`: the same ranks do not answer, every time.

One job that misses a rank is a `leak` or a `stall`, an accident. Two or more that miss the same ranks, when those ranks
have never answered anything in the whole log, are a system that was set up wrong: reports of these ranks do not reach
the scheduler, or it waits for ranks that do not exist. Where events of the scheduler are lost the ranks may have
answered there, and the jobs stay a `leak` or a `stall`. So do those of a rank whose call was seen to fail: it runs.
"""

from collections.abc import Iterable
from typing import ClassVar, TypeAlias

from ledger import events as ev
from ledger.blocks import from_ranges
from ledger.verdicts.base import Certainty, Doubt, Facts, Finding, Kind, Role, Verdict, listed
from ledger.verdicts.history import End, History
from ledger.verdicts.shared.sample import Sample
from ledger.verdicts.shared.waits import (
    Wait,
    Waiting,
    certainty,
    evidence,
    lost_answers,
    never_answered,
    waiting,
    waits,
)

Unanswered: TypeAlias = tuple[ev.LoadSettled, str]
"""A load that was counted as finished although ranks had not answered, and its request, empty if that is not known."""

MISSING_RANKS = Kind("missing_ranks", Role.CAUSE | Role.LASTS | Role.HANGS)


class NeverAnswered(Facts, frozen=True, kw_only=True):
    """Several jobs and loads wait for the same ranks, which never answered anything.

    Attributes:
        first: one of them of which the log shows all, if there is one.
        answered: the ranks that did answer something.
    """

    first: Waiting
    answered: tuple[int, ...]


class CountedWithout(Facts, frozen=True, kw_only=True):
    """Loads that were counted as finished although ranks had not answered.

    Attributes:
        load: the first of them.
        times: how many there are.
        answered_other: the ranks answered other work.
    """

    load: int
    times: int
    answered_other: bool


class AnsweredOther(Doubt, frozen=True, kw_only=True):
    """The ranks answered other work, so this answer may only have been late."""

    ranks: tuple[int, ...]


class OneLoadOnly(Doubt, frozen=True, kw_only=True):
    """It happened once, so the answer may only have been late."""


class MissingRanks(Verdict):
    """Ranks that never answer."""

    kinds: ClassVar[tuple[Kind, ...]] = (MISSING_RANKS,)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._unanswered: dict[tuple[int, ...], Sample[Unanswered]] = {}

    def on_load_settled(self, event: ev.LoadSettled) -> None:
        """Note a load that vLLM counted as finished while ranks had not answered."""
        if not event.missing or event.outcome == "cancelled":
            return
        planned = self.history.loads[event.load][:1]
        request = planned[0].request if planned and isinstance(planned[0], ev.LoadPlanned) else ""
        self._unanswered.setdefault(tuple(from_ranges(event.missing)), Sample()).add((event, request))

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each set of ranks."""
        opened = waits(self.history, end)
        alike: dict[tuple[int, ...], list[Wait]] = {}
        for wait in never_answered(self.history, opened):
            alike.setdefault(wait.ranks, []).append(wait)
        for ranks, group in alike.items():
            yield self._never_answer(ranks, group, end)
        for ranks, unanswered in self._unanswered.items():
            yield self._counted_without(ranks, unanswered)

    def _never_answer(self, ranks: tuple[int, ...], group: list[Wait], end: End) -> Finding:
        seen = [wait for wait in group if wait.blind is None]
        first = seen[0] if seen else group[0]
        certain, doubt = certainty(end, seen if len(seen) > 1 else group)
        shown = [*evidence(first), *(event for wait in group[1:3] for event in wait.chain[:1])]
        return Finding(
            of=MISSING_RANKS,
            certainty=certain,
            facts=NeverAnswered(first=waiting(self.history, first), answered=tuple(sorted(self.history.answered))),
            since_seq=first.since_seq,
            requests=tuple(dict.fromkeys(wait.request for wait in group)),
            jobs=tuple(wait.number for wait in group if wait.what == "job"),
            blocks=listed(tuple(part for wait in group for part in wait.blocks)),
            ranks=ranks,
            lead_seq=first.since_seq,
            doubt=doubt,
            chain=tuple(shown),
            loads=tuple(wait.number for wait in group if wait.what == "load"),
        )

    def _counted_without(self, ranks: tuple[int, ...], unanswered: Sample[Unanswered]) -> Finding:
        first = unanswered.kept[0][0]
        answered_other = any(rank in self.history.answered for rank in ranks)
        certain, doubt = self._certainty(ranks, unanswered.number, answered_other=answered_other)
        return Finding(
            of=MISSING_RANKS,
            certainty=certain,
            facts=CountedWithout(load=first.load, times=unanswered.number, answered_other=answered_other),
            since_seq=first.seq,
            requests=tuple(dict.fromkeys(request for _, request in unanswered.kept if request)),
            ranks=ranks,
            lead_seq=first.seq,
            doubt=doubt,
            chain=tuple(event for event, _ in unanswered.kept[:10]),
            loads=tuple(event.load for event, _ in unanswered.kept),
        )

    def _certainty(self, ranks: tuple[int, ...], times: int, *, answered_other: bool) -> tuple[Certainty, Doubt | None]:
        """Return how certain it is that the ranks did not answer loads that were counted, and if not, why."""
        if answered_other:
            return "suspected", AnsweredOther(ranks=ranks)
        lost = lost_answers(self.history)
        if lost is not None:
            return "undecidable", lost
        return ("proven", None) if times > 1 else ("suspected", OneLoadOnly())
