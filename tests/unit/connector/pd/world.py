"""A decode's worker and a prefill's, real ones of vLLM with the real transfer engine over TCP, and bad peers.

The workers are built in the test's own process, without a model. A `Peer` is a real ZeroMQ socket where a prefill's
worker would listen; it answers what a test tells it to, because a real prefill cannot be made to answer wrongly. A
`Bootstrap` is a real HTTP server for the same reason.
"""

import functools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# Before vLLM is imported: it reads these once.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_HOST_IP"] = "127.0.0.1"

import msgspec
import torch
import zmq
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from connector import plugin
from connector.pd.connector import KVLedgerMooncakeConnector
from connector.pd.metadata import Report, attach_step
from tests.engine.machine import MODEL, free_port

PATIENCE_S = 20.0
"""How long a test waits for what must come: far more than anything here takes."""

BLOCK_SIZE = 32
NUM_BLOCKS = 40
ENGINE = "prefill-engine"

Status = upstream.MooncakeXferResponseStatus


@functools.cache
def model_folder() -> str:
    """Return a folder with a tiny model's configuration, and make this process the only rank of its world."""
    folder = tempfile.mkdtemp(prefix="pd-world-")
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    plugin.register()
    init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        ensure_model_parallel_initialized(1, 1)
    return folder


def kv_cache_config(groups: int = 1) -> KVCacheConfig:
    """Return a cache of one layer, or of two layers in two groups."""
    shape: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    specs: list[Any] = [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=64)][:groups]
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"model.layers.{index}.attn"], spec) for index, spec in enumerate(specs)],
    )


class Worker:
    """The worker's side of our connector, stepped as vLLM's model runner steps it.

    Attributes:
        caches: the KV cache of each layer.
        reports, finished, failed, invalid, sent: what came out so far.
        order: what came out, in the order in which it did: `report`, `finished`, `invalid`, each with its step.
    """

    def __init__(self, role: str, engine_id: str, groups: int = 1, **extra: Any) -> None:
        settings = {"mooncake_protocol": "tcp", "evidence": False, "num_workers": 2, **extra}
        folder = model_folder()
        config = VllmConfig(
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, is_encoder_decoder=False
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVLedgerMooncakeConnector",
                kv_role=role,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
                engine_id=engine_id,
                kv_connector_extra_config=settings,
            ),
        )
        kv_config = kv_cache_config(groups)
        self.connector: Any = KVLedgerMooncakeConnector(config, KVConnectorRole.WORKER, kv_config)
        self.worker: Any = self.connector.connector_worker
        self.caches = {
            name: torch.zeros(NUM_BLOCKS, group.kv_cache_spec.page_size_bytes // 2, dtype=torch.bfloat16)
            for group in kv_config.kv_cache_groups
            for name in group.layer_names
        }
        self.connector.register_kv_caches(self.caches)
        self.reports: list[Report] = []
        self.finished: list[str] = []
        self.failed: list[str] = []
        self.invalid: set[int] = set()
        self.sent: list[str] = []
        self.order: list[tuple[int, str]] = []
        self._step = 0

    def step(self, metadata: Any = None) -> None:
        """Do what vLLM's model runner does with a connector in one step."""
        self._step += 1
        metadata = metadata or upstream.MooncakeConnectorMetadata()
        attach_step(metadata, self._step)
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(None)
        results = self.connector.get_transfer_results(set())
        invalid = self.connector.get_block_ids_with_load_errors()
        told = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        self.finished += sorted(results.finished_recving)
        self.failed += sorted(results.failed_recving)
        self.sent += sorted(results.finished_sending)
        self.invalid |= invalid
        self.order += [(self._step, "finished")] * len(results.finished_recving)
        self.order += [(self._step, "invalid")] * bool(invalid)
        if told is not None:
            self.reports += told.reports
            self.order += [(self._step, "report")] * len(told.reports)

    def until(self, condition: Callable[[], Any], what: str = "it") -> None:
        """Step, as an engine that waits does, until a condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited for {what} in vain; reports so far: {self.reports}")
            self.step()
            time.sleep(0.001)  # vLLM's engine does the same, so that the transfers' threads can run

    def until_report(self, kind: type[Report], count: int = 1) -> list[Any]:
        """Step until there are `count` reports of a kind, and return all of that kind."""
        self.until(lambda: len(self.of(kind)) >= count, f"{count} {kind.__name__}")
        return self.of(kind)

    def of(self, kind: type[Report]) -> list[Any]:
        """Return the reports of a kind."""
        return [report for report in self.reports if isinstance(report, kind)]

    def settled_steps(self, count: int = 5) -> None:
        """Make some steps in which nothing new may come out."""
        for _ in range(count):
            self.step()

    def close(self) -> None:
        """End the worker."""
        self.connector.shutdown()


class Decode(Worker):
    """A decode's worker."""

    def __init__(self, groups: int = 1, **extra: Any) -> None:
        super().__init__("kv_consumer", "decode-engine", groups, **extra)

    def pull(
        self, bootstrap: str, requests: dict[str, list[list[int]]], engine: str = ENGINE, metadata: Any = None
    ) -> Any:
        """Begin the pulls of some requests, each with its blocks by group, in one step."""
        metadata = pulls(bootstrap, requests, engine, metadata)
        self.step(metadata)
        return metadata


def pulls(bootstrap: str, requests: dict[str, list[list[int]]], engine: str = ENGINE, metadata: Any = None) -> Any:
    """Return the metadata with which a scheduler asks for some requests. Transfers are named after requests."""
    metadata = metadata or upstream.MooncakeConnectorMetadata()
    for request, blocks in requests.items():
        params = {
            "transfer_id": f"t-{request}",
            "remote_engine_id": engine,
            "remote_bootstrap_addr": bootstrap,
        }
        metadata.add_new_req(request, blocks, params)
    return metadata


class Prefill(Worker):
    """A prefill's worker, with a bootstrap server of its own."""

    def __init__(self, groups: int = 1, role: str = "kv_producer", **extra: Any) -> None:
        self.port = free_port()
        os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(self.port)
        super().__init__(role, ENGINE, groups, **extra)

    @property
    def bootstrap(self) -> str:
        """The address of its bootstrap server."""
        return f"http://127.0.0.1:{self.port}"

    def send(self, requests: dict[str, list[list[int]]], withdraw: set[str] = frozenset()) -> None:  # type: ignore[assignment]  # pyright: ignore[reportArgumentType]
        """Begin a step in which requests run (no blocks) or are ready (blocks by group), and some are withdrawn."""
        metadata = upstream.MooncakeConnectorMetadata()
        for request, blocks in requests.items():
            transfer = {"transfer_id": f"t-{request.removeprefix('p-')}"}
            metadata.add_new_req(request, blocks, transfer, load_remote_cache=False)
        metadata.reqs_not_processed = set(withdraw)
        self.step(metadata)


class Peer:
    """A ZeroMQ socket where a decode's worker expects a prefill's."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._identity = b""

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"tcp://127.0.0.1:{self._port}"

    def take(self) -> Any:
        """Wait for a decode's question, and return it."""
        if not self._socket.poll(PATIENCE_S * 1000):
            raise TimeoutError("nobody asked")
        self._identity, message = self._socket.recv_multipart()
        return msgspec.msgpack.decode(message, type=upstream.MooncakeXferMetadata)

    def answer(
        self, status: Any, ok: list[str] | None = None, err: list[str] | None = None, line: str | None = None
    ) -> None:
        """Answer the question taken last."""
        response = upstream.MooncakeXferResponse(status=status, ok_reqs=ok, err_reqs=err, err_msg=line)
        self.say(msgspec.msgpack.encode(response))

    def say(self, message: bytes) -> None:
        """Answer the question taken last with any bytes."""
        self._socket.send_multipart((self._identity, message))

    def break_connection(self) -> None:
        """Break every connection, and listen at the same address again: a network that failed, a peer that lives."""
        self._socket.close(0)
        self._context.term()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)

    def vanish(self) -> None:
        """End as a process does that is killed: connections break, and nobody listens any more."""
        self._socket.close(0)
        self._context.term()


class Bootstrap:
    """An HTTP server where a decode looks for a prefill's workers.

    Attributes:
        workers: their addresses, by rank and pipeline stage.
        status, body: what to answer instead, if it is set.
        hang: answers only when this is set.
    """

    def __init__(self, engine: str = ENGINE, **workers: str) -> None:
        self.engine = engine
        self.workers: dict[str, dict[str, str]] = {}
        self.status = 200
        self.body: bytes | None = None
        self.hang = threading.Event()
        self.hang.set()
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked += 1
                outer.hang.wait(PATIENCE_S)
                body = outer.body
                if body is None:
                    entry = {"engine_id": outer.engine, "worker_addr": outer.workers}
                    body = json.dumps({"0": entry}).encode()
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        for place, address in workers.items():
            self.add(place, address)

    def add(self, place: str, address: str) -> None:
        """Register a worker at a place like `tp0_pp1`."""
        rank, stage = place.removeprefix("tp").split("_pp")
        self.workers.setdefault(rank, {})[stage] = address

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Stop listening."""
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()
