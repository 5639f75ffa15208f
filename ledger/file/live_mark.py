"""Whether a process writes a log now: the mark that the writer holds, and how a reader looks for it.

This file knows locks of the operating system and where SQLite keeps the `-wal`.
"""

import contextlib
import os
import weakref
from pathlib import Path

from ledger.file.sqlite import wal_path

try:
    import fcntl
except ImportError:  # Windows: no engine runs there, but logs are read there. Whether one is live is then unknown.
    fcntl = None


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
