"""What the canaries of both simulators share: a known mistake, switched on to prove that a check can fail."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from tools.sim.plans import Plan

P = TypeVar("P", bound=Plan)


class Canary(msgspec.Struct, frozen=True):
    """A known mistake.

    Attributes:
        incident: the public incident it stands for, or the part of the design it breaks.
        finds: kinds of failed check, any of which shows the damage.
        alter: switches it on in a world whose first step has not begun.
    """

    name: str
    incident: str
    what: str
    finds: frozenset[str]
    alter: Callable[[Any], None]

    def plan(self, seed: int, steps: int) -> Any:
        """Return the plan of a seed, with engines that a broken rule does not stop."""
        raise NotImplementedError


def not_stopped(plan: P) -> P:
    """Return a plan with engines that a broken rule does not stop: a stopped engine could not show the damage."""
    return replace(plan, shape=replace(plan.shape, on_invariant_violation="quarantine"))
