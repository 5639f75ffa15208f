"""Incident files: made from any log, equal to it, and every later change of them is named."""

import pytest

from ledger.errors import FileCorrupt, FileMissing, FileNewer, LedgerFileError, LedgerNotWritable
from ledger.file import migrate, schema, sqlite
from ledger.file.read import open_log
from ledger.file.seal import seal
from ledger.file.verify import verify
from tests.support.log_files import changed, closed_log, contents, running_engine, small_disk, torn_log, writing
from tests.unit.ledger.file.stored import lines, rows

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


def test_the_same_log_has_the_same_digest_whenever_it_is_sealed(tmp_path, sealed):
    again = seal(tmp_path / "log" / "a.db", tmp_path / "again.db")
    assert again.chain_head == sealed.chain_head


def test_sealing_brings_the_schema_up_to_date(sealed):
    with open_log(sealed.target) as log:
        assert log.revisions == (sqlite.LOG_REVISIONS[-1], sqlite.SEALED_REVISIONS[-1])
    assert migrate.current_revision(sealed.target) == log.revisions
