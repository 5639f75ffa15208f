"""Judges the verdicts by runs of the simulator, where the truth is known: what was found, missed, and made up.

    python tools/score.py [--seeds 0:500] [--steps 300] [--canary-seeds 0:40] [--write]

Every run's log is replayed by the verdicts alone, and compared with what the simulator knows and the log does not say:
which jobs and loads never settled, which keys hold the KV of another prefix, which reports were broken, whether the
engine died. With `--write`, the table goes to docs/score-simulator.md. It takes about a second a run.
"""

import argparse
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec

PAGE = Path(__file__).parent.parent / "docs" / "score-simulator.md"

NOTHING = frozenset({"nothing"})
"""A kind of failed check that does not exist: runs go on to their end, whatever the simulator's own checks say."""

LONG_ENOUGH_STEPS = 150
"""What is open for less when the log ends is in flight for all that a log can say."""

CASES = (
    "unsettled job",
    "unsettled load",
    "poisoned key",
    "broken report",
    "late answer",
    "failed load",
    "engine died",
)


_READ_FOR_JOB = re.compile(r"reads block \d+ for (?:job (\d+))")
"""What the simulator says of a put that touches a block of somebody else."""


class Truth(msgspec.Struct):
    """What a run did, as the simulator knows it.

    Attributes:
        jobs, loads: what was open at the end for long enough; the loads by request.
        open_jobs, open_loads: all that was open at the end.
        poisoned: keys that were stored with the KV of another prefix.
        waiting: requests that had not ended.
        misread: store jobs for which a rank read a block that had been given to somebody else.
        gave_away: whether blocks were given up while somebody might use them.
    """

    ended: str
    jobs: list[int]
    loads: list[str]
    open_jobs: list[int]
    open_loads: list[str]
    poisoned: list[str]
    broken_reports: int
    late_answers: int
    failed_loads: int
    misread: list[int]
    gave_away: bool
    waiting: list[str]
    faults: list[str]


class Score(msgspec.Struct):
    """How the verdicts did in one run.

    Attributes:
        due, hit: by case, how much there was to find, and how much was found.
        alarms: findings that nothing in the truth explains.
    """

    seed: int
    name: str
    events: int
    faults: list[str]
    due: dict[str, int]
    hit: dict[str, int]
    alarms: list[str]
    misses: list[str]


def play(seed: int, steps: int, canary_name: str) -> tuple[Truth, list[Any]]:
    """Run a seed, and return the truth and the events of its log."""
    from connector.recording_store import key_hash
    from ledger import events as ev
    from tools.sim import plan as pl
    from tools.sim.canaries import canary
    from tools.sim.engine import quiet
    from tools.sim.run import Run

    quiet()
    alter = None
    plan = pl.draw(seed, steps)
    if canary_name:
        plan, alter = canary(canary_name).plan(seed, steps), canary(canary_name).alter
    run = Run(plan, only=NOTHING, keep_log=True, alter=alter)
    checks = run.world.checks
    poisoned: dict[str, None] = {}
    wrong_content: list[str] = []
    wrong_owner: list[str] = []
    note_stored, note_failed = checks.stored, checks.fail

    def fail(kind: str, detail: str) -> None:
        if kind == "poison":
            wrong_content.append(detail)
        elif kind == "ownership":
            wrong_owner.append(detail)
        note_failed(kind, detail)

    def stored(rank: int, item: Any, key: str, *rest: Any) -> None:
        before = len(wrong_content)
        note_stored(rank, item, key, *rest)
        if len(wrong_content) > before:
            poisoned[key_hash(key)] = None

    checks.fail, checks.stored = fail, stored  # type: ignore[method-assign]
    result = run.play()
    decode = msgspec.json.Decoder(ev.AnyEvent).decode
    events = [decode(line) for line in result.lines]
    last_step = max((event.step for event in events), default=0)
    began = {event.job: event.step for event in events if isinstance(event, ev.JobRegistered)}
    asked = {event.request: event.step for event in events if isinstance(event, ev.LoadPlanned)}
    book = run.world.engine.books.state.book
    open_jobs = sorted({*checks.jobs, *book.jobs})
    open_loads = sorted({*checks.loads, *book.loading})
    truth = Truth(
        ended=result.ended,
        jobs=[job for job in open_jobs if last_step - began.get(job, last_step) >= LONG_ENOUGH_STEPS],
        loads=[load for load in open_loads if last_step - asked.get(load, last_step) >= LONG_ENOUGH_STEPS],
        open_jobs=open_jobs,
        open_loads=open_loads,
        poisoned=list(poisoned),
        # A mistake that swallows a broken report leaves nothing in the log to find: what counts is what was recorded.
        broken_reports=sum(isinstance(event, ev.InvariantViolated) for event in events),
        late_answers=sum(isinstance(event, ev.ReportIgnored) for event in events),
        misread=sorted({int(job) for detail in wrong_owner for job in _READ_FOR_JOB.findall(detail)}),
        waiting=sorted(run.world.engine.scheduler.requests),
        gave_away=canary_name in ("first-failure", "by-request") or bool(wrong_owner),
        failed_loads=sum(isinstance(event, ev.LoadSettled) and event.outcome == "failed" for event in events),
        faults=sorted({type(each).__name__.lower() for each in plan.decisions} - {"arrive", "abort", "reset"}),
    )
    return truth, events


def score(seed: int, steps: int, canary_name: str) -> Score:
    """Run a seed, replay its log, and compare."""
    from ledger.blast import blast_radius
    from ledger.replay import replay

    truth, events = play(seed, steps, canary_name)
    result = replay(events)
    findings = result.findings
    held = [finding for finding in findings if finding.kind in ("leak", "stall", "missing_ranks")]
    named_jobs = {job for finding in held for job in finding.jobs}
    named_loads = {request for finding in held for request in finding.requests}
    tainted = {entry["key"] for finding in findings for entry in finding.facts.get("tainted", ())}
    for job in {job for finding in findings if finding.kind == "poison" for job in finding.jobs}:
        radius = blast_radius([events.__iter__], job)
        tainted.update(radius.derived if radius is not None else ())
    kinds = {finding.kind for finding in findings}
    due: dict[str, int] = {
        "unsettled job": len(truth.jobs),
        "unsettled load": len(truth.loads),
        "poisoned key": len(truth.poisoned),
        "broken report": bool(truth.broken_reports),
        "late answer": bool(truth.late_answers),
        "failed load": bool(truth.failed_loads),
        "engine died": truth.ended in ("died", "violation"),
    }
    hit: dict[str, int] = {
        "unsettled job": len(named_jobs.intersection(truth.jobs)),
        "unsettled load": len(named_loads.intersection(truth.loads)),
        "poisoned key": len(tainted.intersection(truth.poisoned)),
        "broken report": due["broken report"] and bool(kinds & {"over_report", "stale_completion", "double_free"}),
        "late answer": due["late answer"] and "late_event" in kinds,
        "failed load": due["failed load"]
        and bool(kinds & {"load_failed", "evicted_before_load", "lost_store", "retry_loop"}),
        "engine died": due["engine died"] and "torn_log" in kinds,
    }
    return Score(
        seed,
        canary_name or "all faults",
        len(events),
        truth.faults,
        {case: int(number) for case, number in due.items()},
        {case: int(number) for case, number in hit.items()},
        [f"{each.kind} ({each.certainty}): {each.title}" for each in findings if not _explained(each, truth)],
        [case for case in CASES if hit[case] < due[case]],
    )


def _explained(finding: Any, truth: Truth) -> bool:
    """Return whether something in the truth is what a finding says."""
    match finding.kind:
        case "leak" | "stall" | "missing_ranks":
            if finding.jobs:
                return set(finding.jobs) <= set(truth.open_jobs)
            nothing_open = not finding.ranks and not finding.blocks
            there = truth.waiting if nothing_open else truth.open_loads
            return not set(there).isdisjoint(finding.requests)
        case "poison":
            # By ownership: the block was another's when it was read. What that one had written may be the very same
            # KV, if both share the prefix up to there.
            return not set(finding.jobs) or set(finding.jobs) <= set(truth.misread) or finding.certainty != "proven"
        case "over_report" | "stale_completion" | "double_free":
            return truth.broken_reports > 0 or finding.kind == "stale_completion"
        case "late_event":
            return truth.late_answers > 0
        case "load_failed" | "evicted_before_load" | "lost_store" | "retry_loop":
            return truth.failed_loads > 0
        case "torn_log":
            return truth.ended in ("died", "violation", "broken")
        case _:
            return finding.kind in ("early_free", "broken_rule") and truth.gave_away


def _score_one(work: tuple[int, int, str]) -> Score:
    return score(*work)


def table(scores: Iterable[Score]) -> str:
    """Return the table of what there was to find and what was found."""
    by_name: dict[str, list[Score]] = {}
    for each in scores:
        by_name.setdefault(each.name, []).append(each)
    lines = [f"| runs | events | {' | '.join(CASES)} | false alarms |", f"|---|---|{'---|' * len(CASES)}---|"]
    for name, group in by_name.items():
        cells = [
            f"{sum(each.hit[case] for each in group)} of {sum(each.due[case] for each in group)}" for case in CASES
        ]
        alarms = sum(len(each.alarms) for each in group)
        lines.append(
            f"| {len(group)} x {name} | {sum(each.events for each in group):,} | {' | '.join(cells)} | {alarms} |"
        )
    return "\n".join(lines)


HEAD = """# How well the verdicts do on simulated engines

<!-- Written by `python tools/score.py --write`. -->

Runs of the simulator on vLLM's real scheduler, with every kind of fault, and with the known mistakes of its canaries
switched on. The verdicts see the log alone; the simulator knows what really happened. Each cell says how much of that
was found. *False alarms* are findings that nothing which happened explains.
"""


def _range(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=_range, default=range(500), help="seeds with all faults, first:last")
    parser.add_argument("--canary-seeds", type=_range, default=range(40), help="seeds for each known mistake")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="write docs/score-simulator.md")
    options = parser.parse_args()
    from tools.sim.canaries import CANARIES

    work = [(seed, options.steps, "") for seed in options.seeds]
    work += [(seed, options.steps, each.name) for each in CANARIES for seed in options.canary_seeds]
    started_s = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        scores = pool.map(_score_one, work, chunksize=4)
    for each in scores:
        for alarm in each.alarms:
            print(f"seed {each.seed}, {each.name}: false alarm: {alarm}")
    missed = Counter((each.name, case) for each in scores for case in each.misses)
    for (name, case), number in missed.items():
        seeds = [each.seed for each in scores if each.name == name and case in each.misses]
        print(f"{name}: missed in {number} runs: {case}, e.g. seeds {seeds[:8]}")
    print(table(scores))
    print(f"{len(scores)} runs in {time.perf_counter() - started_s:.0f} s")
    if options.write:
        PAGE.write_text(f"{HEAD}\n{table(scores)}\n")
    return 1 if any(each.alarms for each in scores) else 0


if __name__ == "__main__":
    sys.exit(main())
