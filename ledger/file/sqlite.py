"""How kvledger opens SQLite files: which of the safe ways, and what an error of SQLite means to an operator.

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

import contextlib
import errno
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

MESSAGE_LIMIT = 160
"""Characters of a foreign error's text in a line of ours: two lines of a terminal, when it is a long one."""


def wal_path(path: Path) -> Path:
    """Return where SQLite keeps the write-ahead log of `path`."""
    return path.with_name(path.name + "-wal")


def shm_path(path: Path) -> Path:
    """Return where SQLite keeps the index of that write-ahead log."""
    return path.with_name(path.name + "-shm")


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


def publish(unfinished: Path, target: Path) -> None:
    """Give a finished file its name: at once, and only if the name is free.

    Raises:
        FileExistsError: there is a file of that name. Nothing was changed.
        OSError: the folder does not take it.
    """
    _sync(unfinished)
    try:
        os.link(unfinished, target)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links. Between the question and the answer another program may take the name.
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        unfinished.rename(target)
    else:
        unfinished.unlink()
    with contextlib.suppress(OSError):  # some file systems do not sync folders
        _sync(target.parent)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def error_name(error: sqlite3.Error) -> str:
    """Return SQLite's name of an error, e.g. `SQLITE_FULL`; empty for one that Python's module raised by itself."""
    return getattr(error, "sqlite_errorname", None) or ""


def brief(error: Exception) -> str:
    """Return what an error says as part of one line: SQLite may quote whole statements out of a damaged file."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MESSAGE_LIMIT else f"{text[:MESSAGE_LIMIT]}..."


def explain(error: Exception) -> str:
    """Return what an error means and what to do about it, in half a line without a full stop."""
    if isinstance(error, sqlite3.Error):
        name = error_name(error)
        for prefix, text in _MEANINGS:
            if name.startswith(prefix):
                return text
        return f"SQLite says: {brief(error)}"
    if isinstance(error, PermissionError):
        return "Permission denied; ask for the right to use the file and its folder"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {brief(error)}"


_MEANINGS = (
    ("SQLITE_FULL", "the disk is full; free some space"),
    ("SQLITE_BUSY", "another program holds a lock on the file; end it"),
    ("SQLITE_LOCKED", "another program holds a lock on the file; end it"),
    ("SQLITE_READONLY", "the file is read-only; make it writable"),
    ("SQLITE_CANTOPEN", "the file cannot be opened; check that it and its folder exist and are writable"),
    ("SQLITE_IOERR", "the disk reports an I/O error; check the disk and the space left"),
    ("SQLITE_CORRUPT", "the file was damaged by something else; check the disk"),
    ("SQLITE_NOTADB", "the file was overwritten by something else; check the disk"),
)


class LiveMark:
    """The writer's sign that it is at work: a lock on the `-wal`, which the kernel takes away when the process ends.

    It is a lock of `flock`, which SQLite does not use, on a file on which SQLite holds no locks, so asking for it
    disturbs nobody. The database file itself would not do: whoever opens and closes it drops all locks that SQLite
    holds on it in the same process.

    Raises:
        OSError: the `-wal` cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = -1
        if fcntl is None:
            return
        self._file = os.open(wal_path(path), os.O_RDONLY | os.O_CLOEXEC)
        # On a file system without flock a log is written all the same; it is only not known to be live.
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _marks.add(self)

    def is_in_place(self, path: Path) -> bool:
        """Return whether the file that carries the sign is still the `-wal` of `path`."""
        return self._file < 0 or is_same_file(os.fstat(self._file), wal_path(path))

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


def is_same_file(status: os.stat_result, path: Path) -> bool:
    """Return whether `path` still names the file that had this status.

    Raises:
        OSError: the disk does not answer.
    """
    try:
        return os.path.samestat(status, path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


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
