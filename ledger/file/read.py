"""Reads a log: a live one, a closed one, a torn one, a sealed one. Reading changes no file and leaves none behind.

Whatever is wrong with a file is one of `ledger.errors`, in one line that says what to do. Old versions of an event are
lifted here, one step at a time, when they are read; stored rows stay as they are.

This file knows events and `ledger.file.sqlite`.
"""

import contextlib
import operator
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypeVar

import msgspec

from ledger import events as ev
from ledger.errors import FileCorrupt, FileMissing, FileNewer, LedgerFileError, NotALedger
from ledger.file import salvage, sqlite
from ledger.file.explain import brief, error_name, explain
from ledger.file.live_mark import is_live

PAGE_EVENTS = 2_000
"""Events read at a time, each page in a read transaction of its own: a long one makes a live log's `-wal` grow."""

PATIENCE_TRIES = 100
PATIENCE_S = 0.002
"""To a reader that may not write, SQLite answers "read-only" at the moment of a commit; a moment later it reads."""

T = TypeVar("T")

End: TypeAlias = Literal["closed", "torn", "live"]
"""How a log ends: with `log_closed`, without it, or not yet, because an engine writes it."""

Upcaster: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTERS: dict[str, Upcaster] = {}
"""By the tag of an old version: lifts the fields of an event, its tag among them, by one version.

When `load_failed` becomes `load_failed@2`, the step that lifts the old shape stands here under `load_failed`.
"""


def open_log(path: Path | str, *, tolerate: bool = False) -> "LogFile":
    """Return an open log; close it, or use it in a `with`.

    Args:
        path: the file.
        tolerate: read what can be read of a damaged file; `LogFile.damage` says what cannot.

    Raises:
        FileMissing, NotALedger, FileCorrupt, FileNewer: the file cannot be read; one line that says what to do.
    """
    return LogFile(Path(path), tolerate=tolerate)


class Page(NamedTuple):
    """Some events in a row: the place and the line of each as they are stored, and the events."""

    rows: list[tuple[int, bytes]]
    events: list[ev.AnyEvent]


class LogFile:
    """An open log.

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
            self._check_ends()
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

    # --- what the log is ----------------------------------------------------------------------------------------------

    @property
    def first_seq(self) -> int:
        """The place of the first event, 0 for an empty log."""
        return self._seq("SELECT min(seq) FROM events")

    @property
    def last_seq(self) -> int:
        """The place of the newest event, 0 for an empty log. It grows while the log is live."""
        return self._seq("SELECT max(seq) FROM events")

    @property
    def end(self) -> End:
        """How the log ends: `closed`, `torn`, or `live`. For a sealed file: how it ended when it was sealed."""
        live = is_live(self._file)  # asked first: a log that is closed meanwhile must not look torn
        if self._rows("SELECT kind FROM events ORDER BY seq DESC LIMIT 1") == [("log_closed",)]:
            return "closed"
        if self.sealed:
            return "live" if self._rows('SELECT "end" FROM seal') == [("live",)] else "torn"
        return "live" if live else "torn"

    def check_not_empty(self) -> None:
        """Refuse a log that holds no event and that nobody writes: what its engine wrote is not in this file.

        Each log begins with `log_opened`, so without an event there is nothing to judge, and nothing that was healthy.

        Raises:
            FileCorrupt: there is no event, and there will be none.
        """
        if self.last_seq or self.end != "torn":
            return
        wal = sqlite.wal_path(self.path).name
        if self.sealed:
            why = (
                "it was sealed from a copy without its -wal file, most likely. Seal the log again where it was written"
            )
        elif self._immutable:
            why = f"most likely its -wal file was not copied. Copy {wal} too, beside it"
        else:
            why = (
                f"{wal} is cut, or the engine ended before its first flush. Copy both again from the host that wrote it"
            )
        raise FileCorrupt(f"{self.path}: holds no event; {why}.")

    @property
    def held_back_ms(self) -> int:
        """How many milliseconds of events the writer of a torn log may have held in memory when it was killed."""
        text = self.meta.get("flush_interval_ms", "")
        return int(text) if text.isdecimal() else 0

    @property
    def lacks_wal(self) -> bool:
        """Whether a torn log has no `-wal`, although a killed engine leaves one behind.

        It was copied without it, and lacks the newest events; or another program has moved the `-wal` into the file.
        """
        return not self.sealed and self._immutable and self.end == "torn"

    # --- its events ---------------------------------------------------------------------------------------------------

    def events(self, after_seq: int = 0, until_seq: int | None = None) -> Iterator[ev.AnyEvent]:
        """Yield the events after `after_seq` up to `until_seq`, both places in the log, in order.

        Of a live log, yields what is there when the end is reached; a later call goes on from there.

        Raises:
            FileCorrupt: an event is missing or cannot be read, and damage is not tolerated.
            FileNewer: an event is of a kind or version that this kvledger does not know.
        """
        after, last = after_seq, until_seq if until_seq is not None else _LAST_PLACE
        while after < last:
            before = after
            events = self._read_in_bulk(after, last)
            if events is None:
                after, page = self._read_page(after, last)
                events = page.events
            else:
                after += len(events)
            if after == before:
                return
            yield from events

    def pages(self, after_seq: int = 0, until_seq: int | None = None) -> Iterator[Page]:
        """Yield the same events as `events`, a page at a time, each with its line as it is stored."""
        after, last = after_seq, until_seq if until_seq is not None else _LAST_PLACE
        while after < last:
            before = after
            after, page = self._read_page(after, last)
            if after == before:
                return
            yield page

    def query(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query. Text comes as bytes.

        Raises:
            FileCorrupt: the file is damaged where the query looks.
        """
        try:
            # No `yield from`: it would close the cursor with the generator, and that may be after the connection.
            for row in self._patiently(lambda: self._connection.execute(sql)):  # noqa: UP028
                yield row
        except _DAMAGE as error:
            raise self.problem(error) from error

    def gaps(self) -> list[ev.Gap]:
        """Return all gaps of the log, without a fold.

        Raises:
            FileCorrupt: the file is damaged.
        """
        lines = [bytes(data) for (data,) in self.query("SELECT data FROM events WHERE kind = 'gap' ORDER BY seq")]
        return _GAPS_DECODER.decode(b"[" + b",".join(lines) + b"]")

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
        return FileCorrupt(f"{self.path}: is damaged or cut off, {readable} ({brief(error)}). {_COPY_AGAIN}")

    def _fetch(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query, of a copy of what can be read if the file is damaged and that is tolerated."""
        self._follow()
        try:
            return self._patiently(lambda: self._connection.execute(sql, parameters).fetchall())
        except _DAMAGE as error:
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

    def _read_in_bulk(self, after: int, last: int) -> list[ev.AnyEvent] | None:
        """Return the next events, none at the end; None if they need a closer look.

        Two calls for a whole page: to fetch and to decode each event alone would double what replay costs.
        """
        self._follow()
        bounds = (after, last, PAGE_EVENTS)
        try:
            ((count, newest, lines),) = self._patiently(lambda: self._connection.execute(_BULK, bounds).fetchall())
            events = _PAGE_DECODER.decode(b"[" + (lines or b"") + b"]")
        except (*_DAMAGE, msgspec.DecodeError):
            return None  # an older version of an event, more than SQLite puts into one text, or damage
        if count and newest != after + count:
            return None
        return events if [event.seq for event in events] == list(range(after + 1, after + count + 1)) else None

    def _read_page(self, after: int, last: int) -> tuple[int, Page]:
        """Return the place of the last event that was looked at, and the events up to there."""
        rows = self._fetch(_PAGE, (after, last, PAGE_EVENTS))
        places = [after, *[seq for seq, _ in rows]]
        if any(map(operator.ge, places, places[1:])):
            self._give_up_or_salvage(sqlite3.DatabaseError("events come out of order"))
            rows = self._fetch(_PAGE, (after, last, PAGE_EVENTS))
        if not rows:
            return after, Page([], [])
        page = self._decode(rows)
        self._check_order(after, rows, page.events)
        return rows[-1][0], page

    def _decode(self, rows: list[tuple[int, bytes]]) -> Page:
        try:
            # One call for a page: a call for each event would cost as much again as the events.
            return Page(rows, _PAGE_DECODER.decode(b"[" + b",".join([data for _, data in rows]) + b"]"))
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
            pass  # found out below which event it is; a TypeError is a NULL where a page was lost
        page = Page([], [])
        for seq, data in rows:
            try:
                event = self._decode_one(seq, data)
            except FileCorrupt as problem:
                if not self._tolerate:
                    raise
                self.damage.append(str(problem))
            else:
                page.rows.append((seq, data))
                page.events.append(event)
        return page

    def _decode_one(self, seq: int, data: bytes) -> ev.AnyEvent:
        try:
            fields = _FIELDS_DECODER.decode(data)
            tag = fields.get("kind")
            while tag in UPCASTERS:
                fields = UPCASTERS[tag](fields)
                tag = fields.get("kind")
            if isinstance(tag, str) and tag not in ev.KINDS:
                raise FileNewer(f"{self.path}: event {seq} is a '{tag}', which this kvledger does not know. {_UPGRADE}")
            return _DECODER.decode(msgspec.json.encode(fields))
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
            raise FileCorrupt(f"{self.path}: event {seq} cannot be read: {brief(error)}. {_COPY_AGAIN}") from error

    def _check_order(self, after: int, rows: list[tuple[int, bytes]], events: list[ev.AnyEvent]) -> None:
        places = [seq for seq, _ in rows]
        if places == [event.seq for event in events] and places[-1] - after == len(places):
            return
        problems: list[str] = []
        expected = after + 1
        for seq in places:
            if seq - expected == 1:
                problems.append(f"event {expected} is missing")
            elif seq != expected:
                problems.append(f"events {expected} to {seq - 1} are missing")
            expected = seq + 1
        if len(events) == len(places):
            problems.extend(
                f"event {seq} says that it is event {event.seq}"
                for seq, event in zip(places, events, strict=True)
                if seq != event.seq
            )
        if problems and not self._tolerate:
            raise FileCorrupt(f"{self.path}: {problems[0]}. {_COPY_AGAIN}")
        self.damage.extend(f"{self.path}: {problem}." for problem in problems)

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
        except (*_DAMAGE, AttributeError):  # a NULL where a page was lost has no text
            return []

    def _check_revisions(self) -> tuple[str, ...]:
        revisions = tuple(sorted(str(name) for (name,) in self._rows("SELECT version_num FROM alembic_version")))
        unknown = [name for name in revisions if name not in sqlite.LOG_REVISIONS + sqlite.SEALED_REVISIONS]
        if not revisions or not all(map(_REVISION.fullmatch, unknown)):
            raise self.problem(sqlite3.DatabaseError("it names no schema"))
        if unknown:
            raise FileNewer(f"{self.path}: has the schema {', '.join(unknown)} of a newer kvledger. {_UPGRADE}")
        return revisions

    def _check_ends(self) -> None:
        """Look at both ends of the log: a file that was cut has lost the second one."""
        _ = self.first_seq, self.last_seq

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        return [
            tuple(value.decode(errors="replace") if isinstance(value, bytes) else value for value in row)
            for row in self._fetch(query)
        ]

    def _seq(self, query: str) -> int:
        return self._rows(query)[0][0] or 0


def _can_use(connection: sqlite3.Connection) -> bool:
    """Return whether SQLite can read a torn log in place; damage is for others to find."""
    try:
        connection.execute("PRAGMA application_id").fetchone()
    except sqlite3.Error as error:
        return error_name(error).startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
    return True


_DAMAGE = (sqlite3.Error, UnicodeDecodeError)
"""What reading a damaged file ends in. The second is Python's, over an error of SQLite's that quotes what it found."""

_NOT_THE_FILE = tuple(
    f"SQLITE_{name}" for name in ("BUSY", "READONLY", "PROTOCOL", "IOERR", "CANTOPEN", "NOMEM", "FULL")
)
"""Errors of SQLite's that say nothing about what the file holds."""

_PAGE = "SELECT seq, data FROM events WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
_BULK = f"SELECT count(*), max(seq), group_concat(data) FROM ({_PAGE})"  # noqa: S608 - the statement above
_REVISION = re.compile(r"(log|sealed)_\d{4}")
_LAST_PLACE = 2**63 - 1
_COPY_AGAIN = (
    "Copy it again from the host that wrote it, with the -wal file beside it; if there is no other, "
    "`kvledger seal --salvage FILE TARGET` takes what can be read."
)
_UPGRADE = "Upgrade kvledger to read it."
_DECODER: msgspec.json.Decoder[ev.AnyEvent] = msgspec.json.Decoder(ev.AnyEvent)
_GAPS_DECODER: msgspec.json.Decoder[list[ev.Gap]] = msgspec.json.Decoder(list[ev.Gap])
_PAGE_DECODER: msgspec.json.Decoder[list[ev.AnyEvent]] = msgspec.json.Decoder(list[ev.AnyEvent])
_FIELDS_DECODER: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
