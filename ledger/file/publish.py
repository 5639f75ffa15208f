"""Gives a new file its name: whole, or not at all, and never in place of a file that exists.

A file is written under another name beside the target and gets the target's name once it is complete. Whatever
kvledger makes for a reader goes through here: sealed files, traces, exports, minimized logs. This file knows paths and
nothing of what the files hold.
"""

import contextlib
import errno
import os
import sqlite3
from collections.abc import Generator, Iterable
from pathlib import Path

from ledger.errors import LedgerNotWritable
from ledger.file.explain import explain
from ledger.file.sqlite import journal_path, shm_path, wal_path


def write_pages(target: Path, pages: Iterable[bytes]) -> None:
    """Write bytes to a new file.

    Raises:
        LedgerNotWritable: the target exists, or cannot be written. Nothing is left behind.
    """
    with unfinished(target) as path, path.open("xb") as file:
        file.writelines(pages)


@contextlib.contextmanager
def unfinished(target: Path) -> Generator[Path]:
    """Give a name to write to. At the end the file gets the name `target`; after an error nothing is left behind.

    Raises:
        LedgerNotWritable: the target exists, or cannot be written.
    """
    written = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        refuse_existing(target)  # before all the work, and not only after it
        yield written
        publish(written, target)
    except FileExistsError:
        raise taken(target) from None
    except (OSError, sqlite3.Error) as error:
        raise LedgerNotWritable(
            f"{target} cannot be written in the folder {target.absolute().parent}: {explain(error)}. Or name a "
            "file in another folder."
        ) from error
    finally:
        for path in (written, wal_path(written), shm_path(written), journal_path(written)):
            with contextlib.suppress(OSError):  # a folder that takes no file has none to remove
                path.unlink(missing_ok=True)


def refuse_existing(target: Path) -> None:
    """Refuse a name that is taken. In a folder that may not be looked into, nothing is known yet, and nothing raised.

    Raises:
        LedgerNotWritable: there is a file of that name.
    """
    try:
        exists = target.exists()
    except PermissionError:
        return
    if exists:
        raise taken(target)


def taken(target: Path) -> LedgerNotWritable:
    """Return the error for a name that is taken."""
    return LedgerNotWritable(f"{target} exists, and evidence is never overwritten. Choose another name.")


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
