"""One time axis for all events of several logs, for a picture of them.

Within a log an event stands where its source's monotonic clock puts it, counted from the wall clock of the source's
first event: a wall clock that is set does not bend the picture. Between logs nothing is certain but what had to come
before what, and P/D transfers say that (see `replay.join`): a log is shifted by the least that puts each cause before
its effect. So what is an instant apart on the axis may have been further apart, and never the other way round.

This file knows events. Memory is fixed.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ledger import events as ev

KEPT_TRANSFERS = 20_000
"""P/D transfers of which the moments are compared; of more, an even choice over the whole of the logs is kept."""


class Clock:
    """Puts the events of one log on the axis.

    Args:
        shift_ns: what is added to this log's clock.
    """

    def __init__(self, shift_ns: int = 0) -> None:
        self.shift_ns = shift_ns
        self._bases: dict[str, int] = {}
        self._set_ns = 0

    def at(self, event: ev.Event) -> int:
        """Return the time of an event in nanoseconds. Events come in the order of the log."""
        base = event.ts_ns - event.mono_ns
        known = self._bases.get(event.source)
        if known is None:
            # A clock that was set since the log began was set for this source as well.
            known = self._bases[event.source] = base - self._set_ns
        if event.source == ev.SCHEDULER:
            self._set_ns = base - known
        return known + event.mono_ns + self.shift_ns


class Axis(msgspec.Struct):
    """Where each log stands on the time axis.

    Attributes:
        shifts_ns: what to add to the clock of each log, in nanoseconds; 0 for the first.
        contradicts: no shift puts every cause before its effect: a clock was set, or runs at another speed. The wall
            clocks are left as they are then.
    """

    shifts_ns: list[int]
    contradicts: bool = False

    def told(self) -> list[str]:
        """Return for each log in one line what was done with its clock; empty if nothing."""
        if self.contradicts:
            told = "its wall clock is left as it is: no shift of the clocks puts every cause before its effect"
            return [told] * len(self.shifts_ns)
        return [
            f"its clock is moved by {shift_ns / 1e6:+,.3f} ms, the least that puts each cause before its effect"
            if shift_ns
            else ""
            for shift_ns in self.shifts_ns
        ]


class _Moments(msgspec.Struct):
    """When what of a transfer happened, by log and worker: those moments that had to come in this order.

    Attributes:
        asked: by the decode worker that asked; by an empty name, the registration of the recv, before all of them.
        started: a push, by the decode worker that it is for.
        pushed, settled: a push that ended well, by the prefill worker whose it was.
    """

    asked: dict[tuple[int, str], int] = {}
    started: dict[tuple[int, str], int] = {}
    pushed: dict[tuple[int, str], int] = {}
    settled: dict[tuple[int, str], int] = {}


def axis(logs: Sequence[Iterable[ev.AnyEvent]]) -> Axis:
    """Return how the clocks of several logs are to be shifted, by what their P/D transfers say.

    A prefill's worker pushes after the decode engine has registered its recv and the decode worker has asked, and a
    peer settles as `ok` after its push has ended. Each log is shifted by the least that satisfies both.
    """
    if len(logs) < 2:
        return Axis([0] * len(logs))
    moments: dict[str, _Moments] = {}
    mask = 0
    for number, events in enumerate(logs):
        clock, width = Clock(), 1
        for event in events:
            ts_ns = clock.at(event)
            if isinstance(event, ev.LogOpened):
                width = max(event.tensor_parallel, 1)
            transfer = ev.transfer_of(event)
            if transfer and not zlib.crc32(transfer.encode()) & mask:
                _note(moments, transfer, number, event, ts_ns, width)
                while len(moments) > KEPT_TRANSFERS:
                    mask = mask * 2 + 1
                    moments = {name: each for name, each in moments.items() if not zlib.crc32(name.encode()) & mask}
    return _least_shifts(len(logs), _leads(moments.values()))


def _note(moments: dict[str, _Moments], transfer: str, log: int, event: ev.AnyEvent, ts_ns: int, width: int) -> None:
    match event:
        case ev.RecvRegistered():
            moments.setdefault(transfer, _Moments()).asked.setdefault((log, ""), ts_ns)
        case ev.TransferStarted(op="pull"):
            worker = f"tp{event.rank % width} pp{event.rank // width}"
            moments.setdefault(transfer, _Moments()).asked.setdefault((log, worker), ts_ns)
        case ev.SendStarted() | ev.TransferStarted(op="push"):
            started = moments.setdefault(transfer, _Moments()).started
            started[log, event.peer] = min(started.get((log, event.peer), ts_ns), ts_ns)
        case ev.TransferFinished(op="push", outcome="ok"):
            peer = f"tp{event.rank % width} pp{event.rank // width}"
            moments.setdefault(transfer, _Moments()).pushed.setdefault((log, peer), ts_ns)
        case ev.PeerSettled(outcome="ok"):
            moments.setdefault(transfer, _Moments()).settled.setdefault((log, event.peer), ts_ns)
        case _:
            pass


def _leads(moments: Iterable[_Moments]) -> dict[tuple[int, int], int]:
    """Return for pairs of logs by how much the clock of the first is ahead of the second's, at least."""
    leads: dict[tuple[int, int], int] = {}

    def first(cause: tuple[int, int], effect: tuple[int, int]) -> None:
        if cause[0] != effect[0]:
            pair = cause[0], effect[0]
            leads[pair] = max(leads.get(pair, cause[1] - effect[1]), cause[1] - effect[1])

    for each in moments:
        for (decode, worker), asked_ns in each.asked.items():
            for (prefill, peer), started_ns in each.started.items():
                if worker in ("", peer):
                    first((decode, asked_ns), (prefill, started_ns))
        for (prefill, worker), pushed_ns in each.pushed.items():
            for (decode, peer), settled_ns in each.settled.items():
                if worker == peer:
                    first((prefill, pushed_ns), (decode, settled_ns))
    return leads


def _least_shifts(logs: int, leads: Mapping[tuple[int, int], int]) -> Axis:
    shifts = [0] * logs
    for _ in range(logs):
        moved = False
        for (cause, effect), lead_ns in leads.items():
            if shifts[effect] - shifts[cause] < lead_ns:
                shifts[effect] = shifts[cause] + lead_ns
                moved = True
        if not moved:
            return Axis([shift - shifts[0] for shift in shifts])
    return Axis([0] * logs, contradicts=True)
