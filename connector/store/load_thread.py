"""The plugin's receive thread: upstream's thread, with the loads carried out by `loader`.

    a load comes in  -> planned by upstream (`load_planner`) -> first pass
    a pass is over   -> done: reported to vLLM, to the ledger, to the failure log
                     -> due again later: given to `Retries`, and the thread takes the next load meanwhile

Whatever happens, a load that was taken up ends in exactly one report, because its request waits for remote KVs until
then. This file knows upstream's receive thread and the store; it keeps no ledger.
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

from connector.runtime.failure_log import FailureLog
from connector.runtime.failures import Failure
from connector.store.integrity import Guard
from connector.store.load_planner import LoadPlanner
from connector.store.loader import Answer, Limits, LoadPasses, LoadResult, Target, get_from, run_pass
from connector.store.metadata import LoadReport
from connector.store.recording_store import RecordingStore, StoreWork, in_order
from ledger.codes import KVCacheErrorCode, Stage
from ledger.settings import Settings

logger = logging.getLogger("kvledger")


class RankLoad:
    """This rank's part of a load, from the step that queues it to its report.

    The engine's thread makes it, and may cancel it; a receive thread takes it up. Between two passes it goes through
    upstream's queue in the place of its request.

    Attributes:
        req_id: the request, as vLLM knows it. Upstream's thread loop reads it when something raises.
        number: the load's id in the ledger, -1 if it has none.
        step: the engine step that queued the load.
        cancelled: nobody waits for the load any more. It is only ever set to True, so it needs no lock.
        passes: what has been tried; None until a receive thread takes the load up.
    """

    def __init__(self, req_id: str, number: int = -1, step: int = 0) -> None:
        self.req_id = req_id
        self.number = number
        self.step = step
        self.cancelled = False
        self.passes: LoadPasses | None = None


class Retries(Protocol):
    """Brings loads back when they are due. The simulator has its own, in virtual time."""

    def now_s(self) -> float:
        """Return the time, in seconds."""
        ...

    def put_back(self, load: RankLoad, due_s: float) -> None:
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
        self._waiting: list[tuple[float, int, RankLoad]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def now_s(self) -> float:
        """Return the monotonic clock, in seconds."""
        return time.monotonic()

    def put_back(self, load: RankLoad, due_s: float) -> None:
        """Give `load` to the receive threads at `due_s`."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvledger-load-retries", daemon=True)
                thread.start()
                self._thread = thread
            if self._closed:
                load.cancelled = True
            heapq.heappush(self._waiting, (0.0 if load.cancelled else due_s, next(self._order), load))
            self._changed.notify()

    def bring_cancelled(self) -> None:
        """Bring back at once the loads that were cancelled."""
        with self._changed:
            for index, (_, order, load) in enumerate(self._waiting):
                if load.cancelled:
                    self._waiting[index] = (0.0, order, load)
            heapq.heapify(self._waiting)
            self._changed.notify()

    def close(self) -> None:
        """Bring back at once, as cancelled, all loads; those that come later too."""
        with self._changed:
            self._closed = True
            for _, _, load in self._waiting:
                load.cancelled = True
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


class RecvSetup(NamedTuple):
    """What the receive threads of a worker share.

    Attributes:
        rank: this worker's rank.
        kv_groups: the KV-cache group of each group that the store knows.
        limits: what a load may cost.
        name: returns the name in the log of a request id.
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

RAISED = "kvledger: the load of request %s raised outside of the store"
"""Nothing of the store's is raised. The request must not wait for ever for a fault of ours or of upstream's."""

CANCELLED = Failure(KVCacheErrorCode.CANCELLED, "nobody waits for the load any more", Stage.STORE_GET)


class LedgerRecvingThread(KVCacheStoreRecvingThread):
    """Upstream's load thread, loading with `loader`. Made by `rebase_class`, then given `open`."""

    store: RecordingStore

    def open(self, setup: RecvSetup) -> None:
        """Begin to load as `setup` says."""
        self._setup = setup
        self._planner = LoadPlanner(self, setup.kv_groups)

    def _handle_request(self, req_meta: ReqMeta | RankLoad) -> None:
        load = req_meta if isinstance(req_meta, RankLoad) else self._take_up(req_meta)
        passes = load.passes
        if passes is None:
            raise RuntimeError(f"the load of request {load.req_id} came back before it was taken up")
        try:
            if load.cancelled:
                passes.abandon(CANCELLED)
            elif not passes.done:
                with self.store.working(StoreWork(self._setup.name(load.req_id), load=load.number)):
                    run_pass(passes, self._get, self._setup.retries.now_s)
            due_s = passes.due_s
            if due_s is not None:
                self._setup.retries.put_back(load, due_s)
                return
        except Exception as error:
            logger.exception(RAISED, load.req_id)
            passes.abandon(Failure.of(error, Stage.STORE_GET))
        self._answer(load, passes)

    # --- beginning --------------------------------------------------------------------------------------------------

    def _take_up(self, req_meta: ReqMeta) -> RankLoad:
        """Return the load that a request of upstream's queue asks for, planned by upstream."""
        load: RankLoad = getattr(req_meta, "kvledger_load", None) or RankLoad(req_meta.req_id)
        try:
            load.passes = self._passes(req_meta, self._planner.plan(req_meta))
        except Exception as error:
            load.passes = self._passes(req_meta, self._planner.unplanned(req_meta))
            logger.exception(RAISED, req_meta.req_id)
            load.passes.abandon(Failure.of(error, Stage.STORE_GET))
        return load

    def _passes(self, req_meta: ReqMeta, targets: Sequence[Target]) -> LoadPasses:
        spec = req_meta.load_spec
        first_token = spec.vllm_cached_tokens if spec is not None else 0
        return LoadPasses(targets, first_token, self._setup.limits, self._setup.retries.now_s())

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
        guard = self._setup.guard
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
                    explained[index] = Failure(KVCacheErrorCode.VERSION_MISMATCH, raw, Stage.STORE_GET)
        return explained

    def _size_of(self, key: str) -> int:
        try:
            return int(self.store.get_size(key))
        except Exception:  # noqa: BLE001 - the load has failed already; without an answer its code stays what it is
            return -1

    # --- the end ----------------------------------------------------------------------------------------------------

    def _answer(self, load: RankLoad, passes: LoadPasses) -> None:
        """Report a load that is done: to operators, to the ledger, and to vLLM even if the others raise."""
        try:
            result = passes.result()
            by_blocks = not (self._is_hma_required or result.whole_request)
            if not result.loaded:
                self._report_failures(load, result, by_blocks)
            self._setup.failures.retried(result.retries)
            if load.number >= 0:
                self._setup.report(load.req_id, self._report(load, result, by_blocks))
        finally:
            self.set_finished_request(load.req_id)
            self.request_queue.task_done()

    def _report_failures(self, load: RankLoad, result: LoadResult, by_blocks: bool) -> None:
        if by_blocks:
            self._add_load_error_block_ids([block for _, block in result.invalid])
        else:
            self.set_failed_request(load.req_id)
        for failure in result.by_cause():
            self._setup.failures.report(
                failure,
                request=self._setup.name(load.req_id),
                load=load.number,
                rank=self._setup.rank,
                failed_keys=failure.keys,
                retries=result.retries,
                gave_up=result.gave_up,
                invalid_blocks=len(result.invalid),
            )

    def _report(self, load: RankLoad, result: LoadResult, by_blocks: bool) -> LoadReport:
        return LoadReport(
            load.number,
            self._setup.rank,
            "loaded" if result.loaded else "failed",
            result.failure,
            result.by_cause(),
            in_order(result.invalid) if by_blocks else (),
            result.retries,
        )
