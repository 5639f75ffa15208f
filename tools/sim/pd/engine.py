"""An engine of a P/D run: vLLM's scheduler with the plugin's half, and the workers with theirs, in virtual time.

A step goes as in vLLM's engine core and model runner, with the same calls in the same order. What upstream's worker
builds in its constructor and its registration, and cannot without a device, is set by hand here: `_bare_worker`.
"""

import asyncio
import concurrent.futures
import pickle
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from huggingface_hub.utils import httpx
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from connector.pd import connector as pd_connector
from connector.pd import outbox as pd_outbox
from connector.pd import peers as pd_peers
from connector.pd import pull_worker as pd_pulling
from connector.pd import push_worker as pd_pushing
from connector.pd import worker as pd_worker
from connector.pd.outbox import Evidence
from connector.pd.worker import LedgerMooncakeWorker
from connector.runtime.failure_log import FailureLog
from connector.runtime.rebase import rebase_class
from connector.runtime.runtime import LedgerRuntime
from ledger import settings as ledger_settings
from ledger.live.log import Log
from ledger.settings import Settings
from ledger.state.apply import State
from tools.sim.clock import Clock
from tools.sim.engines import (
    MAX_MODEL_LEN,
    VOCABULARY,
    Batch,
    OrderedScheduler,
    SortedIds,
    combined,
    hash_of_block,
    model_config,
    scheduled,
)
from tools.sim.pd import plan as pl
from tools.sim.pd.loop import VirtualLoop
from tools.sim.pd.memory import WINDOW
from tools.sim.pd.wire import Network, Process, TransferEngine, VirtualContext
from tools.sim.plans import mix

ABORT_TIMEOUT_S = 4
"""How long a prefill waits for its decode, and the other way round. Upstream's minute on top of it is fixed."""

CONNECTOR_TIMEOUT_S = 1
NAME = "KVLedgerMooncakeConnector"


@contextmanager
def virtual_time(clock: Clock, network: Network) -> Generator[None]:
    """Let upstream's and the plugin's P/D modules see virtual time, and the virtual network, inside the block."""
    time = SimpleNamespace(
        perf_counter=lambda: clock.now_ns / 1e9,
        monotonic=lambda: clock.now_ns / 1e9,
        monotonic_ns=clock.mono_ns,
        time=lambda: clock.wall_ns() / 1e9,
        time_ns=clock.wall_ns,
    )
    with ExitStack() as stack:
        for module in (upstream, pd_peers, pd_pulling, pd_pushing, pd_outbox):
            stack.enter_context(mock.patch.object(module, "time", time))
        stack.enter_context(mock.patch.object(httpx, "AsyncClient", network.http_client()))
        stack.enter_context(mock.patch.object(upstream, "get_mooncake_bootstrap_addr", _bootstrap_of))
        stack.enter_context(mock.patch.object(pd_worker, "open_failure_log"))
        stack.enter_context(
            mock.patch.dict(
                "os.environ",
                VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=str(ABORT_TIMEOUT_S),
                VLLM_MOONCAKE_CONNECTOR_TIMEOUT=str(CONNECTOR_TIMEOUT_S),
            )
        )
        yield


def _bootstrap_of(config: VllmConfig) -> tuple[str, int]:
    return str(config.kv_transfer_config.engine_id), 80


class Engine:
    """One engine.

    Attributes:
        name: `P0`, `P1`, or `D`.
        index: its place among the engines of a run.
        dead: its processes were killed.
        loops: of its workers.
    """

    def __init__(self, index: int, name: str, plan: pl.Plan, network: Network) -> None:
        self.index = index
        self.name = name
        self.dead = False
        self.shape = plan.shape
        self.side = plan.shape.decode if name == "D" else plan.shape.prefills[index]
        self.role = "kv_consumer" if name == "D" else "kv_producer"
        self.network = network
        self.clock = network.clock
        config, cache = self._config(), self._cache()
        settings = ledger_settings.parse({"on_invariant_violation": plan.shape.on_invariant_violation})
        self.ledger = self._ledger(plan.seed, settings)
        self._hasher = kv_cache_utils.get_request_block_hasher(pl.BLOCK_SIZE, hash_of_block)
        with mock.patch.object(pd_connector, "open_ledger", return_value=self.ledger):
            self.scheduler = OrderedScheduler(
                vllm_config=config,
                kv_cache_config=cache,
                log_stats=False,
                block_size=pl.BLOCK_SIZE,
                hash_block_size=pl.BLOCK_SIZE,
                structured_output_manager=StructuredOutputManager(config),
            )
        connector: Any = self.scheduler.connector
        self.half = connector.connector_scheduler
        self.connector = connector
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.loops: list[VirtualLoop] = []
        self.workers = [self._worker(rank, config, cache, settings) for rank in range(self.side.ranks)]
        self._aggregator = KVOutputAggregator(self.side.ranks)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, name: str, tokens: list[int], max_tokens: int, transfer: dict[str, Any]) -> Request:
        """Give the scheduler a request with what a router says of its transfer."""
        request = Request(
            name,
            tokens,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": transfer}),
            None,
            arrival_time=self.clock.now_ns / 1e9,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    # --- steps ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Schedule a step, if vLLM's engine core would."""
        if not self.scheduler.has_requests():
            return None
        return scheduled(self.scheduler)

    def run(self, batch: Batch) -> None:
        """Compute a step, and let every worker take up its transfers."""
        self.network.machines.compute(self.index, batch.runs)
        message = pickle.dumps(batch.output.kv_connector_metadata)
        for worker in self.workers:
            worker.start_load_kv(pickle.loads(message))  # noqa: S301 - our own, and as vLLM sends it to its workers

    def answer(self, batch: Batch) -> ModelRunnerOutput:
        """Return the workers' answers as vLLM's aggregator combines them."""
        answers = [self._answer_of(worker) for worker in self.workers]
        output = combined(batch, answers, self._sample, self._aggregator.aggregate)
        about = output.kv_connector_output
        if about is not None:
            about.failed_recving = SortedIds(about.failed_recving)
            for what in ("finished_recving", "finished_sending"):
                found = getattr(about, what)
                setattr(about, what, SortedIds(found) if found else None)
        return output

    def _answer_of(self, worker: LedgerMooncakeWorker) -> KVConnectorOutput:
        with mock.patch.object(asyncio, "run_coroutine_threadsafe", _run_now):
            results = worker.get_transfer_results()
        return KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )

    def _sample(self, request: Request, position: int) -> int:
        first = request._all_token_ids[0]
        return mix(first, position) % VOCABULARY

    def kill(self) -> None:
        """Kill all processes of the engine."""
        self.dead = True
        for loop in self.loops:
            loop.dead = True
        self.network.kill(self.name)

    # --- building ---------------------------------------------------------------------------------------------------

    def _config(self) -> VllmConfig:
        shape = self.shape
        config = VllmConfig(
            model_config=model_config(),
            scheduler_config=SchedulerConfig(
                max_num_seqs=shape.max_seqs,
                max_num_batched_tokens=shape.max_batched_tokens,
                max_model_len=MAX_MODEL_LEN,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            cache_config=CacheConfig(block_size=pl.BLOCK_SIZE, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector=NAME,
                kv_connector_module_path="connector.pd.connector",
                kv_role=self.role,  # type: ignore[arg-type]
                engine_id=self.name,
                kv_load_failure_policy=shape.policy,  # type: ignore[arg-type]
                kv_connector_extra_config={"on_invariant_violation": shape.on_invariant_violation},
            ),
        )
        config.cache_config.num_gpu_blocks = self.side.blocks
        parallel = config.parallel_config
        parallel.world_size = self.side.ranks
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = self.side.tp, self.side.pp
        return config

    def _cache(self) -> KVCacheConfig:
        head: dict[str, Any] = {"num_kv_heads": pl.HEADS // self.side.tp, "head_size": 1, "dtype": torch.float32}
        specs: list[Any] = [FullAttentionSpec(block_size=pl.BLOCK_SIZE, **head)]
        if self.shape.window:
            specs.append(SlidingWindowSpec(block_size=pl.BLOCK_SIZE, sliding_window=WINDOW, **head))
        groups = [
            KVCacheGroupSpec([_layer(layer) for layer in range(pl.LAYERS) if layer % len(specs) == group], spec)
            for group, spec in enumerate(specs)
        ]
        return KVCacheConfig(num_blocks=self.side.blocks, kv_cache_tensors=[], kv_cache_groups=groups)

    def _ledger(self, seed: int, settings: Settings) -> LedgerRuntime:
        log = Log(
            State(),
            queue_limit_events=1 << 30,
            checkpoint_interval_events=64,
            wall_ns=self.clock.wall_ns,
            mono_ns=self.clock.mono_ns,
        )
        opened: dict[str, Any] = {
            "engine": self.name,
            "boot": f"seed-{seed}",
            "connector": NAME,
            "role": self.role,
            "ranks": ((0, self.side.ranks - 1),),
            "tensor_parallel": self.side.tp,
            "pipeline_parallel": self.side.pp,
            "num_blocks": self.side.blocks,
            "block_sizes": (pl.BLOCK_SIZE,) * (2 if self.shape.window else 1),
            "policy": self.shape.policy,
            "settings": settings.changed(),
        }
        return LedgerRuntime(settings, opened, log)

    def _worker(self, rank: int, config: VllmConfig, cache: KVCacheConfig, settings: Settings) -> LedgerMooncakeWorker:
        loop = VirtualLoop(self.clock, self.network.connect)
        self.loops.append(loop)
        process = Process(self.index, self.name, rank, loop)
        bare = self._bare_worker(rank, config, cache, loop)
        bare.engine = TransferEngine(self.network, process)
        worker = rebase_class(bare, LedgerMooncakeWorker)
        context = VirtualContext(self.network, process, worker)
        worker.watch_sockets = lambda: None  # type: ignore[method-assign]
        worker.async_zmq_ctx = context  # type: ignore[assignment]
        of_rank = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=rank), kv_transfer_config=config.kv_transfer_config
        )
        worker.open(of_rank, NAME, msgspec.structs.replace(settings, evidence=False))  # type: ignore[arg-type]
        worker._ended = True  # its shutdown would end real threads, and there are none
        worker.failures = FailureLog("", write=lambda _: None)
        worker.evidence = Evidence(rank, _LogSender(self.ledger.log, rank))  # type: ignore[arg-type]
        self.network.targets[f"{self.name}:{bare.rpc_port}"] = self.index
        if self.role == "kv_producer":
            loop.create_task(worker._mooncake_sender_listener(threading.Event()))
        return worker

    def _bare_worker(
        self, rank: int, config: VllmConfig, cache: KVCacheConfig, loop: VirtualLoop
    ) -> upstream.MooncakeConnectorWorker:
        """Return upstream's worker as its constructor and its registration of the KV caches leave it."""
        memory = self.network.machines.workers[self.index][rank]
        worker: Any = upstream.MooncakeConnectorWorker.__new__(upstream.MooncakeConnectorWorker)
        worker.vllm_config = config
        worker.engine_id = worker.hostname = self.name
        worker.is_kv_producer, worker.is_kv_consumer = self.role == "kv_producer", self.role == "kv_consumer"
        worker.num_sender_workers, worker.num_sender_tasks = 2, 4
        worker.rpc_port = 10_000 + rank
        worker.side_channel_port = 0
        worker.tp_rank, worker.tp_size = rank % self.side.tp, self.side.tp
        worker.pp_rank, worker.pp_size = rank // self.side.tp, self.side.pp
        worker.dp_rank = 0
        worker._remote_agents, worker._pending_bootstrap_queries = {}, {}
        worker.kv_caches_base_addr = memory.addresses
        worker.block_len_per_layer = worker.kv_block_len_per_layer = [memory.block_bytes] * len(memory.layers)
        worker.registered_layer_names = [_layer(layer) for layer in memory.layers]
        worker.registered_layer_indices = list(memory.layers)
        groups = [layer % len(cache.kv_cache_groups) for layer in memory.layers]
        worker.registered_group_indices = groups
        worker.region_shared_groups = [(group,) for group in groups]
        worker.region_row_offsets = [-1] * len(memory.layers)
        worker.opaque_packed_storages, worker._prepared_transfer_regions = set(), {}
        worker.reqs_need_send = {}
        worker.sender_loop = worker.receiver_loop = loop
        worker._sender_executor = None
        worker.sender_worker_queue = asyncio.Queue()
        worker.finished_sending_reqs, worker.finished_recving_reqs = set(), set()
        worker._is_hma_required = len(cache.kv_cache_groups) > 1
        worker.xfer_stats = MooncakeKVConnectorStats()
        worker.block_size = pl.BLOCK_SIZE
        worker.kv_cache_config = cache
        worker.use_mla = False
        worker._physical_blocks_per_logical_kv_block = 1
        worker._tp_size = {self.name: self.side.tp}
        worker._layer_specs = {
            name: group.kv_cache_spec for group in cache.kv_cache_groups for name in group.layer_names
        }
        worker.transfer_topo = TransferTopology(
            tp_rank=worker.tp_rank,
            tp_size=worker.tp_size,
            block_size=pl.BLOCK_SIZE,
            engine_id=self.name,
            is_mla=False,
            is_mamba=False,
            total_num_kv_heads=pl.HEADS,
            attn_backends=[],
        )
        worker._encoder = msgspec.msgpack.Encoder()
        worker._xfer_meta_decoder = msgspec.msgpack.Decoder(upstream.MooncakeXferMetadata)
        worker._xfer_resp_decoder = msgspec.msgpack.Decoder(upstream.MooncakeXferResponse)
        return worker


class _LogSender:
    """Takes a rank's evidence straight into the log."""

    def __init__(self, log: Log, rank: int) -> None:
        self.origin = f"rank {rank}"
        self.step = 0
        self._log = log

    def emit(self, event: Any) -> None:
        self._log.append_evidence(event)

    def close(self) -> None:
        """Nothing to send."""


def _run_now(coroutine: Any, loop: VirtualLoop) -> concurrent.futures.Future[Any]:
    """Stand for `asyncio.run_coroutine_threadsafe` where its result is waited for: the coroutine must not wait."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    try:
        coroutine.send(None)
    except StopIteration as done:
        future.set_result(done.value)
        return future
    raise RuntimeError(f"a result that the step waits for does not come at once (loop {loop!r})")


def _layer(number: int) -> str:
    return f"model.layers.{number}.attn"
