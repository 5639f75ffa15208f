"""`leak`: a store job holds GPU blocks, and nothing is going on that would ever give them back.

A rank's put has failed, raised or ended, and its report did not reach the scheduler; or nothing was ever seen of the
rank; or every rank has reported and the blocks were not freed; or a broken rule put the job into quarantine. While a
call to the store is open it is a `stall` instead.
"""

from collections.abc import Iterable
from typing import ClassVar

from ledger import events as ev
from ledger import words
from ledger.blocks import count
from ledger.trail import End
from ledger.verdicts import Finding, Verdict, listed
from ledger.verdicts._waits import Wait, blocked_requests, certainty, describe, evidence, never_answered, waits


class Leak(Verdict):
    """Jobs that nobody will end."""

    kinds: ClassVar[tuple[str, ...]] = ("leak",)

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each set of missing ranks, the oldest job in front."""
        opened = waits(self.trail, end)
        systematic = never_answered(self.trail, opened)
        called = {rank for wait in opened for rank in wait.ranks if wait.doing("in_call")}
        alike: dict[tuple[bool, tuple[int, ...]], list[Wait]] = {}
        for wait in opened:
            if wait.what != "job" or wait.doing("in_call") or wait in systematic:
                continue
            if wait.doing("silent") and called & set(wait.ranks):
                continue  # it queues behind a call that has not returned, and the stall names it
            if wait.quarantined or wait.overdue:
                alike.setdefault((wait.quarantined, wait.ranks), []).append(wait)
        for group in alike.values():
            yield self._leak(group, end)

    def _leak(self, group: list[Wait], end: End) -> Finding:
        first = group[0]
        certain, doubt = ("proven", "") if first.quarantined else certainty(end, [first])
        told = [describe(view, f"job {first.number}") for view in first.missing]
        held = sum(count(wait.blocks) for wait in group)
        who = f"store job {first.number}" + (
            f" and {words.plural(len(group) - 1, 'more job')}" if len(group) > 1 else ""
        )
        if first.quarantined:
            why = "is quarantined after a broken rule: its blocks stay pinned for good"
        elif first.missing:
            why = f"never settled: {words.ranks(first.ranks)} did not report for {words.span(first.open_ns)}"
        else:
            why = f"never freed its blocks, although every rank has reported; open for {words.span(first.open_ns)}"
            told = ["the scheduler: it settled the job and stopped before freeing"]
        ended = [view.last for view in first.doing("ended") if isinstance(view.last, ev.TransferFinished)]
        failed = [last for last in ended if last.outcome != "ok"]
        shown = evidence(first)
        violated = [event for event in first.chain if isinstance(event, ev.InvariantViolated)]
        if first.quarantined:
            told = [f"broken rule {event.rule}: {event.detail}" for event in violated] or ["a broken rule"]
        lead = min([event.seq for event in (failed or ended or violated)], default=first.since_seq)
        blocked = [name for name in blocked_requests(self.trail) if name != first.request]
        told += [f"waiting for blocks behind it: {words.listed(blocked)}"] if blocked else []
        return Finding(
            kind="leak",
            certainty=certain,
            title=(
                f"{who} of {words.request(first.request, first.generation)} {why}; {words.plural(held, 'block')} held"
            ),
            since_seq=first.since_seq,
            requests=(*dict.fromkeys(wait.request for wait in group), *blocked),
            jobs=tuple(wait.number for wait in group),
            blocks=listed(tuple(part for wait in group for part in wait.blocks)),
            ranks=first.ranks,
            code=next((each.code for last in failed for each in last.failures), None),
            culprit="; ".join(told),
            advice=self._advice(first, bool(failed)),
            lead_seq=lead,
            doubt=doubt,
            chain=tuple(shown),
        )

    @staticmethod
    def _advice(first: Wait, failed: bool) -> str:
        if first.quarantined:
            return "Restart the engine when it can be spared, to get the blocks back; see the broken rule above."
        if not first.missing:
            return (
                "Look at the engine's log at its last step: it stopped between settling the job and freeing its blocks."
            )
        where = f"the worker log of {words.ranks(first.ranks)}"
        if failed:
            return (
                f"Look at {where} at that time for the exception; only a restart of the engine gives the blocks back."
            )
        return f"Look at {where}; only a restart of the engine gives the blocks back."
