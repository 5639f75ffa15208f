"""Prefill and decode engines for the P/D tests: each an `LLM` in a process of its own, told what to do over a pipe.

Nothing is checked here. What must be true of a run is said by the tests.
"""

import contextlib
import multiprocessing as mp
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ledger import events as ev
from ledger.file.read import open_log
from tests.engine.machine import end_engine, greedy, model_folder

CONNECTOR = "KVLedgerMooncakeConnector"

GATE = "KVLEDGER_TEST_GATE"
"""Names the file that holds pushes back while it exists; see `tests.engine.gated`."""

HOLD_TIMEOUT_S = 8
"""How long a prefill waits for its decode, and the other way round. Each case that ends by it takes so long; a good
transfer must take less, also where a machine is busy with other things.
"""

PATIENCE_S = 60

ANSWER_TIMEOUT_S = 240.0
START_TIMEOUT_S = 420.0
"""A start takes 14 s on a machine of its own; three at once, among other work on two cores, have taken four minutes."""


class Engine:
    """A real engine in a process of its own.

    Args:
        folder: where its logs, sockets and gate are.
        name: its engine id.
        role: `kv_producer` or `kv_consumer`.
        environment: what its process has in its environment beside ours.
        options: for `make_llm`.
    """

    def __init__(self, folder: Path, name: str, role: str, environment: dict[str, str], **options: Any) -> None:
        self.name = name
        self.folder = folder
        self.pids: list[int] = []
        context = mp.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, folder, name, role, environment, options), name=name, daemon=False
        )
        self._process.start()
        other.close()

    def ready(self) -> "Engine":
        """Wait until the engine has started, and return it."""
        self.pids = self._receive(START_TIMEOUT_S)
        return self

    def call(self, command: str, *args: Any) -> Any:
        """Have the engine's process run a command, and return what it gives."""
        self.begin(command, *args)
        return self._receive()

    def begin(self, command: str, *args: Any) -> None:
        """Have the engine's process begin a command; `end` gives its result."""
        self._pipe.send((command, args))

    def end(self) -> Any:
        """Return the result of what was begun."""
        return self._receive()

    def _receive(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"engine {self.name} does not answer")
        ok, value = self._pipe.recv()
        if not ok:
            raise RuntimeError(f"engine {self.name}: {value}")
        return value

    def stop(self) -> None:
        """End the engine in order."""
        with contextlib.suppress(OSError, EOFError, RuntimeError):
            self.call("shutdown")
        self._process.join(60)
        self.kill()

    def kill(self) -> None:
        """End what is left of the engine, workers and all, without a chance to say goodbye."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(10)

    @property
    def log(self) -> Path:
        """The engine's audit log."""
        (path,) = (self.folder / "ledger").glob(f"{self.name}*.db")
        return path

    def events(self) -> list[ev.AnyEvent]:
        """The events of the engine's log so far."""
        with open_log(self.log) as log:
            return list(log.events())

    def wait_for(self, kind: type[ev.Event], transfer: str) -> None:
        """Wait until the engine's log has an event of `kind` for a transfer."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(isinstance(event, kind) and event.transfer == transfer for event in self.events()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} has recorded no {kind.__name__} for {transfer}")
            time.sleep(0.05)


def _serve(
    pipe: Connection, folder: Path, name: str, role: str, environment: dict[str, str], options: dict[str, Any]
) -> None:
    os.environ.update(environment)
    try:
        llm = _llm(folder, name, role, **options)
    except Exception as error:
        pipe.send((False, repr(error)))
        raise
    pipe.send((True, _descendants(os.getpid())))
    commands = _Commands(llm)
    while True:
        command, args = pipe.recv()
        try:
            result = getattr(commands, command)(*args)
        except Exception as error:  # noqa: BLE001 - the scenario's own process says what that means
            pipe.send((False, repr(error)))
            continue
        pipe.send((True, result))
        if command == "shutdown":
            return


def _descendants(pid: int) -> list[int]:
    """Return the processes below a process: an engine's, and its workers', who may outlive it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found.extend(child for child, parent in parents.items() if parent == known)
    return found[1:]


def _llm(folder: Path, name: str, role: Any, policy: Any = "fail", gated: bool = False, **options: Any) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    settings = {"mooncake_protocol": "tcp", "ledger_path": str(folder / "ledger"), "flush_interval_ms": 10}
    return LLM(
        model_folder(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        enforce_eager=True,
        dtype="bfloat16",
        num_gpu_blocks_override=130,
        block_size=32,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        kv_transfer_config=KVTransferConfig(
            kv_connector="GatedMooncakeConnector" if gated else CONNECTOR,
            kv_connector_module_path="tests.engine.gated" if gated else None,
            kv_role=role,
            engine_id=name,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=settings,
        ),
        **options,
    )


class _Commands:
    """What an engine's process can be told to do."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._done: dict[str, Any] = {}

    def generate(self, prompt: list[int], params: dict[str, Any] | None, max_tokens: int) -> dict[str, Any]:
        """Run one request to its end."""
        self.add("request", prompt, params, max_tokens)
        return self.finish("request")

    def add(self, request: str, prompt: list[int], params: dict[str, Any] | None, max_tokens: int) -> None:
        """Begin a request."""
        sampling = greedy(max_tokens)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        self._engine.add_request(request, {"prompt_token_ids": prompt}, sampling)
        self._begun = time.monotonic()

    def finish(self, request: str) -> dict[str, Any]:
        """Step until a request has ended."""
        while request not in self._done:
            for output in self._engine.step():
                if output.finished:
                    self._done[output.request_id] = output
        output = self._done.pop(request)
        return {
            "reason": output.outputs[0].finish_reason,
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "seconds": time.monotonic() - self._begun,
        }

    def abort(self, request: str) -> None:
        """End a request as a client does that goes away."""
        self._engine.abort_request([request])

    def unfinished(self) -> int:
        """How many requests have not ended, towards the client."""
        return self._engine.get_num_unfinished_requests()

    def settle(self, timeout_s: float) -> float:
        """Wait until every block is back in the pool, and return how long that took."""
        begun = time.monotonic()
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > begun + timeout_s:
                raise TimeoutError("blocks are still held")
            time.sleep(0.05)
        return time.monotonic() - begun

    def shutdown(self) -> None:
        """End the engine."""
        end_engine(self._engine)
