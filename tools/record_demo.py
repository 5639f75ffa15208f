"""Records the incidents that ship with kvledger, on the real engine with real Mooncake.

    python tools/record_demo.py hanging-put | poisoned-keys

`hanging-put`: one rank's put never returns. Two tensor-parallel ranks serve a tiny model on the CPU. On rank 1 the
third put blocks for ever, which the real store cannot be made to do at will: that one call is the only thing here that
is not real. Jobs queue up behind it, their pins eat the pool, requests hang, and at last an operator kills the engine.
The bound on pins is off, as in a connector that has none. The log is sealed as it was left.

`poisoned-keys`: the run of `tests/engine/poison.py` without block references and with slow puts. That replay names
exactly the keys whose bytes are wrong is shown by `tests/engine/test_poison.py`.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

HANGING_RANK = 1
HANGING_PUT = 3
"""Which put of that rank never returns, counted from 1."""


WATCHED_S = 35.0
"""How long the engine is left in its state."""


class HangingStore:
    """Passes everything on to the store, but for one put, which never returns."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._puts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_put_from_multi_buffers(self, *args: Any) -> Any:
        """Put, or never return."""
        self._puts += 1
        if self._puts == HANGING_PUT:
            threading.Event().wait()
        return self._store.batch_put_from_multi_buffers(*args)


def __getattr__(name: str) -> Any:
    """Make the connector class when vLLM asks for it by name; this module must import without vLLM."""
    if name != "HangingPutConnector":
        raise AttributeError(name)
    from connector.store.connector import KVLedgerStoreConnector

    class HangingPutConnector(KVLedgerStoreConnector):
        """The plugin, over a store that hangs on one rank."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            if self.connector_worker is not None and vllm_config.parallel_config.rank == HANGING_RANK:
                recording = self.connector_worker.store
                recording._store = HangingStore(recording._store)

    return HangingPutConnector


def serve(folder: Path) -> None:
    """Serve until the engine has shown what there is to see, then kill it."""
    from tests.engine.machine import cpu_environment, greedy, make_llm, mooncake_master
    from tests.engine.scenarios import engine_processes, prompts

    cpu_environment(folder)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    with mooncake_master(folder):
        llm = make_llm(
            folder,
            "HangingPutConnector",
            {"ledger_path": str(folder / "ledger"), "stall_suspect_s": 2.0, "max_pinned_fraction": 1.0},
            kv_connector_module_path="tools.record_demo",
            engine_id="demo",
            tensor_parallel_size=2,
            num_gpu_blocks_override=64,
        )
        clients = threading.Thread(
            target=lambda: [llm.generate(prompts(4, 200, seed=turn), greedy(60)) for turn in range(4)]
        )
        clients.daemon = True
        clients.start()
        clients.join(WATCHED_S)
        for pid in engine_processes():
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    """Record and seal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("incident", choices=("hanging-put", "poisoned-keys"))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    from ledger.file.seal import seal

    target = REPOSITORY / "ledger" / "demo" / f"{arguments.incident}.db"
    with tempfile.TemporaryDirectory(prefix="record-demo-") as folder:
        if arguments.incident == "hanging-put":
            command = [__file__, arguments.incident, "--serve", folder]
        else:
            command = ["-m", "tests.engine.poison", "poisoned", folder]
        subprocess.run([sys.executable, *command], check=True, cwd=REPOSITORY)
        (log,) = Path(folder).joinpath("ledger").glob("*.db")
        target.unlink(missing_ok=True)
        seal(log, target)
    print(f"sealed {target.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
