"""Findings whose verdict still words them itself."""

from ledger.report.wording.words import Words, of
from ledger.verdicts.base import Finding, Told


@of(Told)
def _told(finding: Finding, facts: Told) -> Words:
    return Words(
        title=facts.title,
        culprit=facts.culprit,
        advice=facts.advice,
        doubt=facts.doubt,
        brief=facts.brief,
        shown=facts.shown,
        inferred=facts.inferred,
        notes=facts.notes,
        other_log=facts.other_log,
        also=facts.also,
        impact=facts.impact,
    )
