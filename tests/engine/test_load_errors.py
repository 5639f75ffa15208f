"""Loads that fail on a real engine with a real store: what is told, what becomes of the request, what is left."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector.store.stats import FAILURES
from ledger import events as ev
from ledger.blocks import count, expand
from tests.engine.conftest import Run, RunOnce, fold
from tests.engine.load_error_scenarios import BLOCK, EPISODES

EXPECTED = {
    "removed": {("BLOCK_NOT_FOUND", "STORE_GET")},
    "changed": {("CRC_MISMATCH", "VERIFY")},
    "relaid": {("VERSION_MISMATCH", "VERIFY"), ("VERSION_MISMATCH", "STORE_GET")},
    "leased": {("LEASE_EXPIRED", "STORE_GET")},
    "masterless": {("PEER_UNREACHABLE", "STORE_GET")},
}
"""Codes and stages that each episode must be told by."""

BLOCKS = 12
"""Of each prompt in the store: 384 of its 400 tokens."""

RUNS = ("recompute", "fail", "suffix")


@pytest.fixture(scope="session")
def failing(run_once: RunOnce) -> Callable[[str], Run]:
    """Return a function that gives the `Run` of a scenario of failing loads by name."""
    return lambda name: run_once("load_error_scenarios", name)


def episodes_of(run: Run) -> list[str]:
    return [name for name in EPISODES[1:] if name in run.result["episodes"]]


def lines_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run.folder / "failures.jsonl").read_text().splitlines()]


def of(name: str, request: str) -> bool:
    """Whether a request is that of an episode: vLLM appends to the ids it is given."""
    return request.rpartition("-")[0] == name


def loads_of(run: Run, name: str) -> list[list[ev.AnyEvent]]:
    """The events of each load of an episode's request, in order."""
    planned = {event.load for event in run.events() if isinstance(event, ev.LoadPlanned) and of(name, event.request)}
    return [[event for event in run.events() if getattr(event, "load", -1) == load] for load in sorted(planned)]


@pytest.mark.parametrize("name", RUNS)
def test_each_fault_has_its_code_and_stage_in_the_event(failing: Callable[[str], Run], name: str) -> None:
    run = failing(name)
    for episode in episodes_of(run):
        first = loads_of(run, episode)[0]
        (answer,) = [event for event in first if isinstance(event, ev.RankLoaded)]
        assert {(each.code, each.stage) for each in answer.failures} == EXPECTED[episode]
        (failed,) = [event for event in first if isinstance(event, ev.LoadFailed)]
        assert (failed.code, failed.stage) in EXPECTED[episode]
        assert answer.outcome == "failed"
        assert count(answer.blocks) == sum(count(each.blocks) for each in answer.failures)


@pytest.mark.parametrize("name", RUNS)
def test_each_failure_is_one_json_line_that_carries_code_request_load_and_blocks(
    failing: Callable[[str], Run], name: str
) -> None:
    run = failing(name)
    lines = [line for line in lines_of(run) if "load" in line]
    answers = [event for event in run.events() if isinstance(event, ev.RankLoaded) and event.outcome == "failed"]
    told = [(line["load"], line["code"], line["stage"], line["failed_blocks"]) for line in lines]
    booked = [(event.load, each.code, each.stage, count(each.blocks)) for event in answers for each in event.failures]
    assert sorted(told) == sorted(booked)
    for episode in episodes_of(run):
        own = [line for line in lines if of(episode, line["request"])]
        assert {(line["code"], line["stage"]) for line in own} == EXPECTED[episode]
        assert all(line["action"] and line["rank"] == 0 and line["blocks"] for line in own)
    assert {line["raw"]: line["raw_name"] for line in lines if line["raw"] in ("-704", "-707", "-900")} == {
        raw: name
        for raw, name in {"-704": "OBJECT_NOT_FOUND", "-707": "LEASE_EXPIRED", "-900": "RPC_FAIL"}.items()
        if raw in {line["raw"] for line in lines}
    }


@pytest.mark.parametrize("name", RUNS)
def test_failures_are_counted_at_metrics_by_code_and_stage_beside_upstreams(
    failing: Callable[[str], Run], name: str
) -> None:
    run = failing(name)
    metrics = run.result["metrics"]
    assert any(line.startswith("vllm:mooncake_store_operation_total{") for line in metrics)
    assert not any(FAILURES in line and "operation" in line for line in metrics)
    for code, stage in {pair for episode in episodes_of(run) for pair in EXPECTED[episode]}:
        (line,) = [
            line
            for line in metrics
            if line.startswith("vllm:kvledger_failures_total{") and f'"{code}"' in line and f'"{stage}"' in line
        ]
        told = [each for each in lines_of(run) if (each["code"], each["stage"]) == (code, stage)]
        assert float(line.rpartition(" ")[2]) == len(told)


@pytest.mark.parametrize("name", ["recompute", "suffix"])
def test_recomputed_tokens_equal_those_of_a_run_without_a_connector(
    failing: Callable[[str], Run], scenario: Callable[[str], Run], name: str
) -> None:
    reference = dict(zip(EPISODES, scenario("reference").result["short"], strict=True))
    for episode, served in failing(name).result["episodes"].items():
        assert served["tokens"] == reference[episode]
        assert served["finish_reason"] == "length"


def test_under_the_policy_fail_a_request_whose_load_failed_ends_with_an_error(failing: Callable[[str], Run]) -> None:
    run = failing("fail")
    assert run.result["episodes"]["whole"]["finish_reason"] == "length"
    for episode in episodes_of(run):
        assert run.result["episodes"][episode]["finish_reason"] == "error"
        (load,) = loads_of(run, episode)
        (recovered,) = [event for event in load if isinstance(event, ev.LoadRecovered)]
        assert recovered.action == "failed"


@pytest.mark.parametrize("name", ["recompute", "fail"])
def test_a_load_without_a_fault_is_loaded_whole(failing: Callable[[str], Run], name: str) -> None:
    run = failing(name)
    assert run.result["episodes"]["whole"]["cached"] == BLOCKS * 32
    (load,) = loads_of(run, "whole")
    assert [event.outcome for event in load if isinstance(event, ev.RankLoaded | ev.LoadSettled)] == ["loaded"] * 2


def test_a_failed_load_takes_all_its_blocks_with_it(failing: Callable[[str], Run]) -> None:
    run = failing("recompute")
    for episode in episodes_of(run):
        planned, *rest = loads_of(run, episode)[0]
        assert isinstance(planned, ev.LoadPlanned)
        (answer,) = [event for event in rest if isinstance(event, ev.RankLoaded)]
        assert set(expand(answer.invalid)) == set(expand(planned.blocks))


def test_a_suffix_begins_with_the_first_block_that_failed(failing: Callable[[str], Run]) -> None:
    run = failing("suffix")
    for episode in ("removed", "changed", "relaid"):
        planned, *rest = loads_of(run, episode)[0]
        assert isinstance(planned, ev.LoadPlanned)
        (answer,) = [event for event in rest if isinstance(event, ev.RankLoaded)]
        assert list(expand(answer.invalid)) == list(expand(planned.blocks))[BLOCK:]


def test_what_may_heal_is_asked_for_again_and_what_may_not_is_not(failing: Callable[[str], Run]) -> None:
    run = failing("recompute")
    gets = [event for event in run.events() if isinstance(event, ev.TransferFinished) and event.op == "get"]
    for episode in episodes_of(run):
        load = loads_of(run, episode)[0]
        (answer,) = [event for event in load if isinstance(event, ev.RankLoaded)]
        retried = episode in ("leased", "masterless")
        assert answer.retries == retried
        assert len([get for get in gets if get.load == answer.load]) == 1 + retried


def test_a_request_whose_loads_keep_failing_is_told_of_no_hit_and_computed(failing: Callable[[str], Run]) -> None:
    run = failing("recompute")
    suppressed = [event for event in run.events() if isinstance(event, ev.LookupSuppressed)]
    assert [event.request.rpartition("-")[0] for event in suppressed] == ["changed", "relaid"]
    assert all((event.failures, event.hit_tokens) == (2, BLOCKS * 32) for event in suppressed)
    assert len(loads_of(run, "changed")) == len(loads_of(run, "relaid")) == 2
    # The others found another hit, or none.
    removed = loads_of(run, "removed")
    assert [event.tokens for load in removed for event in load if isinstance(event, ev.LoadPlanned)] == [
        BLOCKS * 32,
        BLOCK * 32,
    ]
    assert run.result["episodes"]["removed"]["cached"] == BLOCK * 32


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_left_behind(failing: Callable[[str], Run], name: str) -> None:
    events = failing(name).events()
    folded = fold(events)
    assert [recorded for recorded, _ in folded.digests] == [computed for _, computed in folded.digests]
    assert folded.state.pinned_blocks() == 0
    book = folded.state.book
    assert not book.jobs
    assert not book.loads
    assert not book.requests
    assert not [event for event in events if isinstance(event, ev.InvariantViolated | ev.Gap)]
    assert isinstance(events[-1], ev.LogClosed)


def test_with_several_groups_a_failed_load_takes_the_whole_request_and_its_tokens_stay_right(
    failing: Callable[[str], Run],
) -> None:
    run = failing("hybrid")
    saved, loaded = run.result["saved"], run.result["loaded"]
    assert {name: served["tokens"] for name, served in loaded.items()} == {
        name: served["tokens"] for name, served in saved.items()
    }
    assert loaded["whole"]["cached"] == BLOCKS * 32
    (whole,) = loads_of(run, "whole")
    assert {group for event in whole if isinstance(event, ev.LoadPlanned) for group, _ in event.blocks} == {0, 1}
    (answer,) = [event for event in loads_of(run, "removed")[0] if isinstance(event, ev.RankLoaded)]
    assert (answer.code, answer.failed_keys, answer.invalid) == ("BLOCK_NOT_FOUND", 1, ())
    state = fold(run.events()).state
    assert state.pinned_blocks() == 0
    assert not state.book.loads
