"""New files that a reader is asked for: whole, or not there at all.

They are written under another name beside the target and get theirs when they are complete, and never take the name of
a file that exists. This file knows the writer's database and files, nothing of what they hold.
"""

import os
import sqlite3
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ledger import events as ev
from ledger.errors import LedgerNotWritable
from ledger.file import sqlite
from ledger.live.writer import Database


def write_pages(target: Path, pages: Iterable[bytes]) -> None:
    """Write bytes to a new file.

    Raises:
        LedgerNotWritable: the target exists, or cannot be written. Nothing is left behind.
    """
    with _unfinished(target) as path, path.open("xb") as file:
        file.writelines(pages)


def write_log(target: Path, meta: Mapping[str, str], events: Sequence[ev.AnyEvent]) -> None:
    """Write events to a new log.

    Raises:
        LedgerNotWritable: the target exists, or cannot be written. Nothing is left behind.
    """
    with _unfinished(target) as path:
        database = Database(path)
        try:
            database.create(meta)
        except LedgerNotWritable as error:  # its advice is for an engine
            raise error.__cause__ or error from None
        try:
            database.append(msgspec.json.encode(events))
        finally:
            database.close()


@contextmanager
def _unfinished(target: Path) -> Generator[Path]:
    """Give a name to write to; in the end the file gets the name `target`, or is removed."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        refuse_existing(target)  # asked first, and not only after all the work
        yield unfinished
        sqlite.publish(unfinished, target)
    except FileExistsError:
        raise taken(target) from None
    except (OSError, sqlite3.Error) as error:
        raise LedgerNotWritable(
            f"{target} cannot be written in the folder {target.absolute().parent}: {sqlite.explain(error)}. Or name a "
            "file in another folder."
        ) from error
    finally:
        for path in (unfinished, sqlite.wal_path(unfinished), sqlite.shm_path(unfinished)):
            with suppress(OSError):  # a folder that takes no file has none to remove
                path.unlink(missing_ok=True)


def refuse_existing(target: Path) -> None:
    """Raise `LedgerNotWritable` if there is a file of that name; a folder that may not be looked into is no answer."""
    try:
        exists = target.exists()
    except PermissionError:
        return
    if exists:
        raise taken(target)


def taken(target: Path) -> LedgerNotWritable:
    """Return the error for a name that has a file already."""
    return LedgerNotWritable(f"{target} exists, and evidence is never overwritten. Choose another name.")
