"""How well the verdicts do on simulated prefills and decodes: the logs of all engines of a run, replayed together.

The truth is what the simulator did (whom it killed), and what
the engines recorded of the transfers: which pulls failed, which sends ran out of time, which answers came too late.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ledger.report.wording import say
from tools.scoring import common
from tools.scoring.common import RunScore, alarm, hits, replay_together

CASES = ("failed pull", "expired send", "late answer", "engine killed")
"""What there may be to find: transfers, transfers, logs, logs."""

WRONG_SIDES = ("the prefill engine D", "the decode engine P")
"""What no finding may say: the engines are called P0, P1 and so on, and D."""


PD = "P/D"
PD_STEPS = 120


class PdScore(RunScore, kw_only=True):
    """How the verdicts did in one run. `wrong_side`: findings that send to an engine that is not of that side."""

    wrong_side: int


class _Truth(msgspec.Struct):
    """What happened in one engine."""

    failed: set[str]
    expired: set[str]
    late: bool
    killed: bool


def score(seed: int, steps: int) -> PdScore:
    """Play a seed, replay the logs of its engines together, and compare."""
    from ledger import events as ev
    from tools.sim.engines import quiet
    from tools.sim.pd import plan as pl
    from tools.sim.pd.run import Run

    quiet()
    plan = pl.draw(seed, steps)
    run = Run(plan, only=frozenset({"nothing"}))
    played = run.play()
    decode = msgspec.json.Decoder(ev.AnyEvent).decode
    logs = {engine: [decode(line) for line in lines] for engine, lines in played.lines.items()}
    killed = {each.engine for each in plan.decisions if isinstance(each, pl.Die) and each.step < plan.steps}
    truths = {
        engine: _Truth(
            failed={event.transfer for event in events if isinstance(event, ev.RecvFailed)},
            expired={event.transfer for event in events if isinstance(event, ev.SendExpired)},
            late=any(isinstance(event, ev.ReportIgnored) for event in events),
            killed=engine in killed,
        )
        for engine, events in logs.items()
    }
    found = replay_together(logs)
    due, hit = dict.fromkeys(CASES, 0), dict.fromkeys(CASES, 0)
    for engine, truth in truths.items():
        own = [finding for log, finding in found if log == engine]
        kinds = {finding.kind for finding in own}
        for case, transfers, kind in (
            ("failed pull", truth.failed, "load_failed"),
            ("expired send", truth.expired, "leak"),
        ):
            due[case] += len(transfers)
            hit[case] += len(transfers & _transfers(finding for finding in own if finding.kind == kind))
        for case, there, kind in (
            ("late answer", truth.late, "late_event"),
            ("engine killed", truth.killed, "torn_log"),
        ):
            due[case] += there
            hit[case] += there and kind in kinds
    return PdScore(
        seed=seed,
        name=PD,
        events=sum(map(len, logs.values())),
        faults=_planned(plan),
        due={case: int(number) for case, number in due.items()},
        hit={case: int(number) for case, number in hit.items()},
        wrong_side=sum(any(side in say(finding).culprit for side in WRONG_SIDES) for _, finding in found),
        alarms=[f"{log}: {alarm(each)}" for log, each in found if not _explained(each, truths[log])],
    )


def _transfers(findings: Iterable[Any]) -> set[str]:
    return {transfer for finding in findings for transfer in finding.transfers}


def _explained(finding: Any, truth: _Truth) -> bool:
    transfers = _transfers([finding])
    match finding.kind:
        case "load_failed":
            return bool(transfers) and transfers <= truth.failed
        case "leak":
            return bool(transfers) and (truth.killed or transfers <= truth.expired)
        case "stall" | "missing_ranks":
            return truth.killed
        case "late_event":
            return truth.late
        case _:
            return finding.kind == "torn_log" and truth.killed


def _planned(plan: Any) -> list[str]:
    """Return the kinds of fault that a plan has."""
    from tools.sim.pd import plan as pl

    found = {getattr(each, "fault", "") for each in plan.decisions}
    found |= {"die"} if any(isinstance(each, pl.Die) for each in plan.decisions) else set()
    return [kind for kind in pl.FAULTS if kind in found]


def table(scores: Sequence[PdScore]) -> str:
    """Return the table of what there was to find and what was found, and which faults the runs had."""
    from tools.sim.pd.plan import FAULTS

    rows: list[list[object]] = []
    for name, group in (
        ("all faults", [each for each in scores if each.faults]),
        ("no fault but clients that go away", [each for each in scores if not each.faults]),
    ):
        events = f"{sum(each.events for each in group):,}"
        wrong, alarms = sum(each.wrong_side for each in group), sum(len(each.alarms) for each in group)
        rows.append([f"{len(group)} x {name}", events, *hits(group, CASES), wrong, alarms])
    runs = ", ".join(f"{fault} {sum(fault in each.faults for each in scores)}" for fault in dict.fromkeys(FAULTS))
    head = ["runs", "events", *CASES, "wrong side", "false alarms"]
    return f"{common.table(head, rows)}\n\nRuns by fault: {runs}."
