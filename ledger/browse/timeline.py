"""The book over the time of a log: how much was open and pinned, in a few hundred intervals.

It looks on from a verdict's place during the fold, so what it samples is the very state that replay and the engine
have. The intervals grow as the log does: whenever there are too many, each two become one. So a log of any length gives
a table that fits on a page, and the greatest value of each interval is kept exactly.

This file knows events and the state. It judges nothing.
"""

# ruff: noqa: D102 - a method `on_<kind>` takes the events of that kind, as a verdict's does

import msgspec

from ledger import events as ev
from ledger.verdicts.base import Verdict
from ledger.verdicts.history import History

MOST_INTERVALS = 400
"""Rows of the table: a page of Datasette, and more than a screen is wide in pixels for each of them to matter."""

FIRST_WIDTH_NS = 1_000_000
"""One millisecond, below the length of an engine step."""


class Interval(msgspec.Struct):
    """What was at the most open and pinned between two times. The fields are the columns of the table `timeline`."""

    first_seq: int
    from_ts_ns: int
    to_ts_ns: int
    requests: int = 0
    open_jobs: int = 0
    pinned_blocks: int = 0
    open_loads: int = 0
    loading_blocks: int = 0
    open_transfers: int = 0
    transfer_blocks: int = 0
    preemptions: int = 0
    failures: int = 0

    def take_in(self, later: "Interval") -> None:
        """Become the interval that covers this one and the one after it."""
        self.to_ts_ns = later.to_ts_ns
        self.preemptions += later.preemptions
        self.failures += later.failures
        for gauge in GAUGES:
            setattr(self, gauge, max(getattr(self, gauge), getattr(later, gauge)))


GAUGES = (
    "requests",
    "open_jobs",
    "pinned_blocks",
    "open_loads",
    "loading_blocks",
    "open_transfers",
    "transfer_blocks",
)
"""The fields that hold a greatest value; the others count."""


class Timeline(Verdict):
    """Samples the book after each event that may change what is open.

    Attributes:
        intervals: those with at least one such event, in the order of time.
    """

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.intervals: list[Interval] = []
        self._width_ns = FIRST_WIDTH_NS
        self._start_ts_ns = 0
        self._place = -1
        self._gauges = (0,) * len(GAUGES)

    def _sample(self, event: ev.Event) -> None:
        now = self._interval(event)
        state = self.state
        book = state.book
        self._gauges = gauges = (
            len(book.requests),
            len(book.jobs),
            state.pinned_blocks(),
            len(book.loads),
            sum(map(len, state.targets.values())),
            len(book.sends) + len(book.recvs),
            sum(map(len, state.held.values())),
        )
        requests, jobs, pinned, loads, loading, transfers, held = gauges
        now.requests = max(now.requests, requests)
        now.open_jobs = max(now.open_jobs, jobs)
        now.pinned_blocks = max(now.pinned_blocks, pinned)
        now.open_loads = max(now.open_loads, loads)
        now.loading_blocks = max(now.loading_blocks, loading)
        now.open_transfers = max(now.open_transfers, transfers)
        now.transfer_blocks = max(now.transfer_blocks, held)

    def _interval(self, event: ev.Event) -> Interval:
        """Return the interval of an event, a new one if need be."""
        if not self.intervals:
            self._start_ts_ns = event.ts_ns
        place = (event.ts_ns - self._start_ts_ns) // self._width_ns
        if place <= self._place:  # a clock that was set back does not take the log back
            now = self.intervals[-1]
            now.to_ts_ns = max(now.to_ts_ns, event.ts_ns)
            return now
        # What was open before the event counts for its interval too: it may be the event that ends it.
        now = Interval(event.seq, event.ts_ns, event.ts_ns, *self._gauges)
        self.intervals.append(now)
        self._place = place
        if len(self.intervals) > MOST_INTERVALS:
            self._widen()
        return self.intervals[-1]

    def _widen(self) -> None:
        """Double the width of the intervals until they are no longer too many."""
        while len(self.intervals) > MOST_INTERVALS:
            self._width_ns *= 2
            merged: list[Interval] = []
            place = -1
            for interval in self.intervals:
                own = (interval.from_ts_ns - self._start_ts_ns) // self._width_ns
                if own <= place:
                    merged[-1].take_in(interval)
                else:
                    merged.append(interval)
                    place = own
            self.intervals = merged
            self._place = place

    on_log_opened = on_log_closed = on_checkpoint = _sample
    on_request_queued = on_request_scheduled = on_request_resumed = _sample
    on_request_finished = on_request_aborted = _sample
    on_job_registered = on_pin_touched = on_job_settled = on_blocks_freed = _sample
    on_load_planned = on_load_settled = _sample
    on_send_registered = on_send_ready = on_send_settled = on_send_expired = _sample
    on_recv_registered = on_recv_settled = _sample

    def on_request_preempted(self, event: ev.RequestPreempted) -> None:
        self._sample(event)
        self.intervals[-1].preemptions += 1

    def _reported(self, event: ev.RankCompleted | ev.RankLoaded | ev.PeerSettled) -> None:
        if event.outcome == "failed":
            self._interval(event).failures += 1

    on_rank_completed = on_rank_loaded = on_peer_settled = _reported
