"""`stall`: something waits for an answer that does not come, and the wait holds a request or blocks.

    a load      its request waits for remote KV until every rank has answered
    a recv      its request waits for a prefill engine
    a job       a rank called the store, and the call has not returned; the job's blocks stay pinned meanwhile
    nothing     requests wait, nothing is open and nothing runs: the scheduler itself does not go on

A job that waits although no call is open is a `leak`. Work that is open for less than `stall_suspect_s` is in flight
and no finding.
"""

from collections.abc import Hashable, Iterable
from typing import ClassVar

import msgspec

from ledger import events as ev
from ledger.verdicts.base import Doubt, Facts, Finding, Kind, Role, Verdict, listed
from ledger.verdicts.history import End, History
from ledger.verdicts.shared.waits import (
    STALL_SUSPECT_S,
    RequestEnded,
    Wait,
    Waiting,
    blocked_requests,
    certainty,
    evidence,
    last_events,
    longest_wait_ns,
    never_answered,
    request_end,
    waiting,
    waits,
    with_events,
)

KEPT_IGNORED = 200

KEPT_FATES = 3
"""Waiting requests of which the facts say what became of them."""

STALL = Kind("stall", Role.SYMPTOM | Role.LASTS | Role.HANGS)


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """What all open store jobs hold.

    Attributes:
        jobs: how many are open.
        blocks: how many blocks they pin.
        pool: how many blocks the engine has; 0 if the log does not say.
    """

    jobs: int
    blocks: int
    pool: int


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request whose load or recv is open.

    Attributes:
        ended: how it ended meanwhile; None if it still waits.
        open_ns: for how long it has waited, in nanoseconds.
    """

    request: str
    ended: RequestEnded | None
    open_ns: int


class NoAnswer(Facts, frozen=True, kw_only=True):
    """Loads, recvs or jobs that wait for an answer, all for the same ranks.

    Attributes:
        first: the oldest of them.
        waits: how many there are.
        late: the answer to the oldest that came too late and was ignored, if there was one.
        behind: jobs that are not among them and wait for the same ranks.
        pinned: what store jobs hold; None where no job waits.
        fates: what became of the first requests that waited for a load or recv.
        longest_wait_ns: for how long the first of the requests that suffer has waited to run, in nanoseconds.
    """

    first: Waiting
    waits: int
    late: ev.ReportIgnored | None
    behind: tuple[int, ...]
    pinned: Pinned | None
    fates: tuple[Fate, ...]
    longest_wait_ns: int


class NothingRuns(Facts, frozen=True, kw_only=True):
    """Requests wait, nothing is open and nothing runs.

    Attributes:
        still_ns: for how long nothing has moved, in nanoseconds.
    """

    still_ns: int


class SchedulerUnseen(Doubt, frozen=True, kw_only=True):
    """A log of the connector does not show what else the scheduler waits for."""


class Stall(Verdict):
    """Loads, recvs and jobs that wait for a rank or a peer, and an engine that waits for nothing."""

    kinds: ClassVar[tuple[Kind, ...]] = (STALL,)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._ignored: dict[str, ev.ReportIgnored] = {}

    def on_report_ignored(self, event: ev.ReportIgnored) -> None:
        """Note an answer that was not taken; what it answered may stay open for ever."""
        if len(self._ignored) < KEPT_IGNORED:
            self._ignored[event.transfer or f"load {event.load}"] = event

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each sort of waits, the oldest in front."""
        opened = waits(self.history, end)
        alike: dict[Hashable, list[Wait]] = {}
        systematic = never_answered(self.history, opened)
        for wait in opened:
            waiting = wait.what in ("load", "recv") or (wait.what == "job" and wait.doing("in_call"))
            if wait.overdue and waiting and wait not in systematic:
                alike.setdefault(wait.sort, []).append(wait)
        for group in alike.values():
            yield self._waiting(group, opened, end)
        if not opened:
            yield from self._scheduler(end)

    def _waiting(self, group: list[Wait], opened: list[Wait], end: End) -> Finding:
        first = group[0]
        certain, doubt = certainty(end, group)
        behind = [
            wait.number
            for wait in opened
            if wait.what == "job" and wait not in group and set(wait.ranks) & set(first.ranks)
        ]
        holding = [*dict.fromkeys(wait.request for wait in group)]
        blocked = {name: each for name, each in blocked_requests(self.history, end).items() if name not in holding}
        calls = [view.last.seq for view in first.doing("in_call", "ended") if view.last is not None]
        late = self._ignored.get(first.transfer or first.name)
        return Finding(
            of=STALL,
            certainty=certain,
            facts=NoAnswer(
                first=waiting(self.history, first),
                waits=len(group),
                late=late if late is not None and late.rank in first.ranks else None,
                behind=tuple(behind),
                pinned=self._pinned(opened) if first.what == "job" else None,
                fates=self._fates(group),
                longest_wait_ns=longest_wait_ns(blocked),
            ),
            since_seq=first.since_seq,
            requests=(*holding, *blocked),
            suffering=tuple(blocked),
            loads=tuple(wait.number for wait in group if wait.what == "load"),
            jobs=(*(wait.number for wait in group if wait.what == "job"), *behind),
            blocks=listed(tuple(part for wait in group for part in wait.blocks)),
            ranks=first.ranks,
            lead_seq=min(calls, default=first.since_seq),
            doubt=doubt,
            chain=with_events(
                evidence(first),
                [*self._ends_of(group), *last_events(blocked)],
            ),
            transfers=tuple(wait.transfer for wait in group if wait.transfer),
        )

    def _ends_of(self, group: list[Wait]) -> list[ev.Event]:
        """Return how the requests ended whose waits go on, and the answers that came and were not taken."""
        ends = [ended.event for wait in group if (ended := request_end(self.history, wait)) is not None]
        ignored = [event for wait in group if (event := self._ignored.get(wait.transfer or wait.name)) is not None]
        return [*ends[:4], *ignored[:4]]

    def _fates(self, group: list[Wait]) -> tuple[Fate, ...]:
        """Return what became of the first requests that waited; a job keeps none waiting."""
        if group[0].what == "job":
            return ()
        fates = [
            Fate(request=wait.request, ended=request_end(self.history, wait), open_ns=wait.open_ns)
            for wait in group[:KEPT_FATES]
        ]
        return tuple(fate for fate in fates if fate.ended is not None or fate.request in self.state.book.requests)

    def _pinned(self, opened: list[Wait]) -> Pinned:
        log = self.history.opened
        return Pinned(
            jobs=sum(wait.what == "job" for wait in opened),
            blocks=self.state.pinned_blocks(),
            pool=log.num_blocks - 1 if log is not None and log.num_blocks else 0,
        )

    def _scheduler(self, end: End) -> Iterable[Finding]:
        book = self.state.book
        if not book.requests or any(record.state in ("running", "loading") for record in book.requests.values()):
            return
        suspect_ns = int(self.history.setting("stall_suspect_s", STALL_SUSPECT_S) * 1e9)
        chains = {name: chain for name in book.requests if (chain := self.history.requests.get(name))}
        newest = {name: chain[-1] for name, chain in chains.items()}
        # As long as one of them moved a moment ago, the scheduler lives.
        if not newest or any(end.now_mono_ns - event.mono_ns < suspect_ns for event in newest.values()):
            return
        oldest = min(newest, key=lambda name: newest[name].seq)
        still_ns = end.now_mono_ns - max(event.mono_ns for event in newest.values())
        yield Finding(
            of=STALL,
            certainty="suspected",
            facts=NothingRuns(still_ns=still_ns),
            since_seq=newest[oldest].seq,
            requests=tuple(newest),
            suffering=tuple(newest),
            lead_seq=newest[oldest].seq,
            doubt=SchedulerUnseen(),
            chain=tuple(chains[oldest][-6:]),
        )
