"""The worker half of the P/D connector: both sides of upstream's worker, and what vLLM asks of it in every step.

    hook (vLLM calls it)                when             what it adds
    ----------------------------------  ---------------  ---------------------------------------------------------
    start_load_kv                       every step       the step that evidence is stamped with
    get_finished, get_transfer_results  every step       how pulls and sends have ended, from the outbox
    get_block_ids_with_load_errors      every step       the blocks that may not be trusted, from the outbox
    build_connector_worker_meta         every step       the reports of this rank
    get_kv_connector_stats              every step       failures by code and stage
    shutdown                            the worker ends  sends what evidence is left, ends the pulls and the listener

The decode side is in `pull_worker`, the prefill side in `push_worker`. Neither keeps a ledger: a rank knows what it is
doing now, and reports how it ended.
"""

import asyncio
import logging

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorMetadata,
    MooncakeConnectorWorker,
)

from connector.pd.metadata import PDWorkerMetadata, attached_step
from connector.pd.outbox import Evidence, PDOutbox
from connector.pd.pull_worker import PullingWorker
from connector.pd.push_worker import PushingWorker
from connector.pd.stats import LedgerMooncakeStats
from connector.runtime.evidence import EvidenceSender, evidence_address
from connector.runtime.failure_log import FailureLog, open_failure_log
from connector.runtime.runtime import naming
from ledger.settings import Settings

logger = logging.getLogger("kvledger")


class LedgerMooncakeWorker(PullingWorker, PushingWorker, MooncakeConnectorWorker):
    """Upstream's worker half, which settles every transfer. Made by `rebase_class`, then given `open`."""

    xfer_stats: LedgerMooncakeStats  # type: ignore[assignment]

    def open(self, vllm_config: VllmConfig, connector: str, settings: Settings) -> None:
        """Begin to report and record. Called before the KV caches are registered."""
        self.rank = vllm_config.parallel_config.rank
        self.private = settings.hash_request_ids
        self.logged = naming(settings)
        self.group_ids = tuple(self.kv_cache_config.transfer_group_ids)
        self.outbox = PDOutbox()
        sender: EvidenceSender | None = None
        if settings.evidence:
            address = evidence_address(vllm_config, connector, settings)
            sender = EvidenceSender(address, f"rank {self.rank}", settings.evidence_queue_events)
        self.evidence = Evidence(self.rank, sender)
        transfer = vllm_config.kv_transfer_config
        open_failure_log(settings.failure_log)
        self.failures = FailureLog(str(transfer.engine_id) if transfer is not None else "")
        self.xfer_stats = LedgerMooncakeStats()
        self._passed_on_recved: set[str] = set()
        self._passed_on_sent: set[str] = set()
        self._ended = False
        self.open_pulling()
        self.open_pushing()

    def start_load_kv(self, metadata: MooncakeConnectorMetadata) -> None:
        """Begin what the step asks for, with upstream."""
        self.evidence.begin_step(attached_step(metadata))
        super().start_load_kv(metadata)

    def get_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests that have finished sending and receiving on this rank since the last call."""
        results = self.get_transfer_results()
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Return what has finished on this rank since the last call, failed receives among it."""
        sent: set[str] = set()
        if not self.is_kv_consumer:
            sent = asyncio.run_coroutine_threadsafe(self.fetch_finished_sending_reqs(), self.sender_loop).result()
        received, failed = self.outbox.take_finished()
        self._passed_on_sent |= sent
        self._passed_on_recved |= received | failed
        return KVConnectorTransferResults(
            finished_sending=sent,
            finished_recving=received | failed,
            # With one group vLLM gets the blocks. With several their numbers are ambiguous, so it gets the requests.
            failed_recving=failed if self._is_hma_required else set(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that may not be trusted, since the last call."""
        return self.outbox.take_invalid()

    def build_connector_worker_meta(self) -> PDWorkerMetadata | None:
        """Return this rank's reports since the last step, None if there are none."""
        reports = self.outbox.take_reports()
        recved, self._passed_on_recved = self._passed_on_recved, set()
        sent, self._passed_on_sent = self._passed_on_sent, set()
        if not reports and not recved and not sent:
            return None
        return PDWorkerMetadata(reports, recved, sent)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the statistics since the last call, None if there are none."""
        self.failures.move_to(self.xfer_stats)
        return super().get_kv_connector_stats()

    def shutdown(self) -> None:
        """End what is open, with upstream's threads. A second call does nothing."""
        if getattr(self, "_ended", True):
            return
        self._ended = True
        # First, because vLLM soon kills the engine process, whose log is closed when all workers have said goodbye.
        self.evidence.close()
        self.stop_pulling()
        if self.stop_pushing():
            super().shutdown()
        else:
            logger.warning("kvledger: rank %d ends while it still pushes; its threads end with the process", self.rank)
