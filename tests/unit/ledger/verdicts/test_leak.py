"""What a leak claims and what it does not: lost reports, what a gap hides, and sends that nobody fetched."""

import msgspec
import pytest

from ledger.replay.fold import replay
from ledger.report.wording import say
from ledger.verdicts.base import Finding
from ledger.verdicts.leak import Expired
from ledger.verdicts.shared.doubts import LogGoesOn, LogIsLive
from tests.incidents.script import Script
from tests.unit.ledger.verdicts.shared import (
    kinds,
    loses_events_of_the_scheduler,
    only,
    waiting_job,
)


def test_a_rank_is_not_called_silent_where_no_address_was_free_for_what_workers_send():
    def waits(*gaps: str) -> Finding:
        log = Script(ranks=2)
        for reason in gaps:
            log.gap(origin="workers", dropped=0, reason=reason)
        log.runs("R")
        log.saves(0, "R", blocks=(5, 12))
        log.reports(0, 0)
        log.passes(61, steps=100)
        return only(replay(log.closes().events))

    nothing = "this log has nothing from rank 1 about job 0"
    assert say(waits()).culprit == nothing
    assert say(waits("evidence cannot be received at tcp://host:1: in use")).culprit != nothing


@pytest.mark.parametrize("ending", ["live", "as_of"])
def test_a_log_that_goes_on_is_not_said_to_leak_for_ever(ending: str):
    log = Script(ranks=2, settings={"stall_suspect_s": "5.0"})
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.passes(6)
    log.arrives("Q")
    finding = only(replay(log.events, ending))
    assert finding.doubt == (LogIsLive() if ending == "live" else LogGoesOn())
    assert "had not settled by then" in say(finding).title
    assert "restart" not in say(finding).advice
    assert "Replay the log" in say(finding).advice


def test_the_limit_is_that_of_the_engine():
    log = Script(ranks=2, settings={"stall_suspect_s": "5.0"})
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.passes(6)
    assert kinds(replay(log.closes().events)) == ["leak proven"]


def test_a_put_that_raised_is_a_leak_as_soon_as_its_report_would_have_come():
    log = waiting_job(seconds=0.1)
    log.ends("1-1", "raised", exception="ValueError")
    log.passes(0.5, steps=8)
    log.arrives("Q2")
    assert replay(log.events, "live").findings == []
    log.passes(2, steps=50)
    log.arrives("Q3")
    finding = only(replay(log.events, "live"))
    assert (finding.kind, finding.certainty, finding.ranks) == ("leak", "suspected", (1,))
    assert "ValueError" in say(finding).culprit


@pytest.mark.parametrize("ahead_s", [0, 86_400, -86_400])
def test_the_clock_of_another_host_makes_no_report_late_and_hides_no_lost_one(ahead_s: int):
    log = waiting_job(seconds=0.1)
    log.ends("1-1", "failed", code="TRANSFER_FAILED", raw="-800")
    log.passes(0.02, steps=20)
    log.arrives("Q2")

    def findings() -> list[str]:
        shifted = [
            msgspec.structs.replace(event, mono_ns=event.mono_ns + ahead_s * 10**9)
            if event.source == "rank 1"
            else event
            for event in log.events
        ]
        return kinds(replay(shifted, "live"))

    assert findings() == []
    log.passes(2)
    log.arrives("Q3")
    assert findings() == ["leak suspected"]


@pytest.mark.parametrize("before", [0, 1, 5, 14, 1900, 2030, 2040])
def test_a_lost_report_is_found_wherever_it_stands_in_the_log(before: int):
    log = Script()
    for _ in range(before):
        log.lookup_deferred(request="N", generation=1)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    call = log.put_begins(0, keys="abcdefgh")
    log.ends(call, "raised", exception="RuntimeError")
    log.finishes("R")
    for _ in range(3):
        log.passes(10, steps=13)
        log.checks()
    log.log_closed()
    assert kinds(replay(log.events)) == ["leak proven"]


@pytest.mark.parametrize("answered_before", [True, False])
def test_an_older_job_behind_a_gap_takes_neither_proof_nor_cause_from_a_job_that_was_seen_whole(
    *, answered_before: bool
):
    log = Script()
    if answered_before:
        log.runs("S")
        log.stores(0, "S", blocks=(21, 28), keys="ijklmnop")
        log.finishes("S")
    log.runs("A")
    log.saves(1, "A", blocks=(1, 8))
    log.gap(origin="rank 0", dropped=1, reason="queue full")
    log.passes(100, steps=100)
    log.runs("B")
    log.saves(2, "B", blocks=(11, 18))
    call = log.put_begins(2, keys="abcdefgh")
    log.ends(call, "raised", exception="RuntimeError")
    log.passes(100, steps=1000)
    hidden, seen = replay(log.closes().events).findings
    assert (hidden.kind, hidden.certainty, hidden.jobs) == ("leak", "undecidable", (1,))
    assert (seen.kind, seen.certainty, seen.jobs) == ("leak", "proven", (2,))
    assert "raised RuntimeError" in say(seen).culprit


def test_a_silent_job_and_one_whose_put_raised_are_told_each_by_what_its_rank_did():
    log = Script()
    log.runs("S")
    log.stores(0, "S", blocks=(21, 28), keys="ijklmnop")
    log.finishes("S")
    for job, request, blocks in ((1, "A", (1, 8)), (2, "B", (11, 18))):
        log.runs(request)
        log.saves(job, request, blocks=blocks)
    call = log.put_begins(2, keys="abcdefgh")
    log.ends(call, "raised", exception="RuntimeError")
    log.passes(100, steps=1000)
    silent, raised = replay(log.closes().events).findings
    assert (silent.jobs, raised.jobs) == ((1,), (2,))
    assert "raised RuntimeError" in say(raised).culprit


def test_a_put_that_ended_well_may_be_followed_by_another_one_so_it_alone_is_no_leak():
    log = waiting_job(seconds=0.1)
    log.ends("1-1")
    log.passes(10, steps=500)
    assert replay(log.closes().events).findings == []


def test_a_finding_of_several_waits_names_the_request_of_its_first_and_counts_the_rest():
    log = Script(ranks=2)
    log.runs("P")
    log.stores(0, "P", blocks=(1, 8))
    log.finishes("P")
    for job in (1, 2, 3):
        log.runs(f"R{job}")
        log.saves(job, f"R{job}", blocks=(10 * job, 10 * job + 7))
        log.reports(job, 0)
        log.finishes(f"R{job}")
    log.passes(100)
    log.steps()
    log.arrives("Q")
    assert say(only(replay(log.events, "live"))).title == (
        "store job 1 of request R1 had not settled by then: no report from rank 1 in 1 min 40 s; 2 more jobs likewise; "
        "24 blocks held"
    )
    log.put_begins(1, 1)
    log.put_begins(2, 1)
    assert say(only(replay(log.closes().events))).title == (
        "store job 1 of request R1 has been open for 1 min 40 s; no answer from rank 1 is in this log; "
        "1 more job likewise"
    )


def expires(lost: str, *, open_still: bool = False) -> Finding:
    """Return what is found of a send of two ranks, of which rank 0 is served, when events of the scheduler are lost.

    Args:
        lost: what the lost events tell: "nothing", of rank 0, "ready" or that the send was ready, or "no" gap.
        open_still: the log ends before it expires.
    """
    log = Script("prefill", ranks=2)
    log.runs("R", tokens=128)
    log.sends("x1", "R")
    before = len(log.events)
    log.holds("x1", "R", blocks=(5, 12))
    if lost == "ready":
        del log.events[before:]
        loses_events_of_the_scheduler(log)
    before = len(log.events)
    if lost in ("rank 0", "no"):
        log.pushes("x1", "R", 0)
    if lost in ("nothing", "rank 0"):
        del log.events[before:]
        loses_events_of_the_scheduler(log)
    log.passes(480, steps=9000)
    if not open_still:
        for rank in sorted(log.state.book.sends["R"].waiting):
            log.rank_sent(transfer="x1", request="R", rank=rank, outcome="expired")
        expired = ((1, 1),) if lost in ("rank 0", "no") else ((0, 1),)
        log.send_expired(transfer="x1", request="R", expired_ranks=expired)
    return only(replay(log.closes().events))


def test_that_nobody_asked_for_a_transfer_is_not_said_where_the_question_may_be_lost():
    nobody = "nobody asked for this transfer"
    assert (expires("no").certainty, nobody in say(expires("no")).culprit) == ("proven", False)
    for lost, asked, hidden in (("no", True, False), ("rank 0", True, False), ("nothing", False, True)):
        facts = expires(lost).facts
        assert isinstance(facts, Expired)
        assert (facts.asked, facts.hidden) == (asked, hidden)
    served = expires("rank 0")
    assert (served.certainty, say(served).culprit) == (
        "proven",
        "some decode workers asked and others did not: check that all ranks of the decode engine were up",
    )
    hidden = expires("nothing")
    assert (hidden.certainty, say(hidden).inferred) == ("undecidable", "")
    assert say(hidden).culprit == f"the decode engine, or the router before it, if {nobody}"
    assert "that somebody asked for this transfer may be among them" in say(hidden).doubt
    assert "nobody has asked" not in say(expires("rank 0", open_still=True)).culprit
    assert "nobody has asked" in say(expires("nothing", open_still=True)).culprit


def test_how_long_a_send_was_held_is_not_said_where_its_beginning_is_lost():
    finding = expires("ready")
    assert isinstance(finding.facts, Expired)
    assert finding.facts.ready is None
    assert say(finding).title == "send x1 of request R was freed only because it expired"
    assert say(finding).impact == ("the blocks of send x1 were held until it expired, and are free again",)


def test_expired_sends_of_several_requests_are_told_by_the_first():
    log = Script("prefill")
    for number in range(3):
        log.runs(f"R{number}")
        log.sends(f"x{number}", f"R{number}")
        log.holds(f"x{number}", f"R{number}", blocks=(10 * number + 1, 10 * number + 8))
    log.passes(480, steps=100)
    for number in range(3):
        log.rank_sent(transfer=f"x{number}", request=f"R{number}", rank=0, outcome="expired")
        log.send_expired(transfer=f"x{number}", request=f"R{number}", expired_ranks=((0, 0),))
    assert say(only(replay(log.closes().events))).title == (
        "send x0 of request R0 held 8 blocks for 8 min 00 s until it expired; nobody fetched them; "
        "2 more sends likewise"
    )


def test_ranks_that_answered_before_are_not_called_missing_for_ever():
    log = Script(ranks=2)
    log.runs("A")
    log.stores(0, "A", blocks=(1, 8))
    for number in (1, 2):
        log.saves(number, "A", blocks=(1 + 10 * number, 8 + 10 * number))
        log.reports(number, 0)
    log.finishes("A")
    log.passes(100)
    finding = only(replay(log.closes().events))
    assert (finding.kind, finding.jobs, finding.ranks) == ("leak", (1, 2), (1,))


@pytest.mark.parametrize(
    ("dropped", "lost"),
    [(0, "an unknown number of events of rank 0 are"), (1, "1 event of rank 0 is"), (2, "2 events of rank 0 are")],
)
def test_one_lost_event_is_told_in_the_singular(dropped: int, lost: str):
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.gap(origin="rank 0", dropped=dropped, reason="queue full")
    log.passes(100, steps=100)
    assert say(only(replay(log.closes().events))).doubt.startswith(f"{lost} lost at event 6 (queue full)")


def test_without_evidence_nothing_is_claimed_of_what_a_rank_did():
    log = Script(ranks=2, settings={"evidence": "False"})
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.reports(0, 0)
    log.passes(100)
    finding = only(replay(log.closes().events))
    assert finding.kind == "leak"
    assert "what rank 1 did is not recorded" in say(finding).culprit
