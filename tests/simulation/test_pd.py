"""Prefills and a decode, simulated: every check holds on every seed, and each known mistake is found.

What stands between the engines is made up and misbehaves; vLLM's schedulers and both halves of the connector are real.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ledger import events as ev
from ledger.replay.fold import replay
from ledger.replay.join import join
from tools.sim.pd import plan as pl
from tools.sim.pd.canaries import BY_NAME, CANARIES
from tools.sim.pd.run import Run, World
from tools.sim.result import Result

PLANS = Path(__file__).parent / "plans"
STEPS = 120
SEEDS_PER_TEST = 25

seen: Counter[str] = Counter()
"""What the seeds of this room covered."""


def play(seed: int, **how) -> Result:
    result = Run(pl.draw(seed, STEPS, **how)).play()
    seen.update(result.seen)
    return result


@pytest.mark.parametrize("first", range(0, 150, SEEDS_PER_TEST))
def test_every_check_holds_after_every_step(first: int) -> None:
    broken = [
        f"seed {seed}, step {result.broken.step}: {result.broken.kind}: {result.broken.detail}"
        for seed in range(first, first + SEEDS_PER_TEST)
        if (result := play(seed)).broken is not None
    ]
    assert broken == []


def test_the_seeds_meet_every_kind_of_fault_and_every_shape_of_engines() -> None:
    if seen["pulls"] < 1000:
        pytest.skip("says something about all seeds only, and not all were played")
    wanted = {f"faults: push: {kind}" for kind in pl.PUSH_FAULTS}
    wanted |= {f"faults: reply: {kind}" for kind in pl.REPLY_FAULTS}
    wanted |= {f"faults: server: {kind}" for kind in pl.SERVER_FAULTS}
    wanted |= {f"routes: {kind}" for kind in (*pl.ADDRESS_FAULTS, "no prefill", "no decode", "retry")}
    sizes = [(there, here) for there in (1, 2, 4) for here in (1, 2, 4) if there != here]
    wanted |= {f"recvs of {there} {what} by {here}" for there, here in sizes for what in ("ranks", "stages")}
    wanted |= {"recvs of several peers", "failures while others still write", "killed: P", "killed: D"}
    wanted |= {f"recovered: {action}" for action in ("failed", "recomputed", "gone")}
    wanted |= {f"recvs {outcome}" for outcome in ("loaded", "failed", "released")}
    wanted |= {"failures: LOAD_TIMEOUT at WATCHDOG", "failures: LOAD_TIMEOUT at RECV", "events: send_expired"}
    assert wanted - seen.keys() == set()


@pytest.mark.parametrize("mistake", CANARIES, ids=[each.name for each in CANARIES])
def test_a_known_mistake_is_found_within_200_seeds(mistake) -> None:
    for seed in range(200):
        result = Run(mistake.plan(seed, STEPS), only=mistake.finds, alter=mistake.alter).play()
        if result.broken is not None:
            assert result.broken.kind in mistake.finds
            return
    pytest.fail(f"{mistake.what}: not found")


def _serve_what_is_over(world: World) -> None:
    """Let upstream take the old send under a question for a transfer that is over and was asked for again."""
    for engine in world.engines.values():
        for worker in engine.workers:
            plan = worker._build_transfer_params

            async def build(ready: list[Any], *rest: Any, worker: Any = worker, plan: Any = plan) -> Any:
                there = dict(worker.reqs_need_send)
                worker.reqs_need_send.update({send.transfer_id: send for _, send in ready})
                try:
                    return await plan(ready, *rest)
                finally:
                    worker.reqs_need_send.clear()
                    worker.reqs_need_send.update(there)

            worker._build_transfer_params = build  # type: ignore[method-assign]


@pytest.mark.parametrize("undo", [None, _serve_what_is_over], ids=["remedy", "undone"])
def test_a_question_that_was_held_up_reads_nothing_of_a_send_that_is_over(undo) -> None:
    found = msgspec.json.decode((PLANS / "pd-sent-before.json").read_bytes(), type=pl.Plan)
    broken = Run(found, alter=undo).play().broken
    assert (broken.kind if broken is not None else "") == ("ownership" if undo else "")


def test_every_check_is_seen_to_fail() -> None:
    from tools.sim.pd import checks

    named = {line.split()[0] for line in (checks.__doc__ or "").splitlines() if line.startswith("    ")}
    assert {kind for each in CANARIES for kind in each.finds} == named - {"crash"}


def digests_in_a_process(hash_seed: str, *flags: str) -> list[str]:
    """Return the digests of some seeds, played in another process."""
    program = f"""
import logging
logging.disable(logging.CRITICAL)
from tools.sim.pd import plan as pl
from tools.sim.pd.run import Run
print(*[Run(pl.draw(seed, {STEPS})).play().digest for seed in range(300, 308)])
"""
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[-8:]


def test_a_seed_is_the_same_run_whatever_the_order_of_sets_and_hashes_and_without_asserts() -> None:
    assert digests_in_a_process("0") == digests_in_a_process("1", "-O")


def findings(result: Result) -> list[tuple[str, str]]:
    """Return engine and kind of what the logs of a run say together."""
    decode = msgspec.json.Decoder(ev.AnyEvent).decode
    logs = {engine: [decode(line) for line in lines] for engine, lines in result.lines.items()}
    replayed = [replay(events) for events in logs.values()]
    joined = join(replayed, list(logs), [events.__iter__ for events in logs.values()])
    return [(list(logs)[index], finding.kind) for index, finding in joined.findings]


@pytest.mark.parametrize("seed", range(900, 908))
def test_the_logs_of_engines_without_faults_have_no_findings(seed: int) -> None:
    result = play(seed, faults=())
    assert result.broken is None
    assert findings(result) == []


EXPLAINED = {"load_failed", "leak", "late_event", "torn_log", "stall", "retry_loop"}
"""What the faults of a plan may lead to while the connector does all that it must."""


@pytest.mark.parametrize("seed", range(920, 932))
def test_whatever_fails_the_verdicts_do_not_accuse_a_sound_connector(seed: int) -> None:
    result = play(seed)
    assert result.broken is None
    assert {kind for _, kind in findings(result)} <= EXPLAINED


@pytest.mark.parametrize(
    ("name", "side", "kinds"),
    [("first-failure", "D", {"early_free", "poison"}), ("first-stage", "P0", {"early_free", "poison"})],
)
def test_the_logs_alone_show_what_is_freed_too_early(name: str, side: str, kinds: set[str]) -> None:
    mistake = BY_NAME[name]
    for seed in range(20):
        # Nothing is looked for, so that the run goes on to its end.
        result = Run(mistake.plan(seed, STEPS), only=frozenset(), alter=mistake.alter).play()
        if any(engine == side and kind in kinds for engine, kind in findings(result)):
            return
    pytest.fail(f"{mistake.what}: the verdicts do not see it")
