"""What the logs of several engines say together: they share keys of a store, or the id of a transfer.

A finding of one log is completed by what the other logs have of the same keys and transfers, and the two sides of a
transfer are put on one time axis. Clocks of different hosts are never trusted alone. What orders two logs is what had
to come before what: a prefill's worker pushes after the decode engine has registered its recv, because that one had to
ask; and a peer settles as `ok`, or because its transfer engine failed, after its push has ended so. Where nothing
orders two events, their wall clocks place them, and the line says so.

This file knows results and events; it reads what it is given and prints nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from ledger import events as ev
from ledger import words
from ledger.replay.fold import Result
from ledger.verdicts.base import Finding, OtherSide

S = TypeVar("S")
Settled = TypeVar("Settled", ev.RecvSettled, ev.SendSettled)

ReadEvents = Callable[[], Iterable[ev.AnyEvent]]
"""Reads a log once more."""

KEPT_SUBJECTS = 200
"""Transfers and keys that are followed into the other logs; a report that names more is not read to its end."""

NOT_OF = {"prefill": ("kv_consumer",), "decode": ("kv_producer",)}
"""Roles of engines that are never on a side of a transfer."""

SIDES = {"send": "prefill", "recv": "decode"}
"""The side of a transfer that a log is on, by what its events are about."""


class TimelineStep(msgspec.Struct, frozen=True):
    """An event of a joined time line.

    Attributes:
        log: the index of its log.
        by_clock: nothing but the wall clocks places it behind the event before it.
    """

    log: int
    event: ev.AnyEvent
    by_clock: bool = False


class Joined(msgspec.Struct):
    """What the logs of a case have in common.

    Attributes:
        findings: index of the log and finding, completed.
        transfers: the joined time line of each transfer that a finding names and that more than one log knows.
    """

    findings: list[tuple[int, Finding]]
    transfers: dict[str, list[TimelineStep]] = {}


Missed = tuple[str, int]
"""A key that could not be loaded, and when, by the wall clock in nanoseconds."""


class Said(OtherSide, frozen=True, kw_only=True):
    """What another log says, in words."""

    text: str
    of_transfer: bool


class _Calls(msgspec.Struct):
    """What a log has of one key: a call that put it, and how that call ended."""

    started: ev.TransferStarted
    finished: ev.TransferFinished | None = None


class _Log(msgspec.Struct):
    """What a log has of the subjects.

    Attributes:
        puts: the last call that put a key before it was missed elsewhere, as far as the clocks tell.
    """

    result: Result
    name: str
    transfers: dict[str, list[ev.AnyEvent]] = {}
    puts: dict[Missed, _Calls] = {}


def join(results: Sequence[Result], names: Sequence[str], readers: Sequence[ReadEvents]) -> Joined:
    """Return the findings of several logs, each completed by what the other logs know.

    Args:
        results: what each log says alone.
        names: what to call each log.
        readers: read each log once more; called only if a finding names what another log may know.
    """
    findings = [(index, finding) for index, result in enumerate(results) for finding in result.findings]
    transfers = _subjects((finding.transfers for _, finding in findings))
    missed = _subjects((_missed(finding) for _, finding in findings))
    if len(results) < 2 or not (transfers or missed):
        return Joined(findings)
    logs = [
        _collect(result, name, read(), transfers, missed)
        for result, name, read in zip(results, names, readers, strict=True)
    ]
    completed = [(index, _complete(finding, index, logs)) for index, finding in findings]
    shared = {
        transfer: merge(
            {index: log.transfers[transfer] for index, log in enumerate(logs) if transfer in log.transfers}, logs
        )
        for transfer in transfers
        if sum(transfer in log.transfers for log in logs) > 1
    }
    return Joined(completed, shared)


def _subjects(named: Iterable[Iterable[S]]) -> list[S]:
    return list(dict.fromkeys(subject for each in named for subject in each))[:KEPT_SUBJECTS]


def _missed(finding: Finding) -> list[Missed]:
    return list(finding.missing_keys)


def _collect(
    result: Result, name: str, events: Iterable[ev.AnyEvent], transfers: Sequence[str], missed: Sequence[Missed]
) -> _Log:
    log = _Log(result, name)
    wanted_transfers, wanted_keys = set(transfers), {key for key, _ in missed}
    open_puts: dict[tuple[str, int], list[_Calls]] = {}
    for event in events:
        transfer = ev.transfer_of(event)
        if transfer in wanted_transfers:
            log.transfers.setdefault(transfer, []).append(event)
        if not wanted_keys:
            continue
        if isinstance(event, ev.TransferStarted) and event.op == "put" and not wanted_keys.isdisjoint(event.keys):
            calls = _Calls(event)
            open_puts.setdefault((event.transfer, event.rank), []).append(calls)
            put = wanted_keys.intersection(event.keys)
            log.puts.update((each, calls) for each in missed if each[0] in put and event.ts_ns < each[1])
        elif isinstance(event, ev.TransferFinished) and event.op == "put":
            for calls in open_puts.pop((event.transfer, event.rank), ()):
                calls.finished = event
    return log


# --- findings ---------------------------------------------------------------------------------------------------------


def _complete(finding: Finding, index: int, logs: Sequence[_Log]) -> Finding:
    told: dict[str, None] = {}
    elsewhere: list[tuple[int, int]] = []
    for other, log in enumerate(logs):
        if other == index:
            continue
        missed = _missed(finding)
        put = next((log.puts[each] for each in missed if each in log.puts), None)
        if put is not None:
            same = [each[0] for each in missed if log.puts.get(each) is put]
            told.setdefault(_of_key(put, log, same, len(missed)))
            elsewhere.append((other, put.started.job))
        # What a log knows says more than what it does not.
        for transfer in sorted(finding.transfers, key=lambda each: each not in log.transfers):
            side = _side(logs[index].transfers.get(transfer, ()))
            if not side and _lost(logs[index]):  # which side this log is on may be among what it has lost
                continue
            wanted = "prefill" if side == "decode" else "decode"
            known = any(_side(each.transfers.get(transfer, ())) == wanted for each in logs)
            asked = _asked_of(logs[index].transfers.get(transfer, ()))
            if asked and not known and not any(_engine(each) == asked for each in logs):
                said = f"transfer {transfer} went to prefill engine {asked}, whose log is not here"
            elif asked and not known and _engine(log) != asked:
                continue
            else:
                said = _of_transfer(transfer, log, wanted, known=known)
            if said:
                told.setdefault(said)
                break
    if not told:
        return finding
    return msgspec.structs.replace(
        finding,
        elsewhere=tuple(elsewhere),
        other_side=tuple(Said(text=said, of_transfer=len(told) > len(elsewhere)) for said in told),
    )


def _of_key(calls: _Calls, log: _Log, same: Sequence[str], number: int) -> str:
    """Return what the log has of the keys `same`, which are of `number` that a finding names."""
    job = f"job {calls.started.job} of engine {_engine(log)}"
    keys = f"{len(same)} of these {number} keys ({words.listed(same, 3)})" if number > 1 else f"this key ({same[0]})"
    where = f"event {calls.started.seq} of {log.name}; only the clocks say when"
    if calls.finished is None:
        end = log.result.end
        how = ", which ends torn" if end is not None and end.how == "torn" else ""
        return f"{job} was putting {keys} ({where}), and no return of the call is in that log{how}"
    put = "put" if calls.finished.outcome == "ok" else "tried to put"
    return f"{job} {put} {keys} ({where}), which ended {calls.finished.outcome}"


def _asked_of(events: Iterable[ev.AnyEvent]) -> str:
    """Return the prefill engine that a decode's log names for a transfer; empty if it names none."""
    return next((event.prefill for event in events if isinstance(event, ev.RecvRegistered)), "")


def _of_transfer(transfer: str, log: _Log, side: str, *, known: bool) -> str:
    """Return what the log of the other side says of a transfer; empty if that log is not of that side.

    Args:
        transfer: its id.
        log: a log that is not the finding's own.
        side: `prefill` or `decode`.
        known: one of the logs is of that side of this transfer.
    """
    events = log.transfers.get(transfer, [])
    engine = f"the {side} engine {_engine(log)}"
    if not events:
        opened = log.result.opened
        # With several engines of that side, all but one know nothing of it, and rightly so.
        if known or (opened is not None and opened.role in NOT_OF[side]):
            return ""
        lost = _lost(log)
        if lost:
            return f"what {engine} did with transfer {transfer} is not known (no event in {log.name}, but {lost})"
        return f"{engine} knows nothing of transfer {transfer} (no event in {log.name})"
    if _side(events) != side:
        return ""
    last = events[-1]
    at = f"(event {last.seq} of {log.name})"
    if side == "prefill":
        return _of_prefill(events, engine, log)
    failed, settled = _failed(events, "pull"), _last(events, ev.RecvSettled)
    if failed is not None and (settled is None or settled.outcome == "failed"):
        why = words.failure(failed.code, failed.raw, failed.exception)
        return f"{engine} failed to pull it{': ' + why if why else ''} (event {failed.seq} of {log.name})"
    if settled is not None:
        return f"{engine} settled it as {settled.outcome} (event {settled.seq} of {log.name})"
    return _last_known(engine, last, log) or f"{engine} still waits for it; its last event: {last.sentence()} {at}"


def _of_prefill(events: Sequence[ev.AnyEvent], engine: str, log: _Log) -> str:
    name = log.name
    kinds = {type(event) for event in events}
    at = f"(event {events[-1].seq} of {name})"
    failed, settled = _failed(events, "push"), _last(events, ev.SendSettled)
    if failed is not None and (settled is None or settled.outcome != "sent"):
        why = words.failure(failed.code, failed.raw, failed.exception)
        how = f"{failed.outcome}{': ' + why if why else ''}"
        return f"{engine} pushed, and the push of rank {failed.rank} ended {how} (event {failed.seq} of {name})"
    if settled is not None:
        return f"{engine} settled it as {settled.outcome} (event {settled.seq} of {name})"
    lost = _lost(log)
    if ev.SendStarted not in kinds:
        if ev.SendExpired in kinds:
            if lost:
                return f"{engine} let it expire {at}, and whether it was asked for is not known: in its log {lost}"
            return f"{engine} was not asked for it, as far as its log goes, and let it expire {at}"
        if lost:
            return _last_known(engine, events[-1], log)
        if ev.SendReady not in kinds:
            return f"{engine} has not computed it yet {at}"
        return f"{engine} was not asked for it, as far as its log goes {at}"
    return f"{engine} began to push and did not end, as far as its log goes{f', where {lost}' if lost else ''} {at}"


def _lost(log: _Log) -> str:
    """Return that events of the scheduler are lost in a log, so that what is not in it may have been; empty if none."""
    gap = log.result.history.lost_since(0)
    return ev.lost_at(gap) if gap is not None else ""


def _last_known(engine: str, last: ev.AnyEvent, log: _Log) -> str:
    """Return the last event that a log with a gap has of a transfer; empty if it has no gap."""
    lost = _lost(log)
    at = f"(event {last.seq} of {log.name})"
    return f"the last that is known of {engine}: {last.sentence()} {at}, and in its log {lost}" if lost else ""


def _failed(events: Iterable[ev.AnyEvent], op: str) -> ev.TransferFinished | None:
    """Return the first call that failed and that its rank did not repeat with the same peer."""
    last: dict[tuple[int, str], ev.TransferStarted | ev.TransferFinished] = {}
    for event in events:
        if isinstance(event, ev.TransferStarted | ev.TransferFinished) and event.op == op:
            last[event.rank, event.peer] = event
    failed = [call for call in last.values() if isinstance(call, ev.TransferFinished) and call.outcome != "ok"]
    return min(failed, key=lambda call: call.seq, default=None)


def _last(events: Sequence[ev.AnyEvent], kind: type[Settled]) -> Settled | None:
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def _side(events: Iterable[ev.AnyEvent]) -> str:
    return next((SIDES[event.about.work] for event in events if event.about.work in SIDES), "")


def _engine(log: _Log) -> str:
    return log.result.opened.engine if log.result.opened is not None else log.name


# --- one time axis ----------------------------------------------------------------------------------------------------


def merge(sides: Mapping[int, Sequence[ev.AnyEvent]], logs: Sequence["_Log"]) -> list[TimelineStep]:
    """Return the events of a transfer in several logs as one time line.

    Each log keeps its own order. Between logs, what had to come before what comes first; where that leaves a choice,
    the wall clocks decide, and the step says so.
    """
    before = _orders(sides, logs)
    done = dict.fromkeys(sides, 0)
    # What is known to have happened before the event that was placed last, as the number of events of each log.
    knows: dict[int, dict[int, int]] = {index: dict.fromkeys(sides, 0) for index in sides}
    steps: list[TimelineStep] = []
    while any(done[index] < len(events) for index, events in sides.items()):
        heads = [index for index, events in sides.items() if done[index] < len(events)]
        ready = [
            index
            for index in heads
            if all(done[other] >= number for other, number in before.get((index, done[index]), ()))
        ]
        chosen = min(ready or heads, key=lambda index: sides[index][done[index]].ts_ns)
        known = knows[chosen]
        for other, number in before.get((chosen, done[chosen]), ()):
            for log, reached in {**knows[other], other: number}.items():
                known[log] = max(known[log], reached)
        previous = steps[-1].log if steps else chosen
        by_clock = previous != chosen and known[previous] < done[previous]
        steps.append(TimelineStep(chosen, sides[chosen][done[chosen]], by_clock))
        done[chosen] += 1
    return steps


def _orders(
    sides: Mapping[int, Sequence[ev.AnyEvent]], logs: Sequence["_Log"]
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return, for an event of a log, how many events of another log had to happen before it."""
    before: dict[tuple[int, int], list[tuple[int, int]]] = {}
    prefills = [index for index, events in sides.items() if _side(events) == "prefill"]
    decodes = [index for index, events in sides.items() if _side(events) == "decode"]
    for prefill in prefills:
        pushed = _pushes(sides[prefill], logs[prefill])
        for decode in decodes:
            asked = _first(sides[decode], ev.RecvRegistered)
            started = _first(sides[prefill], ev.SendStarted)
            if asked is not None and started is not None:
                before.setdefault((prefill, started), []).append((decode, asked + 1))
            for place, event in enumerate(sides[decode]):
                told = _tells_of_a_push(event)
                if told is not None and told in pushed:
                    before.setdefault((decode, place), []).append((prefill, pushed[told] + 1))
    return before


def _tells_of_a_push(event: ev.AnyEvent) -> tuple[str, bool] | None:
    """Return the peer whose push had ended before this event, and whether that push had ended well."""
    if not isinstance(event, ev.PeerSettled):
        return None
    if event.outcome == "ok":
        return event.peer, True
    # Other failures come without a push, or say nothing of one.
    return (event.peer, False) if (event.code, event.stage) == ("TRANSFER_FAILED", "SEND") else None


def _pushes(events: Sequence[ev.AnyEvent], log: "_Log") -> dict[tuple[str, bool], int]:
    """Return the place of the first push of each of the prefill's workers that ended well, and that failed."""
    opened = log.result.opened
    width = opened.tensor_parallel if opened is not None else 1
    pushed: dict[tuple[str, bool], int] = {}
    for place, event in enumerate(events):
        if isinstance(event, ev.TransferFinished) and event.op == "push":
            name = f"tp{event.rank % width} pp{event.rank // width}"
            pushed.setdefault((name, event.outcome == "ok"), place)
    return pushed


def _first(events: Sequence[ev.AnyEvent], kind: type[ev.Event]) -> int | None:
    return next((place for place, event in enumerate(events) if isinstance(event, kind)), None)
