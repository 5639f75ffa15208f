"""The worker half of the store connector: transfers as upstream does, and reports which rank finished what, and how.

    hook (vLLM calls it)         when                        what it adds
    ---------------------------  --------------------------  --------------------------------------------------
    register_kv_caches           the KV cache was allocated  makes upstream's transfer threads ours
    start_load_kv                every step                  names the loads of the step by their ids
    wait_for_save                every step                  nothing; upstream queues the step's jobs
    build_connector_worker_meta  every step                  the job and load reports of this rank
    get_transfer_results         every step                  ends the retries of requests that are gone
    get_kv_connector_stats       every step                  failures by code and stage, and retries
    close                        the worker ends             ends the retries

On the transfer threads, every way out of a job or a load ends in a report: skipped, failed, raised or done. Loads are
carried out by `load_thread`. The calls to the store themselves are recorded by `recording_store` as evidence
(`transfer_started`, `transfer_finished`). This file may know vLLM's worker-side classes; it keeps no ledger.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreConnectorMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreRecvingThread,
    KVCacheStoreSendingThread,
    MooncakeStoreWorker,
)

from connector.runtime.evidence import EvidenceSender, evidence_address
from connector.runtime.failure_log import FailureLog, open_failure_log
from connector.runtime.failures import Failure
from connector.runtime.rebase import rebase_class
from connector.runtime.runtime import naming
from connector.store.integrity import Fingerprints, Guard, layout_digest
from connector.store.load_thread import LedgerRecvingThread, RankLoad, RecvSetup, Retries, TimedRetries, limits_of
from connector.store.metadata import JobReport, LedgerWorkerMetadata, LoadReport, attached
from connector.store.recording_store import BlockLocator, RecordingStore, StoreWork, group_of
from connector.store.save_planner import SavePlanner
from connector.store.stats import LedgerStoreStats
from ledger.settings import Settings

logger = logging.getLogger("kvledger")


class StoreOutbox:
    """The reports of a rank's transfer threads to the scheduler. Any thread may add; one takes them, every step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lock = threading.Lock()
        self._jobs: list[JobReport] = []
        self._loads: dict[str, list[LoadReport]] = {}
        """By request, because a load's report goes with vLLM's own answer for its request, in the same step: the
        ledger would settle the load a step before vLLM does, and could not say whose answer that is."""
        self._due_loads: list[LoadReport] = []
        self._answered: list[str] = []

    def add_job(self, report: JobReport) -> None:
        """Add a job's report."""
        with self._lock:
            self._jobs.append(report)

    def add_load(self, request: str, report: LoadReport) -> None:
        """Add the report of a load of `request`, before vLLM's own answer for it. Both leave together."""
        with self._lock:
            self._loads.setdefault(request, []).append(report)

    def add_answered(self, requests: set[str]) -> None:
        """Add the requests whose loads count as finished for vLLM on this rank, in this step."""
        with self._lock:
            for request in sorted(requests):
                self._answered.append(request)
                self._due_loads.extend(self._loads.pop(request, ()))

    def take(self) -> LedgerWorkerMetadata | None:
        """Return the reports since the last call, None if there are none."""
        with self._lock:
            if not self._jobs and not self._due_loads and not self._answered:
                return None
            jobs, self._jobs = self._jobs, []
            loads, self._due_loads = self._due_loads, []
            answered, self._answered = self._answered, []
        return LedgerWorkerMetadata(jobs=jobs, loads=loads, answered=answered)


class LedgerSendingThread(KVCacheStoreSendingThread):
    """Upstream's save thread, which also reports how each job ended. Made by `rebase_class`, then given `open`."""

    store: RecordingStore

    def open(self, outbox: StoreOutbox, failures: FailureLog, name: Callable[[str], str]) -> None:
        """Begin to report to `outbox`, and failures to `failures` too."""
        self._outbox = outbox
        self._failures = failures
        self._name = name

    def guard_with(self, guard: Guard) -> None:
        """Take fingerprints of every job's blocks when it is registered."""
        self._guard = guard
        self._planner = SavePlanner(self)

    _guard: Guard | None = None
    _logged_fingerprints = False

    def add_request(self, request: ReqMeta) -> None:
        """Register a job and queue it.

        The engine's thread calls it when the step that writes the blocks was launched.
        """
        if self._guard is not None:
            try:
                request.kvledger_taken = self._guard.take(self._planner.plan(request))  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
            except Exception:
                if not self._logged_fingerprints:
                    self._logged_fingerprints = True
                    logger.exception(
                        "kvledger: no fingerprints could be taken of the blocks of request %s. They are saved without, "
                        "so loads of them are not checked; this is logged once.",
                        self._name(request.req_id),
                    )
        super().add_request(request)

    def _handle_request(self, req_meta: ReqMeta) -> None:
        name = self._name(req_meta.req_id)
        job = req_meta.store_job_id
        if self._guard is not None:
            self.store.use(getattr(req_meta, "kvledger_taken", None))
        with self.store.working(StoreWork(name, job=-1 if job is None else job)):
            super()._handle_request(req_meta)

    def finish_store_job(self, req_meta: ReqMeta) -> None:
        """Report a job as finished on this rank. Upstream calls this once for each job, from its one way out."""
        try:
            report = self._report(req_meta)
        finally:
            super().finish_store_job(req_meta)
        if report is not None:
            self._outbox.add_job(report)
            if report.outcome == "failed":
                self._report_failure(report)

    def _report_failure(self, report: JobReport) -> None:
        work = self.store.work
        self._failures.report(
            report.failure,
            request=work.request if work is not None else "",
            job=report.job,
            rank=report.rank,
            failed_keys=report.failure.keys,
        )

    def _report(self, req_meta: ReqMeta) -> JobReport | None:
        if req_meta.store_job_id is None:
            return None
        work = self.store.work or StoreWork(req_meta.req_id)
        failure = work.failure
        raised = sys.exc_info()[1]
        if raised is not None and not failure.exception:
            failure = Failure.of(raised, work.stage).of_blocks(*work.failed_blocks)
        outcome = "nothing"
        if failure:
            outcome = "failed"
        elif work.puts:
            outcome = "stored"
        elif not self.is_live_store_job(req_meta):
            outcome = "stale"
        elif work.lookups:
            outcome = "present"
        elif self._should_skip_request(req_meta.req_id):
            outcome = "skipped"
        return JobReport(req_meta.store_job_id, self._outbox.rank, outcome, failure)

    def take_completed_saves(self) -> dict[int, int]:
        """Return nothing, and keep nothing: completions travel as reports, which name their rank."""
        super().take_completed_saves()
        return {}


class LedgerStoreWorker(MooncakeStoreWorker):
    """Upstream's worker half, with reports and evidence. Made by `rebase_class`, then given `open`."""

    store: Any

    def open(self, vllm_config: VllmConfig, connector: str, settings: Settings, kv_groups: Sequence[int]) -> None:
        """Begin to report and record. Called before the KV caches are registered."""
        rank = vllm_config.parallel_config.rank
        self._kv_groups = tuple(kv_groups)
        self._name = naming(settings)
        self._settings = settings
        self._outbox = StoreOutbox(rank)
        transfer = vllm_config.kv_transfer_config
        open_failure_log(settings.failure_log)
        # These two may be replaced until the KV caches are registered: the simulator has its own time.
        self.failures = FailureLog(str(transfer.engine_id) if transfer is not None else "")
        self.retries: Retries = TimedRetries(self.recv_request_queue)
        self.kv_connector_stats = LedgerStoreStats()
        self._step = 0
        self._loads: dict[str, list[RankLoad]] = {}
        """The loads that do not count as finished for vLLM yet, by request, oldest first. The engine's thread alone."""
        self._sender: EvidenceSender | None = None
        if settings.evidence and not self._capacity_only:
            address = evidence_address(vllm_config, connector, settings)
            self._sender = EvidenceSender(address, f"rank {rank}", settings.evidence_queue_events)
        self.store = RecordingStore(self.store, rank, self._sender)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the caches with upstream, and make its transfer threads ours, which have nothing to do yet."""
        super().register_kv_caches(kv_caches)
        self.store.locate_with(BlockLocator(self.token_dbs, self._kv_groups))
        guard = None
        if self._settings.integrity != "off" and not self._capacity_only:
            guard = self._make_guard(kv_caches)
            self.store.guard_with(guard)
        if self.kv_send_thread is not None:
            sender = rebase_class(self.kv_send_thread, LedgerSendingThread)
            sender.open(self._outbox, self.failures, self._name)
            if guard is not None:
                sender.guard_with(guard)
        for thread in self.kv_recv_threads:
            rebase_class(thread, LedgerRecvingThread).open(self._recv_setup(thread, guard))

    def start_load_kv(self, metadata: MooncakeStoreConnectorMetadata) -> None:
        """Queue the loads of a step, each with the id that the ledger gave it."""
        book = attached(metadata)
        if book is not None:
            self._step = book.step
            if self._sender is not None:
                self._sender.step = book.step
            for req_meta in metadata.requests:
                load = book.loads.get(req_meta.req_id)
                if load is not None:
                    queued = RankLoad(req_meta.req_id, load, book.step)
                    req_meta.kvledger_load = queued  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
                    self._loads.setdefault(req_meta.req_id, []).append(queued)
        super().start_load_kv(metadata)

    def build_connector_worker_meta(self) -> LedgerWorkerMetadata | None:
        """Return this rank's reports since the last step, None if there are none."""
        return self._outbox.take()

    def _make_guard(self, kv_caches: dict[str, Any]) -> Guard:
        num_blocks = self._kv_cache_config.num_blocks
        every_keys = self._settings.integrity_sample_keys if self._settings.integrity == "sampled" else 1
        layouts = [
            layout_digest(
                {
                    "model": database.metadata.model_name,
                    "store_namespace": database.metadata.store_namespace,
                    "spec": [type(group.kv_cache_spec).__name__, group.kv_cache_spec],
                    "layers": [_shape_of(kv_caches[name], num_blocks) for name in group.layer_names],
                }
            )
            for group, database in zip(self._kv_cache_groups, self.token_dbs, strict=True)
        ]
        return Guard(Fingerprints(_tensors(kv_caches.values())), layouts, group_of, every_keys)

    def _recv_setup(self, thread: KVCacheStoreRecvingThread, guard: Guard | None) -> RecvSetup:
        return RecvSetup(
            guard=guard,
            rank=self._outbox.rank,
            kv_groups=self._kv_groups,
            limits=limits_of(self._settings, thread),
            name=self._name,
            report=self._outbox.add_load,
            failures=self.failures,
            retries=self.retries,
        )

    def get_transfer_results(
        self, finished_req_ids: set[str], meta: MooncakeStoreConnectorMetadata
    ) -> KVConnectorTransferResults:
        """Return what upstream does; loads of requests that have ended are not tried again."""
        self._cancel_loads(finished_req_ids)
        results = super().get_transfer_results(finished_req_ids, meta)
        if results.finished_recving:
            self._outbox.add_answered(results.finished_recving)
            for request_id in results.finished_recving:
                loads = self._loads.get(request_id, [])
                del loads[:1]
                if not loads:
                    self._loads.pop(request_id, None)
        return results

    def _cancel_loads(self, finished_req_ids: set[str]) -> None:
        """Cancel the loads of requests that ended before this step; one of its own is of a request that came back."""
        gone = [
            load
            for request_id in self._loads.keys() & finished_req_ids
            for load in self._loads[request_id]
            if load.step < self._step
        ]
        for load in gone:
            load.cancelled = True
        if gone:
            self.retries.bring_cancelled()

    def get_kv_connector_stats(self) -> LedgerStoreStats | None:
        """Return the statistics since the last call, None if there are none."""
        with self._kv_connector_stats_lock:
            stats, self.kv_connector_stats = self.kv_connector_stats, LedgerStoreStats()
        self.failures.move_to(stats)
        return None if stats.is_empty() else stats

    def close(self) -> None:
        """End what waits for a retry, then release the store as upstream does."""
        if hasattr(self, "retries"):
            self.retries.close()
        super().close()


def _tensors(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from _tensors(cache)


def _shape_of(cache: Any, num_blocks: int) -> list[Any]:
    """Return what of a layer's cache a stored block depends on: everything but how many blocks there are."""
    shapes: list[Any] = []
    for tensor in _tensors([cache]):
        shape: list[int] = list(tensor.shape)
        if num_blocks in shape:
            shape.remove(num_blocks)
        shapes.append([str(tensor.dtype), shape])
    return shapes
