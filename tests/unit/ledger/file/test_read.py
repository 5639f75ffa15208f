"""The reader, on every file that an operator may hand it: whole, live, torn, cut, damaged, or somebody else's."""

import os
import shutil
import sqlite3

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import events as ev
from ledger.errors import FileCorrupt, FileMissing, FileNewer, LedgerFileError, NotALedger
from ledger.file import read as reader
from ledger.file import schema, sqlite
from ledger.file.database import Database
from ledger.file.read import open_log
from tests.support.log_files import (
    append_requests,
    append_transfers,
    changed,
    closed_log,
    contents,
    read_only,
    running_engine,
    torn_log,
    writing,
)

ENVELOPE = {"ts_ns": 1, "mono_ns": 1, "source": "scheduler", "step": 0}


def assert_one_line_that_helps(error: Exception, *parts: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    for part in parts:
        assert part in text, text


def handmade(path, *events: dict):
    """A log of these events, whatever they say."""
    database = Database(path)
    database.create({})
    for seq, event in enumerate(events, 1):
        database.append(msgspec.json.encode([{"seq": seq, **ENVELOPE, **event}]))
    database.close()
    return path


def queued(request: str = "r") -> dict:
    return {"kind": "request_queued", "request": request, "generation": 1}


# --- whole logs ---------------------------------------------------------------------------------------------------


def test_a_closed_log_says_so(tmp_path):
    with open_log(closed_log(tmp_path / "a.db", 1_000)) as log:
        assert (log.end, log.sealed, log.first_seq, log.damage) == ("closed", False, 1, [])
        assert log.last_seq == sum(1 for _ in log.events())
        assert not log.lacks_wal


def test_events_too_large_to_be_read_at_once_are_read_one_by_one(tmp_path):
    with writing(tmp_path / "a.db") as (log, _):
        append_transfers(log, 100)
        append_requests(log, 100)
    with open_log(tmp_path / "a.db") as file:
        file._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 50_000)  # in place of 1,000,000,000
        assert [event.seq for event in file.events()] == list(range(1, log.last_seq + 1))
        assert file.damage == []


@given(after=st.integers(0, 60), until=st.integers(0, 60), page=st.integers(1, 20))
def test_a_part_of_a_log_is_its_events_between_two_places(closed, after, until, page):
    with pytest.MonkeyPatch.context() as patch, open_log(closed) as log:
        patch.setattr(reader, "PAGE_EVENTS", page)
        assert [event.seq for event in log.events(after, until)] == list(range(after + 1, min(until, log.last_seq) + 1))


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    return closed_log(tmp_path_factory.mktemp("closed") / "a.db", 25)


@pytest.mark.parametrize("name", ["a b.db", "a%20b.db", "a?immutable=1.db", "a#b.db", "ü.db", "'; DROP.db"])
def test_a_file_may_have_any_name(tmp_path, name):
    with open_log(closed_log(tmp_path / name, 10)) as log:
        assert log.end == "closed"
    torn_log(tmp_path / ("torn " + name), 10)
    with open_log(tmp_path / ("torn " + name)) as log:
        assert log.end == "torn"


def test_an_empty_log_has_no_events(tmp_path):
    with open_log(handmade(tmp_path / "a.db")) as log:
        assert (log.first_seq, log.last_seq, log.end, list(log.events())) == (0, 0, "torn", [])


def test_a_log_without_an_event_is_refused_with_what_is_missing(tmp_path):
    # The file as it is before the first checkpoint of SQLite: all events are in the -wal, which was not copied.
    copy = handmade(tmp_path / "copy.db")
    with open_log(copy) as log, pytest.raises(FileCorrupt) as raised:
        log.check_not_empty()
    assert_one_line_that_helps(raised.value, "holds no event", "-wal file was not copied", "Copy copy.db-wal too")


def test_a_log_without_an_event_whose_engine_lives_is_not_refused(tmp_path):
    with writing(tmp_path / "a.db"), open_log(tmp_path / "a.db") as log:
        log.check_not_empty()


# --- torn logs ----------------------------------------------------------------------------------------------------


def test_a_torn_log_is_read_to_its_end_in_the_wal(tmp_path):
    flushed_seq = torn_log(tmp_path / "a.db")
    assert sqlite.wal_path(tmp_path / "a.db").stat().st_size > 0
    with open_log(tmp_path / "a.db") as log:
        assert log.end == "torn"
        assert log.held_back_ms == 1
        assert not log.lacks_wal
        assert log.last_seq >= flushed_seq
        assert [event.seq for event in log.events()] == list(range(1, log.last_seq + 1))


def test_reading_changes_no_byte_and_leaves_no_file(tmp_path):
    torn_log(tmp_path / "torn.db")
    closed_log(tmp_path / "closed.db")
    before = contents(tmp_path)
    for name in ("torn.db", "closed.db"):
        with open_log(tmp_path / name) as log:
            assert list(log.events())
            assert contents(tmp_path) == before
        assert contents(tmp_path) == before


def test_a_torn_log_without_its_index_is_read_beside_it(tmp_path):
    torn_log(tmp_path / "a.db")
    with open_log(tmp_path / "a.db") as log:
        expected = list(log.events())
    sqlite.shm_path(tmp_path / "a.db").unlink()
    before = contents(tmp_path)
    with open_log(tmp_path / "a.db") as log:
        assert log.end == "torn"
        assert list(log.events()) == expected
    assert contents(tmp_path) == before


def test_a_torn_log_without_its_wal_says_that_it_lacks_its_tail(tmp_path):
    torn_log(tmp_path / "a.db")
    copy = tmp_path / "copy" / "a.db"
    copy.parent.mkdir()
    shutil.copy(tmp_path / "a.db", copy)
    with open_log(copy) as log:
        assert log.end == "torn"
        assert log.lacks_wal
        assert [event.seq for event in log.events()] == list(range(1, log.last_seq + 1))


def test_a_link_to_a_torn_log_is_followed_to_its_wal(tmp_path):
    flushed_seq = torn_log(tmp_path / "a.db")
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "a.db")
    with open_log(link) as log:
        assert log.last_seq >= flushed_seq


def test_logs_are_read_where_nothing_may_be_written(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    closed_log(folder / "closed.db")
    flushed_seq = torn_log(folder / "torn.db")
    shutil.copy(folder / "torn.db", folder / "no-index.db")
    shutil.copy(sqlite.wal_path(folder / "torn.db"), sqlite.wal_path(folder / "no-index.db"))
    before = contents(folder)
    with read_only(folder):
        for name in ("closed.db", "torn.db", "no-index.db"):
            with open_log(folder / name) as log:
                assert log.end == ("closed" if name == "closed.db" else "torn")
                assert sum(1 for _ in log.events()) == log.last_seq >= (0 if name == "closed.db" else flushed_seq)
    assert contents(folder) == before


# --- live logs ----------------------------------------------------------------------------------------------------


def test_a_live_log_is_followed(tmp_path):
    with writing(tmp_path / "a.db") as (log, writer):
        append_requests(log, 10)
        assert writer.flush(timeout_s=60)
        with open_log(tmp_path / "a.db") as file:
            assert file.end == "live"
            assert [event.seq for event in file.events()] == list(range(1, 21))
            append_requests(log, 5)
            assert writer.flush(timeout_s=60)
            assert file.last_seq == 30
            assert [event.seq for event in file.events(after_seq=20)] == list(range(21, 31))
            log.append(ev.LogClosed)
            assert writer.close(timeout_s=60)
            assert file.end == "closed"
            assert [event.seq for event in file.events(after_seq=30)] == [31]


def test_a_log_that_is_just_starting_is_followed_into_its_wal(tmp_path):
    # immutable=1, right for a file without a -wal, would show it empty for ever.
    path = tmp_path / "a.db"
    handmade(path)
    with open_log(path) as file:
        assert file.last_seq == 0
        database = Database(path)
        database._append = schema.APPEND
        database.append(msgspec.json.encode([{"seq": 1, **ENVELOPE, **queued()}]))
        assert file.end == "live"
        assert [event.seq for event in file.events()] == [1]
        database.close()


def test_a_log_is_read_whole_at_any_moment_of_its_writing(tmp_path):
    with running_engine(tmp_path / "a.db") as engine:
        last_seq = engine.flushed_seq
        for _ in range(15):
            with open_log(tmp_path / "a.db") as log:
                assert log.end == "live"
                seqs = [event.seq for event in log.events()]
            assert seqs == list(range(1, len(seqs) + 1))
            assert len(seqs) >= last_seq
            last_seq = len(seqs)
        engine.kill()
    with open_log(tmp_path / "a.db") as log:
        assert log.end == "torn"
        assert log.last_seq >= last_seq


def test_a_reader_leaves_no_more_files_than_the_engine_did(tmp_path):
    with running_engine(tmp_path / "a.db") as engine:
        names = set(contents(tmp_path))
        for _ in range(5):
            with open_log(tmp_path / "a.db") as log:
                next(log.events())
        engine.kill()
        assert set(contents(tmp_path)) == names


def test_an_engine_that_closes_under_a_reader_loses_nothing(tmp_path):
    with writing(tmp_path / "a.db") as (log, writer):
        append_requests(log, 3_000)
        assert writer.flush(timeout_s=60)
        with open_log(tmp_path / "a.db") as file:
            reading = file.events()
            next(reading)
            log.append(ev.LogClosed)
            assert writer.close(timeout_s=60)
            assert sum(1 for _ in reading) == log.last_seq - 1
    with open_log(tmp_path / "a.db") as file:
        assert file.end == "closed"
        assert sum(1 for _ in file.events()) == log.last_seq


# --- files that are no logs ---------------------------------------------------------------------------------------


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileMissing) as refused:
        open_log(tmp_path / "a.db")
    assert_one_line_that_helps(refused.value, "no such file", "ledger_path")
    assert contents(tmp_path) == {}


def other_program(path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, data TEXT)")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.write_bytes(b"{}"), "not a SQLite database"),
        (lambda path: path.write_bytes(os.urandom(100_000)), "not a SQLite database"),
        (lambda path: path.write_text("vLLM log line\n" * 10_000), "not a SQLite database"),
        (other_program, "another program's database"),
        (os.mkfifo, "is not a file"),
    ],
    ids=["folder", "empty", "two bytes", "random bytes", "text", "another program's", "pipe"],
)
def test_a_file_that_is_no_log_is_not_a_ledger(tmp_path, make, part):
    path = tmp_path / "a.db"
    make(path)
    with pytest.raises(NotALedger) as refused:
        open_log(path)
    assert_one_line_that_helps(refused.value, str(path), part)
    assert [file.name for file in tmp_path.iterdir()] == ["a.db"]


def test_a_file_that_may_not_be_read_is_an_error_of_its_own(tmp_path, monkeypatch):
    # Root may read everything, so the answer of the kernel is made up where root runs the tests.
    closed_log(tmp_path / "a.db", 10)
    (tmp_path / "a.db").chmod(0)
    if not os.geteuid():
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(LedgerFileError) as refused:
        open_log(tmp_path / "a.db")
    assert_one_line_that_helps(refused.value, "Permission denied")


# --- cut and damaged logs -----------------------------------------------------------------------------------------


def cut(path, part: float) -> None:
    os.truncate(path, int(path.stat().st_size * part))


def test_a_log_that_was_cut_in_half_says_which_events_can_be_read(tmp_path):
    closed_log(tmp_path / "a.db", 5_000)
    cut(tmp_path / "a.db", 0.5)
    with pytest.raises(FileCorrupt) as refused:
        open_log(tmp_path / "a.db")
    assert_one_line_that_helps(refused.value, "Copy it again")
    with open_log(tmp_path / "a.db", tolerate=True) as log:
        seqs = [event.seq for event in log.events()]
        assert log.damage == [str(refused.value)]
        assert log.meta["engine"] == "test-engine"
        assert log.end == "torn"
    assert len(seqs) > 4_000
    assert seqs == list(range(1, len(seqs) + 1))
    assert f"{len(seqs)} events from 1 to {seqs[-1]} can still be read" in str(refused.value)


def test_a_torn_log_that_was_cut_is_salvaged_with_what_its_wal_holds(tmp_path):
    torn_log(tmp_path / "a.db", 10_000)
    with open_log(tmp_path / "a.db") as log:
        last_seq = log.last_seq
    cut(tmp_path / "a.db", 0.5)
    before = contents(tmp_path)
    with open_log(tmp_path / "a.db", tolerate=True) as log:
        seqs = [event.seq for event in log.events()]
        assert log.damage
    assert seqs[0] == 1
    assert seqs[-1] == last_seq
    assert contents(tmp_path) == before


@pytest.mark.parametrize("with_wal", [True, False], ids=["with its wal", "without its wal"])
def test_a_torn_log_that_was_cut_in_half_is_never_taken_for_whole(tmp_path, with_wal):
    torn_log(tmp_path / "a.db", 10_000)
    cut(tmp_path / "a.db", 0.5)
    if not with_wal:
        sqlite.wal_path(tmp_path / "a.db").unlink()
        sqlite.shm_path(tmp_path / "a.db").unlink()
    before = contents(tmp_path)
    with pytest.raises(FileCorrupt) as refused, open_log(tmp_path / "a.db") as log:
        list(log.events())
    assert_one_line_that_helps(refused.value, "Copy it again")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("part", [0.001, 0.01, 0.1, 0.3, 0.7, 0.9, 0.99, 0.9999])
def test_a_log_that_was_cut_anywhere_is_an_error_and_its_start_is_readable(tmp_path, part):
    closed_log(tmp_path / "a.db", 3_000)
    with open_log(tmp_path / "a.db") as log:
        whole = list(log.events())
    cut(tmp_path / "a.db", part)
    with pytest.raises((FileCorrupt, NotALedger)), open_log(tmp_path / "a.db") as log:
        list(log.events())
    try:
        with open_log(tmp_path / "a.db", tolerate=True) as log:
            found = list(log.events())
            assert log.damage
    except (FileCorrupt, NotALedger):
        found = []
    rest = iter(whole)
    assert all(event in rest for event in found)  # a part of it, in order


def test_a_wal_that_was_cut_makes_a_shorter_log(tmp_path):
    torn_log(tmp_path / "a.db")
    with open_log(tmp_path / "a.db") as log:
        whole = list(log.events())
    cut(sqlite.wal_path(tmp_path / "a.db"), 0.5)
    with open_log(tmp_path / "a.db") as log:
        found = list(log.events())
        assert log.end == "torn"
    assert found == whole[: len(found)]
    assert len(found) < len(whole)


def test_large_events_are_found_in_a_damaged_log_too(tmp_path):
    with writing(tmp_path / "a.db") as (log, _):
        append_transfers(log, 50)
        keys = tuple(f"{key:016x}" for key in range(3_000))  # 57,000 bytes: overflows into a chain of pages
        log.append_evidence(ev.TransferStarted(0, 1, 1, "rank 0", 0, transfer="x", rank=0, op="put", keys=keys))
        append_transfers(log, 50)
    with open_log(tmp_path / "a.db") as log:
        whole = list(log.events())
    data = bytearray((tmp_path / "a.db").read_bytes())
    inner = [start for start in range(0, len(data), 4096) if data[start] == 0x05]
    assert inner
    for start in inner:  # the pages by which SQLite finds the others
        data[start : start + 4096] = bytes(4096)
    (tmp_path / "a.db").write_bytes(data)
    with open_log(tmp_path / "a.db", tolerate=True) as log:
        assert list(log.events()) == whole
        assert log.damage


def test_what_lies_beyond_a_damaged_page_is_read_when_damage_is_tolerated(tmp_path):
    closed_log(tmp_path / "a.db", 5_000)
    size = (tmp_path / "a.db").stat().st_size
    with (tmp_path / "a.db").open("r+b") as file:
        file.seek(size // 2 // 4096 * 4096)
        file.write(bytes(4096))
    before = contents(tmp_path)
    with pytest.raises(FileCorrupt), open_log(tmp_path / "a.db") as log:
        list(log.events())
    with open_log(tmp_path / "a.db", tolerate=True) as log:
        seqs = [event.seq for event in log.events()]
        assert log.damage
        assert seqs[-1] == log.last_seq
        assert 9_000 < len(seqs) < log.last_seq
    assert contents(tmp_path) == before


@given(place=st.floats(0, 1, exclude_max=True), noise=st.binary(min_size=1, max_size=64))
def test_no_damage_ends_in_anything_but_our_own_errors(closed, tmp_path_factory, place, noise):
    path = tmp_path_factory.mktemp("damaged") / "a.db"
    shutil.copy(closed, path)
    with path.open("r+b") as file:
        file.seek(int(place * path.stat().st_size))
        file.write(noise)
    for tolerate in (False, True):
        try:
            with open_log(path, tolerate=tolerate) as log:
                list(log.events())
                _ = log.end
        except LedgerFileError as error:
            assert_one_line_that_helps(error)
    shutil.rmtree(path.parent)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("DELETE FROM events WHERE seq = 7", "event 7 is missing"),
        ("DELETE FROM events WHERE seq BETWEEN 7 AND 9", "events 7 to 9 are missing"),
        ("DELETE FROM events WHERE seq < 3", "events 1 to 2 are missing"),
        (
            "UPDATE events SET data = replace(data, '\"seq\":7', '\"seq\":8') WHERE seq = 7",
            "event 7 says that it is event 8",
        ),
        ("UPDATE events SET data = substr(data, 1, 20) WHERE seq = 7", "event 7 cannot be read"),
        (
            'UPDATE events SET data = replace(data, \'"generation":1\', \'"generation":"x"\') WHERE seq = 7',
            "event 7 cannot be read",
        ),
    ],
)
def test_an_event_that_is_missing_or_broken_is_named(tmp_path, change, part):
    closed_log(tmp_path / "a.db", 10)
    changed(tmp_path / "a.db", change)
    with pytest.raises(FileCorrupt) as refused, open_log(tmp_path / "a.db") as log:
        list(log.events())
    assert_one_line_that_helps(refused.value, part, "Copy it again")
    with open_log(tmp_path / "a.db", tolerate=True) as log:
        assert list(log.events())
        assert len(log.damage) == 1
        assert part in log.damage[0]


# --- files of other versions --------------------------------------------------------------------------------------


def test_a_newer_schema_asks_for_a_newer_kvledger(tmp_path):
    closed_log(tmp_path / "a.db", 10)
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("UPDATE alembic_version SET version_num = 'log_9999'")
    connection.commit()
    connection.close()
    with pytest.raises(FileNewer) as refused:
        open_log(tmp_path / "a.db")
    assert_one_line_that_helps(refused.value, "log_9999", "Upgrade kvledger")


@pytest.mark.parametrize("kind", ["block_teleported", "request_queued@2", "request_queued@10"])
def test_an_event_of_a_newer_kind_or_version_asks_for_a_newer_kvledger(tmp_path, kind):
    path = handmade(tmp_path / "a.db", queued("r1"), {**queued("r2"), "kind": kind}, queued("r3"))
    with pytest.raises(FileNewer) as refused, open_log(path) as log:
        list(log.events())
    assert_one_line_that_helps(refused.value, "event 2", f"'{kind}'", "Upgrade kvledger")


def test_a_new_field_of_a_known_kind_is_left_out(tmp_path):
    path = handmade(tmp_path / "a.db", {**queued(), "mood": "good"})
    with open_log(path) as log:
        assert [event.request for event in log.events()] == ["r"]


def test_old_versions_are_lifted_one_step_at_a_time(tmp_path, monkeypatch):
    # No kind has a second version yet, so two old ones of request_queued are made up.
    steps = []

    def from_first(fields: dict) -> dict:
        steps.append(1)
        return {**fields, "kind": "enqueued@2", "request": fields.pop("id")}

    def from_second(fields: dict) -> dict:
        steps.append(2)
        return {**fields, "kind": "request_queued", "generation": 1}

    monkeypatch.setitem(ev.UPCASTERS, "enqueued", from_first)
    monkeypatch.setitem(ev.UPCASTERS, "enqueued@2", from_second)
    path = handmade(
        tmp_path / "a.db",
        {"kind": "enqueued", "id": "old"},
        {"kind": "enqueued@2", "request": "newer"},
        queued("today's"),
    )
    before = contents(tmp_path)
    with open_log(path) as log:
        events = list(log.events())
    assert events == [
        ev.RequestQueued(seq, 1, 1, "scheduler", 0, request=request, generation=1)
        for seq, request in enumerate(("old", "newer", "today's"), 1)
    ]
    assert steps == [1, 2, 2]
    assert contents(tmp_path) == before
