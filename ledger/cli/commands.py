"""The command line: parses, calls the library, prints. Whatever a command does, a function of the library does it.

How it is printed, and the message of each error, is in `ledger.cli.terminal`.

Exit status: 0 nothing wrong, 1 findings or a file that was changed after it was sealed, 2 wrong usage or output that
cannot be written, 3 a file cannot be read, 130 interrupted, 141 the reader of the output left before the rest was
known. Errors are one line on stderr, and never a traceback; KVLEDGER_TRACEBACK=1 shows it to who develops kvledger.
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from ledger import __version__
from ledger import events as ev
from ledger.cli.terminal import (
    FOUND,
    OK,
    READER_LEFT,
    complain,
    explain,
    open_closed_streams,
    print_json,
    print_lines,
    print_text,
    progress_bar,
    silence,
    width,
    write,
)
from ledger.cli.types import BlockType, JobType, MomentType
from ledger.errors import LedgerFileError
from ledger.queries.blast_radius import BlastRadius
from ledger.replay.case import Progress
from ledger.replay.select import Interest, Moment

FOLLOW_INTERVAL_S = 0.2
"""Time between two looks at a live log: a person does not see it, and the engine's disk does not feel it."""

F = TypeVar("F", bound=Callable[..., Any])


_DATE = "a date alone is the start of that day"

FILE = click.Path(path_type=Path, readable=False)
"""A path as it is typed: the library says what is wrong with it, and with which status."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(__version__, prog_name="kvledger", message="%(prog)s %(version)s")
def cli() -> None:
    r"""Read the audit logs of vLLM's Mooncake connectors, and say what went wrong.

    Exit status: 0 nothing wrong, 1 findings or a file that was changed after it was sealed, 2 wrong usage or output
    that cannot be written, 3 a file cannot be read, 130 interrupted, 141 the reader of the output left early (a status
    that is known by then is kept).

    Text shows control characters in ids and names of files by their numbers, as in \x1b, and of words with more than
    256 characters the begin and the end. What is printed as data has them whole.
    """


@cli.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the report as data.")
@click.option("--until", "moment", type=MomentType(), help=f"Replay as far as that event or UTC time; {_DATE}.")
@click.option("--request", help="Only what concerns this request, with its time line.")
@click.option("--job", type=click.IntRange(0), help="Only what concerns this store job, with its time line.")
@click.option("--block", type=BlockType(), help="Only what concerns this block, with its time line.")
@click.option(
    "--check", is_flag=True, help="Say in full how the fold agrees with the digests that the engine recorded."
)
def replay(
    files: tuple[Path, ...],
    as_json: bool,
    moment: Moment | None,
    request: str | None,
    job: int | None,
    block: tuple[int, int] | None,
    check: bool,
) -> int:
    """Say what happened: the log, what went wrong, what is open, the run in numbers.

    Several FILES are the logs of one incident, e.g. of a prefill and a decode engine.

    Status 1 is also for a file that was changed after it was sealed, and for one whose recorded digests today's code
    does not reach; the first line names both. Status 0 is for what the log holds: when events were lost, the first line
    says how many.
    """
    from ledger.replay.case import replay_files
    from ledger.report import data as report_data
    from ledger.report import page as report

    interest = Interest(request, job, block)
    logs = _distinct(files)
    with progress_bar() as progress:
        case = replay_files(logs, moment=moment, interest=interest, progress=progress)
    if as_json:
        print_json(report_data.data(case))
    else:
        print_lines(report.text(case, check=check, width=width()))
    return FOUND if case.findings or report.doubts(case) else OK


@cli.command()
@click.argument("file", type=FILE)
@click.option(
    "--at", "moment", type=MomentType(), help=f"The event or UTC time; {_DATE}. The end of the log if not given."
)
@click.option("--json", "as_json", is_flag=True, help="Print the book as data.")
def state(file: Path, moment: Moment | None, as_json: bool) -> int:
    """Print the book as it was at a moment: requests, jobs, loads, transfers, pins."""
    from ledger.replay.case import state_at
    from ledger.report import answers

    book, last = state_at(file, moment)
    if as_json:
        print_text(book.encode().decode() + "\n")
    else:
        print_lines([*answers.state_lines(book, last, width()), *_lost(file)])
    return OK


@cli.command()
@click.argument("file", type=FILE)
@click.argument("request")
@click.option("--until", "moment", type=MomentType(), help=f"Look as far as that event or UTC time; {_DATE}.")
def why(file: Path, request: str, moment: Moment | None) -> int:
    """Say what led to the end of REQUEST, or to where it stands."""
    from ledger.queries.ask import ask_why
    from ledger.report import answers

    with progress_bar() as progress:
        answer = ask_why(file, request, moment, progress)
    print_lines([*answers.why_lines(answer, width()), *_lost(file)])
    return FOUND if answer.findings else OK


@cli.command()
@click.argument("file", type=FILE)
@click.argument("block", type=BlockType())
def blame(file: Path, block: tuple[int, int]) -> int:
    """Say who owned, pinned, read and wrote BLOCK, written as group and number: 0:17."""
    from ledger.queries.ask import ask_blame
    from ledger.report import answers

    with progress_bar() as progress:
        uses = ask_blame(file, block, progress)
    print_lines([*answers.blame_lines(block, uses, width()), *_lost(file)])
    return OK


@cli.command()
@click.argument("file", type=FILE)
@click.argument("earlier", type=MomentType())
@click.argument("later", type=MomentType())
def diff(file: Path, earlier: Moment, later: Moment) -> int:
    """Say what changed between two moments, each an event or a UTC time.

    A date alone is the start of that day.
    """
    from ledger.queries.ask import ask_diff
    from ledger.report import answers

    changes, first_seq, last_seq = ask_diff(file, earlier, later)
    print_lines([*answers.diff_lines(changes, first_seq, last_seq, width()), *_lost(file)])
    return OK


@cli.command("blast-radius")
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option(
    "--job",
    "jobs",
    type=JobType(),
    required=True,
    multiple=True,
    help="A store job whose KV is wrong; again for more.",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as data: a list, if it is of more than one job.")
@click.option("--keys", "only_keys", is_flag=True, help="Print the hashes of the keys alone, one a line, for grep -Ff.")
def blast_radius(files: tuple[Path, ...], jobs: tuple[tuple[str, int], ...], as_json: bool, only_keys: bool) -> int:
    """Say how far wrong KV has come: keys, requests that loaded them, and what those stored.

    Several FILES are the logs of engines that share a store. Each engine numbers its jobs from 0: a JOB is that of each
    log in which it is poisoned, FILE:JOB that of one log. A key of the store ends in its hash, so that with the store's
    list of keys `--keys` finds those to remove.
    """
    from ledger import words
    from ledger.queries.ask import ask_blast_radius
    from ledger.report import answers
    from ledger.report import data as report_data

    if as_json and only_keys:
        raise click.UsageError("--json and --keys are two forms of the same answer; give one")
    logs = _distinct(files)
    found: dict[tuple[int, int], BlastRadius] = {}
    for file, job in jobs:
        log = _index_of(file, logs) if file else None
        with progress_bar() as progress:
            for radius in ask_blast_radius(logs, job, log, progress):
                found[radius.log, job] = radius
    radii = list(found.values())
    names = [words.file(file) for file in logs]
    if only_keys:
        print_lines(list(dict.fromkeys(key for radius in radii for key in (*radius.keys, *radius.derived))))
    elif as_json:
        data = [report_data.radius_data(radius, names) for radius in radii]
        print_json(data if len(data) > 1 else data[0])
    else:
        for radius in radii:
            print_lines([*answers.radius_lines(radius, names, width()), *([""] if radius is not radii[-1] else [])])
        print_lines(_lost(*logs))
    return FOUND if any(radius.judged for radius in radii) else OK


@cli.command()
@click.argument("file", type=FILE)
@click.option("--finding", "kind", required=True, metavar="KIND", help="The kind of finding that must stay.")
@click.option("-o", "--output", type=FILE, required=True, help="The file to write; it must not exist.")
def minimize(file: Path, kind: str, output: Path) -> int:
    """Write the smallest log that still has a finding, for a bug report."""
    from ledger import words
    from ledger.queries.ask import minimize_file
    from ledger.replay.case import replay_files
    from ledger.report.wording import say

    with progress_bar() as progress:
        show = None if progress is None else partial(_show_trials, progress, file)
        smaller = minimize_file(file, kind, output, show)
    if smaller is None:
        kinds = sorted({finding.kind for _, finding in replay_files([file]).findings})
        has = f"it has: {', '.join(kinds)}" if kinds else "nothing wrong was found in it"
        raise click.UsageError(f"{file} has no finding of the kind '{kind}'; {has}")
    print_lines(
        [
            f"{output}: {words.plural(len(smaller.events), 'event')} left",
            f"{smaller.finding.kind} ({smaller.finding.certainty}): {say(smaller.finding).title}",
        ]
    )
    return OK


@cli.command()
@click.argument("source", type=FILE)
@click.argument("target", type=FILE)
@click.option(
    "--salvage", is_flag=True, help="Take what can be read of a damaged or cut file; gaps stand for the rest."
)
def seal(source: Path, target: Path, salvage: bool) -> int:
    """Make the incident file TARGET of the log SOURCE: live, closed or torn.

    SOURCE is not changed, and TARGET is never overwritten.
    """
    from ledger import words
    from ledger.file.seal import seal as make

    with progress_bar() as progress:
        made = make(
            source, target, None if progress is None else lambda done: progress(source, done, 0), salvage=salvage
        )
    events = words.plural(made.events - made.lost, "event")
    print_lines(
        [
            f"{made.target}: {events}, {words.size(made.size_bytes)}; it was {made.end}",
            *(
                [f"{words.plural(made.lost, 'event')} could not be read; a gap stands in each place"]
                if made.lost
                else []
            ),
            f"digest {made.chain_head}",
            "Keep the digest elsewhere: it proves later that the file was not changed.",
        ]
    )
    return OK


@cli.command()
@click.argument("file", type=FILE)
def verify(file: Path) -> int:
    """Check that an incident file holds what was sealed."""
    from ledger import words
    from ledger.file.verify import verify as check

    checked = check(file)
    what = "sealed" if checked.sealed else "not sealed, so that only holes and columns could be checked"
    lines = [f"{file}: {words.plural(checked.events, 'event')}, {what}", f"digest {checked.chain_head}"]
    for each in checked.problems:
        named = not each.seq or each.detail.startswith("event")
        lines.append(each.detail if named else f"event {each.seq}: {each.detail}")
    if checked.problem_count > len(checked.problems):
        lines.append(f"and {checked.problem_count - len(checked.problems)} more problems")
    lines.append("nothing wrong was found" if checked.ok else f"{words.plural(checked.problem_count, 'problem')} found")
    print_lines(lines)
    return OK if checked.ok else FOUND


@cli.command()
@click.argument("file", type=FILE)
@click.option("-o", "--output", type=FILE, help="Write to this file instead of stdout; it must not exist.")
def export(file: Path, output: Path | None) -> int:
    """Print every event as one line of JSON, as it is stored."""
    from ledger.file.publish import write_pages
    from ledger.file.read import lines_of

    if output is None:
        for lines in lines_of(file):
            sys.stdout.buffer.write(lines)
    else:
        write_pages(output, lines_of(file))
    return OK


@cli.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("-o", "--output", type=FILE, required=True, help="The file to write; it must not exist.")
def trace(files: tuple[Path, ...], output: Path) -> int:
    """Draw the order of events for the trace viewer Perfetto.

    Several FILES are the logs of one incident, e.g. of a prefill and a decode engine; they come on one time axis. It
    needs the package perfetto: pip install 'kvledger[trace]'.
    """
    from ledger import words
    from ledger.trace.perfetto import write_trace

    logs = _distinct(files)
    with progress_bar() as progress:
        traced = write_trace(logs, output, progress)
    drawn = f"{words.plural(traced.events, 'event')}, {words.plural(traced.findings, 'finding')}"
    lines = [f"{output}: {drawn}, {words.size(traced.size_bytes)}"]
    lines += [f"{log}: {moved}" for log, moved in zip(logs, traced.axis.told(), strict=True) if moved]
    lines.append("Open it at https://ui.perfetto.dev, which reads it inside your browser.")
    print_lines(lines)
    return OK


@cli.command()
@click.argument("file", type=FILE)
@click.option(
    "-n", "--events", "number", type=click.IntRange(0), default=20, show_default=True, help="How many to show."
)
@click.option("-f", "--follow", is_flag=True, help="Go on showing what a live log gets, until it ends.")
def tail(file: Path, number: int, follow: bool) -> int:
    """Print the last events of a log, one line each."""
    from ledger import words
    from ledger.file.read import open_log

    with open_log(file) as log:
        log.check_not_empty()
        last = log.last_seq
        after = max(last - number, 0)
        while True:
            live = log.end == "live"  # asked before reading, so that what the engine wrote last is still read
            for place, text in ev.lines(log.events(after_seq=after)):
                write(words.shown(text) + "\n")
                after = place
            if not follow or not live:
                return OK
            sys.stdout.flush()
            time.sleep(FOLLOW_INTERVAL_S)


@cli.command()
@click.argument("file", type=FILE)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; who reaches it reads the log.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A port; a free one if not given.")
@click.option("--open", "opens", is_flag=True, help="Open the page in your browser.")
def browse(file: Path, host: str, port: int, opens: bool) -> int:
    """Show the log in Datasette, until Ctrl-C.

    What it shows is a sealed copy in a temporary folder. FILE may be live, closed, torn or sealed, and is not changed.
    """
    from ledger.browse import server

    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(progress_bar())

        def ready(address: str) -> None:
            stack.close()  # no progress line below the address
            write(f"{address}\n")
            sys.stdout.flush()
            if opens:
                server.open_page(address)

        server.browse(file, host=host, port=port, ready=ready, progress=progress)
    return OK


@cli.command()
def demo() -> int:
    """Replay a recorded incident that ships with kvledger."""
    from ledger.demo import incidents
    from ledger.replay.case import replay_files
    from ledger.report import answers
    from ledger.report import page as report

    files = incidents()
    if not files:
        raise LedgerFileError(
            "no recorded incident ships with this kvledger. Name a log of yours: kvledger replay FILE"
        )
    for file in files:
        case = replay_files([file])
        print_lines(
            [f"This is what `kvledger replay {_shown(file)}` prints:", "", *report.text(case, width=width()), ""]
        )
        command = f"  {_command()} "
        print_lines(line.replace("  kvledger ", command, 1) for line in answers.next_lines(case, _shown(file), width()))
    return OK


# --- the edges --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the command line and end the process with its status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line and return its status. Every error is one line on stderr."""
    open_closed_streams()
    status = READER_LEFT
    try:
        # Not `cli.main`, which answers a closed pipe and an interrupt in ways of its own.
        with cli.make_context("kvledger", list(arguments)) as context:
            returned = cli.invoke(context)
        status = returned if isinstance(returned, int) else OK
        sys.stdout.flush()
        return status
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except BrokenPipeError:
        silence(sys.stdout)
        return status
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("KVLEDGER_TRACEBACK"):
            raise
        return explain(error)


def _lost(*files: Path) -> list[str]:
    """Return lines that say what the logs have lost, for answers that know nothing of it."""
    from ledger.file.read import gaps_of
    from ledger.report import answers

    return [line for file in files for line in answers.lost_lines(file.name, gaps_of(file), width())]


def _distinct(files: tuple[Path, ...]) -> list[Path]:
    """Return the files without those that are one and the same log, and say so."""
    from ledger.replay.case import distinct

    logs, notes = distinct(files)
    for note in notes:
        complain(note, OK)
    return logs


def _index_of(name: str, logs: list[Path]) -> int:
    """Return the place of the log that `name` names: as it was given, or by the name of its file alone."""
    named = [place for place, log in enumerate(logs) if log == Path(name)]
    named = named or [place for place, log in enumerate(logs) if log.name == name]
    if len(named) != 1:
        which = "several of the files are" if named else "none of the files is"
        raise click.UsageError(f"'--job': {which} called {name}")
    return named[0]


def _show_trials(progress: Progress, path: Path, trials: int, left: int) -> None:
    """Show by its trials how far a search is whose length nobody knows."""
    progress(path, trials, 0)


def _command() -> str:
    """Return what to type for this command: its name if the shell finds it by that, else the path that it came by."""
    own = Path(sys.argv[0])
    if own.name != "kvledger" or shutil.which("kvledger"):
        return "kvledger"
    return _shown(own.absolute())


def _shown(path: Path) -> str:
    """Return a path as short as it can be typed from here."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


if __name__ == "__main__":
    main()
