"""How kvledger opens SQLite files: which of the safe ways, and with which settings.

Three ways exist, because SQLite's write-ahead log makes reading a matter of care:

    write      the one writer of a live log. Nobody else checkpoints: with several connections that do, SQLite before
               3.51.3 can corrupt a file.
    read       a log that has its `-wal` and `-shm` beside it, live or torn. It takes part in the locks of a live log,
               and writes to neither file of a torn one.
    immutable  a log that has no `-wal`, so that nobody writes it. It needs no lock and no file beside it. On a file
               *with* a `-wal` it would show an old state, or an empty database, without any error.

This file knows `sqlite3` and paths. It knows nothing of events, and it imports fast: every process of an engine loads
it.
"""

import sqlite3
from pathlib import Path

APPLICATION_ID = 0x6B764C67
"""`kvLg`, in the header of every log: it tells logs from other programs' databases."""

LOG_REVISIONS = ("log_0001",)
"""The revisions of the audit log that this kvledger reads, oldest first: those of `migrations/`, without Alembic."""

SEALED_REVISIONS = ("sealed_0001",)
"""The revisions of what sealing adds, oldest first."""

BUSY_TIMEOUT_S = 1.0
"""How long the writer waits for another program's lock. Short: it has a better plan than to wait inside SQLite."""

READ_TIMEOUT_S = 5.0
"""How long a reader waits for a lock. Nobody holds one for long but the recovery of a torn log by another program."""

AUTOCHECKPOINT_PAGES = 1_000
"""SQLite's own default, about 4 MB: often enough that a reader, who looks through the `-wal` first, starts fast."""

JOURNAL_LIMIT_BYTES = 16 * 1024 * 1024
"""What a `-wal` that a long reader made grow is cut back to, once the reader has gone: four times its usual size."""


def wal_path(path: Path) -> Path:
    """Return where SQLite keeps the write-ahead log of `path`."""
    return path.with_name(path.name + "-wal")


def shm_path(path: Path) -> Path:
    """Return where SQLite keeps the index of that write-ahead log."""
    return path.with_name(path.name + "-shm")


def journal_path(path: Path) -> Path:
    """Return where SQLite keeps the rollback journal of a database without a write-ahead log."""
    return path.with_name(path.name + "-journal")


def is_log(path: Path) -> bool:
    """Return whether the header of a file says that kvledger wrote it, however the rest looks. Nothing is locked."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError:
        return False
    return header[:16] == b"SQLite format 3\0" and header[68:72] == APPLICATION_ID.to_bytes(4, "big")


_HEADER_BYTES = 100
"""Length of SQLite's header; bytes 68 to 71 are the application id (sqlite.org/fileformat.html)."""


def open_to_write(path: Path) -> sqlite3.Connection:
    """Return the writer's connection to an existing file, in WAL mode and in autocommit.

    In autocommit a statement is a transaction of its own. One that writes takes the write lock first, as BEGIN
    IMMEDIATE does; a plain BEGIN that reads before it writes fails at once with "database is locked".

    Raises:
        sqlite3.Error: the file cannot be opened.
    """
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        timeout=BUSY_TIMEOUT_S,
        check_same_thread=False,
    )
    try:
        _use_wal(connection)
        # A killed process loses nothing that was committed. A host that loses power may lose the last commits, and
        # the file stays whole. FULL would wait for the disk at every flush.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {AUTOCHECKPOINT_PAGES}").fetchall()
        connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_LIMIT_BYTES}").fetchall()
        # Without it an INSERT OR REPLACE deletes a row and no trigger sees it.
        connection.execute("PRAGMA recursive_triggers = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError("this file system cannot hold a write-ahead log; use one on a local disk")


def open_to_read(path: Path, *, immutable: bool) -> sqlite3.Connection:
    """Return a connection that cannot change the file, nor the files beside it. Text comes back as bytes.

    Args:
        path: an existing file; symbolic links must be resolved, because the `-wal` lies beside the real file.
        immutable: the file has no `-wal`.

    Raises:
        sqlite3.Error: the file cannot be opened.
    """
    # readonly_shm: the first reader of a torn log would otherwise rebuild its -shm on disk.
    options = "immutable=1" if immutable else "readonly_shm=1"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro&{options}",
        uri=True,
        isolation_level=None,
        timeout=READ_TIMEOUT_S,
        check_same_thread=False,
    )
    connection.text_factory = bytes
    return connection
