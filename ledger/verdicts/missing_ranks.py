"""`missing_ranks`: the same ranks do not answer, every time.

One job that misses a rank is a `leak` or a `stall`, an accident. Two or more that miss the same ranks, when those ranks
have never answered anything in the whole log, are a system that was set up wrong: reports of these ranks do not reach
the scheduler, or it waits for ranks that do not exist. Where events of the scheduler are lost the ranks may have
answered there, and the jobs stay a `leak` or a `stall`. So do those of a rank whose call was seen to fail: it runs.
"""

from collections.abc import Iterable
from typing import ClassVar, TypeAlias

from ledger import events as ev
from ledger import words
from ledger.blocks import from_ranges
from ledger.verdicts.base import Certainty, Finding, Kind, Role, Told, Verdict, listed
from ledger.verdicts.history import End, Trail
from ledger.verdicts.shared.sample import Alike
from ledger.verdicts.shared.waits import Wait, certainty, describe, evidence, lost_answers, never_answered, waits

Unanswered: TypeAlias = tuple[ev.LoadSettled, str]
"""A load that was counted as finished although ranks had not answered, and its request, empty if that is not known."""

MISSING_RANKS = Kind("missing_ranks", Role.CAUSE | Role.LASTS | Role.HANGS)


class MissingRanks(Verdict):
    """Ranks that never answer."""

    kinds: ClassVar[tuple[Kind, ...]] = (MISSING_RANKS,)

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._unanswered: dict[tuple[int, ...], Alike[Unanswered]] = {}

    def on_load_settled(self, event: ev.LoadSettled) -> None:
        """Note a load that vLLM counted as finished while ranks had not answered."""
        if not event.missing or event.outcome == "cancelled":
            return
        planned = self.trail.loads[event.load][:1]
        request = planned[0].request if planned and isinstance(planned[0], ev.LoadPlanned) else ""
        self._unanswered.setdefault(tuple(from_ranges(event.missing)), Alike()).add((event, request))

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each set of ranks."""
        opened = waits(self.trail, end)
        alike: dict[tuple[int, ...], list[Wait]] = {}
        for wait in never_answered(self.trail, opened):
            alike.setdefault(wait.ranks, []).append(wait)
        for ranks, group in alike.items():
            yield self._never_answer(ranks, group, end)
        for ranks, unanswered in self._unanswered.items():
            yield self._counted_without(ranks, unanswered)

    def _never_answer(self, ranks: tuple[int, ...], group: list[Wait], end: End) -> Finding:
        seen = [wait for wait in group if not wait.blind]
        first = seen[0] if seen else group[0]
        certain, doubt = certainty(end, seen if len(seen) > 1 else group)
        jobs = [wait.number for wait in group if wait.what == "job"]
        loads = [wait.number for wait in group if wait.what == "load"]
        what = " and ".join(
            part
            for part in (
                words.plural(len(jobs), "store job") if jobs else "",
                words.plural(len(loads), "load") if loads else "",
            )
            if part
        )
        verb = "waits" if len(group) == 1 else "wait"
        others = sorted(self.trail.answered)
        shown = [*evidence(first), *(event for wait in group[1:3] for event in wait.chain[:1])]
        return Finding(
            of=MISSING_RANKS,
            certainty=certain,
            since_seq=first.since_seq,
            requests=tuple(dict.fromkeys(wait.request for wait in group)),
            jobs=tuple(jobs),
            blocks=listed(tuple(part for wait in group for part in wait.blocks)),
            ranks=ranks,
            lead_seq=first.since_seq,
            chain=tuple(shown),
            loads=tuple(loads),
            facts=Told(
                title=f"no answer of {words.ranks(ranks)} is in this log: {what} {verb} for the same ranks",
                culprit=(
                    f"systematic: {words.ranks(others) + ' answered' if others else 'no rank answered anything'}; "
                    f"{describe(first.missing[0], first.name)}"
                ),
                advice=(
                    "Compare the ranks that the scheduler expects with those that run, and see whether every worker runs "
                    "the same connector and sends its reports: this is no accident of one transfer."
                ),
                doubt=doubt,
                inferred="" if doubt else "why: the ranks may not run, not report, or not exist",
            ),
        )

    def _counted_without(self, ranks: tuple[int, ...], unanswered: Alike[Unanswered]) -> Finding:
        first, count = unanswered.kept[0][0], unanswered.number
        names, lost = words.ranks(ranks), lost_answers(self.trail)
        more = f" and {words.plural(count - 1, 'more load')}" if count > 1 else ""
        often = "once" if count == 1 else f"{count:,} times"
        certain: Certainty = "suspected"
        if any(rank in self.trail.answered for rank in ranks):
            seen = f"{names} answered other work"
            doubt = f"{seen}, so the answer may only have been late"
        else:
            seen = f"no answer of {names} is in this log"
            doubt = "it is one load only, so the answer may only have been late"
            if lost:
                certain, doubt = "undecidable", lost
            elif count > 1:
                certain, doubt, often = "proven", "", "systematic"
        return Finding(
            of=MISSING_RANKS,
            certainty=certain,
            since_seq=first.seq,
            requests=tuple(dict.fromkeys(request for _, request in unanswered.kept if request)),
            ranks=ranks,
            lead_seq=first.seq,
            chain=tuple(event for event, _ in unanswered.kept[:10]),
            loads=tuple(event.load for event, _ in unanswered.kept),
            facts=Told(
                title=f"load {first.load}{more} counted as finished although {names} had not answered",
                culprit=f"{often}: {seen}",
                advice="Its blocks may be written after they were given away; look at the worker logs of these ranks.",
                doubt=doubt,
            ),
        )
