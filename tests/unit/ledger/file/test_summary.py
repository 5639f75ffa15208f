"""The summary tables of a sealed file, as far as other tests do not hold them: one row for each call of a transfer."""

from ledger import events as ev
from ledger.file.summary import Summary, TransferRow


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
