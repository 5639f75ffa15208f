"""The in-memory log: gives every event its place, applies it to the state, and keeps it until the writer takes it.

The engine's thread appends; evidence from the workers comes in on another thread; the writer drains on a third. The one
lock is held for the length of an append (microseconds) and never across I/O. Nobody ever waits for the disk: when the
queue is full, events still change the state, are counted, and a `gap` says so as soon as there is room again.

This file knows events and the state. It knows nothing of SQLite, files or vLLM.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ledger import events as ev
from ledger.state.apply import State

E = TypeVar("E", bound=ev.Event)

CHECKPOINT_INTERVAL_EVENTS = 512
"""Scheduler events between two digests: a replay then narrows a disagreement to 512 events, at about 2 ns an event."""

QUEUE_LIMIT_EVENTS = 200_000
"""Events kept in memory while the disk does not take them: about 60 MB, or minutes of a busy engine."""

TOO_SLOW = "the writer could not keep up"
"""Why events wait in memory, unless the writer knows better."""


class Log:
    """The log of one engine start.

    Args:
        state: the projection that events are applied to.
        queue_limit_events: how many events may wait for the writer before events are dropped.
        checkpoint_interval_events: scheduler events between two `checkpoint` events; 0 for none.
        wall_ns: the wall clock.
        mono_ns: the monotonic clock.

    Attributes:
        step: the engine step that events are stamped with; the connector advances it.
        unwritten_because: why the writer does not take events, for the gap that may follow. The writer keeps it.
    """

    def __init__(
        self,
        state: State,
        *,
        queue_limit_events: int = QUEUE_LIMIT_EVENTS,
        checkpoint_interval_events: int = CHECKPOINT_INTERVAL_EVENTS,
        wall_ns: Callable[[], int] = time.time_ns,
        mono_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.state = state
        self.step = 0
        self._apply = state.apply
        self._queue: deque[ev.Event] = deque()
        self._queue_limit_events = queue_limit_events
        self._interval_events = checkpoint_interval_events
        self._since_checkpoint = 0
        self._checkpoint_mono_ns = mono_ns()
        self._next_seq = 1
        self._lock = threading.Lock()
        self._wall_ns = wall_ns
        self._mono_ns = mono_ns
        self._losses: dict[tuple[str, str], list[int]] = {}
        self._must_snapshot = False
        self.unwritten_because = TOO_SLOW

    @property
    def last_seq(self) -> int:
        """The place of the newest event, 0 for an empty log."""
        return self._next_seq - 1

    @property
    def queued_events(self) -> int:
        """How many events wait for the writer."""
        return len(self._queue)

    def mono_ns(self) -> int:
        """Return what the clock shows that events are stamped with as `mono_ns`."""
        return self._mono_ns()

    def append(self, kind: type[E], **fields: Any) -> E:
        """Append a scheduler event, apply it, and return it.

        Raises:
            Refused: a rule of the book forbids the event. Nothing was appended or changed.
        """
        with self._lock:
            if self._losses:
                self._report_losses()
            event = kind(self._next_seq, self._wall_ns(), self._mono_ns(), ev.SCHEDULER, self.step, **fields)
            self._apply(event)
            if len(self._queue) < self._queue_limit_events and not self._losses:
                self._queue.append(event)
                self._next_seq += 1
            else:
                self._drop(event)
            self._since_checkpoint += 1
            if self._since_checkpoint == self._interval_events:
                self._checkpoint()
        return event

    def append_evidence(self, event: ev.Event) -> None:
        """Append what a worker knows; only its place in the log is new. The state is not touched."""
        with self._lock:
            if self._losses:
                self._report_losses()
            self._enqueue(msgspec.structs.replace(event, seq=self._next_seq))

    def checkpoint(self, alive_interval_ns: int | None = None) -> None:
        """Append the digest of the state as it is now, if there is anything new to say by it.

        Args:
            alive_interval_ns: after this time without a digest, one is appended although nothing has happened since.
        """
        with self._lock:
            silent = alive_interval_ns is not None and self._mono_ns() - self._checkpoint_mono_ns >= alive_interval_ns
            if self._since_checkpoint or silent:
                self._checkpoint()

    def snapshot(self) -> None:
        """Append the whole state: a fold that cannot get across what is missing before this goes on from here."""
        with self._lock:
            self._checkpoint(book=msgspec.Raw(self.state.encode()))

    def lose(self, origin: str, dropped: int, reason: str) -> None:
        """Record that `dropped` events of `origin` were lost elsewhere, for `reason`."""
        with self._lock:
            now_ns = self._wall_ns()
            self._count_loss(origin, reason, dropped, now_ns, now_ns)
            if origin == ev.SCHEDULER:
                self._must_snapshot = True
            self._report_losses()

    def drain(self, limit: int) -> list[ev.Event]:
        """Take up to `limit` events, oldest first. Called by one writer only."""
        if self._losses:
            # Nobody may append any more, and what was dropped must not go unsaid for that.
            with self._lock:
                self._report_losses()
        queue = self._queue
        return [queue.popleft() for _ in range(min(limit, len(queue)))]

    # Under the lock from here on.

    def _enqueue(self, event: ev.Event) -> None:
        if len(self._queue) < self._queue_limit_events and not self._losses:
            self._queue.append(event)
            self._next_seq += 1
        else:
            self._drop(event)

    def _drop(self, event: ev.Event) -> None:
        self._count_loss(event.source, f"{self.unwritten_because} and the queue was full", 1, event.ts_ns, event.ts_ns)
        if event.source == ev.SCHEDULER:
            self._must_snapshot = True

    def _count_loss(self, origin: str, reason: str, dropped: int, first_ts_ns: int, last_ts_ns: int) -> None:
        loss = self._losses.setdefault((origin, reason), [0, first_ts_ns, last_ts_ns])
        loss[0] += dropped
        loss[2] = last_ts_ns

    def _report_losses(self) -> None:
        """Place the gaps and, if the state cannot be folded across them, the state itself - once there is room."""
        if len(self._queue) > self._queue_limit_events // 2:
            return
        losses, self._losses = self._losses, {}
        for (origin, reason), (dropped, first_ts_ns, last_ts_ns) in losses.items():
            self._enqueue(
                self._make(
                    ev.Gap,
                    origin=origin,
                    dropped=dropped,
                    reason=reason,
                    first_ts_ns=first_ts_ns,
                    last_ts_ns=last_ts_ns,
                )
            )
        if self._must_snapshot:
            self._must_snapshot = False
            self._checkpoint(book=msgspec.Raw(self.state.encode()))

    def _checkpoint(self, **fields: Any) -> None:
        self._since_checkpoint = 0
        self._checkpoint_mono_ns = self._mono_ns()
        state = self.state
        self._enqueue(
            self._make(
                ev.Checkpoint,
                digest=state.digest(),
                open_jobs=len(state.book.jobs),
                pinned_blocks=state.pinned_blocks(),
                waiting_loads=len(state.book.loads),
                **fields,
            )
        )

    def _make(self, kind: type[E], **fields: Any) -> E:
        return kind(self._next_seq, self._wall_ns(), self._mono_ns(), ev.SCHEDULER, self.step, **fields)
