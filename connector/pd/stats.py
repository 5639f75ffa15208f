"""Statistics of the P/D connector: upstream's, and our failures by code and stage beside them at /metrics.

Upstream's counters keep their meaning: a failed receive is counted once for each request and rank. This file may know
vLLM's statistics classes.
"""

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import stats as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats

FAILURES = "kvledger_failures"
"""Where ours stand among upstream's records."""

UPSTREAM_METRICS: type[KVConnectorPromMetrics] | None = getattr(upstream, "MooncakePromMetrics", None)
"""vLLM 0.33 has its statistics at /metrics, too; 0.32 only logs them."""


@dataclass
class LedgerMooncakeStats(MooncakeKVConnectorStats):
    """Upstream's statistics, and failures as records of `code`, `stage` and `blocks`."""

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.data[FAILURES] = []

    def add(self, failures: list[dict[str, int | str]], retries: int) -> None:
        """Add failures. A transfer is not tried again by itself, so there are no retries."""
        del retries
        records: list[Any] = self.data.setdefault(FAILURES, [])
        records.extend(failures)

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return super().is_empty() and not self.data.get(FAILURES)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's statistics to these, and return these."""
        self.data.setdefault(FAILURES, [])
        return super().aggregate(other)

    def clone_and_reset(self) -> "LedgerMooncakeStats":
        """Return what was recorded since the last call."""
        return LedgerMooncakeStats(data=super().clone_and_reset().data)

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM prints in its periodic log line."""
        reduced = super().reduce()
        records: list[Any] = self.data.get(FAILURES, [])
        for failure in records:
            name = f"Num failed {failure['code']}"
            reduced[name] = reduced.get(name, 0) + 1
        return reduced


class LedgerMooncakePromMetrics(KVConnectorPromMetrics):
    """Upstream's metrics where it has some, and ours."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._upstream: KVConnectorPromMetrics | None = None
        if UPSTREAM_METRICS is not None:
            self._upstream = UPSTREAM_METRICS(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # Not the names of the store connector's counters: under vLLM's MultiConnector both are in one registry.
        self._failures: Any = self._counter_cls(
            name="vllm:kvledger_pd_failures_total",
            documentation="Failed pushes and pulls of KV cache, by stable error code and stage.",
            labelnames=[*labelnames, "code", "stage"],
        )
        self._failed_blocks: Any = self._counter_cls(
            name="vllm:kvledger_pd_failed_blocks_total",
            documentation="KV cache blocks that could not be pushed or pulled, by stable error code and stage.",
            labelnames=[*labelnames, "code", "stage"],
        )

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        """Count what a step's statistics say."""
        if not transfer_stats_data:
            return
        theirs = {name: records for name, records in transfer_stats_data.items() if name != FAILURES}
        if self._upstream is not None:
            self._upstream.observe(theirs, engine_idx)
        engine = self.per_engine_labelvalues[engine_idx]
        for failure in transfer_stats_data.get(FAILURES, ()):
            labels = [*engine, failure["code"], failure["stage"]]
            self._failures.labels(*labels).inc()
            self._failed_blocks.labels(*labels).inc(failure["blocks"])
