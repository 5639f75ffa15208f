"""What the simulator found in upstream or in the plugin, undone again, one at a time.

Each is a plan that was shrunk from the seed that found it, and a way to take the remedy out of the objects of a run.
With the remedy the plan passes; without, it fails as it did.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import MooncakeStoreScheduler

from tools.sim.store import plan as pl
from tools.sim.store.run import World

PLANS = Path(__file__).parent / "plans"


class Found(NamedTuple):
    """Something that was found: how it shows, and how its remedy is undone."""

    name: str
    what: str
    kind: str
    undo: Callable[[World], None]

    def plan(self) -> pl.Plan:
        """The shrunk plan."""
        return msgspec.json.decode((PLANS / f"{self.name}.json").read_bytes(), type=pl.Plan)


def _half(world: World) -> Any:
    return world.engine.connector.connector_scheduler


def _plan_as_upstream(world: World) -> None:
    half = _half(world)
    half._plan_without_returned = lambda output: MooncakeStoreScheduler.build_connector_meta(half, output)


def _count_as_vllm(world: World) -> None:
    _half(world)._pass_on = lambda output, loading: None


def _answer_every_hit(world: World) -> None:
    _half(world)._instead_of_a_hit = lambda *_: None


def _blame_the_policy(world: World) -> None:
    _half(world)._recovery_of = lambda load: "failed"


FOUND = (
    Found(
        "back-at-once",
        "a request comes back under its id in the step that ended it, and upstream forgets the new one with the old",
        "crash",
        _plan_as_upstream,
    ),
    Found(
        "load-never-started",
        "a running request is preempted by a reset and loads in the same step; upstream drops the load, and it waits",
        "book",
        _plan_as_upstream,
    ),
    Found(
        "answered-twice",
        "a rank answers a load twice; vLLM counts answers and not ranks",
        "crash",
        _count_as_vllm,
    ),
    Found(
        "stuck-at-the-head",
        "after a failed load vLLM leaves the request at the head of the line, with room set aside twice: nothing runs",
        "unsettled",
        _answer_every_hit,
    ),
    Found(
        "blamed-policy",
        "a request is aborted, then its load fails: the policy did not fail it",
        "rule",
        _blame_the_policy,
    ),
)
