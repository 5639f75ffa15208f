"""What all scores share: what must be found, what was found, how it is counted, and how a table is written."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ledger import events as ev
from ledger.replay.case import LogResult, in_time
from ledger.replay.fold import Replay, Result
from ledger.replay.join import join
from ledger.report.wording import say
from ledger.verdicts.base import Finding

DOCS = Path(__file__).parents[2] / "docs"

Found = list[tuple[str, Finding]]
"""Findings, each with the name of its log."""


class Must(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that a replay must have.

    Attributes:
        log: the engine whose log must show it; empty for any.
        ranks, requests: those that it must name; None for any.
        says: words that its title and culprit must contain: the finding names the cause.
    """

    kind: str
    certainty: str = "proven"
    log: str = ""
    ranks: tuple[int, ...] | None = None
    requests: tuple[str, ...] | None = None
    says: tuple[str, ...] = ()


class Row(msgspec.Struct, kw_only=True):
    """The score of one incident or run, of which it is known what must be found.

    Attributes:
        due: findings that there had to be.
        verdict: how many of them were there.
        culprit: how many of these named the right cause.
        false_alarms: findings beside those.
        problems: all that is not as it must be, a line each.
    """

    found: Found
    due: int = 0
    verdict: int = 0
    culprit: int = 0
    false_alarms: int = 0
    problems: list[str] = []

    def cells(self) -> list[str]:
        """Return verdict and culprit, each of how many."""
        return [f"{self.verdict} of {self.due}", f"{self.culprit} of {self.due}"]


def total(rows: Sequence[Row]) -> Row:
    """Return the sum of several rows, without what was found."""
    return Row(
        found=[],
        due=sum(row.due for row in rows),
        verdict=sum(row.verdict for row in rows),
        culprit=sum(row.culprit for row in rows),
        false_alarms=sum(row.false_alarms for row in rows),
    )


class RunScore(msgspec.Struct, kw_only=True):
    """How the verdicts did in one simulated run.

    Attributes:
        name: the kind of run.
        faults: kinds of fault in it.
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

    @property
    def misses(self) -> list[str]:
        """The cases of which something was not found."""
        return [case for case, due in self.due.items() if self.hit[case] < due]


def hits(scores: Sequence[RunScore], cases: Iterable[str]) -> list[str]:
    """Return for each case how much was found, and of how much."""
    return [f"{sum(each.hit[case] for each in scores)} of {sum(each.due[case] for each in scores)}" for case in cases]


def alarm(finding: Finding) -> str:
    """Return a finding in one line."""
    return f"{finding.kind} ({finding.certainty}): {say(finding).title}"


def said(finding: Finding) -> str:
    """Return the words of a finding in which its cause is looked for."""
    return f"{say(finding).title}; {say(finding).culprit}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table of Markdown. A cell that is None has nothing to say, as in a row of sums."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += ["|" + "".join(" |" if cell is None else f" {cell} |" for cell in row) for row in rows]
    return "\n".join(lines)


def replay_together(logs: dict[str, list[ev.AnyEvent]], endings: dict[str, str] | None = None) -> Found:
    """Return the findings of several logs as `kvledger replay` gives them, each with the name of its log."""
    names = list(logs)
    results: list[Result] = [Replay().feed(logs[name]).result((endings or {}).get(name, "torn")) for name in names]
    readers = [logs[name].__iter__ for name in names]
    joined = join(results, [f"{name}.db" for name in names], readers)
    log_results = [
        LogResult(Path(f"{name}.db"), False, {}, result) for name, result in zip(names, results, strict=True)
    ]
    return [(names[index], finding) for index, finding in in_time(log_results, joined.findings)]
