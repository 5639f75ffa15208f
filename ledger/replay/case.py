"""A case: one or more log files, replayed together, as far as a moment, with an eye on one request, job or block.

Every question of the command line that reads files goes through here. This file knows the reader and the fold; it
prints nothing.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ledger import events as ev
from ledger import words
from ledger.blocks import names
from ledger.errors import LedgerFileError, NotInLog
from ledger.file.publish import refuse_existing, write_log
from ledger.file.read import LogFile, open_log
from ledger.file.seal import broken_seal
from ledger.queries.blast_radius import BlastRadius, blast_radius
from ledger.queries.minimize import MAX_EVENTS, Minimal, minimize
from ledger.queries.questions import Diff, Use, Why, blame, diff, why
from ledger.replay.fold import Replay, Result, until
from ledger.replay.incidents import Incident, grouped
from ledger.replay.join import Step, join
from ledger.state.apply import State
from ledger.verdicts.base import Finding, Role


class Moment(msgspec.Struct, frozen=True):
    """A place in a log or a time, as a user names it: `1200`, `14:03:05.5`, `2026-01-31T14:03:05Z`, `+90s`."""

    text: str

    def __post_init__(self) -> None:
        """Refuse what names no moment.

        Raises:
            ValueError: one line that says what can be written.
        """
        if not _SEQ.fullmatch(self.text) and not _OFFSET.fullmatch(self.text) and self._time(datetime.now(UTC)) is None:
            raise ValueError(
                f"'{self.text}' is no moment: write the number of an event, a UTC time (14:03:05 or "
                "2026-01-31T14:03:05), or a "
                "time from the start (+90s)"
            )

    @property
    def seq(self) -> int | None:
        """The place in the log, if that is what was named."""
        return int(self.text) if _SEQ.fullmatch(self.text) else None

    def ts_ns(self, first_ts_ns: int) -> int | None:
        """Return the time in nanoseconds, for a log that begins at `first_ts_ns`; None if a place was named."""
        if self.seq is not None:
            return None
        offset = _OFFSET.fullmatch(self.text)
        if offset:
            return first_ts_ns + int(float(offset[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[offset[2]] * 1e9)
        first = datetime.fromtimestamp(first_ts_ns / 1e9, UTC)
        time = self._time(first)
        if time is None:
            return None
        if _TIME_OF_DAY.fullmatch(self.text) and time < first - timedelta(hours=12):
            time += timedelta(days=1)  # the log goes past midnight
        ts_ns = int(time.timestamp()) * 1_000_000_000 + time.microsecond * 1000
        # A moment is printed in milliseconds, so it means the whole of that millisecond.
        return ts_ns + 999_999

    def _time(self, day: datetime) -> datetime | None:
        text = self.text
        try:
            if _TIME_OF_DAY.fullmatch(text):
                return datetime.fromisoformat(f"{day.date().isoformat()}T{text.rstrip('Z')}").replace(tzinfo=UTC)
            time = datetime.fromisoformat(text)
            return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        except (ValueError, OverflowError):  # the second of a time that is in another year than 1 to 9999 in UTC
            return None


_SEQ = re.compile(r"\d{1,18}")
"""A place in a log; SQLite counts to 19 digits."""

_OFFSET = re.compile(r"\+(\d{1,18}(?:\.\d{1,18})?)([smh]?)")
_TIME_OF_DAY = re.compile(r"\d\d:\d\d(:\d\d(\.\d+)?)?Z?")


class Interest(msgspec.Struct, frozen=True):
    """What a replay is narrowed to. Several are joined by `and`; none is everything."""

    request: str | None = None
    job: int | None = None
    block: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return self.request is not None or self.job is not None or self.block is not None

    def concerns(self, finding: Finding) -> bool:
        """Return whether a finding names everything that is of interest."""
        return (
            (self.request is None or self.request in finding.requests)
            and (self.job is None or self.job in finding.jobs)
            and (self.block is None or self.block in finding.blocks)
        )


class Watch:
    """Collects the events that concern an interest: the life of a request, a job or a block.

    Attributes:
        events: what was collected, in the order of the log.
        known: which parts of the interest the log names: `request`, `job`, `block`.
        jobs: the lowest and the highest store job that the log names.
        blocks: the lowest and the highest block of the interest's group that it names.
    """

    def __init__(self, interest: Interest) -> None:
        self.events: list[ev.AnyEvent] = []
        self.known: set[str] = set()
        self.jobs: tuple[int, int] | None = None
        self.blocks: tuple[int, int] | None = None
        self._interest = interest
        self._jobs: set[int] = set() if interest.job is None else {interest.job}
        self._loads: set[int] = set()
        self._transfers: set[str] = set()
        self._of_job = ""

    def look(self, chunk: Sequence[ev.AnyEvent]) -> None:
        """Collect from some events in a row."""
        for event in chunk:
            self._note(event)
        self.events.extend([event for event in chunk if self._concerns(event)])

    def _note(self, event: ev.AnyEvent) -> None:
        """Note what there is to ask for: whoever asks for something else has mistyped it."""
        interest = self._interest
        if interest.request is not None and getattr(event, "request", None) == interest.request:
            self.known.add("request")
        job = getattr(event, "job", -1) if interest.job is not None else -1
        if job >= 0:
            self.jobs = _widened(self.jobs, job)
            if job == interest.job:
                self.known.add("job")
        if interest.block is not None:
            group, block = interest.block
            for each, runs in getattr(event, "blocks", ()):
                for run in runs if each == group else ():
                    self.blocks = _widened(_widened(self.blocks, run[0]), run[1])
                    if min(run) <= block <= max(run):
                        self.known.add("block")

    def _concerns(self, event: ev.AnyEvent) -> bool:
        interest = self._interest
        return (
            (interest.request is None or self._of_request(event, interest.request))
            and (interest.job is None or self._of_this_job(event, interest.job))
            and (interest.block is None or self._of_block(event, interest.block))
        )

    def _of_request(self, event: ev.AnyEvent, request: str) -> bool:
        if getattr(event, "request", None) == request:
            if isinstance(event, ev.JobRegistered):
                self._jobs.add(event.job)
            elif isinstance(event, ev.LoadPlanned):
                self._loads.add(event.load)
            return True
        return getattr(event, "job", -1) in self._jobs or getattr(event, "load", -1) in self._loads

    def _of_this_job(self, event: ev.AnyEvent, job: int) -> bool:
        if getattr(event, "job", -1) == job:
            if isinstance(event, ev.JobRegistered):
                self._of_job = event.request
            return True
        # What happened to its request meanwhile is part of its story, other jobs and loads of it are not.
        return (
            bool(self._of_job) and getattr(event, "request", "") == self._of_job and isinstance(event, _REQUEST_KINDS)
        )

    def _of_block(self, event: ev.AnyEvent, block: tuple[int, int]) -> bool:
        # What ends the use of a block does not name it again, only the job, load or transfer.
        blocks = getattr(event, "blocks", None)
        job, load, transfer = getattr(event, "job", -1), getattr(event, "load", -1), getattr(event, "transfer", "")
        if blocks and names(blocks, block):
            self._jobs.add(job)
            self._loads.add(load)
            self._transfers.add(transfer)
            return True
        return (
            (job >= 0 and job in self._jobs)
            or (load >= 0 and load in self._loads)
            or (transfer != "" and transfer in self._transfers)
        )


def _widened(span: tuple[int, int] | None, number: int) -> tuple[int, int]:
    return (number, number) if span is None else (min(span[0], number), max(span[1], number))


def _no_request(knows: str, request: str) -> str:
    return f"{knows} request '{request}'; ids may be hashed (hash_request_ids)."


def _check_known(interest: Interest, watches: Sequence[Watch], paths: Sequence[Path]) -> None:
    """Refuse an interest of which a part is in none of the logs.

    Raises:
        NotInLog: one line that says which, and what there is.
    """
    parts = {"request": interest.request, "job": interest.job, "block": interest.block}
    known = {part for watch in watches for part in watch.known}
    name = next((name for name, value in parts.items() if value is not None and name not in known), "")
    if not name:
        return
    knows = f"{paths[0]} knows no" if len(paths) == 1 else "none of the logs knows a"
    if name == "request":
        raise NotInLog(_no_request(knows, interest.request or ""))
    spans = [span for watch in watches if (span := watch.jobs if name == "job" else watch.blocks) is not None]
    has = f"{min(span[0] for span in spans)}-{max(span[1] for span in spans)}" if spans else "none"
    if interest.block is not None and name == "block":
        group, block = interest.block
        raise NotInLog(f"{knows} block {group}:{block} (of group {group} it has {has}).")
    raise NotInLog(f"{knows} job {interest.job} (it has {has}).")


_REQUEST_KINDS = (ev.RequestPreempted, ev.RequestResumed, ev.RequestFinished, ev.RequestAborted)


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
    transfers: dict[str, list[Step]] = {}
    incidents: list[Incident] = []

    def __post_init__(self) -> None:
        """Group the findings."""
        self.incidents = grouped(self.findings)


Progress = Callable[[Path, int, int], None]
"""Told the file, the events done and the events in all."""


def replay_files(
    paths: Sequence[Path],
    *,
    moment: Moment | None = None,
    interest: Interest | None = None,
    progress: Progress | None = None,
) -> Case:
    """Return what the logs in `paths` say.

    Args:
        moment: replay as far as that, in each log.
        interest: keep the findings and the events that concern it.
        progress: told now and then how far it is.

    Raises:
        LedgerFileError: a file cannot be read.
        NotInLog: no log names what is of interest.
    """
    wanted = interest or Interest()
    watches = [Watch(wanted) for _ in paths] if wanted else []
    logs = [
        _replay_file(path, moment, watch, progress)
        for path, watch in zip(paths, watches or [None] * len(paths), strict=True)
    ]
    if wanted:
        _check_known(wanted, watches, paths)
    joined = join(
        [log.result for log in logs],
        [path.name for path in paths],
        [partial(_again, path, moment) for path in paths],
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


def _again(path: Path, moment: Moment | None, progress: Progress | None = None) -> Iterator[ev.AnyEvent]:
    with open_log(path) as log:
        if progress is None:
            yield from read(log, moment)
            return
        total = log.last_seq
        for event in read(log, moment):
            yield event
            if event.seq % 10_000 == 0:
                progress(path, event.seq, total)


def read(log: LogFile, moment: Moment | None) -> Iterator[ev.AnyEvent]:
    """Return the events of an open log as far as a moment.

    Raises:
        FileCorrupt: the log holds no event at all, and nobody writes it.
    """
    log.check_not_empty()
    if moment is None:
        return log.events()
    if moment.seq is not None:
        return log.events(until_seq=moment.seq)
    first = next(log.events(until_seq=log.first_seq), None)
    return until(log.events(), last_ts_ns=moment.ts_ns(first.ts_ns) if first is not None else None)


def _replay_file(path: Path, moment: Moment | None, watch: Watch | None, progress: Progress | None) -> LogResult:
    with open_log(path) as log:
        replay = Replay(watch=_watcher(path, log.last_seq, watch, progress))
        # How the log ends is asked first: a log that is closed while it is read is then read to that end all the same.
        ending = log.end
        replay.feed(read(log, moment))
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


def state_at(path: Path, moment: Moment | None = None) -> tuple[State, ev.AnyEvent | None]:
    """Return the book of a log as it was at a moment, and the last event before it.

    Raises:
        LedgerFileError: the file cannot be read.
    """
    with open_log(path) as log:
        result = Replay(verdicts=()).feed(read(log, moment)).result()
    return result.state, result.last


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the events of a log as lines of JSON, as they are stored, some thousands at a time.

    Raises:
        LedgerFileError: the file cannot be read.
    """
    with open_log(path) as log:
        log.check_not_empty()
        for page in log.pages():
            yield b"\n".join([data for _, data in page.rows]) + b"\n"


def ask_why(path: Path, request: str, moment: Moment | None = None, progress: Progress | None = None) -> Why:
    """Return why a request of a log ended as it did.

    Raises:
        LedgerFileError: the file cannot be read.
        NotInLog: the log does not know the request.
    """
    log = replay_files([path], moment=moment, interest=Interest(request=request), progress=progress).logs[0]
    answer = why(request, log.events_of_interest, log.result)
    if answer is None:
        raise NotInLog(_no_request(f"{path} knows no", request))
    return answer


def ask_blame(path: Path, block: tuple[int, int], progress: Progress | None = None) -> list[Use]:
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
        progress: told now and then how far it is.

    Raises:
        LedgerFileError: a file cannot be read.
        NotInLog: no log has that job, or several have one and none of them is poisoned.
    """
    radii = blast_radius([partial(_again, path, None, progress) for path in paths], job, log)
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


def gaps_of(path: Path) -> list[ev.Gap]:
    """Return what a log has lost.

    Raises:
        LedgerFileError: the file cannot be read.
    """
    with open_log(path) as log:
        return log.gaps()


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
