"""How well the verdicts do on real engines: what a replay of each run found, compared with what was done to the engine.

What was done, and what must be found, stands in `tests/engine/expected.py`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from connector.store.recording_store import key_hash
from ledger import events as ev
from ledger.file.read import open_log
from ledger.replay.case import replay_files
from ledger.report.wording import say
from ledger.verdicts.base import Finding
from tests.engine.conftest import Run, run_scenario
from tests.engine.expected import Must, Replayed, Scenario
from tools.scoring import common
from tools.scoring.common import DOCS, alarm, said, total

PAGE = DOCS / "score-engine.md"

TOO_FAST = "the run was not slow enough to poison a key"


class Row(common.Row, kw_only=True):
    """The score of one run.

    Attributes:
        versions: of what the engines ran.
        keys: for poison, how many keys were wrong, and how many were named.
    """

    scenario: Scenario
    events: int = 0
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    keys: tuple[int, int] | None = None


def replayed(run: Run, others: dict[str, Run]) -> Replayed:
    """Return what the logs of a run say, replayed together as `kvledger replay` does."""
    paths = run.logs
    events: dict[str, list[ev.AnyEvent]] = {}
    names: list[str] = []
    for path in paths:
        with open_log(path) as log:
            told = list(log.events())
        name = told[0].engine if isinstance(told[0], ev.LogOpened) else path.name
        names.append(name)
        events[name] = told
    found = [(names[index], finding) for index, finding in replay_files(paths).findings]
    return Replayed(run, found, events, others)


def score(scenario: Scenario, run: Run, others: dict[str, Run]) -> Row:
    """Return the score of a run.

    Args:
        others: by name, the runs that the scenario's truth is read from.
    """
    seen = replayed(run, others)
    opened = [events[0] for events in seen.events.values() if isinstance(events[0], ev.LogOpened)]
    row = Row(scenario=scenario, found=seen.found, events=sum(map(len, seen.events.values())))
    row.versions = {name: version for each in opened for name, version in each.versions.items()}
    left = list(seen.found)
    for must in scenario.must:
        row.due += 1
        candidates = [each for each in left if _is_the_verdict(must, each)]
        if must.keys is not None:
            chosen = candidates
        else:
            candidates.sort(key=lambda each: len(mismatches(must, [each[1]], seen, row)))
            chosen = candidates[:1]
        if not chosen:
            nothing_there = must.keys is not None and not must.keys(seen, ())[0]
            row.problems.append(TOO_FAST if nothing_there else f"missed: {must}")
            continue
        row.verdict += 1
        left = [each for each in left if not any(each is other for other in chosen)]
        wrong = mismatches(must, [finding for _, finding in chosen], seen, row)
        row.culprit += not wrong
        row.problems += [f"{must}: {each}" for each in wrong]
    row.false_alarms = len(left)
    row.problems += [f"false alarm in {log}: {alarm(finding)}; {say(finding).culprit}" for log, finding in left]
    return row


def _is_the_verdict(must: Must, found: tuple[str, Finding]) -> bool:
    log, finding = found
    return (
        finding.kind == must.kind
        and must.certainty in ("any", finding.certainty)
        and must.log in ("", log)
        and (must.code is None or finding.code == must.code)
    )


def mismatches(must: Must, findings: Sequence[Finding], seen: Replayed, row: Row) -> list[str]:
    """Return what the findings do not name as they must."""
    wrong: list[str] = []
    requests = {request for finding in findings for request in finding.requests}
    wrong += [
        f"requests {sorted(requests)}, none of them {prefix}"
        for prefix in must.requests
        if not any(request == prefix or request.startswith(prefix + "-") for request in requests)
    ]
    for finding in findings:
        if must.ranks is not None and tuple(finding.ranks) != must.ranks:
            wrong.append(f"ranks {list(finding.ranks)}, not {list(must.ranks)}")
        text = said(finding)
        wrong += [f"does not say '{words}', but '{text}'" for words in must.says if words not in text]
        wrong += [f"sends to the wrong side: '{text[text.index(words) :]}'" for words in must.denies if words in text]
    if must.struck:
        struck = {key_hash(key) for key in seen.run.result["struck"][must.struck]}
        named = {key for finding in findings for key, _ in finding.missing_keys}
        if struck != named:
            wrong.append(f"names the keys {sorted(named)}, and {sorted(struck)} were struck")
    if must.keys is not None:
        truth, named = must.keys(seen, findings)
        row.keys = len(truth), len(named & truth)
        if truth != named:
            wrong.append(
                f"of {len(truth)} wrong keys {sorted(truth - named)} are not named; "
                f"{sorted(named - truth)} are named and right"
            )
        if not truth:
            wrong.append(TOO_FAST)
    return wrong


# --- the page ---------------------------------------------------------------------------------------------------------

HEAD = """# How well the verdicts do on real engines

<!-- Written by `python tools/score.py engine --write`; a test fails when this page and the code disagree. -->

The scenarios of `tests/engine/`: real vLLM on a CPU, real Mooncake over TCP on loopback, a tiny model with dummy
weights. Each is run, something is done to it from outside, and the logs that it leaves are replayed together.
*Verdict* counts findings whose kind, certainty, code and engine are right. *Culprit* counts those that also name the
right requests, ranks, keys and cause. *False alarms* counts every other finding.
"""

FOOT = """
What was done to an engine is the truth here, not what its log says: the keys that were removed or changed are noted by
the second client that did it, and which keys are poisoned is told by their bytes in the store, compared with those of
the clean run. In the guarded run the poisoned keys are gone from the store, so there the fingerprints that the worker
took of its own memory are the truth, and the keys are those that the replay names without having been told of them.

What this says, and what not. What must be found was written by this project, beside the verdicts, and the faults are
those that its tests can make: one run of each scenario, on one machine, with one version of vLLM. So it shows that
verdicts which hold on [scripted logs](score.md) and in [simulation](score-simulator.md) also hold on what real engines
write, and that healthy runs with preemptions, aborts and several ranks stay silent. It says little about how often a
verdict would be wrong in production, and nothing about accelerators, RDMA, or many engines.

The tests of fingerprints and of the receive thread (`test_integrity.py`, `test_load_thread.py`) drive parts of a worker
and leave no log, so they have no row.
"""


PROBLEM_LENGTH = 240


def cells(scenario: Scenario) -> list[str]:
    """Return the cells of a scenario's row that no run can change."""
    return [scenario.name, scenario.done, ", ".join(map(str, scenario.must)) or "nothing"]


def page(rows: Sequence[Row]) -> str:
    """Return docs/score-engine.md."""
    lines = [HEAD]
    versions = {name: version for row in rows for name, version in row.versions.items()}
    lines.append(f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}.\n")
    table: list[list[object]] = []
    for row in rows:
        verdict, culprit = row.cells()
        keys = f" ({row.keys[1]} of {row.keys[0]} keys)" if row.keys is not None else ""
        table.append([*cells(row.scenario), f"{row.events:,}", verdict, culprit + keys, row.false_alarms])
    whole = total(rows)
    events = f"{sum(row.events for row in rows):,}"
    table.append(["**all**", None, f"{whole.due} findings", events, *whole.cells(), whole.false_alarms])
    head = ["scenario", "what was done to it", "must find", "events", "verdict", "culprit", "false alarms"]
    lines.append(common.table(head, table))
    problems = [f"* {row.scenario.name}: {_cut(problem)}" for row in rows for problem in row.problems]
    if problems:
        lines += ["", "What was not as it must be:", "", *problems]
    return "\n".join(lines) + "\n" + FOOT


def _cut(problem: str) -> str:
    return problem if len(problem) <= PROBLEM_LENGTH else f"{problem[: PROBLEM_LENGTH - 3].rstrip()}..."


def run_all(folder: Path, scenarios: Sequence[Scenario]) -> list[Row]:
    """Run scenarios for real, those that have not left a result in `folder` yet, and return their scores."""
    runs: dict[str, Run] = {}
    for scenario in scenarios:
        own = folder / scenario.name
        result = own / "result.json"
        if result.exists():
            runs[scenario.name] = Run(json.loads(result.read_text()), own)
            continue
        own.mkdir(parents=True, exist_ok=True)
        print(f"{scenario.name} ...", file=sys.stderr, flush=True)
        left = run_scenario(f"tests.engine.{scenario.module}", scenario.name, own, scenario.timeout_s)
        runs[scenario.name] = Run(left, own)
    return [
        score(scenario, runs[scenario.name], {name: runs[name] for name in scenario.beside}) for scenario in scenarios
    ]
