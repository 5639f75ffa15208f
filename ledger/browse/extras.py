"""Fills a copy for browsing with what only browsing needs, by one fold of its events.

The fold is replay's own, so findings, open work and pins are those that `kvledger replay` prints. This file knows the
reader, the fold and SQL.
"""

import itertools
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ledger import events as ev
from ledger import words
from ledger.blocks import Blocks, count, of_pairs
from ledger.browse import tables
from ledger.browse.timeline import Timeline
from ledger.file.read import open_log
from ledger.replay.fold import Replay, Result
from ledger.replay.incidents import grouped
from ledger.report import wording
from ledger.verdicts import all_verdicts
from ledger.verdicts.base import Finding

TableRow: TypeAlias = dict[str, Any]
"""A row by the names of its columns. A column that is not named is empty."""


def add(path: Path, progress: Callable[[int], None] | None = None) -> None:
    """Add the tables of `ledger.browse.tables` to a sealed copy that nobody else has open.

    Args:
        progress: called now and then with the number of events done.

    Raises:
        LedgerFileError: an event cannot be read.
        sqlite3.Error: the copy cannot be written.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        # The copy is thrown away when this fails, so nothing needs to survive it.
        connection.execute("PRAGMA journal_mode = OFF").fetchall()
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN IMMEDIATE")
        for statement in tables.definitions():
            connection.execute(statement)
        _fill(connection, path, progress)
        for statement in tables.INDEXES:
            connection.execute(statement)
        connection.execute("COMMIT")
    finally:
        connection.close()


def _fill(connection: sqlite3.Connection, path: Path, progress: Callable[[int], None] | None) -> None:
    done = 0
    ranges = BlockRanges()

    def look(chunk: list[ev.AnyEvent]) -> None:
        nonlocal done
        connection.executemany("INSERT INTO block_ranges VALUES (?, ?, ?, ?)", ranges.rows(chunk))
        done += len(chunk)
        if progress is not None:
            progress(done)

    replay = Replay([*all_verdicts(), Timeline], watch=look)
    with open_log(path) as log:
        replay.feed(log.events())
        result = replay.result(log.end)
    timeline = next(verdict for verdict in replay.verdicts if isinstance(verdict, Timeline))
    _insert(connection, "timeline", map(msgspec.structs.asdict, timeline.intervals))
    _insert(connection, "findings", finding_rows(result.findings))
    _insert(connection, "open_work", open_rows(result))
    connection.execute(_SINCE, (result.end.now_mono_ns if result.end is not None else 0,))


_SINCE = (
    "UPDATE open_work SET since_ts_ns = began.ts_ns, open_ns = max(? - began.mono_ns, 0) "
    "FROM events AS began WHERE began.seq = open_work.since_seq"
)


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[TableRow]) -> None:
    for row in rows:
        names = ", ".join(row)
        values = ", ".join("?" * len(row))
        connection.execute(f"INSERT INTO {table} ({names}) VALUES ({values})", tuple(row.values()))  # noqa: S608 - names of ours


# --- which event concerns which block ---------------------------------------------------------------------------------

Run: TypeAlias = tuple[int, int, int]
"""A group, and the lowest and the highest block of a run."""


class BlockRanges:
    """Finds the runs of blocks that each event concerns: those it names, and those of the work that it ends.

    A call's end does not name the blocks again, and neither does the end of a load or of a P/D transfer; but for the
    story of a block it is the moment from which nobody reads or writes it any more.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[object, ...], set[Run]] = {}

    def rows(self, events: Iterable[ev.Event]) -> Iterator[tuple[int, int, int, int]]:
        """Yield the rows of `block_ranges` for events in the order of the log."""
        for event in events:
            for run in sorted(self._runs(event)):
                yield *run, event.seq

    def _runs(self, event: ev.Event) -> set[Run]:
        runs = _runs(getattr(event, "blocks", ()))
        match event:
            case ev.TransferStarted():
                self._open["call", event.transfer, event.rank, event.peer] = runs
            case ev.LoadPlanned():
                self._open["load", event.load] = runs
            case ev.SendReady():
                self._open["send", event.request] = runs
            case ev.RecvRegistered():
                self._open["recv", event.request] = runs
            case ev.TransferFinished():
                runs |= self._open.pop(("call", event.transfer, event.rank, event.peer), set())
            case ev.LoadSettled():
                runs |= self._open.pop(("load", event.load), set())
            case ev.SendSettled() | ev.SendExpired():
                runs |= self._open.pop(("send", event.request), set())
            case ev.RecvSettled():
                runs |= self._open.pop(("recv", event.request), set())
            case ev.RankLoaded():
                runs |= _runs(event.invalid)
            case ev.PoisonCaught():
                runs.add((event.group, event.block, event.block))
            case _:
                pass
        return runs


def _runs(blocks: Blocks) -> set[Run]:
    return {(group, min(first, last), max(first, last)) for group, ranges in blocks for first, last in ranges}


# --- what went wrong --------------------------------------------------------------------------------------------------


def finding_rows(findings: list[Finding]) -> Iterator[TableRow]:
    """Yield a row for each finding, incident by incident, each with its cause first."""
    places = itertools.count(1)
    for number, incident in enumerate(grouped([(0, finding) for finding in findings]), 1):
        for part, members in (("cause", (incident.head,)), ("before", incident.before), ("after", incident.after)):
            for member in members:
                yield {**_finding_row(next(places), findings[member]), "incident": number, "part": part}


def _finding_row(place: int, finding: Finding) -> TableRow:
    """Return a finding as a row; lists are JSON arrays."""
    public = wording.public(finding)
    return {
        "place": place,
        **{name: public[name] for name in ("kind", "certainty", "title", "culprit", "advice", "code", "since_seq")},
        "requests": _list(finding.requests),
        "jobs": _list(finding.jobs),
        "ranks": words.ranks(finding.ranks) if finding.ranks else None,
        "blocks": words.blocks(of_pairs(finding.blocks)) if finding.blocks else None,
        "evidence": _list(finding.evidence),
    }


def _list(items: tuple[Any, ...]) -> str | None:
    return msgspec.json.encode(items).decode() if items else None


# --- what is open -----------------------------------------------------------------------------------------------------


def open_rows(result: Result) -> Iterator[TableRow]:
    """Yield a row for all that is open in the book at the end, in the book's order: jobs, loads, P/D, requests."""
    for place, row in enumerate(_open(result), 1):
        yield {"place": place, **row}


def _open(result: Result) -> Iterator[TableRow]:
    book = result.state.book
    for number, job in book.jobs.items():
        yield {
            "what": "store job",
            "job": number,
            "request": job.request,
            "generation": job.generation,
            "state": "quarantined" if job.quarantined else "settled" if job.settled else "registered",
            "waits_for": words.ranks(job.waiting) if job.waiting else None,
            "held_blocks": count(job.blocks),
            "since_seq": job.since_seq,
        }
    for number, load in book.loads.items():
        yield {
            "what": "load",
            "load": number,
            "request": load.request,
            "generation": load.generation,
            "state": "failed" if load.failed else "registered" if load.ranks else "planned",
            "waits_for": words.ranks(load.waiting) if load.waiting else None,
            "held_blocks": count(load.blocks),
            "since_seq": load.since_seq,
        }
    for request, send in book.sends.items():
        yield {
            "what": "send",
            "transfer": send.transfer,
            "request": request,
            "generation": send.generation,
            "state": "quarantined" if send.quarantined else send.phase,
            "waits_for": words.ranks(send.waiting) if send.waiting else None,
            "held_blocks": count(send.blocks),
            "since_seq": send.since_seq,
        }
    for request, recv in book.recvs.items():
        peers = [f"{peer} for rank {rank}" for rank, peer in recv.waiting]
        peers += [f"the peers of {words.ranks(recv.unnamed)}"] if recv.unnamed else []
        yield {
            "what": "recv",
            "transfer": recv.transfer,
            "request": request,
            "generation": recv.generation,
            "state": "quarantined" if recv.quarantined else "failed" if recv.failed else "registered",
            "waits_for": words.listed(peers) if peers else None,
            "held_blocks": count(recv.blocks),
            "since_seq": recv.since_seq,
        }
    for request, record in book.requests.items():
        yield {
            "what": "request",
            "request": request,
            "generation": record.generation,
            "state": record.state,
            "since_seq": record.since_seq,
        }
