"""The verdicts on what real engines write: right, with the right culprit, and silent where nothing was done."""

import pytest

from tests.engine import load_error_scenarios, pd_scenarios, poison, scenarios
from tests.engine.conftest import RunOnce
from tests.engine.expected import NAMES, SCENARIOS, Scenario
from tools.scoring.engine import PAGE, cells, score

RUN_TIMEOUT_S = 1600
"""A scenario of its own and the one that its truth is read from, or the wait for a worker that runs them."""

WITHOUT_A_LOG = {"reference", "reference_two_ranks", "upstream"}
"""Scenarios whose engines run without the plugin."""


@pytest.mark.timeout(RUN_TIMEOUT_S)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_a_replay_finds_what_was_done_to_the_engine_and_nothing_else(run_once: RunOnce, scenario: Scenario) -> None:
    beside = {name: run_once(scenario.module, name, scenario.timeout_s) for name in scenario.beside}
    row = score(scenario, run_once(scenario.module, scenario.name, scenario.timeout_s), beside)
    assert row.false_alarms == 0, "\n".join(row.problems)
    assert row.verdict == row.culprit == row.due, "\n".join(row.problems)


def test_every_scenario_that_leaves_a_log_is_scored() -> None:
    modules = {
        "scenarios": scenarios.SCENARIOS,
        "load_error_scenarios": load_error_scenarios.SCENARIOS,
        "pd_scenarios": pd_scenarios.SCENARIOS,
        "poison": poison.RUNS,
    }
    there = {(module, name) for module, names in modules.items() for name in names if name not in WITHOUT_A_LOG}
    assert {(scenario.module, scenario.name) for scenario in SCENARIOS} == there


def test_the_page_has_the_scenarios_that_are_run_and_what_they_must_find() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    _, _, *scored, total = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[:3] for row in scored] == [cells(scenario) for scenario in SCENARIOS]
    assert total[:3] == ["**all**", "", f"{sum(len(scenario.must) for scenario in SCENARIOS)} findings"]
