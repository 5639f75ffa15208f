"""`KVLedgerMooncakeConnector`: a drop-in for vLLM's `MooncakeConnector` (P/D) that records what it does in a ledger.

The same configuration keys, plus kvledger's own (`ledger.settings`). This file is the facade: it builds upstream's
halves, makes them instances of our subclasses, and passes each hook of vLLM to the half that it belongs to. The tables
of hooks are in `scheduler`, `worker`, `pull_worker` and `push_worker`.

    hook (vLLM calls it)            side    when                           passed on to
    ------------------------------  ------  -----------------------------  -------------------------------------------
    all that upstream's facade has  both    as in vLLM                     our half, by upstream's facade
    update_connector_output         engine  the workers' results are here  LedgerMooncakeScheduler
    has_pending_push_work           engine  may the engine stop stepping?  LedgerMooncakeScheduler
    build_connector_worker_meta     worker  the end of every step          LedgerMooncakeWorker
    build_prom_metrics, ..._stats   both    statistics are put together    LedgerMooncakeStats, ...PromMetrics
    shutdown                        both    the process ends               LedgerMooncakeWorker; closes the log
"""

# ruff: noqa: E402 - the check must come before the imports that it makes understandable
from connector.runtime import compat

compat.require(compat.PD)

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.pd.scheduler import LedgerMooncakeScheduler
from connector.pd.stats import LedgerMooncakePromMetrics, LedgerMooncakeStats
from connector.pd.worker import LedgerMooncakeWorker
from connector.runtime.rebase import rebase_class
from connector.runtime.runtime import LedgerRuntime, open_ledger
from ledger import settings as ledger_settings

NAME = "KVLedgerMooncakeConnector"


class KVLedgerMooncakeConnector(MooncakeConnector):
    """The P/D connector with a ledger.

    Raises:
        SettingsError: kvledger's settings are wrong; all problems are listed.
        LedgerNotWritable: the audit log cannot be written where `ledger_path` says.
        UnsupportedVersion: on import, when the vLLM in use lacks what this class extends.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        settings = ledger_settings.parse(transfer.kv_connector_extra_config if transfer is not None else {})
        with device_zero_without_accelerator():
            super().__init__(vllm_config, role, kv_cache_config)
        self.ledger: LedgerRuntime | None = None
        if self.connector_scheduler is not None:
            self.ledger = open_ledger(vllm_config, kv_cache_config, NAME, settings)
            scheduler = rebase_class(self.connector_scheduler, LedgerMooncakeScheduler)
            scheduler.open(self.ledger)
            self.connector_scheduler = scheduler
            # What vLLM calls in every step goes to the half without a facade's frame in between.
            self.build_connector_meta = scheduler.build_connector_meta
            self.update_connector_output = scheduler.update_connector_output
            self.has_pending_push_work = scheduler.has_pending_push_work
        if self.connector_worker is not None:
            worker = rebase_class(self.connector_worker, LedgerMooncakeWorker)
            worker.open(vllm_config, NAME, settings)
            self.connector_worker = worker
            self.build_connector_worker_meta = worker.build_connector_worker_meta

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LedgerMooncakeStats:
        """Return statistics of this connector, from what a worker sent, or empty ones."""
        return LedgerMooncakeStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LedgerMooncakePromMetrics:
        """Return our metrics, with upstream's where it has some."""
        return LedgerMooncakePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the transfers and close the log. May be called more than once."""
        if self.connector_worker is not None:
            self.connector_worker.shutdown()
        ledger = getattr(self, "ledger", None)
        if ledger is not None:
            ledger.close()


@contextlib.contextmanager
def device_zero_without_accelerator() -> Generator[None]:
    """Answer torch's question for the current accelerator with 0 inside the block, on a machine that has none.

    Upstream asks it in the constructor of its worker, also when vLLM runs on the CPU, and torch raises.
    """
    if torch.accelerator.is_available():
        yield
        return
    asked = torch.accelerator.current_device_index
    torch.accelerator.current_device_index = lambda: 0
    try:
        yield
    finally:
        torch.accelerator.current_device_index = asked
