"""Failures of transfers as people and machines outside see them: a JSON line for log shippers, counters at /metrics.

The line goes to the logger `kvledger.failures`, one for each failure, and its `code` is the stable name: alerts match
that and no message. The counters travel with vLLM's own connector statistics and stand beside upstream's. The ledger's
events are made elsewhere, from the same `KVTransferError`. This file may know vLLM's statistics classes.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import (
    MooncakeStoreConnectorStats,
    MooncakeStorePromMetrics,
)

from ledger.blocks import count
from ledger.codes import CODES, raw_name
from ledger.errors import KVTransferError

logger = logging.getLogger("kvledger.failures")


_opened: tuple[str, logging.Handler] | None = None
"""Where the lines of this process go, and the handler that writes them."""


def open_failure_log(path: str) -> None:
    """Give the logger a handler that writes bare lines, unless the host has given it one.

    A process has one such log. With two connectors below vLLM's MultiConnector a file goes before standard error; of
    two files the first stays, and that is said.

    Args:
        path: a file to append to; empty for standard error. Several processes may share it: a line is one write.
    """
    global _opened  # noqa: PLW0603 - there is one logger of this name in a process, and one who may open it
    if _opened is not None and _opened[1] in logger.handlers:
        before, given = _opened
        if before and path and before != path:
            logging.getLogger("kvledger").error(
                "kvledger: failure_log %s is not written. This process writes all its failures to %s, which another of "
                "its connectors named first. Give both the same failure_log.",
                path,
                before,
            )
        if before or not path:
            return
        logger.removeHandler(given)
    elif logger.handlers:
        return
    if path:
        handler: logging.Handler = logging.FileHandler(path, delay=True)
    else:
        # vLLM's workers put their name before each line of `sys.stderr`; a log shipper wants nothing but JSON.
        stream = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115 - open for good
        handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    _opened = (path, handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False


def failure_line(error: KVTransferError, engine: str = "", **more: Any) -> str:
    """Return a failure as one line of JSON.

    Args:
        engine: the engine's id.
        more: further fields, which the line ends with.
    """
    line: dict[str, Any] = {
        "event": "kv_transfer_failed",
        "ts_ns": time.time_ns(),
        "code": str(error.code),
        "stage": str(error.stage),
        "retryable": CODES[error.code].retryable,
        "raw": error.raw,
        "raw_name": raw_name(error.raw),
        "exception": error.exception,
        "engine": engine,
        "rank": error.rank,
        "request": error.request,
    }
    line.update({name: value for name in ("job", "load") if (value := getattr(error, name)) >= 0})
    if error.transfer:
        line["transfer"] = error.transfer
    line.update(failed_blocks=count(error.blocks), blocks=error.blocks, **more, action=CODES[error.code].action)
    return msgspec.json.encode(line).decode()


class Counted(Protocol):
    """Statistics that take failures, whichever connector's they are."""

    def add(self, failures: list[dict[str, int | str]], retries: int) -> None:
        """Add failures (`code`, `stage`, `blocks`) and a number of retries."""
        ...


class FailureLog:
    """Where a worker's failures go: the JSON line, and the counters of the next statistics. Any thread may report.

    Args:
        engine: the engine's id.
        write: what takes a line.
    """

    def __init__(self, engine: str, write: Callable[[str], None] = logger.warning) -> None:
        self._engine = engine
        self._write = write
        self._lock = threading.Lock()
        self._failures: list[dict[str, int | str]] = []
        self._retries = 0

    def report(self, error: KVTransferError, **more: Any) -> None:
        """Report one failure; `more` are further fields of its line."""
        self._write(failure_line(error, self._engine, **more))
        with self._lock:
            self._failures.append({"code": str(error.code), "stage": str(error.stage), "blocks": count(error.blocks)})

    def retried(self, passes: int) -> None:
        """Count retries of a load."""
        if passes:
            with self._lock:
                self._retries += passes

    def move_to(self, stats: "Counted") -> None:
        """Give what was counted since the last call to `stats`."""
        with self._lock:
            failures, self._failures = self._failures, []
            retries, self._retries = self._retries, 0
        stats.add(failures, retries)


FAILURES, RETRIES = "kvledger_failures", "kvledger_load_retries"
"""Where ours stand among upstream's records of operations."""


@dataclass
class LedgerStoreStats(MooncakeStoreConnectorStats):
    """Upstream's statistics of calls to the store, and our failures by code and stage."""

    def add(self, failures: list[dict[str, int | str]], retries: int) -> None:
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
