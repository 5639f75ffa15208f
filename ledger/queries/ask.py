"""The questions that one or several log files are asked: why, blame, diff, blast radius, and the smallest log.

Each reads what it needs and calls the question's own code, which knows no files. This file knows replay and the reader;
it prints nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ledger import words
from ledger.errors import LedgerFileError, NotInLog
from ledger.file.database import write_log
from ledger.file.publish import refuse_existing
from ledger.file.read import gaps_of, open_log
from ledger.queries.blame import BlockUse, blame
from ledger.queries.blast_radius import BlastRadius, blast_radius
from ledger.queries.diff import Diff, diff
from ledger.queries.minimize import MAX_EVENTS, Minimal, minimize
from ledger.queries.why import Why, why
from ledger.replay.case import Progress, replay_files, reread, state_at
from ledger.replay.select import Interest, Moment, no_such_request


def ask_why(path: Path, request: str, moment: Moment | None = None, progress: Progress | None = None) -> Why:
    """Return why a request of a log ended as it did.

    Raises:
        LedgerFileError: the file cannot be read.
        NotInLog: the log does not know the request.
    """
    log = replay_files([path], moment=moment, interest=Interest(request=request), progress=progress).logs[0]
    answer = why(request, log.events_of_interest, log.result)
    if answer is None:
        raise NotInLog(no_such_request(f"{path} knows no", request))
    return answer


def ask_blame(path: Path, block: tuple[int, int], progress: Progress | None = None) -> list[BlockUse]:
    """Return who owned, pinned, read and wrote a block of a log.

    Raises:
        LedgerFileError: the file cannot be read.
        NotInLog: the log does not name the block.
    """
    log = replay_files([path], interest=Interest(block=block), progress=progress).logs[0]
    return blame(log.events_of_interest, block)


def ask_diff(path: Path, earlier: Moment, later: Moment) -> tuple[Diff, int, int]:
    """Return what changed between two moments of a log, and the places of the last events before each.

    Raises:
        LedgerFileError: the file cannot be read.
    """
    before, first = state_at(path, earlier)
    after, last = state_at(path, later)
    places = first.seq if first is not None else 0, last.seq if last is not None else 0
    if places[0] > places[1]:
        before, after, places = after, before, (places[1], places[0])
    with open_log(path) as log:
        return diff(before, after, log.events(after_seq=places[0], until_seq=places[1])), *places


def ask_blast_radius(
    paths: Sequence[Path], job: int, log: int | None = None, progress: Progress | None = None
) -> list[BlastRadius]:
    """Return how far the wrong KV of a job has come through the logs, one for each log whose job is meant.

    Args:
        job: the store job.
        log: the index of the log whose job is meant; if not given, that of each log in which it is poisoned.
        progress: called now and then.

    Raises:
        LedgerFileError: a file cannot be read.
        NotInLog: no log has that job, or several have one and none of them is poisoned.
    """
    radii = blast_radius([partial(reread, path, None, progress) for path in paths], job, log)
    if not radii:
        raise NotInLog(f"{'none of the files has a' if log is None else f'{paths[log]} has no'} store job {job}")
    if len(radii) > 1 and not radii[0].judged:
        has = words.listed([paths[radius.log] for radius in radii], 3)
        raise NotInLog(
            f"several files have a store job {job} ({has}), and in none of them is it poisoned. Say which is meant: "
            f"--job {paths[radii[0].log]}:{job}"
        )
    if any(gaps_of(path) for path in paths):
        for radius in radii:
            radius.complete = False
    return radii


def minimize_file(
    path: Path, kind: str, target: Path, progress: Callable[[int, int], None] | None = None
) -> Minimal | None:
    """Write the smallest log that still has a finding of `kind` to a new file; None if the log has none.

    Raises:
        LedgerFileError: the file cannot be read, or is too long to be minimized.
        LedgerNotWritable: the target cannot be written.
    """
    refuse_existing(target)
    with open_log(path) as log:
        if log.last_seq > MAX_EVENTS:
            raise LedgerFileError(
                f"{path}: has {log.last_seq:,} events; at most {MAX_EVENTS:,} can be minimized. Send it whole: "
                f"kvledger seal {path} TARGET"
            )
        log.check_not_empty()
        meta, ending = log.meta, log.end
        smaller = minimize(list(log.events()), kind, ending, progress)
    if smaller is not None:
        write_log(target, {**meta, "minimized_from": words.file(path.name)}, smaller.events)
    return smaller
