"""The P/D connector's statistics: ours stand beside upstream's, over ranks and at /metrics."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from connector.pd.connector import KVLedgerMooncakeConnector
from connector.pd.stats import FAILURES, LedgerMooncakeStats

FAILED = {"code": "LOAD_TIMEOUT", "stage": "WATCHDOG", "blocks": 3}


def test_an_empty_statistic_is_empty_until_something_has_failed() -> None:
    stats = LedgerMooncakeStats()
    assert stats.is_empty()
    stats.add([FAILED], 0)
    assert not stats.is_empty()
    taken = stats.clone_and_reset()
    assert stats.is_empty()
    assert taken.data[FAILURES] == [FAILED]


def test_statistics_of_ranks_add_up() -> None:
    first, second = LedgerMooncakeStats(), LedgerMooncakeStats()
    first.record_failed_recv()
    second.record_failed_recv()
    second.add([FAILED], 0)
    summed: Any = first.aggregate(second)
    assert summed.reduce()["Num failed recvs"] == 2
    assert summed.reduce()["Num failed LOAD_TIMEOUT"] == 1


def test_statistics_that_came_over_the_wire_are_ours_again() -> None:
    stats = KVLedgerMooncakeConnector.build_kv_connector_stats({**LedgerMooncakeStats().data, FAILURES: [FAILED]})
    assert stats.reduce()["Num failed LOAD_TIMEOUT"] == 1
    assert KVLedgerMooncakeConnector.build_kv_connector_stats().is_empty()


@pytest.fixture
def metrics() -> Any:
    config: Any = SimpleNamespace(kv_transfer_config=None)
    known = set(REGISTRY._collector_to_names)
    yield KVLedgerMooncakeConnector.build_prom_metrics(
        config,
        {Gauge: Gauge, Counter: Counter, Histogram: Histogram},  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
        ["engine"],
        {0: ["0"]},
    )
    for collector in set(REGISTRY._collector_to_names) - known:
        REGISTRY.unregister(collector)


def test_failures_stand_at_the_metrics_endpoint_by_code_and_stage(metrics: Any) -> None:
    stats = LedgerMooncakeStats()
    stats.add([FAILED, FAILED], 0)
    metrics.observe(stats.data, 0)
    metrics.observe(None, 0)
    labels = {"engine": "0", "code": "LOAD_TIMEOUT", "stage": "WATCHDOG"}
    assert REGISTRY.get_sample_value("vllm:kvledger_pd_failures_total", labels) == 2
    assert REGISTRY.get_sample_value("vllm:kvledger_pd_failed_blocks_total", labels) == 6
