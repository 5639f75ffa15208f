"""How well the verdicts do: every log of the corpus replayed, and what was found compared with what it must find.

Run `python -m tests.incidents.score` to print the table, with `--write` to write docs/score.md.
"""

import sys
from pathlib import Path

import msgspec

from ledger import events as ev
from ledger.replay.case import LogResult, in_time
from ledger.replay.fold import Replay, Result
from ledger.replay.join import join
from ledger.report.wording import say
from ledger.verdicts.base import Finding
from tests.incidents.corpus import INCIDENTS, Expected, Incident

PAGE = Path(__file__).parents[2] / "docs" / "score.md"

HEAD = """# How well the verdicts do

<!-- Written by `python -m tests.incidents.score --write`; a test fails when this page and the code disagree. -->

Each public incident is told as a log in `tests/incidents/`, with the finding it must reach, and as a healthy twin that
must stay silent. *Verdict* counts findings whose kind and certainty are right, and nothing else was found. *Culprit*
counts those that also name the right jobs, ranks, blocks, requests and cause. *False alarms* counts findings in the
healthy twin.

These logs are scripted after the public reports, and what they must find was written by this project, beside the
verdicts. So the table says that the verdicts still tell these stories; it is no estimate of how they do on an incident
that nobody has seen yet. The ids are those of the list of sources that the corpus was made from, which has no S8.

The same is done with [simulated engines](score-simulator.md), where the truth is known by other means than the log, and
with [real ones](score-engine.md), to which something was done from outside.
"""


class Row(msgspec.Struct):
    """The score of one incident."""

    incident: Incident
    found: list[tuple[str, Finding]]
    verdict: int = 0
    culprit: int = 0
    false_alarms: int = 0
    problems: list[str] = []


def replay_together(
    logs: dict[str, list[ev.AnyEvent]], endings: dict[str, str] | None = None
) -> list[tuple[str, Finding]]:
    """Return the findings of several logs as `kvledger replay` gives them, each with the name of its log."""
    names = list(logs)
    results: list[Result] = [Replay().feed(logs[name]).result((endings or {}).get(name, "torn")) for name in names]
    readers = [logs[name].__iter__ for name in names]
    joined = join(results, [f"{name}.db" for name in names], readers)
    log_results = [
        LogResult(Path(f"{name}.db"), False, {}, result) for name, result in zip(names, results, strict=True)
    ]
    return [(names[index], finding) for index, finding in in_time(log_results, joined.findings)]


def mismatch(expected: Expected, log: str, finding: Finding) -> str:
    """Return what a finding does not name as it must; empty if all is right."""
    said = f"{say(finding).title}; {say(finding).culprit}"
    wrong = [
        f"{name} {getattr(finding, name)}, not {wanted}"
        for name in ("jobs", "ranks", "requests", "blocks")
        if (wanted := getattr(expected, name)) is not None and not _named(name, finding, wanted)
    ]
    wrong += [f"log {log}, not {expected.log}"] if log != expected.log else []
    wrong += [f"does not say '{words}'" for words in expected.says if words not in said]
    return "; ".join(wrong)


def _named(name: str, finding: Finding, wanted: tuple[object, ...]) -> bool:
    found = getattr(finding, name)
    # Requests that suffer with the culprit's are named too.
    return set(wanted) <= set(found) if name == "requests" else tuple(wanted) == tuple(found)


def score(incident: Incident) -> Row:
    """Return the score of an incident."""
    row = Row(incident, replay_together(incident.logs()))
    kinds = [(finding.kind, finding.certainty) for _, finding in row.found]
    wanted = [(each.kind, each.certainty) for each in incident.expected]
    if kinds == wanted:
        row.verdict = len(wanted)
    else:
        row.problems.append(f"found {kinds}, not {wanted}")
    for expected, (log, finding) in zip(incident.expected, row.found, strict=False):
        wrong = mismatch(expected, log, finding)
        if not wrong:
            row.culprit += 1
        else:
            row.problems.append(f"{finding.kind}: {wrong}")
    alarms = replay_together(incident.logs(healthy=True))
    row.false_alarms = len(alarms)
    row.problems += [f"false alarm in the healthy twin: {finding.kind}: {say(finding).title}" for _, finding in alarms]
    return row


def page(rows: list[Row]) -> str:
    """Return docs/score.md."""
    lines = [HEAD, "| id | incident | source | must find | verdict | culprit | false alarms |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        incident = row.incident
        finds = ", ".join(
            f"`{each.kind}`{'' if each.certainty == 'proven' else f' ({each.certainty})'}" for each in incident.expected
        )
        number = len(incident.expected)
        lines.append(
            f"| {incident.id} | {incident.title} | {incident.source} | {finds or 'nothing'} "
            f"| {row.verdict} of {number} | {row.culprit} of {number} | {row.false_alarms} |"
        )
    total = sum(len(row.incident.expected) for row in rows)
    lines.append(
        f"| | **all** | | {total} findings | {sum(row.verdict for row in rows)} of {total} "
        f"| {sum(row.culprit for row in rows)} of {total} | {sum(row.false_alarms for row in rows)} |"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    table = [score(incident) for incident in INCIDENTS]
    if "--write" in sys.argv:
        PAGE.write_text(page(table))
    print(page(table))
    for row in table:
        for problem in row.problems:
            print(f"{row.incident.id}: {problem}")
