"""Where the command line meets the terminal: streams, widths, progress, and the message and status of each error.

What is at the other end may be closed, full, or gone in the middle of an answer; none of it is a fault of kvledger's.
Python and click have answers of their own to these: a traceback below the report, status 120, status 1 (which means
findings here), or a log that gets the number of a closed stdout and is written into. A check in CI or a pipe to `head`
would act on any of them, so this file handles each. It knows streams and errors, and no command.
"""

import contextlib
import errno
import io
import os
import shutil
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import IO, Any

import click

from ledger import words
from ledger.errors import LedgerError, LedgerFileError
from ledger.replay.case import Progress

OK, FOUND, USAGE, UNREADABLE = 0, 1, 2, 3
INTERRUPTED = 130
"""What a shell gives for a program that ended by SIGINT."""
READER_LEFT = 141
"""What a shell gives for a program that ended by SIGPIPE."""


def explain(error: BaseException) -> int:
    """Say in one line what went wrong, and return the status that it has."""
    match error:
        case click.exceptions.NoArgsIsHelpError():
            return write_error(error.format_message(), USAGE)
        case click.UsageError():
            command = error.ctx.command_path if error.ctx is not None else "kvledger"
            message = error.format_message()
            stop = "" if message.endswith((".", "?")) else "."
            return complain(f"{message}{stop} See {command} --help.", USAGE)
        case click.Abort() | KeyboardInterrupt():
            return complain("interrupted", INTERRUPTED)
        case LedgerFileError():
            return complain(str(error), UNREADABLE)
        case LedgerError():
            return complain(str(error), USAGE)
        case OSError() if error.filename is None and error.errno in _NOT_TAKEN:
            # The files that commands read and write have errors of their own, above. What is left is the output.
            silence(sys.stdout)
            return complain(f"the output cannot be written: {error.strerror}", USAGE)
        case _:
            fault = f"{type(error).__name__}: {error}"
            return complain(
                f"a fault of kvledger: {fault}. Report it, with what KVLEDGER_TRACEBACK=1 shows.", UNREADABLE
            )


_NOT_TAKEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What writing to a disk that takes nothing more ends in."""


def complain(message: str, status: int) -> int:
    """Write one line to stderr, whatever the message holds, and return the status."""
    line = words.escaped(" ".join(message.split()))
    return write_error(f"kvledger: {line}", status)


def write_error(text: str, status: int) -> int:
    """Write to stderr, if anybody listens, and return the status."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)
    return status


def open_closed_streams() -> None:
    """Put a stream in the place of one that the shell closed (`>&-`).

    Python has none then, and the next file that is opened, a log, would get its number.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115, PTH123 - open for good
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may hold what the terminal cannot show


def silence(stream: IO[str]) -> None:
    """Let what a stream still holds go nowhere: Python tries again on its way out, and would change the status."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def reader_may_leave() -> Generator[None]:
    """Print an answer: a reader that has seen enough of it does not change the status that goes with it."""
    try:
        yield
    except BrokenPipeError:
        silence(sys.stdout)


def write(text: str) -> None:
    """Write a part of an answer to stdout, as it is: what people are to read is escaped before."""
    sys.stdout.write(text)


def print_text(text: str) -> None:
    """Print an answer as it is."""
    with reader_may_leave():
        write(text)


def width() -> int:
    """Return how many columns a report may have: those of the terminal or of COLUMNS, 80 at most and if neither says.

    Prose is hard to read in longer lines.
    """
    return min(shutil.get_terminal_size((80, 24)).columns, 80)


def print_lines(lines: Iterable[str]) -> None:
    """Print a report, a line each: headings stand out on a terminal, and are plain text everywhere else."""
    if not sys.stdout.isatty():
        with reader_may_leave():
            for line in lines:
                write(words.escaped(line) + "\n")
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line in lines:
        console.print(words.escaped(line), style="bold" if line and not line.startswith(" ") else None)


def print_json(data: Any) -> None:
    """Print an answer as data."""
    import msgspec

    print_text(msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n")


@contextlib.contextmanager
def progress_bar() -> Generator[Progress | None]:
    """Give what shows progress: a line on a terminal, nothing when stderr is piped."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[Path, Any] = {}

        def advance(path: Path, done: int, total: int) -> None:
            if path not in tasks:
                tasks[path] = bar.add_task(escape(words.escaped(path.name)), total=total or None)
            bar.update(tasks[path], completed=done)

        yield advance
