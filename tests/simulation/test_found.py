"""What the simulator found stays found: with its remedy undone the shrunk plan still fails, with it the plan passes."""

import pytest

from tests.simulation.undone import FOUND
from tools.sim.store.run import Run


@pytest.mark.parametrize("found", FOUND, ids=[found.name for found in FOUND])
def test_what_was_found_passes_with_its_remedy(play, found):
    result = play(found.plan())
    assert result.broken is None
    assert result.ended == "settled"


@pytest.mark.parametrize("found", FOUND, ids=[found.name for found in FOUND])
def test_what_was_found_shows_again_when_its_remedy_is_undone(found):
    broken = Run(found.plan(), alter=found.undo).play().broken
    assert broken is not None
    assert broken.kind == found.kind
