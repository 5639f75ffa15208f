"""Runs of the real engine, each in a process of its own: `python -m tests.engine.scenarios NAME FOLDER`.

A scenario leaves `result.json` and, if it uses the plugin, the audit log below `FOLDER/ledger`. What must be true of
them is said by the tests; nothing is checked here.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.machine import cpu_environment, end_engine, greedy, make_llm, mooncake_master, two_cores

STORE = "KVLedgerStoreConnector"
UPSTREAM_STORE = "MooncakeStoreConnector"


def prompts(count: int, length: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Return `count` prompts of `length` random tokens, the same for the same seed."""
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(3, 500) for _ in range(length)]} for _ in range(count)]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    """Return the generated tokens of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def settle(llm: Any, timeout_s: float = 20.0) -> None:
    """Step an engine without requests until it wants no more steps: until no store job is open.

    The `LLM` object steps its engine only inside `generate`. An engine in a process of its own steps by itself, so this
    waits for it to report that the prefix cache can be reset, which is refused while blocks are referenced.
    """
    deadline = time.monotonic() + timeout_s
    while not llm.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise TimeoutError("blocks are still referenced; the prefix cache cannot be reset")
        time.sleep(0.1)


def reference(folder: Path) -> dict[str, Any]:
    """Without a connector: the tokens that every other run must give."""
    llm = make_llm(folder, num_gpu_blocks_override=400)
    result = {
        "short": tokens_of(llm.generate(prompts(6, 400), greedy(8), use_tqdm=False)),
        "long": tokens_of(llm.generate(prompts(8, 200, seed=1), greedy(300), use_tqdm=False)),
    }
    end_engine(llm.llm_engine)
    return result


def reference_two_ranks(folder: Path) -> dict[str, Any]:
    """Without a connector, on two ranks: dummy weights differ with the number of ranks."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = two_cores()
    llm = make_llm(folder, tensor_parallel_size=2)
    result = {"short": tokens_of(llm.generate(prompts(3, 400), greedy(8), use_tqdm=False))}
    end_engine(llm.llm_engine)
    return result


def _save_and_load(folder: Path, connector: str, extra: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    llm = make_llm(folder, connector, extra)
    rounds = []
    for _ in range(2):
        outputs = llm.generate(prompts(6, 400), greedy(8), use_tqdm=False)
        rounds.append({"tokens": tokens_of(outputs), "cached": [output.num_cached_tokens for output in outputs]})
        settle(llm)
    return llm, {"rounds": rounds}


def upstream(folder: Path) -> dict[str, Any]:
    """Save, reset the prefix cache, load - with vLLM's own connector."""
    with mooncake_master(folder):
        llm, result = _save_and_load(folder, UPSTREAM_STORE, {})
        end_engine(llm.llm_engine)
    return result


def store(folder: Path) -> dict[str, Any]:
    """Save, reset the prefix cache, load; then abort requests that run, load, and wait."""
    with mooncake_master(folder):
        llm, result = _save_and_load(folder, STORE, {"ledger_path": str(folder / "ledger")})
        engine = llm.llm_engine
        for index, prompt in enumerate(prompts(12, 300, seed=2)):
            engine.add_request(f"abort-{index}", prompt, greedy(120))
        engine.abort_request([engine_id(engine, "abort-11")], internal=True)  # queued, never scheduled
        finished = 0
        for step in range(4000):
            if not engine.has_unfinished_requests():
                break
            finished += sum(output.finished for output in engine.step())
            if step == 3:
                engine.abort_request([engine_id(engine, "abort-0"), engine_id(engine, "abort-1")], internal=True)
        result["finished_beside_aborts"] = finished
        settle(llm)
        end_engine(engine)
    return result


def engine_id(engine: Any, request: str) -> str:
    """Return the id under which the engine knows a request of ours: vLLM appends to the ids it is given."""
    known = [
        name for name in engine.output_processor.request_states if name == request or name.startswith(request + "-")
    ]
    return str(known[0])


def preempt(folder: Path) -> dict[str, Any]:
    """A pool of 40 blocks for 8 requests that need 128: vLLM preempts again and again."""
    with mooncake_master(folder):
        llm = make_llm(folder, STORE, {"ledger_path": str(folder / "ledger")}, num_gpu_blocks_override=40)
        result = {"tokens": tokens_of(llm.generate(prompts(8, 200, seed=1), greedy(300), use_tqdm=False))}
        settle(llm)
        end_engine(llm.llm_engine)
    return result


def two_ranks(folder: Path) -> dict[str, Any]:
    """Two tensor-parallel ranks: every job and load needs both to report."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = two_cores()
    with mooncake_master(folder):
        llm = make_llm(folder, STORE, {"ledger_path": str(folder / "ledger")}, tensor_parallel_size=2)
        rounds = []
        for _ in range(2):
            outputs = llm.generate(prompts(3, 400), greedy(8), use_tqdm=False)
            rounds.append({"tokens": tokens_of(outputs), "cached": [output.num_cached_tokens for output in outputs]})
            settle(llm)
        end_engine(llm.llm_engine)
    return {"rounds": rounds}


def killed(folder: Path) -> dict[str, Any]:
    """The engine process ends by SIGKILL in the middle of its work."""
    with mooncake_master(folder):
        llm = make_llm(folder, STORE, {"ledger_path": str(folder / "ledger"), "flush_interval_ms": 20})
        engine = llm.llm_engine
        for index, prompt in enumerate(prompts(4, 300, seed=3)):
            engine.add_request(f"killed-{index}", prompt, greedy(700))
        for _ in range(150):
            engine.step()
        pids = engine_processes()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return {"killed": len(pids)}


def engine_processes() -> list[int]:
    """Return the ids of the engine and worker processes that vLLM started below this process, by their titles."""
    children: dict[int, list[int]] = {}
    titles: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            titles[int(entry.name)] = entry.joinpath("cmdline").read_text()
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.name))
    below, found = [os.getpid()], []
    while below:
        for child in children.get(below.pop(), []):
            below.append(child)
            if "VLLM" in titles[child]:
                found.append(child)
    return found


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (reference, reference_two_ranks, upstream, store, preempt, two_ranks, killed)
}


def main() -> None:
    """Run the scenario that the command line names."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that what was started is ended
    cpu_environment(folder)
    result = SCENARIOS[name](folder)
    (folder / "result.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # Mooncake's threads may outlive the interpreter's own end; all that matters is on disk


if __name__ == "__main__":
    main()
