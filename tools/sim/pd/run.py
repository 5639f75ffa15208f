"""One P/D run, from a plan to a result."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.request import RequestStatus

from ledger import events as ev
from ledger.errors import InvariantViolation
from tools.sim.check import described
from tools.sim.clock import STEP_NS, Clock
from tools.sim.engines import VOCABULARY, Batch
from tools.sim.pd import plan as pl
from tools.sim.pd.checks import Checks, EngineWatch
from tools.sim.pd.engine import Engine, virtual_time
from tools.sim.pd.memory import Machines
from tools.sim.pd.wire import Faults, Network
from tools.sim.plans import mix
from tools.sim.result import Result

IDLE_NS = 25 * STEP_NS
"""How long a step takes after the faults in which no engine has anything to compute: the waits there are minutes."""

PATIENCE_STEPS = 600
"""Steps after the faults until clients give up on requests that vLLM's own scheduler has stuck."""

LAST_STEP = 2_000
"""Steps after the faults by which everything must have settled: eight minutes of waiting, or as much of computing."""


class World:
    """Everything of one run."""

    def __init__(self, plan: pl.Plan, only: frozenset[str] | None) -> None:
        self.plan = plan
        self.clock = Clock()
        self.checks = Checks(self.clock, only)
        self.faults = Faults(plan, self.clock)
        sides = [*plan.shape.prefills, plan.shape.decode]
        self.machines = Machines(sides, 2 if plan.shape.window else 1)
        self.machines.touched, self.machines.wrong = self.checks.touched, self.checks.wrong
        self.network = Network(self.clock, self.faults, self.machines)
        self.hash = hashlib.sha256()
        self.engines: dict[str, Engine] = {}

    def build(self) -> None:
        """Start the engines."""
        names = [*(f"P{index}" for index in range(len(self.plan.shape.prefills))), "D"]
        for index, name in enumerate(names):
            engine = self.engines[name] = Engine(index, name, self.plan, self.network)
            self.checks.watches.append(EngineWatch(engine, self.checks, self.hash))
        self.clock.advance(STEP_NS)  # the prefills' workers register

    def close(self) -> None:
        """End every task and call that is left. What is recorded by then is in the result, and nothing later."""
        for engine in self.engines.values():
            for loop in engine.loops:
                loop.abandon()
        self.clock.advance(self.clock.now_ns + STEP_NS)
        self.clock.close()

    @property
    def alive(self) -> list[EngineWatch]:
        """The engines that were not killed."""
        return [watch for watch in self.checks.watches if not watch.engine.dead]


class Router:
    """The clients and their router: they send requests to both sides, and abort them, as the plan says."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._arrivals: dict[int, list[tuple[str, pl.Request, str]]] = {}
        self._aborts = [decision for decision in world.plan.decisions if isinstance(decision, pl.Abort)]
        for decision in world.plan.decisions:
            if not isinstance(decision, pl.Request):
                continue
            if decision.fault != "no prefill":
                self._plan(decision.step, f"P{decision.prefill}", decision, f"p-{decision.request}")
            if decision.fault != "no decode":
                self._plan(decision.decode_step, "D", decision, decision.request)
            if decision.fault == "retry":
                self._plan(decision.decode_step + 5, "D", decision, f"{decision.request}-again")

    def _plan(self, step: int, engine: str, request: pl.Request, name: str) -> None:
        self._arrivals.setdefault(step, []).append((engine, request, name))

    def act(self, step: int) -> None:
        """Do what is due."""
        engines, count = self._world.engines, self._world.checks.count
        for name, request, request_id in self._arrivals.pop(step, ()):
            engine = engines[name]
            if engine.dead:
                continue
            if request.fault:
                count(f"routes: {request.fault}")
            prefill = name != "D"
            transfer = {"do_remote_decode": True, "transfer_id": f"t-{request.request}"} if prefill else _pull(request)
            engine.submit(request_id, self._tokens(request), 1 if prefill else request.max_tokens, transfer)
        for abort in [abort for abort in self._aborts if abort.step <= step]:
            name = f"p-{abort.request}" if abort.side == "prefill" else abort.request
            for engine in engines.values():
                request = engine.scheduler.requests.get(name)
                if engine.dead or request is None or request.is_finished() or not _is_in(request, abort.stage):
                    continue
                self._aborts.remove(abort)
                count(f"aborts: {abort.side} {abort.stage}")
                engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                break

    def _tokens(self, request: pl.Request) -> list[int]:
        family = [mix(request.family, index) % VOCABULARY for index in range(request.shared)]
        return [*family, *(mix(request.own_seed, index) % VOCABULARY for index in range(request.own))]


def _pull(request: pl.Request) -> dict[str, Any]:
    engine = f"P{request.prefill}"
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": f"t-{request.request}",
        "remote_engine_id": "P9" if request.fault == "unknown engine" else engine,
        "remote_bootstrap_addr": f"http://{'P9' if request.fault == 'wrong address' else engine}:80",
    }


def _is_in(request: Any, stage: str) -> bool:
    status = request.status
    return {
        "waiting": status == RequestStatus.WAITING,
        "loading": status == RequestStatus.WAITING_FOR_REMOTE_KVS,
        "running": status == RequestStatus.RUNNING,
        "any": True,
    }[stage]


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
        keep_log: bool = True,
        alter: Callable[[World], None] | None = None,
    ) -> None:
        self.world = World(plan, only)
        self._keep_log = keep_log
        self._plan = plan
        self._alter = alter
        self._steps = 0
        self._dying = {decision.step: decision.engine for decision in plan.decisions if isinstance(decision, pl.Die)}

    def play(self) -> Result:
        """Play the run to its end, and return what came of it."""
        started = time.process_time()
        world = self.world
        with virtual_time(world.clock, world.network):
            try:
                world.build()
                if self._alter is not None:
                    self._alter(world)
                self._play()
            except Exception as error:  # noqa: BLE001 - whatever leaves an engine is a finding, and the run ends with it
                world.checks.fail("crash", described(error))
            finally:
                world.close()
        seen = dict(world.checks.seen)
        seen.update({f"faults: {name}": count for name, count in world.faults.hits.items()})
        for watch in world.checks.watches:
            for kind, count in watch.kinds.items():
                seen[f"events: {kind}"] = seen.get(f"events: {kind}", 0) + count
        return Result(
            seed=self._plan.seed,
            steps=self._steps,
            events=sum(len(watch.lines) for watch in world.checks.watches),
            ended="broken" if world.checks.broken is not None else "settled",
            digest=world.hash.hexdigest(),
            cpu_s=time.process_time() - started,
            seen=seen,
            passed_over=world.checks.passed_over,
            lines={watch.engine.name: watch.lines for watch in world.checks.watches} if self._keep_log else {},
            broken=world.checks.broken,
        )

    def _play(self) -> None:
        world, checks = self.world, self.world.checks
        router = Router(world)
        for step in range(self._plan.steps):
            router.act(step)
            if step in self._dying:
                self._kill(self._dying[step])
            self._tick(STEP_NS)
            if checks.broken is not None:
                return
        world.faults.active = False
        world.clock.release()
        for step in range(LAST_STEP):
            if all(watch.is_settled() for watch in world.alive):
                break
            if step == PATIENCE_STEPS:
                self._give_up_on_the_starved()
            self._tick(0)
            if checks.broken is not None:
                return
        world.clock.advance(world.clock.now_ns + 4 * STEP_NS)  # the last messages arrive
        for watch in world.alive:
            watch.after_step()
            watch.at_the_end()
            if checks.broken is None:
                watch.engine.ledger.log.append(ev.LogClosed)
            watch.take()

    def _give_up_on_the_starved(self) -> None:
        """Abort what vLLM's scheduler has stuck by itself; see `tools.sim.store.run.Run._is_starved`."""
        for watch in self.world.alive:
            scheduler, book = watch.engine.scheduler, watch.engine.ledger.state.book
            starved = self._plan.shape.window and scheduler.kv_holding_waiting and not scheduler.running
            if starved and not book.recvs and not book.sends:
                self.world.checks.count("engines starved by vLLM's own estimate")
                scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)

    def _kill(self, name: str) -> None:
        self.world.engines[name].kill()
        self.world.checks.count(f"killed: {name[0]}")

    def _tick(self, step_ns: int) -> None:
        """Make a step of every engine. `step_ns`: how long it takes; 0 for as long as it has something to compute."""
        world, checks = self.world, self.world.checks
        checks.step = self._steps
        self._steps += 1
        batches: list[tuple[EngineWatch, Batch]] = []
        for watch in world.alive:
            batch = watch.engine.schedule()
            if batch is not None:
                watch.scheduled(batch.output.kv_connector_metadata)
                batches.append((watch, batch))
        if not step_ns:
            busy = any(batch.output.total_num_scheduled_tokens for _, batch in batches)
            step_ns = STEP_NS if busy else IDLE_NS
        begun_ns = world.clock.now_ns
        world.clock.advance(begun_ns + min(step_ns, STEP_NS) // 2)
        for watch, batch in batches:
            watch.engine.run(batch)
        world.clock.advance(begun_ns + step_ns)
        for watch, batch in batches:
            output = watch.engine.answer(batch)
            try:
                watch.engine.scheduler.update_from_output(batch.output, output)
            except InvariantViolation as violation:
                checks.fail("violation", f"{watch.engine.name}: {violation}")
        for watch in world.alive:
            watch.after_step()
