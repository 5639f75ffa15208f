"""Log files for tests, written by the real writer, in this process or in one that is killed."""

import contextlib
import hashlib
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from ledger import events as ev
from ledger.file import schema
from ledger.live.log import Log
from ledger.live.writer import Writer
from ledger.state.apply import State

ROOT = Path(__file__).parents[2]


def new_log(**settings) -> Log:
    """An empty log with an empty state behind it."""
    return Log(State(), **settings)


def changed(path: Path | str, *statements: str) -> None:
    """Change a file as somebody would who knows how: the guards go first and come back afterwards."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for name in schema.TRIGGERS:
            connection.execute(f"DROP TRIGGER IF EXISTS {name}")
        for statement in statements:
            connection.execute(statement)
        for trigger in schema.TRIGGERS.values():
            connection.execute(trigger)


def append_requests(log: Log, count: int) -> None:
    """Append the begin and the end of `count` requests."""
    for _ in range(count):
        request = f"request-{log.last_seq}"
        log.append(ev.RequestQueued, request=request, generation=1, prompt_tokens=100)
        log.append(ev.RequestFinished, request=request, generation=1, reason="stopped")


def append_transfers(log: Log, count: int) -> None:
    """Append `count` calls to the store: events of about 2,000 bytes each."""
    keys = tuple(f"{key:016x}" for key in range(100))
    for number in range(count):
        log.append_evidence(
            ev.TransferStarted(0, 1, 1, "rank 0", 0, transfer=f"0-{number}", rank=0, op="put", job=1, keys=keys)
        )


def append_work(log: Log, jobs: int, *, open_jobs: int = 0) -> None:
    """Append requests with a store job each; the last `open_jobs` of them never hear from rank 1."""
    first = log.state.book.next_job
    for job in range(first, first + jobs):
        request = f"request-{job}"
        blocks = ((0, ((4 * job + 1, 4 * job + 3),)),)
        log.append(ev.RequestQueued, request=request, generation=1, prompt_tokens=96)
        log.append(ev.RequestScheduled, request=request, generation=1, scheduled_tokens=96)
        log.append(ev.JobRegistered, job=job, request=request, generation=1, ranks=((0, 1),), tokens=96)
        log.append(ev.PinTouched, job=job, blocks=blocks)
        log.append(ev.RankCompleted, job=job, rank=0)
        log.append(ev.RequestFinished, request=request, generation=1, reason="stopped")
        if job < first + jobs - open_jobs:
            log.append(ev.RankCompleted, job=job, rank=1, outcome="failed", code="TRANSFER_FAILED", raw="-800")
            log.append(ev.JobSettled, job=job, failed_ranks=((1, 1),))
            log.append(ev.BlocksFreed, job=job, blocks=blocks)


@contextlib.contextmanager
def writing(path: Path, log: Log | None = None, **settings) -> Generator[tuple[Log, Writer]]:
    """A log that is being written to `path`; closed at the end if the test has not done so."""
    log = log or new_log()
    writer = Writer(log, path, engine="test-engine", boot="boot-1", **settings)
    writer.start()
    try:
        yield log, writer
    finally:
        writer.close(timeout_s=60)


def closed_log(path: Path, events: int = 1_000) -> Path:
    """A log of about `events` events that was closed."""
    with writing(path) as (log, _):
        log.append(ev.LogOpened, engine="test-engine", boot="boot-1")
        append_requests(log, events)
        log.append(ev.LogClosed)
    return path


WRITE_UNTIL_KILLED = """
import signal, sys
from pathlib import Path
from ledger import events as ev
from ledger.file import schema
from tests.support.log_files import append_requests, new_log
from ledger.live.writer import Writer

log = new_log()
writer = Writer(log, Path(sys.argv[1]), engine="test-engine", boot="boot-1", flush_interval_ms=1)
writer.start()
log.append(ev.LogOpened, engine="test-engine", boot="boot-1")
append_requests(log, int(sys.argv[2]))
if not writer.flush(timeout_s=60):
    raise SystemExit("not flushed")
print(log.last_seq, flush=True)
for _ in range(100):
    append_requests(log, 200)
    writer.flush(timeout_s=60)
signal.pause()
"""


class Engine:
    """A process that writes a log as fast as it can, 40,000 events of it, and then waits to be killed.

    Attributes:
        flushed_seq: the place up to which it had flushed before it went on to write.
    """

    def __init__(self, path: Path, events: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITE_UNTIL_KILLED, str(path), str(events)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.flushed_seq = int(self.process.stdout.readline())

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL


@contextlib.contextmanager
def running_engine(path: Path, events: int = 500) -> Generator[Engine]:
    """An engine that is killed at the end of the test at the latest."""
    engine = Engine(path, events)
    try:
        yield engine
    finally:
        engine.process.kill()
        engine.process.wait()
        engine.process.stdout.close()


def torn_log(path: Path, events: int = 500) -> int:
    """A log whose engine was killed. Returns the place up to which it had flushed."""
    with running_engine(path, events) as engine:
        engine.kill()
    return engine.flushed_seq


def contents(folder: Path) -> dict[str, str]:
    """Every file in a folder, with a digest of its bytes."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


class Lines(logging.Handler):
    """What was logged, and a way to wait for a line instead of for time."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.Condition()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        with self._turn:
            self.lines.append(record.getMessage())
            self._turn.notify_all()

    def wait_for(self, part: str) -> str:
        """The first line that holds `part`; waits until there is one."""
        with self._turn:
            assert self._turn.wait_for(lambda: any(part in line for line in self.lines), 60), self.lines
            return next(line for line in self.lines if part in line)


@contextlib.contextmanager
def logged() -> Generator[Lines]:
    """The lines that kvledger logs."""
    lines = Lines()
    logger = logging.getLogger("kvledger")
    logger.addHandler(lines)
    try:
        yield lines
    finally:
        logger.removeHandler(lines)


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount {' '.join(arguments)}: {done.stderr.strip()}; needs root and the right to mount")


@contextlib.contextmanager
def small_disk(folder: Path, size_kib: int) -> Generator[Path]:
    """A real file system of that size, mounted on a new folder."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size_kib}k", "kvledger-test", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def read_only(folder: Path) -> Generator[None]:
    """While it lasts, nothing can be written into `folder`, not even by root."""
    if os.geteuid():
        mode = folder.stat().st_mode
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(mode)
        return
    _mount("--bind", str(folder), str(folder))
    try:
        _mount("-o", "remount,bind,ro", str(folder))
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
