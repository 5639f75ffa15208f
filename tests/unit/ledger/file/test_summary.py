"""The summary tables of a sealed file, as far as other tests do not hold them: one row for each call of a transfer."""

import pytest

from ledger import events as ev
from ledger.file.seal import seal
from ledger.file.summary import Summary, TransferRow
from tests.support.log_files import append_work, writing
from tests.unit.ledger.file.stored import rows


def calls(*events: tuple[type[ev.Event], dict]) -> list[TransferRow]:
    """The rows of these events, each with its place in the log."""
    summary = Summary()
    summary.add(kind(seq, seq, seq, "rank 0", 1, **fields) for seq, (kind, fields) in enumerate(events, 1))
    summary.finish()
    return [row for row in summary.rows if isinstance(row, TransferRow)]


def push(peer: str, rank: int = 0) -> dict:
    """What a push to a peer says of itself."""
    return {"transfer": "T", "rank": rank, "op": "push", "peer": peer}


def test_each_peer_of_a_transfer_has_a_row():
    rows = calls(
        (ev.TransferStarted, push("tp0 pp0")),
        (ev.TransferStarted, push("tp1 pp0")),
        (ev.TransferFinished, push("tp0 pp0")),
        (ev.TransferFinished, {**push("tp1 pp0"), "outcome": "failed", "code": "TRANSFER_FAILED"}),
    )
    assert [(row.first_seq, row.peer, row.outcome, row.code) for row in rows] == [
        (1, "tp0 pp0", "ok", None),
        (2, "tp1 pp0", "failed", "TRANSFER_FAILED"),
    ]


def test_each_rank_of_a_transfer_has_a_row():
    rows = calls((ev.TransferStarted, push("tp0 pp0", rank=0)), (ev.TransferStarted, push("tp0 pp0", rank=1)))
    assert [(row.rank, row.outcome) for row in rows] == [(0, None), (1, None)]


def test_a_push_that_is_tried_again_has_a_row_for_each_try():
    rows = calls(
        (ev.TransferStarted, push("tp0 pp0")),
        (ev.TransferFinished, {**push("tp0 pp0"), "outcome": "failed"}),
        (ev.TransferStarted, push("tp0 pp0")),
        (ev.TransferFinished, push("tp0 pp0")),
    )
    assert [(row.first_seq, row.outcome) for row in rows] == [(1, "failed"), (3, "ok")]


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
