"""The log of a simulated engine as a writer and a replay would see it, held to the rules of the design.

What an event may follow is said here once more, and shares no code with `ledger.state`; the one use of that is the
shadow, which folds the events as a replay would. This file knows the plugin's events, and nothing of vLLM.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ledger import events as ev
from ledger.live.log import Log
from ledger.state.apply import State

DRAIN_LIMIT = 1 << 30


class CheckedLog:
    """Drains the log as a writer would, folds it as a replay would, and holds the events to the design's rules.

    Events take the way through their encoding, so that what is folded is what a file would hold.

    Attributes:
        shadow: the state that the events fold to.
        lines: the events as JSON, if they are kept.
        touched, freed: what the events say was done to the pool.
        complaints: rules that events broke.
        kinds: how many events there were of each kind.
    """

    def __init__(self, log: Log, keep: bool, digest: Any) -> None:
        self.shadow = State()
        self.lines: list[bytes] = []
        self.count = 0
        self.last_line = ""
        self.touched: list[list[int]] = []
        self.freed: list[list[int]] = []
        self.complaints: list[str] = []
        self.violations = 0
        self.kinds: dict[str, int] = {}
        self._log = log
        self._keep = keep
        self._digest = digest
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(ev.AnyEvent).decode
        self._jobs: dict[int, list[int]] = {}
        self._pins: dict[int, Any] = {}
        self._settled: dict[int, None] = {}
        self._loads: dict[int, bool] = {}
        self._loading: dict[str, int] = {}
        self._ended_loading: dict[int, str] = {}
        self._policy = ""
        self._next_job = 0
        self._judges: dict[type, Callable[[Any], None]] = {
            ev.JobRegistered: self._job_registered,
            ev.PinTouched: self._pin_touched,
            ev.RankCompleted: self._rank_completed,
            ev.JobSettled: self._job_settled,
            ev.BlocksFreed: self._blocks_freed,
            ev.LoadPlanned: self._load_planned,
            ev.LoadFailed: self._load_failed,
            ev.LoadSettled: self._load_settled,
            ev.LoadRecovered: self._load_recovered,
            ev.RequestFinished: self._request_ended,
            ev.RequestAborted: self._request_ended,
            ev.LogOpened: self._log_opened,
            ev.Checkpoint: self._checkpoint,
            ev.InvariantViolated: self._invariant_violated,
            ev.Gap: self._gap,
        }

    def take(self) -> None:
        """Take what is new in the log."""
        for event in self._log.drain(DRAIN_LIMIT):
            line = self._encode(event)
            self._digest.update(line)
            self.last_line = line.decode()
            if self._keep:
                self.lines.append(line)
            self.count += 1
            if event.seq != self.count:
                self.complaints.append(f"event {self.count} has the place {event.seq}")
            read = self._decode(line)
            kind = str(read.__struct_config__.tag)
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            judge = self._judges.get(read.__class__)
            if judge is not None:
                judge(read)
            if not read.evidence:
                self.shadow.apply(read)

    def _job_registered(self, event: ev.JobRegistered) -> None:
        if event.job != self._next_job:
            self.complaints.append(f"job {event.job} is registered, and the next id is {self._next_job}")
        self._next_job = event.job + 1
        self._jobs[event.job] = spread(event.ranks)

    def _pin_touched(self, event: ev.PinTouched) -> None:
        if event.job in self._pins:
            self.complaints.append(f"job {event.job} pins twice")
        blocks = [block for _, ranges in event.blocks for block in spread(ranges)]
        if len(set(blocks)) != len(blocks) or 0 in blocks:
            self.complaints.append(f"job {event.job} pins a block twice, or the null block: {blocks}")
        self._pins[event.job] = event.blocks
        self.touched.append(blocks)

    def _rank_completed(self, event: ev.RankCompleted) -> None:
        waiting = self._jobs.get(event.job, [])
        if event.rank not in waiting:
            self.complaints.append(f"rank {event.rank} completes job {event.job}, which does not wait for it")
        else:
            waiting.remove(event.rank)

    def _job_settled(self, event: ev.JobSettled) -> None:
        if event.job in self._settled or self._jobs.get(event.job) != []:
            self.complaints.append(f"job {event.job} settles twice, or before every rank has reported")
        self._settled[event.job] = None

    def _blocks_freed(self, event: ev.BlocksFreed) -> None:
        if event.job not in self._settled:
            self.complaints.append(f"blocks of job {event.job} are freed before it has settled")
        if self._pins.pop(event.job, None) != event.blocks:
            self.complaints.append(f"job {event.job} frees other blocks than it pinned, or frees twice")
        self.freed.append([block for _, ranges in event.blocks for block in spread(ranges)][::-1])

    def _log_opened(self, event: ev.LogOpened) -> None:
        self._policy = event.policy

    def _request_ended(self, event: ev.RequestFinished | ev.RequestAborted) -> None:
        load = self._loading.get(event.request)
        if load is not None:
            self._ended_loading[load] = event.reason if isinstance(event, ev.RequestFinished) else "aborted"

    def _load_recovered(self, event: ev.LoadRecovered) -> None:
        ended = self._ended_loading.get(event.load, "")
        if self._policy == "recompute":
            due = "gone" if ended else "recomputed"
        else:
            due = "failed" if ended in ("", "error") else "gone"
        if event.action != due:
            self.complaints.append(f"load {event.load} is said to have {event.action}, and its request was {due}")

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        self._loads[event.load] = False
        self._loading[event.request] = event.load

    def _load_failed(self, event: ev.LoadFailed) -> None:
        if self._loads.get(event.load, True):
            self.complaints.append(f"load {event.load} fails twice, or after it has settled")
        self._loads[event.load] = True

    def _load_settled(self, event: ev.LoadSettled) -> None:
        failed = self._loads.pop(event.load, None)
        self._loading = {request: load for request, load in self._loading.items() if load != event.load}
        if failed is None or (event.outcome == "failed") != failed:
            self.complaints.append(f"load {event.load} settles twice, or as {event.outcome} against what was recorded")
        if event.missing:
            self.complaints.append(f"load {event.load} settles while ranks {event.missing} may still write")

    def _checkpoint(self, event: ev.Checkpoint) -> None:
        if event.digest != self.shadow.digest():
            self.complaints.append(f"the checkpoint at event {event.seq} differs from what the log folds to")

    def _invariant_violated(self, event: ev.InvariantViolated) -> None:
        self.violations += 1

    def _gap(self, event: ev.Gap) -> None:
        self.complaints.append(f"{event.dropped} events of {event.origin} were dropped: {event.reason}")


def spread(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the numbers of inclusive ranges, which may count down."""
    return [
        number
        for first, last in ranges
        for number in (range(first, last + 1) if first <= last else range(first, last - 1, -1))
    ]
