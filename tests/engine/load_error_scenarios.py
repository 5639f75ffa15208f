"""Loads that fail on the real engine: `python -m tests.engine.load_error_scenarios NAME FOLDER`, a process for each.

The store's memory is in a process of its own, the engine's requests are loaded from it over TCP. Six prompts are saved
and the local prefix cache is reset; then each prompt meets another fault, made from outside with a second client of the
store. Nothing is checked here.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import prometheus_client

from connector.store.integrity import TRAILER_BYTES, Trailer, layout_digest
from tests.engine import machine
from tests.engine.held_store import Gate
from tests.engine.machine import cpu_environment, end_engine, free_port, greedy, make_llm, mooncake_master
from tests.engine.scenarios import prompts, settle

EPISODES = ("whole", "removed", "changed", "relaid", "leased", "masterless")
"""One prompt each, in the order of `prompts`."""

LEASE_MS = 400
"""How long the master promises not to evict what was looked up."""

BLOCK = 4
"""Which block of a prompt meets its fault: one in the middle."""


def store_client(segment_bytes: int) -> Any:
    """Return a client of the store that offers `segment_bytes` of memory to it."""
    from mooncake.store import MooncakeDistributedStore  # pyright: ignore[reportAttributeAccessIssue] - compiled

    config = json.loads(Path(os.environ["MOONCAKE_CONFIG_PATH"]).read_text())
    store = MooncakeDistributedStore()
    status = store.setup(
        f"127.0.0.1:{free_port()}",
        config["metadata_server"],
        segment_bytes,
        16 << 20,
        "tcp",
        "",
        config["master_server_address"],
    )
    if status != 0:
        raise RuntimeError(f"the store's client did not start: {status}")
    return store


def storage(segment_bytes: int) -> None:
    """Offer memory to the store until standard input ends."""
    client = store_client(segment_bytes)
    print("ready", flush=True)
    sys.stdin.read()
    client.close()


@contextlib.contextmanager
def storage_node(folder: Path, segment_bytes: int = 256 << 20) -> Generator["subprocess.Popen[bytes]"]:
    """Run a process that holds the store's memory, and have engines bring none of their own."""
    path = Path(os.environ["MOONCAKE_CONFIG_PATH"])
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "mode": "standalone-store", "global_segment_size": 0}))
    with (folder / "storage.log").open("ab") as log:
        node = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.load_error_scenarios", "storage", str(segment_bytes)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        if node.stdout is None or node.stdout.readline() != b"ready\n":
            raise RuntimeError("the storage node did not start; see storage.log")
        yield node
    finally:
        node.kill()
        node.wait()


class Faults:
    """Does to the store what each episode is about, while the episode's load is held at the gate.

    Attributes:
        struck: by episode, the keys that cannot be loaded because of it.
    """

    def __init__(
        self, gate: Gate, master: "subprocess.Popen[bytes]", node: "subprocess.Popen[bytes]", tries: int
    ) -> None:
        self._tries = tries
        self._gate = gate
        self._master = master
        self._node = node
        self._client = store_client(0)
        self.struck: dict[str, list[str]] = {}

    def whole(self) -> None:
        """Nothing happens to this one."""

    def removed(self) -> None:
        """A key is removed between lookup and load."""
        key = self._gate.wait()[BLOCK]
        self.struck["removed"] = [key]
        self._expect(self._client.remove(key, True))

    def changed(self) -> None:
        """A bit of a value in the store is turned over."""
        key = self._gate.wait()[BLOCK]
        self.struck["changed"] = [key]
        value = bytearray(self._client.get(key))
        value[100] ^= 4
        self._replace(key, bytes(value))

    def relaid(self) -> None:
        """One value was written under another layout, and another one has another size."""
        keys = self._gate.wait()
        self.struck["relaid"] = [keys[BLOCK], keys[BLOCK + 2]]
        value = self._client.get(keys[BLOCK])
        trailer = Trailer.decode(value[-TRAILER_BYTES:])
        other = trailer._replace(layout=layout_digest({"dtype": "float8"}))  # type: ignore[union-attr]
        self._replace(keys[BLOCK], value[:-TRAILER_BYTES] + other.encode())
        self._replace(keys[BLOCK + 2], value[: len(value) // 2])

    def leased(self) -> None:
        """The transfer takes longer than the lease, each time that it is tried."""
        for number in range(self._tries):
            self.struck["leased"] = self._gate.wait()
            self._node.send_signal(signal.SIGSTOP)
            if number + 1 < self._tries:
                self._gate.let_pass()
            else:
                self._gate.open()
            time.sleep(2 * LEASE_MS / 1000)  # what is waited for is that time passes
            self._node.send_signal(signal.SIGCONT)

    def masterless(self) -> None:
        """The master is killed while the load runs."""
        self.struck["masterless"] = self._gate.wait()
        self._master.send_signal(signal.SIGKILL)
        self._master.wait()
        self._gate.open()

    def _replace(self, key: str, value: bytes) -> None:
        self._expect(self._client.remove(key, True))
        self._expect(self._client.put(key, value))

    def _expect(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"the test's own client failed: {status}")


def run(engine: Any, name: str, prompt: Any) -> dict[str, Any]:
    """Serve one request to its end."""
    engine.add_request(name, prompt, greedy(8))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                completion = output.outputs[0]
                return {
                    "tokens": list(completion.token_ids),
                    "cached": output.num_cached_tokens,
                    "finish_reason": completion.finish_reason,
                }
    raise RuntimeError(f"request {name} ended without an output")


def during(fault: Callable[[], None], gate: Gate, serve: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Serve a request while a thread does the fault at the gate."""
    raised: list[BaseException] = []

    def act() -> None:
        try:
            fault()
        except BaseException as error:  # noqa: BLE001 - raised again on the main thread
            raised.append(error)
        finally:
            gate.open()

    gate.close()
    thread = threading.Thread(target=act)
    thread.start()
    result = serve()
    thread.join()
    if raised:
        raise raised[0]
    return result


def failing_loads(folder: Path, policy: str, episodes: Sequence[str] = EPISODES, **settings: Any) -> dict[str, Any]:
    """Let each prompt meet its fault, under one policy."""
    os.environ.update(MC_RPC_TIMEOUT_MS="2000", MC_RPC_CONNECT_TIMEOUT_MS="500")
    gate = Gate(folder / "gate")
    extra = {
        "ledger_path": str(folder / "ledger"),
        "failure_log": str(folder / "failures.jsonl"),
        "integrity": "all",
        "load_retry_backoff_ms": 10,
        **settings,
    }
    with mooncake_master(folder, f"--default_kv_lease_ttl={LEASE_MS}") as master, storage_node(folder) as node:
        llm = make_llm(
            folder,
            "HeldStoreConnector",
            extra,
            kv_connector_module_path="tests.engine.held_store",
            kv_load_failure_policy=policy,
            disable_log_stats=False,
        )
        engine = llm.llm_engine
        asked = {name: prompt for name, prompt in zip(EPISODES, prompts(6, 400), strict=True) if name in episodes}
        for name, prompt in asked.items():
            run(engine, f"save-{name}", prompt)
        settle(llm)
        faults = Faults(gate, master, node, tries=settings["load_max_retries"] + 1)
        served = {
            name: during(getattr(faults, name), gate, lambda name=name, prompt=prompt: run(engine, name, prompt))
            for name, prompt in asked.items()
        }
        settle(llm)
        metrics = prometheus_client.generate_latest(prometheus_client.REGISTRY).decode()
        end_engine(engine)
    return {"episodes": served, "metrics": metrics.splitlines(), "struck": faults.struck}


def recompute(folder: Path) -> dict[str, Any]:
    """vLLM computes what could not be loaded; a block is asked for twice."""
    return failing_loads(folder, "recompute", load_max_retries=1)


def fail(folder: Path) -> dict[str, Any]:
    """vLLM ends a request that could not be loaded; a block is asked for once, and a prefix may be kept."""
    return failing_loads(folder, "fail", load_max_retries=0, load_rollback="suffix")


def suffix(folder: Path) -> dict[str, Any]:
    """vLLM computes what comes after the first block that could not be loaded."""
    return failing_loads(folder, "recompute", EPISODES[:-1], load_max_retries=0, load_rollback="suffix")


HYBRID = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
}
"""What makes the tiny model one with two KV-cache groups: its sliding-window layers and the others."""


def hybrid(folder: Path) -> dict[str, Any]:
    """A model with two KV-cache groups: one prompt is loaded, and of another one a key is missing."""
    machine.MODEL.update(HYBRID)
    gate = Gate(folder / "gate")
    extra = {"ledger_path": str(folder / "ledger"), "integrity": "all", "load_rollback": "suffix"}
    with mooncake_master(folder) as master:
        llm = make_llm(
            folder,
            "HeldStoreConnector",
            extra,
            kv_connector_module_path="tests.engine.held_store",
            kv_load_failure_policy="recompute",
        )
        engine = llm.llm_engine
        asked = dict(zip(("whole", "removed"), prompts(2, 400), strict=True))
        saved = {name: run(engine, f"save-{name}", prompt) for name, prompt in asked.items()}
        settle(llm)
        faults = Faults(gate, master, master, tries=1)
        loaded = {
            name: during(getattr(faults, name), gate, lambda name=name, prompt=prompt: run(engine, name, prompt))
            for name, prompt in asked.items()
        }
        settle(llm)
        end_engine(engine)
    return {"saved": saved, "loaded": loaded, "struck": faults.struck}


SCENARIOS = {scenario.__name__: scenario for scenario in (recompute, fail, suffix, hybrid)}

if __name__ == "__main__":
    name, path = sys.argv[1], Path(sys.argv[2])
    if name == "storage":
        storage(int(sys.argv[2]))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that what was started is ended
        cpu_environment(path)
        (path / "result.json").write_text(json.dumps(SCENARIOS[name](path)))
        sys.stdout.flush()
    os._exit(0)  # Mooncake's threads may outlive the interpreter's own end; all that matters is on disk
