"""What the verdicts claim and what they do not: certainty, what is in flight, what a gap hides, who is blamed."""

import contextlib

import msgspec
import pytest

from ledger import events as ev
from ledger.errors import Refused
from ledger.replay.fold import Replay, Result, replay
from ledger.replay.incidents import grouped
from ledger.report.wording import public, say
from ledger.state.apply import State
from ledger.verdicts import poison
from ledger.verdicts.base import Finding
from ledger.verdicts.history import KEPT_OVER
from ledger.verdicts.poison import Poison
from tests.incidents.script import Script


def only(result: Result) -> Finding:
    assert [finding.kind for finding in result.findings] == [result.findings[0].kind]
    return result.findings[0]


def kinds(result: Result) -> list[str]:
    return [f"{finding.kind} {finding.certainty}" for finding in result.findings]


def waiting_job(*, seconds: float, steps: int = 1000, ranks: int = 2) -> Script:
    log = Script(ranks=ranks)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.reports(0, 0)
    log.put_begins(0, 1, keys="abcdefgh")
    log.passes(seconds, steps=steps)
    log.arrives("Q")
    return log


# --- what is in flight is no finding ----------------------------------------------------------------------------------


def test_a_job_that_is_open_for_less_than_the_limit_is_in_flight():
    log = waiting_job(seconds=59)
    assert replay(log.events, "live").findings == []
    assert kinds(replay(log.events, "torn")) == ["torn_log proven"]
    assert replay(log.closes().events).findings == []


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

    nothing = "nothing of rank 1 for job 0 is in this log"
    assert say(waits()).culprit == nothing
    assert say(waits("evidence cannot be received at tcp://host:1: in use")).culprit != nothing


def test_of_a_torn_end_only_that_there_is_no_log_closed_is_proven():
    finding = only(replay(waiting_job(seconds=1).events, "torn"))
    assert say(finding).title.endswith("there is no log_closed")
    for reading in ("the process ended hard", "its disk took nothing", "this copy lacks the end"):
        assert reading in say(finding).culprit
    assert "killed" not in say(finding).title + say(finding).culprit
    assert "If the disk took what it was given, the engine's last 50 ms" in say(finding).advice


def test_a_job_that_is_open_for_longer_is_a_stall_and_proven_when_the_log_was_closed():
    log = waiting_job(seconds=61)
    assert kinds(replay(log.events, "live")) == ["stall suspected"]
    assert kinds(replay(log.events, "torn")) == ["stall suspected", "torn_log proven"]
    assert kinds(replay(log.events, "as_of")) == ["stall suspected"]
    assert kinds(replay(log.closes().events)) == ["stall proven"]


@pytest.mark.parametrize("ending", ["live", "as_of"])
def test_a_log_that_goes_on_is_not_said_to_leak_for_ever(ending: str):
    log = Script(ranks=2, settings={"stall_suspect_s": "5.0"})
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.passes(6)
    log.arrives("Q")
    finding = only(replay(log.events, ending))
    assert "had not settled by then" in say(finding).title
    assert "restart" not in say(finding).advice
    assert "Replay the log" in say(finding).advice


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


def test_the_limit_is_that_of_the_engine():
    log = Script(ranks=2, settings={"stall_suspect_s": "5.0"})
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.passes(6)
    assert kinds(replay(log.closes().events)) == ["leak proven"]


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


def test_two_jobs_that_were_seen_whole_show_a_missing_rank_whatever_a_gap_hides_of_an_older_one():
    def found(jobs: int) -> Finding:
        log = Script(ranks=2)
        for job in range(jobs):
            log.runs(f"R{job}")
            log.saves(job, f"R{job}", blocks=(1 + 10 * job, 8 + 10 * job))
            log.reports(job, 0)
            log.finishes(f"R{job}")
            if job == 0:
                log.gap(origin="rank 1", dropped=1, reason="queue full")
        log.passes(100)
        return only(replay(log.closes().events))

    assert (found(2).kind, found(2).certainty) == ("missing_ranks", "undecidable")
    assert (found(3).kind, found(3).certainty, found(3).jobs) == ("missing_ranks", "proven", (0, 1, 2))


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


# --- who is blamed ----------------------------------------------------------------------------------------------------


def test_a_wait_names_whom_it_waits_for_what_it_holds_and_who_waits_behind_it():
    finding = only(replay(waiting_job(seconds=61).passes(2).closes().events))
    assert finding.jobs == (0,)
    assert finding.ranks == (1,)
    assert finding.blocks == tuple((0, block) for block in range(5, 13))
    assert finding.requests == ("R", "Q")
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


def test_one_missing_rank_of_one_job_is_an_accident_and_of_two_jobs_a_system():
    for jobs, expected in ((1, ["leak proven"]), (2, ["missing_ranks proven"])):
        log = Script(ranks=2)
        for number in range(jobs):
            log.runs(f"R{number}")
            log.saves(number, f"R{number}", blocks=(1 + 10 * number, 8 + 10 * number))
            log.reports(number, 0)
            log.finishes(f"R{number}")
        log.passes(100)
        assert kinds(replay(log.closes().events)) == expected


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
        "store job 1 of request R1 had not settled by then: no report of rank 1 in 1 min 40 s; 2 more jobs likewise; "
        "24 blocks held"
    )
    log.put_begins(1, 1)
    log.put_begins(2, 1)
    assert say(only(replay(log.closes().events))).title == (
        "store job 1 of request R1 has been open for 1 min 40 s; no answer of rank 1 is in this log; "
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
    served = expires("rank 0")
    assert (served.certainty, say(served).culprit) == (
        "proven",
        "some decode workers asked and others did not: see whether all ranks of the decode engine lived",
    )
    hidden = expires("nothing")
    assert (hidden.certainty, say(hidden).inferred) == ("undecidable", "")
    assert say(hidden).culprit == f"the decode engine, or the router before it, if {nobody}"
    assert "that somebody asked for this transfer may be among them" in say(hidden).doubt
    assert "nobody has asked" not in say(expires("rank 0", open_still=True)).culprit
    assert "nobody has asked" in say(expires("nothing", open_still=True)).culprit


def test_how_long_a_send_was_held_is_not_said_where_its_beginning_is_lost():
    finding = expires("ready")
    assert say(finding).title == "send x1 of request R was freed only because it expired"
    assert say(finding).impact == ("the blocks of send x1 were held in vain and are free again",)


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
        "send x0 of request R0 held 8 blocks for 8 min 00 s in vain, and was freed only because it expired; "
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


def test_a_load_that_was_never_given_to_the_workers_is_blamed_on_the_scheduler():
    log = Script()
    log.arrives("R")
    log.load_planned(load=0, request="R", generation=1, blocks=((0, ((1, 4),)),), tokens=64)
    log.passes(100)
    finding = only(replay(log.closes().events))
    assert finding.kind == "stall"
    assert "that it was given to the workers is not in this log" in say(finding).title


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


# --- what is hidden ---------------------------------------------------------------------------------------------------


def test_a_gap_of_the_scheduler_makes_open_work_undecidable_until_the_book_comes_again():
    log = waiting_job(seconds=1)
    log.gap(origin="scheduler", dropped=5, reason="the queue was full")
    log.passes(100, steps=1)
    log.request_scheduled(request="Q", generation=1)
    finding = only(replay(log.events, "live"))
    assert (finding.kind, finding.certainty) == ("stall", "undecidable")
    assert "5 events of scheduler are lost" in say(finding).doubt
    log.checkpoint(digest=log.state.digest(), book=msgspec.Raw(log.state.encode()))
    assert kinds(replay(log.closes().events)) == ["stall proven"]


def test_a_report_for_a_job_that_a_gap_may_have_hidden_is_undecidable():
    log = Script()
    log.gap(origin="scheduler", dropped=5, reason="the queue was full")
    log.rank_completed(job=7, rank=0)
    finding = replay(log.events, "live").findings[0]
    assert (finding.kind, finding.certainty) == ("stale_completion", "undecidable")


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


def test_a_file_that_disagrees_with_the_code_proves_nothing_of_what_is_open():
    log = waiting_job(seconds=100)
    log.checkpoint(digest="0" * 64)
    finding = only(replay(log.closes().events))
    assert (finding.kind, finding.certainty) == ("stall", "undecidable")
    assert "--check" in say(finding).doubt


def test_a_transfer_that_the_engine_would_still_give_up_by_itself_is_suspected_at_most():
    log = Script("decode")
    log.arrives("R")
    log.receives("x1", "R", blocks=(5, 12), timeout_s=540)
    log.passes(100, steps=10)
    log.arrives("Q")
    finding = only(replay(log.events, "live"))
    assert (finding.kind, finding.certainty) == ("stall", "suspected")
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


# --- poison -----------------------------------------------------------------------------------------------------------


def given_away(*, put_step: int, grant_first: bool = True) -> Script:
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    early = "" if grant_first else log.put_begins(0, keys="abcdefgh")
    log.preempts("R")
    log.takes_back("R", (5, 12))
    log.gives("R2", (5, 8))
    log.passes(0.1, steps=put_step)
    call = early or log.put_begins(0, keys="abcdefgh")
    log.passes(0.1)
    log.ends(call)
    log.reports(0)
    log.request_aborted(request="R", generation=2)
    return log.closes()


def test_a_put_that_begins_a_step_after_its_block_was_given_away_is_proven_poison():
    finding = only(replay(given_away(put_step=1).events))
    assert (finding.kind, finding.certainty) == ("poison", "proven")
    assert finding.blocks == ((0, 5), (0, 6), (0, 7), (0, 8))
    assert [entry.key for entry in finding.tainted] == ["a", "b", "c", "d"]


def test_a_put_in_the_same_step_may_have_read_before_the_new_owner_wrote():
    finding = only(replay(given_away(put_step=0).events))
    assert (finding.kind, finding.certainty) == ("poison", "suspected")
    assert "may have read blocks" in say(finding).title
    assert "may hold KV of another request" in say(finding).title
    assert "only the bytes would tell" in say(finding).doubt


def test_keys_of_a_put_that_has_not_returned_are_not_said_to_be_stored():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    log.preempts("R")
    log.takes_back("R", (5, 12))
    log.gives("R2", (5, 8))
    log.passes(0.1, steps=1)
    log.put_begins(0, keys="abcdefgh")
    log.steps(1)
    finding = only(replay(log.events, "live"))
    assert "no return of a put of 4 keys is in this log, and it may store" in say(finding).title
    assert "hold KV" not in say(finding).title


def test_a_put_that_was_open_when_its_block_was_given_away_is_suspected():
    finding = only(replay(given_away(put_step=3, grant_first=False).events))
    assert (finding.kind, finding.certainty) == ("poison", "suspected")


def test_a_block_that_comes_back_in_another_group_is_the_same_memory():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    log.preempts("R")
    log.blocks_allocated(request="R2", generation=1, blocks=((1, ((6, 7),)),))
    log.steps(2)
    log.puts(0, keys="abcdefgh")
    log.reports(0)
    log.request_aborted(request="R", generation=2)
    finding = only(replay(log.closes().events))
    assert finding.blocks == ((0, 6), (0, 7))
    assert [entry.key for entry in finding.tainted] == ["b", "c"]


def test_a_put_that_had_ended_before_is_no_poison_even_if_its_evidence_comes_late():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    began = log.put_begins(0, keys="abcdefgh")
    log.preempts("R")
    log.gives("R2", (5, 12))
    log.passes(-0.002)  # the call had returned before, by the one clock of this host
    with log.rank(0):
        log.transfer_finished(transfer=began, rank=0, op="put", job=0, request="R", keys=8, duration_ns=1)
    log.passes(0.1)
    log.reports(0)
    assert [each for each in replay(log.closes().events).findings if each.kind == "poison"] == []


def test_keys_that_were_not_stored_are_not_tainted():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    log.gives("R2", (5, 12))
    log.steps()
    call = log.put_begins(0, keys="abcdefgh")
    log.ends(call, "failed", code="KV_OOM", raw="-200")
    log.reports(0, 0, "failed", code="KV_OOM", raw="-200")
    log.finishes("R")
    finding = only(replay(log.closes().events))
    assert (finding.kind, finding.certainty) == ("poison", "suspected")
    assert finding.tainted == ()


def test_a_block_that_goes_to_another_life_of_the_same_request_is_suspected():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    log.preempts("R")
    log.gives("R", (5, 12), generation=2)
    log.resumes("R")
    log.steps(3)
    log.puts(0, keys="abcdefgh")
    log.reports(0)
    log.finishes("R", 2)
    finding = only(replay(log.closes().events))
    assert (finding.kind, finding.certainty) == ("poison", "suspected")
    assert "lives of one request" in say(finding).doubt


def caught(log: Script, key: str, block: int, *, removed: bool = True, job: int = 0) -> None:
    with log.rank(0):
        log.poison_caught(
            rank=0, key=key, group=0, block=block, before="aa", after="bb", removed=removed, request="R", job=job
        )


def test_a_block_that_a_worker_saw_change_is_proven_poison():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    call = log.put_begins(0, keys="abcdefgh")
    log.gives("R2", (5, 6))
    log.ends(call)
    caught(log, "a", 5)
    log.reports(0, 0, "failed", code="CRC_MISMATCH")
    log.finishes("R")
    finding = only(replay(log.closes().events))
    assert (finding.kind, finding.certainty) == ("poison", "proven")
    assert [(entry.key, entry.certainty, entry.removed) for entry in finding.tainted] == [
        ("a", "proven", True),
        ("b", "suspected", False),
    ]


def test_a_block_that_changed_without_a_known_owner_is_told_too():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.puts(0, keys="abcdefgh")
    caught(log, "c", 7, removed=False)
    log.reports(0, 0, "failed", code="CRC_MISMATCH")
    log.finishes("R")
    finding = only(replay(log.closes().events))
    assert (finding.kind, finding.certainty, finding.blocks) == ("poison", "proven", ((0, 7),))
    assert "1 could not be removed" in say(finding).title


def test_blocks_of_a_pinned_job_that_its_request_gives_up_are_no_finding():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.finishes("R")
    log.takes_back("R", (5, 12))
    log.puts(0, keys="abcdefgh")
    log.reports(0)
    assert replay(log.closes().events).findings == []


def test_a_get_that_goes_on_into_blocks_of_a_new_owner_is_poison_of_that_one():
    log = Script(ranks=2)
    log.arrives("R")
    log.loads(0, "R", blocks=(5, 12))
    log.gets(0, 0, keys="abcdefgh")
    call = log.get_begins(0, 1, keys="abcdefgh")
    log.request_aborted(request="R", generation=1, was="loading")
    log.takes_back("R", (5, 12))
    log.gives("R2", (5, 12))
    log.passes(0.1, steps=5)
    log.ends(call)
    result = replay(log.events, "live")
    assert kinds(result) == ["early_free proven", "poison suspected"]
    assert result.findings[1].requests == ("R", "R2")


def two_recvs_into_the_same_blocks(*, own_is_over: bool) -> Script:
    """The blocks of an open recv were given to a request that waits for its own; the older pull is late."""
    log = Script("decode")
    for transfer, request in (("x1", "R"), ("x2", "R2")):
        log.arrives(request)
        log.steps()
        log.gives(request, (1, 8))
        log.recv_registered(
            transfer=transfer, request=request, generation=1, blocks=((0, ((1, 8),)),), ranks=((0, 0),), timeout_ns=1
        )
        log.peers_named(transfer=transfer, request=request, rank=0, peers=("tp0 pp0",))
        if transfer == "x1":
            log.request_aborted(request="R", generation=1, was="loading")
    log.steps(3)
    pulls = (("x2", "R2"), ("x1", "R")) if own_is_over else (("x1", "R"), ("x2", "R2"))
    for transfer, request in pulls:
        with log.rank(0):
            log.transfer_started(transfer=transfer, rank=0, op="pull", request=request, blocks=((0, ((1, 8),)),))
        log.passes(0.01)
        log.pull_ends(transfer, request)
        log.peer_answers(transfer, request)
        log.received(transfer, request)
        log.steps(3)
    log.request_scheduled(request="R2", generation=1)
    log.finishes("R2")
    return log.closes()


def test_what_is_pulled_into_blocks_before_their_new_owners_own_pull_is_not_proven_to_stay():
    early_free, poison = replay(two_recvs_into_the_same_blocks(own_is_over=False).events).findings
    assert (early_free.kind, early_free.certainty) == ("early_free", "proven")
    assert (poison.kind, poison.certainty) == ("poison", "suspected")
    assert "what request R2 itself waited for may have come into the blocks afterwards" in say(poison).doubt


def test_what_is_pulled_into_blocks_after_their_new_owners_own_pull_is_proven_poison():
    log = two_recvs_into_the_same_blocks(own_is_over=True)
    assert kinds(replay(log.events)) == ["early_free proven", "poison proven"]


@pytest.mark.parametrize("who_runs", ["the owner", "its id again", "its id behind a gap"])
def test_a_run_of_an_id_that_came_back_writes_nothing_into_the_blocks_of_its_first_life(who_runs: str):
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    log.steps()
    log.preempts("R")
    log.steps()
    log.arrives("X")
    log.gives("X", (5, 12))
    log.lookup_answered(request="X", generation=1, hit_tokens=128)
    log.load_planned(load=0, request="X", generation=1, blocks=((0, ((5, 12),)),), tokens=128)
    if who_runs == "its id again":
        log.request_aborted(request="X", generation=1, was="loading")
    log.load_settled(load=0, outcome="cancelled")
    if who_runs == "its id again":
        log.arrives("X")
    elif who_runs == "its id behind a gap":
        loses_events_of_the_scheduler(log)
    log.steps(2)
    log.request_scheduled(request="X", generation=1)
    log.passes(0.2, steps=3)
    call = log.put_begins(0, keys="abcdefgh")
    log.ends(call)
    log.reports(0)
    log.finishes("X")
    log.resumes("R")
    log.finishes("R", 2)
    poisoned = only(replay(log.closes().events))
    assert (poisoned.kind, poisoned.certainty) == ("poison", "proven" if who_runs == "the owner" else "suspected")


def poisoned_one_after_the_other(jobs: int, *, caught_too: bool = False) -> Script:
    log = Script()
    for job in range(jobs):
        log.runs(f"R{job}")
        log.saves(job, f"R{job}", blocks=(5, 6), pins=False)
        log.steps()
        log.preempts(f"R{job}")
        log.arrives(f"N{job}")
        log.gives(f"N{job}", (5, 6))
        log.request_scheduled(request=f"N{job}", generation=1)
        log.steps(2)
        call = log.put_begins(job, keys=[f"{job}a", f"{job}b"])
        if caught_too:
            caught(log, f"{job}a", 5, job=job)
        log.ends(call)
        log.reports(job)
        log.finishes(f"N{job}")
        log.resumes(f"R{job}")
        log.finishes(f"R{job}", 2)
    return log.closes()


@pytest.mark.parametrize("caught_too", [False, True])
def test_poisoned_jobs_that_are_long_over_are_counted_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, *, caught_too: bool
):
    monkeypatch.setattr(poison, "KEPT_HITS", 4)
    log = poisoned_one_after_the_other(10, caught_too=caught_too)
    replayed = Replay([Poison]).feed(log.events)
    (verdict,) = replayed.verdicts
    assert isinstance(verdict, Poison)
    assert len(verdict.hits) == 4
    assert len(verdict._tainted) == 8
    assert not verdict._open
    assert not verdict._moved
    *told, rest = replayed.result().findings
    assert [finding.jobs for finding in told] == [(0,), (1,), (2,), (3,)]
    assert all(finding.certainty == "proven" for finding in (*told, rest))
    assert rest.overflow
    assert say(rest).title.startswith("6 more calls, from event ")
    assert "more jobs are concerned than are named" in str(say(rest).also)
    assert len(grouped([(0, finding) for finding in (*told, rest)])) == 1


def test_blocks_that_were_seen_to_change_are_counted_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(poison, "KEPT_CAUGHT", 3)
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.puts(0, keys="abcdefgh")
    for place, key in enumerate("abcde"):
        caught(log, key, 5 + place)
    log.reports(0, 0, "failed", code="CRC_MISMATCH")
    log.finishes("R")
    told, rest = replay(log.closes().events).findings
    assert "3 keys held other KV than was meant" in say(told).title
    assert say(rest).title == "2 more blocks were seen to change under a put: too many to tell one by one"


def outlived(*, steps: int) -> Script:
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    call = log.put_begins(0, keys="abcdefgh")
    log.reports(0)
    log.passes(0.1, steps=steps)
    log.ends(call)
    log.finishes("R")
    return log.closes()


def test_a_call_that_ends_steps_after_its_job_was_over_shows_that_the_blocks_were_freed_early():
    finding = only(replay(outlived(steps=2).events))
    assert (finding.kind, finding.certainty, finding.jobs) == ("early_free", "proven", (0,))
    assert finding.blocks == tuple((0, block) for block in range(5, 13))


def test_a_rule_that_was_broken_for_other_work_of_a_request_hides_no_load_whose_blocks_were_given_away():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(1, 8))
    log.job_settled(job=0)
    log.puts(0, keys="abcdefgh")
    log.reports(0)
    log.finishes("R")
    log.passes(3600, steps=1000)
    log.arrives("R")
    log.loads(0, "R", blocks=(31, 38))
    call = log.get_begins(0, keys="abcdefgh")
    log.steps(2)
    log.arrives("X")
    log.gives("X", (31, 38))
    log.steps(2)
    log.ends(call)
    log.answers(0)
    log.finishes("X")
    log.finishes("R")
    early = [finding for finding in replay(log.closes().events).findings if finding.kind == "early_free"]
    assert [(finding.jobs, finding.loads) for finding in early] == [((0,), ()), ((), (0,))]


def test_loads_whose_blocks_are_given_away_again_and_again_are_one_finding_that_counts_them_all():
    log = Script()
    for load in range(300):
        log.arrives(f"Q{load}")
        log.loads(load, f"Q{load}", blocks=(1, 8))
        call = log.get_begins(load, keys="abcdefgh")
        log.steps(3)
        log.arrives(f"X{load}")
        log.gives(f"X{load}", (1, 8))
        log.ends(call)
        log.answers(load)
        log.finishes(f"Q{load}")
        log.finishes(f"X{load}")
    (early,) = [finding for finding in replay(log.closes().events).findings if finding.kind == "early_free"]
    assert say(early).title == (
        "8 blocks of load 0 of request Q0 were given to request X0 while rank 0 may still write into them; "
        "299 more loads likewise"
    )
    assert len(early.loads) == 200
    assert say(early).impact == ("the answers of at least 200 requests (X0, X1, X2, X3, X4 and 195 more) may be wrong",)


def test_evidence_of_the_step_in_which_the_job_ended_proves_nothing():
    assert replay(outlived(steps=0).events).findings == []


def test_a_load_that_is_done_within_its_step_is_not_early():
    log = Script()
    log.arrives("R")
    log.loads(0, "R", blocks=(5, 12))
    log.request_scheduled(request="R", generation=1, scheduled_tokens=16)
    log.gets(0, keys="abcdefgh")
    log.answers(0)
    log.finishes("R")
    assert replay(log.closes().events).findings == []


def comes_again_while_its_load_is_open(*, steps: int = 10) -> Script:
    """A client gives up while its request loads, and asks again with the same id; the load goes on."""
    log = Script()
    log.arrives("R")
    log.loads(0, "R", blocks=(5, 12))
    log.get_begins(0, keys="abcdefgh")
    log.passes(1, steps=1)
    log.request_aborted(request="R", generation=1, was="loading")
    log.passes(60, steps=steps)
    log.arrives("R")
    return log


def test_a_request_that_comes_again_does_not_run_on_the_blocks_of_its_first_life():
    log = comes_again_while_its_load_is_open()
    log.steps()
    log.request_scheduled(request="R", generation=1)
    log.passes(0.5, steps=10)
    log.ends("0-1")
    log.answers(0)
    log.finishes("R")
    assert replay(log.closes().events).findings == []


@pytest.mark.parametrize("what", ["load", "recv"])
def test_where_the_end_of_a_request_may_be_lost_its_next_life_is_not_proven_to_run_on_blocks_of_the_first(what: str):
    log = Script()
    log.arrives("R")
    if what == "load":
        log.loads(0, "R", blocks=(5, 12))
        log.get_begins(0, keys="abcdefgh")
    else:
        log.receives("x1", "R", blocks=(5, 12))
    log.state.apply(ev.RequestAborted(len(log.events), 0, 0, ev.SCHEDULER, 0, request="R", generation=1, was="loading"))
    log.state.apply(ev.RequestQueued(len(log.events), 0, 0, ev.SCHEDULER, 0, request="R", generation=1))
    loses_events_of_the_scheduler(log)
    log.steps()
    log.request_scheduled(request="R", generation=1, scheduled_tokens=20)
    if what == "load":
        log.ends("0-1")
        log.answers(0)
    else:
        log.pull_ends("x1", "R")
        log.peer_answers("x1", "R")
        log.received("x1", "R")
    log.finishes("R")
    assert kinds(replay(log.closes().events)) == ([] if what == "load" else ["early_free undecidable"])


def test_blocks_of_a_load_that_a_gap_may_have_ended_are_not_proven_to_be_freed_early():
    log = Script()
    log.arrives("R")
    log.loads(0, "R", blocks=(5, 12))
    log.gap(origin="scheduler", dropped=9, reason="the queue was full")
    log.arrives("Q")
    log.gives("Q", (5, 12))
    finding = replay(log.events, "live").findings[0]
    assert (finding.kind, finding.certainty) == ("early_free", "undecidable")


def test_blocks_that_go_to_a_request_that_came_again_while_its_first_life_loads_are_freed_early():
    log = comes_again_while_its_load_is_open()
    log.gives("R", (5, 12))
    finding = replay(log.events, "live").findings[0]
    assert (finding.kind, finding.certainty) == ("early_free", "proven")
    assert "were given to another life of request R while rank 0 may still write" in say(finding).title


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
    for number in range(2 * KEPT_OVER + 1):
        log.runs(f"Q{number}")
        log.finishes(f"Q{number}")
    finding = replay(log.closes().events).findings[0]
    assert "the request was aborted after 1.00 s" in say(finding).title


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rank_reported_twice", "a_rule_of_a_later_version"])
def test_whatever_rule_the_engine_says_was_broken_is_a_finding(rule: str):
    log = Script()
    log.invariant_violated(rule=rule, detail="in words", job=3, rank=0)
    finding = only(replay(log.closes().events))
    assert finding.kind == ("over_report" if rule == "rank_reported_twice" else "broken_rule")
    assert finding.certainty == "proven"
    assert rule in say(finding).culprit


def test_many_broken_rules_of_one_sort_are_one_finding():
    log = Script()
    for job in range(50):
        log.rank_completed(job=job, rank=0)
    finding = only(replay(log.closes().events))
    assert finding.kind == "stale_completion"
    assert "(50 times in all)" in say(finding).title


def test_a_rule_that_was_broken_more_often_than_is_kept_is_counted_and_hides_no_other_one():
    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    for _ in range(301):
        log.rank_completed(job=0, rank=0)
    log.rank_completed(job=0, rank=7)
    twice, unexpected = replay(log.events, "live").findings
    assert "(300 times in all)" in say(twice).title
    assert unexpected.ranks == (7,)


def test_late_results_that_are_more_than_is_kept_are_counted_and_hide_no_other_sort():
    log = Script()
    for number in range(300):
        log.report_ignored(what="recv", why="late", request=f"R{number}", transfer=f"x{number}", rank=0)
    log.report_ignored(what="send", why="another", request="S", transfer="y", rank=0)
    many, other = replay(log.closes().events).findings
    assert "(300 such results)" in say(many).title
    assert say(other).title.endswith("was ignored: another")


def reported_twice(*, own: bool, seconds: float = 5, times: int = 1) -> Script:
    """A job of a request is reported twice while the report of an older one, whose put has ended, is on its way."""
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(30, 37))
    log.steps()
    log.preempts("R")
    log.resumes("R")
    log.saves(1, "R", blocks=(40, 47), generation=2)
    log.puts(0, keys="ab")
    log.puts(1, keys="cd")
    for _ in range(1 + times):
        log.steps()
        log.rank_completed(job=1, rank=0)
    log.passes(seconds, steps=int(100 * seconds))
    if own:
        log.reports(0)
    log.job_settled(job=1)
    log.blocks_freed(job=1, blocks=((0, ((40, 47),)),))
    log.finishes("R", 2)
    return log


@pytest.mark.parametrize("seconds", [0, 5])
def test_a_report_too_many_is_not_that_of_an_older_job_that_gets_its_own(seconds: float):
    events = reported_twice(own=True, seconds=seconds).closes().events
    finding = only(replay(events))
    assert (finding.kind, finding.certainty, finding.jobs) == ("over_report", "proven", (1,))


def test_reports_too_many_are_counted_beyond_what_is_kept_of_them_until_the_older_job_gets_its_own():
    events = reported_twice(own=True, times=300).closes().events
    assert "(300 times in all)" in say(only(replay(events))).title


def test_a_report_too_many_is_that_of_an_older_job_once_the_own_report_of_that_one_would_have_come():
    early, late = reported_twice(own=False, seconds=0), reported_twice(own=False)
    finding = replay(early.events, "live").findings[0]
    assert (finding.kind, finding.certainty, finding.jobs) == ("stale_completion", "suspected", (0, 1))
    assert "before job 0's own report would have come" in say(finding).doubt
    assert kinds(replay(late.events, "live"))[0] == "stale_completion proven"


def told_of(events: list[ev.AnyEvent]) -> list[str]:
    """The findings about reports, of the log with its events in the order given; the log ends torn."""
    placed = [msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(events, 1)]
    found = [each for each in replay(placed).findings if each.kind in ("over_report", "stale_completion")]
    return [f"{each.kind} {each.certainty}" for each in found]


def of_worker(events: list[ev.AnyEvent]) -> list[ev.AnyEvent]:
    return [event for event in events if event.source != ev.SCHEDULER]


def lost(events: list[ev.AnyEvent], which: list[ev.AnyEvent], origin: str) -> list[ev.AnyEvent]:
    """Events without those that are lost, and the gap in the place of the first of them."""
    place = events.index(which[0])
    before = events[max(place - 1, 0)]
    gap = ev.Gap(
        0, before.ts_ns, before.mono_ns, ev.SCHEDULER, before.step, origin=origin, dropped=len(which), reason="full"
    )
    return [*events[:place], gap, *(event for event in events[place:] if event not in which)]


def test_evidence_that_comes_after_a_report_too_many_tells_whose_it_was_all_the_same():
    events = reported_twice(own=False).events
    late = of_worker(events)
    second = [event for event in events if isinstance(event, ev.RankCompleted)][1]
    place = events.index(second) + 1
    moved = [*(event for event in events[:place] if event not in late), *late, *events[place:]]
    assert told_of(events) == told_of(moved) == ["stale_completion proven"]
    for length in range(place - len(late), place):
        assert all(told.endswith("suspected") for told in told_of(moved[:length]))


@pytest.mark.parametrize("origin", ["rank 0", "workers"])
def test_where_evidence_of_the_rank_is_lost_nobody_knows_whose_the_report_was(origin: str):
    log = reported_twice(own=False)
    assert told_of(lost(log.events, of_worker(log.events), origin)) == ["over_report undecidable"]
    assert told_of(lost(log.events, of_worker(log.events)[2:], origin)) == ["stale_completion undecidable"]


def test_where_no_evidence_is_recorded_nobody_knows_whose_the_report_was():
    log = reported_twice(own=False)
    opened = msgspec.structs.replace(log.events[0], settings={"evidence": "False"})
    events = [opened, *(event for event in log.events[1:] if event.source == ev.SCHEDULER)]
    assert told_of(events) == ["over_report undecidable"]


@pytest.mark.parametrize("restored", [False, True])
def test_an_own_report_that_is_lost_is_shown_by_the_book_that_follows_only(restored: bool):
    log = reported_twice(own=True)
    place = next(place for place, each in enumerate(log.events) if isinstance(each, ev.RankCompleted) and each.job == 0)
    which = [each for each in log.events[place:] if getattr(each, "job", -1) == 0]
    events = lost(log.events, which, ev.SCHEDULER)
    if restored:
        state = State()
        for event in log.events[: place + len(which)]:
            with contextlib.suppress(Refused):
                state.apply(event)
        checkpoint = Script(opens=False).checkpoint(
            digest=state.digest(), open_jobs=0, pinned_blocks=0, waiting_loads=0, book=msgspec.Raw(state.encode())
        )
        events.insert(place + 1, msgspec.structs.replace(checkpoint, mono_ns=events[place].mono_ns))
    assert told_of(events) == ["over_report proven" if restored else "stale_completion undecidable"]


def test_a_report_is_not_that_of_an_older_job_that_the_rank_had_not_finished():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(30, 37))
    log.saves(1, "R", blocks=(40, 47))
    log.puts(0, keys="ab")
    log.puts(1, keys="cd")
    for _ in range(2):
        log.steps()
        log.rank_completed(job=1, rank=0)
    second = log.put_begins(0, keys="ef")
    log.passes(5, steps=100)
    log.arrives("Z")
    assert told_of(log.events) == ["over_report proven"]
    log.ends(second)
    log.passes(5, steps=100)
    log.finishes("Z")
    assert told_of(log.events) == ["over_report proven"]
    log.reports(0)
    assert told_of(log.events) == ["over_report proven"]


def test_reports_of_which_nobody_knows_whose_they_were_are_one_finding():
    log = Script(settings={"evidence": "False"})
    log.runs("R")
    log.saves(0, "R", blocks=(30, 37))
    for job in range(1, 50):
        log.saves(job, "R", blocks=(40, 47))
        log.reports(job)
        log.rank_completed(job=job, rank=0)
    log.passes(5, steps=100)
    log.finishes("R")
    (finding,) = (each for each in replay(log.events).findings if each.kind == "over_report")
    assert (finding.certainty, len(finding.jobs)) == ("undecidable", 49)
    assert "what rank 0 did is not recorded" in say(finding).doubt


def test_a_book_that_has_no_older_job_any_more_ends_the_suspicion_that_a_report_was_its():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(30, 37))
    log.saves(1, "R", blocks=(40, 47))
    log.puts(0)
    log.steps()
    log.rank_completed(job=1, rank=0)
    state = State()
    for event in [*log.events, ev.RankCompleted(0, 0, 0, ev.SCHEDULER, 0, job=0, rank=0)]:
        state.apply(event)
    state.apply(ev.JobSettled(0, 0, 0, ev.SCHEDULER, 0, job=0))
    state.apply(ev.BlocksFreed(0, 0, 0, ev.SCHEDULER, 0, job=0, blocks=((0, ((30, 37),)),)))
    log.gap(origin=ev.SCHEDULER, dropped=3, reason="the queue was full")
    log.checkpoint(
        digest=state.digest(), open_jobs=1, pinned_blocks=8, waiting_loads=0, book=msgspec.Raw(state.encode())
    )
    log.steps()
    log.puts(1)
    log.passes(5, steps=100)
    log.finishes("R")
    assert told_of(log.events) == []


def test_a_report_for_a_job_that_does_not_ask_the_rank_is_not_said_to_have_come_twice():
    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.saves(1, "R", blocks=(13, 20), ranks=1)
    log.puts(0, 1)
    log.puts(0, 0)
    log.reports(0, 0)
    log.steps()
    log.rank_completed(job=1, rank=1)
    log.passes(5, steps=100)
    log.finishes("R")
    (finding, *_) = replay(log.events).findings
    assert (finding.kind, finding.certainty, finding.jobs) == ("stale_completion", "proven", (0, 1))
    assert say(finding).title.endswith("rank 1 reported job 1, which does not wait for that rank")


def test_a_failed_call_that_was_tried_again_and_went_well_is_no_finding():
    log = Script()
    log.arrives("R")
    log.loads(0, "R", blocks=(5, 12))
    call = log.get_begins(0, keys="abcdefgh")
    log.ends(call, "failed", code="TRANSFER_FAILED", raw="-800")
    log.gets(0, keys="abcdefgh")
    log.answers(0)
    log.steps()
    log.request_scheduled(request="R", generation=1)
    log.finishes("R")
    assert replay(log.closes().events).findings == []


def test_two_failed_loads_are_no_loop_and_three_are():
    for rounds, expected in ((2, ["load_failed proven"]), (3, ["retry_loop proven", "load_failed proven"])):
        log = Script(policy="recompute")
        log.arrives("R")
        for load in range(rounds):
            log.loads(load, "R", blocks=(5, 12))
            call = log.get_begins(load, keys="abcdefgh")
            log.ends(call, "failed", code="TRANSFER_FAILED", raw="-800")
            log.answers(load, 0, "failed", code="TRANSFER_FAILED", raw="-800", stage="STORE_GET")
        log.request_aborted(request="R", generation=1)
        assert kinds(replay(log.closes().events)) == expected


def test_a_load_counted_as_finished_without_a_rank_is_told():
    log = Script(ranks=2)
    log.arrives("R")
    log.loads(0, "R", blocks=(5, 12))
    log.rank_loaded(load=0, rank=0)
    log.load_settled(load=0, missing=((1, 1),))
    log.request_scheduled(request="R", generation=1)
    log.finishes("R")
    finding = only(replay(log.closes().events))
    assert (finding.kind, finding.certainty, finding.ranks) == ("missing_ranks", "suspected", (1,))


def counted_without_rank_1(loads: int, *, answers_before: bool = False, gap: bool = False) -> Finding:
    log = Script(ranks=2)
    if answers_before:
        log.runs("P")
        log.stores(0, "P", blocks=(1, 8))
        log.finishes("P")
    if gap:
        loses_events_of_the_scheduler(log)
    for load in range(loads):
        log.arrives(f"R{load}")
        log.loads(load, f"R{load}", blocks=(5, 12))
        log.gets(load, 0, keys="abcdefgh")
        log.steps()
        log.rank_loaded(load=load, rank=0)
        log.load_settled(load=load, missing=((1, 1),))
        log.request_aborted(request=f"R{load}", generation=1)
    return only(replay(log.closes().events))


def loses_events_of_the_scheduler(log: Script) -> None:
    """Events are lost, and then the book comes again."""
    log.gap(origin="scheduler", dropped=50_000, reason="the queue was full")
    log.checkpoint(digest=log.state.digest(), book=msgspec.Raw(log.state.encode()))


def test_the_doubt_of_a_load_counted_without_a_rank_fits_what_the_rank_did():
    once = counted_without_rank_1(1)
    assert (once.certainty, say(once).culprit) == ("suspected", "once: no answer of rank 1 is in this log")
    assert "one load only" in say(once).doubt
    others = counted_without_rank_1(2, answers_before=True)
    assert (others.certainty, say(others).culprit) == ("suspected", "2 times: rank 1 answered other work")
    assert "rank 1 answered other work" in say(others).doubt
    assert say(counted_without_rank_1(2)).culprit == "systematic: no answer of rank 1 is in this log"


def test_loads_counted_without_a_rank_are_all_counted():
    finding = counted_without_rank_1(300)
    assert "load 0 and 299 more loads counted" in say(finding).title
    assert len(finding.loads) == 200


def test_where_events_of_the_scheduler_are_lost_no_rank_is_said_to_have_never_answered():
    finding = counted_without_rank_1(2, gap=True)
    assert (finding.kind, finding.certainty) == ("missing_ranks", "undecidable")
    assert "50,000 events of scheduler are lost" in say(finding).doubt
    log = Script(ranks=2)
    loses_events_of_the_scheduler(log)
    for job in (1, 2):
        log.runs(f"R{job}")
        log.saves(job, f"R{job}", blocks=(10 * job, 10 * job + 7))
        log.reports(job, 0)
        log.finishes(f"R{job}")
    log.passes(100)
    assert kinds(replay(log.closes().events)) == ["leak proven"]


def test_an_engine_that_ended_by_an_error_is_told_although_its_log_is_whole():
    log = Script()
    log.runs("R")
    finding = only(replay(log.closes(reason="exception", exception="AssertionError").events))
    assert finding.kind == "torn_log"
    assert "AssertionError" in say(finding).title


def test_findings_have_no_doubt_when_proven_and_a_doubt_when_not():
    for log, ending in ((waiting_job(seconds=61), "torn"), (waiting_job(seconds=61).closes(), "torn")):
        for finding in replay(log.events, ending).findings:
            assert (finding.certainty == "proven") == (not say(finding).doubt)
            if say(finding).doubt:
                assert say(finding).doubt in public(finding)["advice"]


def test_evidence_that_comes_after_its_job_is_over_does_no_harm():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    call = log.put_begins(0, keys="abcdefgh")
    log.reports(0)
    log.ends(call)
    log.finishes("R")
    result = replay(log.closes().events)
    assert result.findings == []
    assert isinstance(result.last, ev.LogClosed)
