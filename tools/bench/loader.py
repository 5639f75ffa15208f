"""What loads and saves through the plugin cost, against upstream's own path, on a real store over TCP.

    python tools/bench/loader.py [--rounds 60] [--blocks 32] [--layers 32] [--segment-kib 32]

Upstream's receive thread and ours load the same keys from the same store into the same memory, one after the other,
round by round, so that both meet the same machine. What is timed is the handling of one load, from the request as vLLM
queues it to the report; and of one save, from its registration to its report. The values are in a process of their own.
Ours records its evidence, as it does by default. With integrity on, the keys are those with a trailer.

Printed for each variant: the median time and CPU time of a load or save, and the median of its ratio to upstream in the
same round. On a CPU the fingerprints are computed by the same cores that move the bytes; on an accelerator they are
not.
"""

import argparse
import contextlib
import json
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from mooncake.store import ReplicateConfig  # pyright: ignore[reportAttributeAccessIssue] - compiled
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    ChunkedTokenDatabase,
    KeyMetadata,
    LoadSpec,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreRecvingThread,
    KVCacheStoreSendingThread,
)

from connector.runtime.failure_log import FailureLog
from connector.runtime.rebase import rebase_class
from connector.store.integrity import Fingerprints, Guard, layout_digest
from connector.store.load_thread import LedgerRecvingThread, RankLoad, RecvSetup, TimedRetries, limits_of
from connector.store.recording_store import BlockLocator, RecordingStore
from connector.store.worker import LedgerSendingThread, StoreOutbox
from ledger.settings import parse
from tests.engine.load_error_scenarios import storage_node, store_client
from tests.engine.machine import mooncake_master

BLOCK_TOKENS = 16


class NoEvidence:
    """Takes evidence and keeps none: what it costs to make it is measured, not what it costs to keep it."""

    origin = "rank 0"
    step = 0

    def emit(self, event: object) -> None:
        """Take an event."""


class Side:
    """One of the variants: a receive thread and a send thread that are called by hand."""

    def __init__(
        self, name: str, store: Any, caches: list[torch.Tensor], num_blocks: int, integrity: str | None
    ) -> None:
        self.name = name
        self._queue: queue.Queue[Any] = queue.Queue()
        database = ChunkedTokenDatabase(
            KeyMetadata("bench", tp_rank=0, pcp_rank=0, dcp_rank=0, pp_rank=0), BLOCK_TOKENS
        )
        database.store_layout.register_kv_caches(caches, num_blocks)
        coordinator: Any = SimpleNamespace(
            load_mask=lambda hashes, tokens: [[True] * (tokens // BLOCK_TOKENS)],  # pyright: ignore[reportUnknownLambdaType]
            store_mask=lambda tokens, start, num_prompt_tokens: [None],  # pyright: ignore[reportUnknownLambdaType]
            lcm_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        self._guard: Guard | None = None
        if integrity is not None:
            store = RecordingStore(store, 0, NoEvidence())  # type: ignore[arg-type]
            store.locate_with(BlockLocator([database], [0]))
            if integrity != "off":
                every_keys = 16 if integrity == "sampled" else 1
                self._guard = Guard(Fingerprints(caches), [layout_digest({"bench": 1})], lambda _: 0, every_keys)
                store.guard_with(self._guard)
        self.store = store
        arguments = (store, coordinator, [database], BLOCK_TOKENS, 0)
        self.receiver = KVCacheStoreRecvingThread(*arguments, threading.Event(), request_queue=self._queue)
        self.sender = KVCacheStoreSendingThread(
            *arguments, [1], "kv_both", threading.Event(), replicate_config=ReplicateConfig()
        )
        if integrity is not None:
            self._promote()

    def _promote(self) -> None:
        settings, reports, failures = parse({}), StoreOutbox(0), FailureLog("bench", print)
        retries = TimedRetries(self._queue)
        rebase_class(self.receiver, LedgerRecvingThread).open(
            RecvSetup(
                0, (0,), limits_of(settings, self.receiver), str, reports.add_load, failures, retries, self._guard
            )
        )
        sender = rebase_class(self.sender, LedgerSendingThread)
        sender.open(reports, failures, name=str)
        if self._guard is not None:
            sender.guard_with(self._guard)

    def load(self, hashes: list[bytes], blocks: list[int]) -> None:
        """Load all blocks, as the receive thread does."""
        tokens = len(blocks) * BLOCK_TOKENS
        req_meta = ReqMeta("r", 0, (blocks,), hashes, load_spec=LoadSpec(0, tokens, True, token_len=tokens))  # type: ignore[arg-type]
        req_meta.kvledger_load = RankLoad("r", 0)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        self._queue.put(req_meta)
        self.receiver._handle_request(self._queue.get())
        if self.receiver.get_and_clear_block_ids_with_load_errors():
            raise SystemExit("a load of the benchmark failed; its figures would mean nothing")

    def save(self, job: int, hashes: list[bytes], blocks: list[int]) -> None:
        """Register a save and carry it out, as engine and send thread do."""
        req_meta = ReqMeta(f"r{job}", len(blocks) * BLOCK_TOKENS, (blocks,), hashes, can_save=True, store_job_id=job)  # type: ignore[arg-type]
        self.sender.add_request(req_meta)
        self.sender._handle_request(self.sender.request_queue.get())
        self.sender.delete_finished_stored_request(f"r{job}")


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Do `work`, and return how long it took in milliseconds: by the wall, and of this process's CPU time."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - wall_s) * 1e3, (time.process_time() - cpu_s) * 1e3


@contextlib.contextmanager
def real_store() -> Generator[Any]:
    """Run a master and a process with the store's memory, and give a client."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with mooncake_master(folder, "--default_kv_lease_ttl=60000"), storage_node(folder, 1 << 30):
            yield store_client(0)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds and return the figures."""
    segment_bytes = arguments.segment_kib * 1024
    num_blocks = arguments.blocks * 2 + 1
    caches = [torch.randn(num_blocks, segment_bytes // 2).to(torch.bfloat16) for _ in range(arguments.layers)]
    # Block 0 is vLLM's null block.
    first_half, second_half = list(range(1, arguments.blocks + 1)), list(range(arguments.blocks + 1, num_blocks))
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with real_store() as store:
        for cache in caches:
            store.register_buffer(cache.data_ptr(), cache.nbytes)
        sides = [
            Side("upstream", store, caches, num_blocks, None),
            Side("ours, integrity off", store, caches, num_blocks, "off"),
            Side("ours, integrity sampled", store, caches, num_blocks, "sampled"),
            Side("ours, integrity all", store, caches, num_blocks, "all"),
        ]
        job = 0
        for number in range(arguments.rounds + 2):  # two rounds to warm up
            turn = sides[number % len(sides) :] + sides[: number % len(sides)]
            hashes = [f"{number:08d}{block:08d}".encode() for block in first_half]
            for side in turn:
                # Upstream and ours without integrity share their keys, so each finds them absent.
                store.remove_all(True)
                job += 1
                saved = timed(lambda side=side, job=job, hashes=hashes: side.save(job, hashes, first_half))
                loaded = timed(lambda side=side, hashes=hashes: side.load(hashes, second_half))
                if number >= 2:
                    samples.setdefault(("save", side.name), []).append(saved)
                    samples.setdefault(("load", side.name), []).append(loaded)
            if not all(torch.equal(cache[first_half], cache[second_half]) for cache in caches):
                raise SystemExit("what was loaded is not what was saved")
    return {
        "load_mib": arguments.blocks * arguments.layers * segment_bytes / 2**20,
        "blocks": arguments.blocks,
        "rounds": arguments.rounds,
        "results": [
            {
                "what": what,
                "variant": name,
                "wall_ms": round(statistics.median(wall for wall, _ in times), 3),
                "cpu_ms": round(statistics.median(cpu for _, cpu in times), 3),
                "wall_ratio": round(_ratio(times, samples[what, "upstream"], 0), 3),
                "cpu_ratio": round(_ratio(times, samples[what, "upstream"], 1), 3),
            }
            for (what, name), times in sorted(samples.items())
        ],
    }


def _ratio(times: list[tuple[float, float]], upstream: list[tuple[float, float]], index: int) -> float:
    """Return the median, over the rounds, of a variant's time against upstream's in the same round."""
    return statistics.median(
        mine[index] / max(theirs[index], 1e-6) for mine, theirs in zip(times, upstream, strict=True)
    )


def main() -> None:
    """Measure in a process of its own, whose end Mooncake's threads cannot delay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=32, help="in a load")
    parser.add_argument("--layers", type=int, default=32, help="segments of a block")
    parser.add_argument("--segment-kib", type=int, default=32, help="bytes of a block in a layer")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.here:
        sys.exit(subprocess.call([sys.executable, __file__, "--here", *sys.argv[1:]]))
    torch.set_num_threads(1)
    figures = measure(arguments)
    print(json.dumps({key: value for key, value in figures.items() if key != "results"}))
    for row in figures["results"]:
        print(json.dumps(row))
    sys.stdout.flush()
    import os

    os._exit(0)


if __name__ == "__main__":
    main()
