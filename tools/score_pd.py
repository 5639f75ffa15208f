"""Judges the verdicts by simulated prefills and decodes: the logs of all engines of a run, replayed together.

`tools/score.py` plays the seeds and writes the table. The truth is what the simulator did (whom it killed), and what
the engines recorded of the transfers: which pulls failed, which sends ran out of time, which answers came too late.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

CASES = ("failed pull", "expired send", "late answer", "engine killed")
"""What there may be to find: transfers, transfers, logs, logs."""

WRONG_SIDES = ("the prefill engine D", "the decode engine P")
"""What no finding may say: the engines are called P0, P1 and so on, and D."""


class PdScore(msgspec.Struct):
    """How the verdicts did in one run.

    Attributes:
        due, hit: by case, how much there was to find, and how much was found.
        wrong_side: findings that send the reader to an engine that is not of that side.
        alarms: findings that nothing in the truth explains.
        faults: kinds of fault that were planned.
    """

    seed: int
    events: int
    faults: list[str]
    due: dict[str, int]
    hit: dict[str, int]
    wrong_side: int
    alarms: list[str]
    misses: list[str]


class _Truth(msgspec.Struct):
    """What happened in one engine."""

    failed: set[str]
    expired: set[str]
    late: bool
    killed: bool


def score_pd(seed: int, steps: int) -> PdScore:
    """Play a seed, replay the logs of its engines together, and compare."""
    from ledger import events as ev
    from ledger.replay.fold import Replay
    from ledger.replay.join import join
    from tools.sim.engine import quiet
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
    names = list(logs)
    results = [Replay().feed(events).result("torn") for events in logs.values()]
    found = join(results, [f"{name}.db" for name in names], [events.__iter__ for events in logs.values()]).findings
    told = [(names[index], finding) for index, finding in found]
    due, hit = dict.fromkeys(CASES, 0), dict.fromkeys(CASES, 0)
    for engine, truth in truths.items():
        own = [finding for log, finding in told if log == engine]
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
        seed,
        sum(map(len, logs.values())),
        _planned(plan),
        due,
        hit,
        sum(any(side in finding.culprit for side in WRONG_SIDES) for _, finding in told),
        [
            f"{log}: {each.kind} ({each.certainty}): {each.title}"
            for log, each in told
            if not _explained(each, truths[log])
        ],
        [case for case in CASES if hit[case] < due[case]],
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

    lines = [
        f"| runs | events | {' | '.join(CASES)} | wrong side | false alarms |",
        f"|---|---|{'---|' * len(CASES)}---|---|",
    ]
    for name, group in (
        ("all faults", [each for each in scores if each.faults]),
        ("no fault but clients that go away", [each for each in scores if not each.faults]),
    ):
        cells = [
            f"{sum(each.hit[case] for each in group)} of {sum(each.due[case] for each in group)}" for case in CASES
        ]
        wrong, alarms = sum(each.wrong_side for each in group), sum(len(each.alarms) for each in group)
        events = sum(each.events for each in group)
        lines.append(f"| {len(group)} x {name} | {events:,} | {' | '.join(cells)} | {wrong} | {alarms} |")
    runs = {fault: sum(fault in each.faults for each in scores) for fault in FAULTS}
    return "\n".join(
        [*lines, "", f"Runs by fault: {', '.join(f'{fault} {number}' for fault, number in runs.items())}."]
    )
