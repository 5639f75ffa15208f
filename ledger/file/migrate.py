"""Makes an audit database and brings an older one up to date, by the Alembic revisions in `migrations/`.

There are two lines of revisions. `log` is what every file has; `sealed` is what sealing adds. A downgrade is not
offered: it would remove what an older kvledger did not know, and a log is evidence. An older kvledger says that a file
is newer than it is.

This file knows Alembic and SQLAlchemy, which take 0.4 s to import: the writer imports it when it makes a file, a reader
never does.
"""

import contextlib
import sqlite3
from collections.abc import Generator
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from ledger.errors import FileNewer
from ledger.file import sqlite

LOG = ("log@head",)
"""The newest revision of a log as the writer writes it."""

SEALED = ("log@head", "sealed@head")
"""The newest revisions of a sealed file."""


def scripts_path() -> Path:
    """Return the folder of the revisions: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent / "migrations"


def config() -> Config:
    """Return the configuration of Alembic, complete without a file."""
    made = Config()
    made.set_main_option("script_location", str(scripts_path()).replace("%", "%%"))
    return made


def known_revisions() -> set[str]:
    """Return every revision that `migrations/` has."""
    return {script.revision for script in ScriptDirectory.from_config(config()).walk_revisions()}


def connect(path: Path) -> sa.Engine:
    """Return an engine for an existing file, in which a transaction takes the write lock at once."""
    uri = f"{path.absolute().as_uri()}?mode=rw"

    def open_file() -> sqlite3.Connection:
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=sqlite.BUSY_TIMEOUT_S)

    engine = sa.create_engine("sqlite://", creator=open_file, poolclass=sa.NullPool)

    def begin_immediate(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "begin", begin_immediate)
    return engine


def create(path: Path) -> None:
    """Make an empty log at `path`: all of it or nothing.

    Raises:
        FileExistsError: there is a file. A log is never continued by a later boot.
        OSError, sqlite3.Error: it cannot be made there. Nothing is left behind.
    """
    path.touch(exist_ok=False)
    try:
        with _driver_errors(), connect(path).begin() as connection:
            connection.exec_driver_sql(f"PRAGMA application_id = {sqlite.APPLICATION_ID}")
            _run(connection, LOG)
    except BaseException:
        path.unlink(missing_ok=True)
        path.with_name(path.name + "-journal").unlink(missing_ok=True)
        raise


def upgrade(path: Path, target: tuple[str, ...] = LOG) -> None:
    """Bring the schema of a file that nobody has open to `target`. Rows of events stay as they are.

    Raises:
        FileNewer: the file has a revision that this kvledger does not know.
        sqlite3.Error: the file cannot be changed.
    """
    with _driver_errors(), connect(path).begin() as connection:
        unknown = set(_revisions(connection)) - known_revisions()
        if unknown:
            raise FileNewer(
                f"{path}: written by a newer kvledger (schema {', '.join(sorted(unknown))}). Upgrade kvledger."
            )
        _run(connection, target)


def current_revision(path: Path) -> tuple[str, ...]:
    """Return the revisions of a file that nobody writes, one for each line it has, in alphabetical order."""
    with _driver_errors(), connect(path).connect() as connection:
        return tuple(sorted(_revisions(connection)))


@contextlib.contextmanager
def _driver_errors() -> Generator[None]:
    """Raise SQLite's own errors, so that whoever calls needs to know of no other."""
    try:
        yield
    except DBAPIError as error:
        if isinstance(error.orig, sqlite3.Error):
            raise error.orig from error
        raise


def _revisions(connection: sa.Connection) -> tuple[str, ...]:
    return MigrationContext.configure(connection).get_current_heads()


def _run(connection: sa.Connection, target: tuple[str, ...]) -> None:
    made = config()
    made.attributes["connection"] = connection
    for revision in target:
        command.upgrade(made, revision)
