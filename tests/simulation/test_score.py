"""The verdicts on simulated engines: what happened is found, and nothing is made up. `tools/score.py` has more."""

import pytest

from tools.score import score
from tools.sim.canaries import CANARIES

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
