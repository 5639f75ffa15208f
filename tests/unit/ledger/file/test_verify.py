"""Checking an incident file: every later change is named, and checking changes nothing."""

import hashlib
import json
import sqlite3

import pytest

from ledger.file.verify import KEPT_PROBLEMS, verify
from tests.support.log_files import append_requests, changed, closed_log, contents, writing
from tests.unit.ledger.file.stored import rows

ADD_A_COPY_OF_EVENT_6 = (
    "INSERT INTO events SELECT seq + 1000, ts_ns, mono_ns, source, step, kind, request, generation, job, load, "
    "transfer, rank, code, json_set(data, '$.seq', seq + 1000) FROM events WHERE seq = 6"
)


def test_the_digest_can_be_computed_by_anybody(sealed):
    meta = dict(rows(sealed.target, "SELECT key, value FROM meta"))
    head = hashlib.sha256(json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()).digest()
    for (data,) in rows(sealed.target, "SELECT data FROM events ORDER BY seq"):
        head = hashlib.sha256(head + data.encode()).digest()
    assert head.hex() == sealed.chain_head
    assert rows(sealed.target, "SELECT chain_head, events FROM seal") == [(sealed.chain_head, sealed.events)]
    assert verify(sealed.target).chain_head == sealed.chain_head


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
