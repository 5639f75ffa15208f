"""What must hold after every step, and at the end of a run.

The checks keep their own account, from what was seen on the way: the metadata that the workers got, the reports that
reached the scheduler, what the connector did to the block pool, and vLLM's own block tables. They read the plugin's
book only to compare it with that account, and share no code with `ledger.state`. What the log itself says is held to
the rules by `tools.sim.store.checked_log`.

    poison      a key holds the KV of another prefix
    ownership   a transfer touches a block that is not held for it
    wrong_kv    a step attends to KV that is not its prefix's
    pins        references in the pool differ from block tables plus pins
    book        the book's open jobs, loads or requests differ from the account
    rule        an event breaks a rule of the design
    bound       more is held for store jobs than the settings allow
    fold        the log folds to another state than the live one
    violation   the books cried over a sound report, or kept silent about a broken one
    stopped     the engine would stop stepping while work is open
    unsettled   faults have stopped, and something does not settle
    crash       an exception that no rule asks for

This file knows vLLM's scheduler and the plugin's events.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreConnectorMetadata, ReqMeta
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.store.load_thread import RankLoad
from connector.store.metadata import LedgerWorkerMetadata
from ledger.live.log import Log
from tools.sim.check import Checks as CommonChecks
from tools.sim.clock import Clock
from tools.sim.store.checked_log import CheckedLog
from tools.sim.store.memory import shown
from tools.sim.store.plan import Shape


class OpenJob(msgspec.Struct):
    """A store job in the account.

    Attributes:
        waiting: ranks whose report has not reached the scheduler.
        blocks: what it may read.
        epochs: how often each of them had been given away when the job was registered.
        working: ranks that have not finished with it, whatever the scheduler was told.
    """

    request: str
    waiting: list[int]
    blocks: list[int]
    epochs: dict[int, int]
    quarantined: bool = False
    lost: bool = False


class OpenLoad(msgspec.Struct):
    """A load in the account; fields as in `OpenJob`."""

    load: int
    request: str
    waiting: list[int]
    epochs: dict[int, int]
    lost: bool = False


class WatchedPool:
    """The block pool as the connector sees it: the real one, with the connector's references counted.

    Attributes:
        held: the connector's references on each block.
        touched, freed: blocks of each call since the last look, in order.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.held = [0] * pool.num_gpu_blocks
        self.touched: list[list[int]] = []
        self.freed: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Reference blocks in the real pool."""
        numbers = [block.block_id for block in blocks]
        self.touched.append(numbers)
        for number in numbers:
            self.held[number] += 1
        self._pool.touch(blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give references back to the real pool."""
        blocks = list(ordered_blocks)
        numbers = [block.block_id for block in blocks]
        self.freed.append(numbers)
        for number in numbers:
            self.held[number] -= 1
        self._pool.free_blocks(blocks)


class Checks(CommonChecks):
    """All checks of one run; see also the class that it extends.

    Args:
        shape: the engine.
        clock: the run's time.
        only: look for these kinds alone and let others pass; None to stop at the first of any kind.
    """

    def __init__(self, shape: Shape, clock: Clock, only: frozenset[str] | None = None) -> None:
        super().__init__(only)
        self.clock = clock
        self.jobs: dict[int, OpenJob] = {}
        self.loads: dict[str, OpenLoad] = {}
        self.next_job = 0
        self.violation_due = ""
        self.lookup_hook: Callable[[], None] | None = None
        self._shape = shape
        self._settled_loads: dict[str, int] = {}
        self._tails: dict[int, None] = {}
        self._lost_elsewhere: dict[str, None] = {}
        self._epochs = [0] * shape.blocks

    def bind(self, scheduler: Scheduler, log: Log, checked_log: CheckedLog) -> None:
        """Take what is checked, once it is built."""
        self.scheduler = scheduler
        self.log = log
        self.checked_log = checked_log
        self.pool = scheduler.kv_cache_manager.block_pool
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        self._block_sizes = [spec.block_size for spec in specs]
        self._of_states = [isinstance(spec, MambaSpec) for spec in specs]

    def last_event(self) -> str:
        """Return the last event of the log, as JSON; empty if there is none."""
        self.checked_log.take()
        return self.checked_log.last_line

    # --- what the engine and the store tell --------------------------------------------------------------------------

    def watched(self, pool: BlockPool) -> Any:
        """Return the pool for the connector, and begin to count how often each block is given away."""
        give = pool.get_new_blocks
        epochs = self._epochs

        def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
            blocks = give(num_blocks)
            for block in blocks:
                epochs[block.block_id] += 1
            return blocks

        pool.get_new_blocks = get_new_blocks  # type: ignore[method-assign]
        self.watched_pool = WatchedPool(pool)
        return self.watched_pool

    def looked_up(self, hit_tokens: int) -> None:
        """A lookup was answered."""
        if hit_tokens:
            self.count("lookups with a hit")
            if self.lookup_hook is not None:
                self.lookup_hook()

    def wrong(self, detail: str) -> None:
        """A step attended to wrong KV."""
        self.fail("wrong_kv", detail)

    def reads(self, rank: int, item: ReqMeta, block: int) -> None:
        """A put reads a block: it must be held for the job, from its registration to this rank's report."""
        job = self.jobs.get(-1 if item.store_job_id is None else item.store_job_id)
        if job is None:
            self.fail("ownership", f"rank {rank} reads block {block} for job {item.store_job_id}, which is not open")
            return
        if block not in job.epochs:
            self.fail(
                "ownership", f"rank {rank} reads block {block} for job {item.store_job_id}, which does not name it"
            )
        else:
            self._held(rank, "reads", block, job.epochs[block], f"job {item.store_job_id} of {job.request}")

    def writes(self, rank: int, item: Any, block: int) -> None:
        """A get writes a block: it must be held for the load, from its plan to this rank's answer."""
        load = self.loads.get(item.req_id)
        if load is None or load.load != load_number(item):
            self.fail("ownership", f"rank {rank} writes block {block} for a load of {item.req_id} that is not open")
        elif block not in load.epochs:
            self.fail("ownership", f"rank {rank} writes block {block}, which the load of {item.req_id} does not name")
        else:
            self._held(rank, "writes", block, load.epochs[block], f"the load of {item.req_id}")

    def _held(self, rank: int, does: str, block: int, epoch: int, what: str) -> None:
        if self._epochs[block] != epoch:
            owner = self._owner(block)
            self.fail(
                "ownership", f"rank {rank} {does} block {block} for {what}, but it was given to {owner} meanwhile"
            )
        elif self.pool.blocks[block].ref_cnt == 0:
            self.fail("ownership", f"rank {rank} {does} block {block} for {what}, but it is free for anybody")

    def _owner(self, block: int) -> str:
        for manager in self._managers:
            for request, blocks in manager.req_to_blocks.items():
                if any(held.block_id == block for held in blocks):
                    return request
        return "somebody who has freed it again"

    def stored(self, rank: int, item: ReqMeta, key: str, block: int, content: Any) -> None:
        """A key becomes visible: it must hold the KV of its prefix."""
        prefix, _, digest = key.rpartition("@")
        salt = self._shape.layout.encode() if prefix.endswith("group:1") else b""
        self.count("keys stored")
        if bytes.fromhex(digest) + salt not in content:
            self.fail(
                "poison",
                f"key {digest[:12]} of {item.req_id} (job {item.store_job_id}, rank {rank}, block {block}) holds "
                f"{shown(content)}; the block belongs to {self._owner(block)}",
            )

    # --- the account -------------------------------------------------------------------------------------------------

    def scheduled(self, metadata: MooncakeStoreConnectorMetadata) -> None:
        """Take the jobs and loads that a step gives to the workers into the account."""
        ranks = list(range(self._shape.ranks))
        for req_meta in metadata.requests:
            if req_meta.can_save:
                self._registered(req_meta, ranks)
            if req_meta.load_spec is not None and req_meta.load_spec.can_load:
                blocks = self._load_targets(req_meta)
                if req_meta.req_id in self.loads:
                    self.fail("rule", f"request {req_meta.req_id} begins a load while one is open")
                load = self.log.state.book.loading.get(req_meta.req_id, -1)
                epochs = {block: self._epochs[block] for block in blocks}
                self.loads[req_meta.req_id] = OpenLoad(load, req_meta.req_id, ranks.copy(), epochs)
                self.count("loads")
        self._check_bounds()

    def _registered(self, req_meta: ReqMeta, ranks: list[int]) -> None:
        number = req_meta.store_job_id
        if number is not None and number in self._tails:
            del self._tails[number]  # it was registered when its request ended, and goes to the workers now
            return
        if number is None or number < self.next_job:
            self.fail(
                "rule", f"a save of {req_meta.req_id} goes to the workers under the id {number}, which is not new"
            )
            return
        self.next_job = number + 1
        blocks = [put.block_id for put in req_meta.boundary_puts or ()]
        if req_meta.token_len_chunk:
            for group, ids in enumerate(req_meta.block_ids):
                if not self._of_states[group]:
                    blocks.extend(block for block in ids if block)
        blocks = list(dict.fromkeys(blocks))
        epochs = {block: self._epochs[block] for block in blocks}
        self.jobs[number] = OpenJob(req_meta.req_id, ranks.copy(), blocks, epochs)
        self.count("jobs")

    def tail_registered(self, req_meta: ReqMeta) -> None:
        """Take the save of a tail into the account that the connector planned when its request ended."""
        if req_meta.store_job_id is not None:
            self._registered(req_meta, list(range(self._shape.ranks)))
            self._tails[req_meta.store_job_id] = None
            self.count("tails saved at the end of a request")

    def _load_targets(self, req_meta: ReqMeta) -> list[int]:
        spec = req_meta.load_spec
        blocks: list[int] = []
        if spec is not None:
            for size, ids in zip(self._block_sizes, req_meta.block_ids, strict=True):
                blocks.extend(
                    block
                    for block in ids[spec.vllm_cached_tokens // size : -(-spec.kvpool_cached_tokens // size)]
                    if block
                )
        return blocks

    def _check_bounds(self) -> None:
        shape = self._shape
        counted = [job for job in self.jobs.values() if not job.quarantined]
        if shape.max_inflight_store_jobs and len(counted) > shape.max_inflight_store_jobs:
            self.fail("bound", f"{len(counted)} store jobs are open, {shape.max_inflight_store_jobs} are allowed")
        pinned = sum(1 for held in self.watched_pool.held if held)
        allowed = shape.max_pinned_fraction * (shape.blocks - 1)
        if pinned > allowed:
            self.fail("bound", f"{pinned} blocks are pinned, {allowed:.1f} are allowed")

    def lost_down(self, metadata: MooncakeStoreConnectorMetadata) -> None:
        """A rank does not get a step's metadata: what is in it will never be answered by that rank."""
        for req_meta in metadata.requests:
            job = self.jobs.get(-1 if req_meta.store_job_id is None else req_meta.store_job_id)
            if job is not None and req_meta.can_save:
                job.lost = True
            if req_meta.load_spec is not None and req_meta.load_spec.can_load and req_meta.req_id in self.loads:
                self.loads[req_meta.req_id].lost = True
        self.count("messages lost")

    def lost_up(self, answer: KVConnectorOutput) -> None:
        """A rank's answer does not reach the scheduler: what is in it was said in vain."""
        for report in _reports(answer).jobs:
            if report.job in self.jobs:
                self.jobs[report.job].lost = True
        for answered in _reports(answer).loads:
            for load in self.loads.values():
                load.lost = load.lost or load.load == answered.load
        for request in sorted(answer.finished_recving or ()):
            if request not in self.loads:
                self._lost_elsewhere[request] = None  # it was a load of another connector
        self.count("messages lost")

    def delivered(self, answers: Sequence[KVConnectorOutput | None]) -> None:
        """Take the reports of a step into the account, in the order in which they will be booked."""
        self.violation_due = ""
        for answer in answers:
            if answer is not None:
                for report in _reports(answer).jobs:
                    self._job_reported(report.job, report.rank)
                    self.count(f"rank outcomes: {report.outcome}")
        for answer in answers:
            if answer is not None:
                for load in _reports(answer).loads:
                    self._load_answered(load.load, load.rank)
                    self.count(f"load outcomes: {load.outcome} {load.failure.code}".rstrip())

    def _job_reported(self, number: int, rank: int) -> None:
        job = self.jobs.get(number)
        if job is None:
            self._violation(f"rank {rank} reports job {number}, which is not open")
        elif rank not in job.waiting:
            job.quarantined = True
            self._violation(f"rank {rank} reports job {number} twice")
        else:
            job.waiting.remove(rank)
            if not job.waiting and not job.quarantined:
                del self.jobs[number]

    def _violation(self, detail: str) -> None:
        self.violation_due = self.violation_due or detail
        self.count("broken reports")

    def _load_answered(self, number: int, rank: int) -> None:
        load = next((load for load in self.loads.values() if load.load == number), None)
        if load is None or rank not in load.waiting:
            self.count("loads answered twice")
            return
        load.waiting.remove(rank)
        if not load.waiting:
            self._settled_loads[load.request] = load.load
            del self.loads[load.request]

    def settled_load(self) -> tuple[str, int] | None:
        """Return a load that has settled, if there is one: its request and id."""
        return next(reversed(self._settled_loads.items()), None) if self._settled_loads else None

    # --- after a step ------------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Check all that must hold between two steps."""
        self._check_pool()
        self._check_book()
        self.check_events()

    def _check_pool(self) -> None:
        """References in the pool are those of block tables, of steps in flight, and of pins; and nothing else."""
        watched = self.watched_pool
        expected = [0] * self._shape.blocks
        for job in self.jobs.values():
            for block in job.blocks:
                expected[block] += 1
        if watched.held != expected:
            block = next(number for number, held in enumerate(watched.held) if held != expected[number])
            jobs = [number for number, job in self.jobs.items() if block in job.blocks]
            self.fail(
                "pins",
                f"the connector holds {watched.held[block]} references on block {block}; open jobs that read it: "
                f"{jobs}",
            )
        requests = self.scheduler.requests
        for manager in self._managers:
            for request, blocks in manager.req_to_blocks.items():
                if request not in requests:
                    self.fail("pins", f"blocks are kept in the table of {request}, which vLLM does not know any more")
                for block in blocks:
                    expected[block.block_id] += 1
        for _, blocks in self.scheduler.deferred_frees:
            for block in blocks:
                expected[block.block_id] += 1
        references = [block.ref_cnt for block in self.pool.blocks]
        expected[0] = references[0]  # vLLM does not keep count of its placeholder
        if references != expected:
            block = next(number for number, count in enumerate(references) if count != expected[number])
            self.fail("pins", f"block {block} has {references[block]} references, and {expected[block]} owners")
        free = references.count(0) - (references[0] == 0)
        if self.pool.get_num_free_blocks() != free:
            self.fail("pins", f"{self.pool.get_num_free_blocks()} blocks are free, {free} have no reference")

    def _check_book(self) -> None:
        """The book's open jobs, loads and requests are those of the account."""
        book = self.log.state.book
        if book.jobs.keys() != self.jobs.keys():
            self.fail("book", f"jobs {sorted(book.jobs)} are open in the book, {sorted(self.jobs)} in fact")
            return
        for number, job in self.jobs.items():
            booked = book.jobs[number]
            if list(booked.waiting) != job.waiting or booked.quarantined != job.quarantined:
                self.fail("book", f"job {number} waits for {booked.waiting} in the book, for {job.waiting} in fact")
        if book.loading.keys() != self.loads.keys():
            self.fail("book", f"{sorted(book.loading)} load in the book, {sorted(self.loads)} in fact")
            return
        for request, load in self.loads.items():
            booked_load = book.loads[book.loading[request]]
            if list(booked_load.waiting) != load.waiting:
                self.fail(
                    "book", f"{request}'s load waits for {booked_load.waiting} in the book, {load.waiting} in fact"
                )
        live = {name for name, request in self.scheduler.requests.items() if not request.is_finished()}
        if book.requests.keys() != live:
            self.fail("book", f"the book knows requests {sorted(book.requests)}, vLLM {sorted(live)}")
            return
        for name, record in book.requests.items():
            request = self.scheduler.requests[name]
            if record.generation != request.num_preemptions + 1:
                self.fail(
                    "book",
                    f"{name} is in generation {record.generation} in the book, {request.num_preemptions + 1} in fact",
                )
            if record.state not in _states_of(request.status, name in self.loads):
                self.fail("book", f"{name} is {record.state} in the book, and {request.status.name} for vLLM")

    def check_events(self) -> None:
        """What the connector did to the pool is what the new events say; the shadow agrees with the live state."""
        self.checked_log.take()
        watched, log = self.watched_pool, self.checked_log
        if watched.touched != log.touched or watched.freed != log.freed:
            self.fail(
                "rule",
                f"the pool saw references taken on {watched.touched} and given back on {watched.freed}; the log says "
                f"{log.touched} and {log.freed}",
            )
        watched.touched, watched.freed, log.touched, log.freed = [], [], [], []
        for detail in log.complaints:
            self.fail("rule", detail)
        log.complaints.clear()
        if log.shadow.encode() != self.log.state.encode():
            self.fail(
                "fold",
                f"the log folds to {log.shadow.digest()[:12]}, the live state is {self.log.state.digest()[:12]}",
            )

    # --- at the end --------------------------------------------------------------------------------------------------

    def leftovers(self) -> tuple[set[int], set[str]]:
        """Return the jobs and the loading requests that can never settle, after what was lost or broken for good."""
        jobs = {number for number, job in self.jobs.items() if job.quarantined or job.lost}
        return jobs, {request for request, load in self.loads.items() if load.lost}

    def is_settled(self) -> bool:
        """Return whether nothing is open but what can never settle."""
        jobs, loads = self.leftovers()
        waiting = self.scheduler.requests.keys() - self._lost_elsewhere.keys()
        return self.jobs.keys() == jobs and self.loads.keys() == loads and waiting == loads

    def at_the_end(self) -> None:
        """Check that everything settled, once faults have stopped and time was given."""
        jobs, loads = self.leftovers()
        book = self.log.state.book
        if self.jobs.keys() != jobs or book.jobs.keys() != jobs:
            left = {number: self.jobs[number].waiting for number in self.jobs if number not in jobs}
            booked = {number: list(job.waiting) for number, job in book.jobs.items() if number not in jobs}
            self.fail("unsettled", f"jobs are open, and wait for ranks, in fact: {left}, in the book: {booked}")
        if self.loads.keys() != loads or book.loading.keys() != loads:
            left_loads, booked_loads = sorted(self.loads.keys() - loads), sorted(book.loading.keys() - loads)
            self.fail("unsettled", f"loads are open, in fact: {left_loads}, in the book: {booked_loads}")
        lost = loads | (self._lost_elsewhere.keys() & self.scheduler.requests.keys())
        waiting = self.scheduler.requests.keys() - lost
        if waiting:
            states = {name: self.scheduler.requests[name].status.name for name in sorted(waiting)}
            self.fail("unsettled", f"requests do not end: {states}")
        held = {block for number in jobs for block in self.jobs[number].blocks}
        for request in lost:
            for manager in self._managers:
                held.update(block.block_id for block in manager.req_to_blocks.get(request, ()))
        held.discard(0)
        free, total = self.pool.get_num_free_blocks(), self._shape.blocks - 1
        if free != total - len(held):
            self.fail(
                "unsettled", f"{free} of {total} blocks are free, and {len(held)} are held for what can never settle"
            )
        if not jobs and not lost and self.scheduler.has_requests():
            self.fail("unsettled", "nothing is open, and the engine would step on for ever")


def load_number(item: Any) -> int:
    """Return the load that an item of a receive thread is of: upstream's metadata, or the plugin's load under way."""
    load = item if isinstance(item, RankLoad) else getattr(item, "kvledger_load", None)
    return -1 if load is None else int(load.number)


def _reports(answer: KVConnectorOutput) -> LedgerWorkerMetadata:
    metadata = answer.kv_connector_worker_meta
    return metadata if isinstance(metadata, LedgerWorkerMetadata) else LedgerWorkerMetadata()


def _states_of(status: RequestStatus, loading: bool) -> tuple[str, ...]:
    if status == RequestStatus.RUNNING:
        return ("running",)
    if status == RequestStatus.PREEMPTED:
        return ("preempted", "queued")  # it may have loaded since, and waits for its turn
    return ("loading",) if loading else ("queued", "preempted")  # the latter loads with another connector
