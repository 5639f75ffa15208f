"""What sealing adds: the seal, the hash chain, summaries, and the indexes that readers use.

Stored rows of events are never rewritten by a revision.
"""

import sqlalchemy as sa
from alembic import op

revision = "sealed_0001"
down_revision = None
branch_labels = ("sealed",)
depends_on = None


def upgrade() -> None:
    op.create_table(
        "chain",
        sa.Column("seq", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "jobs",
        sa.Column("job", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("request", sa.Text()),
        sa.Column("generation", sa.Integer()),
        sa.Column("registered_seq", sa.Integer()),
        sa.Column("registered_ts_ns", sa.Integer()),
        sa.Column("settled_ts_ns", sa.Integer()),
        sa.Column("freed_ts_ns", sa.Integer()),
        sa.Column("duration_ns", sa.Integer()),
        sa.Column("tokens", sa.Integer()),
        sa.Column("blocks", sa.Integer(), nullable=False),
        sa.Column("ranks", sa.Integer(), nullable=False),
        sa.Column("ranks_reported", sa.Integer(), nullable=False),
        sa.Column("ranks_failed", sa.Integer(), nullable=False),
        sa.Column("code", sa.Text()),
        sqlite_strict=True,
    )
    op.create_table(
        "loads",
        sa.Column("load", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("request", sa.Text()),
        sa.Column("generation", sa.Integer()),
        sa.Column("planned_seq", sa.Integer()),
        sa.Column("planned_ts_ns", sa.Integer()),
        sa.Column("registered_ts_ns", sa.Integer()),
        sa.Column("settled_ts_ns", sa.Integer()),
        sa.Column("duration_ns", sa.Integer()),
        sa.Column("outcome", sa.Text()),
        sa.Column("tokens", sa.Integer()),
        sa.Column("blocks", sa.Integer(), nullable=False),
        sa.Column("ranks", sa.Integer(), nullable=False),
        sa.Column("ranks_answered", sa.Integer(), nullable=False),
        sa.Column("code", sa.Text()),
        sa.Column("stage", sa.Text()),
        sqlite_strict=True,
    )
    op.create_table(
        "requests",
        sa.Column("first_seq", sa.Integer(), primary_key=True),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("queued_ts_ns", sa.Integer()),
        sa.Column("started_ts_ns", sa.Integer()),
        sa.Column("ended_ts_ns", sa.Integer()),
        sa.Column("end", sa.Text()),
        sa.Column("reason", sa.Text()),
        sa.Column("prompt_tokens", sa.Integer()),
        sqlite_strict=True,
    )
    op.create_table(
        "seal",
        sa.Column("sealed_at", sa.Text(), nullable=False),
        sa.Column("kvledger", sa.Text(), nullable=False),
        sa.Column("events", sa.Integer(), nullable=False),
        sa.Column("chain_head", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("end", sa.Text(), nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "transfers",
        sa.Column("first_seq", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("transfer", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("op", sa.Text(), nullable=False),
        sa.Column("peer", sa.Text()),
        sa.Column("request", sa.Text()),
        sa.Column("job", sa.Integer()),
        sa.Column("load", sa.Integer()),
        sa.Column("started_seq", sa.Integer()),
        sa.Column("started_ts_ns", sa.Integer()),
        sa.Column("finished_ts_ns", sa.Integer()),
        sa.Column("duration_ns", sa.Integer()),
        sa.Column("outcome", sa.Text()),
        sa.Column("keys", sa.Integer(), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("failed_keys", sa.Integer(), nullable=False),
        sa.Column("code", sa.Text()),
        sa.Column("exception", sa.Text()),
        sqlite_strict=True,
    )
    op.create_index("events_by_kind", "events", ["kind", "seq"])
    op.create_index(
        "events_by_request", "events", ["request", "generation", "seq"], sqlite_where=sa.text("request IS NOT NULL")
    )
    op.create_index("events_by_job", "events", ["job", "seq"], sqlite_where=sa.text("job IS NOT NULL"))
    op.create_index("events_by_load", "events", ["load", "seq"], sqlite_where=sa.text("load IS NOT NULL"))
    op.create_index("events_by_transfer", "events", ["transfer", "seq"], sqlite_where=sa.text("transfer IS NOT NULL"))
    op.create_index("events_by_code", "events", ["code", "seq"], sqlite_where=sa.text("code IS NOT NULL"))
    op.create_index("requests_by_request", "requests", ["request", "generation"])
    op.create_index("jobs_by_request", "jobs", ["request", "generation"])
    op.create_index("loads_by_request", "loads", ["request", "generation"])
    op.create_index("transfers_by_transfer", "transfers", ["transfer"])
    op.create_index("transfers_by_job", "transfers", ["job"])
    op.create_index("transfers_by_load", "transfers", ["load"])


def downgrade() -> None:
    raise NotImplementedError("A log is evidence: nothing is removed from it. Read it with the kvledger that wrote it.")
