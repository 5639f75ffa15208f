"""Opens the database of a log in the way that is safe for what lies beside it. Nothing is changed, or left behind.

A log may be live, closed, torn, sealed, copied without its `-wal`, cut or damaged. Whatever is wrong with a file is one
of `ledger.errors`, in one line that says what to do. With `tolerate`, a copy of what is left of a damaged file takes
its place. This file knows SQLite and the tables `meta` and `alembic_version`, and nothing of events.
"""

import contextlib
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ledger.errors import FileCorrupt, FileMissing, FileNewer, LedgerFileError, NotALedger
from ledger.file import salvage, sqlite
from ledger.file.explain import brief, error_name, explain
from ledger.file.live_mark import is_live

PATIENCE_TRIES = 100
PATIENCE_S = 0.002
"""To a reader that may not write, SQLite answers "read-only" at the moment of a commit; a moment later it reads."""

T = TypeVar("T")


class LogDatabase:
    """The database of a log, open to be read.

    Attributes:
        path: the file, as it was named.
        meta: who wrote it.
        revisions: its schema.
        sealed: whether it is an incident file.
        damage: what could not be read of it, one line each, when damage is tolerated.
    """

    def __init__(self, path: Path, *, tolerate: bool = False) -> None:
        self.path = path
        self.damage: list[str] = []
        self._tolerate = tolerate
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._immutable = False
        self._salvaged = False
        self._file = self._find()
        self._connection = self._connect()
        try:
            self._check_owner()
            self.revisions = self._check_revisions()
            self.meta = {str(key): str(value) for key, value in self._rows("SELECT key, value FROM meta")}
            self.sealed = any(revision in sqlite.SEALED_REVISIONS for revision in self.revisions)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Nothing stays behind."""
        self._connection.close()
        self._drop_copy()

    def query(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query. Text comes as bytes.

        Raises:
            FileCorrupt: the file is damaged where the query looks.
        """
        try:
            # No `yield from`: it would close the cursor with the generator, and that may be after the connection.
            for row in self._patiently(lambda: self._connection.execute(sql)):  # noqa: UP028
                yield row
        except DAMAGE as error:
            raise self.problem(error) from error

    def copy(self, target: Path) -> None:
        """Copy the log as it is now into a new file, without a write-ahead log. A live one goes on meanwhile.

        Raises:
            FileCorrupt: the log is damaged.
            sqlite3.Error: the target cannot be written.
        """
        copy = sqlite3.connect(target, isolation_level=None)
        try:
            # All pages in one step: a backup in several starts anew whenever the log grows.
            self._patiently(lambda: self._connection.backup(copy, pages=-1))
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        except sqlite3.Error as error:
            if error_name(error).startswith("SQLITE_CORRUPT"):
                raise self.problem(error) from error
            raise
        finally:
            copy.close()

    def problem(self, error: Exception) -> LedgerFileError:
        """Return what an error of SQLite means for whoever reads this file."""
        if isinstance(error, sqlite3.Error):
            name = error_name(error)
            if name.startswith(_NOT_THE_FILE):
                return LedgerFileError(f"{self.path}: cannot be read: {explain(error)}.")
        first = last = count = 0
        with contextlib.suppress(OSError):
            for seq, _ in salvage.events(self._file):
                first, last, count = min(first or seq, seq), max(last, seq), count + 1
        readable = f"{count} events from {first} to {last} can still be read" if count else "no event can be read"
        return FileCorrupt(f"{self.path}: is damaged or cut off, {readable} ({brief(error)}). {COPY_AGAIN}")

    # --- reading ------------------------------------------------------------------------------------------------------

    def _fetch(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query, of a copy of what can be read if the file is damaged and that is tolerated."""
        self._follow()
        try:
            return self._patiently(lambda: self._connection.execute(sql, parameters).fetchall())
        except DAMAGE as error:
            self._give_up_or_salvage(error)
        return self._connection.execute(sql, parameters).fetchall()

    def _patiently(self, read: Callable[[], T]) -> T:
        """Read again when SQLite says that it cannot at this moment: a live log's index was just being written."""
        for _ in range(PATIENCE_TRIES):
            try:
                return read()
            except sqlite3.OperationalError as error:
                if not error_name(error).startswith(("SQLITE_READONLY", "SQLITE_BUSY", "SQLITE_PROTOCOL")):
                    raise
            if is_live(self._file):
                time.sleep(PATIENCE_S)
            else:
                self._reconnect()
        return read()

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        return [
            tuple(value.decode(errors="replace") if isinstance(value, bytes) else value for value in row)
            for row in self._fetch(query)
        ]

    def _follow(self) -> None:
        """A log that had no `-wal` when it was opened may have got one: its engine was just starting."""
        if self._salvaged or not self._immutable:
            return
        if sqlite.wal_path(self._file).exists() and is_live(self._file):
            self._reconnect()

    def _reconnect(self) -> None:
        self._connection.close()
        self._drop_copy()
        self._connection = self._connect()

    def _drop_copy(self) -> None:
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None

    def _give_up_or_salvage(self, error: Exception) -> None:
        """Raise what is wrong with the file or, if damage is tolerated, go on with a copy of what can be read."""
        problem = self.problem(error)
        if not self._tolerate or self._salvaged or not isinstance(problem, FileCorrupt):
            raise problem from error
        self.damage.append(str(problem))
        self._salvaged = True
        meta = self._meta_if_readable()
        self._connection.close()
        self._drop_copy()
        self._copy = tempfile.TemporaryDirectory(prefix="kvledger-")
        copy = Path(self._copy.name) / "salvaged.db"
        salvage.copy(self._file, copy, meta)
        self._connection = sqlite.open_to_read(copy, immutable=True)

    def _meta_if_readable(self) -> list[tuple[str, str]]:
        try:
            # SQLite then reads a file that is shorter than its header says. It writes nothing: the connection cannot.
            self._connection.execute("PRAGMA writable_schema = ON")
            rows = self._connection.execute("SELECT key, value FROM meta").fetchall()
            return [(key.decode(), value.decode()) for key, value in rows]
        except (*DAMAGE, AttributeError):  # a NULL where a page was lost has no text
            return []

    # --- opening ------------------------------------------------------------------------------------------------------

    def _find(self) -> Path:
        path = self.path
        try:
            status = path.stat()
        except FileNotFoundError:
            raise FileMissing(f"{path}: no such file. Look in the folder that ledger_path names.") from None
        except OSError as error:
            raise LedgerFileError(f"{path}: cannot be read: {explain(error)}.") from error
        if path.is_dir():
            raise NotALedger(f"{path}: is a folder. Name one of the .db files in it.")
        if not path.is_file():
            raise NotALedger(f"{path}: is not a file. Name a .db file that kvledger wrote.")
        if not os.access(path, os.R_OK):
            raise LedgerFileError(
                f"{path}: cannot be read: Permission denied. Copy it, or ask for the right to read it."
            )
        if status.st_size == 0:
            raise NotALedger(f"{path}: is empty. No event was ever written to it; look for another log of that engine.")
        return path.resolve()

    def _connect(self) -> sqlite3.Connection:
        """Connect in the one way that is safe for what lies beside the file."""
        file = self._file
        wal = sqlite.wal_path(file)
        try:
            has_wal = wal.exists() and (wal.stat().st_size > 0 or is_live(file))
            self._immutable = not has_wal
            if not has_wal:
                return sqlite.open_to_read(file, immutable=True)
            if sqlite.shm_path(file).exists():
                connection = sqlite.open_to_read(file, immutable=False)
                if is_live(file) or _can_use(connection):
                    return connection
                connection.close()
            return self._connect_to_copy(wal)
        except (sqlite3.Error, OSError) as error:
            raise LedgerFileError(f"{self.path}: cannot be opened: {explain(error)}.") from error

    def _connect_to_copy(self, wal: Path) -> sqlite3.Connection:
        """Connect to a copy, for a torn log without its `-shm`: SQLite would make one beside the file."""
        self._copy = tempfile.TemporaryDirectory(prefix="kvledger-")
        copy = Path(self._copy.name) / "copy.db"
        shutil.copyfile(self._file, copy)
        shutil.copyfile(wal, sqlite.wal_path(copy))
        connection = sqlite3.connect(copy, isolation_level=None, check_same_thread=False)
        connection.text_factory = bytes
        return connection

    def _check_owner(self) -> None:
        try:
            ((found,),) = self._patiently(lambda: self._connection.execute("PRAGMA application_id").fetchall())
            ours = found == sqlite.APPLICATION_ID
        except sqlite3.Error as error:
            if error_name(error) == "SQLITE_NOTADB":
                raise NotALedger(
                    f"{self.path}: is not a SQLite database. Name a .db file that kvledger wrote."
                ) from error
            if not error_name(error).startswith("SQLITE_CORRUPT"):
                raise LedgerFileError(f"{self.path}: cannot be read: {explain(error)}.") from error
            ours = sqlite.is_log(self._file)
            if ours:
                self._give_up_or_salvage(error)
        if not ours:
            raise NotALedger(f"{self.path}: is another program's database. Name a .db file that kvledger wrote.")

    def _check_revisions(self) -> tuple[str, ...]:
        revisions = tuple(sorted(str(name) for (name,) in self._rows("SELECT version_num FROM alembic_version")))
        unknown = [name for name in revisions if name not in sqlite.LOG_REVISIONS + sqlite.SEALED_REVISIONS]
        if not revisions or not all(map(_REVISION.fullmatch, unknown)):
            raise self.problem(sqlite3.DatabaseError("it names no schema"))
        if unknown:
            raise FileNewer(f"{self.path}: has the schema {', '.join(unknown)} of a newer kvledger. {UPGRADE}")
        return revisions


def _can_use(connection: sqlite3.Connection) -> bool:
    """Return whether SQLite can read a torn log in place; damage is for others to find."""
    try:
        connection.execute("PRAGMA application_id").fetchone()
    except sqlite3.Error as error:
        return error_name(error).startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
    return True


DAMAGE = (sqlite3.Error, UnicodeDecodeError)
"""What reading a damaged file ends in. The second is Python's, over an error of SQLite's that quotes what it found."""

_NOT_THE_FILE = tuple(
    f"SQLITE_{name}" for name in ("BUSY", "READONLY", "PROTOCOL", "IOERR", "CANTOPEN", "NOMEM", "FULL")
)
"""Errors of SQLite's that say nothing about what the file holds."""
_REVISION = re.compile(r"(log|sealed)_\d{4}")
COPY_AGAIN = (
    "Copy it again from the host that wrote it, with the -wal file beside it; if there is no other, "
    "`kvledger seal --salvage FILE TARGET` takes what can be read."
)
UPGRADE = "Upgrade kvledger to read it."
