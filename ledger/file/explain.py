"""What an error of SQLite or of the file system means to an operator, and what to do about it.

This file knows `sqlite3` and errors of the operating system.
"""

import errno
import sqlite3

MESSAGE_LIMIT = 160
"""Characters of a foreign error's text in a line of ours: two lines of a terminal, when it is a long one."""


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
