"""Those who use the engine, as the plan says: they send requests, abort them, send them again, and reset the cache.

This file knows the engine and the plan. It decides nothing by itself.
"""

from collections.abc import Callable

from vllm.v1.request import Request, RequestStatus

from tools.sim.engines import VOCABULARY
from tools.sim.plans import mix
from tools.sim.store import plan as pl
from tools.sim.store.engine import Engine

MAX_QUEUED = 40
"""Requests that may wait at a time; beyond it clients hold back, or a slow run would never drain."""


class Client:
    """All clients of a run.

    Args:
        plan: what they do.
        engine: to whom.
        count: told what happened.
    """

    def __init__(self, plan: pl.Plan, engine: Engine, count: Callable[[str], None]) -> None:
        self._seed = plan.seed
        self._engine = engine
        self._count = count
        self._arrivals = sorted(
            (decision for decision in plan.decisions if isinstance(decision, pl.Arrive)),
            key=lambda arrival: arrival.step,
        )
        self._next = 0
        self._waiting: dict[str, pl.Arrive] = {}
        self._aborts: list[pl.Abort] = [decision for decision in plan.decisions if isinstance(decision, pl.Abort)]
        self._resets = [decision for decision in plan.decisions if isinstance(decision, pl.Reset)]
        self._gone_home = False
        self._families: dict[int, list[int]] = {}

    def before_step(self, step: int) -> None:
        """Act between two steps."""
        self._abort(step, mid_step=False)
        for reset in [reset for reset in self._resets if reset.step == step]:
            self._reset(reset)
        # vLLM gives the output of a step to whoever has the request's id by then. With steps in flight that would be
        # the one that came back, so an id waits for the steps that name it.
        in_use = {*self._engine.scheduler.requests, *self._engine.in_flight}
        for request in [request for request in self._waiting if request not in in_use]:
            self._send(self._waiting.pop(request))
            in_use.add(request)
        while self._next < len(self._arrivals) and self._arrivals[self._next].step <= step and not self._gone_home:
            arrival = self._arrivals[self._next]
            self._next += 1
            if arrival.request in in_use:
                self._waiting.setdefault(arrival.request, arrival)
            elif len(in_use) < MAX_QUEUED:
                self._send(arrival)
                in_use.add(arrival.request)

    def mid_step(self, step: int) -> None:
        """Act while the model runs: vLLM takes aborts up before it takes the output."""
        self._abort(step, mid_step=True)

    def go_home(self) -> None:
        """Send nothing more."""
        self._gone_home = True
        self._waiting.clear()
        self._aborts.clear()

    def give_up(self) -> None:
        """Abort all that is left."""
        self._engine.scheduler.finish_requests(list(self._engine.scheduler.requests), RequestStatus.FINISHED_ABORTED)

    def _send(self, arrival: pl.Arrive) -> None:
        tokens = [*self._prefix(arrival.family, arrival.shared), *self._own(arrival.own_seed, arrival.own)]
        self._engine.submit(arrival.request, tokens, arrival.max_tokens)
        self._count("requests")

    def _prefix(self, family: int, length: int) -> list[int]:
        known = self._families.setdefault(family, [])
        while len(known) < length:
            known.append(mix(self._seed, family, len(known)) % VOCABULARY)
        return known[:length]

    def _own(self, seed: int, length: int) -> list[int]:
        return [mix(seed, index) % VOCABULARY for index in range(length)]

    def _abort(self, step: int, *, mid_step: bool) -> None:
        due = [abort for abort in self._aborts if abort.step <= step and abort.mid_step == mid_step]
        for abort in due:
            request = self._engine.scheduler.requests.get(abort.request)
            if request is not None and not request.is_finished() and self._is_in(request, abort.stage):
                self._aborts.remove(abort)
                self._count(f"aborts while {abort.stage}")
                self._engine.scheduler.finish_requests(abort.request, RequestStatus.FINISHED_ABORTED)

    def _is_in(self, request: Request, stage: str) -> bool:
        status = request.status
        match stage:
            case "waiting":
                return status == RequestStatus.WAITING
            case "loading":
                return status == RequestStatus.WAITING_FOR_REMOTE_KVS
            case "prefilling":
                return status == RequestStatus.RUNNING and request.is_prefill_chunk
            case "decoding":
                return status == RequestStatus.RUNNING and not request.is_prefill_chunk
            case "preempted":
                return status == RequestStatus.PREEMPTED
            case "storing":
                jobs = self._engine.ledger.state.book.jobs.values()
                return any(job.request == request.request_id for job in jobs)
            case _:
                return True

    def _reset(self, reset: pl.Reset) -> None:
        """Reset the prefix cache. vLLM refuses, by an error, while transfers hold blocks; the caller lives on."""
        self._count("resets of the prefix cache")
        try:
            self._engine.scheduler.reset_prefix_cache(reset.running, reset.store)
        except RuntimeError as refused:
            if "Failed to reset KV cache" not in str(refused):
                raise
            self._count("resets refused")
