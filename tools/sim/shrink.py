"""The smallest plan that still fails.

Delta debugging over the plan's list: decisions are left out, as many at a time as possible, as long as the failure
stays. It stops within a number of runs, so the result is small, and not always the
smallest. This file knows plans, and how to ask whether one fails.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from tools.sim.plans import Plan

P = TypeVar("P", bound=Plan)

MAX_RUNS = 300
"""Runs that shrinking may take: less than a minute for a plan of 300 steps."""


def shrink(plan: P, fails: Callable[[P], bool], failed_step: int) -> P:
    """Return a plan that still fails, with as few decisions as were found.

    Args:
        plan: a plan that fails.
        fails: runs a plan and says whether it fails in the same way.
        failed_step: the step at which it failed; what would happen later is left out first.
    """
    runs = _Runs(fails)
    if failed_step < plan.steps:
        cut = tuple(decision for decision in plan.decisions if getattr(decision, "step", 0) <= failed_step)
        shorter = msgspec.structs.replace(plan, decisions=cut, steps=failed_step + 1)
        if runs.fail(shorter):
            plan = shorter
    chunk = max(1, len(plan.decisions) // 2)
    while chunk and runs.left:
        plan, removed = _without_chunks(plan, chunk, runs)
        if chunk == 1 and not removed:
            break
        chunk = max(1, chunk // 2) if not removed or chunk > 1 else 1
    return plan


class _Runs(Generic[P]):
    """Runs plans, as long as there are runs left."""

    def __init__(self, fails: Callable[[P], bool]) -> None:
        self.left = MAX_RUNS
        self._fails = fails

    def fail(self, plan: P) -> bool:
        """Return whether a plan fails; False when no run is left to find out."""
        if not self.left:
            return False
        self.left -= 1
        return self._fails(plan)


def _without_chunks(plan: P, chunk: int, runs: _Runs[P]) -> tuple[P, bool]:
    """Leave out runs of `chunk` decisions where the plan still fails without them; last ones first."""
    removed = False
    start = len(plan.decisions)
    while start > 0 and runs.left:
        start = max(0, start - chunk)
        kept = plan.decisions[:start] + plan.decisions[start + chunk :]
        smaller = msgspec.structs.replace(plan, decisions=kept)
        if runs.fail(smaller):
            plan, removed = smaller, True
    return plan, removed
