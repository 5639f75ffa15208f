"""The log: events that are only ever appended, and who wrote them.

Stored rows of events are never rewritten by a revision.
"""

import sqlalchemy as sa
from alembic import op

revision = "log_0001"
down_revision = None
branch_labels = ("log",)
depends_on = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("seq", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("ts_ns", sa.Integer(), nullable=False),
        sa.Column("mono_ns", sa.Integer(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("request", sa.Text()),
        sa.Column("generation", sa.Integer()),
        sa.Column("job", sa.Integer()),
        sa.Column("load", sa.Integer()),
        sa.Column("transfer", sa.Text()),
        sa.Column("rank", sa.Integer()),
        sa.Column("code", sa.Text()),
        sa.Column("data", sa.Text(), nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "meta",
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("value", sa.Text(), nullable=False),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    op.execute(
        "CREATE TRIGGER events_are_not_changed BEFORE UPDATE ON events BEGIN "
        "SELECT RAISE(ABORT, 'an event is never changed'); END"
    )
    op.execute(
        "CREATE TRIGGER events_are_not_removed BEFORE DELETE ON events BEGIN "
        "SELECT RAISE(ABORT, 'an event is never removed'); END"
    )
    op.execute(
        "CREATE TRIGGER events_are_only_appended BEFORE INSERT ON events "
        "WHEN NEW.seq <= (SELECT max(seq) FROM events) BEGIN "
        "SELECT RAISE(ABORT, 'an event is only ever appended'); END"
    )


def downgrade() -> None:
    raise NotImplementedError("A log is evidence: nothing is removed from it. Read it with the kvledger that wrote it.")
