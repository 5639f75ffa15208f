"""The checks can fail: each known mistake, switched on in the simulator, is found within 200 seeds."""

import pytest

from tools.sim.store.canaries import CANARIES
from tools.sim.store.run import Run


@pytest.mark.parametrize("canary", CANARIES, ids=[canary.name for canary in CANARIES])
def test_a_known_mistake_is_found_within_200_seeds(canary):
    for seed in range(200):
        result = Run(canary.plan(seed, 300), only=canary.finds, alter=canary.alter).play()
        if result.broken is not None:
            assert result.broken.kind in canary.finds
            return
    pytest.fail(f"{canary.what}: not found")
