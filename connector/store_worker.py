"""The worker half of the store connector: transfers as upstream does, and says which rank finished what, and how.

    hook (vLLM calls it)           when                               what it adds
    -----------------------------  ---------------------------------  ----------------------------------------------------------
    register_kv_caches             the KV cache was allocated         promotes upstream's transfer threads
    start_load_kv                  every step                         names the loads of the step by their ids
    wait_for_save                  every step                         nothing; upstream queues the step's jobs
    build_connector_worker_meta    every step                         the job and load reports of this rank

On the transfer threads, every way out of a job or a load ends in a report: skipped, failed, raised or done. The calls to the store
themselves are recorded by `recording_store` as evidence (`transfer_started`, `transfer_finished`). This file may know vLLM's
worker-side classes; it keeps no books.
"""

import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreConnectorMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreRecvingThread,
    KVCacheStoreSendingThread,
    MooncakeStoreWorker,
)

from connector.adopt import adopt
from connector.books import hashed
from connector.evidence import EvidenceSender, evidence_address
from connector.recording_store import BlockLocator, RecordingStore, Work
from connector.worker_meta import JobReport, LedgerWorkerMetadata, LoadReport, attached
from ledger.blocks import Blocks, by_group
from ledger.codes import KVCacheErrorCode, Stage, translate
from ledger.settings import Settings

logger = logging.getLogger("kvledger")


class Reports:
    """What the transfer threads of a rank have to tell the scheduler. Any thread may add; one takes, every step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lock = threading.Lock()
        self._jobs: list[JobReport] = []
        self._loads: list[LoadReport] = []

    def add_job(self, report: JobReport) -> None:
        """Add a job's report."""
        with self._lock:
            self._jobs.append(report)

    def add_load(self, report: LoadReport) -> None:
        """Add a load's report."""
        with self._lock:
            self._loads.append(report)

    def take(self) -> LedgerWorkerMetadata | None:
        """Return the reports since the last call, None if there are none."""
        with self._lock:
            if not self._jobs and not self._loads:
                return None
            jobs, self._jobs = self._jobs, []
            loads, self._loads = self._loads, []
        return LedgerWorkerMetadata(jobs=jobs, loads=loads)


class LedgerSendingThread(KVCacheStoreSendingThread):
    """Upstream's save thread, which also reports how each job ended. Made by `adopt`, then given `open`."""

    store: RecordingStore

    def open(self, reports: Reports, hash_request_ids: bool) -> None:
        """Begin to report to `reports`."""
        self._reports = reports
        self._hash_request_ids = hash_request_ids

    def _handle_request(self, req_meta: ReqMeta) -> None:
        name = hashed(req_meta.req_id) if self._hash_request_ids else req_meta.req_id
        job = req_meta.store_job_id
        with self.store.working(Work(name, job=-1 if job is None else job)):
            super()._handle_request(req_meta)

    def finish_store_job(self, req_meta: ReqMeta) -> None:
        """Report a job as finished on this rank. Upstream calls this once for each job, from its one way out."""
        try:
            report = self._report(req_meta)
        finally:
            super().finish_store_job(req_meta)
        if report is not None:
            self._reports.add_job(report)

    def _report(self, req_meta: ReqMeta) -> JobReport | None:
        if req_meta.store_job_id is None:
            return None
        work = self.store.work or Work(req_meta.req_id)
        raised = sys.exc_info()[1]
        outcome, code, raw, exception = "nothing", work.code, work.raw, work.exception
        if raised is not None and not exception:
            translated = translate(raised)
            code, raw, exception = str(translated.code), translated.raw, type(raised).__name__
        if code or raised is not None:
            outcome = "failed"
        elif work.puts:
            outcome = "stored"
        elif not self.is_live_store_job(req_meta):
            outcome = "stale"
        elif work.lookups:
            outcome = "present"
        elif self._should_skip_request(req_meta.req_id):
            outcome = "skipped"
        return JobReport(req_meta.store_job_id, self._reports.rank, outcome, code, raw, exception)

    def take_completed_saves(self) -> dict[int, int]:
        """Return nothing, and keep nothing: completions travel as reports, which name their rank."""
        super().take_completed_saves()
        return {}


class LedgerRecvingThread(KVCacheStoreRecvingThread):
    """Upstream's load thread, which also reports how each load ended. Made by `adopt`, then given `open`."""

    store: RecordingStore

    def open(self, reports: Reports, hash_request_ids: bool, kv_groups: Sequence[int]) -> None:
        """Begin to report to `reports`; `kv_groups` are the KV-cache groups of the store's groups."""
        self._reports = reports
        self._hash_request_ids = hash_request_ids
        self._kv_groups = tuple(kv_groups)
        self._failed_blocks: list[int] = []
        self._answered = False

    def _handle_request(self, req_meta: ReqMeta) -> None:
        self._failed_blocks = []
        self._answered = False
        name = hashed(req_meta.req_id) if self._hash_request_ids else req_meta.req_id
        load = int(getattr(req_meta, "kvledger_load", -1))
        with self.store.working(Work(name, load=load)) as work:
            try:
                super()._handle_request(req_meta)
            except Exception as error:
                logger.exception("kvledger: load %d of request %s raised outside of upstream's error path", load, name)
                work.failed(error, 0)
                if not self._answered:
                    # Upstream has no way out here: the request would wait for remote KVs for ever.
                    self._report_load_error(req_meta.req_id, [block for ids in req_meta.block_ids for block in ids])
                    self.set_finished_request(req_meta.req_id)
                    self.request_queue.task_done()

    def _report_load_error(self, req_id: str, block_ids: list[int]) -> None:
        self._failed_blocks.extend(block_ids)
        super()._report_load_error(req_id, block_ids)

    def set_finished_request(self, req_id: str) -> None:
        """Report a load as answered by this rank. Upstream calls this once for each load, at its end."""
        work = self.store.work
        if work is not None and work.load >= 0:
            self._reports.add_load(self._load_report(work))
        self._answered = True
        super().set_finished_request(req_id)

    def _load_report(self, work: Work) -> LoadReport:
        rank = self._reports.rank
        if not self._failed_blocks and not work.code:
            return LoadReport(work.load, rank, "loaded")
        return LoadReport(
            work.load,
            rank,
            "failed",
            work.code or str(KVCacheErrorCode.UNKNOWN),
            work.raw,
            str(Stage.STORE_GET),
            work.exception,
            self._blocks(),
            work.failed_keys,
        )

    def _blocks(self) -> Blocks:
        # Upstream lists the failed blocks of all groups in one row; with one group its number is known.
        if len(self._kv_groups) == 1:
            return by_group([(self._kv_groups[0], self._failed_blocks)])
        return ()


class LedgerStoreWorker(MooncakeStoreWorker):
    """Upstream's worker half, reporting with ranks and recording evidence. Made by `adopt`, then given `open`."""

    store: Any

    def open(self, vllm_config: VllmConfig, connector: str, settings: Settings, kv_groups: Sequence[int]) -> None:
        """Begin to report and record. Called before the KV caches are registered."""
        rank = vllm_config.parallel_config.rank
        self._kv_groups = tuple(kv_groups)
        self._hash_request_ids = settings.hash_request_ids
        self._reports = Reports(rank)
        self._sender: EvidenceSender | None = None
        if settings.evidence and not self._capacity_only:
            address = evidence_address(vllm_config, connector, settings)
            self._sender = EvidenceSender(address, f"rank {rank}", settings.evidence_queue_events)
        self.store = RecordingStore(self.store, rank, self._sender)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the caches with upstream, and promote its transfer threads, which have nothing to do yet."""
        super().register_kv_caches(kv_caches)
        self.store.locate_with(BlockLocator(self.token_dbs, self._kv_groups))
        if self.kv_send_thread is not None:
            adopt(self.kv_send_thread, LedgerSendingThread).open(self._reports, self._hash_request_ids)
        for thread in self.kv_recv_threads:
            adopt(thread, LedgerRecvingThread).open(self._reports, self._hash_request_ids, self._kv_groups)

    def start_load_kv(self, metadata: MooncakeStoreConnectorMetadata) -> None:
        """Queue the loads of a step, each with the id that the books gave it."""
        book = attached(metadata)
        if book is not None:
            if self._sender is not None:
                self._sender.step = book.step
            for req_meta in metadata.requests:
                load = book.loads.get(req_meta.req_id)
                if load is not None:
                    req_meta.kvledger_load = load  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        super().start_load_kv(metadata)

    def build_connector_worker_meta(self) -> LedgerWorkerMetadata | None:
        """Return this rank's reports since the last step, None if there are none."""
        return self._reports.take()
