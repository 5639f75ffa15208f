"""What the verdicts claim and what they do not: certainty, what is in flight, what a gap hides, who is blamed."""

import msgspec
import pytest

from ledger import events as ev
from ledger.replay import Result, replay
from ledger.verdicts import Finding
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


def test_of_a_torn_end_only_that_there_is_no_log_closed_is_proven():
    finding = only(replay(waiting_job(seconds=1).events, "torn"))
    assert finding.title.endswith("there is no log_closed")
    for reading in ("the process ended hard", "its disk took nothing", "this copy lacks the end"):
        assert reading in finding.culprit
    assert "killed" not in finding.title + finding.culprit
    assert "If the disk took what it was given, the engine's last 50 ms" in finding.advice


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
    assert "had not settled by then" in finding.title
    assert "restart" not in finding.advice
    assert "Replay the log" in finding.advice


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
    assert "ValueError" in finding.culprit


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
    assert "rank 1 began put #1 at event" in finding.culprit
    assert finding.suffering == ("Q",)
    assert "1 open job pins 8 of 99 blocks" in finding.culprit
    assert finding.since_seq == 4


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
    assert "that it was given to the workers is not in this log" in finding.title


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
    assert "5 events of scheduler are lost" in finding.doubt
    log.checkpoint(digest=log.state.digest(), book=msgspec.Raw(log.state.encode()))
    assert kinds(replay(log.closes().events)) == ["stall proven"]


def test_a_report_for_a_job_that_a_gap_may_have_hidden_is_undecidable():
    log = Script()
    log.gap(origin="scheduler", dropped=5, reason="the queue was full")
    log.rank_completed(job=7, rank=0)
    finding = replay(log.events, "live").findings[0]
    assert (finding.kind, finding.certainty) == ("stale_completion", "undecidable")


def test_without_evidence_nothing_is_claimed_of_what_a_rank_did():
    log = Script(ranks=2, settings={"evidence": "False"})
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.reports(0, 0)
    log.passes(100)
    finding = only(replay(log.closes().events))
    assert finding.kind == "leak"
    assert "what rank 1 did is not recorded" in finding.culprit


def test_a_file_that_disagrees_with_the_code_proves_nothing_of_what_is_open():
    log = waiting_job(seconds=100)
    log.checkpoint(digest="0" * 64)
    finding = only(replay(log.closes().events))
    assert (finding.kind, finding.certainty) == ("stall", "undecidable")
    assert "--check" in finding.doubt


def test_a_transfer_that_the_engine_would_still_give_up_by_itself_is_suspected_at_most():
    log = Script("decode")
    log.arrives("R")
    log.receives("x1", "R", blocks=(5, 12), timeout_s=540)
    log.passes(100, steps=10)
    log.arrives("Q")
    finding = only(replay(log.events, "live"))
    assert (finding.kind, finding.certainty) == ("stall", "suspected")
    assert "9 min 00 s" in finding.doubt
    log.passes(500, steps=10)
    assert kinds(replay(log.closes().events)) == ["stall proven"]


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
    assert [entry["key"] for entry in finding.facts["tainted"]] == ["a", "b", "c", "d"]


def test_a_put_in_the_same_step_may_have_read_before_the_new_owner_wrote():
    finding = only(replay(given_away(put_step=0).events))
    assert (finding.kind, finding.certainty) == ("poison", "suspected")
    assert "may have read blocks" in finding.title
    assert "may hold KV of another request" in finding.title
    assert "only the bytes would tell" in finding.doubt


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
    assert "no return of a put of 4 keys is in this log, and it may store" in finding.title
    assert "hold KV" not in finding.title


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
    assert [entry["key"] for entry in finding.facts["tainted"]] == ["b", "c"]


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
    assert finding.facts["tainted"] == []


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
    assert "lives of one request" in finding.doubt


def caught(log: Script, key: str, block: int, *, removed: bool = True) -> None:
    with log.rank(0):
        log.poison_caught(
            rank=0, key=key, group=0, block=block, before="aa", after="bb", removed=removed, request="R", job=0
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
    assert [(entry["key"], entry["certainty"], entry["removed"]) for entry in finding.facts["tainted"]] == [
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
    assert "1 could not be removed" in finding.title


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


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rank_reported_twice", "a_rule_of_a_later_version"])
def test_whatever_rule_the_engine_says_was_broken_is_a_finding(rule: str):
    log = Script()
    log.invariant_violated(rule=rule, detail="in words", job=3, rank=0)
    finding = only(replay(log.closes().events))
    assert finding.kind == ("over_report" if rule == "rank_reported_twice" else "broken_rule")
    assert finding.certainty == "proven"
    assert rule in finding.culprit


def test_many_broken_rules_of_one_sort_are_one_finding():
    log = Script()
    for job in range(50):
        log.rank_completed(job=job, rank=0)
    finding = only(replay(log.closes().events))
    assert finding.kind == "stale_completion"
    assert "(50 times in all)" in finding.title


def test_a_rule_that_was_broken_more_often_than_is_kept_is_counted_and_hides_no_other_one():
    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    for _ in range(301):
        log.rank_completed(job=0, rank=0)
    log.rank_completed(job=0, rank=7)
    twice, unexpected = replay(log.events, "live").findings
    assert "(300 times in all)" in twice.title
    assert unexpected.ranks == (7,)


def test_late_results_that_are_more_than_is_kept_are_counted_and_hide_no_other_sort():
    log = Script()
    for number in range(300):
        log.report_ignored(what="recv", why="late", request=f"R{number}", transfer=f"x{number}", rank=0)
    log.report_ignored(what="send", why="another", request="S", transfer="y", rank=0)
    many, other = replay(log.closes().events).findings
    assert "(300 such results)" in many.title
    assert other.title.endswith("was ignored: another")


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
    assert "(300 times in all)" in only(replay(events)).title


def test_a_report_too_many_is_that_of_an_older_job_once_the_own_report_of_that_one_would_have_come():
    early, late = reported_twice(own=False, seconds=0), reported_twice(own=False)
    finding = replay(early.events, "live").findings[0]
    assert (finding.kind, finding.certainty, finding.jobs) == ("stale_completion", "suspected", (0, 1))
    assert "before the own report of job 0 would have come" in finding.doubt
    assert kinds(replay(late.events, "live"))[0] == "stale_completion proven"


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


def test_an_engine_that_ended_by_an_error_is_told_although_its_log_is_whole():
    log = Script()
    log.runs("R")
    finding = only(replay(log.closes(reason="exception", exception="AssertionError").events))
    assert finding.kind == "torn_log"
    assert "AssertionError" in finding.title


def test_findings_have_no_doubt_when_proven_and_a_doubt_when_not():
    for log, ending in ((waiting_job(seconds=61), "torn"), (waiting_job(seconds=61).closes(), "torn")):
        for finding in replay(log.events, ending).findings:
            assert (finding.certainty == "proven") == (not finding.doubt)
            if finding.doubt:
                assert finding.doubt in finding.public()["advice"]


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
