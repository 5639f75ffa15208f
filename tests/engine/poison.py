"""A real poisoning on the real engine with real Mooncake: `python -m tests.engine.poison NAME FOLDER`.

What is not real, and only here: the connector takes no block references, and every put waits before it reads. Both are
what an unfixed connector under load does; neither can be had from the real one at will. The truth does not come from
the log: after the run, the bytes under every key are read back from the store.

    clean      a large pool, no delay, references taken: the bytes that each key should hold
    poisoned   a small pool, slow puts, no references
    pinned     the same small pool and slow puts, with references
    guarded    as poisoned, with `integrity` on
"""

import base64
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from connector.store.connector import KVLedgerStoreConnector
from connector.store.scheduler import LedgerStoreScheduler
from ledger import events as ev
from ledger.blocks import Blocks
from ledger.file.read import open_log
from tests.engine.machine import cpu_environment, end_engine, greedy, make_llm, mooncake_master
from tests.engine.scenarios import prompts, settle, tokens_of

PUT_DELAY_STEPS = 250
"""Engine steps that a put waits. In so many, the blocks of a preempted request are another one's, at any speed."""

STANDSTILL_S = 1.0
"""An engine that has not stepped for so long is idle, and a put has nothing to wait for."""

SMALL_POOL = 36
LARGE_POOL = 400
REQUESTS = 8


class SlowStore:
    """Waits before each put, and writes the bytes of every key to a file when it is closed.

    Args:
        store: the real one.
        step: gives the engine's step.
        delay_steps: how many of them a put waits.
        truth: the file.
    """

    def __init__(self, store: Any, step: Callable[[], int], delay_steps: int, truth: Path) -> None:
        self._store = store
        self._step = step
        self._delay_steps = delay_steps
        self._truth = truth
        self._keys: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_put_from_multi_buffers(self, keys: list[str], *args: Any) -> Any:
        """Wait, then put."""
        last, until = self._step(), self._step() + self._delay_steps
        moved_s = time.monotonic()
        while last < until and time.monotonic() - moved_s < STANDSTILL_S:
            time.sleep(0.005)
            if self._step() != last:
                last, moved_s = self._step(), time.monotonic()
        self._keys.update(dict.fromkeys(keys))
        return self._store.batch_put_from_multi_buffers(keys, *args)

    def close(self) -> Any:
        """Read every key back, then close."""
        values = {key.rsplit("@", 1)[-1]: bytes(self._store.get(key)) for key in self._keys}
        held = {key: base64.b64encode(value).decode() for key, value in values.items() if value}
        self._truth.write_text(json.dumps(held))
        return self._store.close()


class UnpinnedScheduler(LedgerStoreScheduler):
    """Keeps the ledger, and takes no reference: the blocks are given away while jobs still read them."""

    def _touch(self, blocks: Blocks) -> None:
        """Take nothing."""

    def _free(self, blocks: Blocks) -> None:
        """Give nothing back."""


class ObservedConnector(KVLedgerStoreConnector):
    """The plugin over a `SlowStore`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            recording = self.connector_worker.store
            sender = recording._sender
            recording._store = SlowStore(
                recording._store,
                lambda: sender.step,
                int(os.environ["PUT_DELAY_STEPS"]),
                Path(os.environ["TRUTH_FILE"]),
            )


class UnpinnedConnector(ObservedConnector):
    """The same without block references."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            self.connector_scheduler.__class__ = UnpinnedScheduler


def run(folder: Path, connector: str, blocks: int, delay_steps: int, **settings: Any) -> dict[str, Any]:
    """Serve eight long requests, then their prompts again from the store."""
    os.environ.update(PUT_DELAY_STEPS=str(delay_steps), TRUTH_FILE=str(folder / "truth.json"))
    with mooncake_master(folder):
        llm = make_llm(
            folder,
            connector,
            {"ledger_path": str(folder / "ledger"), "max_pinned_fraction": 1.0, **settings},
            kv_connector_module_path="tests.engine.poison",
            engine_id="poisoned",
            num_gpu_blocks_override=blocks,
            kv_load_failure_policy="recompute",
        )
        first = tokens_of(llm.generate(prompts(REQUESTS, 200, seed=1), greedy(300), use_tqdm=False))
        wait_for_jobs(folder)
        settle(llm)
        again = tokens_of(llm.generate(prompts(REQUESTS, 200, seed=1), greedy(4), use_tqdm=False))
        wait_for_jobs(folder)
        if blocks == LARGE_POOL:
            # Preempted requests save what they generated, too. Saved as prompts here, every key has a truth.
            whole = [
                {"prompt_token_ids": prompt["prompt_token_ids"] + generated}
                for prompt, generated in zip(prompts(REQUESTS, 200, seed=1), first, strict=True)
            ]
            llm.generate(whole, greedy(1), use_tqdm=False)
            wait_for_jobs(folder)
        end_engine(llm.llm_engine)
    return {"first": first, "again": again}


def wait_for_jobs(folder: Path, timeout_s: float = 90.0) -> None:
    """Wait until the log shows no open job. Without references nothing else tells that puts are still queued."""
    (path,) = (folder / "ledger").glob("*.db")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with open_log(path) as log:
            kinds = [type(event) for event in log.events()]
        if kinds.count(ev.JobRegistered) == kinds.count(ev.JobSettled):
            return
        time.sleep(0.3)
    raise TimeoutError("jobs are still open")


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "clean": lambda folder: run(folder, "ObservedConnector", LARGE_POOL, 0),
    "poisoned": lambda folder: run(folder, "UnpinnedConnector", SMALL_POOL, PUT_DELAY_STEPS),
    "pinned": lambda folder: run(folder, "ObservedConnector", SMALL_POOL, PUT_DELAY_STEPS),
    "guarded": lambda folder: run(
        folder,
        "UnpinnedConnector",
        SMALL_POOL,
        PUT_DELAY_STEPS,
        integrity="all",
        failure_log=str(folder / "failures.jsonl"),
    ),
}


def main() -> None:
    """Run what the command line names."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    cpu_environment(folder)
    result = RUNS[name](folder)
    (folder / "result.json").write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
