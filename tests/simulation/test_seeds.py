"""Seeds that CI plays: every check holds after every step, and when faults stop everything settles."""

import pytest

SEEDS_PER_TEST = 25


@pytest.mark.parametrize("first", range(0, 200, SEEDS_PER_TEST))
def test_every_check_holds_after_every_step(play, first):
    broken = [
        f"seed {seed}, step {result.broken.step}: {result.broken.kind}: {result.broken.detail}"
        for seed in range(first, first + SEEDS_PER_TEST)
        if (result := play(seed)).broken is not None
    ]
    assert broken == []


def test_the_seeds_of_ci_meet_every_kind_of_fault_and_every_stage_of_a_request():
    from tests.simulation.conftest import played
    from tools.sim.store import plan as pl

    seen = {what for result in played for what in result.seen}
    if len(played) < 200:
        pytest.skip("says something about all seeds only, and not all were played")
    wanted = {f"faults: {kind}" for kind in ("late", "raise", "hang", "twice")}
    assert sum(what.startswith("faults: code ") for what in seen) >= len(pl.CODES) // 2
    wanted |= {f"aborts while {stage}" for stage in pl.STAGES}
    wanted |= {f"rank outcomes: {how}" for how in ("stored", "present", "nothing", "stale", "skipped", "failed")}
    wanted |= {"ranks died", "messages lost", "broken reports", "engines stopped by the books", "loads answered twice"}
    wanted |= {"resets of the prefix cache", "resets refused"}  # tails at the end of a request have unit tests
    wanted |= {f"events: {kind}" for kind in ("job_skipped", "request_resumed", "load_failed", "stall_suspected")}
    assert wanted - seen == set()
