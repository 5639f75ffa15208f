"""Incident files: made from any log, equal to it, and every later change of them is named."""

import hashlib
import json
import os
import sqlite3

import pytest

from ledger import events as ev
from ledger.errors import FileCorrupt, FileMissing, FileNewer, LedgerFileError, LedgerNotWritable
from ledger.file import migrate, schema, sqlite
from ledger.file.read import open_log
from ledger.file.seal import KEPT_PROBLEMS, seal, verify
from tests.support.log_files import (
    append_requests,
    append_work,
    changed,
    closed_log,
    contents,
    running_engine,
    small_disk,
    torn_log,
    writing,
)


@pytest.fixture
def sealed(tmp_path):
    """A sealed log of about 300 events, and nothing else in its folder."""
    closed_log(tmp_path / "log" / "a.db", 150)
    folder = tmp_path / "sealed"
    folder.mkdir()
    return seal(tmp_path / "log" / "a.db", folder / "incident.db")


def lines(path) -> list[tuple[int, bytes]]:
    with open_log(path) as log:
        return [row for page in log.pages() for row in page.rows]


def rows(path, query: str) -> list[tuple]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


# --- sealing ------------------------------------------------------------------------------------------------------


def test_a_closed_log_is_sealed_whole(tmp_path, sealed):
    log = tmp_path / "log" / "a.db"
    assert lines(sealed.target) == lines(log)
    assert sealed.events == len(lines(log))
    assert sealed.end == "closed"
    assert sealed.size_bytes == sealed.target.stat().st_size
    with open_log(sealed.target) as file, open_log(log) as source:
        assert file.sealed
        assert file.end == "closed"
        assert file.meta == source.meta
    assert verify(sealed.target).ok


def test_a_torn_log_is_sealed_with_its_tail(tmp_path):
    flushed_seq = torn_log(tmp_path / "a.db")
    before = contents(tmp_path)
    report = seal(tmp_path / "a.db", tmp_path / "incident.db")
    assert report.end == "torn"
    assert report.events >= flushed_seq
    assert lines(tmp_path / "incident.db") == lines(tmp_path / "a.db")
    with open_log(tmp_path / "incident.db") as log:
        assert log.end == "torn"
        assert not log.lacks_wal
    assert {name: digest for name, digest in contents(tmp_path).items() if name != "incident.db"} == before


def test_a_live_log_is_sealed_as_it_stands_and_goes_on(tmp_path):
    with running_engine(tmp_path / "a.db") as engine:
        report = seal(tmp_path / "a.db", tmp_path / "incident.db")
        assert report.end == "live"
        assert report.events >= engine.flushed_seq
        assert verify(tmp_path / "incident.db").ok
        with open_log(tmp_path / "incident.db") as log:
            assert log.end == "live"
            assert log.last_seq == report.events
        with open_log(tmp_path / "a.db") as log:
            assert log.end == "live"
        engine.kill()
    assert lines(tmp_path / "a.db")[: report.events] == lines(tmp_path / "incident.db")


def test_an_empty_log_is_sealed(tmp_path):
    with writing(tmp_path / "a.db"):
        report = seal(tmp_path / "a.db", tmp_path / "incident.db")
    assert report.events == 0
    assert verify(tmp_path / "incident.db").ok


def test_a_sealed_file_stands_alone_and_has_what_readers_need(sealed):
    assert list(contents(sealed.target.parent)) == ["incident.db"]
    assert rows(sealed.target, "PRAGMA journal_mode") == [("delete",)]
    names = {name for (name,) in rows(sealed.target, "SELECT name FROM sqlite_master")}
    assert names >= {index.name for index in schema.INDEXES}
    assert names >= set(schema.sealed.tables)
    plan = rows(sealed.target, "EXPLAIN QUERY PLAN SELECT * FROM events WHERE request = 'r' ORDER BY generation, seq")
    assert [text for *_, text in plan] == ["SEARCH events USING INDEX events_by_request (request=?)"]


def test_sealing_says_how_far_it_is(tmp_path):
    closed_log(tmp_path / "a.db", 3_000)
    progress: list[int] = []
    report = seal(tmp_path / "a.db", tmp_path / "incident.db", progress.append)
    assert progress == sorted(progress)
    assert len(progress) > 1
    assert progress[-1] == report.events


def test_evidence_is_never_overwritten(tmp_path, sealed):
    before = contents(sealed.target.parent)
    with pytest.raises(LedgerNotWritable, match=r"exists, and evidence is never overwritten\. Choose another name\.$"):
        seal(tmp_path / "log" / "a.db", sealed.target)
    assert contents(sealed.target.parent) == before


def test_a_target_that_appears_meanwhile_is_not_overwritten_either(tmp_path):
    closed_log(tmp_path / "a.db", 10)
    target = tmp_path / "incident.db"
    with pytest.raises(LedgerNotWritable, match="evidence is never overwritten"):
        seal(tmp_path / "a.db", target, lambda _events: target.write_text("first"))
    assert target.read_text() == "first"
    assert sorted(contents(tmp_path)) == ["a.db", "incident.db"]


def test_a_sealed_file_is_not_sealed_again(sealed):
    with pytest.raises(LedgerFileError, match="is sealed already"):
        seal(sealed.target, sealed.target.with_name("again.db"))
    assert list(contents(sealed.target.parent)) == ["incident.db"]


def test_what_cannot_be_read_is_not_sealed_and_leaves_nothing(tmp_path):
    with pytest.raises(FileMissing):
        seal(tmp_path / "a.db", tmp_path / "incident.db")
    closed_log(tmp_path / "a.db", 2_000)
    data = bytearray((tmp_path / "a.db").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 8192] = bytes(8192)
    (tmp_path / "a.db").write_bytes(data)
    with pytest.raises(FileCorrupt):
        seal(tmp_path / "a.db", tmp_path / "incident.db")
    assert list(contents(tmp_path)) == ["a.db"]


def test_events_of_a_newer_kvledger_are_not_sealed_by_this_one(tmp_path):
    closed_log(tmp_path / "a.db", 10)
    changed(tmp_path / "a.db", "UPDATE events SET data = json_set(data, '$.kind', 'block_teleported') WHERE seq = 3")
    with pytest.raises(FileNewer):
        seal(tmp_path / "a.db", tmp_path / "incident.db")
    assert list(contents(tmp_path)) == ["a.db"]


def test_a_full_disk_leaves_no_half_sealed_file(tmp_path):
    closed_log(tmp_path / "a.db", 2_000)
    with small_disk(tmp_path / "disk", 800) as disk:
        with pytest.raises(LedgerNotWritable, match="the disk is full"):
            seal(tmp_path / "a.db", disk / "incident.db")
        assert contents(disk) == {}


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    closed_log(tmp_path / "a.db", 10)
    with pytest.raises(LedgerNotWritable, match="nowhere") as refused:
        seal(tmp_path / "a.db", tmp_path / "nowhere" / "incident.db")
    assert "\n" not in str(refused.value)


# --- summaries ----------------------------------------------------------------------------------------------------


@pytest.fixture
def summed_up(tmp_path):
    with writing(tmp_path / "a.db") as (log, _):
        append_work(log, jobs=3, open_jobs=1)
        log.append(ev.RequestQueued, request="again", generation=1)
        log.append(ev.RequestScheduled, request="again", generation=1)
        log.append(ev.RequestPreempted, request="again", generation=1)
        log.append(ev.RequestResumed, request="again", generation=2)
        log.append(ev.RequestAborted, request="again", generation=2)
        log.append(ev.RequestQueued, request="again", generation=1)
        log.append(
            ev.LoadPlanned, load=0, request="again", generation=1, blocks=((0, ((1, 4),)), (1, ((1, 2),))), tokens=64
        )
        log.append(ev.LoadRegistered, load=0, ranks=((0, 1),))
        log.append(ev.RankLoaded, load=0, rank=0)
        log.append(
            ev.RankLoaded, load=0, rank=1, outcome="failed", code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET"
        )
        log.append(ev.LoadFailed, load=0, rank=1, code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
        log.append(ev.LoadSettled, load=0, outcome="failed")
        call = {"transfer": "0-1", "rank": 0, "op": "put", "job": 0}
        log.append_evidence(ev.TransferStarted(0, 5, 5, "rank 0", 1, **call, keys=("a", "b"), bytes=8192))
        failure = ev.KeyFailure("a", "-200", "KV_OOM")
        log.append_evidence(
            ev.TransferFinished(
                0,
                9,
                9,
                "rank 0",
                1,
                **call,
                outcome="partial",
                keys=2,
                bytes=8192,
                duration_ns=4,
                failed_keys=1,
                failures=(failure,),
            )
        )
        log.append_evidence(
            ev.TransferStarted(0, 9, 9, "rank 0", 1, transfer="0-2", rank=0, op="get", load=0, keys=("a",))
        )
    seal(tmp_path / "a.db", tmp_path / "incident.db")
    return tmp_path / "incident.db"


def test_each_job_is_summed_up(summed_up):
    query = (
        "SELECT job, request, blocks, ranks, ranks_reported, ranks_failed, code, settled_ts_ns > 0, freed_ts_ns > 0 "
        "FROM jobs"
    )
    assert rows(summed_up, query) == [
        (0, "request-0", 3, 2, 2, 1, "TRANSFER_FAILED", 1, 1),
        (1, "request-1", 3, 2, 2, 1, "TRANSFER_FAILED", 1, 1),
        (2, "request-2", 3, 2, 1, 0, None, None, None),
    ]
    assert rows(summed_up, "SELECT job FROM jobs WHERE duration_ns >= 0 ORDER BY job") == [(0,), (1,)]


def test_each_life_of_a_request_is_summed_up(summed_up):
    query = (
        'SELECT generation, queued_ts_ns > 0, started_ts_ns > 0, ended_ts_ns > 0, "end" FROM requests '
        "WHERE request = 'again' ORDER BY first_seq"
    )
    assert rows(summed_up, query) == [
        (1, 1, 1, 1, "preempted"),
        (2, None, 1, 1, "aborted"),
        (1, 1, None, None, None),
    ]
    assert rows(summed_up, "SELECT count(*) FROM requests WHERE reason = 'stopped'") == [(3,)]


def test_each_load_is_summed_up(summed_up):
    query = "SELECT load, request, outcome, tokens, blocks, ranks, ranks_answered, code, stage FROM loads"
    assert rows(summed_up, query) == [(0, "again", "failed", 64, 6, 2, 2, "BLOCK_NOT_FOUND", "STORE_GET")]


def test_each_call_to_the_store_is_summed_up(summed_up):
    query = "SELECT transfer, op, job, load, outcome, keys, bytes, duration_ns, failed_keys, code FROM transfers"
    assert rows(summed_up, query) == [
        ("0-1", "put", 0, None, "partial", 2, 8192, 4, 1, "KV_OOM"),
        ("0-2", "get", None, 0, None, 1, 0, None, 0, None),
    ]


# --- the hash chain -----------------------------------------------------------------------------------------------


def test_the_digest_can_be_computed_by_anybody(sealed):
    meta = dict(rows(sealed.target, "SELECT key, value FROM meta"))
    head = hashlib.sha256(json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()).digest()
    for (data,) in rows(sealed.target, "SELECT data FROM events ORDER BY seq"):
        head = hashlib.sha256(head + data.encode()).digest()
    assert head.hex() == sealed.chain_head
    assert rows(sealed.target, "SELECT chain_head, events FROM seal") == [(sealed.chain_head, sealed.events)]
    assert verify(sealed.target).chain_head == sealed.chain_head


def test_the_same_log_has_the_same_digest_whenever_it_is_sealed(tmp_path, sealed):
    again = seal(tmp_path / "log" / "a.db", tmp_path / "again.db")
    assert again.chain_head == sealed.chain_head


ADD_A_COPY_OF_EVENT_6 = (
    "INSERT INTO events SELECT seq + 1000, ts_ns, mono_ns, source, step, kind, request, generation, job, load, "
    "transfer, rank, code, json_set(data, '$.seq', seq + 1000) FROM events WHERE seq = 6"
)


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        (["UPDATE events SET data = json_set(data, '$.prompt_tokens', 101) WHERE seq = 6"], [(6, "changed")]),
        (["UPDATE events SET data = data || ' ' WHERE seq IN (6, 7)"], [(6, "changed"), (7, "changed")]),
        (["DELETE FROM events WHERE seq = 6"], [(6, "removed")]),
        (["DELETE FROM events WHERE seq = 1"], [(1, "removed")]),
        (["DELETE FROM events WHERE seq BETWEEN 6 AND 8"], [(6, "removed"), (7, "removed"), (8, "removed")]),
        (
            [ADD_A_COPY_OF_EVENT_6],
            [(1006, "added")],
        ),
        (["UPDATE events SET rank = 7 WHERE seq = 6"], [(6, "column")]),
        (["UPDATE events SET request = NULL WHERE seq = 6"], [(6, "column")]),
        (["UPDATE events SET kind = 'gap' WHERE seq = 6"], [(6, "column")]),
        (["UPDATE meta SET value = 'another' WHERE key = 'engine'"], [(0, "meta")]),
        (["DELETE FROM meta"], [(0, "meta")]),
        (["UPDATE seal SET chain_head = 'ff'"], [(0, "seal")]),
        (["UPDATE seal SET events = 1"], [(0, "seal")]),
        (["DELETE FROM seal"], [(0, "seal")]),
        (["UPDATE chain SET hash = x'00' WHERE seq = 6"], [(6, "changed"), (7, "changed")]),
        (["DELETE FROM chain WHERE seq = 6"], [(0, "seal"), (6, "added"), (7, "changed")]),
        (["UPDATE requests SET prompt_tokens = 7 WHERE first_seq = 6"], [(0, "summary")]),
        (["DELETE FROM requests WHERE first_seq = 6"], [(0, "summary")]),
        (
            ["INSERT INTO jobs (job, blocks, ranks, ranks_reported, ranks_failed) VALUES (99, 1, 1, 0, 0)"],
            [(0, "summary")],
        ),
    ],
)
def test_every_change_is_named(sealed, statements, expected):
    changed(sealed.target, *statements)
    report = verify(sealed.target)
    assert [(problem.seq, problem.what) for problem in report.problems] == expected
    assert not report.ok
    for problem in report.problems:
        assert "\n" not in problem.detail


def test_a_view_in_place_of_a_summary_table_is_named(sealed):
    connection = sqlite3.connect(sealed.target, isolation_level=None)
    columns = [name for _, name, *_ in connection.execute("PRAGMA table_info(requests)")]
    connection.execute("DROP TABLE requests")
    connection.execute("CREATE VIEW requests AS SELECT " + ", ".join(f"""'x' AS "{name}" """ for name in columns))
    connection.close()
    problems = verify(sealed.target).problems
    assert {problem.what for problem in problems} == {"summary"}
    assert "without a number" in problems[0].detail


def test_two_events_that_changed_places_are_both_named(sealed):
    changed(
        sealed.target,
        "CREATE TEMP TABLE two AS SELECT seq, data FROM events WHERE seq IN (6, 8)",
        "UPDATE events SET data = (SELECT data FROM two WHERE two.seq = 14 - events.seq) WHERE seq IN (6, 8)",
    )
    found = verify(sealed.target).problems
    assert {problem.seq for problem in found if problem.what == "changed"} == {6, 8}


def test_a_guard_that_is_gone_is_named(sealed):
    connection = sqlite3.connect(sealed.target, isolation_level=None)
    connection.execute("DROP TRIGGER events_are_not_changed")
    connection.close()
    (problem,) = verify(sealed.target).problems
    assert problem.what == "guard"
    assert "events_are_not_changed" in problem.detail


def test_many_problems_are_counted_and_the_first_are_listed(sealed):
    changed(sealed.target, "UPDATE events SET data = data || ' '")
    report = verify(sealed.target)
    assert report.problem_count == sealed.events
    assert len(report.problems) == KEPT_PROBLEMS


def test_verifying_changes_nothing(sealed):
    before = contents(sealed.target.parent)
    assert verify(sealed.target).ok
    assert contents(sealed.target.parent) == before


def test_a_log_that_is_not_sealed_is_checked_for_holes(tmp_path):
    closed_log(tmp_path / "a.db", 10)
    assert verify(tmp_path / "a.db").ok
    changed(tmp_path / "a.db", "DELETE FROM events WHERE seq BETWEEN 6 AND 8")
    report = verify(tmp_path / "a.db")
    assert not report.sealed
    assert [(problem.seq, problem.what) for problem in report.problems] == [(6, "removed")]
    assert "events 6 to 8 are missing" in report.problems[0].detail


def test_a_live_log_is_verified_while_it_is_written(tmp_path):
    with writing(tmp_path / "a.db") as (log, writer):
        append_requests(log, 1_000)
        assert writer.flush(timeout_s=60)
        assert verify(tmp_path / "a.db").ok


def test_a_damaged_page_of_a_sealed_file_is_found(sealed):
    data = sealed.target.read_bytes()
    sealed.target.write_bytes(data.replace(b'"kind":"request_queued"', b'"XXXX":"request_queued"'))
    assert not verify(sealed.target).ok


def test_sealing_brings_the_schema_up_to_date(sealed):
    with open_log(sealed.target) as log:
        assert log.revisions == (sqlite.LOG_REVISIONS[-1], sqlite.SEALED_REVISIONS[-1])
    assert migrate.current_revision(sealed.target) == log.revisions


# --- what can be read of a damaged file -------------------------------------------------------------------------------


def test_salvage_makes_an_incident_file_of_what_can_be_read_of_a_cut_log(tmp_path):
    closed_log(tmp_path / "a.db", 5_000)
    whole = (tmp_path / "a.db").stat().st_size
    os.truncate(tmp_path / "a.db", whole // 2)
    with pytest.raises(FileCorrupt, match="seal --salvage"):
        seal(tmp_path / "a.db", tmp_path / "b.db")
    report = seal(tmp_path / "a.db", tmp_path / "b.db", salvage=True)
    assert report.events > 4_000
    assert report.lost == 0
    assert report.end == "torn"
    assert verify(tmp_path / "b.db").ok
    with open_log(tmp_path / "b.db") as log:
        assert [event.seq for event in log.events()] == list(range(1, report.events + 1))
        assert log.meta["engine"] == "test-engine"
    assert (tmp_path / "a.db").stat().st_size == whole // 2


def test_salvage_puts_a_gap_in_the_place_of_each_lost_event(tmp_path):
    closed_log(tmp_path / "a.db", 5_000)
    size = (tmp_path / "a.db").stat().st_size
    with (tmp_path / "a.db").open("r+b") as file:
        file.seek(size // 2 // 4096 * 4096)
        file.write(bytes(4096))
    report = seal(tmp_path / "a.db", tmp_path / "b.db", salvage=True)
    assert report.lost > 0
    with open_log(tmp_path / "b.db") as log:
        events = list(log.events())
    assert sum(isinstance(event, ev.Gap) for event in events) == report.lost
    assert [event.seq for event in events] == list(range(1, events[-1].seq + 1))
    assert isinstance(events[-1], ev.LogClosed)


def test_salvage_of_a_sealed_file_makes_a_new_one(tmp_path, sealed):
    changed(sealed.target, "UPDATE events SET data = 'nothing' WHERE seq = 6")
    report = seal(sealed.target, tmp_path / "again.db", salvage=True)
    assert report.lost == 1
    assert verify(tmp_path / "again.db").ok


def test_salvage_of_a_file_without_any_event_says_so(tmp_path):
    closed_log(tmp_path / "a.db", 10)
    os.truncate(tmp_path / "a.db", 4096)
    with pytest.raises(FileCorrupt):
        seal(tmp_path / "a.db", tmp_path / "b.db", salvage=True)
    assert not (tmp_path / "b.db").exists()
