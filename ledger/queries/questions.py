"""Questions asked backwards: why did a request end so, who used a block, what changed between two moments.

Each is answered from events and one fold; the answers are data and lines of text. This file reads no file and prints
nothing.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from ledger import events as ev
from ledger import words
from ledger.blocks import names
from ledger.replay.fold import Result
from ledger.state.apply import State
from ledger.verdicts.base import Finding

FAILURES = (
    ev.LoadFailed,
    ev.LoadRecovered,
    ev.RecvFailed,
    ev.RecvRecovered,
    ev.SendExpired,
    ev.RequestPreempted,
    ev.LookupDeferred,
    ev.LookupSuppressed,
    ev.InvariantViolated,
    ev.StallSuspected,
    ev.ReportIgnored,
    ev.JobSkipped,
)
"""What turns the life of a request: told in a short answer, where the rest is left out."""


# --- why --------------------------------------------------------------------------------------------------------------


class Why(msgspec.Struct, frozen=True):
    """What led to a request's end, or to where it stands.

    Attributes:
        answer: one sentence.
        because: what led there, the nearest cause first, as lines.
        turns: the events that turned its life, in order.
        findings: what the verdicts say of it.
    """

    request: str
    answer: str
    because: tuple[str, ...]
    turns: tuple[ev.AnyEvent, ...]
    findings: tuple[Finding, ...]


def why(request: str, events: Sequence[ev.AnyEvent], result: Result) -> Why | None:
    """Return why a request ended as it did; None if the log does not know it.

    Args:
        request: its id.
        events: the events that concern it, as `ledger.replay.select.Watch` collects them.
        result: the fold of its log.
    """
    if not events:
        return None
    findings = tuple(finding for finding in result.findings if request in finding.requests)
    ended = next(
        (event for event in reversed(events) if isinstance(event, ev.RequestFinished | ev.RequestAborted)), None
    )
    turns = tuple(event for event in events if isinstance(event, FAILURES) or _is_failure(event))
    record = result.state.book.requests.get(request)
    if ended is not None and record is None:
        after = words.between(events[0], ended)
        answer = f"{words.describe(ended)} at event {ended.seq}{f', {after} after it was first seen' if after else ''}"
    elif record is not None:
        before = words.between(events[-1], result.end.last) if result.end is not None else ""
        last = f"; its last event is {before} before that" if before else ""
        answer = f"request {request} is {record.state} at the end of the log{last}"
    else:
        answer = f"request {request} is named, and the log does not have its end"
    return Why(request, answer, tuple(_because(events, turns, result, request, findings)), turns, findings)


def _is_failure(event: ev.AnyEvent) -> bool:
    if isinstance(event, ev.TransferFinished):
        return event.outcome != "ok"
    if isinstance(event, ev.RankCompleted | ev.RankLoaded | ev.PeerSettled):
        return event.outcome == "failed"
    return False


def _because(
    events: Sequence[ev.AnyEvent],
    turns: Sequence[ev.AnyEvent],
    result: Result,
    request: str,
    findings: Sequence[Finding],
) -> Iterator[str]:
    book = result.state.book
    load = book.loads.get(book.loading.get(request, -1))
    recv = book.recvs.get(request)
    if load is not None:
        waits = f"waits for {words.ranks(load.waiting)}" if load.waiting else "was not given to the workers"
        yield f"its load {book.loading[request]} is open since event {load.since_seq} and {waits}"
    if recv is not None:
        ranks = recv.missing_ranks()
        yield f"its transfer {recv.transfer} is open since event {recv.since_seq} and waits for {words.ranks(ranks)}"
    still_open: list[str] = []
    for number, job in book.jobs.items():
        if job.request == request:
            waits = f"waits for {words.ranks(job.waiting)}" if job.waiting else "has settled and was not freed"
            line = f"store job {number} is open since event {job.since_seq} and {waits}"
            if request in book.requests:
                yield f"its {line}"
            else:
                still_open.append(f"still open because of it, and not why it ended: {line}")
    for event in reversed(turns):
        yield f"event {event.seq}: {words.describe(event)}"
    preemptions = sum(isinstance(event, ev.RequestPreempted) for event in events)
    if not turns and load is None and recv is None and not preemptions:
        kinds = list(dict.fromkeys(finding.kind for finding in findings))
        if kinds:
            yield f"no event of its own shows why; it is named by the findings below: {', '.join(kinds)}"
        else:
            yield "nothing went wrong with it that this log shows"
    yield from still_open


# --- blame ------------------------------------------------------------------------------------------------------------


class Use(msgspec.Struct, frozen=True):
    """One use of a block.

    Attributes:
        what: `owned`, `pinned`, `read`, or `written`.
        by: who: a request, a job, a transfer.
        first: the event at which it began.
        last: the event at which it ended; None if it is open.
    """

    what: str
    by: str
    first: ev.AnyEvent
    last: ev.AnyEvent | None = None


def blame(events: Iterable[ev.AnyEvent], block: tuple[int, int]) -> list[Use]:
    """Return who owned, pinned, read and wrote a block, by the beginning of each use.

    The log names owners only while open work names the block: what a request did with it otherwise is not recorded.

    Args:
        events: the events that concern the block, as `ledger.replay.select.Watch` collects them.
        block: its group and number.
    """
    uses: list[Use] = []
    opened: dict[Hashable, int] = {}
    for event in events:
        begun = _begun(event) if _may_use(event, block) else None
        if begun is not None and not (isinstance(event, ev.BlocksReleased) and begun[0] in opened):
            opened[begun[0]] = len(uses)
            uses.append(Use(begun[1], begun[2], event))
        place = opened.pop(_ended(event), None)
        if place is not None:
            uses[place] = msgspec.structs.replace(uses[place], last=event)
    return sorted(uses, key=lambda use: use.first.seq)


def _may_use(event: ev.AnyEvent, block: tuple[int, int]) -> bool:
    """Return whether an event names the block, or none: the calls of one job may each be for blocks of their own."""
    blocks = getattr(event, "blocks", ())
    return not blocks or names(blocks, block)


def _begun(event: ev.AnyEvent) -> tuple[Hashable, str, str] | None:
    """Return what use begins with an event: its key, what it is, and by whom."""
    match event:
        case ev.BlocksAllocated() | ev.BlocksReleased():
            return ("owner", event.request), "owned", words.request(event.request, event.generation)
        case ev.LoadPlanned():
            by = f"load {event.load} of {words.request(event.request, event.generation)}"
            return ("load", event.load), "written", by
        case ev.PinTouched():
            return ("job", event.job), "pinned", f"store job {event.job}"
        case ev.SendReady():
            return ("send", event.transfer), "pinned", f"send {event.transfer} of request {event.request}"
        case ev.RecvRegistered():
            return ("recv", event.transfer), "written", f"recv {event.transfer} of request {event.request}"
        case ev.TransferStarted():
            what = "read" if event.op in ("put", "push") else "written"
            by = f"{event.op} {event.transfer}{_for(event)} on rank {event.rank}"
            return ("call", event.transfer, event.rank, event.peer), what, by
        case _:
            return None


def _ended(event: ev.AnyEvent) -> Hashable:
    """Return the key of the use that ends with an event."""
    match event:
        case ev.BlocksReleased():
            return "owner", event.request
        case ev.LoadSettled():
            return "load", event.load
        case ev.BlocksFreed():
            return "job", event.job
        case ev.SendSettled() | ev.SendExpired():
            return "send", event.transfer
        case ev.RecvSettled():
            return "recv", event.transfer
        case ev.TransferFinished():
            return "call", event.transfer, event.rank, event.peer
        case _:
            return None


def _for(event: ev.TransferStarted) -> str:
    if event.job >= 0:
        return f" of job {event.job}"
    return f" of load {event.load}" if event.load >= 0 else ""


# --- diff -------------------------------------------------------------------------------------------------------------


class Diff(msgspec.Struct, frozen=True):
    """What changed between two moments of a log.

    Attributes:
        begun, ended: jobs, loads, sends, recvs and requests that are open at the later moment only, at the earlier
        only.
        moved: what is open at both and stands differently, as a line each.
        pinned_blocks: how many blocks are pinned at the earlier and at the later moment.
        kinds: how many events of each kind lie between.
    """

    begun: tuple[str, ...]
    ended: tuple[str, ...]
    moved: tuple[str, ...]
    pinned_blocks: tuple[int, int]
    kinds: dict[str, int]


def diff(earlier: State, later: State, between: Iterable[ev.AnyEvent]) -> Diff:
    """Return what changed from one book to a later one of the same log."""
    begun: list[str] = []
    ended: list[str] = []
    moved: list[str] = []
    for name in ("requests", "jobs", "loads", "sends", "recvs"):
        noun = {"jobs": "store job"}.get(name, name.removesuffix("s"))
        old, new = getattr(earlier.book, name), getattr(later.book, name)
        begun += [f"{noun} {key}" for key in new if key not in old]
        ended += [f"{noun} {key}" for key in old if key not in new]
        moved += [f"{noun} {key}: {change}" for key in old if key in new and (change := _change(old[key], new[key]))]
    counts = Counter(ev.kind_of(event) for event in between)
    return Diff(
        tuple(begun),
        tuple(ended),
        tuple(moved),
        (earlier.pinned_blocks(), later.pinned_blocks()),
        dict(counts.most_common()),
    )


def _value(value: Any) -> str:
    return "nothing" if value in ((), {}, None, "", msgspec.UNSET) else f"{value}"


def _change(old: msgspec.Struct, new: msgspec.Struct) -> str:
    changes: list[str] = []
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if before != after and name != "since_seq":
            changes.append(f"{name.replace('_', ' ')} {_value(before)} became {_value(after)}")
    return ", ".join(changes)
