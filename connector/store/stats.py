"""Statistics of the store connector: upstream's, and our failures by code and stage beside them at /metrics.

Upstream's counters keep their meaning. This file may know vLLM's statistics classes.
"""

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
    MooncakeStorePromMetrics,
)

from connector.runtime.failure_log import FailureRecord

FAILURES, RETRIES = "kvledger_failures", "kvledger_load_retries"
"""Where ours stand among upstream's records of operations."""


@dataclass
class LedgerStoreStats(MooncakeStoreConnectorStats):
    """Upstream's statistics of calls to the store, and our failures by code and stage."""

    def add(self, failures: list[FailureRecord], retries: int) -> None:
        """Add failures (`code`, `stage`, `blocks`) and a number of retries."""
        if failures:
            # pyright: ignore[reportArgumentType]
            self.data.setdefault(FAILURES, []).extend(failures)  # type: ignore[arg-type]
        if retries:
            self.data.setdefault(RETRIES, []).append({"passes": retries})

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM prints in its periodic log line."""
        calls, failures, retries = _split(self.data)
        reduced = MooncakeStoreConnectorStats(data=calls).reduce() if calls else {}
        for failure in failures:
            name = f"failed_{str(failure['code']).lower()}"
            reduced[name] = reduced.get(name, 0) + 1
        if retries:
            reduced["load_retries"] = retries
        return reduced


class LedgerStorePromMetrics(MooncakeStorePromMetrics):
    """Upstream's metrics, and ours beside them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._failures: Any = self._counter_cls(
            name="vllm:kvledger_failures_total",
            documentation="Failed loads and saves of KV cache, by stable error code and stage.",
            labelnames=[*labelnames, "code", "stage"],
        )
        self._failed_blocks: Any = self._counter_cls(
            name="vllm:kvledger_failed_blocks_total",
            documentation="KV cache blocks that could not be moved, by stable error code and stage.",
            labelnames=[*labelnames, "code", "stage"],
        )
        self._retries: Any = self._counter_cls(
            name="vllm:kvledger_load_retries_total",
            documentation="Passes of loads after the first, for blocks that failed for a reason that may pass.",
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        """Count what a step's statistics say."""
        if not transfer_stats_data:
            return
        calls, failures, retries = _split(transfer_stats_data)
        super().observe(calls, engine_idx)
        engine = self.per_engine_labelvalues[engine_idx]
        for failure in failures:
            labels = [*engine, failure["code"], failure["stage"]]
            self._failures.labels(*labels).inc()
            self._failed_blocks.labels(*labels).inc(failure["blocks"])
        if retries:
            self._retries.labels(*engine).inc(retries)


def _split(data: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Return upstream's records, our failures, and the number of retries."""
    calls = {name: records for name, records in data.items() if name not in (FAILURES, RETRIES)}
    return calls, data.get(FAILURES, []), sum(record["passes"] for record in data.get(RETRIES, []))
