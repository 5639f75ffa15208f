"""The background writer: takes events from the in-memory log and writes them to one SQLite file per engine start.

One daemon thread, one connection, one statement a batch. The engine's threads never wait for it: they append to the
log, and the log counts what it had to drop. When the disk is full, locked or gone, the writer keeps its batch, warns
once, tries again, and says when it has recovered. It raises nothing into the engine except at the start: if the audit
log cannot be written, whoever asked for it must know before the engine serves.

This file knows the log, events as JSON, and the database that it appends to. It knows no SQL.
"""

import logging
import os
import platform
import re
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

import ledger
from ledger import events as ev
from ledger.file.database import Database
from ledger.file.explain import explain
from ledger.live.log import TOO_SLOW, Log

logger = logging.getLogger("kvledger")

BATCH_EVENTS = 1_000
"""Events in one statement. Taking and encoding them holds Python's lock for well under a millisecond: see
`tools/bench/writer.py`."""

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
"""Between two attempts the pause doubles from one to the other: whoever frees a disk sees the log recover at once."""

HURRIED_RETRY_S = 0.05
"""The pause while somebody waits for a flush or a close, whose time is short."""

NAME_LIMIT = 100
"""Characters of an engine's name in a file name: file systems allow 255 bytes for the whole of it."""


def log_path(folder: Path | str, engine: str, dp_rank: int, boot: str) -> Path:
    """Return the path of the log of one start of an engine: `<folder>/<engine>-<dp rank>-<boot>.db`."""
    return Path(folder) / f"{_for_file_name(engine) or 'engine'}-{dp_rank}-{_for_file_name(boot)}.db"


def _for_file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".-")[:NAME_LIMIT]


class Writer:
    """Writes the log of one start of an engine.

    Args:
        log: where events come from; only this writer drains it.
        path: the file to make; `log_path` gives its name.
        flush_interval_ms: time between two flushes; what a killed process may lose.
        engine: the engine's name, for the table `meta`.
        boot: this start's id, for the table `meta`.
        facts: further rows of the table `meta`.
        batch_events: events in one statement.
    """

    def __init__(
        self,
        log: Log,
        path: Path,
        *,
        flush_interval_ms: int = 50,
        engine: str = "",
        boot: str = "",
        facts: Mapping[str, str] | None = None,
        batch_events: int = BATCH_EVENTS,
    ) -> None:
        self.path = path.absolute()
        self._log = log
        self._interval_s = flush_interval_ms / 1_000
        self._batch_events = batch_events
        self._meta = {
            "engine": engine,
            "boot": boot,
            "created_ts_ns": str(time.time_ns()),
            "flush_interval_ms": str(flush_interval_ms),
            "kvledger": ledger.__version__,
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            **(facts or {}),
        }
        self._database = Database(self.path)
        self._thread: threading.Thread | None = None
        self._process_id = 0
        # The batch in hand: kept until it is in the file.
        self._batch: list[ev.Event] = []
        self._encoded = b""
        self._snapshot_due = False
        self._failing_since_s: float | None = None
        self._pause_s = FIRST_RETRY_S
        # Shared by the writer's thread and those who wait for it. Never held during I/O.
        self._turn = threading.Condition()
        self._written_seq = 0
        self._flush_to_seq = 0
        self._flushes_waiting = 0
        self._closing = False
        self._deadline_s = 0.0

    @property
    def written_seq(self) -> int:
        """The place of the newest event that is in the file."""
        return self._written_seq

    def start(self) -> None:
        """Make the file and start writing.

        Raises:
            LedgerNotWritable: the file cannot be made. Nothing is left behind.
        """
        self._database.create(self._meta)
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvledger-writer", daemon=True)
        self._thread.start()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until what was appended before this call is in the file. Return whether it is.

        For `atexit`, when nobody is left who could close the log: it ends torn then, but complete. In a forked child
        it does nothing.
        """
        thread = self._thread
        if thread is None or self._process_id != os.getpid():
            return False
        target = self._log.last_seq
        with self._turn:
            self._flush_to_seq = max(self._flush_to_seq, target)
            self._flushes_waiting += 1
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._written_seq >= target or not thread.is_alive(), timeout_s)
            self._flushes_waiting -= 1
        return self._written_seq >= target

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write what there is, move the write-ahead log into the file, close it. Return whether all was written.

        Whoever closes appends `log_closed` before. Returns after `timeout_s` at the latest, even if the disk hangs.
        """
        thread = self._thread
        if thread is None or self._process_id != os.getpid():
            return False
        with self._turn:
            self._closing = True
            self._deadline_s = time.monotonic() + timeout_s
            self._turn.notify_all()
        thread.join(timeout_s)
        left = self._log.last_seq - self._written_seq
        if left:
            logger.error(
                "kvledger: %s ends without its last %d events: the disk did not take them within %g s.",
                self.path,
                left,
                timeout_s,
            )
        elif thread.is_alive():
            logger.warning("kvledger: %s is complete, but its -wal file could not be moved into it.", self.path)
        return not left

    # --- the writer's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        done = False
        while not done:
            with self._turn:
                self._wait()
            complete = self._write_all()
            with self._turn:
                self._turn.notify_all()
                done = self._closing and (complete or time.monotonic() >= self._deadline_s)
        try:
            self._database.close()
        except (sqlite3.Error, OSError) as error:
            logger.warning("kvledger: %s could not be closed: %s.", self.path, explain(error))

    def _wait(self) -> None:
        """Wait for the next turn. The lock is held."""
        if self._failing_since_s is None:
            self._turn.wait_for(lambda: self._closing or self._flush_to_seq > self._written_seq, self._interval_s)
        elif self._closing or self._flushes_waiting:
            self._turn.wait(HURRIED_RETRY_S)
        else:
            self._turn.wait_for(lambda: self._closing or self._flushes_waiting, self._pause_s)

    def _write_all(self) -> bool:
        """Write until the log is empty. Return False when the disk did not take a batch; it is kept."""
        try:
            while self._batch or self._take_batch():
                self._store()
                self._written_seq = self._batch[-1].seq
                self._batch, self._encoded = [], b""
                if self._failing_since_s is not None:
                    self._recovered()
                if self._snapshot_due:
                    self._snapshot_due = False
                    self._log.snapshot()
        except Exception as error:  # noqa: BLE001 - ending on what nobody thought of would lose the log silently
            self._failed(error)
            return False
        return True

    def _take_batch(self) -> bool:
        self._batch = self._log.drain(self._batch_events)
        return bool(self._batch)

    def _store(self) -> None:
        """Put the batch in hand into the file."""
        try:
            self._encoded = self._encoded or _ENCODER.encode(self._batch)
            self._database.append(self._encoded)
        except _NOT_THE_DISK as error:
            if not _is_about_the_events(error):
                raise
            for event in self._batch:
                self._store_alone(event)

    def _store_alone(self, event: ev.Event) -> None:
        """Store one event of a batch that could not be stored. If it is the reason, a gap takes its place."""
        try:
            self._database.append(_ENCODER.encode((event,)))
        except _NOT_THE_DISK as error:
            if not _is_about_the_events(error):
                raise
            gap = ev.Gap(
                event.seq,
                event.ts_ns,
                event.mono_ns,
                ev.SCHEDULER,
                event.step,
                origin=event.source,
                dropped=1,
                reason=f"a {ev.kind_of(event)} could not be stored: {type(error).__name__}",
                first_ts_ns=event.ts_ns,
                last_ts_ns=event.ts_ns,
            )
            self._database.append(_ENCODER.encode((gap,)))
            logger.warning("kvledger: %s: a gap takes the place of event %d: %s", self.path, event.seq, error)
            self._snapshot_due = self._snapshot_due or event.source == ev.SCHEDULER

    def _failed(self, error: Exception) -> None:
        if self._failing_since_s is not None:
            self._pause_s = min(self._pause_s * 2, LONGEST_RETRY_S)
            return
        self._failing_since_s = time.monotonic()
        self._pause_s = FIRST_RETRY_S
        self._log.unwritten_because = f"the log could not be written ({explain(error)})"
        logger.warning(
            "kvledger: cannot write %s: %s. The engine serves on, and events are kept in memory; when there are more "
            "than queue_limit_events of them, the rest is dropped and a gap is recorded.",
            self.path,
            explain(error),
        )

    def _recovered(self) -> None:
        failing_s = time.monotonic() - (self._failing_since_s or 0.0)
        self._failing_since_s = None
        self._log.unwritten_because = TOO_SLOW
        logger.warning("kvledger: %s is written again, after %.1f s.", self.path, failing_s)


_ENCODER = msgspec.json.Encoder()

_NOT_THE_DISK = (sqlite3.Error, msgspec.MsgspecError, UnicodeError, OverflowError, TypeError)
"""What storing a batch may end in because of the events in it."""


def _is_about_the_events(error: Exception) -> bool:
    """Return whether an error would come again on any disk."""
    if isinstance(error, sqlite3.Error):
        return isinstance(error, sqlite3.IntegrityError | sqlite3.DataError) or "malformed JSON" in str(error)
    return True
