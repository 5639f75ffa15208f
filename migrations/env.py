"""Runs the revisions on the connection that `ledger.file.migrate` hands over, in that connection's transaction.

For a developer's command it opens the file that the command names:

    alembic -c migrations/alembic.ini -x file=COPY.db revision --autogenerate ...
"""

from pathlib import Path

from alembic import context
from sqlalchemy import Connection

from ledger.file import migrate, schema


def run(connection: Connection) -> None:
    """Run the revisions on `connection`."""
    context.configure(
        connection=connection,
        target_metadata=[schema.log, schema.sealed],
        transactional_ddl=True,  # SQLite can; Alembic assumes that its Python driver gets in the way
        render_as_batch=True,  # SQLite alters a table by copying it
    )
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    raise SystemExit("kvledger's revisions run on a file; --sql is not supported.")

handed_over = context.config.attributes.get("connection")
if handed_over is not None:
    run(handed_over)
else:
    named = context.get_x_argument(as_dictionary=True).get("file")
    if named is None:
        raise SystemExit("Say which file to compare with: alembic -c migrations/alembic.ini -x file=COPY.db ...")
    with migrate.connect(Path(named)).begin() as own:
        run(own)
