"""The writer, on real files, real disks that are full, and processes that are really killed."""

import os
import sqlite3
import subprocess
import sys
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import events as ev
from ledger.errors import LedgerNotWritable
from ledger.file import schema
from ledger.file.database import Database
from ledger.file.read import open_log
from ledger.live.writer import Writer, log_path
from ledger.state.apply import State
from ledger.state.records import Book
from tests.support import strategies
from tests.support.log_files import (
    ROOT,
    append_requests,
    append_work,
    closed_log,
    contents,
    logged,
    new_log,
    read_only,
    small_disk,
    torn_log,
    writing,
)

ENCODER = msgspec.json.Encoder()


def stored(path) -> list[ev.Event]:
    with open_log(path) as log:
        return list(log.events())


def rows(path, query: str) -> list[tuple]:
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


# --- what is written ----------------------------------------------------------------------------------------------


def test_what_was_appended_is_in_the_file_in_order(tmp_path):
    appended = []
    with writing(tmp_path / "a.db", batch_events=7) as (log, writer):
        appended.extend(log.append(ev.RequestQueued, request=f"r{number}", generation=1) for number in range(100))
        assert writer.flush(timeout_s=60)
        assert writer.written_seq == log.last_seq == 100
        assert stored(tmp_path / "a.db") == appended


@given(log=strategies.logs(), batch=st.integers(1, 10))
def test_any_events_are_read_back_equal(tmp_path_factory, log, batch):
    path = tmp_path_factory.mktemp("any") / "a.db"
    database = Database(path)
    database.create({})
    for start in range(0, len(log), batch):
        database.append(ENCODER.encode(log[start : start + batch]))
    database.close()
    assert stored(path) == log
    assert [data.encode() for (data,) in rows(path, "SELECT data FROM events")] == [ENCODER.encode(e) for e in log]
    assert rows(path, schema.DISAGREEING) == []


def test_the_file_says_who_wrote_it(tmp_path):
    with writing(tmp_path / "a.db", facts={"host": "node-7"}):
        pass
    with open_log(tmp_path / "a.db") as log:
        assert log.meta["engine"] == "test-engine"
        assert log.meta["boot"] == "boot-1"
        assert log.meta["host"] == "node-7"
        assert int(log.meta["created_ts_ns"]) > 0


def test_a_closed_log_is_one_file(tmp_path):
    closed_log(tmp_path / "a.db")
    assert list(contents(tmp_path)) == ["a.db"]


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("llama", "llama-2-b1.db"),
        ("meta-llama/Llama 3", "meta-llama_Llama_3-2-b1.db"),
        ("../../etc/passwd", "_.._etc_passwd-2-b1.db"),
        ("", "engine-2-b1.db"),
        ("x" * 500, "x" * 100 + "-2-b1.db"),
    ],
)
def test_a_log_is_named_after_its_engine_and_stays_in_its_folder(tmp_path, engine, name):
    path = log_path(tmp_path, engine, 2, "b1")
    assert path.name == name
    assert path.parent == tmp_path


def test_a_process_that_does_not_write_does_not_load_alembic():
    modules = "ledger.live.writer, ledger.file.read, ledger.file.seal, ledger.file.verify"
    look = f"import sys, {modules}; print({{'sqlalchemy', 'alembic'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- processes that end -------------------------------------------------------------------------------------------


def test_what_was_flushed_outlives_kill_9(tmp_path):
    flushed_seq = torn_log(tmp_path / "a.db")
    with open_log(tmp_path / "a.db") as log:
        assert log.end == "torn"
        assert log.last_seq >= flushed_seq
        assert [event.seq for event in log.events()] == list(range(1, log.last_seq + 1))


def test_a_log_that_was_flushed_and_not_closed_is_torn_and_complete(tmp_path):
    script = """
import sys
from pathlib import Path
from tests.support.log_files import append_requests, new_log
from ledger.live.writer import Writer
import atexit
log = new_log()
writer = Writer(log, Path(sys.argv[1]), flush_interval_ms=60_000)
writer.start()
atexit.register(writer.flush, 60)
append_requests(log, 300)
print(log.last_seq)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.db")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with open_log(tmp_path / "a.db") as log:
        assert log.end == "torn"
        assert log.last_seq == int(done.stdout)


def test_a_forked_child_leaves_the_log_alone(tmp_path):
    with writing(tmp_path / "a.db") as (log, writer):
        append_requests(log, 10)
        assert writer.flush(timeout_s=60)
        child = os.fork()
        if child == 0:
            # Not the writer's process: neither call may touch the file.
            os._exit(int(writer.flush()) + int(writer.close()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        append_requests(log, 10)
        assert writer.flush(timeout_s=60)
    assert len(stored(tmp_path / "a.db")) == log.last_seq


# --- disks that fail ----------------------------------------------------------------------------------------------


def test_an_engine_appends_while_another_program_holds_the_write_lock(tmp_path):
    with logged() as lines, writing(tmp_path / "a.db", flush_interval_ms=1) as (log, writer):
        other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        append_requests(log, 1_000)
        assert "another program holds a lock" in lines.wait_for("cannot write")
        append_requests(log, 1_000)
        other.execute("COMMIT")
        other.close()
        assert writer.flush(timeout_s=60)
        lines.wait_for("is written again")
        assert len(stored(tmp_path / "a.db")) == log.last_seq > 2_000
    assert len([line for line in lines.lines if "cannot write" in line]) == 1


def test_a_full_disk_costs_nothing_once_there_is_room_again(tmp_path):
    with small_disk(tmp_path / "disk", 8_192) as disk, logged() as lines:
        with writing(disk / "a.db", flush_interval_ms=1) as (log, writer):
            append_requests(log, 100)
            assert writer.flush(timeout_s=60)
            fill(disk / "ballast")
            append_requests(log, 2_000)
            assert "the disk is full" in lines.wait_for("cannot write")
            (disk / "ballast").unlink()
            assert writer.flush(timeout_s=60)
            lines.wait_for("is written again")
            log.append(ev.LogClosed)
        with open_log(disk / "a.db") as file:
            assert file.end == "closed"
            assert [event.seq for event in file.events()] == list(range(1, log.last_seq + 1))


def test_what_a_full_disk_has_cost_is_recorded_with_the_reason(tmp_path):
    with small_disk(tmp_path / "disk", 8_192) as disk, logged() as lines:
        with writing(disk / "a.db", new_log(queue_limit_events=500), flush_interval_ms=1) as (log, writer):
            assert writer.flush(timeout_s=60)
            fill(disk / "ballast")
            append_requests(log, 100)
            lines.wait_for("cannot write")
            append_requests(log, 2_000)
            (disk / "ballast").unlink()
            assert writer.flush(timeout_s=60)
            append_requests(log, 1)
            log.append(ev.LogClosed)
        with open_log(disk / "a.db") as file:
            (gap,) = file.gaps()
    assert gap.dropped > 1_000
    assert "the disk is full" in gap.reason


def fill(ballast) -> None:
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def test_a_limit_on_file_size_is_survived_like_a_full_disk(tmp_path):
    # Needs no right to mount. The kernel refuses each write beyond the limit; to raise it is to free space.
    script = """
import resource, signal, sys
from pathlib import Path
from ledger import events as ev
from ledger.file.read import open_log
from tests.support.log_files import append_requests, logged, new_log, writing

path = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
with logged() as lines, writing(path, flush_interval_ms=1) as (log, writer):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    append_requests(log, 2_000)
    lines.wait_for("cannot write")
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    if not writer.flush(timeout_s=60):
        raise SystemExit("not flushed")
    lines.wait_for("is written again")
    log.append(ev.LogClosed)
with open_log(path) as file:
    if file.end != "closed" or [event.seq for event in file.events()] != list(range(1, log.last_seq + 1)):
        raise SystemExit("not complete")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.db")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_did_not_fit_into_memory_is_a_gap_and_a_fold_goes_on_behind_it(tmp_path):
    log = new_log(queue_limit_events=1_000)
    with logged() as lines, writing(tmp_path / "a.db", log, flush_interval_ms=1) as (_, writer):
        other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        append_work(log, jobs=500, open_jobs=2)
        lines.wait_for("cannot write")
        other.execute("COMMIT")
        other.close()
        # Nobody appends any more: what was dropped is said all the same.
        writer.close(timeout_s=60)
    with open_log(tmp_path / "a.db") as file:
        found = list(file.events())
    assert [event.seq for event in found] == list(range(1, log.last_seq + 1))
    gaps = [event for event in found if isinstance(event, ev.Gap)]
    assert gaps
    assert all(gap.origin == "scheduler" and gap.dropped > 0 for gap in gaps)
    state = State()
    for event in found:
        if isinstance(event, ev.Checkpoint) and bytes(event.book):
            state = State(msgspec.json.decode(event.book, type=Book))
        state.apply(event)
    assert state.digest() == log.state.digest()


class UnsureDatabase(Database):
    """A disk that takes a batch and reports an error all the same, once. No real disk can be made to do so at will."""

    unsure = True

    def append(self, lines: bytes) -> None:
        super().append(lines)
        if self.unsure:
            self.unsure = False
            self._uncertain = True
            raise sqlite3.OperationalError("disk I/O error")


def test_a_batch_that_got_through_in_spite_of_an_error_is_not_stored_twice(tmp_path):
    log = new_log()
    writer = Writer(log, tmp_path / "a.db", flush_interval_ms=1)
    writer._database = UnsureDatabase(writer.path)
    with logged() as lines:
        writer.start()
        append_requests(log, 50)
        assert writer.flush(timeout_s=60)
        assert writer.close(timeout_s=60)
    assert any("cannot write" in line for line in lines.lines)
    assert len(stored(tmp_path / "a.db")) == log.last_seq


class HangingDatabase(Database):
    """A disk that does not answer until it is told to. A real one that hangs could not be cleaned up after."""

    def __init__(self, path) -> None:
        super().__init__(path)
        self.answer = threading.Event()

    def append(self, lines: bytes) -> None:
        self.answer.wait()
        super().append(lines)


def test_close_comes_back_from_a_disk_that_hangs(tmp_path):
    log = new_log()
    writer = Writer(log, tmp_path / "a.db", flush_interval_ms=1)
    disk = writer._database = HangingDatabase(writer.path)
    writer.start()
    append_requests(log, 50)
    with logged() as lines:
        assert not writer.flush(timeout_s=0.01)
        assert not writer.close(timeout_s=0.01)
    assert f"ends without its last {log.last_seq} events" in lines.lines[-1]
    disk.answer.set()
    assert writer._thread is not None
    writer._thread.join()


def test_an_event_that_no_disk_would_take_is_replaced_by_a_gap(tmp_path):
    # A lone surrogate has no UTF-8; Python's JSON parser lets one through from a client.
    bad = ev.TransferStarted(0, 1, 1, "rank 0", 0, transfer="0-1", rank=0, op="put", request="\ud800")
    with logged() as lines, writing(tmp_path / "a.db") as (log, writer):
        append_requests(log, 20)
        log.append_evidence(bad)
        append_requests(log, 20)
        assert writer.flush(timeout_s=60)
    found = stored(tmp_path / "a.db")
    assert [event.seq for event in found] == list(range(1, log.last_seq + 1))
    (gap,) = [event for event in found if isinstance(event, ev.Gap)]
    assert (gap.seq, gap.origin, gap.dropped) == (41, "rank 0", 1)
    assert "transfer_started" in gap.reason
    assert "a gap takes the place of event 41" in lines.lines[0]


def test_a_broken_event_of_the_scheduler_is_followed_by_the_state(tmp_path):
    # No rule of the book lets such an event through today: it is put into the queue behind the book's back.
    with writing(tmp_path / "a.db") as (log, writer):
        append_requests(log, 20)
        log._enqueue(ev.RequestQueued(log.last_seq + 1, 1, 1, ev.SCHEDULER, 0, request="\ud800", generation=1))
        assert writer.flush(timeout_s=60)
    assert writer.written_seq == log.last_seq
    gap, checkpoint = stored(tmp_path / "a.db")[-2:]
    assert isinstance(gap, ev.Gap)
    assert isinstance(checkpoint, ev.Checkpoint)
    assert bytes(checkpoint.book) == log.state.encode()


# --- the start ----------------------------------------------------------------------------------------------------


def assert_one_line_that_helps(error: Exception, *parts: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    for part in parts:
        assert part in text, text


def test_a_start_is_refused_where_a_file_is_in_the_way(tmp_path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(LedgerNotWritable) as refused:
        Writer(new_log(), tmp_path / "logs" / "deeper" / "a.db").start()
    assert_one_line_that_helps(refused.value, f"{tmp_path / 'logs'} is a file and not a folder", "Set ledger_path")


def test_a_start_is_refused_where_nothing_may_be_written(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    with read_only(folder), pytest.raises(LedgerNotWritable) as refused:
        Writer(new_log(), folder / "a.db").start()
    assert_one_line_that_helps(refused.value, str(folder), "Set ledger_path")


def test_a_start_never_goes_on_with_an_earlier_log(tmp_path):
    closed_log(tmp_path / "a.db")
    before = contents(tmp_path)
    with pytest.raises(LedgerNotWritable) as refused:
        Writer(new_log(), tmp_path / "a.db").start()
    assert_one_line_that_helps(refused.value, "never continued", "an id of its own")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("size_kib", [4, 16, 40, 64])
def test_a_start_on_a_full_disk_is_refused_and_leaves_nothing(tmp_path, size_kib):
    with small_disk(tmp_path / "disk", size_kib) as disk:
        with pytest.raises(LedgerNotWritable) as refused:
            Writer(new_log(), disk / "a.db").start()
        assert_one_line_that_helps(refused.value, "Set ledger_path")
        assert contents(disk) == {}


def test_a_log_takes_no_events_that_are_not_its_own_place(tmp_path):
    # Two batches that both claim place 1 are a broken program: it must be seen, and not be stored.
    database = Database(tmp_path / "a.db")
    database.create({})
    event = ENCODER.encode([ev.RequestQueued(1, 1, 1, ev.SCHEDULER, 0, request="r", generation=1)])
    database.append(event)
    with pytest.raises(sqlite3.IntegrityError, match="only ever appended"):
        database.append(event)
    database.close()
    assert len(stored(tmp_path / "a.db")) == 1
