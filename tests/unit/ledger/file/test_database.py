"""The file that the writer writes: what it refuses to change, where it stays, and how large its `-wal` becomes."""

import json
import sqlite3

import pytest

from ledger import events as ev
from ledger.file import sqlite
from ledger.file.database import Database
from ledger.file.read import open_log
from tests.support.log_files import append_requests, append_transfers, closed_log, contents, logged, writing


def stored(path) -> list[ev.Event]:
    with open_log(path) as log:
        return list(log.events())


def rows(path, query: str) -> list[tuple]:
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_a_column_is_null_where_the_event_has_no_such_field(tmp_path):
    with writing(tmp_path / "a.db") as (log, _):
        log.append(ev.RequestQueued, request="r", generation=1)
    assert rows(tmp_path / "a.db", "SELECT kind, request, generation, job, load, transfer, rank, code FROM events") == [
        ("request_queued", "r", 1, None, None, None, None, None)
    ]


def test_the_kind_column_leaves_the_version_out(tmp_path):
    database = Database(tmp_path / "a.db")
    database.create({})
    envelope = {"ts_ns": 1, "mono_ns": 1, "source": "scheduler", "step": 0}
    lines = [{"kind": kind, "seq": seq, **envelope} for seq, kind in enumerate(("load_failed", "load_failed@2"), 1)]
    database.append(json.dumps(lines).encode())
    database.close()
    assert rows(tmp_path / "a.db", "SELECT kind FROM events") == [("load_failed",), ("load_failed",)]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE events SET rank = 7 WHERE seq = 3",
        "DELETE FROM events WHERE seq = 3",
        "INSERT OR REPLACE INTO events SELECT * FROM events WHERE seq = 3",
        "REPLACE INTO events (seq, ts_ns, mono_ns, source, step, kind, data) VALUES (3, 0, 0, '', 0, '', '{}')",
        "INSERT INTO events (seq, ts_ns, mono_ns, source, step, kind, data) VALUES (0, 0, 0, '', 0, '', '{}')",
    ],
)
def test_the_file_refuses_to_change_history(tmp_path, change):
    closed_log(tmp_path / "a.db", events=10)
    before = rows(tmp_path / "a.db", "SELECT * FROM events")
    # Another program's connection: it did not ask for recursive triggers.
    connection = sqlite3.connect(tmp_path / "a.db")
    with pytest.raises(sqlite3.IntegrityError, match="an event is"):
        connection.execute(change)
    connection.close()
    assert rows(tmp_path / "a.db", "SELECT * FROM events") == before


def test_a_removed_folder_is_put_back_with_everything(tmp_path):
    folder = tmp_path / "logs"
    with logged() as lines, writing(folder / "a.db", flush_interval_ms=1) as (log, writer):
        append_requests(log, 5_000)
        assert writer.flush(timeout_s=60)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        append_requests(log, 10)
        assert writer.flush(timeout_s=60)
        lines.wait_for("was put back")
        assert len(stored(folder / "a.db")) == log.last_seq
        append_requests(log, 10)
        log.append(ev.LogClosed)
    assert len(stored(folder / "a.db")) == log.last_seq
    assert list(contents(folder)) == ["a.db"]


def test_a_folder_that_is_removed_at_the_very_end_is_put_back_too(tmp_path):
    with writing(tmp_path / "logs" / "a.db") as (log, writer):
        append_requests(log, 100)
        assert writer.flush(timeout_s=60)
        (tmp_path / "logs").rename(tmp_path / "elsewhere")
    assert len(stored(tmp_path / "logs" / "a.db")) == log.last_seq


def test_a_file_that_took_the_log_s_name_is_not_overwritten(tmp_path):
    with logged() as lines, writing(tmp_path / "a.db", flush_interval_ms=1) as (log, writer):
        append_requests(log, 100)
        assert writer.flush(timeout_s=60)
        (tmp_path / "a.db").rename(tmp_path / "moved.db")
        (tmp_path / "a.db").write_text("somebody else's")
        append_requests(log, 100)
        assert "another file has taken its name" in lines.wait_for("cannot write")
        assert (tmp_path / "a.db").read_text() == "somebody else's"
        (tmp_path / "a.db").unlink()
        assert writer.flush(timeout_s=60)
    assert len(stored(tmp_path / "a.db")) == log.last_seq


def test_a_removed_wal_loses_nothing(tmp_path):
    with writing(tmp_path / "a.db", flush_interval_ms=1) as (log, writer):
        append_requests(log, 100)
        assert writer.flush(timeout_s=60)
        sqlite.wal_path(tmp_path / "a.db").unlink()
        append_requests(log, 100)
        assert writer.flush(timeout_s=60)
        with open_log(tmp_path / "a.db") as file:
            assert file.end == "live"
            assert file.last_seq == log.last_seq
    assert len(stored(tmp_path / "a.db")) == log.last_seq


def test_a_wal_that_a_long_reader_made_grow_is_cut_back(tmp_path):
    path = tmp_path / "a.db"
    wal = sqlite.wal_path(path)
    with writing(path) as (log, writer):
        append_requests(log, 10)
        assert writer.flush(timeout_s=60)
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT max(seq) FROM events").fetchone()
        while wal.stat().st_size < 2 * sqlite.JOURNAL_LIMIT_BYTES:
            append_transfers(log, 1_000)
            assert writer.flush(timeout_s=60)
        reader.execute("COMMIT")
        # Two more commits: the one that moves it all into the file, and the one that starts it over.
        for _ in range(2):
            append_requests(log, 10)
            assert writer.flush(timeout_s=60)
        assert wal.stat().st_size <= sqlite.JOURNAL_LIMIT_BYTES
        reader.close()


def test_a_reader_that_takes_its_time_does_not_make_the_wal_grow(tmp_path):
    path = tmp_path / "a.db"
    with writing(path) as (log, writer):
        append_requests(log, 5_000)
        assert writer.flush(timeout_s=60)
        with open_log(path) as file:
            reading = file.events()
            next(reading)  # stays in the middle of the file while the writer goes on
            for _ in range(20):
                append_transfers(log, 1_000)
                assert writer.flush(timeout_s=60)
            assert sqlite.wal_path(path).stat().st_size < sqlite.JOURNAL_LIMIT_BYTES
            assert sum(1 for _ in reading) == log.last_seq - 1
