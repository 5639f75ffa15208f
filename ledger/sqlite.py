"""How kvledger opens SQLite files: which of the safe ways, and what an error of SQLite means to an operator.

Three ways exist, because SQLite's write-ahead log makes reading a matter of care:

    write     the one writer of a live log. Nobody else checkpoints: with several connections that do, SQLite before 3.51.3 can
              corrupt a file.
    read      a log that has its `-wal` and `-shm` beside it, live or torn. Takes part in the locks of a live log, and does
              not write to either file of a torn one.
    immutable a log that has no `-wal`, so that nobody writes it. Needs no lock and no file beside it. On a file *with* a
              `-wal` it would show an old state, or an empty database, without any error.

This file knows `sqlite3` and paths. It knows nothing of events, and it imports fast: every process of the engine loads it.
"""

import contextlib
import os
import sqlite3
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no engine runs there, but a log is read there; whether it is live is not known then.
    fcntl = None

APPLICATION_ID = 0x6B764C67
"""`kvLg`, in the header of every file of ours: it tells them from other programs' databases."""

LOG_REVISIONS = ("log_0001",)
"""The revisions of the audit log that this kvledger reads, oldest first. Those of `migrations/`, held equal by a test."""

SEALED_REVISIONS = ("sealed_0001",)
"""The revisions of what sealing adds, oldest first."""

BUSY_TIMEOUT_S = 1.0
"""How long a statement waits for another program's lock. Short: the caller has a better plan than to wait in SQLite."""

AUTOCHECKPOINT_PAGES = 1_000
"""SQLite's own default, about 4 MB: the log is moved into the file often enough that a reader's start stays cheap."""

JOURNAL_LIMIT_BYTES = 16 * 1024 * 1024
"""What a `-wal` that a long reader made grow is cut back to, once the reader has gone."""


def wal_path(path: Path) -> Path:
    """Return where SQLite keeps the write-ahead log of `path`."""
    return path.with_name(path.name + "-wal")


def shm_path(path: Path) -> Path:
    """Return where SQLite keeps the index of that write-ahead log."""
    return path.with_name(path.name + "-shm")


def open_to_write(path: Path) -> sqlite3.Connection:
    """Return the writer's connection to an existing file, in WAL mode and in autocommit.

    A single statement is a transaction of its own then. It takes the write lock before it reads, as BEGIN IMMEDIATE does; a
    plain BEGIN would fail with "database is locked" where it turns from reading to writing.

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
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        # A killed process loses nothing that was committed. A host that loses power may lose the last commits, and the file
        # stays whole. FULL would wait for the disk on every flush.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {AUTOCHECKPOINT_PAGES}").fetchall()
        connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_LIMIT_BYTES}").fetchall()
        # Without it an INSERT OR REPLACE deletes a row and no trigger sees it.
        connection.execute("PRAGMA recursive_triggers = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def open_to_read(path: Path, *, immutable: bool) -> sqlite3.Connection:
    """Return a connection that cannot change the file, nor the files beside it. Text comes back as bytes.

    Args:
        path: an existing file; symbolic links must be resolved, because SQLite looks for the `-wal` beside the real one.
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
        timeout=5.0,
        check_same_thread=False,
    )
    connection.text_factory = bytes
    return connection


def explain(error: Exception) -> str:
    """Return what an error means and what to do about it, in half a line."""
    if isinstance(error, sqlite3.Error):
        name = getattr(error, "sqlite_errorname", "") or ""
        for prefix, text in _MEANINGS:
            if name.startswith(prefix):
                return text
        return f"SQLite says: {error} ({name or type(error).__name__})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


_MEANINGS = (
    ("SQLITE_FULL", "the disk is full; free some space"),
    ("SQLITE_BUSY", "another program holds the file's write lock; end it"),
    ("SQLITE_LOCKED", "another program holds the file's write lock; end it"),
    ("SQLITE_READONLY", "the file has become read-only; make it writable again"),
    ("SQLITE_CANTOPEN", "the file or its folder cannot be opened; check that both exist and are writable"),
    ("SQLITE_IOERR", "the disk reports an I/O error; check it and the space left"),
    ("SQLITE_CORRUPT", "the file was damaged by something else; look at the disk"),
)


class LiveMark:
    """The writer's sign that it is at work: a lock on the `-wal`, which the kernel takes away when the process ends.

    It is a lock of `flock`, which SQLite does not use, on a file on which SQLite holds no locks: so to ask for it disturbs
    nobody. (Any `close` of the database file itself would drop all of SQLite's locks that the same process holds on it.)

    Raises:
        OSError: the `-wal` cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = -1
        if fcntl is not None:
            self._file = os.open(wal_path(path), os.O_RDONLY | os.O_CLOEXEC)
            # A file system without flock: the log will not be known to be live. That is no reason not to write it.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _marks.add(self)

    def release(self) -> None:
        """Take the sign away."""
        _marks.discard(self)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


_marks: weakref.WeakSet[LiveMark] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked child shares the lock, and would keep up the sign after its parent was killed."""
    for mark in list(_marks):
        mark.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def is_live(path: Path) -> bool:
    """Return whether a process on this host writes the log now. False also where that cannot be known."""
    if fcntl is None:
        return False
    try:
        file = os.open(wal_path(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False
