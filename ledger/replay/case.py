"""A case: one or more log files of one incident, replayed together.

This file knows the reader and the fold; it prints nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ledger import events as ev
from ledger.file.read import open_log
from ledger.file.verify import broken_seal
from ledger.replay.fold import Replay, Result
from ledger.replay.incidents import Incident, grouped
from ledger.replay.join import TimelineStep, join
from ledger.replay.select import Interest, Moment, Watch, check_known, events_until
from ledger.state.apply import State
from ledger.verdicts.base import Finding, Role


class LogResult(msgspec.Struct):
    """One log of a case.

    Attributes:
        path: the file, as it was named.
        broken_seal: in what the events of a sealed file first differ from those that were sealed; empty if in nothing.
        empty: whether the file holds no event, and its engine lives.
        begins_ts_ns: when it begins, in nanoseconds of wall-clock time, if no event of it was early enough to replay.
        events_of_interest: what was collected for the case's interest.
    """

    path: Path
    sealed: bool
    meta: dict[str, str]
    result: Result
    empty: bool = False
    begins_ts_ns: int = 0
    broken_seal: str = ""
    events_of_interest: list[ev.AnyEvent] = []


class Case(msgspec.Struct):
    """The logs of a case and what they say together.

    Attributes:
        findings: index of the log and finding, earliest cause first.
        transfers: the time line of each transfer that a finding names and that more than one log knows.
        incidents: the findings as the stories that they are, by their places among `findings`.
    """

    logs: list[LogResult]
    interest: Interest
    findings: list[tuple[int, Finding]]
    transfers: dict[str, list[TimelineStep]] = {}
    incidents: list[Incident] = []

    def __post_init__(self) -> None:
        """Group the findings."""
        self.incidents = grouped(self.findings)


Progress: TypeAlias = Callable[[Path, int, int], None]
"""Called with the file, how many of its events are done, and how many it has."""


def replay_files(
    paths: Sequence[Path | str],
    *,
    moment: Moment | None = None,
    interest: Interest | None = None,
    progress: Progress | None = None,
) -> Case:
    """Return what the logs in `paths` say.

    Args:
        moment: replay as far as that, in each log.
        interest: keep the findings and the events that concern it.
        progress: called now and then.

    Raises:
        LedgerFileError: a file cannot be read.
        NotInLog: no log names what is of interest.
    """
    paths = [Path(path) for path in paths]
    wanted = interest or Interest()
    watches = [Watch(wanted) for _ in paths] if wanted else []
    logs = [
        _replay_file(path, moment, watch, progress)
        for path, watch in zip(paths, watches or [None] * len(paths), strict=True)
    ]
    if wanted:
        check_known(wanted, watches, paths)
    joined = join(
        [log.result for log in logs],
        [path.name for path in paths],
        [partial(reread, path, moment) for path in paths],
    )
    findings = [each for each in in_time(logs, joined.findings) if wanted.concerns(each[1])]
    return Case(logs, wanted, findings, joined.transfers)


def distinct(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the files that are logs of their own, and a line for each that is left out.

    A log and a copy of it have the same engine and boot. The longest is used, or the first of equals: a log that is
    joined with itself would show each transfer twice.

    Raises:
        LedgerFileError: a file cannot be read.
    """
    if len(paths) < 2:
        return list(paths), []
    used: dict[tuple[str, ...], tuple[Path, int]] = {}
    notes: dict[str, None] = {}
    for path in paths:
        with open_log(path) as log:
            engine, boot, last_seq = log.meta.get("engine", ""), log.meta.get("boot", ""), log.last_seq
        key = (engine, boot) if boot else (str(path.resolve()),)
        other = used.get(key)
        if other is None:
            used[key] = path, last_seq
            continue
        left, kept = (path, other[0]) if last_seq <= other[1] else (other[0], path)
        used[key] = kept, max(last_seq, other[1])
        notes[_left_out(left, kept)] = None
    return [path for path, _ in used.values()], list(notes)


def _left_out(left: Path, kept: Path) -> str:
    if left == kept:
        return f"{left} is named more than once, and used once"
    if left.samefile(kept):
        return f"{left} is left out: it is the same file as {kept}"
    return f"{left} is left out: it is the same log as {kept}, of the same engine and boot"


def in_time(logs: Sequence[LogResult], findings: list[tuple[int, Finding]]) -> list[tuple[int, Finding]]:
    """Return the findings of several logs in one order: each log keeps its own, and wall clocks place them.

    A torn end comes last, as in one log.
    """
    if len(logs) < 2:
        return findings
    placed: list[tuple[bool, int, int, tuple[int, Finding]]] = []
    latest: dict[int, int] = {}
    for number, (index, finding) in enumerate(findings):
        lead_seq = finding.lead_seq or finding.since_seq
        ts_ns = next((event.ts_ns for event in finding.chain if event.seq == lead_seq), 0)
        latest[index] = max(latest.get(index, 0), ts_ns)
        placed.append((finding.is_a(Role.ENDS_LOG), latest[index], number, (index, finding)))
    return [each for _, _, _, each in sorted(placed, key=lambda place: place[:3])]


def reread(path: Path, moment: Moment | None, progress: Progress | None = None) -> Iterator[ev.AnyEvent]:
    """Yield the events of a log as far as a moment, for whoever needs them a second time.

    Raises:
        LedgerFileError: the file cannot be read.
    """
    with open_log(path) as log:
        if progress is None:
            yield from events_until(log, moment)
            return
        total = log.last_seq
        for event in events_until(log, moment):
            yield event
            if event.seq % 10_000 == 0:
                progress(path, event.seq, total)


def _replay_file(path: Path, moment: Moment | None, watch: Watch | None, progress: Progress | None) -> LogResult:
    with open_log(path) as log:
        replay = Replay(watch=_watcher(path, log.last_seq, watch, progress))
        # How the log ends is asked first: a log that is closed while it is read is then read to that end all the same.
        ending = log.end
        replay.feed(events_until(log, moment))
        last_seq = replay.last_seq
        result = replay.result("as_of" if moment is not None and last_seq < log.last_seq else ending)
        empty = not last_seq and not log.last_seq
        first = None if last_seq or empty else next(log.events(until_seq=log.first_seq), None)
        return LogResult(
            path=path,
            sealed=log.sealed,
            meta=log.meta,
            result=result,
            empty=empty,
            begins_ts_ns=first.ts_ns if first is not None else 0,
            broken_seal=broken_seal(log) if log.sealed else "",
            events_of_interest=watch.events if watch else [],
        )


def _watcher(path: Path, total: int, watch: Watch | None, progress: Progress | None) -> Any:
    if watch is None and progress is None:
        return None

    def look(chunk: list[ev.AnyEvent]) -> None:
        if watch is not None:
            watch.look(chunk)
        if progress is not None:
            progress(path, chunk[-1].seq, total)

    return look


def state_at(path: Path | str, moment: Moment | None = None) -> tuple[State, ev.AnyEvent | None]:
    """Return the book of a log as it was at a moment, and the last event before it.

    Raises:
        LedgerFileError: the file cannot be read.
    """
    with open_log(path) as log:
        result = Replay(verdicts=()).feed(events_until(log, moment)).result()
    return result.state, result.last
