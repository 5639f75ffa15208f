"""One simulated rank: upstream's and the plugin's worker code, run without threads.

What is real here: upstream's `MooncakeStoreWorker` methods, its two transfer threads' handling of a job and a load,
its token databases and masks, and all of the plugin's worker half. What is modelled: the thread loop (a `Lanes` queue
that runs each item as a call in virtual time), the constructor (which needs a device and a store), the GPU event that
a save waits for, and the store itself. A rank answers a step as vLLM's model runner does, with the same calls in the
same order.
"""

import copy
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import MooncakeStoreCoordinator
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    KeyMetadata,
    MooncakeStoreConnectorMetadata,
    ReqMeta,
)
from vllm.v1.outputs import KVConnectorOutput

from connector.runtime.failure_log import FailureLog
from connector.runtime.rebase import rebase_class
from connector.store import worker as store_worker
from connector.store.load_thread import RankLoad
from connector.store.metadata import JobReport, LoadReport
from connector.store.worker import LedgerStoreWorker
from ledger import events as ev
from ledger.live.log import Log
from ledger.settings import Settings
from tools.sim.clock import STEP_NS, Call, Clock, getcurrent
from tools.sim.store.checks import load_number
from tools.sim.store.objects import BASE_ADDRESS, BLOCK_BYTES, Faults, RankStore
from tools.sim.store.plan import Shape

DISPATCH_NS = STEP_NS // 100
"""From queueing a job to a thread taking it up: 0.1 ms."""

BETWEEN_CALLS_NS = STEP_NS // 50
"""From one of the calls by which vLLM asks a rank for its results to the next: long for what they do, to meet more."""


class Lanes:
    """The queue of one or more of upstream's transfer threads, and those threads as calls in virtual time.

    It has the methods of `queue.Queue` that upstream's code uses.

    Attributes:
        unfinished_tasks: items put and not yet done.
        swallowed: exceptions that left a thread's handler; upstream's thread loop logs them and goes on.
    """

    def __init__(self, clock: Clock, after: Callable[[Any], None]) -> None:
        self.unfinished_tasks = 0
        self.swallowed: list[Exception] = []
        self._clock = clock
        self._after = after
        self._waiting: deque[Any] = deque()
        self._idle: deque[Any] = deque()

    def serve(self, thread: Any) -> None:
        """Let `thread` handle items."""
        self._idle.append(thread)

    def put(self, item: Any) -> None:
        """Queue an item."""
        self.unfinished_tasks += 1
        self._waiting.append(item)
        if self._idle:
            thread = self._idle.popleft()
            self._clock.start(lambda: self._run(thread), DISPATCH_NS)

    def task_done(self) -> None:
        """Count an item as done."""
        self.unfinished_tasks -= 1

    def _run(self, thread: Any) -> None:
        call = getcurrent()
        assert_call(call)
        while self._waiting:
            call.item = item = self._waiting.popleft()
            try:
                thread._handle_request(item)
            except Exception as error:  # noqa: BLE001 - as upstream's loop does
                self.swallowed.append(error)
            self._after(item)
        self._idle.append(thread)


def assert_call(call: object) -> None:
    """Raise if `call` is not a call in virtual time."""
    if not isinstance(call, Call):
        raise TypeError("a lane runs outside of virtual time")


class Fence:
    """The GPU event that a save waits for. By the time a job is taken up its step has run, so it only ever fails."""

    def __init__(self, faults: Faults, request: str, rank: int) -> None:
        self._faults = faults
        self._request = request
        self._rank = rank

    def synchronize(self) -> None:
        """Return at once, or raise what the plan says."""
        self._faults.raise_if_due("fence", self._request, self._rank)


class VirtualEvidence:
    """Takes a rank's evidence straight into the log, stamped with virtual time."""

    def __init__(self, log: Log, rank: int, clock: Clock) -> None:
        self.origin = f"rank {rank}"
        self.step = 0
        self._log = log
        self._clock = clock
        self._started_ns: dict[str, int] = {}

    def emit(self, event: Any) -> None:
        """Append an event of the plugin's worker half."""
        clock = self._clock
        stamps: dict[str, Any] = {"ts_ns": clock.wall_ns(), "mono_ns": clock.mono_ns()}
        if isinstance(event, ev.TransferStarted):
            self._started_ns[event.transfer] = clock.now_ns
        elif isinstance(event, ev.TransferFinished):
            stamps["duration_ns"] = clock.now_ns - self._started_ns.pop(event.transfer)
        self._log.append_evidence(msgspec.structs.replace(event, **stamps))


class VirtualRetries:
    """Brings loads back when they are due, in virtual time. See `connector.store.load_thread.Retries`."""

    def __init__(self, lanes: Lanes, clock: Clock) -> None:
        self._lanes = lanes
        self._clock = clock
        self._waiting: dict[int, RankLoad] = {}
        self._order = 0

    def now_s(self) -> float:
        """Return virtual time, in seconds."""
        return self._clock.now_ns / 1e9

    def put_back(self, load: RankLoad, due_s: float) -> None:
        """Give `load` to the receive threads at `due_s`."""
        self._order += 1
        number = self._order
        self._waiting[number] = load
        due_ns = self._clock.now_ns if load.cancelled else int(due_s * 1e9)
        self._clock.at(due_ns, lambda: self._bring(number))

    def waits(self, request: str) -> bool:
        """Return whether a load of `request` is to be tried again."""
        return any(load.req_id == request for load in self._waiting.values())

    def bring_cancelled(self) -> None:
        """Bring back at once the loads that were cancelled."""
        for number in [number for number, load in self._waiting.items() if load.cancelled]:
            self._bring(number)

    def close(self) -> None:
        """Bring back at once, as cancelled, all loads."""
        for load in self._waiting.values():
            load.cancelled = True
        self.bring_cancelled()

    def _bring(self, number: int) -> None:
        load = self._waiting.pop(number, None)
        if load is not None:
            self._lanes.put(load)
            self._lanes.task_done()  # of the time before: until here the load counted as unfinished


class CallLocal:
    """Stands in for a `threading.local`: what is set in a suspended call is seen by that call only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(getcurrent(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getcurrent(), name, value)


class Place(NamedTuple):
    """What the ranks of an engine share.

    Attributes:
        kv_groups: the KV-cache group of each group that the store knows.
        log: takes evidence.
    """

    shape: Shape
    coordinator: MooncakeStoreCoordinator
    kv_groups: tuple[int, ...]
    clock: Clock
    faults: Faults
    log: Log
    settings: Settings


class Rank:
    """One rank.

    Attributes:
        number: the rank.
        worker: the plugin's worker half.
    """

    def __init__(self, number: int, place: Place, store: RankStore) -> None:
        self.number = number
        self._place = place
        self._clock = place.clock
        self._faults = place.faults
        self.worker = self._build(place, store)

    # --- a step -----------------------------------------------------------------------------------------------------

    def run(self, metadata: MooncakeStoreConnectorMetadata) -> None:
        """Take up a step's loads and saves, as after the forward pass was launched."""
        if self._place.shape.ranks > 1:
            metadata = _delivered(metadata)
        self.worker.start_load_kv(metadata)
        thread = self.worker.kv_send_thread
        if thread is None or self.worker._capacity_only:
            return
        for req_meta in metadata.requests:
            if req_meta.can_save:
                req_meta.current_event = Fence(self._faults, req_meta.req_id, self.number)  # type: ignore[assignment]
                thread.add_request(req_meta)

    def answer(self, metadata: MooncakeStoreConnectorMetadata, finished: set[str]) -> KVConnectorOutput:
        """Return what this rank tells the scheduler at the end of a step, by the calls that vLLM makes.

        Time passes between them, because the transfer threads do not stand still meanwhile.
        """
        worker, clock = self.worker, self._clock
        results = worker.get_transfer_results(finished, metadata)
        clock.advance(clock.now_ns + BETWEEN_CALLS_NS)
        invalid_block_ids = worker.get_block_ids_with_load_errors()
        clock.advance(clock.now_ns + BETWEEN_CALLS_NS)
        return KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=invalid_block_ids,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )

    def report_job(self, job: int) -> None:
        """Report a job out of turn, as a broken worker would."""
        self.worker._outbox.add_job(JobReport(job, self.number, "stored"))

    def report_load(self, load: int, request: str) -> None:
        """Report a load out of turn, to the books and to vLLM, as a broken worker would.

        Not beside another connector: vLLM counts answers by request, and one that is not ours would be counted for a
        load that is not ours either. The plugin keeps the request waiting then, which is safe and cannot settle.
        """
        if self._place.shape.beside:
            return
        self.worker._outbox.add_load(request, LoadReport(load, self.number, "loaded"))
        upstream.KVTransferThread.set_finished_request(self.worker.kv_recv_threads[0], request)

    # --- building ---------------------------------------------------------------------------------------------------

    def _build(self, place: Place, store: RankStore) -> LedgerStoreWorker:
        shape, coordinator = place.shape, place.coordinator
        worker = upstream.MooncakeStoreWorker.__new__(upstream.MooncakeStoreWorker)
        groups = coordinator.kv_cache_groups
        worker.dp_rank = worker.pp_rank = worker.pcp_rank = worker.dcp_rank = 0
        worker.pp_size = worker.pcp_size = worker.dcp_size = 1
        worker.tp_rank, worker.tp_size = self.number, shape.ranks
        worker.num_kv_head = 1 if shape.striped else shape.ranks
        worker.kv_role = shape.role
        worker.can_put = shape.role in ("kv_producer", "kv_both") or shape.save_decode_cache
        worker.load_async = True
        worker._capacity_only = shape.role == "kv_consumer" and not shape.lookups and not worker.can_put
        worker._is_hma_required = len(groups) > 1
        worker.hash_block_size = coordinator.hash_block_size
        worker.block_size = coordinator.lcm_block_size
        worker.coord = coordinator
        worker._kv_cache_groups = groups
        worker.store = store
        worker.enable_kv_events = False
        worker.finished_store_req = set()
        worker.kv_send_thread = None
        worker.kv_recv_threads = []
        worker.recv_request_queue = Lanes(self._clock, self._after_load)  # type: ignore[assignment]
        worker._group_tp_replication_factors = worker._compute_group_tp_replication_factors()
        metadata = KeyMetadata("model", tp_rank=self.number, pcp_rank=0, dcp_rank=0, pp_rank=0)
        worker.token_dbs = worker._build_token_databases(metadata, None)
        worker._init_lookup_key_prefixes()
        worker._record_kv_connector_operation = _nothing  # type: ignore[method-assign]
        promoted = rebase_class(worker, LedgerStoreWorker)
        settings = msgspec.structs.replace(place.settings, evidence=False)
        config = SimpleNamespace(parallel_config=SimpleNamespace(rank=self.number), kv_transfer_config=None)
        with mock.patch.object(store_worker, "open_failure_log"):  # its handler would be the whole process's
            promoted.open(config, "simulated", settings, place.kv_groups)  # type: ignore[arg-type]
        promoted.store._sender = VirtualEvidence(place.log, self.number, self._clock)
        promoted.store._current = CallLocal()
        promoted._sender = promoted.store._sender
        promoted.retries = VirtualRetries(worker.recv_request_queue, self._clock)  # type: ignore[arg-type]
        promoted.failures = FailureLog("", write=_nothing)
        with mock.patch.object(upstream.MooncakeStoreWorker, "register_kv_caches", self._build_threads(shape)):
            promoted.register_kv_caches({})
        return promoted

    def _build_threads(self, shape: Shape) -> Callable[..., None]:
        """Return what stands in for upstream's registration: the same threads, built and not started."""

        def register_kv_caches(worker: upstream.MooncakeStoreWorker, kv_caches: object) -> None:
            for database in worker.token_dbs:
                database.set_kv_caches_base_addr([BASE_ADDRESS])
                database.set_block_len([BLOCK_BYTES])
            common = (worker.token_dbs, worker.block_size, worker.tp_rank)
            if worker.can_put:
                sender = upstream.KVCacheStoreSendingThread(
                    worker.store, worker.coord, *common, worker._group_tp_replication_factors, worker.kv_role,
                    threading.Event(),
                )  # fmt: skip
                lanes = Lanes(self._clock, self._after_job)
                lanes.serve(sender)
                sender.request_queue = lanes  # type: ignore[assignment]
                worker.kv_send_thread = sender
            for _ in range(shape.receivers):
                receiver = upstream.KVCacheStoreRecvingThread(
                    worker.store, worker.coord, *common, threading.Event(),
                    request_queue=worker.recv_request_queue, is_hma_required=worker._is_hma_required,
                )  # fmt: skip
                worker.recv_request_queue.serve(receiver)  # type: ignore[attr-defined]
                worker.kv_recv_threads.append(receiver)

        return register_kv_caches

    def _after_job(self, item: ReqMeta) -> None:
        if self._faults.answers_twice("put", item.req_id, self.number) and item.store_job_id is not None:
            job = item.store_job_id
            self._clock.at(self._clock.now_ns + STEP_NS * 3 // 2, lambda: self.report_job(job))

    def _after_load(self, item: ReqMeta | RankLoad) -> None:
        load = load_number(item)
        if self.worker.retries.waits(item.req_id):  # type: ignore[attr-defined]
            return  # it is tried again, and answered only then
        if self._faults.answers_twice("get", item.req_id, self.number):
            self._clock.at(self._clock.now_ns + STEP_NS * 3 // 2, lambda: self.report_load(load, item.req_id))


def _nothing(*_: object, **__: object) -> None:
    """Take metrics, which upstream times by a real clock, and lines for log shippers, which bear its time."""


def _delivered(metadata: MooncakeStoreConnectorMetadata) -> MooncakeStoreConnectorMetadata:
    """Return a copy, as a worker in another process gets one: it shares no list with the scheduler."""
    delivered = copy.copy(metadata)
    delivered.requests = []
    for req_meta in metadata.requests:
        own = copy.copy(req_meta)
        own.block_ids = tuple([ids.copy() for ids in req_meta.block_ids])
        own.block_hashes = list(req_meta.block_hashes)
        if req_meta.load_spec is not None:
            own.load_spec = copy.copy(req_meta.load_spec)
        delivered.requests.append(own)
    return delivered
