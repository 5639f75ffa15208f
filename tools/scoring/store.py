"""How well the verdicts do on simulated engines with the store connector: what was found, missed, and made up.

Every run's log is replayed by the verdicts alone, and compared with what the simulator knows and the log does not say:
which jobs and loads never settled, which keys hold the KV of another prefix, which reports were broken, whether the
engine died. It takes about a second a run.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from tools.scoring import common
from tools.scoring.common import RunScore, alarm, hits

NOTHING = frozenset({"nothing"})
"""A kind of failed check that does not exist: runs go on to their end, whatever the simulator's own checks say."""

LONG_ENOUGH_STEPS = 150
"""What is open for less when the log ends is in flight for all that a log can say."""

ALL_FAULTS = "all faults"

CASES = (
    "unsettled job",
    "unsettled load",
    "poisoned key",
    "broken rule",
    "late answer",
    "failed load",
    "engine died",
    "other state",
)
"""What there may be to find in a run. `other state`: the engine's state is not what its log folds to."""

GIVING_AWAY = frozenset({"pins-off", "by-request", "first-failure", "first-rank"})
"""Mistakes by which blocks are given up while somebody may use them."""

BROKEN_RULES = frozenset({"over_report", "stale_completion", "double_free", "broken_rule"})
"""What a broken rule is called, by which rule it is."""

HELD = frozenset({"leak", "stall", "missing_ranks"})
FAILED_LOADS = frozenset({"load_failed", "evicted_before_load", "lost_store", "retry_loop"})

_READ_FOR_JOB = re.compile(r"reads block \d+ for (?:job (\d+))")
"""What the simulator says of a put that touches a block of somebody else."""


class Truth(msgspec.Struct):
    """What a run did, as the simulator knows it.

    Attributes:
        jobs, loads: what was open at the end for long enough; the loads by request.
        open_jobs, open_loads: all that was open at the end.
        poisoned: keys that were stored with the KV of another prefix.
        waiting: requests that had not ended.
        broken_rules: broken rules of the book that the engine recorded.
        misread: store jobs for which a rank read a block that had been given to somebody else.
        gave_away: whether blocks were given up while somebody might use them.
        other_state: whether a checkpoint was written after the state had been changed beside the log.
        faults: kinds of fault that struck.
    """

    ended: str
    jobs: list[int]
    loads: list[str]
    open_jobs: list[int]
    open_loads: list[str]
    poisoned: list[str]
    broken_rules: int
    late_answers: int
    failed_loads: int
    misread: list[int]
    gave_away: bool
    waiting: list[str]
    other_state: bool
    faults: list[str]


class StoreScore(RunScore, kw_only=True):
    """How the verdicts did in one run.

    Attributes:
        proven, suspected: keys that are proven to hold the KV of another request, or suspected to do so (or were stored
            by a job whose blocks were freed early), and hold what they should.
    """

    proven: int
    suspected: int


def play(seed: int, steps: int, canary_name: str) -> tuple[Truth, list[Any]]:
    """Run a seed, and return the truth and the events of its log."""
    from connector.store.recording_store import key_hash
    from ledger import events as ev
    from tools.sim.engines import quiet
    from tools.sim.store import plan as pl
    from tools.sim.store.canaries import BY_NAME
    from tools.sim.store.run import Run

    quiet()
    alter = None
    plan = pl.draw(seed, steps)
    if canary_name:
        plan, alter = BY_NAME[canary_name].plan(seed, steps), BY_NAME[canary_name].alter
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
    events = [decode(line) for lines in result.lines.values() for line in lines]
    last_step = max((event.step for event in events), default=0)
    began = {event.job: event.step for event in events if isinstance(event, ev.JobRegistered)}
    asked = {event.request: event.step for event in events if isinstance(event, ev.LoadPlanned)}
    book = run.world.engine.ledger.state.book
    open_jobs = sorted({*checks.jobs, *book.jobs})
    open_loads = sorted({*checks.loads, *book.loading})
    truth = Truth(
        ended=result.ended,
        jobs=[job for job in open_jobs if last_step - began.get(job, last_step) >= LONG_ENOUGH_STEPS],
        loads=[load for load in open_loads if last_step - asked.get(load, last_step) >= LONG_ENOUGH_STEPS],
        open_jobs=open_jobs,
        open_loads=open_loads,
        poisoned=list(poisoned),
        # A mistake that swallows a broken rule leaves nothing in the log to find: what counts is what was recorded.
        broken_rules=sum(isinstance(event, ev.InvariantViolated) for event in events),
        late_answers=sum(isinstance(event, ev.ReportIgnored) for event in events),
        misread=sorted({int(job) for detail in wrong_owner for job in _READ_FOR_JOB.findall(detail)}),
        waiting=sorted(run.world.engine.scheduler.requests),
        gave_away=canary_name in GIVING_AWAY or bool(wrong_owner),
        failed_loads=sum(isinstance(event, ev.LoadSettled) and event.outcome == "failed" for event in events),
        other_state=canary_name == "beside-the-log" and _has_checkpoint_after(events, ev.RankCompleted),
        faults=_struck(plan, run),
    )
    return truth, events


def _has_checkpoint_after(events: Iterable[Any], kind: type[Any]) -> bool:
    from ledger import events as ev

    seen = False
    for event in events:
        seen = seen or isinstance(event, kind)
        if seen and isinstance(event, ev.Checkpoint):
            return True
    return False


def _struck(plan: Any, run: Any) -> list[str]:
    """Return the kinds of fault that struck in a run, in the order of `FAULTS`.

    A call's fault strikes only if there is such a call. What has a moment of its own strikes if the run came so far.
    """
    from tools.sim.store import plan as pl

    struck = {name.partition(" ")[0] for name in run.world.faults.hits}
    executed = run.world.engine.executed
    timed = {pl.Stray: "stray", pl.Stall: "stall", pl.Pressure: "pressure"}
    struck |= {timed[type(each)] for each in plan.decisions if type(each) in timed and each.step <= executed}
    seen = run.world.checks.seen
    struck |= {"die"} if seen.get("ranks died") else set()
    struck |= {"lose"} if seen.get("messages lost") else set()
    struck |= {"evict"} if run.world.store.evictions else set()
    return [kind for kind in pl.FAULTS if kind in struck]


def score(seed: int, steps: int, canary_name: str) -> StoreScore:
    """Run a seed, replay its log, and compare."""
    from ledger.queries.blast_radius import blast_radius
    from ledger.replay.fold import replay

    truth, events = play(seed, steps, canary_name)
    result = replay(events)
    findings = result.findings
    held = [finding for finding in findings if finding.kind in HELD]
    named_jobs = {job for finding in held for job in finding.jobs}
    named_loads = {request for finding in held for request in finding.requests}
    named = [entry for finding in findings for entry in finding.tainted]
    proven = {entry.key for entry in named if entry.certainty == "proven" and entry.returned}
    suspected = {entry.key for entry in named}
    derived: set[str] = set()
    for kind, job in {(finding.kind, job) for finding in findings for job in finding.jobs}:
        for radius in blast_radius([events.__iter__], job) if kind in ("poison", "early_free") else ():
            derived.update(radius.derived)
            suspected.update(radius.keys if kind == "early_free" else ())
    tainted = suspected | derived
    kinds = {finding.kind for finding in findings}
    due: dict[str, int] = {
        "unsettled job": len(truth.jobs),
        "unsettled load": len(truth.loads),
        "poisoned key": len(truth.poisoned),
        "broken rule": bool(truth.broken_rules),
        "late answer": bool(truth.late_answers),
        "failed load": bool(truth.failed_loads),
        "engine died": truth.ended in ("died", "violation"),
        "other state": truth.other_state,
    }
    hit: dict[str, int] = {
        "unsettled job": len(named_jobs.intersection(truth.jobs)),
        "unsettled load": len(named_loads.intersection(truth.loads)),
        "poisoned key": len(tainted.intersection(truth.poisoned)),
        "broken rule": due["broken rule"] and bool(kinds & BROKEN_RULES),
        "late answer": due["late answer"] and "late_event" in kinds,
        "failed load": due["failed load"] and bool(kinds & FAILED_LOADS),
        "engine died": due["engine died"] and "torn_log" in kinds,
        "other state": due["other state"] and bool(result.mismatch or result.refused),
    }
    return StoreScore(
        seed=seed,
        name=canary_name or ALL_FAULTS,
        events=len(events),
        faults=truth.faults,
        due={case: int(number) for case, number in due.items()},
        hit={case: int(number) for case, number in hit.items()},
        proven=len(proven.difference(truth.poisoned)),
        suspected=len(suspected.difference(proven, truth.poisoned)),
        alarms=[alarm(each) for each in findings if not _explained(each, truth)],
    )


def _explained(finding: Any, truth: Truth) -> bool:
    """Return whether something in the truth is what a finding says."""
    kind = finding.kind
    if kind in HELD:
        if finding.jobs:
            return set(finding.jobs) <= set(truth.open_jobs)
        nothing_open = not finding.ranks and not finding.blocks
        return not set(truth.waiting if nothing_open else truth.open_loads).isdisjoint(finding.requests)
    if kind == "poison" and finding.certainty == "proven" and finding.jobs:
        # By ownership: the block was another's when it was read.
        return set(finding.jobs) <= set(truth.misread)
    if kind in BROKEN_RULES:
        return truth.broken_rules > 0
    if kind in FAILED_LOADS:
        return truth.failed_loads > 0
    if kind in ("poison", "early_free"):
        return truth.gave_away
    if kind == "late_event":
        return truth.late_answers > 0
    return kind == "torn_log" and truth.ended in ("died", "violation", "broken")


def table(scores: Iterable[StoreScore]) -> str:
    """Return the table of what there was to find and what was found."""
    by_name: dict[str, list[StoreScore]] = {}
    for each in scores:
        by_name.setdefault(each.name, []).append(each)
    rows: list[list[object]] = []
    for name, group in by_name.items():
        right = f"{sum(each.proven for each in group)} / {sum(each.suspected for each in group)}"
        events = f"{sum(each.events for each in group):,}"
        alarms = sum(len(each.alarms) for each in group)
        rows.append([f"{len(group)} x {name}", events, *hits(group, CASES), right, alarms])
    return common.table(["runs", "events", *CASES, "right keys proven / suspected", "false alarms"], rows)


def table_of_faults(scores: Iterable[StoreScore]) -> str:
    """Return, for each kind of fault, how the verdicts did in the runs in which it struck."""
    from tools.sim.store.plan import FAULTS

    rows: list[list[object]] = []
    drawn = [each for each in scores if each.name == ALL_FAULTS]
    for fault in (*FAULTS, ""):
        group = [each for each in drawn if (fault in each.faults if fault else not each.faults)]
        due, hit = sum(sum(each.due.values()) for each in group), sum(sum(each.hit.values()) for each in group)
        rows.append([fault or "none", len(group), due, hit, sum(len(each.alarms) for each in group)])
    return common.table(["fault", "runs in which it struck", "to find in these", "found", "false alarms"], rows)
