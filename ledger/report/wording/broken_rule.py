"""The words of `broken_rule`."""

from ledger.report.wording.rules import broken
from ledger.report.wording.words import Words, of
from ledger.verdicts.base import Finding
from ledger.verdicts.shared.rules import RuleBroken


@of(RuleBroken)
def _broken(finding: Finding, facts: RuleBroken) -> Words:
    return broken(
        facts,
        facts.detail,
        advice="The engine's books are wrong: keep the file, restart the engine, and report it with the file.",
    )
