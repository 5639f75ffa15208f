"""P/D runs of real engines over TCP on loopback: `python -m tests.engine.pd_scenarios NAME FOLDER`.

Engines are started once and used for many cases, because a start costs more than all cases together. A scenario leaves
`result.json`, and below `FOLDER/ledger` the audit logs of its engines. What must be true of them is said by the tests.
"""

import json
import os
import random
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ledger import events as ev
from tests.engine.machine import cpu_environment, free_port
from tests.engine.pd_engines import GATE, HOLD_TIMEOUT_S, Engine

SETTLE_TIMEOUT_S = 20.0
"""What a case may take until every block is back, on both sides: far beyond any timeout that is set here."""


def prompt(seed: int) -> list[int]:
    """Return 300 random tokens, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(300)]


class Pair:
    """A prefill and the address at which its decodes find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.gate = folder / "gate"
        self.environment = {
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.port),
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(HOLD_TIMEOUT_S),
            "VLLM_MOONCAKE_CONNECTOR_TIMEOUT": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            GATE: str(self.gate),
        }

    def engine(self, name: str, role: str, **options: Any) -> Engine:
        """Start an engine."""
        return Engine(self.folder, name, role, self.environment, **options)

    @property
    def address(self) -> str:
        """The bootstrap server's address."""
        return f"http://127.0.0.1:{self.port}"

    def remote_engine(self) -> str:
        """The prefill's engine id, as its bootstrap server gives it."""
        with urllib.request.urlopen(self.address + "/query") as answer:
            return str(next(iter(json.load(answer).values()))["engine_id"])

    def pull(self, transfer: str, **other: str) -> dict[str, Any]:
        """Return what a router gives a decode request along."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_engine_id": self.remote_engine() if "remote_engine_id" not in other else "",
            "remote_bootstrap_addr": self.address,
            **other,
        }


def push(transfer: str) -> dict[str, Any]:
    """Return what a router gives a prefill request along."""
    return {"do_remote_decode": True, "transfer_id": transfer}


def failures(folder: Path) -> dict[str, Any]:
    """One prefill and two decodes, one for each load-failure policy; then the prefill is killed, and a decode."""
    pair = Pair(folder)
    prefill = pair.engine("P1", "kv_producer", gated=True)
    decodes = {policy: pair.engine(f"D-{policy}", "kv_consumer", policy=policy) for policy in ("fail", "recompute")}
    engines = [prefill, *decodes.values()]
    result: dict[str, Any] = {"cases": {}, "settled_s": {}}
    try:
        for engine in engines:
            engine.ready()

        def settle(case: str) -> None:
            result["settled_s"][case] = {
                engine.name: engine.call("settle", SETTLE_TIMEOUT_S) for engine in engines if engine in alive
            }
            for engine in alive:
                assert engine.call("unfinished") == 0

        def case(name: str, run: Callable[[str, Engine, str], Any]) -> None:
            result["cases"][name] = {
                policy: run(f"{name}-{policy}", decode, policy) for policy, decode in decodes.items()
            }
            settle(name)

        alive = set(engines)
        result["reference"] = [prefill.call("generate", prompt(seed), None, 4)["tokens"] for seed in range(8)]
        settle("reference")

        def good(transfer: str, decode: Engine, policy: str) -> Any:
            prefill.call("generate", prompt(0), push(transfer), 1)
            return decode.call("generate", prompt(0), pair.pull(transfer), 4)

        def decode_first(transfer: str, decode: Engine, policy: str) -> Any:
            decode.begin("generate", prompt(0), pair.pull(transfer), 4)
            decode.wait_for(ev.PeersNamed, transfer)
            prefill.call("generate", prompt(0), push(transfer), 1)
            return decode.end()

        def never(transfer: str, decode: Engine, policy: str) -> Any:
            return decode.call("generate", prompt(1), pair.pull(transfer), 4)

        def wrong_address(transfer: str, decode: Engine, policy: str) -> Any:
            params = pair.pull(transfer, remote_engine_id="elsewhere", remote_bootstrap_addr="http://127.0.0.1:9")
            return decode.call("generate", prompt(2), params, 4)

        def unknown_engine(transfer: str, decode: Engine, policy: str) -> Any:
            return decode.call("generate", prompt(3), pair.pull(transfer, remote_engine_id="nobody"), 4)

        def aborted(transfer: str, decode: Engine, policy: str) -> Any:
            decode.call("add", transfer, prompt(4), pair.pull(transfer), 4)
            decode.wait_for(ev.PeersNamed, transfer)
            decode.call("abort", transfer)
            return None

        def never_asked(transfer: str, decode: Engine, policy: str) -> Any:
            return prefill.call("generate", prompt(5), push(transfer), 1)

        case("good", good)
        case("decode_first", decode_first)
        case("never", never)
        case("wrong_address", wrong_address)
        case("unknown_engine", unknown_engine)
        case("aborted", aborted)
        case("never_asked", never_asked)

        # The prefill is killed while its pushes have begun and cannot end.
        pair.gate.touch()
        for policy, decode in decodes.items():
            transfer = f"killed-{policy}"
            decode.begin("generate", prompt(6), pair.pull(transfer), 4)
            decode.wait_for(ev.PeersNamed, transfer)
            prefill.call("generate", prompt(6), push(transfer), 1)
            prefill.wait_for(ev.SendStarted, transfer)
        prefill.kill()
        alive.discard(prefill)
        killed_at = time.monotonic()
        result["cases"]["killed"] = {policy: decode.end() for policy, decode in decodes.items()}
        result["killed_s"] = time.monotonic() - killed_at
        settle("killed")

        # Another prefill takes its place; then a decode is killed that has asked, and is about to be pushed to.
        second = pair.engine("P2", "kv_producer", gated=True).ready()
        engines.append(second)
        alive.add(second)
        pair.gate.unlink()
        transfer = "second-fail"
        second.call("generate", prompt(0), push(transfer), 1)
        result["cases"]["second"] = {"fail": decodes["fail"].call("generate", prompt(0), pair.pull(transfer), 4)}
        settle("second")
        transfer = "gone-fail"
        decodes["fail"].call("add", transfer, prompt(7), pair.pull(transfer), 4)
        decodes["fail"].wait_for(ev.PeersNamed, transfer)
        decodes["fail"].kill()
        alive.discard(decodes["fail"])
        second.call("generate", prompt(7), push(transfer), 1)
        settle("gone")
        result["logs"] = {engine.name: str(engine.log) for engine in engines}
    finally:
        for engine in engines:
            engine.stop()
    return result


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {scenario.__name__: scenario for scenario in (failures,)}


def main() -> None:
    """Run the scenario that the command line names."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    cpu_environment(folder)
    result = SCENARIOS[name](folder)
    (folder / "result.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # Mooncake's threads may outlive the interpreter's own end; all that matters is on disk


if __name__ == "__main__":
    main()
