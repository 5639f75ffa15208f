"""`KVLedgerStoreConnector`: a drop-in for vLLM's `MooncakeStoreConnector` that records what it does in a ledger.

The same configuration keys, plus kvledger's own (`ledger.settings`). This file is the facade: it builds upstream's
halves, makes them instances of our subclasses, and passes each hook of vLLM to the half that it belongs to.
"""

# ruff: noqa: E402 - the check must come before the imports that it makes understandable
from connector.runtime import compat

compat.require(compat.STORE)

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from connector.runtime.rebase import rebase_class
from connector.runtime.runtime import LedgerRuntime, open_ledger
from connector.store.scheduler import LedgerStoreScheduler
from connector.store.stats import LedgerStorePromMetrics, LedgerStoreStats
from connector.store.worker import LedgerStoreWorker
from ledger import settings as ledger_settings
from ledger.settings import Settings

NAME = "KVLedgerStoreConnector"


class KVLedgerStoreConnector(MooncakeStoreConnector):
    """The store connector with a ledger.

    Raises:
        SettingsError: kvledger's settings are wrong; all problems are listed.
        LedgerNotWritable: the audit log cannot be written where `ledger_path` says.
        UnsupportedVersion: on import, when the vLLM in use lacks what this class extends.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        settings = ledger_settings.parse(transfer.kv_connector_extra_config if transfer is not None else {})
        super().__init__(vllm_config, role, kv_cache_config)
        if kv_cache_config is None:
            raise ValueError("kvledger needs the KV cache configuration; vLLM 0.32 and later pass it")
        self.ledger: LedgerRuntime | None = None
        if self.connector_scheduler is not None:
            self.ledger = self._open_ledger(vllm_config, kv_cache_config, settings)
            scheduler = rebase_class(self.connector_scheduler, LedgerStoreScheduler)
            scheduler.open(self.ledger, kv_cache_config.num_blocks)
            self._shorten(scheduler)
        if self.connector_worker is not None:
            worker = rebase_class(self.connector_worker, LedgerStoreWorker)
            worker.open(vllm_config, NAME, settings, kv_cache_config.prefix_cacheable_group_ids)

    def _open_ledger(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings
    ) -> LedgerRuntime:
        return open_ledger(vllm_config, kv_cache_config, NAME, settings)

    def _shorten(self, scheduler: LedgerStoreScheduler) -> None:
        """Bind the hooks that vLLM calls in every step to the scheduler half, without a facade's frame in between."""
        self.get_num_new_matched_tokens = scheduler.get_num_new_matched_tokens
        self.build_connector_meta = scheduler.build_connector_meta
        self.has_pending_push_work = scheduler.has_pending_push_work
        self.on_new_request = scheduler.on_new_request
        if not scheduler.enable_kv_events:  # upstream's facade only collects those
            self.take_events = _no_events

    @property
    def _half(self) -> LedgerStoreScheduler:
        if not isinstance(self.connector_scheduler, LedgerStoreScheduler):
            raise TypeError("a hook of the scheduler was called on a worker's connector")
        return self.connector_scheduler

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Record the end of a request; its blocks may be freed at once, since jobs hold references of their own."""
        self._half.request_ended(request, block_ids)
        return super().request_finished_all_groups(request, block_ids)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LedgerStoreStats:
        """Return statistics of this connector, from what a worker sent, or empty ones."""
        return LedgerStoreStats(data=data) if data is not None else LedgerStoreStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LedgerStorePromMetrics:
        """Return upstream's metrics with ours beside them."""
        return LedgerStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Release the store's handle and close the log. May be called more than once."""
        super().shutdown()
        ledger = getattr(self, "ledger", None)
        if ledger is not None:
            ledger.close()


def _no_events() -> tuple[KVCacheEvent, ...]:
    return ()
