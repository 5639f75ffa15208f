"""The tables that a copy for browsing has besides those of a sealed file: names, types, meanings.

They are made anew from the events each time, with the rules and verdicts of this kvledger, so they are in no file that
is kept, and no revision of Alembic knows them. This file knows SQLAlchemy.
"""

from sqlalchemy import Column, Integer, MetaData, Table, Text
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateTable

from ledger.file import schema

browsed = MetaData()
"""Only a copy for browsing has these."""


def _integer(name: str, doc: str) -> Column[int]:
    return Column(name, Integer, doc=doc)


def _text(name: str, doc: str) -> Column[str]:
    return Column(name, Text, doc=doc)


findings = Table(
    "findings",
    browsed,
    Column("place", Integer, primary_key=True, autoincrement=False, doc="Earliest cause first."),
    _integer("incident", "Findings of one number are one story."),
    _text("part", "What the finding is in it: its `cause`, what came `before`, or what came `after`."),
    _text("kind", "Stable name of what went wrong."),
    _text("certainty", "`proven`, `suspected`, or `undecidable`."),
    _text("title", "What went wrong, in one sentence."),
    _text("culprit", "Who or what to look at."),
    _text("advice", "What to do next."),
    _text("code", "Stable code of the error behind it."),
    _integer("since_seq", "The event at which the work in question began."),
    _text("requests", "Requests concerned."),
    _text("jobs", "Store jobs concerned."),
    _text("ranks", "Ranks concerned; for a wait, those that did not answer."),
    _text("blocks", "Blocks concerned."),
    _text("evidence", "The events that show it."),
)

open_work = Table(
    "open_work",
    browsed,
    Column("place", Integer, primary_key=True, autoincrement=False, doc="In the order of the book."),
    _text("what", "A store job, a load, a send, a recv, or a request."),
    _integer("job", "The store job."),
    _integer("load", "The load from the store."),
    _text("transfer", "The P/D transfer."),
    _text("request", "The request."),
    _integer("generation", "Which life of the request."),
    _text("state", "How far it is."),
    _text("waits_for", "Who has not answered."),
    _integer("held_blocks", "How many blocks it pins, writes or holds."),
    _integer("since_seq", "The event at which it began."),
    _integer("since_ts_ns", "When it began, wall clock."),
    _integer("open_ns", "Since how long, by the scheduler's monotonic clock."),
)

timeline = Table(
    "timeline",
    browsed,
    Column("first_seq", Integer, primary_key=True, autoincrement=False, doc="The first event of the interval."),
    _integer("from_ts_ns", "When it began, wall clock."),
    _integer("to_ts_ns", "When it ended, wall clock."),
    _integer("requests", "Requests in the engine, at the most."),
    _integer("open_jobs", "Open store jobs, at the most."),
    _integer("pinned_blocks", "Different blocks that store jobs pinned, at the most."),
    _integer("open_loads", "Open loads, at the most."),
    _integer("loading_blocks", "Blocks that loads wrote into, at the most."),
    _integer("open_transfers", "Open P/D transfers, at the most."),
    _integer("transfer_blocks", "Blocks that P/D transfers held, at the most."),
    _integer("preemptions", "How many requests were preempted."),
    _integer("failures", "How many ranks or peers reported a failure."),
)

block_ranges = Table(
    "block_ranges",
    browsed,
    _integer("block_group", "The KV-cache group."),
    _integer("first_block", "The lowest block of a run."),
    _integer("last_block", "The highest block of that run."),
    _integer("seq", "The event that concerns it."),
)

INDEXES = (
    # All columns of the table, so that the table itself is never looked at.
    "CREATE INDEX block_ranges_by_block ON block_ranges (block_group, first_block, last_block, seq)",
    # What a person filters events by, and no program does.
    "CREATE INDEX events_by_rank ON events (rank, seq) WHERE rank IS NOT NULL",
    "CREATE INDEX events_by_source ON events (source, seq)",
)
"""Made when the tables are full."""


def definitions() -> list[str]:
    """Return the statements that make the tables."""
    return [str(CreateTable(table).compile(dialect=sqlite.dialect())) for table in browsed.sorted_tables]


def meanings() -> dict[str, dict[str, str]]:
    """Return what each column of each table means, by table and column."""
    return {
        name: {column.name: column.doc or "" for column in table.columns}
        for tables in (schema.log, schema.sealed, browsed)
        for name, table in tables.tables.items()
    }
