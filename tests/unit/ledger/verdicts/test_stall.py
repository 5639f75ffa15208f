"""What a stall claims and what it does not: what is in flight, how certain it is, and who waits behind it."""

import msgspec
import pytest

from ledger.replay.fold import replay
from ledger.report.wording import say
from ledger.verdicts.history import KEPT_ENDED
from ledger.verdicts.shared.doubts import CodeDisagrees, GivesUpByItself, SchedulerLost
from ledger.verdicts.stall import NoAnswer, Pinned
from tests.incidents.script import Script
from tests.unit.ledger.verdicts.shared import (
    comes_again_while_its_load_is_open,
    kinds,
    only,
    waiting_job,
)


def test_a_job_that_is_open_for_less_than_the_limit_is_in_flight():
    log = waiting_job(seconds=59)
    assert replay(log.events, "live").findings == []
    assert kinds(replay(log.events, "torn")) == ["torn_log proven"]
    assert replay(log.closes().events).findings == []


def test_a_job_that_is_open_for_longer_is_a_stall_and_proven_when_the_log_was_closed():
    log = waiting_job(seconds=61)
    assert kinds(replay(log.events, "live")) == ["stall suspected"]
    assert kinds(replay(log.events, "torn")) == ["stall suspected", "torn_log proven"]
    assert kinds(replay(log.events, "as_of")) == ["stall suspected"]
    assert kinds(replay(log.closes().events)) == ["stall proven"]


def test_what_the_engine_suspected_itself_is_late_whatever_the_time():
    log = waiting_job(seconds=1)
    log.stall_suspected(job=0, request="R", waited_ns=1, missing=((1, 1),))
    assert kinds(replay(log.closes().events)) == ["stall proven"]


def test_a_suspicion_that_was_wrong_leaves_no_finding():
    log = waiting_job(seconds=70)
    log.stall_suspected(job=0, request="R", waited_ns=70_000_000_000, missing=((1, 1),))
    log.ends("1-1")
    log.reports(0, 1)
    log.passes(1, steps=1)
    log.request_scheduled(request="Q", generation=1)
    log.finishes("Q")
    assert replay(log.closes().events).findings == []


@pytest.mark.parametrize("why", [{}, {"reason": "exception", "exception": "ValueError"}])
def test_of_an_engine_that_has_shut_down_no_stack_is_asked_for_and_no_restart(why: dict[str, str]):
    hanging = waiting_job(seconds=61)
    lost = waiting_job(seconds=1)
    lost.ends("1-1", "failed", code="TRANSFER_FAILED", raw="-800")
    lost.passes(61, steps=100)
    broken = waiting_job(seconds=1)
    broken.ends("1-1")
    broken.rank_completed(job=0, rank=0)
    broken.invariant_violated(rule="rank_reported_twice", detail="in words", job=0, rank=0)
    for log, kind in ((hanging, "stall"), (lost, "leak"), (broken, "leak")):
        finding = next(each for each in replay(log.closes(**why).events).findings if each.kind == kind)
        told = f"{say(finding).advice} {say(finding).also}"
        assert "The engine has shut down" in told
        assert "restart" not in told.lower()
        assert "Take a stack" not in told


def test_a_wait_names_whom_it_waits_for_what_it_holds_and_who_waits_behind_it():
    finding = only(replay(waiting_job(seconds=61).passes(2).closes().events))
    assert finding.jobs == (0,)
    assert finding.ranks == (1,)
    assert finding.blocks == tuple((0, block) for block in range(5, 13))
    assert finding.requests == ("R", "Q")
    assert isinstance(finding.facts, NoAnswer)
    assert [(view.rank, view.doing) for view in finding.facts.first.missing] == [(1, "in_call")]
    assert finding.facts.pinned == Pinned(jobs=1, blocks=8, pool=99)
    assert "rank 1 began put #1 at event" in say(finding).culprit
    assert finding.suffering == ("Q",)
    assert "1 open job pins 8 of 99 blocks" in say(finding).culprit
    assert finding.since_seq == 4


def test_a_request_that_waits_has_waited_since_it_was_queued_whatever_was_looked_up_meanwhile():
    log = waiting_job(seconds=90)
    log.passes(5)
    log.arrives("W")
    for _ in range(500):
        log.lookup_answered(request="Q", generation=1, hit_tokens=0)
    log.preempts("W")
    finding = only(replay(log.closes().events))
    assert finding.suffering == ("Q",)
    assert say(finding).impact == ("request Q had waited to run for 5.50 s",)


def test_a_load_that_was_never_given_to_the_workers_is_blamed_on_the_scheduler():
    log = Script()
    log.arrives("R")
    log.load_planned(load=0, request="R", generation=1, blocks=((0, ((1, 4),)),), tokens=64)
    log.passes(100)
    finding = only(replay(log.closes().events))
    assert finding.kind == "stall"
    assert "this log does not show that it was given to the workers" in say(finding).title


def test_an_idle_engine_with_no_request_is_not_stuck():
    log = Script()
    log.runs("R")
    log.finishes("R")
    log.passes(10_000, steps=5)
    assert replay(log.closes().events).findings == []


def test_a_request_that_runs_for_hours_is_not_stuck():
    log = Script()
    log.runs("R")
    log.arrives("Q")
    log.passes(10_000, steps=50_000)
    assert replay(log.closes().events).findings == []


def test_a_gap_of_the_scheduler_makes_open_work_undecidable_until_the_book_comes_again():
    log = waiting_job(seconds=1)
    log.gap(origin="scheduler", dropped=5, reason="the queue was full")
    log.passes(100, steps=1)
    log.request_scheduled(request="Q", generation=1)
    finding = only(replay(log.events, "live"))
    assert (finding.kind, finding.certainty) == ("stall", "undecidable")
    assert isinstance(finding.doubt, SchedulerLost)
    assert "5 events of scheduler are lost" in say(finding).doubt
    log.checkpoint(digest=log.state.digest(), book=msgspec.Raw(log.state.encode()))
    assert kinds(replay(log.closes().events)) == ["stall proven"]


def test_a_file_that_disagrees_with_the_code_proves_nothing_of_what_is_open():
    log = waiting_job(seconds=100)
    log.checkpoint(digest="0" * 64)
    finding = only(replay(log.closes().events))
    assert (finding.kind, finding.certainty) == ("stall", "undecidable")
    assert isinstance(finding.doubt, CodeDisagrees)
    assert "--check" in say(finding).doubt


def test_a_transfer_that_the_engine_would_still_give_up_by_itself_is_suspected_at_most():
    log = Script("decode")
    log.arrives("R")
    log.receives("x1", "R", blocks=(5, 12), timeout_s=540)
    log.passes(100, steps=10)
    log.arrives("Q")
    finding = only(replay(log.events, "live"))
    assert (finding.kind, finding.certainty) == ("stall", "suspected")
    assert finding.doubt == GivesUpByItself(what="recv", transfer="x1", deadline_ns=540_000_000_000)
    assert "9 min 00 s" in say(finding).doubt
    log.passes(500, steps=10)
    assert kinds(replay(log.closes().events)) == ["stall proven"]


def test_of_two_transfers_that_miss_a_rank_only_the_one_past_its_time_is_proven_to_hang():
    log = Script("decode")
    log.arrives("A")
    log.receives("xa", "A", blocks=(1, 8), timeout_s=540)
    log.passes(500, steps=500)
    log.arrives("B")
    log.receives("xb", "B", blocks=(11, 18), timeout_s=540)
    log.passes(100, steps=500)
    found = replay(log.closes().events).findings
    assert [(each.certainty, each.requests) for each in found] == [("proven", ("A",)), ("suspected", ("B",))]


@pytest.mark.parametrize("second_life_ends", [True, False])
def test_a_load_outlives_the_life_of_its_request_that_it_was_for(second_life_ends: bool):
    log = comes_again_while_its_load_is_open()
    log.passes(29)
    if second_life_ends:
        log.finishes("R")
    log.passes(30)
    finding = replay(log.closes().events).findings[0]
    assert finding.kind == "stall"
    assert "the request was aborted after 1.00 s" in say(finding).title
    assert say(finding).impact[0] == "request R was aborted after 1.00 s without its KV"


def test_how_a_request_ended_is_remembered_as_long_as_its_load_is_open():
    log = comes_again_while_its_load_is_open()
    for number in range(2 * KEPT_ENDED + 1):
        log.runs(f"Q{number}")
        log.finishes(f"Q{number}")
    finding = replay(log.closes().events).findings[0]
    assert "the request was aborted after 1.00 s" in say(finding).title
