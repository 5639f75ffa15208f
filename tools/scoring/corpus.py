"""How well the verdicts do on the corpus: every log replayed, and what was found compared with what must be found."""

from collections.abc import Sequence

from ledger.report.wording import say
from ledger.verdicts.base import Finding
from tests.incidents.corpus import INCIDENTS, Expected, Incident
from tools.scoring import common
from tools.scoring.common import DOCS, replay_together, said, total

PAGE = DOCS / "score.md"

HEAD = """# How well the verdicts do

<!-- Written by `python tools/score.py corpus --write`; a test fails when this page and the code disagree. -->

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


class Row(common.Row, kw_only=True):
    """The score of one incident."""

    incident: Incident


def mismatch(expected: Expected, log: str, finding: Finding) -> str:
    """Return what a finding does not name as it must; empty if all is right."""
    wrong = [
        f"{name} {getattr(finding, name)}, not {wanted}"
        for name in ("jobs", "ranks", "requests", "blocks")
        if (wanted := getattr(expected, name)) is not None and not _named(name, finding, wanted)
    ]
    wrong += [f"log {log}, not {expected.log}"] if log != expected.log else []
    wrong += [f"does not say '{words}'" for words in expected.says if words not in said(finding)]
    return "; ".join(wrong)


def _named(name: str, finding: Finding, wanted: tuple[object, ...]) -> bool:
    found = getattr(finding, name)
    # Requests that suffer with the culprit's are named too.
    return set(wanted) <= set(found) if name == "requests" else tuple(wanted) == tuple(found)


def score(incident: Incident) -> Row:
    """Return the score of an incident."""
    row = Row(incident=incident, found=replay_together(incident.logs()), due=len(incident.expected))
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


def scores() -> list[Row]:
    """Return the score of every incident."""
    return [score(incident) for incident in INCIDENTS]


def page(rows: Sequence[Row]) -> str:
    """Return docs/score.md."""
    lines: list[list[object]] = []
    for row in rows:
        incident = row.incident
        finds = ", ".join(
            f"`{each.kind}`{'' if each.certainty == 'proven' else f' ({each.certainty})'}" for each in incident.expected
        )
        about = [incident.id, incident.title, incident.source]
        lines.append([*about, finds or "nothing", *row.cells(), row.false_alarms])
    whole = total(rows)
    lines.append([None, "**all**", None, f"{whole.due} findings", *whole.cells(), whole.false_alarms])
    head = ["id", "incident", "source", "must find", "verdict", "culprit", "false alarms"]
    return f"{HEAD}\n{common.table(head, lines)}\n"
