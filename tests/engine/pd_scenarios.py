"""P/D runs of real engines over TCP on loopback: `python -m tests.engine.pd_scenarios NAME FOLDER`.

Engines are started once and used for many cases, because a start costs more than all cases together. A scenario leaves
`result.json`, and below `FOLDER/ledger` the audit logs of its engines. What must be true of them is said by the tests.
"""

import json
import os
import random
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ledger import events as ev
from tests.engine.machine import cpu_environment, free_port, two_cores
from tests.engine.pd_engines import GATE, HOLD_TIMEOUT_S, Engine

SETTLE_TIMEOUT_S = 60.0
"""What a case may take until every block is back, on both sides: far beyond any timeout that is set here."""


NOBODY = "http://127.0.0.1:9"
"""Where no bootstrap server is: port 9 is for discarding, and nobody does so today."""


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
        return Engine(self.folder, name, role, dict(self.environment), **options)

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


class Cases:
    """Two decodes of one prefill, one for each load-failure policy, and what becomes of each case.

    Attributes:
        results: for each case and policy, how the decode's request ended.
        settled_s: for each case and engine, how long it took until every block was back.
        unfinished: for each case and engine, how many requests had not ended by then.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.prefill = pair.engine("P1", "kv_producer", gated=True)
        self.decodes = {
            policy: pair.engine(f"D-{policy}", "kv_consumer", policy=policy) for policy in ("fail", "recompute")
        }
        self.alive = [self.prefill, *self.decodes.values()]
        self.all = list(self.alive)
        self.results: dict[str, dict[str, Any]] = {}
        self.settled_s: dict[str, dict[str, float]] = {}
        self.unfinished: dict[str, dict[str, int]] = {}

    def settle(self, case: str) -> None:
        """Wait until every block is back on both sides."""
        for engine in self.alive:
            engine.begin("settle", SETTLE_TIMEOUT_S)
        self.settled_s[case] = {engine.name: engine.end() for engine in self.alive}
        self.unfinished[case] = {engine.name: engine.call("unfinished") for engine in self.alive}

    def both(
        self, case: str, tokens: list[int], after: Callable[[str, Engine], None] | None = None, **params: str
    ) -> None:
        """Let both decodes pull at the same time, do something once they have asked, and see how they end."""
        for policy, decode in self.decodes.items():
            decode.begin("generate", tokens, self.pair.pull(f"{case}-{policy}", **params), 4)
        if after is not None:
            for policy, decode in self.decodes.items():
                decode.wait_for(ev.PeersNamed, f"{case}-{policy}")
                after(f"{case}-{policy}", decode)
        self.results[case] = {policy: decode.end() for policy, decode in self.decodes.items()}
        self.settle(case)

    def serve(self, transfer: str, tokens: list[int], prefill: Engine | None = None) -> None:
        """Prefill a request for a decode."""
        (prefill or self.prefill).call("generate", tokens, push(transfer), 1)


def failures(folder: Path) -> dict[str, Any]:
    """Whatever can go wrong between one prefill and two decodes; then the prefill is killed, and a decode."""
    cases = Cases(Pair(folder))
    prefill, decodes, pair = cases.prefill, cases.decodes, cases.pair
    second = Pair(folder)
    try:
        for engine in cases.alive:
            engine.ready()
        reference = [prefill.call("generate", prompt(seed), None, 4)["tokens"] for seed in range(8)]
        cases.settle("reference")

        for policy in decodes:
            cases.serve(f"good-{policy}", prompt(0))
        cases.both("good", prompt(0))
        cases.both("decode_first", prompt(1), after=lambda transfer, _: cases.serve(transfer, prompt(1)))
        cases.both("never", prompt(2))
        cases.both("wrong_address", prompt(3), remote_engine_id="elsewhere", remote_bootstrap_addr=NOBODY)
        cases.both("unknown_engine", prompt(4), remote_engine_id="nobody")

        for policy, decode in decodes.items():
            decode.call("add", "aborted", prompt(5), pair.pull(f"aborted-{policy}"), 4)
            decode.wait_for(ev.PeersNamed, f"aborted-{policy}")
            decode.call("abort", "aborted")
        cases.serve("never_asked", prompt(5))
        cases.settle("aborted")

        # The second prefill starts while the first still lives: a start takes longer than all else here.
        heir = second.engine("P2", "kv_producer", gated=True)
        cases.all.append(heir)

        # The prefill is killed while its pushes have begun and cannot end.
        pair.gate.touch()
        cases.alive.remove(prefill)
        pushing: list[str] = []

        def kill(transfer: str, _: Engine) -> None:
            cases.serve(transfer, prompt(6))
            prefill.wait_for(ev.SendStarted, transfer)
            pushing.append(transfer)
            if len(pushing) == len(decodes):
                prefill.kill()

        cases.both("killed", prompt(6), after=kill)
        pair.gate.unlink()

        # A decode is killed that has asked, and is about to be pushed to; then the other one.
        cases.alive.append(heir.ready())
        for policy, decode in decodes.items():
            # Another prefill has taken over.
            cases.serve(f"heir-{policy}", prompt(0), heir)
            cases.results.setdefault("heir", {})[policy] = decode.call(
                "generate", prompt(0), second.pull(f"heir-{policy}"), 4
            )
            decode.call("add", "gone", prompt(7), second.pull(f"gone-{policy}"), 4)
            decode.wait_for(ev.PeersNamed, f"gone-{policy}")
            decode.kill()
            cases.alive.remove(decode)
            cases.serve(f"gone-{policy}", prompt(7), heir)
            cases.settle(f"gone-{policy}")
    finally:
        for engine in cases.all:
            engine.stop()
    return {
        "cases": cases.results,
        "reference": reference,
        "settled_s": cases.settled_s,
        "unfinished": cases.unfinished,
        "logs": {engine.name: str(engine.log) for engine in cases.all},
    }


def ranks(folder: Path) -> dict[str, Any]:
    """A prefill of two ranks, a decode of two, and a decode of one that needs both ranks of the prefill."""
    pair = Pair(folder)
    # The first forward of two ranks takes seconds, in which they do not answer.
    pair.environment["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = str(3 * HOLD_TIMEOUT_S)
    pair.environment["VLLM_CPU_OMP_THREADS_BIND"] = two_cores()
    engines = {"P": pair.engine("P", "kv_producer", tensor_parallel_size=2)}
    engines["D2"] = pair.engine("D2", "kv_consumer", tensor_parallel_size=2)
    pair.environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    engines["D1"] = pair.engine("D1", "kv_consumer")
    cases: dict[str, Any] = {}
    try:
        for engine in engines.values():
            engine.ready()
        reference = engines["P"].call("generate", prompt(0), None, 4)["tokens"]
        for name in ("D1", "D2"):
            # The decode asks first: a prefill that holds blocks steps without a pause, and five ranks need the cores.
            engines[name].begin("generate", prompt(0), pair.pull(f"good-{name}"), 4)
            engines[name].wait_for(ev.PeersNamed, f"good-{name}")
            engines["P"].call("generate", prompt(0), push(f"good-{name}"), 1)
            cases[f"good-{name}"] = engines[name].end()
        for name in ("D1", "D2"):
            engines[name].begin("generate", prompt(0), pair.pull(f"never-{name}"), 4)
        for name in ("D1", "D2"):
            cases[f"never-{name}"] = engines[name].end()
        for engine in engines.values():
            engine.call("settle", SETTLE_TIMEOUT_S)
    finally:
        for engine in engines.values():
            engine.stop()
    return {"cases": cases, "reference": reference, "logs": {name: str(e.log) for name, e in engines.items()}}


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {scenario.__name__: scenario for scenario in (failures, ranks)}


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
