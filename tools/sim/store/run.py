"""One run, from a plan to a result."""

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from ledger import events as ev
from ledger.errors import InvariantViolation
from tools.sim.check import described
from tools.sim.clock import STEP_NS, Clock
from tools.sim.engines import Batch
from tools.sim.result import Result as CommonResult
from tools.sim.store import plan as pl
from tools.sim.store.checked_log import CheckedLog
from tools.sim.store.checks import Checks
from tools.sim.store.client import Client
from tools.sim.store.engine import Engine
from tools.sim.store.objects import Faults, Store

PATIENCE_STEPS = 400
"""Steps after the faults until clients give up on what is stuck behind blocks that are lost for good."""

LAST_STEP = 2_000
"""Steps after the faults by which everything must have settled."""


ENGINE = "simulated"
"""The name of the engine, and of its log."""


class Result(CommonResult, frozen=True, kw_only=True):
    """What came of a run. `state` is the digest of the ledger's state at its end."""

    state: str


class World:
    """Everything of one run, and who is told what: the engine and the store speak to the checks through it."""

    def __init__(self, plan: pl.Plan, only: frozenset[str] | None, keep_log: bool) -> None:
        self.plan = plan
        self.clock = Clock()
        self.checks = Checks(plan.shape, self.clock, only)
        self.store = Store(plan.seed)
        self.faults = Faults(plan, self.clock)
        self.engine = Engine(plan, self.checks, self.store, self.faults)  # type: ignore[arg-type]
        self.hash = hashlib.sha256()
        self.checked_log = CheckedLog(self.engine.ledger.log, keep_log, self.hash)
        self.checks.bind(self.engine.scheduler, self.engine.ledger.log, self.checked_log)
        self.client = Client(plan, self.engine, self.checks.count)


class Run:
    """A run in progress.

    Args:
        plan: what happens.
        only: look for these kinds of failure alone; see `Checks`.
        keep_log: keep the events for the result.
        alter: called with the world before the first step; the canaries come in here.
    """

    def __init__(
        self,
        plan: pl.Plan,
        only: frozenset[str] | None = None,
        keep_log: bool = False,
        alter: Callable[["World"], None] | None = None,
    ) -> None:
        self.world = World(plan, only, keep_log)
        self._plan = plan
        self._step = 0
        self._ended = ""
        self._at: dict[int, list[Any]] = {}
        for decision in plan.decisions:
            if isinstance(decision, pl.Stray | pl.Die | pl.Lose | pl.Evict):
                self._at.setdefault(decision.step, []).append(decision)
        if alter is not None:
            alter(self.world)

    def play(self) -> Result:
        """Play the run to its end, and return what came of it."""
        started = time.process_time()
        checks, world = self.world.checks, self.world
        try:
            self._play()
        except Exception as error:  # noqa: BLE001 - whatever leaves the engine is a finding, and the run ends with it
            checks.fail("crash", described(error))
        finally:
            world.clock.close()
        world.checked_log.take()
        return Result(
            seed=self._plan.seed,
            steps=world.engine.executed,
            events=world.checked_log.count,
            ended=self._ended or "broken",
            digest=world.hash.hexdigest(),
            state=world.engine.ledger.state.digest(),
            cpu_s=time.process_time() - started,
            seen={
                **checks.seen,
                **_prefixed("events: ", world.checked_log.kinds),
                **_prefixed("faults: ", world.faults.hits),
            },
            broken=checks.broken,
            lines={ENGINE: world.checked_log.lines} if world.checked_log.lines else {},
            passed_over=checks.passed_over,
        )

    def _play(self) -> None:
        checks, world = self.world.checks, self.world
        while self._step < self._plan.steps and not self._over():
            self._tick()
        if self._over():
            return
        world.faults.active = False
        checks.lookup_hook = None
        world.client.go_home()
        world.clock.release()
        for step in range(LAST_STEP):
            if checks.is_settled() and not world.engine.queue and not self._has_more():
                break
            if step == PATIENCE_STEPS and (any(checks.leftovers()) or self._is_starved()):
                world.client.give_up()
            self._tick()
            if self._over():
                return
        self._ended = "settled"
        checks.at_the_end()
        if checks.broken is None:
            world.engine.ledger.log.append(ev.LogClosed)

    def _is_starved(self) -> bool:
        """Whether vLLM's scheduler is stuck by itself: nothing is open or runs, and requests hold all blocks and wait.

        vLLM 0.32 and 0.33 admit asynchronous loads of models with a sliding window by too low an estimate of what they
        still need, so that several of them may fill the pool and wait for each other. No connector can help it, so it
        is counted and clients give up. With one KV-cache group it must not happen.
        """
        scheduler, checks = self.world.engine.scheduler, self.world.checks
        starved = (
            self._plan.shape.layout in ("window", "window2")
            and bool(scheduler.kv_holding_waiting)
            and not scheduler.running
            and not checks.jobs
            and not checks.loads
        )
        if starved:
            checks.count("engines starved by vLLM's own estimate")
        return starved

    def _has_more(self) -> bool:
        """Whether vLLM wants another step although nothing is open: it still has to tell its workers who finished."""
        jobs, loads = self.world.checks.leftovers()
        return not jobs and not loads and self.world.engine.scheduler.has_requests()

    def _over(self) -> bool:
        return self.world.checks.broken is not None or bool(self._ended)

    def _tick(self) -> None:
        world, checks = self.world, self.world.checks
        step = self._step
        self._step += 1
        checks.step = step
        decisions = self._at.pop(step, ())
        for decision in decisions:
            self._strike(decision)
        if self._ended:
            return
        world.client.before_step(step)
        scheduled = world.engine.executed
        batch = world.engine.schedule()
        if world.engine.executed > scheduled:
            checks.scheduled(world.engine.metadata_of(self._newest(batch)))
        if batch is not None:
            self._finish(batch, decisions)
        elif world.engine.executed == scheduled:
            self._idle()
        if str(self._ended) == "violation":  # in the middle of an update, so the account of this step is not the book's
            checks.check_events()
        else:
            checks.after_step()

    def _newest(self, batch: Batch | None) -> Batch:
        queue = self.world.engine.queue
        if queue:
            return queue[0]
        if batch is None:
            raise RuntimeError("a step was scheduled and is nowhere")
        return batch

    def _idle(self) -> None:
        if self.world.checks.jobs.keys() - self.world.checks.leftovers()[0]:
            self.world.checks.fail("stopped", "the engine would stop stepping while store jobs are open")
        self.world.engine.idle()

    def _finish(self, batch: Batch, decisions: Iterable[Any]) -> None:
        world, checks = self.world, self.world.checks
        lost = [decision for decision in decisions if isinstance(decision, pl.Lose)]
        down = {decision.rank for decision in lost if decision.way == "down"}
        up = {decision.rank for decision in lost if decision.way == "up"}
        for _ in down:
            checks.lost_down(world.engine.metadata_of(batch))
        answers = world.engine.execute(batch, down, up)
        for rank in sorted(up):
            checks.lost_up(world.engine.unheard[rank])
        world.client.mid_step(self._step)
        checks.delivered(answers)
        output = world.engine.combine(batch, answers)
        violations = world.checked_log.violations
        try:
            world.engine.update(batch, output)
        except InvariantViolation as violation:
            self._stopped_by_the_books(violation)
            return
        world.checked_log.take()
        cried = world.checked_log.violations > violations
        if cried != bool(checks.violation_due):
            detail = checks.violation_due or "a rule was reported as broken, and every report was sound"
            checks.fail("violation", detail if cried else f"nothing was recorded: {detail}")

    def _stopped_by_the_books(self, violation: InvariantViolation) -> None:
        checks = self.world.checks
        self._ended = "violation"
        checks.count("engines stopped by the books")
        if self._plan.shape.on_invariant_violation != "raise" or not checks.violation_due:
            checks.fail("violation", f"the books stopped the engine without a reason: {violation}")
        held = self.world.checks.watched_pool.held
        for number, job in checks.jobs.items():
            if any(held[block] == 0 for block in job.blocks):
                checks.fail("pins", f"the engine stopped, and blocks of job {number} are not held any more")

    def _strike(self, decision: Any) -> None:
        world, checks = self.world, self.world.checks
        match decision:
            case pl.Die():
                checks.count("ranks died")
                self._ended = "died"
            case pl.Evict(before_load=0):
                world.store.evict(decision.share)
            case pl.Evict():
                until_ns = world.clock.now_ns + decision.before_load * STEP_NS

                def evict() -> None:
                    if world.clock.now_ns < until_ns:
                        world.clock.at(world.clock.now_ns + 1, lambda: world.store.evict(decision.share))

                checks.lookup_hook = evict
            case pl.Stray():
                self._stray(decision)
            case _:
                pass

    def _stray(self, decision: pl.Stray) -> None:
        world, checks = self.world, self.world.checks
        rank = world.engine.ranks[decision.rank]
        if decision.what == "unknown":
            rank.report_job(checks.next_job + 1_000)
        elif decision.what == "settled":
            settled = next((job for job in range(checks.next_job) if job not in checks.jobs), None)
            if settled is not None:
                rank.report_job(settled)
        else:
            load = checks.settled_load()
            if load is not None:
                rank.report_load(load[1], load[0])


def _prefixed(prefix: str, counts: dict[str, int]) -> dict[str, int]:
    return {prefix + name: count for name, count in counts.items()}
