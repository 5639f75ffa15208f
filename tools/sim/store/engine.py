"""vLLM's scheduler with the plugin attached, stepped as vLLM's engine core steps it, in virtual time.

Real: `Scheduler` or `AsyncScheduler`, its KV cache manager and block pool, `KVOutputAggregator`, and the whole of the
plugin's connector but its writer: the log stays in memory. Modelled: the engine core's loop (`step`, or with the next
step scheduled before the last one's output is known, `step_with_batch_queue`), and the model, which writes KV contents
and makes tokens up.
"""

from collections import deque
from typing import Any
from unittest import mock

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import scheduler as upstream_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import MooncakeStoreCoordinator
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    MooncakeStoreConnectorMetadata,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from connector.runtime.runtime import LedgerRuntime
from connector.store.connector import KVLedgerStoreConnector
from ledger.live.log import Log
from ledger.settings import Settings
from ledger.state.apply import State
from tools.sim.clock import STEP_NS, Clock
from tools.sim.engines import (
    MAX_MODEL_LEN,
    VOCABULARY,
    Batch,
    OrderedAsyncScheduler,
    OrderedScheduler,
    SortedIds,
    combined,
    hash_of_block,
    model_config,
    scheduled,
)
from tools.sim.plans import mix, number_of
from tools.sim.store import plan as pl
from tools.sim.store.memory import Group, Memory
from tools.sim.store.objects import Faults, RankStore, Store, TransferWatch
from tools.sim.store.other_connector import OtherWorker
from tools.sim.store.workers import Place, Rank

WINDOW_BLOCKS = 3
STATE_UNITS = 4
STALL_SUSPECT_S = 0.6
"""60 steps of virtual time, so that stalls are suspected within a run."""


class Host(TransferWatch):
    """What the engine needs of its surroundings: who watches the pool and the transfers."""

    clock: Clock

    def watched(self, pool: BlockPool) -> BlockPool:
        """Return what the connector gets as the block pool."""
        raise NotImplementedError

    def looked_up(self, hit_tokens: int) -> None:
        """A lookup was answered."""

    def tail_registered(self, req_meta: ReqMeta) -> None:
        """A job was registered at the end of its request."""

    def wrong(self, detail: str) -> None:
        """A step attended to wrong KV."""


class Direct:
    """Stands in for upstream's lookup client, which asks rank 0 over a socket: here it is a call.

    With a delay it answers like upstream's asynchronous lookups: not yet, until some steps later, and then what was
    true at first.
    """

    def __init__(self, _config: object) -> None:
        self.engine: Engine | None = None
        self._under_way: dict[str, tuple[int, MooncakeLookupResult]] = {}

    def lookup(
        self, req_id: str, num_tokens: int, block_hashes: list[Any], non_block: bool = False
    ) -> MooncakeLookupResult | None:
        """Return what the store holds of a request, or None while a lookup is under way."""
        engine = self.engine
        if engine is None:
            raise RuntimeError("the lookup client was used before the engine was built")
        if not non_block:
            return self._ask(engine, num_tokens, block_hashes)
        known = self._under_way.get(req_id)
        if known is None:
            ready = engine.step_number + engine.shape.lookup_delay_steps
            self._under_way[req_id] = ready, self._ask(engine, num_tokens, block_hashes)
            return None
        if engine.step_number < known[0]:
            return None
        del self._under_way[req_id]
        return known[1]

    def _ask(self, engine: "Engine", num_tokens: int, block_hashes: list[Any]) -> MooncakeLookupResult:
        result = engine.ranks[0].worker.lookup(num_tokens, block_hashes)
        engine.host.looked_up(result.hit_length)
        return result

    def discard(self, req_id: str) -> None:
        """Forget a lookup that is under way."""
        self._under_way.pop(req_id, None)

    def reset(self) -> bool:
        """Let rank 0's saves drain and empty the store, as upstream's lookup server does; the engine waits meanwhile.

        Upstream waits for ever if a put hangs. Here it gives up after 50 steps, and the reset fails.
        """
        engine = self.engine
        if engine is None:
            return False
        thread = engine.ranks[0].worker.kv_send_thread
        for _ in range(50):
            if thread is None or not thread.request_queue.unfinished_tasks:
                engine.ranks[0].worker.store.remove_all(force=True)
                return True
            engine.clock.advance(engine.clock.now_ns + STEP_NS)
        return False

    def close(self) -> None:
        """Nothing to close."""


class SimulatedConnector(KVLedgerStoreConnector):
    """The plugin's connector with its log in memory and on virtual time, and its view of the pool watched."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        self._engine = _under_construction[-1]
        with mock.patch.object(upstream_scheduler, "LookupKeyClient", Direct):
            super().__init__(vllm_config, role, kv_cache_config)
        self._half.client.engine = self._engine  # type: ignore[attr-defined]

    def _open_ledger(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings
    ) -> LedgerRuntime:
        clock = self._engine.clock
        log = Log(
            State(),
            queue_limit_events=1 << 30,
            checkpoint_interval_events=64,
            wall_ns=clock.wall_ns,
            mono_ns=clock.mono_ns,
        )
        shape = self._engine.shape
        opened: dict[str, Any] = {
            "engine": "simulated",
            "boot": f"seed-{self._engine.seed}",
            "connector": "KVLedgerStoreConnector",
            "role": shape.role,
            "ranks": ((0, shape.ranks - 1),),
            "tensor_parallel": shape.ranks,
            "num_blocks": kv_cache_config.num_blocks,
            "block_sizes": tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups),
            "policy": shape.policy,
            "settings": settings.changed(),
        }
        return LedgerRuntime(settings, opened, log)

    def register_finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], partial_tail_offloads: list[tuple[int, int, int]]
    ) -> bool:
        """Pass the hook on, and tell the checks of the job that it registered, if it did."""
        delay = super().register_finished_partial_tail(request, block_ids, partial_tail_offloads)
        planned = self._half._finished_partial_tail_metas.get(request.request_id)
        if planned is not None:
            self._engine.host.tail_registered(planned)
        return delay

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Give the plugin the pool, watched."""
        super().bind_gpu_block_pool(self._engine.host.watched(gpu_block_pool))


_under_construction: list["Engine"] = []
"""vLLM's factory builds the connector by name and passes no engine along."""


class Engine:
    """An engine of one run.

    Attributes:
        step_number: steps and idle ticks so far.
        executed: steps that were scheduled.
        queue: steps that are scheduled and not yet executed, newest first.
        unheard: the last answer of a rank that was lost.
    """

    def __init__(self, plan: pl.Plan, host: Host, store: Store, faults: Faults) -> None:
        shape = plan.shape
        self.seed = plan.seed
        self.shape = shape
        self.host = host
        self.clock = host.clock
        self.faults = faults
        self.step_number = 0
        self.executed = 0
        self.queue: deque[Batch] = deque()
        self.unheard: dict[int, KVConnectorOutput] = {}
        config, cache = _vllm_config(shape), _kv_cache_config(shape)
        # What vLLM's engine core resolves for the scheduler:
        config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in cache.kv_cache_groups)
        self.block_size, self.hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
        cache.hash_block_size = self.hash_block_size
        cache.cache_hit_alignment_tokens = kv_cache_utils.resolve_cache_hit_alignment_tokens(
            cache, config, self.block_size, self.hash_block_size
        )
        self._hasher = kv_cache_utils.get_request_block_hasher(self.hash_block_size, hash_of_block)
        _under_construction.append(self)
        try:
            self.scheduler: Scheduler = (OrderedAsyncScheduler if shape.pipelined else OrderedScheduler)(
                vllm_config=config,
                kv_cache_config=cache,
                log_stats=False,
                block_size=self.block_size,
                hash_block_size=self.hash_block_size,
                structured_output_manager=StructuredOutputManager(config),
            )
        finally:
            _under_construction.pop()
        self.scheduler.use_v2_model_runner = shape.runner == 2
        connector: Any = self.scheduler.connector
        self._place = 1 if shape.beside == "first" else 0
        if shape.beside:
            connector = connector.sub_connectors[self._place]
        if not isinstance(connector, SimulatedConnector) or connector.ledger is None:
            raise TypeError("vLLM built another connector than the simulated one")
        self.connector = connector
        self.ledger = connector.ledger
        self.memory = Memory(
            shape.ranks, shape.blocks, self.hash_block_size, _groups(shape, self.hash_block_size), host.wrong
        )
        coordinator = MooncakeStoreCoordinator.from_kv_cache_config(
            cache, config, self.block_size, self.hash_block_size
        )
        place = Place(
            shape,
            coordinator,
            tuple(cache.prefix_cacheable_group_ids),
            self.clock,
            faults,
            self.ledger.log,
            self.ledger.settings,
        )
        self.ranks = [
            Rank(number, place, RankStore(store, number, self.clock, faults, self.memory, host))
            for number in range(shape.ranks)
        ]
        self._others = [OtherWorker(number, self.memory, self.clock) for number in range(shape.ranks) if shape.beside]
        self._aggregator = KVOutputAggregator(shape.ranks) if shape.ranks > 1 else None

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, tokens: list[int], max_tokens: int) -> Request:
        """Give the scheduler a request, and return it."""
        request = Request(
            request_id,
            tokens,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            arrival_time=self.clock.now_ns / 1e9,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    # --- steps ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Schedule a step if vLLM's engine core would; return the batch to execute now, if there is one."""
        scheduler, queue = self.scheduler, self.queue
        self.step_number += 1
        depth = 2 if self.shape.pipelined else 1
        if scheduler.has_requests():
            batch = self._schedule()
            queue.appendleft(batch)
            if len(queue) < depth and (batch.output.total_num_scheduled_tokens > 0 or scheduler.has_requests()):
                return None
        return queue.pop() if queue else None

    def _schedule(self) -> Batch:
        self.executed += 1
        return scheduled(self.scheduler)

    def execute(self, batch: Batch, lost_down: set[int], lost_up: set[int]) -> list[KVConnectorOutput | None]:
        """Run a step on all ranks, and return what each tells the scheduler; None for what is lost.

        Args:
            batch: the step.
            lost_down: ranks that do not get the scheduler's message.
            lost_up: ranks whose answer is lost.
        """
        clock, metadata = self.clock, self.metadata_of(batch)
        start_ns = clock.now_ns
        clock.advance(start_ns + STEP_NS // 2)
        self.memory.compute(batch.runs, batch.output.kv_cache_block_copies or ())
        for rank in self.ranks:
            if rank.number not in lost_down:
                rank.run(metadata)
        for other in self._others:
            other.run(batch.output.kv_connector_metadata.metadata[1 - self._place])  # type: ignore[union-attr]
        clock.advance(start_ns + STEP_NS)
        answers: list[KVConnectorOutput | None] = []
        for rank in self.ranks:
            heard = metadata if rank.number not in lost_down else _NOTHING_HEARD
            finished = batch.output.finished_req_ids if rank.number not in lost_down else set[str]()
            answer = rank.answer(heard, finished)  # type: ignore[arg-type]
            if self._others:
                others = self._others[rank.number].take_finished()
                answer.finished_recving = (answer.finished_recving or set[str]()) | set(others)
            if rank.number in lost_up:
                self.unheard[rank.number] = answer
                answers.append(None)
            else:
                answers.append(answer)
        return answers

    def metadata_of(self, batch: Batch) -> MooncakeStoreConnectorMetadata:
        """Return what the plugin tells its workers in a step."""
        metadata: Any = batch.output.kv_connector_metadata
        return metadata.metadata[self._place] if self.shape.beside else metadata

    def combine(self, batch: Batch, answers: list[KVConnectorOutput | None]) -> ModelRunnerOutput:
        """Return the ranks' answers as vLLM's aggregator combines them. It writes into the first one."""
        if self._others:
            for answer in answers:
                if answer is not None and answer.kv_connector_worker_meta is not None:
                    both = [None, answer.kv_connector_worker_meta][:: 1 if self._place else -1]
                    answer.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(metadata=tuple(both))
        aggregator = self._aggregator
        aggregate = aggregator.aggregate if aggregator is not None else lambda outputs: outputs[0]
        output = combined(batch, answers, self._sample, aggregate)
        about = output.kv_connector_output
        if about is not None and about.finished_recving:
            about.finished_recving = SortedIds(about.finished_recving)
        return output

    def _sample(self, request: Request, position: int) -> int:
        """Return the token at `position`: the same prompt always goes on in the same way."""
        return mix(number_of(request.block_hashes[0].hex()) if request.block_hashes else 0, position) % VOCABULARY

    def update(self, batch: Batch, output: ModelRunnerOutput) -> None:
        """Give the scheduler a step's output."""
        self.scheduler.update_from_output(batch.output, output)

    def idle(self) -> None:
        """Let a step's time pass without a step."""
        self.clock.advance(self.clock.now_ns + STEP_NS)

    @property
    def in_flight(self) -> list[str]:
        """Return the requests of steps that are scheduled and not yet executed."""
        return [request.request_id for batch in self.queue for request, *_ in batch.runs]


class _Silence:
    """The metadata of a rank that heard nothing this step."""

    requests: tuple[()] = ()
    preempted_req_ids: frozenset[str] = frozenset()
    unfinished_request_ids: frozenset[str] = frozenset()


_NOTHING_HEARD = _Silence()


# --- configuration --------------------------------------------------------------------------------------------------


def _vllm_config(shape: pl.Shape) -> VllmConfig:
    extra: dict[str, Any] = {
        "lookup_async": shape.lookup_delay_steps > 0,
        "enable_lookup": shape.lookups,
        "save_decode_cache": shape.save_decode_cache,
        "on_invariant_violation": shape.on_invariant_violation,
        "max_inflight_store_jobs": shape.max_inflight_store_jobs,
        "max_pinned_fraction": shape.max_pinned_fraction,
        "load_max_retries": shape.load_max_retries,
        "load_deadline_s": shape.load_deadline_s,
        "load_rollback": shape.load_rollback,
        "load_max_cycles": shape.load_max_cycles,
        "stall_suspect_s": STALL_SUSPECT_S,
    }
    config = VllmConfig(
        model_config=model_config(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.max_seqs,
            max_num_batched_tokens=shape.max_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            scheduler_reserve_full_isl=shape.reserve_prompt,
            async_scheduling=shape.pipelined,
        ),
        cache_config=CacheConfig(
            block_size=_block_tokens(shape),
            enable_prefix_caching=True,
            prefix_match_unit=shape.block_size if shape.layout == "states" else None,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**_transfer(shape, extra)),
    )
    config.cache_config.num_gpu_blocks = shape.blocks
    if shape.layout == "states":
        config.cache_config.mamba_cache_mode = "align"
    config.parallel_config.world_size = shape.ranks
    return config


def _transfer(shape: pl.Shape, extra: dict[str, Any]) -> dict[str, Any]:
    common = {"kv_role": shape.role, "kv_load_failure_policy": shape.policy}
    ours = {
        "kv_connector": "SimulatedConnector",
        "kv_connector_module_path": "tools.sim.store.engine",
        "kv_connector_extra_config": extra,
        **common,
    }
    if not shape.beside:
        return ours
    other = {"kv_connector": "OtherConnector", "kv_connector_module_path": "tools.sim.store.other_connector", **common}
    children = [other, ours] if shape.beside == "first" else [ours, other]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}, **common}


def _block_tokens(shape: pl.Shape) -> int:
    """Return the tokens in a block of full attention. Beside states it is long, and hits may end within it."""
    return STATE_UNITS * shape.block_size if shape.layout == "states" else shape.block_size


def _kv_cache_config(shape: pl.Shape) -> KVCacheConfig:
    size = _block_tokens(shape)
    head: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(block_size=size, **head))]
    if shape.layout == "states":
        states = MambaSpec(block_size=size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
        groups.append(KVCacheGroupSpec(["states"], states))
    elif shape.layout != "full":
        short = size if shape.layout == "window" else size // 2
        window = SlidingWindowSpec(block_size=short, sliding_window=WINDOW_BLOCKS * short, **head)
        groups.append(KVCacheGroupSpec(["window"], window))
    return KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def _groups(shape: pl.Shape, hash_block_size: int) -> list[Group]:
    size = _block_tokens(shape)
    groups = [Group(size // hash_block_size)]
    salt = shape.layout.encode()
    if shape.layout == "states":
        groups.append(Group(size // hash_block_size, 0, salt, states=True))
    elif shape.layout != "full":
        short = size if shape.layout == "window" else size // 2
        groups.append(Group(short // hash_block_size, WINDOW_BLOCKS * short, salt))
    return groups
