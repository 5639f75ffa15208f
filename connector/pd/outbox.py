"""What a rank of the P/D connector reports, kept until the scheduler and vLLM may have it.

Results are made on the threads of the transfers; vLLM asks for them once in every step. Two rules apply in between:

* A report goes to the scheduler's ledger no later than the result that follows from it goes to vLLM.
* A failure goes to the ledger one step before it goes to vLLM. vLLM acts on failed blocks before it passes on the
  reports of the same step, and in the log the request would then end first and fail afterwards.

This file knows reports and evidence, and nothing of transfers.
"""

import threading
import time
from typing import Any

from connector.pd.metadata import Report
from connector.runtime.evidence import EvidenceSender
from ledger import events as ev


class PDOutbox:
    """Any thread may add. Only the worker's thread takes, in the order in which vLLM asks in a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: list[Report] = []
        self._finished: set[str] = set()
        self._fresh: list[str | frozenset[int]] = []
        self._failed: set[str] = set()
        self._invalid: set[int] = set()

    def add(self, report: Report) -> None:
        """Add a report."""
        with self._lock:
            self._reports.append(report)

    def finish(self, request_id: str) -> None:
        """Let vLLM know that a request has received."""
        with self._lock:
            self._finished.add(request_id)

    def invalidate(self, block_ids: frozenset[int]) -> None:
        """Let vLLM know, after the reports so far, that these blocks may not be trusted."""
        with self._lock:
            self._fresh.append(block_ids)

    def finish_failed(self, request_id: str) -> None:
        """Let vLLM know, after the reports so far, that a request will receive no more, and has failed to."""
        with self._lock:
            self._fresh.append(request_id)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests that have received, and those that have failed to, since the last call."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed = self._failed, set()
        return finished, failed

    def take_invalid(self) -> set[int]:
        """Return the blocks that may not be trusted, since the last call."""
        with self._lock:
            invalid, self._invalid = self._invalid, set()
        return invalid

    def take_reports(self) -> list[Report]:
        """Return the reports since the last call. What follows from them goes to vLLM from the next step on."""
        with self._lock:
            reports, self._reports = self._reports, []
            for known in self._fresh:
                if isinstance(known, str):
                    self._failed.add(known)
                else:
                    self._invalid |= known
            self._fresh.clear()
        return reports


class Evidence:
    """Sends what only a worker knows to the engine process; does nothing when evidence is switched off.

    Args:
        rank: this worker's rank.
        sender: the way to the engine process, None for none.
    """

    def __init__(self, rank: int, sender: EvidenceSender | None) -> None:
        self._rank = rank
        self._sender = sender

    def begin_step(self, step: int) -> None:
        """Stamp what follows with an engine step."""
        if self._sender is not None:
            self._sender.step = step

    def emit(self, kind: type[ev.TransferStarted | ev.TransferFinished], **fields: Any) -> None:
        """Send an event. Never blocks and never raises."""
        sender = self._sender
        if sender is not None:
            now_ns, mono_ns = time.time_ns(), time.monotonic_ns()
            sender.emit(kind(0, now_ns, mono_ns, sender.origin, sender.step, rank=self._rank, **fields))

    def close(self) -> None:
        """Send what waits, and stop."""
        if self._sender is not None:
            self._sender.close()
