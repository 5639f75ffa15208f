"""The failure log: one line of JSON for each failed transfer, for log shippers, and the counts for /metrics.

The line goes to the logger `kvledger.failures`. Its `code` is the stable name: alerts match that and no message. What
was reported is also counted until a connector takes the counts into its statistics. This file knows failures; it knows
no vLLM, and nothing of who reports.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import msgspec

from connector.runtime.failures import Failure
from ledger.blocks import count
from ledger.codes import CODES, KVCacheErrorCode, raw_name

logger = logging.getLogger("kvledger.failures")


_opened: tuple[str, logging.Handler] | None = None
"""Where the lines of this process go, and the handler that writes them."""


def open_failure_log(path: str) -> None:
    """Give the logger a handler that writes bare lines, unless the host has given it one.

    A process has one such log. With two connectors below vLLM's MultiConnector a file goes before standard error; of
    two files the first one is used, and an error line says so.

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


def failure_line(
    failure: Failure,
    engine: str = "",
    *,
    request: str,
    rank: int,
    job: int = -1,
    load: int = -1,
    transfer: str = "",
    **more: Any,
) -> str:
    """Return a failure as one line of JSON.

    Args:
        failure: what failed.
        engine: the engine's id.
        request, job, load, transfer: what it concerns; -1 or empty for what it does not.
        rank: the rank on which it failed.
        more: further fields, which the line ends with.
    """
    line: dict[str, Any] = {
        "event": "kv_transfer_failed",
        "ts_ns": time.time_ns(),
        "code": str(failure.code),
        "stage": str(failure.stage),
        "retryable": failure.retryable,
        "raw": failure.raw,
        "raw_name": raw_name(failure.raw),
        "exception": failure.exception,
        "engine": engine,
        "rank": rank,
        "request": request,
    }
    line.update({name: number for name, number in (("job", job), ("load", load)) if number >= 0})
    if transfer:
        line["transfer"] = transfer
    action = CODES[KVCacheErrorCode(failure.code)].action
    line.update(failed_blocks=count(failure.blocks), blocks=failure.blocks, **more, action=action)
    return msgspec.json.encode(line).decode()


FailureRecord: TypeAlias = dict[str, int | str]
"""A failure as vLLM's statistics carry it: `code`, `stage`, and `blocks`, how many failed."""


class FailureCounter(Protocol):
    """Statistics that take failures, whichever connector's they are."""

    def add(self, failures: list[FailureRecord], retries: int) -> None:
        """Add failures (`code`, `stage`, `blocks`) and a number of retries."""
        ...


class FailureLog:
    """Where a worker's failures go: a JSON line at once, and the next statistics. Any thread may report.

    Args:
        engine: the engine's id.
        write: what takes a line.
    """

    def __init__(self, engine: str, write: Callable[[str], None] = logger.warning) -> None:
        self._engine = engine
        self._write = write
        self._lock = threading.Lock()
        self._failures: list[FailureRecord] = []
        self._retries = 0

    def report(self, failure: Failure, **about: Any) -> None:
        """Report one failure; `about` is what it concerns and further fields of its line, as in `failure_line`."""
        self._write(failure_line(failure, self._engine, **about))
        with self._lock:
            self._failures.append(
                {"code": str(failure.code), "stage": str(failure.stage), "blocks": count(failure.blocks)}
            )

    def retried(self, passes: int) -> None:
        """Count retries of a load."""
        if passes:
            with self._lock:
                self._retries += passes

    def move_to(self, stats: FailureCounter) -> None:
        """Give what was counted since the last call to `stats`."""
        with self._lock:
            failures, self._failures = self._failures, []
            retries, self._retries = self._retries, 0
        stats.add(failures, retries)
