"""Checks that a file holds what was sealed, and names each event that was changed, removed or added.

The summary tables follow from the events: they are made again and compared row by row. This file knows SQL and the
reader.
"""

import contextlib
import heapq
import itertools
import operator
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ledger.errors import FileCorrupt
from ledger.file.chain import chain_next, chain_start
from ledger.file.read import LogFile, open_log
from ledger.file.seal import insert_rows
from ledger.file.summary import TABLES, Summary

KEPT_PROBLEMS = 100
"""Problems that are listed one by one. A file with more is not the one that was sealed; the rest is counted."""


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
                insert_rows(made, summary)
            summary.finish()
            insert_rows(made, summary)
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
