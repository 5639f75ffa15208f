"""The words of `over_report`."""

from ledger import words
from ledger.report.wording.clauses import DOWN
from ledger.report.wording.rules import broken, of_rank
from ledger.report.wording.words import Words, of
from ledger.state.invariants import PEER_SETTLED_TWICE, RANK_LOADED_TWICE, RANK_REPORTED_TWICE, RANK_SENT_TWICE
from ledger.verdicts.base import Finding
from ledger.verdicts.over_report import ReportedTooMuch
from ledger.verdicts.shared.ends import is_down

TWICE = frozenset(rule.name for rule in (RANK_REPORTED_TWICE, RANK_LOADED_TWICE, RANK_SENT_TWICE, PEER_SETTLED_TWICE))
"""Rules that a rank breaks by reporting the same work twice."""


@of(ReportedTooMuch)
def _reported_too_much(finding: Finding, facts: ReportedTooMuch) -> Words:
    at = words.clock(facts.event.ts_ns)
    safe = "The blocks stay pinned, which is safe; do not free them by hand."
    if finding.end is not None and is_down(finding.end):
        safe = DOWN
    return broken(
        facts,
        _title(finding, facts),
        advice=(
            f"Look at the worker log of that rank at {at} UTC: which job did it really finish? Another one may still "
            f"wait for this report.{f' {safe}' if finding.blocks else ''}"
        ),
    )


def _title(finding: Finding, facts: ReportedTooMuch) -> str:
    """Return what was reported twice, if the events name it, or what the book said of the report."""
    work = _work(finding)
    if facts.rule in TWICE and facts.is_report and facts.rank >= 0 and work:
        return f"rank {facts.rank} reported {work} twice"
    return f"a report{of_rank(facts)} that nothing waits for: {facts.detail}"


def _work(finding: Finding) -> str:
    """Return the work that was reported; empty if the event names none."""
    if finding.jobs:
        return f"store job {finding.jobs[0]}"
    if finding.loads:
        return f"load {finding.loads[0]}"
    return f"transfer {finding.transfers[0]}" if finding.transfers else ""
