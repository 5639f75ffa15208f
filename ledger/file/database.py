"""The SQLite file of one log, as it is written: made, appended to, kept in place, closed.

A batch is a JSON array in bytes, which SQLite takes apart: the statement does not care where the bytes come from. This
file knows SQL and files, and nothing of threads or of an engine. SQLAlchemy and Alembic are imported only to make a
file.
"""

import errno
import logging
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ledger import events as ev
from ledger.errors import LedgerNotWritable
from ledger.file import sqlite
from ledger.file.explain import explain
from ledger.file.live_mark import LiveMark, is_same_file
from ledger.file.publish import publish, unfinished

logger = logging.getLogger("kvledger")


class Database:
    """The file of one log, and the only connection that writes it.

    A file that somebody removes or moves while it is written is put back whole, with a warning: until then the open
    connection is the only copy. That may surprise whoever removed it. Without it, a clean-up job would end the audit of
    an engine that serves on for weeks, and nobody would notice before the incident. A file that has taken the name
    meanwhile is never overwritten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._mark: LiveMark | None = None
        self._status: os.stat_result | None = None
        self._rescued = path.with_name(f".{path.name}.rescued")
        self._append = ""
        self._append_after = ""
        # An attempt that ended in an error may have reached the file all the same.
        self._uncertain = False

    def create(self, meta: Mapping[str, str]) -> None:
        """Make the file.

        Raises:
            LedgerNotWritable: it cannot be made. Nothing is left behind.
        """
        # Imported here because it takes 0.4 s, and most processes that load this file make none.
        from ledger.file import migrate, schema  # noqa: PLC0415

        self._append, self._append_after = schema.APPEND, schema.APPEND_AFTER
        made = False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            migrate.create(self._path)
            made = True
            connection = self._open()
            connection.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", meta.items())
            # A SQLite without its JSON functions is found out here, and not by the first event.
            connection.execute(self._append, (b"[]",))
        except (OSError, sqlite3.Error) as error:
            self._disconnect()
            if made:
                for file in (self._path, sqlite.wal_path(self._path), sqlite.shm_path(self._path)):
                    file.unlink(missing_ok=True)
            raise LedgerNotWritable(_cannot_start(self._path, error)) from error

    def append(self, lines: bytes) -> None:
        """Append events, a JSON array of objects. All of them or none; those that are in the file already are left out.

        Raises:
            sqlite3.Error, OSError: the disk did not take them.
        """
        connection = self._stay_in_place()
        if self._uncertain:
            (last_seq,) = connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
            connection.execute(self._append_after, (lines, last_seq))
        else:
            self._uncertain = True
            connection.execute(self._append, (lines,))
        self._uncertain = False

    def close(self) -> None:
        """Move the write-ahead log into the file and close it.

        Raises:
            sqlite3.Error, OSError: it cannot be moved. The log is complete all the same, with its `-wal`.
        """
        try:
            self._stay_in_place().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._disconnect()

    def _open(self) -> sqlite3.Connection:
        connection = self._connection = sqlite.open_to_write(self._path)
        connection.execute("SELECT max(seq) FROM events").fetchone()  # the -wal is made by the first look
        self._mark = LiveMark(self._path)
        self._status = self._path.stat()
        return connection

    def _disconnect(self) -> None:
        if self._mark is not None:
            self._mark.release()
            self._mark = None
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    def _stay_in_place(self) -> sqlite3.Connection:
        """Return the connection to the file that has the log's name, which may mean to put that file back."""
        connection = self._connection
        if connection is not None and self._status is not None and self._mark is not None:
            if not is_same_file(self._status, self._path):
                self._rescue(connection)
            elif not self._mark.is_in_place(self._path):
                self._disconnect()  # which moves what the lost -wal held into the file
            else:
                return connection
        if self._rescued.exists():
            for stale in (sqlite.wal_path(self._path), sqlite.shm_path(self._path)):
                if not self._path.exists():
                    stale.unlink(missing_ok=True)
            publish(self._rescued, self._path)
            logger.warning("kvledger: %s had been removed or moved, and was put back with all its events.", self._path)
        return self._open()

    def _rescue(self, connection: sqlite3.Connection) -> None:
        """Copy the file, which has lost its name, out of the open connection, and close that."""
        if self._path.exists():
            raise FileExistsError(errno.EEXIST, "another file has taken its name; move that one away")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._rescued.unlink(missing_ok=True)
        copy = sqlite3.connect(self._rescued, isolation_level=None)
        try:
            connection.backup(copy, pages=-1)
        except BaseException:
            self._rescued.unlink(missing_ok=True)
            raise
        finally:
            copy.close()
        # Before the file is back: a connection that closes removes the -wal of that name.
        self._disconnect()


def write_log(target: Path, meta: Mapping[str, str], events: Sequence[ev.AnyEvent]) -> None:
    """Write events to a new log.

    Raises:
        LedgerNotWritable: the target exists, or cannot be written. Nothing is left behind.
    """
    with unfinished(target) as path:
        database = Database(path)
        try:
            database.create(meta)
        except LedgerNotWritable as error:  # its advice is for an engine
            raise error.__cause__ or error from None
        try:
            database.append(msgspec.json.encode(events))
        finally:
            database.close()


def _cannot_start(path: Path, error: Exception) -> str:
    folder = path.parent
    if isinstance(error, FileExistsError) and path.exists():
        return f"{path} exists, and a log is never continued by a later start. Give this start an id of its own."
    in_the_way = next((part for part in (folder, *folder.parents) if part.exists()), folder)
    reason = explain(error) if in_the_way.is_dir() else f"{in_the_way} is a file and not a folder"
    return f"the audit log {path} cannot be made: {reason}. Set ledger_path to a folder that this process may write."
