"""What is open at the end of a log: who has not answered, what each rank was last doing, and whether it is overdue.

Stall, leak and missing ranks are three readings of the same facts, so the facts are gathered here once. Words:

    in_call     the rank called the store or a peer, and the call has not returned
    ended       the rank's last call returned or raised, and the rank's report did not come
    silent      nothing was seen of the rank for this work
    unknown     what the rank did is not recorded (evidence is off, or a gap hides it)
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from ledger import events as ev
from ledger.blocks import Blocks
from ledger.state.open_work import OpenWork, open_work
from ledger.state.records import Job, Recv
from ledger.verdicts.base import Certainty, Doubt
from ledger.verdicts.history import End, EventList, History, RequestEnd
from ledger.verdicts.shared.doubts import (
    AnswersLost,
    CodeDisagrees,
    GivesUpByItself,
    LogGoesOn,
    LogIsLive,
    LogIsTorn,
    SchedulerLost,
    WorkersLost,
)

STALL_SUSPECT_S = 60.0
"""The engine's own default of `stall_suspect_s`: what is open for longer is no longer in flight."""

REPORT_STEPS = 16
"""Steps within which a rank's report must have come once its call has ended. Reports travel with the next step;
pipelines and asynchronous scheduling add a few."""

BLOCKED_NS = 1_000_000_000
"""A request that waits to run for less than this, in nanoseconds, has only just come."""

KEPT_BLOCKED = 3
"""Of the requests that wait to run, those whose last event is shown."""

REPORT_NS = 1_000_000_000
"""And time, in nanoseconds: steps of an idle engine take microseconds."""

WorkName: TypeAlias = Literal["job", "load", "send", "recv"]
Doing: TypeAlias = Literal["in_call", "ended", "silent", "unknown"]


class RankView(msgspec.Struct, frozen=True):
    """WorkName a rank that has not answered was last seen doing for some work.

    Attributes:
        last: the event that says so, if there is one.
    """

    rank: int
    doing: Doing
    last: ev.TransferStarted | ev.TransferFinished | None = None

    @property
    def failed(self) -> bool:
        """Whether its last call did not go well."""
        return self.doing == "ended" and isinstance(self.last, ev.TransferFinished) and self.last.outcome != "ok"


class Wait(msgspec.Struct, frozen=True):
    """A job, load, send or recv that is open at the end of the log.

    Attributes:
        number: the id of the job or load; -1 for a transfer.
        transfer: the id of the transfer; empty for a job or load.
        open_ns: for how long, in nanoseconds.
        deadline_ns: when the engine gives it up by itself, in nanoseconds from its beginning; 0 for never.
        missing: what is known of each rank that has not answered.
        answered: ranks that have.
        begun: whether the workers were told of it.
        failed: whether a failure of it was reported.
        overdue: whether it waited for longer than work in flight does.
        blind: why the log cannot show what happened here; None if it can.
    """

    what: WorkName
    number: int
    transfer: str
    request: str
    generation: int
    since_seq: int
    open_ns: int
    deadline_ns: int
    blocks: Blocks
    missing: tuple[RankView, ...]
    answered: tuple[int, ...]
    begun: bool
    failed: bool
    quarantined: bool
    overdue: bool
    blind: Doubt | None
    chain: EventList

    @property
    def name(self) -> str:
        """WorkName it is called: `store job 17`, `load 3`, `recv xfer-1`."""
        if self.what in ("send", "recv"):
            return f"{self.what} {self.transfer}"
        return f"store job {self.number}" if self.what == "job" else f"load {self.number}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have not answered."""
        return tuple(view.rank for view in self.missing)

    @property
    def in_time(self) -> bool:
        """Whether the engine itself will still give it up in time."""
        return self.open_ns < self.deadline_ns

    @property
    def sort(self) -> tuple[Hashable, ...]:
        """WorkName it has in common with the waits that one finding tells together with it."""
        return self.what, self.begun, self.quarantined, self.ranks, self.in_time, self.blind is not None

    def doing(self, *states: Doing) -> list[RankView]:
        """Return the missing ranks that were last seen in one of `states`."""
        return [view for view in self.missing if view.doing in states]


class RequestEnded(msgspec.Struct, frozen=True):
    """How a request ended while its work was open.

    Attributes:
        after_ns: how long after the work had begun, in nanoseconds; None if that is not known.
    """

    event: RequestEnd
    after_ns: int | None


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """WorkName the facts of a finding hold of a job, load, send or recv that is open.

    Attributes:
        number: the id of the job or load; -1 for a transfer.
        transfer: the id of the transfer; empty for a job or load.
        since_seq: the event with which it began.
        open_ns: for how long, in nanoseconds.
        begun: whether it was given to the workers.
        missing: what is known of each rank that has not answered.
        ended: how its request ended meanwhile; None if it did not.
    """

    what: WorkName
    number: int
    transfer: str
    request: str
    generation: int
    since_seq: int
    open_ns: int
    begun: bool
    quarantined: bool
    missing: tuple[RankView, ...]
    ended: RequestEnded | None

    def doing(self, *states: Doing) -> list[RankView]:
        """Return the missing ranks that were last seen in one of `states`."""
        return [view for view in self.missing if view.doing in states]


def waits(history: History, end: End) -> list[Wait]:
    """Return all that is open at the end, oldest first."""
    suspect_ns = int(history.setting("stall_suspect_s", STALL_SUSPECT_S) * 1e9)
    found = [_wait(history, end, work, suspect_ns) for work in open_work(history.state.book)]
    return sorted(found, key=lambda wait: wait.since_seq)


def certainty(end: End, waits: Iterable[Wait]) -> tuple[Certainty, Doubt | None]:
    """Return how certain it is that this work never ends, and if it is not proven, why not."""
    waits = list(waits)
    blind = next((wait.blind for wait in waits if wait.blind is not None), None)
    if blind is not None:
        return "undecidable", blind
    if end.disagrees_after is not None:
        return "undecidable", CodeDisagrees(seq=end.disagrees_after)
    in_time = next((wait for wait in waits if wait.in_time), None)
    if in_time is not None:
        return "suspected", GivesUpByItself(
            what=in_time.what, transfer=in_time.transfer, deadline_ns=in_time.deadline_ns
        )
    if end.how == "closed":
        return "proven", None
    return "suspected", LogIsLive() if end.how == "live" else LogGoesOn() if end.how == "as_of" else LogIsTorn()


def evidence(wait: Wait) -> list[ev.Event]:
    """Return the events that show the wait: its beginning, the missing ranks' last calls, answers, suspicions."""
    last = {view.last.seq for view in wait.missing if view.last is not None}
    shown = [
        event
        for event in wait.chain
        if event.seq in last or not isinstance(event, ev.TransferStarted | ev.TransferFinished)
    ]
    return shown if len(shown) <= 12 else [*shown[:6], *shown[-6:]]


class Blocked(msgspec.Struct, frozen=True):
    """A request that waits to run and holds nothing.

    Attributes:
        waited_ns: for how long, in nanoseconds, since it was queued or preempted.
        last: its last event.
    """

    waited_ns: int
    last: ev.Event


def blocked_requests(history: History, end: End) -> dict[str, Blocked]:
    """Return the requests that wait to run and hold nothing, by name.

    They may be stuck behind work that holds the blocks. One that has only just come is not among them.
    """
    blocked: dict[str, Blocked] = {}
    for name, record in history.state.book.requests.items():
        chain = history.requests.get(name)
        if record.state in ("queued", "preempted") and chain:
            since = next((event.mono_ns for event in chain if event.seq == record.since_seq), None)
            since = history.times.at(record.since_seq) if since is None else since
            waited_ns = 0 if since is None else end.now_mono_ns - since
            if waited_ns >= BLOCKED_NS:
                blocked[name] = Blocked(waited_ns, chain[-1])
    return blocked


def longest_wait_ns(blocked: dict[str, Blocked]) -> int:
    """Return for how long the first of these requests has waited to run, in nanoseconds; 0 if there are none."""
    return max((each.waited_ns for each in blocked.values()), default=0)


def last_events(blocked: dict[str, Blocked]) -> list[ev.Event]:
    """Return the last events of the first few requests that wait to run."""
    return [each.last for each in blocked.values()][:KEPT_BLOCKED]


def with_events(chain: Sequence[ev.Event], more: Iterable[ev.Event]) -> tuple[ev.Event, ...]:
    """Return events of a log in its order, each once."""
    found = {event.seq: event for event in (*chain, *more)}
    return tuple(found[seq] for seq in sorted(found))


def request_end(history: History, wait: Wait) -> RequestEnded | None:
    """Return how the request of a job, load or recv ended while that was open; None if it did not.

    An id may have come back since.
    """
    event = history.request_end_while_open.get(
        ("transfer", wait.transfer) if wait.transfer else (wait.what, wait.number)
    )
    if event is None:
        return None
    return RequestEnded(event, event.mono_ns - wait.chain[0].mono_ns if wait.chain else None)


def waiting(history: History, wait: Wait) -> Waiting:
    """Return what the wording needs of a wait."""
    return Waiting(
        what=wait.what,
        number=wait.number,
        transfer=wait.transfer,
        request=wait.request,
        generation=wait.generation,
        since_seq=wait.since_seq,
        open_ns=wait.open_ns,
        begun=wait.begun,
        quarantined=wait.quarantined,
        missing=wait.missing,
        ended=request_end(history, wait),
    )


def never_answered(history: History, opened: Sequence[Wait]) -> list[Wait]:
    """Return the overdue waits for ranks that answered nothing in the whole log, if two or more miss the same ranks.

    Ranks that are inside a call, or whose call failed, are left out: that call, and no system, is why they do not
    answer. And there are none if the log has lost events among which answers may be.
    """
    if lost_answers(history) is not None:
        return []
    called = {view.rank for wait in opened for view in wait.missing if view.doing == "in_call" or view.failed}
    alike: dict[tuple[int, ...], list[Wait]] = {}
    for wait in opened:
        ranks = wait.ranks
        if wait.what not in ("job", "load") or not wait.overdue or not ranks:
            continue
        if not any(rank in history.answered or rank in called for rank in ranks):
            alike.setdefault(ranks, []).append(wait)
    return [wait for group in alike.values() if len(group) > 1 for wait in group]


def lost_answers(history: History) -> AnswersLost | None:
    """Return why an answer may have reached the scheduler that is not in this log; None if none can have."""
    lost = history.lost_since(0)
    return AnswersLost(gap=lost) if lost is not None else None


def report_is_lost(history: History, end: End, view: RankView) -> bool:
    """Return whether a call failed so long ago, in steps and in time, that the rank's report would have come.

    A call that went well may be followed by another one for the same work, so only a failed one counts.
    """
    last = view.last
    if last is None or not view.failed:
        return False
    return end.step - last.step >= REPORT_STEPS and end.now_mono_ns - _heard_ns(history, end, last) >= REPORT_NS


def _heard_ns(history: History, end: End, event: ev.Event) -> int:
    """Return when an event had reached the scheduler, by the scheduler's monotonic clock, in nanoseconds."""
    if event.source == ev.SCHEDULER:
        return event.mono_ns
    heard_ns = history.times.at(event.seq)
    return end.now_mono_ns if heard_ns is None else heard_ns


def _is_overtaken(history: History, end: End, number: int, chain: EventList, view: RankView) -> bool:
    """Return whether the rank has long since reported a job that was registered later.

    A rank works its jobs off in the order in which they come, so it owes no report of an earlier one any more, unless
    it is inside a call for it.
    """
    later = history.reported.get(view.rank)
    if later is None or later.job <= number or not chain or view.doing not in ("ended", "silent"):
        return False
    since = view.last if view.last is not None else chain[0]
    return later.step - since.step >= REPORT_STEPS and later.mono_ns - _heard_ns(history, end, since) >= REPORT_NS


def _wait(history: History, end: End, work: OpenWork, suspect_ns: int) -> Wait:
    chain = history.events_of(work)
    open_ns = max(end.now_mono_ns - work.since_mono_ns, 0)
    missing = tuple(_view(history, chain, rank, work.since_seq) for rank in work.waiting)
    is_late = work.suspected or open_ns >= suspect_ns
    return Wait(
        what=work.kind,
        number=-1 if work.is_transfer else int(work.id),
        transfer=str(work.id) if work.is_transfer else "",
        request=work.request,
        generation=work.generation,
        since_seq=work.since_seq,
        open_ns=open_ns,
        deadline_ns=work.timeout_ns,
        blocks=work.blocks,
        missing=missing,
        answered=work.answered,
        begun=work.begun,
        failed=work.failed,
        quarantined=work.quarantined,
        # Until the prompt is computed nothing is held for a send, so nothing is late.
        overdue=(work.kind != "send" or work.begun) and (is_late or _is_unheard(history, end, work, chain, missing)),
        blind=_blind(history, work.since_seq, work.waiting),
        chain=chain,
    )


def _is_unheard(history: History, end: End, work: OpenWork, chain: EventList, missing: Sequence[RankView]) -> bool:
    """Return whether a report of a rank or peer would have come by now, however short the work has been open.

    A failed get may be tried again after a pause, so for a load only time tells; so it is for a send.
    """
    lost = any(report_is_lost(history, end, view) for view in missing)
    match work.record:
        case Job():
            number = int(work.id)
            return lost or any(_is_overtaken(history, end, number, chain, view) for view in missing)
        case Recv(outcomes=outcomes):
            reported = any(outcome != "ok" for _, _, outcome in outcomes) and not work.failed
            return (reported or lost) and _settled_long_ago(history, end, chain)
        case _:
            return False


def _settled_long_ago(history: History, end: End, chain: Sequence[ev.Event]) -> bool:
    failures = [event for event in chain if getattr(event, "outcome", "ok") not in ("ok", "loaded")]
    return bool(failures) and (
        end.step - failures[-1].step >= REPORT_STEPS
        and end.now_mono_ns - _heard_ns(history, end, failures[-1]) >= REPORT_NS
    )


def _view(history: History, chain: Sequence[ev.Event], rank: int, since_seq: int) -> RankView:
    calls: dict[tuple[str, str], ev.TransferStarted] = {}
    ended: ev.TransferFinished | None = None
    for event in chain:
        if isinstance(event, ev.TransferStarted) and event.rank == rank:
            calls[event.transfer, event.peer] = event
        elif isinstance(event, ev.TransferFinished) and event.rank == rank:
            calls.pop((event.transfer, event.peer), None)
            ended = event
    if calls:
        return RankView(rank, "in_call", next(iter(calls.values())))
    if ended is not None:
        return RankView(rank, "ended", ended)
    hidden = not history.evidence_is_on() or any(
        gap.seq > since_seq and gap.origin in (f"rank {rank}", "workers") for gap in history.gaps
    )
    return RankView(rank, "unknown" if hidden else "silent")


def _blind(history: History, since_seq: int, missing: Sequence[int]) -> Doubt | None:
    origins = {f"rank {rank}" for rank in missing} | {"workers"}
    for gap in history.gaps:
        if gap.seq <= since_seq:
            continue
        if gap.origin == ev.SCHEDULER and not history.restored_after(gap.seq):
            return SchedulerLost(gap=gap)
        if gap.origin in origins:
            return WorkersLost(gap=gap, ranks=tuple(missing))
    return None
