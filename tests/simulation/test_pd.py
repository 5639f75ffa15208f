"""Prefills and a decode, simulated: every check holds on every seed, and each known mistake is found.

What stands between the engines is made up and misbehaves; vLLM's schedulers and both halves of the connector are real.
"""

from collections import Counter

import msgspec
import pytest

from ledger import events as ev
from ledger.join import join
from ledger.replay import replay
from tools.sim.pd import plan as pl
from tools.sim.pd.canaries import CANARIES
from tools.sim.pd.run import Result, Run

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


@pytest.mark.parametrize("canary", CANARIES, ids=[canary.name for canary in CANARIES])
def test_a_known_mistake_is_found_within_200_seeds(canary) -> None:
    for seed in range(200):
        result = Run(canary.plan(seed, STEPS), only=canary.finds, alter=canary.alter).play()
        if result.broken is not None:
            assert result.broken.kind in canary.finds
            return
    pytest.fail(f"{canary.what}: not found")


def test_every_check_is_seen_to_fail() -> None:
    from tools.sim.pd import checks

    named = {line.split()[0] for line in (checks.__doc__ or "").splitlines() if line.startswith("    ")}
    assert {kind for canary in CANARIES for kind in canary.finds} == named - {"crash"}


def test_a_seed_is_the_same_run_again() -> None:
    first, second = play(7), play(7)
    assert (first.digest, first.steps) == (second.digest, second.steps)


def findings(result: Result) -> list[str]:
    """Return what the logs of a run say together."""
    decode = msgspec.json.Decoder(ev.AnyEvent).decode
    logs = {engine: [decode(line) for line in lines] for engine, lines in result.lines.items()}
    replayed = [replay(events) for events in logs.values()]
    joined = join(replayed, list(logs), [events.__iter__ for events in logs.values()])
    return [f"{finding.kind}: {finding.title}" for _, finding in joined.findings]


@pytest.mark.parametrize("seed", range(900, 908))
def test_the_logs_of_engines_without_faults_have_no_findings(seed: int) -> None:
    result = play(seed, faults=())
    assert result.broken is None
    assert findings(result) == []
