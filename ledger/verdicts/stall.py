"""`stall`: something waits for an answer that does not come, and the wait holds a request or blocks.

    a load      its request waits for remote KV until every rank has answered
    a recv      its request waits for a prefill engine
    a job       a rank called the store, and the call has not returned; the job's blocks stay pinned meanwhile
    nothing     requests wait, nothing is open and nothing runs: the scheduler itself does not go on

A job that waits although no call is open is a `leak`. Work that is open for less than `stall_suspect_s` is in flight
and no finding.
"""

from collections.abc import Iterable
from typing import ClassVar

from ledger import words
from ledger.trail import End
from ledger.verdicts import Finding, Verdict, listed
from ledger.verdicts._ends import is_hard
from ledger.verdicts._waits import (
    STALL_SUSPECT_S,
    Wait,
    blocked_requests,
    certainty,
    describe,
    evidence,
    never_answered,
    waits,
)

OTHER_LOG = (
    "Replay the prefill engine's log together with this one: it shows whether it was asked, and whether it sent."
)


class Stall(Verdict):
    """Loads, recvs and jobs that wait for a rank or a peer, and an engine that waits for nothing."""

    kinds: ClassVar[tuple[str, ...]] = ("stall",)

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each set of missing ranks, the oldest wait in front."""
        opened = waits(self.trail, end)
        alike: dict[tuple[str, tuple[int, ...]], list[Wait]] = {}
        systematic = never_answered(self.trail, opened)
        for wait in opened:
            waiting = wait.what in ("load", "recv") or (wait.what == "job" and wait.doing("in_call"))
            if wait.overdue and waiting and wait not in systematic:
                alike.setdefault((wait.what, wait.ranks), []).append(wait)
        for group in alike.values():
            yield self._waiting(group, opened, end)
        if not opened:
            yield from self._scheduler(end)

    def _waiting(self, group: list[Wait], opened: list[Wait], end: End) -> Finding:
        first = group[0]
        certain, doubt = certainty(end, [first])
        behind = [
            wait.number
            for wait in opened
            if wait.what == "job" and wait not in group and set(wait.ranks) & set(first.ranks)
        ]
        holding = [*dict.fromkeys(wait.request for wait in group)]
        blocked = [name for name in blocked_requests(self.trail) if name not in holding]
        told = self._told(first)
        if behind and first.doing("in_call"):
            told.append(f"jobs behind the same call: {words.listed(behind)}")
        told += [self._held(opened)] if first.what == "job" else []
        calls = [view.last.seq for view in first.doing("in_call", "ended") if view.last is not None]
        return Finding(
            kind="stall",
            certainty=certain,
            title=self._title(group),
            since_seq=first.since_seq,
            requests=(*holding, *blocked),
            suffering=tuple(blocked),
            loads=tuple(wait.number for wait in group if wait.what == "load"),
            jobs=(*(wait.number for wait in group if wait.what == "job"), *behind),
            blocks=listed(tuple(part for wait in group for part in wait.blocks)),
            ranks=first.ranks,
            culprit="; ".join(told),
            advice=self._advice(first, end),
            other_log=OTHER_LOG if first.what == "recv" else "",
            also=f"The blocks of {first.name} come back only with the answer, or with a restart."
            if end.how == "closed"
            else "",
            lead_seq=min(calls, default=first.since_seq),
            doubt=doubt,
            shown=self._shown(first, end) if doubt else "",
            chain=tuple(evidence(first)),
            facts={"transfers": [wait.transfer for wait in group if wait.transfer]},
        )

    @staticmethod
    def _title(group: list[Wait]) -> str:
        first = group[0]
        request = words.request(first.request, first.generation)
        more = f" and {words.plural(len(group) - 1, 'more ' + first.what)}" if len(group) > 1 else ""
        if first.what == "job":
            title = f"{first.name}{more} of {request} has been open for {words.span(first.open_ns)}"
        else:
            title = f"{request} waits for remote KV: {first.name}{more} has been open for {words.span(first.open_ns)}"
        if not first.begun:
            return f"{title}, and that it was given to the workers is not in this log"
        if not first.missing:
            return f"{title}, although everyone has answered"
        return f"{title}; no answer of {words.ranks(first.ranks)} is in this log"

    @staticmethod
    def _shown(first: Wait, end: End) -> str:
        return f"{first.name} is open since event {first.since_seq}, and still was at event {end.last.seq}"

    def _held(self, opened: list[Wait]) -> str:
        jobs = [wait for wait in opened if wait.what == "job"]
        pinned = self.state.pinned_blocks()
        pool = f" of {self.trail.opened.num_blocks - 1:,}" if self.trail.opened and self.trail.opened.num_blocks else ""
        return f"{words.plural(len(jobs), 'open job pins', 'open jobs pin')} {pinned:,}{pool} blocks"

    @staticmethod
    def _told(first: Wait) -> list[str]:
        if not first.begun:
            return ["the scheduler planned the load and did not give it to the workers"]
        if not first.missing:
            return ["the scheduler, which did not end the wait"]
        return [describe(view, first.name.removeprefix("store ")) for view in first.missing]

    @staticmethod
    def _advice(first: Wait, end: End) -> str:
        ranks = words.ranks(first.ranks) if first.ranks else ""
        if not first.begun:
            return (
                f"Look at the engine's log at event {first.since_seq}: the load was planned in a step that did not run."
            )
        if first.what == "recv":
            return "Look at the bootstrap server and at the network between the two engines."
        if first.doing("in_call"):
            lives = "If the engine still runs, take" if is_hard(end) else "Take"
            back = "" if is_hard(end) else " The blocks come back only with the answer, or with a restart."
            return (
                f"{lives} a stack of the worker of {ranks} (py-spy dump). Then look at the store's master and at the "
                f"hosts of its segments: a call that does not return often waits for a peer that is gone.{back}"
            )
        return f"Look at the worker log of {ranks} at that time: its answer did not reach the scheduler."

    def _scheduler(self, end: End) -> Iterable[Finding]:
        book = self.state.book
        if not book.requests or any(record.state in ("running", "loading") for record in book.requests.values()):
            return
        suspect_ns = int(self.trail.setting("stall_suspect_s", STALL_SUSPECT_S) * 1e9)
        chains = {name: chain for name in book.requests if (chain := self.trail.requests.get(name))}
        newest = {name: chain[-1] for name, chain in chains.items()}
        # As long as one of them moved a moment ago, the scheduler lives.
        if not newest or any(end.now_mono_ns - event.mono_ns < suspect_ns for event in newest.values()):
            return
        oldest = min(newest, key=lambda name: newest[name].seq)
        still_ns = end.now_mono_ns - max(event.mono_ns for event in newest.values())
        yield Finding(
            kind="stall",
            certainty="suspected",
            title=(
                f"{words.plural(len(newest), 'request waits', 'requests wait')}, nothing runs, and no job, load, "
                "transfer "
                f"or pin is open: the scheduler itself has not gone on for {words.span(still_ns)}"
            ),
            since_seq=newest[oldest].seq,
            requests=tuple(newest),
            suffering=tuple(newest),
            culprit=(
                "the engine's scheduler, or a lookup that nobody answers; the connector holds nothing else that it "
                "could wait for"
            ),
            advice="Take a stack of the engine process (py-spy dump): is it paused, asleep, or out of blocks?",
            lead_seq=newest[oldest].seq,
            doubt="a log of the connector does not show what else the scheduler waits for; a stack of the engine would",
            chain=tuple(chains[oldest][-6:]),
        )
