"""The background writer: takes events from the in-memory log and puts them into one SQLite file per start of an engine.

One daemon thread, one connection, one statement a batch. The engine's threads never wait for it: they append to the log, and
the log counts what it had to drop. When the disk is full, locked or gone, the writer keeps its batch, says so once, tries
again, and says so when it has recovered. It raises nothing into the engine, except at the start: who asked for an audit log
that cannot be written must know before the engine serves.

A batch is a JSON array of bytes: SQLite takes it apart. So the statement does not care where the bytes come from.

This file knows the log, events as JSON, and `ledger.sqlite`. It imports neither SQLAlchemy nor Alembic before a file is made.
"""

import logging
import os
import platform
import re
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import ledger
from ledger import events as ev
from ledger import sqlite
from ledger.errors import LedgerNotWritable
from ledger.log import Log

logger = logging.getLogger("kvledger")

BATCH_EVENTS = 1_000
"""Events in one statement. Encoding them holds Python's lock for about 0.3 ms; see `tools/bench/writer.py`."""

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
"""Between two attempts the pause doubles up to this: an operator who frees a disk sees the log recover at once."""

CLOSING_RETRY_S = 0.05
"""While closing, time is short, so the pause does not grow."""

NAME_LIMIT = 100
"""Characters of an engine's name in a file name: file systems allow 255 bytes for the whole of it."""


def log_path(folder: Path | str, engine: str, dp_rank: int, boot: str) -> Path:
    """Return the path of the log of one start of an engine: `<folder>/<engine>-<dp rank>-<boot>.db`."""
    return Path(folder) / f"{_file_name(engine) or 'engine'}-{dp_rank}-{_file_name(boot)}.db"


def _file_name(text: str) -> str:
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
        self.path = path
        self._log = log
        self._interval_s = flush_interval_ms / 1_000
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
        self._batch_events = batch_events
        self._append = ""
        self._append_after = ""
        # The batch in hand: kept until it is in the file.
        self._batch: Sequence[ev.Event] = ()
        self._encoded = b""
        self._retrying = False
        self._connection: sqlite3.Connection | None = None
        self._mark: sqlite.LiveMark | None = None
        self._inode = (0, 0)
        self._failing_since_s: float | None = None
        self._pause_s = FIRST_RETRY_S
        self._turn = threading.Condition()
        self._closing = False
        self._deadline_s = 0.0
        self._flush_to_seq = 0
        self._written_seq = 0
        self._thread: threading.Thread | None = None
        self._process = 0

    @property
    def written_seq(self) -> int:
        """The place of the newest event that is in the file."""
        return self._written_seq

    def start(self) -> None:
        """Make the file and start writing.

        Raises:
            LedgerNotWritable: the file cannot be made. Nothing is left behind.
        """
        # Imported here because it takes 0.4 s, and most processes that load this file never write.
        import sqlalchemy.exc  # noqa: PLC0415

        from ledger import migrate, schema  # noqa: PLC0415

        self._append, self._append_after = schema.APPEND, schema.APPEND_AFTER
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            migrate.create(self.path)
            self._open()
            self._write_meta()
        except FileExistsError as error:
            raise LedgerNotWritable(self._cannot_start(error)) from error
        except (OSError, sqlite3.Error, sqlalchemy.exc.SQLAlchemyError) as error:
            self._disconnect()
            cause = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) and error.orig is not None else error
            raise LedgerNotWritable(self._cannot_start(cause)) from error
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvledger-writer", daemon=True)
        self._thread.start()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until what was appended before this call is in the file. Return whether it is.

        For `atexit`, when nobody is left to close the log: the file ends torn, but complete. In a forked child it does
        nothing.
        """
        thread = self._thread
        if thread is None or self._process != os.getpid():
            return False
        target = self._log.last_seq
        with self._turn:
            self._flush_to_seq = max(self._flush_to_seq, target)
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._written_seq >= target or not thread.is_alive(), timeout_s)
        return self._written_seq >= target

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write what there is, move the write-ahead log into the file, and close it. Return whether all was written.

        Whoever closes appends `log_closed` before. Returns after `timeout_s` at the latest, even if the disk hangs.
        """
        thread = self._thread
        if thread is None or self._process != os.getpid():
            return False
        with self._turn:
            self._closing = True
            self._deadline_s = time.monotonic() + timeout_s
            self._turn.notify_all()
        thread.join(timeout_s)
        left = self._log.last_seq - self._written_seq
        if thread.is_alive() or left:
            logger.warning("kvledger: closed %s without its last %d events: the disk did not take them in time.", self.path, left)
            return False
        return True

    # The writer's thread from here on.

    def _run(self) -> None:
        while True:
            with self._turn:
                self._wait()
            complete = self._write_all()
            with self._turn:
                self._turn.notify_all()
                done = self._closing and (complete or time.monotonic() >= self._deadline_s)
            if done:
                break
        self._finish()

    def _wait(self) -> None:
        """Wait for the next turn. Called with the lock held."""
        if self._failing_since_s is None:
            self._turn.wait_for(lambda: self._closing or self._flush_to_seq > self._written_seq, self._interval_s)
        elif self._closing:
            self._turn.wait(CLOSING_RETRY_S)
        else:
            self._turn.wait_for(lambda: self._closing, self._pause_s)

    def _write_all(self) -> bool:
        """Write until the log is empty. Return False if the disk did not take a batch; it is kept."""
        while True:
            if not self._batch:
                self._batch = self._log.drain(self._batch_events)
                if not self._batch:
                    return True
                self._encoded = self._encode(self._batch)
            try:
                self._store()
            except (sqlite3.Error, OSError) as error:
                self._failed(error)
                return False
            self._written_seq = self._batch[-1].seq
            self._batch, self._encoded = (), b""
            if self._failing_since_s is not None:
                self._recovered()

    def _encode(self, batch: Sequence[ev.Event]) -> bytes:
        return _ENCODER.encode(batch)

    def _store(self) -> None:
        """Put the batch in hand into the file."""
        connection = self._connection
        if connection is None:
            connection = self._open()
        if not self._retrying:
            self._retrying = True
            connection.execute(self._append, (self._encoded,))
        else:
            # An attempt that ended in an error may have reached the file all the same.
            (last_seq,) = connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
            connection.execute(self._append_after, (self._encoded, last_seq))
        self._retrying = False

    def _failed(self, error: Exception) -> None:
        now_s = time.monotonic()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
            self._pause_s = FIRST_RETRY_S
            logger.warning(
                "kvledger: cannot write %s: %s. The engine serves on; events are kept in memory, and beyond "
                "queue_limit_events they are dropped and a gap is recorded.",
                self.path,
                sqlite.explain(error),
            )
        else:
            self._pause_s = min(self._pause_s * 2, LONGEST_RETRY_S)

    def _recovered(self) -> None:
        since_s, self._failing_since_s = self._failing_since_s, None
        logger.warning("kvledger: writing %s again after %.1f s.", self.path, time.monotonic() - (since_s or 0.0))

    def _open(self) -> sqlite3.Connection:
        self._connection = sqlite.open_to_write(self.path)
        return self._connection

    def _write_meta(self) -> None:
        connection = self._connection
        if connection is None:
            raise sqlite3.ProgrammingError("not open")
        connection.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", self._meta.items())
        self._mark = sqlite.LiveMark(self.path)
        status = self.path.stat()
        self._inode = (status.st_dev, status.st_ino)

    def _disconnect(self) -> None:
        if self._mark is not None:
            self._mark.release()
            self._mark = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _finish(self) -> None:
        try:
            if self._connection is not None:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._disconnect()
        except (sqlite3.Error, OSError) as error:
            logger.warning("kvledger: %s was written but not closed: %s.", self.path, sqlite.explain(error))

    def _cannot_start(self, error: Exception) -> str:
        if isinstance(error, FileExistsError) and self.path.parent.is_dir():
            return f"{self.path} exists: a log is never continued by a later start. Give this start an id of its own."
        return (
            f"the audit log cannot be written at {self.path}: {sqlite.explain(error)}. "
            "Set ledger_path to a folder that this process may write."
        )


_ENCODER = msgspec.json.Encoder()
