"""The scheduler half of the store connector: plans with upstream, keeps the ledger itself.

Each hook decides which events happen, records them, and acts on vLLM's block pool only from what was recorded. All that
is known of jobs, pins, ranks and loads is in `ledger.state`; there is no second copy here.

    hook (vLLM calls it)            when                                events it records
    ------------------------------  ----------------------------------  ---------------------------------------------
    on_new_request                  a request enters the waiting queue  request_queued
    get_num_new_matched_tokens      a waiting request is looked up      lookup_answered (when the answer changes),
                                                                        lookup_deferred, lookup_suppressed
    update_state_after_alloc        blocks were allocated for it        request_preempted, blocks_allocated,
                                                                        load_planned
    build_connector_meta            the end of every schedule()         request_preempted, request_scheduled,
                                                                        request_resumed, blocks_allocated,
                                                                        blocks_released, job_registered, pin_touched,
                                                                        job_skipped, load_registered, checkpoint,
                                                                        stall_suspected
    register_finished_partial_tail  a request ended, its tail can be    job_registered, pin_touched, job_skipped
                                    saved
    request_ended                   a request ended or was aborted      blocks_released,
                                                                        request_finished | request_aborted
    update_connector_output         the workers' reports of a step      rank_completed, job_settled, blocks_freed,
                                                                        rank_loaded, load_failed, load_settled,
                                                                        load_recovered, report_ignored
    has_pending_push_work           may the engine stop stepping?       none

This file may know vLLM's scheduler-side classes. It does no I/O and starts no thread.
"""

import copy
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreConnectorMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import (
    MooncakeStoreScheduler,
    _partial_tail_non_mamba_puts,  # pyright: ignore[reportPrivateUsage] - upstream's planning of tails, see compat
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connector.runtime.requests import GroupIds, RequestObserver, generation_of, without_null
from connector.runtime.runtime import LedgerRuntime
from connector.store.metadata import JobReport, LedgerWorkerMetadata, LoadReport, attach
from ledger import events as ev
from ledger.blocks import Blocks, by_group, count, numbers, to_ranges
from ledger.state.records import Load, RequestRecord

_NO_LOADS: dict[str, int] = {}

# Upstream's parts of the two hooks that run in every step. Named, because `super()` is looked up anew at each call.
_LOOK_UP = MooncakeStoreScheduler.get_num_new_matched_tokens
_PLAN = MooncakeStoreScheduler.build_connector_meta
_NOBODY: frozenset[str] = frozenset()


class _PlanningPool:
    """What upstream's code sees as the block pool: it may look blocks up, and its own references are not taken.

    Upstream plans and pins in one function. The plan is wanted; the pin is recorded first and then taken by us.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.blocks = pool.blocks

    def touch(self, blocks: Sequence[object]) -> None:
        """Take no reference: `LedgerStoreScheduler._register_job` does, from the event that records it."""


class _NoPins(dict[int, tuple[list[int], int]]):
    """Upstream's own ledger of pins, which stays empty: ours is the ledger."""

    def __setitem__(self, job: int, pins: tuple[list[int], int]) -> None:
        """Keep nothing."""


class LedgerStoreScheduler(MooncakeStoreScheduler):
    """Upstream's scheduler half with our bookkeeping. Made by `rebase_class`, then given its ledger by `open`."""

    ledger: LedgerRuntime

    def open(self, ledger: LedgerRuntime, num_blocks: int) -> None:
        """Begin to record in `ledger`, for a pool of `num_blocks` blocks."""
        self.ledger = ledger
        self._log = ledger.log
        self._name = ledger.name
        self._book = ledger.state.book
        self._pool: BlockPool | None = None
        self._ranks = to_ranges(range(self._num_workers))
        self._kv_groups: tuple[int, ...] = tuple(self._store_group_ids)
        """The KV-cache group of each group that the store knows."""
        self._block_sizes = tuple(group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups)
        self._requests = RequestObserver(ledger, self._block_sizes)
        settings = ledger.settings
        self._max_cycles = settings.load_max_cycles or (1 << 62)
        self._max_jobs = settings.max_inflight_store_jobs or (1 << 62)
        self._max_pinned_blocks = int(settings.max_pinned_fraction * (num_blocks - 1))

    # Upstream's bookkeeping, closed off.

    @property
    def _next_store_job_id(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.ledger.state.book.next_job

    @_next_store_job_id.setter
    def _next_store_job_id(self, value: int) -> None:
        """Ids advance by `job_registered` alone."""

    @property
    def _pinned_saves(self) -> dict[int, tuple[list[int], int]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _NoPins()

    # --- requests ---------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the pool whose blocks jobs reference."""
        self._pool = gpu_block_pool
        super().bind_gpu_block_pool(_PlanningPool(gpu_block_pool))  # type: ignore[arg-type]

    def on_new_request(self, request: Request) -> None:
        """Record that a request waits."""
        self._requests.queued(request)

    def request_ended(self, request: Request, block_ids: Sequence[list[int]]) -> None:
        """Record that a request ended. Its jobs hold their own references, so nothing is delayed or freed here."""
        self.client.discard(request.request_id)  # or a lookup under way would answer whoever takes the id next
        self._requests.released(request, enumerate(block_ids))
        self._requests.ended(request)

    # --- lookups and loads ------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look the request up in the store; see vLLM's base class for what is returned."""
        answer = _LOOK_UP(self, request, num_computed_tokens)
        hit_tokens = answer[0]
        record = self._book.requests.get(self._name(request.request_id))
        if record is None or (record.looked_up == (hit_tokens, num_computed_tokens) and not record.failed_loads):
            return answer  # a waiting request is asked for in every step, and mostly nothing has changed
        if record.failed_loads and hit_tokens:
            instead = self._instead_of_a_hit(request, record, num_computed_tokens, hit_tokens)
            if instead is not None:
                return instead
        if hit_tokens is not None and record.looked_up != (hit_tokens, num_computed_tokens) and self.enable_lookup:
            self.ledger.record(
                ev.LookupAnswered,
                request=self._name(request.request_id),
                generation=generation_of(request),
                hit_tokens=hit_tokens,
                local_tokens=num_computed_tokens,
            )
        return answer

    def _instead_of_a_hit(
        self, request: Request, record: RequestRecord, local_tokens: int, hit_tokens: int
    ) -> tuple[int | None, bool] | None:
        """Return what to answer a request whose loads have failed, None to answer its hit.

        After a failed load vLLM leaves the request among those that hold blocks, at whose head it stops all others when
        it does not fit; and it sets aside the room of the failed load beside that of the next, so that the next may
        never fit. Both end only if the request leaves that place and, in the worst case, computes. So the first answer
        is "not known yet", which makes vLLM put it back among those that hold nothing, and a hit that found no room is
        not given again.
        """
        name, generation = self._name(request.request_id), generation_of(request)
        if not record.after_failure:
            self.load_specs.pop(request.request_id, None)
            self.ledger.record(
                ev.LookupDeferred,
                request=name,
                generation=generation,
                hit_tokens=hit_tokens,
                local_tokens=local_tokens,
            )
            return None, False
        failures = record.failed_loads.get(local_tokens + hit_tokens, 0)
        if failures < self._max_cycles and record.after_failure == "deferred":
            return None
        self.load_specs.pop(request.request_id, None)
        if record.looked_up != (0, local_tokens):
            self.ledger.record(
                ev.LookupSuppressed,
                request=name,
                generation=generation,
                hit_tokens=hit_tokens,
                failures=failures,
                local_tokens=local_tokens,
            )
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Record the blocks that a load will write, if one is planned."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        name = self._name(request.request_id)
        generation = generation_of(request)
        self._requests.seen(request)
        spec = self.load_specs.get(request.request_id)
        if num_external_tokens <= 0 or spec is None or not spec.can_load:
            return
        table = self._unfinished_requests[request.request_id][1]
        targets = [
            (group, without_null(ids[spec.vllm_cached_tokens // size : -(-spec.kvpool_cached_tokens // size)]))
            for group, ids in zip(self._kv_groups, table, strict=True)
            for size in (self._block_sizes[group],)
        ]
        self._requests.allocated(name, generation, targets)
        self.ledger.record(
            ev.LoadPlanned,
            load=self._book.next_load,
            request=name,
            generation=generation,
            blocks=by_group(targets),
            tokens=num_external_tokens,
            local_tokens=spec.vllm_cached_tokens,
        )

    # --- the step ---------------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the workers are to do after this step, with every job and load in it recorded."""
        book = self._book
        log = self._log
        metadata: Any
        log.step += 1
        if log.step >= self.ledger.next_watch_step:
            self.ledger.watch()
        self._requests.step(scheduler_output)
        if scheduler_output.finished_req_ids or scheduler_output.preempted_req_ids:
            metadata = self._plan_without_returned(scheduler_output)
        else:
            metadata = _PLAN(self, scheduler_output)
        attach(metadata, log.step, self._register_loads(metadata) if book.loads else _NO_LOADS)
        return metadata

    def _plan_without_returned(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan a step with upstream, before which requests ended or were preempted.

        Upstream forgets them at this point, after it has read what this step's requests brought. One that came back in
        between under the same id would be forgotten with them: upstream then fails on it, or never starts its load. So
        upstream sees only those that are gone for good; the workers get all of them.
        """
        finished = scheduler_output.finished_req_ids
        preempted = scheduler_output.preempted_req_ids or _NOBODY
        returned = [request_id for request_id in finished | preempted if self._is_back(request_id, scheduler_output)]
        if not returned:
            return super().build_connector_meta(scheduler_output)
        shown = copy.copy(scheduler_output)
        shown.finished_req_ids = finished.difference(returned)
        shown.preempted_req_ids = set(preempted.difference(returned))
        for request_id in returned:
            self._request_trackers.pop(request_id, None)
        metadata: Any = super().build_connector_meta(shown)
        metadata.preempted_req_ids = preempted
        return metadata

    def _is_back(self, request_id: str, scheduler_output: SchedulerOutput) -> bool:
        """Return whether a request runs in this step, or has a load planned that no worker knows of yet."""
        load = self._book.loads.get(self._book.loading.get(self._name(request_id), -1))
        return request_id in scheduler_output.num_scheduled_tokens or (load is not None and not load.ranks)

    def _register_loads(self, metadata: MooncakeStoreConnectorMetadata) -> dict[str, int]:
        """Record the loads that this step gives to the workers, and return their ids by request id."""
        loads: dict[str, int] = {}
        for req_meta in metadata.requests:
            if req_meta.load_spec is None or not req_meta.load_spec.can_load:
                continue
            load = self._book.loading.get(self._name(req_meta.req_id))
            if load is not None and self.ledger.record(ev.LoadRegistered, load=load, ranks=self._ranks):
                loads[req_meta.req_id] = load
        return loads

    # --- store jobs -------------------------------------------------------------------------------------------------

    def _reference_save_blocks(self, meta: MooncakeStoreConnectorMetadata) -> None:
        """Register every save of this step as a job and reference the blocks that its ranks may read.

        Upstream calls this at the end of its planning. All allocated blocks are named, not only the job's own range: a
        rank resumes from its own last offset, which may lie anywhere below.
        """
        for req_meta in meta.requests:
            if not req_meta.can_save or req_meta.store_job_id is not None:
                continue
            tail = self._plan_tail(req_meta)
            if tail:
                req_meta.boundary_puts = [*tail, *(req_meta.boundary_puts or [])]
            groups = self._boundary_blocks(req_meta)
            if req_meta.token_len_chunk:
                groups.extend(
                    (self._kv_groups[group], without_null(ids))
                    for group, ids in enumerate(req_meta.block_ids)
                    if group not in self._boundary_state_group_ids
                )
            if not self._register_job(req_meta, groups):
                self._skip_save(req_meta)

    def _plan_tail(self, req_meta: ReqMeta) -> list[Any]:
        coordinator: Any = self._store_coord
        if coordinator is None:  # vLLM 0.33: a capacity-only instance plans nothing
            return []
        sizes = [group.kv_cache_spec.block_size for group in coordinator.kv_cache_groups]
        return _partial_tail_non_mamba_puts(coordinator, req_meta, sizes)

    def _boundary_blocks(self, req_meta: ReqMeta) -> list[GroupIds]:
        return [(self._kv_groups[put.group_id], [put.block_id]) for put in req_meta.boundary_puts or ()]

    def _register_job(self, req_meta: ReqMeta, groups: list[GroupIds]) -> bool:
        """Register a job that may read `groups`, and take one reference on each of their blocks.

        Returns:
            False if a bound on store jobs forbids it; the skip is recorded.
        """
        name = self._name(req_meta.req_id)
        record = self._book.requests.get(name)
        generation = record.generation if record is not None else 1
        blocks = _once(groups)
        tokens = req_meta.token_len_chunk
        bound = self._bound_reached(blocks)
        if bound is not None:
            reason, limit, planned = bound
            if record is None or not record.skipping:
                self.ledger.record(
                    ev.JobSkipped,
                    request=name,
                    generation=generation,
                    reason=reason,
                    limit=limit,
                    planned_blocks=planned,
                    tokens=tokens,
                )
            return False
        job = self._book.next_job
        registered = self.ledger.record(
            ev.JobRegistered, job=job, request=name, generation=generation, ranks=self._ranks, tokens=tokens
        )
        if registered is None:
            return False
        if blocks:
            pinned = self.ledger.record(ev.PinTouched, job=job, blocks=blocks)
            if pinned is None:
                return False
            self._touch(pinned.blocks)
        req_meta.store_job_id = job
        return True

    def _bound_reached(self, blocks: Blocks) -> tuple[str, int, int] | None:
        """Return the bound that a job over `blocks` would exceed, with its limit and the job's size; None if none."""
        state = self.ledger.state
        if state.pending_jobs >= self._max_jobs:
            return "max_inflight_store_jobs", self._max_jobs, count(blocks)
        wanted = count(blocks)
        free = self._max_pinned_blocks - state.pinned_blocks()
        if wanted > free and state.unpinned(blocks) > free:
            return "max_pinned_fraction", self._max_pinned_blocks, wanted
        return None

    def _skip_save(self, req_meta: ReqMeta) -> None:
        """Leave a save out, and let upstream plan the range again with the request's next one."""
        req_meta.can_save = False
        tracker = self._request_trackers.get(req_meta.req_id)
        if tracker is not None and req_meta.token_len_chunk:
            tracker.num_saved_tokens = req_meta.token_ids_start
            if req_meta.publish_partial_tail:
                tracker.partial_tail_sent = False

    def register_finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], partial_tail_offloads: list[tuple[int, int, int]]
    ) -> bool:
        """Plan the save of a finished request's tail with upstream, and register it as a job."""
        delay = super().register_finished_partial_tail(request, block_ids, partial_tail_offloads)
        req_meta = self._finished_partial_tail_metas.get(request.request_id)
        if req_meta is not None:
            req_meta.store_job_id = None
            if not self._register_job(req_meta, self._boundary_blocks(req_meta)):
                del self._finished_partial_tail_metas[request.request_id]
        return delay

    # --- what the workers report ------------------------------------------------------------------------------------

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the reports of a step; free the blocks of each job that every rank has finished."""
        metadata = connector_output.kv_connector_worker_meta
        if metadata is None:  # first, because asking an abstract class for its instances is what costs most here
            return
        if isinstance(metadata, LedgerWorkerMetadata):
            for report in metadata.jobs:
                self._rank_completed(report)
            loading = {request_id: self._load_of(request_id) for request_id in metadata.answered}
            for report in metadata.loads:
                self._rank_loaded(report)
            if loading:
                self._pass_on(connector_output, loading)

    def _load_of(self, request_id: str) -> int:
        return self._book.loading.get(self._name(request_id), -1)

    def _pass_on(self, connector_output: KVConnectorOutput, loading: dict[str, int]) -> None:
        """Let vLLM count a load of ours as finished when it has settled in the ledger, and only then.

        vLLM counts answers and not ranks: when a rank answers twice, it would use or give away blocks that another rank
        still writes into, and end the engine over a request that does not wait. Under vLLM's MultiConnector the output
        holds other connectors' requests too; those are not ours.

        Args:
            connector_output: what vLLM is about to act on.
            loading: the requests that ranks have answered for in this step, and their loads that were open before it.
        """
        finished = connector_output.finished_recving
        if finished is None:
            connector_output.finished_recving = finished = set[str]()
        for request_id, load in loading.items():
            booked = self._book.loads.get(load)
            if booked is not None and not booked.waiting and request_id in finished:
                self._settle_load(load)  # no rank was asked to report it, because the book had refused something
            settled = load >= 0 and load not in self._book.loads
            if settled:
                finished.add(request_id)
            elif request_id in finished:
                finished.discard(request_id)
                why = (
                    "no load of the request is open"
                    if load < 0
                    else "vLLM counts it as finished, a rank has not answered"
                )
                self.ledger.record(ev.ReportIgnored, what="load", why=why, load=load, request=self._name(request_id))

    def _rank_completed(self, report: JobReport) -> None:
        recorded = self.ledger.record(
            ev.RankCompleted,
            job=report.job,
            rank=report.rank,
            outcome=report.outcome,
            **report.failure.cause_fields(),
        )
        if recorded is None:
            return
        job = self._book.jobs[report.job]
        if job.waiting or job.quarantined:
            return
        failed = to_ranges([rank for rank, outcome in sorted(job.outcomes.items()) if outcome == "failed"])
        self.ledger.record(ev.JobSettled, job=report.job, failed_ranks=failed)
        if job.blocks:
            freed = self.ledger.record(ev.BlocksFreed, job=report.job, blocks=job.blocks)
            if freed is not None:
                self._free(freed.blocks)

    def _rank_loaded(self, report: LoadReport) -> None:
        load, failure = self._book.loads.get(report.load), report.failure
        if load is None or report.rank not in load.waiting:
            self.ledger.record(
                ev.ReportIgnored,
                what="load",
                why="the load had already settled" if load is None else "the rank had already answered",
                load=report.load,
                rank=report.rank,
                code=str(failure.code),
            )
            return
        self.ledger.record(
            ev.RankLoaded,
            load=report.load,
            rank=report.rank,
            outcome=report.outcome,
            **failure.fields(),
            blocks=failure.blocks,
            failed_keys=failure.keys,
            failures=tuple(each.block_failures() for each in report.failures),
            invalid=report.invalid,
            retries=report.retries,
        )
        if report.outcome == "failed" and not load.failed:
            self.ledger.record(
                ev.LoadFailed, load=report.load, rank=report.rank, **failure.fields(), blocks=failure.blocks
            )
        if not load.waiting:
            self._settle_load(report.load)

    def _settle_load(self, number: int) -> None:
        load = self._book.loads[number]
        outcome = "failed" if load.failed else "loaded"
        self.ledger.record(ev.LoadSettled, load=number, outcome=outcome, missing=to_ranges(load.waiting))
        if load.failed:
            self.ledger.record(
                ev.LoadRecovered,
                load=number,
                request=load.request,
                generation=load.generation,
                action=self._recovery_of(load),
            )

    def _recovery_of(self, load: Load) -> str:
        """Return what happens to a request whose load failed."""
        if self.ledger.policy == "recompute":
            return "gone" if load.ended else "recomputed"
        # vLLM ends a request over a failed load before it passes the load's report on.
        return "failed" if not load.ended or load.ended == "error" else "gone"

    def has_pending_push_work(self) -> bool:
        """Return True while a job's blocks are referenced and a rank may still report: reports need engine steps."""
        return self.ledger.state.pending_jobs > 0

    # --- the block pool, moved only by events -----------------------------------------------------------------------

    def _touch(self, blocks: Blocks) -> None:
        pool = self._bound_pool()
        table = pool.blocks
        pool.touch([table[block] for block in numbers(blocks)])

    def _free(self, blocks: Blocks) -> None:
        pool = self._bound_pool()
        table = pool.blocks
        pool.free_blocks([table[block] for block in reversed(numbers(blocks))])

    def _bound_pool(self) -> BlockPool:
        if self._pool is None:
            raise RuntimeError("vLLM has not bound its block pool to the connector; kvledger cannot pin blocks")
        return self._pool


def _once(groups: list[GroupIds]) -> Blocks:
    """Return `groups` with each block named once, at its first place: one reference is taken and given back for each.

    vLLM has one pool for all groups, so a block number names one block there, whichever group lists it.
    """
    if len(groups) == 1:
        return by_group(groups)
    seen: set[int] = set()
    unique: list[GroupIds] = []
    for group, ids in groups:
        fresh = [block for block in dict.fromkeys(ids) if block not in seen]
        seen.update(fresh)
        if unique and unique[-1][0] == group:
            unique[-1][1].extend(fresh)
        else:
            unique.append((group, fresh))
    return by_group(unique)
