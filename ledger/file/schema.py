"""The tables of the audit log, and those that sealing adds: the one source of names, types and meanings.

The revisions in `migrations/` build these tables; a test holds both equal. The columns of `events` beside `data` repeat
what stands in `data`, so that a person or a query can find events without reading JSON; the writer fills them from it
by the one statement below. This file knows SQLAlchemy; whoever only reads or writes rows does without it.
"""

from sqlalchemy import DDL, Column, Index, Integer, LargeBinary, MetaData, Table, Text, event

log = MetaData()
"""Every file has these tables."""

sealed = MetaData()
"""Only a sealed file has these as well."""


def _integer(name: str, doc: str, *, null: bool = True) -> Column[int]:
    return Column(name, Integer, nullable=null, doc=doc)


def _text(name: str, doc: str, *, null: bool = True) -> Column[str]:
    return Column(name, Text, nullable=null, doc=doc)


events = Table(
    "events",
    log,
    Column("seq", Integer, primary_key=True, autoincrement=False, doc="Place in the log, from 1, without a hole."),
    _integer("ts_ns", "Wall clock, nanoseconds since 1970.", null=False),
    _integer("mono_ns", "Monotonic clock of the source, nanoseconds.", null=False),
    _text("source", "`scheduler`, or `rank <n>`.", null=False),
    _integer("step", "The engine step.", null=False),
    _text("kind", "What happened, without the version of the kind.", null=False),
    _text("request", "The request's id. It comes back after preemption."),
    _integer("generation", "Which life of the request."),
    _integer("job", "The store job."),
    _integer("load", "The load from the store."),
    _text("transfer", "The P/D transfer, or the call to the store."),
    _integer("rank", "The worker's rank."),
    _text("code", "Stable name of the error."),
    _text("data", "The whole event as one line of JSON. The other columns are taken from it.", null=False),
    sqlite_strict=True,
)
"""The log. Rows are only ever appended."""

meta = Table(
    "meta",
    log,
    Column("key", Text, primary_key=True, doc="Name."),
    _text("value", "Value.", null=False),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)
"""Who wrote this file: written once, when the file is made."""

TRIGGERS: dict[str, str] = {
    "events_are_not_changed": (
        "CREATE TRIGGER events_are_not_changed BEFORE UPDATE ON events BEGIN "
        "SELECT RAISE(ABORT, 'an event is never changed'); END"
    ),
    "events_are_not_removed": (
        "CREATE TRIGGER events_are_not_removed BEFORE DELETE ON events BEGIN "
        "SELECT RAISE(ABORT, 'an event is never removed'); END"
    ),
    # INSERT OR REPLACE removes the old row without the trigger above unless the connection asked for recursive
    # triggers; this one does not depend on what other programs ask for.
    "events_are_only_appended": (
        "CREATE TRIGGER events_are_only_appended BEFORE INSERT ON events "
        "WHEN NEW.seq <= (SELECT max(seq) FROM events) BEGIN "
        "SELECT RAISE(ABORT, 'an event is only ever appended'); END"
    ),
}
"""What refuses to change history, by name. It keeps honest programs from mistakes; the hash chain finds the others."""

for _statement in TRIGGERS.values():
    event.listen(events, "after_create", DDL(_statement))


# --- what sealing adds ------------------------------------------------------------------------------------------------

seal = Table(
    "seal",
    sealed,
    _text("sealed_at", "When, ISO 8601 in UTC.", null=False),
    _text("kvledger", "The version that sealed the file.", null=False),
    _integer("events", "How many events.", null=False),
    _text("chain_head", "SHA-256 over all events in order, hex. See `ledger.file.chain`.", null=False),
    _text("source", "Name of the file that was sealed.", null=False),
    _text(
        "end",
        "How the log ended when it was sealed: `closed`, `torn`, or `live` (the engine was still running).",
        null=False,
    ),
    sqlite_strict=True,
)
"""One row: this file is sealed."""

chain = Table(
    "chain",
    sealed,
    Column("seq", Integer, primary_key=True, autoincrement=False, doc="The event."),
    Column("hash", LargeBinary, nullable=False, doc="SHA-256 of the hash before it and the event's `data`."),
    sqlite_strict=True,
)
"""The hash chain link by link, so that a changed event can be named."""

requests = Table(
    "requests",
    sealed,
    Column(
        "first_seq", Integer, primary_key=True, autoincrement=False, doc="The first event that names this life of it."
    ),
    _text("request", "The request's id. It comes back after preemption, and when a client uses it again.", null=False),
    _integer("generation", "Which life of the request.", null=False),
    _integer("queued_ts_ns", "When the scheduler took it into its queue, wall clock; empty: it resumed."),
    _integer("started_ts_ns", "When it ran for the first time in this generation, wall clock."),
    _integer("ended_ts_ns", "When this generation ended, wall clock; empty: not in this log."),
    _text("end", "`finished`, `aborted` or `preempted`; empty: open."),
    _text("reason", "vLLM's reason for finishing."),
    _integer("prompt_tokens", "Length of the prompt in tokens, if recorded."),
    sqlite_strict=True,
)
"""One row for each life of a request."""

jobs = Table(
    "jobs",
    sealed,
    Column("job", Integer, primary_key=True, autoincrement=False, doc="The store job."),
    _text("request", "Whose blocks it saves."),
    _integer("generation", "Which life of the request."),
    _integer("registered_seq", "The event that registered it."),
    _integer("registered_ts_ns", "When it was given to the workers, wall clock."),
    _integer("settled_ts_ns", "When every rank had reported, wall clock; empty: open."),
    _integer("freed_ts_ns", "When its blocks were given back, wall clock; empty: still pinned, or it pinned none."),
    _integer("duration_ns", "From registered to settled, by the scheduler's monotonic clock."),
    _integer("tokens", "Prefix length that it may save, in tokens."),
    _integer("blocks", "How many blocks it pinned.", null=False),
    _integer("ranks", "How many ranks must report.", null=False),
    _integer("ranks_reported", "How many have.", null=False),
    _integer("ranks_failed", "How many reported a failure.", null=False),
    _text("code", "Stable name of the first error."),
    sqlite_strict=True,
)
"""One row for each store job."""

loads = Table(
    "loads",
    sealed,
    Column("load", Integer, primary_key=True, autoincrement=False, doc="The load."),
    _text("request", "Whose blocks it fills."),
    _integer("generation", "Which life of the request."),
    _integer("planned_seq", "The event that planned it."),
    _integer("planned_ts_ns", "When vLLM allocated its blocks, wall clock."),
    _integer("registered_ts_ns", "When it was given to the workers, wall clock."),
    _integer("settled_ts_ns", "When no rank wrote any more, wall clock; empty: open."),
    _integer("duration_ns", "From planned to settled, by the scheduler's monotonic clock."),
    _text("outcome", "`loaded`, `failed` or `cancelled`; empty: open."),
    _integer("tokens", "Tokens to load."),
    _integer("blocks", "How many blocks it writes.", null=False),
    _integer("ranks", "How many ranks must answer.", null=False),
    _integer("ranks_answered", "How many have.", null=False),
    _text("code", "Stable name of the first error."),
    _text("stage", "Where it failed."),
    sqlite_strict=True,
)
"""One row for each load from the store."""

transfers = Table(
    "transfers",
    sealed,
    Column("first_seq", Integer, primary_key=True, autoincrement=False, doc="The first event that names this call."),
    _text("transfer", "The call to the store, `<rank>-<number>`, or the P/D transfer that it is part of.", null=False),
    _integer("rank", "The worker that called.", null=False),
    _text("op", "`put` or `get`; for a P/D transfer `push` or `pull`.", null=False),
    _text("peer", "The worker of the other engine, for a P/D transfer."),
    _text("request", "For which request."),
    _integer("job", "For which store job."),
    _integer("load", "For which load."),
    _integer("started_seq", "The event of its start."),
    _integer("started_ts_ns", "When it was called, wall clock of the worker."),
    _integer("finished_ts_ns", "When it returned, wall clock of the worker; empty: not in this log."),
    _integer("duration_ns", "How long the call took."),
    _text("outcome", "`ok`, `partial`, `failed` or `raised`; empty: it has not returned."),
    _integer("keys", "How many keys.", null=False),
    _integer("bytes", "How many bytes.", null=False),
    _integer("failed_keys", "How many keys failed.", null=False),
    _text("code", "Stable name of the error; with several keys, that of the first that failed."),
    _text("exception", "Type of the exception that ended it."),
    sqlite_strict=True,
)
"""One row for each call to the store or to a peer."""

INDEXES: tuple[Index, ...] = (
    Index("events_by_kind", events.c.kind, events.c.seq),
    Index(
        "events_by_request",
        events.c.request,
        events.c.generation,
        events.c.seq,
        sqlite_where=events.c.request.is_not(None),
    ),
    Index("events_by_job", events.c.job, events.c.seq, sqlite_where=events.c.job.is_not(None)),
    Index("events_by_load", events.c.load, events.c.seq, sqlite_where=events.c.load.is_not(None)),
    Index("events_by_transfer", events.c.transfer, events.c.seq, sqlite_where=events.c.transfer.is_not(None)),
    Index("events_by_code", events.c.code, events.c.seq, sqlite_where=events.c.code.is_not(None)),
    Index("requests_by_request", requests.c.request, requests.c.generation),
    Index("jobs_by_request", jobs.c.request, jobs.c.generation),
    Index("loads_by_request", loads.c.request, loads.c.generation),
    Index("transfers_by_transfer", transfers.c.transfer),
    Index("transfers_by_job", transfers.c.job),
    Index("transfers_by_load", transfers.c.load),
)
"""What readers look events up by. A live log has none of them: each would be written with every event."""


# --- the statements that follow from the columns of `events` ----------------------------------------------------------

EXTRACTED = tuple(column.name for column in events.columns if column.name not in {"kind", "data"})
"""The columns that are a field of `data` under their own name."""

_KIND = "substr(value ->> '$.kind', 1, instr((value ->> '$.kind') || '@', '@') - 1)"

_VALUES = ", ".join(f"value ->> '$.{name}'" for name in EXTRACTED)

# The names in these statements are those of the table above.
APPEND = (
    f"INSERT INTO events (kind, data, {', '.join(EXTRACTED)}) "  # noqa: S608
    f"SELECT {_KIND}, value, {_VALUES} FROM json_each(CAST(? AS TEXT))"
)
"""Appends a JSON array of events. One statement a batch: Python's lock is taken once, and SQLite works without it."""

APPEND_AFTER = f"{APPEND} WHERE value ->> '$.seq' > ?"
"""The same for a batch of which some may be in the file: only those after a place in the log."""

_DIFFERENCES = " OR ".join(f"{name} IS NOT (value ->> '$.{name}')" for name in EXTRACTED)

DISAGREEING = (
    f"SELECT seq FROM (SELECT kind AS name, data AS value, * FROM events) "  # noqa: S608
    f"WHERE CASE WHEN json_valid(value) THEN name IS NOT {_KIND} OR {_DIFFERENCES} ELSE 1 END ORDER BY seq"
)
"""The events of which a column says something else than `data`."""
