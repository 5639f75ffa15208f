"""Reads a log: a live one, a closed one, a torn one, a sealed one. Reading changes no file and leaves none behind.

Whatever is wrong with a file is one of `ledger.errors`, in one line that says what to do. Old versions of an event are lifted
here, one step at a time, when they are read; stored rows stay as they are.

This file knows events and `ledger.sqlite`.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import msgspec

from ledger import events as ev
from ledger import sqlite
from ledger.errors import FileCorrupt, FileMissing, FileNewer, LedgerFileError, NotALedger

PAGE_EVENTS = 2_000
"""Events read at a time, each page in a read transaction of its own: a long one would let a live log's -wal grow."""

End: TypeAlias = Literal["closed", "torn", "live"]
"""How a log ends: with `log_closed`, without it, or not yet: an engine writes it."""

UPCASTERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""By the name of an old version, e.g. `load_failed` once `load_failed@2` exists: lifts an event by one version."""


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
        damage: what could not be read of it, when damage is tolerated.
    """

    def __init__(self, path: Path, *, tolerate: bool = False) -> None:
        self.path = path
        self.damage: list[str] = []
        self._tolerate = tolerate
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._immutable = False
        self._file = self._find()
        self._connection = self._connect()
        try:
            self._check_owner()
            self.revisions = self._check_revisions()
            self.meta = dict(self._rows("SELECT key, value FROM meta"))
            self.sealed = any(revision in sqlite.SEALED_REVISIONS for revision in self.revisions)
            self._check_whole()
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
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None

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
        rows = self._rows("SELECT kind FROM events ORDER BY seq DESC LIMIT 1")
        if rows and rows[0][0] == "log_closed":
            return "closed"
        if self.sealed:
            return "live" if self._rows('SELECT "end" FROM seal') == [("live",)] else "torn"
        return "live" if sqlite.is_live(self._file) else "torn"

    @property
    def held_back_ms(self) -> int:
        """How many milliseconds of events the writer of a torn log may have held in memory when it was killed."""
        return int(self.meta.get("flush_interval_ms", "0"))

    # --- its events ---------------------------------------------------------------------------------------------------

    def events(
        self, after_seq: int = 0, until_seq: int | None = None, *, tolerate: bool | None = None
    ) -> Iterator[ev.AnyEvent]:
        """Yield the events after `after_seq` up to `until_seq`, both places in the log, in order.

        Of a live log, yields what is there when the end is reached.

        Raises:
            FileCorrupt: an event is missing or cannot be read, and damage is not tolerated.
            FileNewer: an event is of a kind or version that this kvledger does not know.
        """
        for page in self.pages(after_seq, until_seq, tolerate=tolerate):
            yield from page.events

    def pages(
        self, after_seq: int = 0, until_seq: int | None = None, *, tolerate: bool | None = None
    ) -> Iterator["Page"]:
        """Yield the same events as `events`, a page at a time, each with its line as it is stored."""
        tolerate = self._tolerate if tolerate is None else tolerate
        after, last = after_seq, until_seq if until_seq is not None else 2**63 - 1
        while after < last:
            try:
                rows = self._rows_of_page(after, last)
            except sqlite3.Error as error:
                problem = self._unreadable(error, after + 1)
                if not tolerate:
                    raise problem from error
                self.damage.append(str(problem))
                return
            if not rows:
                return
            page = Page(rows, self._decode(rows))
            self._check_order(after, page, tolerate=tolerate)
            after = rows[-1][0]
            yield page

    def query(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query. Text comes as bytes.

        Raises:
            FileCorrupt: the file is damaged where the query looks.
        """
        try:
            yield from self._connection.execute(sql)
        except sqlite3.Error as error:
            raise self._unreadable(error, 1) from error

    def copy(self, target: Path) -> None:
        """Copy the log as it is now into a new file, without a write-ahead log. A live one goes on meanwhile.

        Raises:
            sqlite3.Error: the target cannot be written, or the log cannot be read.
        """
        copy = sqlite3.connect(target, isolation_level=None)
        try:
            # All pages in one step: a backup in several starts anew whenever the log grows.
            self._connection.backup(copy, pages=-1)
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        finally:
            copy.close()

    def _rows_of_page(self, after_seq: int, last: int) -> list[tuple[int, bytes]]:
        self._follow()
        return self._connection.execute(
            "SELECT seq, data FROM events WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?", (after_seq, last, PAGE_EVENTS)
        ).fetchall()

    def _decode(self, page: list[tuple[int, bytes]]) -> list[ev.AnyEvent]:
        try:
            return _PAGE_DECODER.decode(b"[" + b",".join([data for _, data in page]) + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError):
            return [self._decode_one(seq, data) for seq, data in page]

    def _decode_one(self, seq: int, data: bytes) -> ev.AnyEvent:
        try:
            try:
                return _DECODER.decode(data)
            except msgspec.ValidationError:
                fields = msgspec.json.decode(data, type=dict[str, Any])
                kind = fields.get("kind")
                if kind in ev.KINDS:
                    raise
                while kind in UPCASTERS:
                    fields = UPCASTERS[kind](fields)
                    kind = fields.get("kind")
                if kind not in ev.KINDS:
                    raise FileNewer(
                        f"{self.path}: event {seq} is a '{kind}', which this kvledger does not know. Upgrade kvledger."
                    ) from None
                return msgspec.convert(fields, ev.AnyEvent)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FileCorrupt(f"{self.path}: event {seq} cannot be read ({error}). {_COPY_AGAIN}") from error

    def _check_order(self, after: int, page: "Page", *, tolerate: bool) -> None:
        expected = after + 1
        for (seq, _), event in zip(page.rows, page.events, strict=True):
            if seq != expected or event.seq != seq:
                problem = f"{self.path}: {_out_of_order(expected, seq, event.seq)}. {_COPY_AGAIN}"
                if not tolerate:
                    raise FileCorrupt(problem)
                self.damage.append(problem)
            expected = seq + 1

    # --- opening ------------------------------------------------------------------------------------------------------

    def _find(self) -> Path:
        path = self.path
        try:
            status = path.stat()
        except FileNotFoundError:
            raise FileMissing(f"{path}: no such file. Check the name; logs are <ledger_path>/<engine>-<dp rank>-<boot>.db.") from None
        except OSError as error:
            raise LedgerFileError(f"{path}: cannot be read: {sqlite.explain(error)}.") from error
        if path.is_dir():
            raise NotALedger(f"{path}: is a folder. Name one of the .db files in it.")
        if status.st_size == 0 and not sqlite.wal_path(path).exists():
            raise NotALedger(f"{path}: is empty. No event was ever written to it; look for another log of that engine.")
        return path.resolve()

    def _connect(self) -> sqlite3.Connection:
        """Connect in the one way that is safe for what lies beside the file."""
        file = self._file
        wal = sqlite.wal_path(file)
        has_wal = wal.exists() and (wal.stat().st_size > 0 or sqlite.is_live(file))
        self._immutable = not has_wal
        try:
            if has_wal and not sqlite.shm_path(file).exists():
                # Copied from elsewhere without its index. SQLite would build one beside the file, so it gets a copy to do so.
                self._copy = tempfile.TemporaryDirectory(prefix="kvledger-")
                copy = Path(self._copy.name) / file.name
                shutil.copyfile(file, copy)
                shutil.copyfile(wal, sqlite.wal_path(copy))
                connection = sqlite3.connect(copy, isolation_level=None, check_same_thread=False)
                connection.text_factory = bytes
                return connection
            return sqlite.open_to_read(file, immutable=self._immutable)
        except (sqlite3.Error, OSError) as error:
            raise LedgerFileError(f"{self.path}: cannot be opened: {sqlite.explain(error)}.") from error

    def _follow(self) -> None:
        """A log that had no -wal when it was opened may have got one: its engine was just starting."""
        if self._immutable and sqlite.wal_path(self._file).exists() and sqlite.is_live(self._file):
            self._connection.close()
            self._connection = self._connect()

    def _check_owner(self) -> None:
        try:
            (found,) = self._connection.execute("PRAGMA application_id").fetchone()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorname == "SQLITE_NOTADB":
                raise NotALedger(f"{self.path}: is not a SQLite database. Name a .db file that kvledger wrote.") from error
            raise self._unreadable(error, 1) from error
        if found != sqlite.APPLICATION_ID:
            raise NotALedger(f"{self.path}: is another program's database. Name a .db file that kvledger wrote.")

    def _check_revisions(self) -> tuple[str, ...]:
        revisions = tuple(sorted(name for (name,) in self._rows("SELECT version_num FROM alembic_version")))
        unknown = [name for name in revisions if name not in sqlite.LOG_REVISIONS + sqlite.SEALED_REVISIONS]
        if unknown:
            raise FileNewer(f"{self.path}: written by a newer kvledger (schema {', '.join(unknown)}). Upgrade kvledger.")
        return revisions

    def _check_whole(self) -> None:
        """Look at both ends of the log: a file that was cut has lost the second one."""
        _ = self.first_seq, self.last_seq

    def _unreadable(self, error: sqlite3.Error, expected: int) -> LedgerFileError:
        return FileCorrupt(f"{self.path}: damaged after event {expected - 1}: {error}. {_COPY_AGAIN}")

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        try:
            rows = self._connection.execute(query).fetchall()
        except sqlite3.Error as error:
            raise self._unreadable(error, 1) from error
        return [tuple(value.decode() if isinstance(value, bytes) else value for value in row) for row in rows]

    def _seq(self, query: str) -> int:
        self._follow()
        return self._rows(query)[0][0] or 0


def _out_of_order(expected: int, seq: int, event_seq: int) -> str:
    if event_seq != seq:
        return f"event {seq} says that it is event {event_seq}"
    if seq - expected == 1:
        return f"event {expected} is missing"
    return f"events {expected} to {seq - 1} are missing"


_COPY_AGAIN = "Copy it again from the host that wrote it, with the -wal file beside it."
_DECODER: msgspec.json.Decoder[ev.AnyEvent] = msgspec.json.Decoder(ev.AnyEvent)
_PAGE_DECODER: msgspec.json.Decoder[list[ev.AnyEvent]] = msgspec.json.Decoder(list[ev.AnyEvent])
