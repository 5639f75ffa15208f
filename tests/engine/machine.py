"""What a real engine needs on a machine without an accelerator: a tiny model, a Mooncake master, an environment.

Nothing is downloaded: the model is a folder with a configuration, its weights are dummies.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 80,  # with 32, vLLM takes its AMX kernels where the processor says it has them; some then end by SIGILL
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MASTER_START_TIMEOUT_S = 30

IDLE_BEFORE_END_S = 1.0
"""How long an engine is left alone before its end. See `end_engine`."""

SHUTDOWN_TIMEOUT_S = 20.0
"""Mooncake's teardown takes seconds, and on a busy machine more than the 5 that vLLM gives an engine to end."""


def free_port() -> int:
    """Return a TCP port that is free on loopback now."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """Return different TCP ports that are free on loopback now."""
    with contextlib.ExitStack() as probes:
        ports: list[int] = []
        for _ in range(number):
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(int(probe.getsockname()[1]))
        return ports


def two_cores() -> str:
    """The cores for two ranks, as vLLM reads them: two that this process may use, or the only one twice."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[1 % len(cores)]}"


def cpu_environment(folder: Path) -> None:
    """Set what vLLM reads from the environment: loopback only, equal hashes in all processes, sockets in `folder`."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        PYTHONHASHSEED="0",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        VLLM_NO_USAGE_STATS="1",
        VLLM_RPC_BASE_PATH=str(folder),
        VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS=str(int(SHUTDOWN_TIMEOUT_S)),
    )


def model_folder(folder: Path) -> str:
    """Write the tiny model's configuration below `folder` and return its path."""
    model = folder / "tiny-model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    return str(model)


@contextlib.contextmanager
def mooncake_master(folder: Path, *options: str) -> Generator["subprocess.Popen[bytes]"]:
    """Run `mooncake_master` on loopback, point `MOONCAKE_CONFIG_PATH` at it, and yield its process."""
    rpc, http, metrics = free_ports(3)
    with (folder / "mooncake_master.log").open("ab") as log:
        master = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("mooncake_master")),
                "--enable_http_metadata_server=true",
                "--http_metadata_server_host=127.0.0.1",
                f"--http_metadata_server_port={http}",
                f"--rpc_port={rpc}",
                f"--metrics_port={metrics}",
                *options,
            ],
            stdout=log,
            stderr=log,
        )
    config = folder / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": f"http://127.0.0.1:{http}/metadata",
                "master_server_address": f"127.0.0.1:{rpc}",
                "global_segment_size": "256MB",
                "local_buffer_size": "128MB",
                "protocol": "tcp",
                "device_name": "",
            }
        )
    )
    os.environ["MOONCAKE_CONFIG_PATH"] = str(config)
    try:
        _wait(master, lambda: _answers(http))
        _wait(master, lambda: _listens(metrics))  # the last that it opens: it ends when that port was taken meanwhile
        yield master
    finally:
        master.terminate()
        try:
            master.wait(10)
        except subprocess.TimeoutExpired:
            master.kill()


def _answers(http_port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metadata?key=none", timeout=1)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _wait(master: "subprocess.Popen[bytes]", is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MASTER_START_TIMEOUT_S
    while not is_ready():
        if master.poll() is not None:
            raise RuntimeError(f"mooncake_master ended with status {master.returncode}; see mooncake_master.log")
        if time.monotonic() > deadline:
            raise RuntimeError("mooncake_master does not answer; see mooncake_master.log")
        time.sleep(0.05)


def make_llm(folder: Path, connector: str | None = None, extra: dict[str, Any] | None = None, **overrides: Any) -> Any:
    """Start a real engine over the tiny model, with `connector` if given, and return vLLM's `LLM`."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer: dict[str, Any] = {}
    if connector is not None:
        transfer["kv_transfer_config"] = KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=overrides.pop("kv_connector_module_path", None),
            engine_id=overrides.pop("engine_id", None),
            kv_role=overrides.pop("kv_role", "kv_both"),
            kv_load_failure_policy=overrides.pop("kv_load_failure_policy", "fail"),
            kv_connector_extra_config={"load_async": True, **(extra or {})},
        )
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "num_gpu_blocks_override": 130,
        "block_size": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        **overrides,
    }
    return LLM(model_folder(folder), **transfer, **options)


def end_engine(engine: Any) -> None:
    """End an idle engine, given as vLLM's `LLMEngine`, and its processes.

    Not at once: an engine that goes idle in the instant of its SIGTERM never hears of it. The engine's main thread has
    checked for signals and is about to wait for a queue, and CPython runs a handler only between bytecodes. vLLM then
    kills it when its time is over. An engine that waits already is woken.
    """
    time.sleep(IDLE_BEFORE_END_S)
    engine.engine_core.shutdown(timeout=SHUTDOWN_TIMEOUT_S)


def greedy(max_tokens: int) -> Any:
    """Return sampling parameters that give the same tokens in every run."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
