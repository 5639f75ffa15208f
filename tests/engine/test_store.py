"""The store connector on the real engine with real Mooncake over TCP: what it must do, and what its log must show."""

from collections import Counter
from collections.abc import Callable

import pytest

from ledger import events as ev
from ledger.blocks import numbers
from tests.engine.conftest import Run, fold

Scenario = Callable[[str], Run]


def test_every_prompt_is_loaded_from_the_store_as_with_the_upstream_connector(scenario: Scenario) -> None:
    ours, upstream = scenario("store").result, scenario("upstream").result
    assert [round_["cached"] for round_ in upstream["rounds"]] == [[0] * 6, [384] * 6]
    assert [round_["cached"] for round_ in ours["rounds"]] == [[0] * 6, [384] * 6]


def test_tokens_equal_those_of_a_run_without_a_connector(scenario: Scenario) -> None:
    reference = scenario("reference").result["short"]
    for round_ in scenario("store").result["rounds"]:
        assert round_["tokens"] == reference
    reference = scenario("reference_two_ranks").result["short"]
    for round_ in scenario("two_ranks").result["rounds"]:
        assert round_["tokens"] == reference


def test_tokens_stay_right_while_a_small_pool_preempts(scenario: Scenario) -> None:
    run = scenario("preempt")
    assert run.result["tokens"] == scenario("reference").result["long"]
    kinds = Counter(type(event) for event in run.events())
    assert kinds[ev.RequestPreempted] > 0
    assert kinds[ev.RequestResumed] == kinds[ev.RequestPreempted]


@pytest.mark.parametrize("name", ["store", "preempt", "two_ranks", "killed"])
def test_the_fold_gives_the_digests_that_the_engine_recorded(scenario: Scenario, name: str) -> None:
    digests = fold(scenario(name).events()).digests
    assert digests
    assert [recorded for recorded, _ in digests] == [folded for _, folded in digests]


@pytest.mark.parametrize("name", ["store", "preempt", "two_ranks"])
def test_all_pins_are_released_at_the_end(scenario: Scenario, name: str) -> None:
    events = scenario(name).events()
    state = fold(events).state
    assert isinstance(events[-1], ev.LogClosed)
    assert events[-1].reason == "shutdown"
    assert state.pinned_blocks() == 0
    assert not state.book.jobs
    assert not state.book.loads
    assert not state.book.requests
    pinned = [event.job for event in events if isinstance(event, ev.PinTouched)]
    freed = [event.job for event in events if isinstance(event, ev.BlocksFreed)]
    assert sorted(pinned) == sorted(freed)


@pytest.mark.parametrize("name", ["store", "preempt", "two_ranks", "killed"])
def test_the_log_has_no_hole_and_no_gap(scenario: Scenario, name: str) -> None:
    events = scenario(name).events()
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert not [event for event in events if isinstance(event, ev.Gap | ev.InvariantViolated)]


def test_every_job_needs_both_ranks(scenario: Scenario) -> None:
    events = scenario("two_ranks").events()
    reported: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, ev.RankCompleted):
            reported.setdefault(event.job, []).append(event.rank)
    assert reported
    assert all(sorted(ranks) == [0, 1] for ranks in reported.values())
    loaded = [event.rank for event in events if isinstance(event, ev.RankLoaded)]
    assert Counter(loaded) == {0: 3, 1: 3}


def test_workers_add_evidence_of_every_transfer(scenario: Scenario) -> None:
    events = scenario("store").events()
    started = {event.transfer: event for event in events if isinstance(event, ev.TransferStarted)}
    finished = {event.transfer: event for event in events if isinstance(event, ev.TransferFinished)}
    assert started.keys() == finished.keys()
    gets = [event for event in finished.values() if event.op == "get"]
    assert len(gets) == 6
    assert all(event.keys == 12 and event.outcome == "ok" and event.duration_ns > 0 for event in gets)
    puts = {event.job for event in finished.values() if event.op == "put"}
    assert puts == {event.job for event in events if isinstance(event, ev.RankCompleted) and event.outcome == "stored"}
    pinned = {event.job: set(numbers(event.blocks)) for event in events if isinstance(event, ev.PinTouched)}
    for event in started.values():
        if event.op == "put":
            assert set(numbers(event.blocks)) <= pinned[event.job]


def test_aborted_requests_leave_nothing_behind(scenario: Scenario) -> None:
    run = scenario("store")
    events = run.events()
    aborted = {event.request: event.was for event in events if isinstance(event, ev.RequestAborted)}
    assert len(aborted) == 3
    assert sorted(aborted.values()) == ["queued", "running", "running"]
    never_scheduled = next(request for request, was in aborted.items() if was == "queued")
    assert not [event for event in events if isinstance(event, ev.JobRegistered) and event.request == never_scheduled]
    assert run.result["finished_beside_aborts"] >= 9


def test_a_killed_engine_leaves_a_readable_log_that_names_what_is_open(scenario: Scenario) -> None:
    run = scenario("killed")
    assert run.result["killed"] >= 1
    events = run.events()
    state = fold(events).state
    assert not isinstance(events[-1], ev.LogClosed)
    assert {request.rpartition("-")[0] for request in state.book.requests} == {f"killed-{n}" for n in range(4)}
    assert all(record.state == "running" for record in state.book.requests.values())
