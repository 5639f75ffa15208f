"""Known mistakes, switched on in the simulator and nowhere else: the checks must find each of them.

The first are public incidents of upstream's connector, or of one like it; the others break one rule of the design
each. The plugin has no such switch: the objects of one run are altered from outside before its first step. Broken
reports do not stop the engine in these runs (`on_invariant_violation=quarantine`), because a stopped engine could not
show the damage.

This file knows the plugin's inner methods, and is the only part of the simulator that touches them.
"""

import sys
from collections.abc import Callable
from typing import Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.store.metadata import JobReport, LedgerWorkerMetadata
from connector.store.worker import StoreOutbox
from ledger.blocks import Blocks, numbers
from tools.sim.canary import Canary as CommonCanary
from tools.sim.canary import not_stopped
from tools.sim.store import plan as pl
from tools.sim.store.run import World


class Canary(CommonCanary, frozen=True):
    """A mistake. `ranks`: numbers of ranks with which it can show."""

    ranks: tuple[int, ...] = (1, 2, 3, 4)

    def plan(self, seed: int, steps: int) -> pl.Plan:
        """Return the plan of a seed, with an engine that a broken rule does not stop."""
        return not_stopped(pl.draw(seed, steps, ranks=self.ranks))


def _half(world: World) -> Any:
    return world.engine.connector.connector_scheduler


def _without_pins(world: World) -> None:
    half = _half(world)
    half._touch = half._free = lambda blocks: None


def _by_request(world: World) -> None:
    """Count a late report for the request that has come back since, as books would that know requests only."""
    half = _half(world)
    book_it = half._rank_completed

    def rank_completed(report: JobReport) -> None:
        jobs = half.ledger.state.book.jobs
        job = jobs.get(report.job)
        if job is None:
            return  # its request's count had reached zero before
        later = [
            number
            for number, other in jobs.items()
            if other.request == job.request and other.generation > job.generation and report.rank in other.waiting
        ]
        book_it(report._replace(job=later[-1]) if later else report)

    half._rank_completed = rank_completed


def _silent_on_exceptions(world: World) -> None:
    for rank in world.engine.ranks:
        thread = rank.worker.kv_send_thread
        if thread is not None:
            thread.finish_store_job = _only_without_exception(thread.finish_store_job)  # type: ignore[method-assign]


def _only_without_exception(report: Callable[[Any], None]) -> Callable[[Any], None]:
    def finish_store_job(req_meta: Any) -> None:
        if sys.exc_info()[1] is None:
            report(req_meta)

    return finish_store_job


def _freed_on_first_failure(world: World) -> None:
    """Tell vLLM that a load has finished when its first rank fails, whatever the others still do."""
    half, requests = _half(world), world.engine.scheduler.requests
    update = half.update_connector_output
    told: dict[str, None] = {}

    def update_connector_output(output: KVConnectorOutput) -> None:
        metadata = output.kv_connector_worker_meta
        book = half.ledger.state.book
        failed: list[str] = []
        if isinstance(metadata, LedgerWorkerMetadata):
            failed = [
                book.loads[report.load].request
                for report in metadata.loads
                if report.outcome == "failed" and report.load in book.loads
            ]
        update(output)
        finished = output.finished_recving or set[str]()
        output.finished_recving = finished
        for request in sorted(finished):
            if request in told:
                del told[request]
                finished.discard(request)
        for request in failed:
            if request in book.loading and request not in told and _waits(requests.get(request)):
                told[request] = None
                finished.add(request)

    half.update_connector_output = update_connector_output


def _waits(request: Any) -> bool:
    return request is not None and (request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.is_finished())


def _freed_by_first_rank(world: World) -> None:
    """Give a job's blocks back when its first rank reports."""
    half = _half(world)
    book_it, free = half._rank_completed, half._free
    freed: dict[int, None] = {}

    def rank_completed(report: JobReport) -> None:
        job = half.ledger.state.book.jobs.get(report.job)
        if job is not None and job.blocks and report.job not in freed:
            freed[report.job] = None
            free(job.blocks)
        book_it(report)

    half._rank_completed = rank_completed
    half._free = lambda blocks: None


def _report_before_answer(world: World) -> None:
    """Tell of a load as soon as its rank has, and not only when vLLM hears of it."""
    for rank in world.engine.ranks:
        _tell_at_once(rank.worker._outbox)


def _tell_at_once(reports: StoreOutbox) -> None:
    take = reports.take

    def take_all() -> LedgerWorkerMetadata | None:
        for held in reports._loads.values():
            reports._due_loads.extend(held)
        reports._loads.clear()
        return take()

    reports.take = take_all  # type: ignore[method-assign]


def _freed_head_first(world: World) -> None:
    half = _half(world)

    def free(blocks: Blocks) -> None:
        pool = half._bound_pool()
        pool.free_blocks([pool.blocks[block] for block in numbers(blocks)])

    half._free = free


def _without_bounds(world: World) -> None:
    half = _half(world)
    half._max_jobs = half._max_pinned_blocks = 1 << 62


def _lets_the_engine_sleep(world: World) -> None:
    world.engine.connector.has_pending_push_work = lambda: False  # type: ignore[method-assign]


def _changed_beside_the_log(world: World) -> None:
    half = _half(world)
    book_it = half._rank_completed

    def rank_completed(report: JobReport) -> None:
        book_it(report)
        half.ledger.state.book.next_load += 1

    half._rank_completed = rank_completed


def _deaf_to_broken_reports(world: World) -> None:
    _half(world).ledger.violated = lambda refused, fields: None


CANARIES: tuple[Canary, ...] = (
    Canary(
        "pins-off",
        "S1",
        "jobs reference no blocks: a preempted request's blocks are overwritten before they are read",
        frozenset({"poison"}),
        _without_pins,
    ),
    Canary(
        "by-request",
        "S2",
        "reports are counted by request and not by job: those of a preempted one count for the one that came back",
        frozenset({"unsettled"}),
        _by_request,
    ),
    Canary(
        "silent-exception",
        "S3",
        "a rank whose job raised does not report it",
        frozenset({"unsettled"}),
        _silent_on_exceptions,
    ),
    Canary(
        "first-failure",
        "S6",
        "a load's blocks are given up when its first rank fails, while another still writes",
        frozenset({"poison", "wrong_kv"}),
        _freed_on_first_failure,
        ranks=(2, 3, 4),
    ),
    Canary(
        "first-rank",
        "as S6, for a save",
        "a job's blocks are given up when its first rank reports, while another still reads",
        frozenset({"poison"}),
        _freed_by_first_rank,
        ranks=(2, 3, 4),
    ),
    Canary(
        "report-first",
        "a rank's report that overtakes vLLM's own answer",
        "a load's report may go a step before vLLM hears of the load, and then nobody knows whose answer that is",
        frozenset({"unsettled"}),
        _report_before_answer,
    ),
    # From here on no incident, but the rest of the checks: each must be able to fail.
    Canary(
        "head-first",
        "design, section 5",
        "a job's blocks are given back first to last, so that shared prefixes are evicted first",
        frozenset({"rule"}),
        _freed_head_first,
    ),
    Canary("no-bounds", "bounds on store jobs", "a save is never skipped", frozenset({"bound"}), _without_bounds),
    Canary(
        "asleep",
        "design, section 5",
        "the engine may stop stepping while jobs are open",
        frozenset({"stopped"}),
        _lets_the_engine_sleep,
    ),
    Canary(
        "beside-the-log",
        "design, section 3",
        "the state is changed without an event",
        frozenset({"fold"}),
        _changed_beside_the_log,
    ),
    Canary(
        "deaf",
        "design, section 5",
        "a broken report is not recorded",
        frozenset({"violation"}),
        _deaf_to_broken_reports,
    ),
)

BY_NAME = {canary.name: canary for canary in CANARIES}
