"""Makes an incident file out of a log: a sealed copy.

A sealed file is a consistent copy of a log - live, closed or torn - with the indexes and summary tables that readers
need, and with the hash chain of `ledger.file.chain` over its events. The chain covers events and `meta`; the summary
tables follow from the events, and `ledger.file.verify` makes them again to compare.

This file knows files, SQL and the reader. Alembic is imported when a file is sealed, because it takes 0.4 s.
"""

import sqlite3
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import ledger
from ledger import words
from ledger.errors import LedgerFileError
from ledger.file.chain import chain_next, chain_start
from ledger.file.explain import error_name
from ledger.file.publish import unfinished
from ledger.file.read import Ending, LogFile, open_log
from ledger.file.rebuild import rebuild
from ledger.file.summary import TABLES, Summary, SummaryRow


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
    end: Ending
    chain_head: str
    size_bytes: int
    lost: int = 0


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
    with unfinished(target) as path, open_log(source, tolerate=salvage) as log:
        if log.sealed and not salvage:
            raise LedgerFileError(f"{source}: is sealed already. Copy it as it is.")
        try:
            if not salvage:
                return _seal(log, path, target, progress)
            with tempfile.TemporaryDirectory(prefix="kvledger-") as folder:
                whole = Path(folder) / log.path.name
                lost = rebuild(log, whole)
                with open_log(whole) as rebuilt:
                    report = _seal(rebuilt, path, target, progress)
            return msgspec.structs.replace(report, source=source, lost=lost)
        except sqlite3.Error as error:
            if error_name(error).startswith("SQLITE_CORRUPT"):
                raise log.problem(error) from error  # the copy is as damaged as the log is
            raise


def _seal(log: LogFile, path: Path, target: Path, progress: Callable[[int], None] | None) -> SealReport:
    from ledger.file import migrate  # noqa: PLC0415 - it takes 0.4 s

    log.copy(path)
    migrate.upgrade(path, migrate.SEALED)
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        # Nothing needs to survive a crash before the file has its name.
        connection.execute("PRAGMA journal_mode = MEMORY").fetchall()
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN IMMEDIATE")
        (last_seq,) = connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
        end: Ending = log.end if log.last_seq == last_seq else "live"
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
            insert_rows(connection, summary)
            events += len(links)
            if progress is not None:
                progress(events)
        summary.finish()
        insert_rows(connection, summary)
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
    return SealReport(log.path, target, events, end, head.hex(), path.stat().st_size)


def _insert_links(connection: sqlite3.Connection, links: list[tuple[int, bytes]]) -> None:
    connection.executemany("INSERT INTO chain (seq, hash) VALUES (?, ?)", links)


def insert_rows(connection: sqlite3.Connection, summary: Summary) -> None:
    """Move the rows that a summary has ready into its tables."""
    by_kind: dict[type[SummaryRow], list[SummaryRow]] = {}
    for row in summary.rows:
        by_kind.setdefault(type(row), []).append(row)
    summary.rows.clear()
    for kind, rows in by_kind.items():
        connection.executemany(_INSERTS[kind], map(msgspec.structs.astuple, rows))


def _insert_into(kind: type[SummaryRow]) -> str:
    columns = kind.__struct_fields__
    names = ", ".join(f'"{name}"' for name in columns)
    values = ", ".join("?" * len(columns))
    # A log whose rules were broken may name a job again after it was freed. The first row stands; the events say
    # the rest.
    return f"INSERT INTO {TABLES[kind]} ({names}) VALUES ({values}) ON CONFLICT DO NOTHING"  # noqa: S608 - names of ours


_INSERTS = {kind: _insert_into(kind) for kind in TABLES}
