"""When ranks that do not answer are a system, and when an accident."""

from ledger.replay.fold import replay
from ledger.report.wording import say
from ledger.verdicts.base import Finding
from ledger.verdicts.missing_ranks import AnsweredOther, CountedWithout, OneLoadOnly
from tests.incidents.script import Script
from tests.unit.ledger.verdicts.shared import kinds, loses_events_of_the_scheduler, only


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


def test_the_doubt_of_a_load_counted_without_a_rank_fits_what_the_rank_did():
    once = counted_without_rank_1(1)
    assert (once.certainty, say(once).culprit) == ("suspected", "once: no answer from rank 1 is in this log")
    assert "one load only" in say(once).doubt
    assert isinstance(once.doubt, OneLoadOnly)
    others = counted_without_rank_1(2, answers_before=True)
    assert others.doubt == AnsweredOther(ranks=(1,))
    assert (others.certainty, say(others).culprit) == ("suspected", "2 times: rank 1 answered other work")
    assert "rank 1 answered other work" in say(others).doubt
    assert say(counted_without_rank_1(2)).culprit == "systematic: no answer from rank 1 is in this log"


def test_loads_counted_without_a_rank_are_all_counted():
    finding = counted_without_rank_1(300)
    assert finding.facts == CountedWithout(load=0, times=300, answered_other=False)
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
