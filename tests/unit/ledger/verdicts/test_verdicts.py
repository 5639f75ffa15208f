"""What the verdicts claim and what they do not: certainty, what a gap hides, who is blamed."""

import contextlib

import msgspec
import pytest

from ledger import events as ev
from ledger.errors import Refused
from ledger.replay.fold import Replay, replay
from ledger.replay.incidents import grouped
from ledger.report.wording import public, say
from ledger.state.apply import State
from ledger.verdicts import poison
from ledger.verdicts.poison import Poison
from tests.incidents.script import Script
from tests.unit.ledger.verdicts.shared import (
    comes_again_while_its_load_is_open,
    kinds,
    loses_events_of_the_scheduler,
    only,
    waiting_job,
)

# --- what is in flight is no finding ----------------------------------------------------------------------------------


def test_of_a_torn_end_only_that_there_is_no_log_closed_is_proven():
    finding = only(replay(waiting_job(seconds=1).events, "torn"))
    assert say(finding).title.endswith("there is no log_closed")
    for reading in ("the process ended hard", "its disk took nothing", "this copy lacks the end"):
        assert reading in say(finding).culprit
    assert "killed" not in say(finding).title + say(finding).culprit
    assert "If the disk took what it was given, the engine's last 50 ms" in say(finding).advice


# --- what is hidden ---------------------------------------------------------------------------------------------------


def test_a_report_for_a_job_that_a_gap_may_have_hidden_is_undecidable():
    log = Script()
    log.gap(origin="scheduler", dropped=5, reason="the queue was full")
    log.rank_completed(job=7, rank=0)
    finding = replay(log.events, "live").findings[0]
    assert (finding.kind, finding.certainty) == ("stale_completion", "undecidable")


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
    assert "a put of 4 keys did not return in this log, and may store" in say(finding).title
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
    assert "the KV that request R2 itself waited for may have come into the blocks afterwards" in say(poison).doubt


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
    monkeypatch.setattr(poison, "KEPT_ACCESSES", 4)
    log = poisoned_one_after_the_other(10, caught_too=caught_too)
    replayed = Replay([Poison]).feed(log.events)
    (verdict,) = replayed.verdicts
    assert isinstance(verdict, Poison)
    assert len(verdict.accesses) == 4
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
    monkeypatch.setattr(poison, "KEPT_CHANGED", 3)
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.puts(0, keys="abcdefgh")
    for place, key in enumerate("abcde"):
        caught(log, key, 5 + place)
    log.reports(0, 0, "failed", code="CRC_MISMATCH")
    log.finishes("R")
    told, rest = replay(log.closes().events).findings
    assert "3 keys held wrong KV" in say(told).title
    assert say(rest).title == "2 more blocks were seen to change under a put: too many to list one by one"


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
