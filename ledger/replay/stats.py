"""The story of a run in numbers: requests, jobs, loads, preemptions, bytes, and the slowest of them.

It counts and never judges. Memory is fixed: durations go into buckets of a twelfth of their size, and only the slowest
few are kept whole. This file knows events and the history.
"""

# ruff: noqa: D102 - a method `on_<kind>` takes the events of that kind, as the class says

import heapq
from collections import Counter
from collections.abc import Mapping

import msgspec

from ledger import events as ev
from ledger.verdicts.history import History

SLOWEST = 5
"""How many of the slowest are kept: what fits a report that someone reads at night."""


FEW = 32
"""Durations that are kept whole."""


class Slow(msgspec.Struct, frozen=True, order=True):
    """One of the slowest. Ordered by its duration.

    Attributes:
        bytes: what the call was for; it moved them if its outcome is `ok`.
    """

    duration_ns: int
    seq: int
    what: str
    request: str = ""
    job: int = -1
    load: int = -1
    rank: int = -1
    bytes: int = 0
    outcome: str = ""


class Durations(msgspec.Struct):
    """Durations in nanoseconds, as a histogram with eight buckets for each power of two; the first few are kept whole.

    Attributes:
        few: all of them, as long as there are no more than `FEW`.
    """

    number: int = 0
    total_ns: int = 0
    longest_ns: int = 0
    shortest_ns: int = 0
    buckets: dict[int, int] = {}
    few: list[int] = []

    def add(self, duration_ns: int) -> None:
        """Count one duration."""
        number = self.number = self.number + 1
        if number <= FEW:
            self.few.append(duration_ns)
            self.shortest_ns = min(self.few)
        elif duration_ns < self.shortest_ns:
            self.shortest_ns = duration_ns
        self.total_ns += duration_ns
        self.longest_ns = max(self.longest_ns, duration_ns)
        bits = duration_ns.bit_length()
        bucket = bits * 8 + (duration_ns >> bits - 4 & 7 if bits > 4 else 0)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def percentile_ns(self, percent: float) -> int:
        """Return the duration that `percent` of all do not exceed, in nanoseconds.

        Of a few it is exact, and the median of an even number is the mean of the two in the middle; of many it is at
        most 12.5 % too high.
        """
        if 0 < self.number <= FEW:
            ordered = sorted(self.few)
            place = self.number * percent / 100
            upper = ordered[min(int(place), self.number - 1)]
            if place != int(place) or place < 1:
                return upper
            return (ordered[int(place) - 1] + upper) // 2
        wanted = self.number * percent / 100
        for bucket in sorted(self.buckets):
            wanted -= self.buckets[bucket]
            if wanted <= 0:
                bits, eighth = divmod(bucket, 8)
                upper = ((8 + eighth + 1) << bits - 4) - 1 if bits > 4 else (1 << bits) - 1
                return min(upper, self.longest_ns)
        return self.longest_ns


class Calls(msgspec.Struct):
    """Calls of one sort: `put` and `get` to the store, `push` and `pull` between prefill and decode."""

    calls: int = 0
    keys: int = 0
    bytes: int = 0
    failed_calls: int = 0
    failed_keys: int = 0
    durations: Durations = msgspec.field(default_factory=Durations)
    slowest: list[Slow] = []


class RunStats(msgspec.Struct):
    """The numbers of one log. Durations are in nanoseconds.

    Attributes:
        kinds: events by kind.
        calls: calls by sort, as in `transfer_started`.
        failures: failed keys and failed reports by `(code, rank)`.
        most_pinned_blocks: the most blocks that jobs held at one time.
        job_held: time from a job's registration until its blocks were freed.
        load_waited: time from a load's plan until it settled.
    """

    kinds: dict[str, int] = {}
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    end_reasons: dict[str, int] = {}
    preemptions: int = 0
    jobs: int = 0
    jobs_settled: int = 0
    jobs_failed: int = 0
    jobs_skipped: int = 0
    most_pinned_blocks: int = 0
    loads: int = 0
    loads_settled: int = 0
    loads_failed: int = 0
    tokens_loaded: int = 0
    calls: dict[str, Calls] = {}
    job_held: Durations = msgspec.field(default_factory=Durations)
    load_waited: Durations = msgspec.field(default_factory=Durations)
    slowest_loads: list[Slow] = []
    failures: dict[tuple[str, int], int] = {}


class StatsCollector:
    """Fills a `RunStats` during a fold."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.stats = RunStats()
        self._reasons: Counter[str] = Counter()

    def finish(self, kinds: Mapping[type[ev.Event], int]) -> None:
        """Complete the story with what is simply the number of events of a kind."""
        stats = self.stats
        stats.kinds = {name: kinds[kind] for name, kind in ev.KINDS.items() if kinds.get(kind)}
        stats.requests = kinds.get(ev.RequestQueued, 0)
        stats.finished = kinds.get(ev.RequestFinished, 0)
        stats.aborted = kinds.get(ev.RequestAborted, 0)
        stats.preemptions = kinds.get(ev.RequestPreempted, 0)
        stats.jobs = kinds.get(ev.JobRegistered, 0)
        stats.jobs_skipped = kinds.get(ev.JobSkipped, 0)
        stats.loads = kinds.get(ev.LoadPlanned, 0)
        stats.end_reasons = dict(self._reasons.most_common())
        for calls in stats.calls.values():
            calls.slowest.sort(reverse=True)
        stats.slowest_loads.sort(reverse=True)

    def on_request_finished(self, event: ev.RequestFinished) -> None:
        self._reasons[event.reason] += 1

    def on_pin_touched(self, event: ev.PinTouched) -> None:
        pinned = self.history.state.pinned_blocks()
        self.stats.most_pinned_blocks = max(self.stats.most_pinned_blocks, pinned)

    def on_rank_completed(self, event: ev.RankCompleted) -> None:
        if event.outcome == "failed":
            self._failed(event.code or event.exception or "no code", event.rank)

    def on_job_settled(self, event: ev.JobSettled) -> None:
        self.stats.jobs_settled += 1
        if event.failed_ranks:
            self.stats.jobs_failed += 1

    def on_blocks_freed(self, event: ev.BlocksFreed) -> None:
        chain = self.history.jobs[event.job]
        if chain and isinstance(chain[0], ev.JobRegistered):
            self.stats.job_held.add(max(event.mono_ns - chain[0].mono_ns, 0))

    def on_rank_loaded(self, event: ev.RankLoaded) -> None:
        if event.outcome == "failed":
            self._failed(event.code or event.exception or "no code", event.rank)

    def on_load_settled(self, event: ev.LoadSettled) -> None:
        stats = self.stats
        stats.loads_settled += 1
        chain = self.history.loads[event.load]
        planned = chain[0] if chain else None
        if event.outcome == "failed":
            stats.loads_failed += 1
        if not isinstance(planned, ev.LoadPlanned):
            return
        if event.outcome == "loaded":
            stats.tokens_loaded += planned.tokens
        waited_ns = max(event.mono_ns - planned.mono_ns, 0)
        stats.load_waited.add(waited_ns)
        slowest = stats.slowest_loads
        if len(slowest) < SLOWEST or waited_ns > slowest[0].duration_ns:
            slow = Slow(waited_ns, planned.seq, f"load {event.load}", planned.request, load=event.load)
            heapq.heappush(slowest, slow) if len(slowest) < SLOWEST else heapq.heapreplace(slowest, slow)

    def on_transfer_finished(self, event: ev.TransferFinished) -> None:
        calls = self.stats.calls.get(event.op)
        if calls is None:
            calls = self.stats.calls[event.op] = Calls()
        calls.calls += 1
        calls.keys += event.keys
        duration_ns = event.duration_ns
        calls.durations.add(duration_ns)
        if event.outcome == "ok":
            calls.bytes += event.bytes
        else:
            calls.failed_calls += 1
            calls.failed_keys += event.failed_keys
        slowest = calls.slowest
        if len(slowest) < SLOWEST or duration_ns > slowest[0].duration_ns:
            slow = Slow(
                duration_ns,
                event.seq,
                event.transfer,
                event.request,
                event.job,
                event.load,
                event.rank,
                event.bytes,
                event.outcome,
            )
            heapq.heappush(slowest, slow) if len(slowest) < SLOWEST else heapq.heapreplace(slowest, slow)

    def _failed(self, code: str, rank: int) -> None:
        failures = self.stats.failures
        failures[code, rank] = failures.get((code, rank), 0) + 1
