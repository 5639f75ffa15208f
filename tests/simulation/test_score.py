"""The verdicts on simulated engines: what happened is found, and nothing is made up. `tools/score.py` has more."""

import re

import pytest

from tools.scoring import pd
from tools.scoring.pd import CASES as PD_CASES
from tools.scoring.pd import PD_STEPS
from tools.scoring.simulator import PAGE
from tools.scoring.store import CASES, score
from tools.sim.pd import plan as pd_plan
from tools.sim.store.canaries import CANARIES
from tools.sim.store.plan import FAULTS

SEEDS = range(900, 912)
"""None of those that the verdicts were looked at with while they were written."""

STEPS = 300


@pytest.mark.parametrize("seed", SEEDS)
def test_every_fault_is_explained_and_none_is_made_up(seed: int):
    scored = score(seed, STEPS, "")
    assert scored.alarms == []
    assert scored.misses == []


@pytest.mark.parametrize("canary", [each.name for each in CANARIES])
def test_the_verdicts_make_up_nothing_about_a_known_mistake(canary: str):
    for seed in range(900, 903):
        assert score(seed, STEPS, canary).alarms == []


@pytest.mark.parametrize("canary", ["pins-off", "first-rank"])
def test_the_keys_that_the_verdicts_name_are_those_that_hold_wrong_kv(canary: str):
    scores = [score(seed, STEPS, canary) for seed in range(900, 906)]
    due = sum(each.due["poisoned key"] for each in scores)
    assert due
    # A request that shares blocks in the engine's own prefix cache leaves no trace of whom it shares them with.
    assert sum(each.hit["poisoned key"] for each in scores) >= 0.9 * due


def test_what_the_state_is_beside_the_log_is_found():
    scored = [score(seed, STEPS, "beside-the-log") for seed in range(900, 903)]
    assert sum(each.due["other state"] for each in scored)
    assert all(each.hit == each.due for each in scored)


@pytest.mark.parametrize("seed", range(900, 920))
def test_every_fault_between_prefills_and_a_decode_is_explained_and_none_is_made_up(seed: int):
    scored = pd.score(seed, PD_STEPS)
    assert scored.alarms == []
    assert scored.misses == []


def rows_of_page(first_cell: str) -> list[list[str]]:
    """The rows of the page's table whose head begins with a cell."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    for table in tables:
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        if head[: len(first_cell.split("|"))] == first_cell.split("|"):
            return rows
    raise AssertionError(f"the page has no table that begins with {first_cell}")


def test_the_page_has_every_mistake_and_at_least_500_seeds_with_all_faults():
    runs = [row[0].split(" x ") for row in rows_of_page("|".join(["runs", "events", *CASES]))]
    assert [name for _, name in runs] == ["all faults", *(each.name for each in CANARIES)]
    assert int(runs[0][0]) >= 500


def test_every_kind_of_fault_struck_in_the_runs_of_the_page():
    struck = {fault: int(runs) for fault, runs, *_ in rows_of_page("fault")}
    assert list(struck) == [*FAULTS, "none"]
    assert all(struck.values())


def test_every_kind_of_fault_between_prefills_and_a_decode_was_in_the_runs_of_the_page():
    assert rows_of_page("|".join(["runs", "events", *PD_CASES]))
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith("Runs by fault: ")]
    drawn = dict(each.rsplit(" ", 1) for each in line.removeprefix("Runs by fault: ").rstrip(".").split(", "))
    assert list(drawn) == list(dict.fromkeys(pd_plan.FAULTS))
    assert all(int(runs) for runs in drawn.values())
