"""`missing_ranks`: the same ranks do not answer, every time.

One job that misses a rank is a `leak` or a `stall`, an accident. Two or more that miss the same ranks, when those ranks
have never answered anything in the whole log, are a system that was set up wrong: reports of these ranks do not reach
the scheduler, or it waits for ranks that do not exist.
"""

from collections.abc import Iterable
from typing import ClassVar

from ledger import events as ev
from ledger import words
from ledger.blocks import from_ranges
from ledger.trail import End, Trail
from ledger.verdicts import Finding, Verdict, listed
from ledger.verdicts._waits import Wait, certainty, describe, evidence, never_answered, waits

KEPT_LOADS = 100
"""Loads that vLLM counted as finished without an answer of every rank, and that are kept for the report."""


class MissingRanks(Verdict):
    """Ranks that never answer."""

    kinds: ClassVar[tuple[str, ...]] = ("missing_ranks",)

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._unanswered: dict[tuple[int, ...], list[tuple[ev.LoadSettled, str]]] = {}

    def on_load_settled(self, event: ev.LoadSettled) -> None:
        """Note a load that vLLM counted as finished while ranks had not answered."""
        if not event.missing or event.outcome == "cancelled":
            return
        planned = self.trail.loads[event.load][:1]
        request = planned[0].request if planned and isinstance(planned[0], ev.LoadPlanned) else ""
        known = self._unanswered.setdefault(tuple(from_ranges(event.missing)), [])
        if len(known) < KEPT_LOADS:
            known.append((event, request))

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each set of ranks."""
        opened = waits(self.trail, end)
        alike: dict[tuple[int, ...], list[Wait]] = {}
        for wait in never_answered(self.trail, opened):
            alike.setdefault(wait.ranks, []).append(wait)
        for ranks, group in alike.items():
            yield self._never_answer(ranks, group, end)
        for ranks, settled in self._unanswered.items():
            yield self._counted_without(ranks, settled)

    def _never_answer(self, ranks: tuple[int, ...], group: list[Wait], end: End) -> Finding:
        first = group[0]
        certain, doubt = certainty(end, group)
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
            kind="missing_ranks",
            certainty=certain,
            title=f"no answer of {words.ranks(ranks)} is in this log: {what} {verb} for the same ranks",
            since_seq=first.since_seq,
            requests=tuple(dict.fromkeys(wait.request for wait in group)),
            jobs=tuple(jobs),
            blocks=listed(tuple(part for wait in group for part in wait.blocks)),
            ranks=ranks,
            culprit=(
                f"systematic: {words.ranks(others) + ' answered' if others else 'no rank answered anything'}; "
                f"{describe(first.missing[0], first.name)}"
            ),
            advice=(
                "Compare the ranks that the scheduler expects with those that run, and see whether every worker runs "
                "the same connector and sends its reports: this is no accident of one transfer."
            ),
            lead_seq=first.since_seq,
            doubt=doubt,
            chain=tuple(shown),
            loads=tuple(loads),
            inferred="" if doubt else "why: the ranks may not run, not report, or not exist",
        )

    def _counted_without(self, ranks: tuple[int, ...], settled: list[tuple[ev.LoadSettled, str]]) -> Finding:
        first = settled[0][0]
        never = not any(rank in self.trail.answered for rank in ranks)
        systematic = never and len(settled) > 1
        more = f" and {words.plural(len(settled) - 1, 'more load')}" if len(settled) > 1 else ""
        gone = "no answer of them is in this log" if never else "they answer other loads"
        return Finding(
            kind="missing_ranks",
            certainty="proven" if systematic else "suspected",
            title=f"load {first.load}{more} counted as finished although {words.ranks(ranks)} had not answered",
            since_seq=first.seq,
            requests=tuple(dict.fromkeys(request for _, request in settled if request)),
            ranks=ranks,
            culprit=f"{'systematic' if systematic else 'once'}: {words.ranks(ranks)}; {gone}",
            advice="Its blocks may be written after they were given away; look at the worker logs of these ranks.",
            lead_seq=first.seq,
            doubt="" if systematic else "these ranks answer other loads, so the answer may only have been late",
            chain=tuple(event for event, _ in settled[:10]),
            loads=tuple(event.load for event, _ in settled),
        )
