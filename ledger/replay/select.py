"""Which part of a log is looked at: the events as far as a moment, or those that concern one request, job or block.

A user names both on the command line. This file knows events, findings and an open log; it prints nothing.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from ledger import events as ev
from ledger.blocks import names
from ledger.errors import NotInLog
from ledger.file.read import LogFile
from ledger.replay.fold import until
from ledger.verdicts.base import Finding


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


def events_until(log: LogFile, moment: Moment | None) -> Iterator[ev.AnyEvent]:
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


_REQUEST_KINDS = (ev.RequestPreempted, ev.RequestResumed, ev.RequestFinished, ev.RequestAborted)


def check_known(interest: Interest, watches: Sequence[Watch], paths: Sequence[Path]) -> None:
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
        raise NotInLog(no_such_request(knows, interest.request or ""))
    spans = [span for watch in watches if (span := watch.jobs if name == "job" else watch.blocks) is not None]
    has = f"{min(span[0] for span in spans)}-{max(span[1] for span in spans)}" if spans else "none"
    if interest.block is not None and name == "block":
        group, block = interest.block
        raise NotInLog(f"{knows} block {group}:{block} (of group {group} it has {has}).")
    raise NotInLog(f"{knows} job {interest.job} (it has {has}).")


def no_such_request(knows: str, request: str) -> str:
    """Return the line for a request that no log names."""
    return f"{knows} request '{request}'; ids may be hashed (hash_request_ids)."
