"""Makes an incident file out of a log, and checks one.

A sealed file is a consistent copy of a log - live, closed or torn - with the indexes and summary tables that readers
need, and with a hash chain over its events, so that a change made later shows:

    h(0) = SHA-256 of the table `meta` as a JSON object with sorted keys and no blanks
    h(n) = SHA-256 of h(n-1) followed by the bytes of `data` of event n

The digest of the file is the last of them, in hex. Whoever can change the file can make a new chain as well: a digest
that was written down elsewhere is what proves that a file is the one that was sealed. The chain covers events and
`meta`; the summary tables are taken from the events, and a check makes them again and compares.

This file knows files, SQL and the reader. Alembic is imported when a file is sealed, because it takes 0.4 s.
"""

import contextlib
import hashlib
import heapq
import itertools
import json
import operator
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

import ledger
from ledger import events as ev
from ledger import words
from ledger.errors import FileCorrupt, LedgerFileError, LedgerNotWritable
from ledger.file import salvage as salvage_pages
from ledger.file import sqlite
from ledger.file.publish import refuse_existing, taken
from ledger.file.read import End, LogFile, open_log
from ledger.file.summary import TABLES, Row, Summary

KEPT_PROBLEMS = 100
"""Problems that are listed one by one. A file with more is not the one that was sealed; the rest is counted."""


class SealReport(msgspec.Struct, frozen=True):
    """What was sealed.

    Attributes:
        end: how the log ended: `closed`, `torn`, or `live`.
        chain_head: the digest of the file, SHA-256 in hex.
        size_bytes: of the sealed file.
        lost: events that could not be read; a `gap` stands in the place of each.
    """

    source: Path
    target: Path
    events: int
    end: End
    chain_head: str
    size_bytes: int
    lost: int = 0


class Problem(msgspec.Struct, frozen=True):
    """Something in a file is not as it was sealed.

    Attributes:
        seq: the event, 0 when it is not about one event.
        what: `changed`, `removed`, `added`, `column` (a column says something else than the event), `meta`, `seal`,
            `summary` (a row of a summary table does not say what the events say), `guard` (a trigger is gone), or
            `damaged`.
        detail: one line in an operator's words.
    """

    seq: int
    what: str
    detail: str


class VerifyReport(msgspec.Struct, frozen=True):
    """What a check of a file found.

    Attributes:
        sealed: whether the file is sealed. In a file that is not, only holes and columns can be checked.
        chain_head: the digest of the events that the file holds now, SHA-256 in hex.
        problems: the first of the problems, by place in the log.
        problem_count: how many there are.
    """

    path: Path
    sealed: bool
    events: int
    chain_head: str
    problems: tuple[Problem, ...]
    problem_count: int

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.problem_count == 0


def chain_start(meta: Mapping[str, str]) -> bytes:
    """Return the hash that the chain starts from."""
    return hashlib.sha256(json.dumps(dict(meta), sort_keys=True, separators=(",", ":")).encode()).digest()


def chain_next(before: bytes, data: bytes) -> bytes:
    """Return the hash of an event whose line is `data`, after the hash `before`."""
    return hashlib.sha256(before + data).digest()


# --- sealing --------------------------------------------------------------------------------------------------------


def seal(
    source: Path | str,
    target: Path | str,
    progress: Callable[[int], None] | None = None,
    *,
    salvage: bool = False,
) -> SealReport:
    """Make the incident file `target` from the log `source`. The log is not changed; a live one goes on.

    Args:
        progress: called now and then with the number of events done.
        salvage: take what can be read of a damaged or cut file, sealed or not, and put a `gap` for each event that is
            missing before the last that is there.

    Raises:
        LedgerFileError: the source cannot be read, or is sealed already.
        LedgerNotWritable: the target exists, or cannot be written.
    """
    source, target = Path(source), Path(target)
    refuse_existing(target)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    with open_log(source, tolerate=salvage) as log, tempfile.TemporaryDirectory(prefix="kvledger-") as folder:
        if log.sealed and not salvage:
            raise LedgerFileError(f"{source}: is sealed already. Copy it as it is.")
        try:
            if salvage:
                lost = _rebuild(log, Path(folder) / log.path.name)
                with open_log(Path(folder) / log.path.name) as rebuilt:
                    report = _seal(rebuilt, unfinished, target, progress)
                report = msgspec.structs.replace(report, source=source, lost=lost)
            else:
                report = _seal(log, unfinished, target, progress)
            sqlite.publish(unfinished, target)
        except FileExistsError as error:
            raise taken(target) from error
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and sqlite.error_name(error).startswith("SQLITE_CORRUPT"):
                raise log.problem(error) from error  # the copy is as damaged as the log is
            raise LedgerNotWritable(f"{target} cannot be written: {sqlite.explain(error)}.") from error
        finally:
            for leftover in (unfinished, unfinished.with_name(unfinished.name + "-journal")):
                with contextlib.suppress(OSError):  # a folder that takes no file has none to remove
                    leftover.unlink(missing_ok=True)
    return report


def _seal(log: LogFile, unfinished: Path, target: Path, progress: Callable[[int], None] | None) -> SealReport:
    from ledger.file import migrate  # noqa: PLC0415 - it takes 0.4 s

    log.copy(unfinished)
    migrate.upgrade(unfinished, migrate.SEALED)
    connection = sqlite3.connect(unfinished, isolation_level=None)
    try:
        # Nothing needs to survive a crash before the file has its name.
        connection.execute("PRAGMA journal_mode = MEMORY").fetchall()
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN IMMEDIATE")
        (last_seq,) = connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
        end: End = log.end if log.last_seq == last_seq else "live"
        head = chain_start(log.meta)
        _insert_links(connection, [(0, head)])
        events = 0
        summary = Summary()
        for page in log.pages(until_seq=last_seq):
            links: list[tuple[int, bytes]] = []
            for seq, data in page.rows:
                head = chain_next(head, data)
                links.append((seq, head))
            _insert_links(connection, links)
            summary.add(page.events)
            _insert_rows(connection, summary)
            events += len(links)
            if progress is not None:
                progress(events)
        summary.finish()
        _insert_rows(connection, summary)
        connection.execute(
            'INSERT INTO seal (sealed_at, kvledger, events, chain_head, source, "end") VALUES (?, ?, ?, ?, ?, ?)',
            (
                datetime.now(UTC).isoformat(timespec="seconds"),
                ledger.__version__,
                events,
                head.hex(),
                words.file(log.path.name),
                end,
            ),
        )
        connection.execute("COMMIT")
    finally:
        connection.close()
    return SealReport(log.path, target, events, end, head.hex(), unfinished.stat().st_size)


def _rebuild(log: LogFile, path: Path) -> int:
    """Make a log of the events that can be read of a damaged one, with gaps. Return how many are lost."""
    from ledger.file import migrate  # noqa: PLC0415 - it takes 0.4 s

    migrate.create(path)
    connection = sqlite3.connect(path, isolation_level=None)
    lost = 0
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", log.meta.items())
        place = 1
        for page in log.pages():
            lines: list[str] = []
            for (seq, data), event in zip(page.rows, page.events, strict=True):
                if event.seq != seq or seq < place:
                    continue  # it says that it is another event: nothing in it can be believed
                lines.extend(_gap_at(missing, event) for missing in range(place, seq))
                lost += seq - place
                lines.append(data.decode())
                place = seq + 1
            salvage_pages.append(connection, lines)
        connection.execute("COMMIT")
    finally:
        connection.close()
    if place == 1:
        raise FileCorrupt(f"{log.path}: no event can be read; there is nothing to salvage.")
    return lost


def _gap_at(seq: int, following: ev.AnyEvent) -> str:
    """Return the line of a gap in the place of an event that is lost, stamped as the next one that is there."""
    gap = ev.Gap(
        seq,
        following.ts_ns,
        following.mono_ns,
        "scheduler",
        following.step,
        origin=ev.WHOLE_FILE,
        dropped=1,
        reason="it was damaged there, and was salvaged",
    )
    return msgspec.json.encode(gap).decode()


def _insert_links(connection: sqlite3.Connection, links: list[tuple[int, bytes]]) -> None:
    connection.executemany("INSERT INTO chain (seq, hash) VALUES (?, ?)", links)


def _insert_rows(connection: sqlite3.Connection, summary: Summary) -> None:
    by_kind: dict[type[Row], list[Row]] = {}
    for row in summary.rows:
        by_kind.setdefault(type(row), []).append(row)
    summary.rows.clear()
    for kind, rows in by_kind.items():
        connection.executemany(_INSERTS[kind], map(msgspec.structs.astuple, rows))


def _insert_into(kind: type[Row]) -> str:
    columns = kind.__struct_fields__
    names = ", ".join(f'"{name}"' for name in columns)
    values = ", ".join("?" * len(columns))
    # A log whose rules were broken may name a job again after it was freed. The first row stands; the events say
    # the rest.
    return f"INSERT INTO {TABLES[kind]} ({names}) VALUES ({values}) ON CONFLICT DO NOTHING"  # noqa: S608 - names of ours


_INSERTS = {kind: _insert_into(kind) for kind in TABLES}


# --- checking -------------------------------------------------------------------------------------------------------


def verify(path: Path | str) -> VerifyReport:
    """Check that a file holds what was sealed, and name each event that was changed, removed or added.

    Raises:
        LedgerFileError: the file cannot be read at all.
    """
    with open_log(path) as log:
        checker = _Checker(log)
        return checker.report()


def broken_seal(log: LogFile) -> str:
    """Return in what the events of an open sealed file first differ from those that were sealed; empty if in nothing.

    It walks the hash chain alone, 3 s for a million events; `verify` checks everything.
    """
    checker = _Checker(log)
    checker.check_chain()
    return checker.first_problem


class _Checker:
    def __init__(self, log: LogFile) -> None:
        self._log = log
        self._problems: list[Problem] = []
        self._count = 0
        self._events = 0
        self._head = chain_start(log.meta)

    @property
    def first_problem(self) -> str:
        return self._problems[0].detail if self._problems else ""

    def report(self) -> VerifyReport:
        try:
            if self._log.sealed:
                self.check_chain()
            else:
                self._check_holes()
            self._check_columns()
            self._check_guards()
            self._check_pages()
            if self._log.sealed and not self._problems:  # else the events are not the ones that were summed up
                self._check_summary()
        except FileCorrupt as error:
            self._found(0, "damaged", str(error))
        problems = tuple(sorted(self._problems, key=lambda problem: problem.seq))
        return VerifyReport(self._log.path, self._log.sealed, self._events, self._head.hex(), problems, self._count)

    def _found(self, seq: int, what: str, detail: str) -> None:
        self._count += 1
        if len(self._problems) < KEPT_PROBLEMS:
            self._problems.append(Problem(seq, what, detail))

    def check_chain(self) -> None:
        """Walk events and links side by side; after a problem go on from the link as it was sealed."""
        links = self._bytes("SELECT seq, hash FROM chain ORDER BY seq")
        place, before = next(links, (None, b""))
        if place != 0 or before != self._head:
            self._found(0, "meta", "the table meta is not the one that was sealed")
        sealed_events = 0
        stored = self._stored()
        seq, data = next(stored, (None, b""))
        place, link = next(links, (None, b""))
        while seq is not None or place is not None:
            if place is None or (seq is not None and seq < place):
                self._found(seq or 0, "added", f"event {seq} is there and was not sealed")
                seq, data = next(stored, (None, b""))
                continue
            if seq is None or place < seq:
                self._found(place, "removed", f"event {place} was sealed and is not there any more")
            else:
                if chain_next(before, data) != link:
                    self._found(seq, "changed", f"event {seq} is not the one that was sealed")
                seq, data = next(stored, (None, b""))
            sealed_events += 1
            before = link
            place, link = next(links, (None, b""))
        self._check_seal(sealed_events, before)

    def _check_seal(self, events: int, head: bytes) -> None:
        seals = list(self._log.query("SELECT events, chain_head FROM seal"))
        if seals != [(events, head.hex().encode())]:
            self._found(0, "seal", "the table seal does not say how the chain ends")

    def _check_holes(self) -> None:
        expected = 1
        for seq, _ in self._stored():
            if seq > expected:
                missing = f"event {expected} is" if seq - expected == 1 else f"events {expected} to {seq - 1} are"
                self._found(expected, "removed", f"{missing} missing")
            expected = seq + 1

    def _stored(self) -> Iterator[tuple[int, bytes]]:
        for seq, data in self._bytes("SELECT seq, data FROM events ORDER BY seq"):
            self._events += 1
            self._head = chain_next(self._head, data)
            yield seq, data

    def _bytes(self, sql: str) -> Iterator[tuple[int, bytes]]:
        """Yield places and bytes. What is no text and no blob any more cannot be what was sealed."""
        for seq, value in self._log.query(sql):
            yield seq, value if isinstance(value, bytes) else b""

    def _check_columns(self) -> None:
        from ledger.file import schema  # noqa: PLC0415 - SQLAlchemy takes 0.3 s

        for (seq,) in self._log.query(schema.DISAGREEING):
            self._found(seq, "column", f"a column of event {seq} says something else than its data")

    def _check_guards(self) -> None:
        from ledger.file import schema  # noqa: PLC0415 - as above

        there = {name for (name,) in self._log.query("SELECT name FROM sqlite_master WHERE type = 'trigger'")}
        for name in sorted(name for name in schema.TRIGGERS if name.encode() not in there):
            self._found(0, "guard", f"the trigger {name} is gone: somebody made room for changes")

    def _check_summary(self) -> None:
        """Sum the events up again, and compare row by row."""
        with contextlib.closing(sqlite3.connect("", isolation_level=None)) as made:
            made.text_factory = bytes  # as the log gives it
            for kind, table in TABLES.items():
                key, *others = (f'"{name}"' for name in kind.__struct_fields__)
                made.execute(f"CREATE TABLE {table} ({key} INTEGER PRIMARY KEY, {', '.join(others)})")
            made.execute("BEGIN")
            summary = Summary()
            for page in self._log.pages():
                summary.add(page.events)
                _insert_rows(made, summary)
            summary.finish()
            _insert_rows(made, summary)
            for kind, table in TABLES.items():
                key, *others = (f'"{name}"' for name in kind.__struct_fields__)
                # The names are ours.
                select = f"SELECT {', '.join((key, *others))} FROM {table} ORDER BY {key}"  # noqa: S608
                stored_rows = self._numbered(table, self._log.query(select))
                for place, stored, expected in _side_by_side(stored_rows, made.execute(select)):
                    if stored != expected:
                        self._found(0, "summary", f"{table}, row {place}: does not say what the events say")

    def _numbered(self, table: str, rows: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows whose key is a number. In a table of ours every key is; in what was put in its place, not."""
        for row in rows:
            if isinstance(row[0], int):
                yield row
            else:
                self._found(0, "summary", f"{table}: a row without a number, which nothing of kvledger's writes")

    def _check_pages(self) -> None:
        for (text,) in self._log.query("PRAGMA integrity_check(10)"):
            if text != b"ok":
                self._found(0, "damaged", f"SQLite finds: {text.decode(errors='replace')}")


def _side_by_side(
    left: Iterator[tuple[Any, ...]], right: Iterator[tuple[Any, ...]]
) -> Iterator[tuple[int, tuple[Any, ...] | None, tuple[Any, ...] | None]]:
    """Yield each key of two sets of rows in the order of keys, with its row in both; None where one has none."""
    both = heapq.merge(((row[0], "left", row) for row in left), ((row[0], "right", row) for row in right))
    for key, rows in itertools.groupby(both, key=operator.itemgetter(0)):
        by_side = {side: row for _, side, row in rows}
        yield key, by_side.get("left"), by_side.get("right")
