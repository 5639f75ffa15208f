"""Findings that are one story are told as one: none is lost, none is told twice, and the cause leads."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.replay.incidents import CERTAINTIES, Incident, gravest, grouped
from ledger.verdicts import all_kinds
from ledger.verdicts.base import Facts, Finding
from tests.incidents.corpus import INCIDENTS
from tools.scoring.common import replay_together


def finding(kind: str, *, seq: int = 1, transfers: tuple[str, ...] = (), **fields: Any) -> Finding:
    """A finding of which only matters what it is about."""
    about: dict[str, Any] = {"certainty": "proven", "since_seq": seq, "lead_seq": seq, "transfers": transfers, **fields}
    return Finding(of=all_kinds()[kind], facts=Facts(), **about)


def stories(*found: Finding) -> list[tuple[list[str], str]]:
    """The kinds of each incident of one log, and the kind that leads it."""
    alike = [(0, each) for each in found]
    return [([found[at].kind for at in each.members], found[each.head].kind) for each in grouped(alike)]


# --- what belongs together --------------------------------------------------------------------------------------------


def test_findings_about_one_job_are_one_incident():
    cause, leak, other = finding("over_report", jobs=(2,)), finding("leak", jobs=(2,)), finding("leak", jobs=(3,))
    assert stories(cause, leak, other) == [(["over_report", "leak"], "over_report"), (["leak"], "leak")]


def test_a_chain_of_jobs_is_one_incident():
    found = (finding("stale_completion", jobs=(2, 3)), finding("leak", jobs=(2,)), finding("leak", jobs=(3,)))
    assert stories(*found) == [(["stale_completion", "leak", "leak"], "stale_completion")]


def test_jobs_of_two_logs_with_the_same_number_are_not_the_same():
    found = [(0, finding("leak", jobs=(2,))), (1, finding("leak", jobs=(2,)))]
    assert len(grouped(found)) == 2


def test_a_transfer_is_one_story_in_both_its_logs():
    found = [(0, finding("unreported_failure", transfers=("x1",))), (1, finding("leak", transfers=("x1",)))]
    assert grouped(found) == [Incident((0, 1), 0)]


def test_loads_that_fail_for_a_put_of_another_log_belong_to_that_put():
    found = [(1, finding("stall", jobs=(2,))), (0, finding("load_failed", elsewhere=((1, 2),)))]
    assert grouped(found) == [Incident((0, 1), 0)]


def test_a_request_that_only_waits_behind_an_incident_is_no_part_of_it():
    stall = finding("stall", jobs=(2,), requests=("R", "Q"), suffering=("Q",))
    assert len(stories(stall, finding("broken_rule", requests=("Q",)))) == 2


def test_a_finding_that_names_no_work_belongs_to_the_cause_about_its_request():
    found = (finding("early_free", loads=(0,), requests=("R",)), finding("broken_rule", requests=("R",)))
    assert stories(*found) == [(["early_free", "broken_rule"], "early_free")]


def test_blocks_that_were_freed_twice_and_then_poisoned_are_one_incident():
    free = finding("double_free", seq=5, jobs=(0,), blocks=((0, 7),))
    poison = finding("poison", seq=9, jobs=(4,), blocks=((1, 7),))
    assert stories(free, poison) == [(["double_free", "poison"], "double_free")]
    before = finding("poison", seq=3, jobs=(4,), blocks=((1, 7),))
    assert len(stories(before, free)) == 2


def test_jobs_whose_blocks_were_given_away_by_one_cause_are_one_incident_led_by_the_most_certain():
    found = (
        finding("poison", jobs=(6,), cause="unpinned", certainty="suspected"),
        finding("poison", jobs=(12,), cause="unpinned"),
    )
    assert grouped([(0, each) for each in found]) == [Incident((0, 1), 1)]


# --- the end of a log -------------------------------------------------------------------------------------------------


def test_a_torn_end_belongs_to_what_the_last_events_are_about():
    found = (
        finding("stall", jobs=(1,), requests=("Q",)),
        finding("late_event", transfers=("x",), requests=("R",)),
        finding("torn_log", requests=("R",)),
    )
    assert stories(*found) == [(["stall"], "stall"), (["late_event", "torn_log"], "late_event")]


def test_a_torn_end_belongs_to_what_was_open_until_then_and_never_ties_two_stories():
    found = (finding("stall", jobs=(1,)), finding("leak", jobs=(2,)), finding("torn_log"))
    assert stories(*found) == [(["stall", "torn_log"], "stall"), (["leak"], "leak")]


def test_a_torn_end_of_another_log_is_a_story_of_its_own():
    assert len(grouped([(0, finding("stall", jobs=(1,))), (1, finding("torn_log"))])) == 2


# --- who leads --------------------------------------------------------------------------------------------------------


def test_a_failure_that_was_dealt_with_is_told_before_the_fault_that_it_set_off():
    found = [(0, finding(kind, transfers=("x",))) for kind in ("load_failed", "early_free", "poison")]
    (incident,) = grouped(found)
    assert (incident.before, incident.head, incident.after) == ((0,), 1, (2,))


def test_a_late_result_leads_where_the_engine_may_have_died_of_it():
    kinds = ("load_failed", "late_event")
    alive = [(0, finding(kind, transfers=("x",), requests=("R",))) for kind in kinds]
    assert grouped(alive)[0].head == 0
    assert grouped([*alive, (0, finding("torn_log", requests=("R",)))])[0].head == 1


def test_a_job_that_waits_for_a_report_that_was_counted_for_another_one_follows_from_that():
    leak = finding("leak", seq=3, jobs=(21,), requests=("R",), ranks=(0,))
    early = finding("early_free", seq=9, jobs=(22,), requests=("R",), ranks=(0,))
    assert stories(leak, early) == [(["leak", "early_free"], "early_free")]
    other_rank = finding("early_free", seq=9, jobs=(22,), requests=("R",), ranks=(1,))
    assert len(stories(leak, other_rank)) == 2


def test_wrong_kv_is_told_first_of_all_and_a_failure_that_was_dealt_with_last():
    found = [(0, finding(kind, jobs=(job,))) for job, kind in enumerate(["lost_store", "leak", "poison"])]
    incidents = grouped(found)
    assert gravest(incidents, found).head == 2
    assert gravest(incidents[:2], found).head == 1
    assert gravest(incidents[:1], found).head == 0


LEADS = {
    "S1": "poison",
    "S2": "stale_completion",
    "S4": "unreported_failure",
    "S5a": "late_event",
    "S5c": "late_event",
    "S6": "early_free",
    "S10": "load_failed",
    "S13": "stall",
    "K1": "stall",
    "K2": "retry_loop",
    "K3": "over_report",
}


@pytest.mark.parametrize("name", LEADS)
def test_every_incident_of_the_corpus_is_told_as_one_story(name: str):
    (told,) = [incident for incident in INCIDENTS if incident.id == name]
    logs = told.logs()
    names = list(logs)
    found = [(names.index(log), each) for log, each in replay_together(logs)]
    (story,) = grouped(found)
    assert found[story.head][1].kind == LEADS[name]


# --- whatever is found ------------------------------------------------------------------------------------------------

KINDS = ["leak", "stall", "poison", "early_free", "load_failed", "late_event", "torn_log", "broken_rule", "retry_loop"]
numbers = st.lists(st.integers(0, 3), max_size=2).map(lambda each: tuple(dict.fromkeys(each)))
names = st.lists(st.sampled_from("abc"), max_size=2).map(lambda each: tuple(dict.fromkeys(each)))
found_things = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.builds(
            finding,
            st.sampled_from(KINDS),
            seq=st.integers(1, 9),
            jobs=numbers,
            loads=numbers,
            transfers=names,
            requests=names,
            suffering=names,
            cause=st.sampled_from(["", "same"]),
            certainty=st.sampled_from(CERTAINTIES),
            blocks=numbers.map(lambda each: tuple((0, block) for block in each)),
            elsewhere=numbers.map(lambda each: tuple((1, job) for job in each)),
        ),
    ),
    max_size=12,
)


@given(found_things)
def test_no_finding_is_lost_and_none_is_told_twice(found: list[tuple[int, Finding]]):
    told = [place for incident in grouped(found) for place in incident.members]
    assert sorted(told) == list(range(len(found)))


@given(found_things)
def test_incidents_stand_in_the_order_of_their_earliest_finding(found: list[tuple[int, Finding]]):
    incidents = grouped(found)
    assert all(one.members[0] < other.members[0] for one, other in pairwise(incidents))
    for each in incidents:
        assert list(each.members) == sorted(each.members)
        assert each.head in each.members
        assert (*each.before, each.head, *each.after) == each.members


@given(found_things)
def test_findings_about_one_job_of_a_log_are_never_told_apart(found: list[tuple[int, Finding]]):
    incident_of = {place: number for number, each in enumerate(grouped(found)) for place in each.members}
    for place, (log, one) in enumerate(found):
        for at, (in_log, other) in enumerate(found[:place]):
            if log == in_log and not set(one.jobs).isdisjoint(other.jobs):
                assert incident_of[place] == incident_of[at]


@given(found_things, st.integers(0, 1))
def test_what_has_nothing_to_do_with_the_rest_stays_apart(found: list[tuple[int, Finding]], log: int):
    alone = finding("stale_completion", jobs=(99,), requests=("nobody else",))
    before = [tuple(found[place][1].kind for place in each.members) for each in grouped(found)]
    incidents = grouped([*found, (log, alone)])
    assert incidents[-1].members == (len(found),)
    assert [tuple(found[place][1].kind for place in each.members) for each in incidents[:-1]] == before
