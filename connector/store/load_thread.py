"""The plugin's receive thread: upstream's thread, with the loads carried out by `loader`.

    a load comes in  -> planned by upstream (`load_planner`) -> first pass
    a pass is over   -> done: reported to vLLM, to the , to the failure log
                     -> due again later: given to `Retries`, and the thread takes the next load meanwhile

Whatever happens, a load that was taken up ends in exactly one report: a request waits for remote KVs until then. This
file knows upstream's receive thread and the store; it keeps no ledger.
"""

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreRecvingThread,
    _get_replica_tiers_by_key,  # pyright: ignore[reportPrivateUsage] - upstream's log of tiers, see compat
    _log_mooncake_load_tier_summary,  # pyright: ignore[reportPrivateUsage] - the same
)

from connector.runtime.failures import FailureLog
from connector.store.integrity import Guard
from connector.store.load_planner import LoadPlanner
from connector.store.loader import Answer, Limits, Loading, LoadResult, Reject, Target, get_from, run_pass
from connector.store.metadata import LoadReport
from connector.store.recording_store import RecordingStore, StoreWork, in_order
from ledger.codes import KVCacheErrorCode, Stage
from ledger.events import BlockFailures
from ledger.settings import Settings

logger = logging.getLogger("kvledger")


class Ticket:
    """What the engine's thread and the receive threads share of a load, from its queuing to its answer.

    Attributes:
        number: the load's id in the , -1 if they know of none.
        step: the engine step that queued the load.
        cancelled: nobody waits for the load any more. Only ever set to True, so it needs no lock.
    """

    def __init__(self, number: int = -1, step: int = 0) -> None:
        self.number = number
        self.step = step
        self.cancelled = False


class RunningLoad:
    """A load of this rank between its first pass and its report. It goes through upstream's queue like a request.

    Attributes:
        req_id: the request, as vLLM knows it. Upstream's thread loop reads it when something raises.
        name: the request, as the log knows it.
    """

    def __init__(self, req_id: str, name: str, ticket: Ticket, loading: Loading) -> None:
        self.req_id = req_id
        self.name = name
        self.ticket = ticket
        self.loading = loading


class Retries(Protocol):
    """Brings loads back when they are due. The simulator has its own, in virtual time."""

    def now_s(self) -> float:
        """Return the time, in seconds."""
        ...

    def put_back(self, load: RunningLoad, due_s: float) -> None:
        """Give `load` to the receive threads at `due_s`; their queue counts it as unfinished all the while."""
        ...

    def bring_cancelled(self) -> None:
        """Bring back at once the loads that were cancelled."""
        ...

    def close(self) -> None:
        """Bring back at once, as cancelled, all loads; those that come later too."""
        ...


class TimedRetries:
    """`Retries` by the monotonic clock. One thread, which starts with the first load that is due later.

    Args:
        receive_queue: the queue of the receive threads.
    """

    def __init__(self, receive_queue: "queue.Queue[Any]") -> None:
        self._queue = receive_queue
        self._waiting: list[tuple[float, int, RunningLoad]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def now_s(self) -> float:
        """Return the monotonic clock, in seconds."""
        return time.monotonic()

    def put_back(self, load: RunningLoad, due_s: float) -> None:
        """Give `load` to the receive threads at `due_s`."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvledger-load-retries", daemon=True)
                thread.start()
                self._thread = thread
            if self._closed:
                load.ticket.cancelled = True
            heapq.heappush(self._waiting, (0.0 if load.ticket.cancelled else due_s, next(self._order), load))
            self._changed.notify()

    def bring_cancelled(self) -> None:
        """Bring back at once the loads that were cancelled."""
        with self._changed:
            for index, (_, order, load) in enumerate(self._waiting):
                if load.ticket.cancelled:
                    self._waiting[index] = (0.0, order, load)
            heapq.heapify(self._waiting)
            self._changed.notify()

    def close(self) -> None:
        """Bring back at once, as cancelled, all loads; those that come later too."""
        with self._changed:
            self._closed = True
            for _, _, load in self._waiting:
                load.ticket.cancelled = True
        self.bring_cancelled()

    def _run(self) -> None:
        with self._changed:
            while True:
                if not self._waiting:
                    self._changed.wait()
                    continue
                left_s = self._waiting[0][0] - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                _, _, load = heapq.heappop(self._waiting)
                self._queue.put(load)
                self._queue.task_done()  # of the time before: until here the load counted as unfinished


class Loader(NamedTuple):
    """What the receive threads of a worker share.

    Attributes:
        rank: this worker's rank.
        kv_groups: the KV-cache group of each group that the store knows.
        limits: what a load may cost.
        name: gives what stands in the log for a request id.
        report: takes a request and the report of its load, for the ledger.
        failures: takes failures for operators.
        retries: brings loads back.
        guard: compares what arrived with its fingerprints; None if integrity is off.
    """

    rank: int
    kv_groups: tuple[int, ...]
    limits: Limits
    name: Callable[[str], str]
    report: Callable[[str, LoadReport], None]
    failures: FailureLog
    retries: Retries
    guard: Guard | None = None


def limits_of(settings: Settings, thread: KVCacheStoreRecvingThread) -> Limits:
    """Return what a load may cost by the settings, and by the staging buffer that upstream reads through."""
    return Limits(
        max_retries=settings.load_max_retries,
        deadline_s=settings.load_deadline_s,
        backoff_s=settings.load_retry_backoff_ms / 1000,
        rollback=settings.load_rollback,
        batch_bytes=thread.usable_disk_offload_buffer_budget_bytes or 0,
        key_bytes=thread.disk_offload_buffer_budget_bytes or 0,
    )


MISFIT = frozenset({-600, -800})
"""What Mooncake 0.3.13 answers when a value is longer (INVALID_PARAMS) or shorter (TRANSFER_FAIL) than its buffers."""

CANCELLED = Reject(KVCacheErrorCode.CANCELLED, "nobody waits for the load any more", Stage.STORE_GET)


class LedgerRecvingThread(KVCacheStoreRecvingThread):
    """Upstream's load thread, loading with `loader`. Made by `rebase_class`, then given `open`."""

    store: RecordingStore

    def open(self, loader: Loader) -> None:
        """Begin to load as `loader` says."""
        self._loader = loader
        self._planner = LoadPlanner(self, loader.kv_groups)

    def _handle_request(self, req_meta: ReqMeta | RunningLoad) -> None:
        load = req_meta if isinstance(req_meta, RunningLoad) else None
        try:
            if load is None:
                load = self._take_up(req_meta)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            if load.ticket.cancelled:
                load.loading.abandon(CANCELLED)
            elif not load.loading.done:
                with self.store.working(StoreWork(load.name, load=load.ticket.number)):
                    run_pass(load.loading, self._get, self._loader.retries.now_s)
            due_s = load.loading.due_s
            if due_s is not None:
                self._loader.retries.put_back(load, due_s)
                return
        except Exception as error:
            # Nothing of the store's gets here. The request must not wait for ever for a fault of ours or of upstream's.
            logger.exception("kvledger: the load of request %s raised outside of the store", req_meta.req_id)
            load = load or self._unplanned(req_meta)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            load.loading.abandon(error)
        self._answer(load)

    # --- beginning --------------------------------------------------------------------------------------------------

    def _take_up(self, req_meta: ReqMeta) -> RunningLoad:
        return self._running(req_meta, self._planner.plan(req_meta))

    def _unplanned(self, req_meta: ReqMeta) -> RunningLoad:
        return self._running(req_meta, self._planner.unplanned(req_meta))

    def _running(self, req_meta: ReqMeta, targets: Sequence[Target]) -> RunningLoad:
        spec = req_meta.load_spec
        first_token = spec.vllm_cached_tokens if spec is not None else 0
        loader = self._loader
        loading = Loading(targets, first_token, loader.limits, loader.retries.now_s())
        ticket = getattr(req_meta, "kvledger_load", None) or Ticket()
        return RunningLoad(req_meta.req_id, loader.name(req_meta.req_id), ticket, loading)

    # --- one call to the store --------------------------------------------------------------------------------------

    def _get(self, targets: Sequence[Target]) -> Sequence[Answer]:
        """Ask the store, and keep upstream's statistics of such calls."""
        total_bytes = sum(sum(target.sizes) for target in targets)
        keys = [target.key for target in targets]
        tiers = _get_replica_tiers_by_key(self.store, keys) if envs.VLLM_MOONCAKE_STORE_TIER_LOG else None
        started_s = time.perf_counter()
        status, failed_keys = "error", len(targets)
        try:
            answers = get_from(self.store)(targets)
            failed_keys = sum(answer < 0 for answer in answers)
            status = "partial_failure" if failed_keys else "ok"
        finally:
            self._record_operation(
                "load_get",
                started_s,
                len(targets),
                num_bytes=total_bytes,
                status=status,
                num_failed_keys=failed_keys,
            )
        if tiers is not None:
            work = self.store.work
            _log_mooncake_load_tier_summary(work.request if work is not None else "", keys, list(answers), tiers)
        guard = self._loader.guard
        judged = answers if guard is None else guard.verify(targets, answers, self.store.take_trailers())
        return judged if failed_keys == 0 else self._with_sizes(targets, judged)

    def _with_sizes(self, targets: Sequence[Target], answers: Sequence[Answer]) -> Sequence[Answer]:
        """Ask how long those values are that did not fit, because the store's codes for that say other things too."""
        explained = list(answers)
        for index, answer in enumerate(answers):
            if answer in MISFIT:
                found, expected = self._size_of(targets[index].key), sum(targets[index].sizes)
                if found >= 0 and found != expected:
                    raw = f"{answer}: the value has {found} bytes, the block {expected}"
                    explained[index] = Reject(KVCacheErrorCode.VERSION_MISMATCH, raw, Stage.STORE_GET)
        return explained

    def _size_of(self, key: str) -> int:
        try:
            return int(self.store.get_size(key))
        except Exception:  # noqa: BLE001 - the load has failed already; without an answer its code stays what it is
            return -1

    # --- the end ----------------------------------------------------------------------------------------------------

    def _answer(self, load: RunningLoad) -> None:
        """Report a load that is done: to operators, to the , and to vLLM even if the others raise."""
        try:
            result = load.loading.result()
            if not result.loaded:
                self._report_failures(load, result)
            self._loader.failures.retried(result.retries)
            if load.ticket.number >= 0:
                self._loader.report(load.req_id, self._report(load, result))
        finally:
            self.set_finished_request(load.req_id)
            self.request_queue.task_done()

    def _report_failures(self, load: RunningLoad, result: LoadResult) -> None:
        if self._is_hma_required or result.whole_request:
            self.set_failed_request(load.req_id)
        else:
            self._add_load_error_block_ids([block for _, block in result.invalid])
        rank = self._loader.rank
        for group in result.by_code():
            self._loader.failures.report(
                group.error(load.name, load.ticket.number, rank),
                failed_keys=group.keys,
                retries=result.retries,
                gave_up=result.gave_up,
                invalid_blocks=len(result.invalid),
            )

    def _report(self, load: RunningLoad, result: LoadResult) -> LoadReport:
        rank = self._loader.rank
        first = result.first
        if first is None:
            return LoadReport(load.ticket.number, rank, "loaded", retries=result.retries)
        groups = result.by_code()
        by_blocks = not (self._is_hma_required or result.whole_request)
        return LoadReport(
            load.ticket.number,
            rank,
            "failed",
            str(first.code),
            first.raw,
            str(first.stage),
            first.exception,
            result.failed_blocks,
            len(result.failures),
            tuple(
                BlockFailures(str(each.code), each.raw, str(each.stage), each.blocks, each.keys, each.exception)
                for each in groups
            ),
            in_order(result.invalid) if by_blocks else (),
            result.retries,
        )
