"""Logs of several engines, told together: what each knows of the other's keys and transfers, and in which order."""

from pathlib import Path

import msgspec
import pytest

from ledger import events as ev
from ledger.cli import commands as cli
from ledger.replay.fold import Result, replay
from ledger.replay.join import join
from ledger.report.wording import say
from ledger.state.apply import State
from tests.incidents.corpus import INCIDENTS
from tests.incidents.script import Script

BY_ID = {incident.id: incident for incident in INCIDENTS}


def joined(*logs: list[ev.AnyEvent]):
    results: list[Result] = [replay(events) for events in logs]
    names = [f"{index}.db" for index in range(len(logs))]
    return join(results, names, [events.__iter__ for events in logs])


def shifted(events: list[ev.AnyEvent], seconds: float) -> list[ev.AnyEvent]:
    """The same log from a host whose clock is off."""
    return [msgspec.structs.replace(event, ts_ns=event.ts_ns + int(seconds * 1e9)) for event in events]


def good_transfer() -> tuple[Script, Script]:
    prefill, decode = Script("prefill"), Script("decode")
    prefill.runs("P-R")
    prefill.sends("x1", "P-R")
    prefill.holds("x1", "P-R", blocks=(5, 12))
    decode.arrives("R")
    decode.receives("x1", "R", blocks=(30, 37))
    prefill.passes(0.1)
    prefill.pushes("x1", "P-R")
    decode.passes(0.5)
    decode.pull_ends("x1", "R")
    decode.peer_answers("x1", "R")
    decode.received("x1", "R")
    decode.report_ignored(what="recv", why="vLLM was told before", transfer="x1", request="R", rank=0)
    prefill.send_settled(transfer="x1", request="P-R")
    return prefill, decode


@pytest.mark.parametrize("seconds", [0.0, 3600.0, -3600.0])
def test_what_had_to_come_first_comes_first_whatever_the_clocks_say(seconds: float):
    prefill, decode = good_transfer()
    steps = joined(prefill.events, shifted(decode.events, seconds)).transfers["x1"]
    order = [(step.log, ev.kind_of(step.event)) for step in steps]
    assert order.index((1, "recv_registered")) < order.index((0, "send_started"))
    assert order.index((0, "transfer_finished")) < order.index((1, "peer_settled"))
    for log in (0, 1):
        places = [step.event.seq for step in steps if step.log == log]
        assert places == sorted(places)


def test_what_only_the_clocks_order_is_marked_and_what_the_events_order_is_not():
    prefill, decode = good_transfer()
    steps = joined(prefill.events, decode.events).transfers["x1"]
    marks = {(step.log, ev.kind_of(step.event)): step.by_clock for step in steps}
    assert marks[0, "send_started"] is False
    assert marks[1, "peer_settled"] is False
    assert marks[1, "recv_registered"] is True or marks[0, "send_registered"] is True


def test_the_findings_of_one_side_say_what_the_other_side_knows():
    logs = BY_ID["S4"].logs()
    told = {finding.kind: say(finding).culprit for _, finding in joined(logs["prefill"], logs["decode"]).findings}
    assert "prefill was not asked for it, as far as its log goes, and let it expire" in told["stall"]
    assert "decode failed to pull it: PEER_UNREACHABLE" in told["leak"]


def test_a_side_that_knows_nothing_of_a_transfer_is_told():
    logs = BY_ID["S11"].logs()
    (_, leak), *_ = joined(logs["prefill"], logs["decode"]).findings
    assert "the decode engine decode knows nothing of transfer x1" in say(leak).culprit


def without(events: list[ev.AnyEvent], *kinds: type[ev.Event]) -> list[ev.AnyEvent]:
    """The same log, which has lost all events of some kinds: the book of the next checkpoint has them."""
    which = [event for event in events if isinstance(event, kinds)]
    last, state = which[-1], State()
    for event in events[: last.seq]:
        state.apply(event)
    about = {"ts_ns": last.ts_ns, "mono_ns": last.mono_ns, "source": ev.SCHEDULER, "step": last.step}
    gap = ev.Gap(0, **about, origin=ev.SCHEDULER, dropped=len(which), reason="the queue was full")
    book = msgspec.Raw(state.encode())
    sums = {"open_jobs": 0, "pinned_blocks": state.pinned_blocks(), "waiting_loads": 0}
    checkpoint = ev.Checkpoint(0, **about, digest=state.digest(), **sums, book=book)
    told = [*events[: last.seq], gap, checkpoint, *events[last.seq :]]
    kept = [event for event in told if event not in which]
    return [msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(kept, 1)]


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (
            (ev.SendReady,),
            "prefill let it expire (event 9 of 0.db), and whether it was asked for is not known: in its log 1",
        ),
        (
            (ev.SendRegistered, ev.SendReady, ev.RankSent, ev.SendExpired),
            "what the prefill engine prefill did with transfer x1 is not known (no event in 0.db, but 4 events of",
        ),
        (
            (ev.SendReady, ev.RankSent, ev.SendExpired),
            "the last that is known of the prefill engine prefill: request P-R will be sent as x1",
        ),
    ],
    ids=["its beginning", "all", "its end"],
)
def test_what_a_log_with_a_gap_does_not_have_is_not_said_to_have_not_been(kinds: tuple[type[ev.Event], ...], said: str):
    logs = BY_ID["S4"].logs()
    events = without(logs["prefill"], *kinds)
    told = [say(finding).culprit for log, finding in joined(events, logs["decode"]).findings if log == 1]
    assert told
    assert all(said in culprit for culprit in told)
    assert not any(claim in culprit for culprit in told for claim in ("not computed", "knows nothing", "was not asked"))


def test_a_log_that_has_lost_on_which_side_of_a_transfer_it_was_calls_no_other_engine_the_decode_engine():
    logs = BY_ID["S4"].logs()
    decode = without(logs["decode"], ev.RecvRegistered, ev.PeersNamed, ev.PeerSettled, ev.RecvFailed, ev.RecvSettled)
    prefill = without(logs["prefill"], ev.SendRegistered, ev.SendReady, ev.RankSent, ev.SendExpired)
    told = [say(finding).culprit for log, finding in joined(prefill, decode).findings if log == 1]
    assert told
    assert not any("decode engine prefill" in culprit for culprit in told)


def test_a_decode_engine_whose_log_has_a_gap_is_not_said_to_wait_still():
    prefill, decode = good_transfer()
    prefill = Script("prefill")
    prefill.runs("P-R")
    prefill.sends("x1", "P-R")
    prefill.holds("x1", "P-R", blocks=(5, 12), timeout_s=1)
    prefill.passes(100, steps=100)
    prefill.rank_sent(transfer="x1", request="P-R", rank=0, outcome="expired")
    prefill.send_expired(transfer="x1", request="P-R", expired_ranks=((0, 0),))
    events = without(decode.events, ev.PeerSettled, ev.RecvSettled)
    ((_, leak), *_) = joined(prefill.closes().events, events).findings
    assert leak.kind == "leak"
    assert "still waits" not in say(leak).culprit
    assert "are lost at event" in say(leak).culprit


def test_a_push_that_failed_on_the_other_side_is_the_culprit():
    prefill, decode = Script("prefill"), Script("decode")
    prefill.runs("P-R")
    prefill.sends("x1", "P-R")
    prefill.holds("x1", "P-R", blocks=(5, 12))
    prefill.send_started(transfer="x1", request="P-R", rank=0, peer="tp0 pp0")
    with prefill.rank(0):
        about = {"transfer": "x1", "rank": 0, "op": "push", "request": "P-R", "peer": "tp0 pp0"}
        prefill.transfer_started(**about)
        prefill.transfer_finished(**about, outcome="failed", code="TRANSFER_FAILED", raw="-1")
    decode.arrives("R")
    decode.receives("x1", "R", blocks=(30, 37))
    decode.passes(600)
    (_, stall), *_ = [each for each in joined(prefill.events, decode.closes().events).findings if each[0] == 1]
    assert stall.kind == "stall"
    assert "the push of rank 0 ended failed: TRANSFER_FAILED (raw -1)" in say(stall).culprit


@pytest.mark.parametrize("end", ["sent", "open", "failed"])
def test_a_push_that_was_repeated_is_told_by_its_last_call_and_the_event_of_that(end: str):
    prefill, decode = Script("prefill", role="kv_producer"), Script("decode", role="kv_consumer", ranks=2)
    prefill.runs("R")
    prefill.sends("x1", "R")
    prefill.holds("x1", "R", blocks=(1, 8))
    about = {"transfer": "x1", "rank": 0, "op": "push", "request": "R", "peer": "tp0 pp0"}
    for outcome in ("failed", end):
        prefill.send_started(transfer="x1", request="R", rank=0, peer="tp0 pp0")
        with prefill.rank(0):
            prefill.transfer_started(**about)
            if outcome == "failed":
                prefill.transfer_finished(**about, outcome="failed", code="TRANSFER_FAILED", raw="-1")
            elif outcome == "sent":
                prefill.transfer_finished(**about)
    if end == "sent":
        prefill.rank_sent(transfer="x1", request="R", rank=0, pushes=2)
        prefill.send_settled(transfer="x1", request="R")
    decode.arrives("R")
    decode.receives("x1", "R", blocks=(11, 18))
    decode.passes(600)
    stall = next(each for log, each in joined(prefill.events, decode.closes().events).findings if log == 1)
    said = {
        "sent": "the prefill engine prefill settled it as sent (event 14 of 0.db)",
        "open": "the prefill engine prefill began to push and did not end",
        "failed": "the push of rank 0 ended failed: TRANSFER_FAILED (raw -1) (event 12 of 0.db)",
    }
    assert said[end] in say(stall).culprit
    assert end == "failed" or "failed" not in say(stall).culprit


@pytest.mark.parametrize("seconds", [0.0, 3600.0, -3600.0])
def test_a_peer_settles_over_a_failed_push_after_that_push_whatever_the_clocks_say(seconds: float):
    prefill, decode = Script("prefill"), Script("decode")
    prefill.runs("P-R")
    prefill.sends("x1", "P-R")
    prefill.holds("x1", "P-R", blocks=(5, 12))
    prefill.send_started(transfer="x1", request="P-R", rank=0, peer="tp0 pp0")
    with prefill.rank(0):
        about = {"transfer": "x1", "rank": 0, "op": "push", "request": "P-R", "peer": "tp0 pp0"}
        prefill.transfer_started(**about)
        prefill.transfer_finished(**about, outcome="failed", code="TRANSFER_FAILED", raw="-1")
    decode.arrives("R")
    decode.receives("x1", "R", blocks=(30, 37))
    failure = {"code": "TRANSFER_FAILED", "raw": "Mooncake transfer engine returned -1", "stage": "SEND"}
    decode.peer_settled(transfer="x1", request="R", rank=0, peer="tp0 pp0", outcome="failed", **failure)
    decode.recv_failed(transfer="x1", request="R", rank=0, peer="tp0 pp0", blocks=((0, ((30, 37),)),), **failure)
    steps = joined(prefill.events, shifted(decode.events, seconds)).transfers["x1"]
    order = [(step.log, ev.kind_of(step.event)) for step in steps]
    assert order.index((0, "transfer_finished")) < order.index((1, "peer_settled"))
    (settled,) = [step for step in steps if isinstance(step.event, ev.PeerSettled)]
    assert not settled.by_clock


def missed_and_put(*, put_s: float, outcome: str = "ok") -> str:
    """What a reader that misses keys after 100 s is told of a writer that puts them at some other time."""
    reader, writer = Script("reader", policy="recompute", start_s=100), Script("writer", start_s=put_s)
    reader.arrives("Q")
    reader.loads(0, "Q", blocks=(11, 12))
    call = reader.get_begins(0, keys=("k0", "k1"))
    reader.ends(call, "failed", code="BLOCK_NOT_FOUND", raw="-704")
    reader.answers(0, 0, "failed", code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
    writer.runs("Z")
    writer.saves(0, "Z", blocks=(1, 2))
    writer.ends(writer.put_begins(0, keys=("k0", "k1")), outcome)
    ((_, finding),) = joined(reader.closes().events, writer.closes().events).findings
    return say(finding).culprit


def test_of_a_put_in_another_log_only_the_clocks_say_when_it_was():
    said = "job 0 of engine writer put 2 of these 2 keys (k0, k1) (event 6 of 1.db; only the clocks say when)"
    assert f"{said}, which ended ok" in missed_and_put(put_s=0)


def test_a_put_that_the_clocks_place_after_the_key_was_missed_is_not_told():
    assert "writer" not in missed_and_put(put_s=3600)


def test_a_put_that_failed_is_not_said_to_have_put_the_key():
    assert "job 0 of engine writer tried to put 2 of these 2 keys" in missed_and_put(put_s=0, outcome="failed")


def test_a_key_that_was_put_again_later_is_told_by_the_put_before_it_was_missed():
    reader, writer = Script("reader", policy="recompute", start_s=100), Script("writer")
    writer.runs("Z")
    writer.stores(0, "Z", blocks=(1, 2), keys=("k0", "k1"))
    writer.passes(3600)
    writer.stores(1, "Z", blocks=(3, 4), keys=("k0", "k1"))
    reader.arrives("Q")
    for load, key in enumerate(("k0", "k1")):  # the second one is missed after the first one was put again
        reader.passes(7200 * load)
        reader.loads(load, "Q", blocks=(11, 11))
        reader.ends(reader.get_begins(load, keys=(key,)), "failed", code="BLOCK_NOT_FOUND", raw="-704")
        reader.answers(load, 0, "failed", code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
    ((_, finding),) = joined(reader.closes().events, writer.closes().events).findings
    assert finding.elsewhere == ((1, 0),)
    assert "job 0 of engine writer put 1 of these 2 keys (k0)" in say(finding).culprit


def test_an_engine_that_is_never_on_that_side_is_not_said_to_know_nothing():
    prefill, other, decode = Script("prefill"), Script("other", role="kv_producer"), Script("decode")
    prefill.runs("P-R")
    prefill.sends("x1", "P-R")
    prefill.holds("x1", "P-R", blocks=(5, 12))
    prefill.passes(500)
    prefill.rank_sent(transfer="x1", request="P-R", rank=0, outcome="expired")
    prefill.send_expired(transfer="x1", request="P-R", expired_ranks=((0, 0),))
    (_, leak), *_ = joined(prefill.closes().events, other.closes().events, decode.closes().events).findings
    assert "the decode engine decode knows nothing of transfer x1" in say(leak).culprit
    assert "other" not in say(leak).culprit.replace("nobody", "")


def failed_pull(prefill: str) -> Script:
    decode = Script("decode", role="kv_consumer")
    decode.arrives("R")
    blocks = ((0, ((30, 37),)),)
    ranks = ((0, 0),)
    decode.recv_registered(transfer="x1", request="R", generation=1, blocks=blocks, ranks=ranks, prefill=prefill)
    failure = {"code": "PEER_UNREACHABLE", "raw": "ConnectError", "stage": "BOOTSTRAP"}
    decode.peer_settled(transfer="x1", request="R", rank=0, outcome="failed", **failure)
    decode.recv_failed(transfer="x1", request="R", rank=0, blocks=blocks, **failure)
    decode.request_finished(request="R", generation=1, reason="error")
    decode.recv_recovered(transfer="x1", request="R", generation=1, action="failed")
    decode.recv_settled(transfer="x1", request="R", outcome="failed")
    return decode.closes()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("here", "the prefill engine here knows nothing of transfer x1"),
        ("elsewhere", "transfer x1 went to prefill engine elsewhere, whose log is not here"),
    ],
)
def test_only_the_prefill_that_was_asked_may_know_nothing_of_a_transfer(asked: str, said: str):
    logs = [failed_pull(asked)] + [Script(name, role="kv_producer").closes() for name in ("here", "beside")]
    ((_, failed),) = joined(*(log.events for log in logs)).findings
    assert failed.kind == "load_failed"
    assert said in say(failed).culprit
    assert "beside" not in say(failed).culprit


def test_of_several_transfers_in_a_finding_the_one_that_the_other_log_knows_is_told():
    prefill, decode = Script("prefill"), Script("decode", role="kv_consumer")
    for request, transfer, blocks in (("P-1", "x1", (5, 12)), ("P-2", "x2", (20, 27))):
        prefill.runs(request)
        prefill.sends(transfer, request)
        prefill.holds(transfer, request, blocks=blocks)
    prefill.passes(500)
    for request, transfer in (("P-1", "x1"), ("P-2", "x2")):
        prefill.rank_sent(transfer=transfer, request=request, rank=0, outcome="expired")
        prefill.send_expired(transfer=transfer, request=request, expired_ranks=((0, 0),))
    decode.arrives("R")
    decode.receives("x2", "R", blocks=(30, 37))
    leaks = [each for _, each in joined(prefill.closes().events, decode.events).findings if each.kind == "leak"]
    (leak,) = [each for each in leaks if "P-2" in each.requests]
    assert "the decode engine decode still waits for it" in say(leak).culprit


def test_of_several_engines_of_a_side_the_one_that_knows_a_transfer_speaks():
    logs = BY_ID["S4"].logs()
    idle = Script("idle").closes().events
    told = {finding.kind: say(finding).culprit for _, finding in joined(logs["prefill"], logs["decode"], idle).findings}
    assert "idle" not in told["leak"]
    assert "idle" not in told["stall"]


def test_one_log_alone_is_left_as_it_is():
    events = BY_ID["S3"].logs()["engine"]
    assert [finding for _, finding in joined(events).findings] == replay(events).findings


def test_logs_are_read_again_only_when_a_finding_names_what_another_may_know():
    healthy = Script("one")
    healthy.runs("R")
    healthy.finishes("R")
    results = [replay(healthy.closes().events)] * 2

    def never() -> list[ev.AnyEvent]:
        raise AssertionError("read again for nothing")

    assert join(results, ["a", "b"], [never, never]).findings == []


def test_the_report_puts_both_sides_on_one_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = [str(script.save(tmp_path / f"{name}.db")) for name, script in BY_ID["S4"].story().items()]
    assert cli.run(["replay", *paths]) == 1
    out = capsys.readouterr().out
    assert "Evidence: transfer x1, the number of the log in front" in out
    assert "only the clocks of the\n    hosts say how the logs lie between each other" in out
    first = out.index("unreported_failure".upper())
    assert first < out.index("STALL (proven)") < out.index("LEAK (proven)")
