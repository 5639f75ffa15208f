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

from ledger import events as ev
from ledger import words
from ledger.verdicts.base import Finding, Kind, Role, Told, Verdict, listed
from ledger.verdicts.history import End, Trail
from ledger.verdicts.shared.ends import DOWN, is_down, is_hard
from ledger.verdicts.shared.waits import (
    STALL_SUSPECT_S,
    Wait,
    blocked_requests,
    certainty,
    describe,
    ended_request,
    evidence,
    last_events,
    likewise,
    never_answered,
    waiting_behind,
    waits,
    with_events,
)

KEPT_IGNORED = 200

OTHER_LOG = (
    "Replay the prefill engine's log together with this one: it shows whether it was asked, and whether it sent."
)

STALL = Kind("stall", Role.SYMPTOM | Role.LASTS | Role.HANGS)


class Stall(Verdict):
    """Loads, recvs and jobs that wait for a rank or a peer, and an engine that waits for nothing."""

    kinds: ClassVar[tuple[Kind, ...]] = (STALL,)

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._ignored: dict[str, ev.ReportIgnored] = {}

    def on_report_ignored(self, event: ev.ReportIgnored) -> None:
        """Note an answer that was not taken; what it answered may stay open for ever."""
        if len(self._ignored) < KEPT_IGNORED:
            self._ignored[event.transfer or f"load {event.load}"] = event

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each sort of waits, the oldest in front."""
        opened = waits(self.trail, end)
        alike: dict[Hashable, list[Wait]] = {}
        systematic = never_answered(self.trail, opened)
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
        blocked = {name: each for name, each in blocked_requests(self.trail, end).items() if name not in holding}
        told = self._told(first)
        if behind and first.doing("in_call"):
            told.append(f"jobs behind the same call: {words.listed(behind)}")
        told += [self._held(opened)] if first.what == "job" else []
        calls = [view.last.seq for view in first.doing("in_call", "ended") if view.last is not None]
        return Finding(
            of=STALL,
            certainty=certain,
            since_seq=first.since_seq,
            requests=(*holding, *blocked),
            suffering=tuple(blocked),
            loads=tuple(wait.number for wait in group if wait.what == "load"),
            jobs=(*(wait.number for wait in group if wait.what == "job"), *behind),
            blocks=listed(tuple(part for wait in group for part in wait.blocks)),
            ranks=first.ranks,
            lead_seq=min(calls, default=first.since_seq),
            chain=with_events(
                evidence(first),
                [*self._ends_of(group), *last_events(blocked)],
            ),
            transfers=tuple(wait.transfer for wait in group if wait.transfer),
            facts=Told(
                title=self._title(first, doubtful=bool(doubt) and not first.blind)
                + likewise(len(group) - 1, first.what),
                culprit="; ".join(told),
                advice=self._advice(first, end),
                other_log=OTHER_LOG if first.what == "recv" else "",
                impact=(*self._impact(group), *waiting_behind(blocked)),
                doubt=doubt,
                shown=self._shown(first, end) if doubt else "",
            ),
        )

    def _ends_of(self, group: list[Wait]) -> list[ev.Event]:
        """Return how the requests ended whose waits go on, and the answers that came and were not taken."""
        ends = [ended[0] for wait in group if (ended := ended_request(self.trail, wait)) is not None]
        ignored = [event for wait in group if (event := self._ignored.get(wait.transfer or wait.name)) is not None]
        return [*ends[:4], *ignored[:4]]

    def _impact(self, group: list[Wait]) -> Iterable[str]:
        """Yield what became of the requests that waited."""
        if group[0].what == "job":
            return
        for wait in group[:3]:
            ended = ended_request(self.trail, wait)
            if ended is not None:
                yield f"request {wait.request} {ended[1]} without its KV"
            elif wait.request in self.state.book.requests:
                yield f"request {wait.request} hangs: it has waited for {words.span(wait.open_ns)}"
        if len(group) > 3:
            yield f"{words.plural(len(group) - 3, 'more request')} likewise"

    def _title(self, first: Wait, *, doubtful: bool) -> str:
        request, name = words.request(first.request, first.generation), first.name
        open_for = f"has been open for {words.span(first.open_ns)}"
        if first.what == "job":
            title = f"{name} of {request} {'may hang: it ' if doubtful else ''}{open_for}"
        elif (ended := ended_request(self.trail, first)) is not None:
            title = f"{name} of {request} {open_for}; the request {ended[1]}"
        else:
            title = f"{request} waits for remote KV: {name} {open_for}"
        if not first.begun:
            return f"{title}, and that it was given to the workers is not in this log"
        if not first.missing:
            return f"{title}, although everyone has answered"
        late = self._ignored.get(first.transfer or first.name)
        if late is not None and late.rank in first.ranks:
            return f"{title}; the answer of rank {late.rank} came late, at event {late.seq}, and was ignored"
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
            stack = f"a stack of the worker of {ranks} (py-spy dump)"
            store = (
                "see the store's master and the hosts of its segments: a call that hangs often waits for a peer that "
                "is gone."
            )
            if is_down(end):
                return f"{DOWN} If it happens again, take {stack} while the call hangs. Now {store}"
            if is_hard(end):
                return f"See first whether the engine still runs; if so, take {stack}. Then {store}"
            return f"Take {stack}. Then {store} The blocks come back only with the answer, or with a restart."
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
            of=STALL,
            certainty="suspected",
            since_seq=newest[oldest].seq,
            requests=tuple(newest),
            suffering=tuple(newest),
            lead_seq=newest[oldest].seq,
            chain=tuple(chains[oldest][-6:]),
            facts=Told(
                title=(
                    f"{words.plural(len(newest), 'request waits', 'requests wait')}, nothing runs, and no job, load, "
                    "transfer "
                    f"or pin is open: the scheduler itself has not gone on for {words.span(still_ns)}"
                ),
                impact=(
                    f"{words.plural(len(newest), 'request hangs', 'requests hang')}, for {words.span(still_ns)} by then",
                ),
                culprit=(
                    "the engine's scheduler, or a lookup that nobody answers; the connector holds nothing else that it "
                    "could wait for"
                ),
                advice=(
                    "If it happens again, take a stack of the engine process (py-spy dump) while it hangs: is it paused, "
                    "asleep, or out of blocks?"
                )
                if is_down(end)
                else "Take a stack of the engine process (py-spy dump): is it paused, asleep, or out of blocks?",
                doubt="a log of the connector does not show what else the scheduler waits for; a stack of the engine would",
            ),
        )
