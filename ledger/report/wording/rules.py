"""The words that all kinds of broken rules share, and those of rules by which blocks were freed too early."""

from ledger import events as ev
from ledger.report.wording.words import Clause, Words, of, of_doubt
from ledger.state.invariants import SEND_OVER_EARLY
from ledger.verdicts.base import Finding
from ledger.verdicts.shared.rules import BeginningLost, FreedEarly, RuleBroken


def broken(facts: RuleBroken, what: str, advice: str = "", impact: tuple[Clause, ...] = ()) -> Words:
    """Return what is said of a broken rule.

    Args:
        what: what is wrong, as the title says it first.
        advice: what to do next.
        impact: who may suffer from it.
    """
    return Words(
        title=f"{what}{_event(facts)}{_times(facts)}",
        culprit=f"{_who(facts)}, which broke the rule {facts.rule} at event {facts.event.seq}",
        advice=advice,
        impact=impact,
    )


def of_rank(facts: RuleBroken) -> str:
    """Return whose report it was: ` from rank 0`; empty if the event does not say, or if it was no report."""
    return f" from rank {facts.rank}" if facts.is_report and facts.rank >= 0 else ""


def _event(facts: RuleBroken) -> str:
    """Return the event that broke it. Where the engine noticed it, the detail says all."""
    if isinstance(facts.event, ev.InvariantViolated):
        return ""
    return f" (event {facts.event.seq}: {facts.event.sentence()})"


def _times(facts: RuleBroken) -> str:
    return f" ({facts.times:,} times in all)" if facts.times > 1 else ""


def _who(facts: RuleBroken) -> str:
    """Return whose act broke the rule, as far as the event says: who is at fault is not in it."""
    if facts.is_report and facts.rank >= 0:
        return f"a report from rank {facts.rank}"
    source = facts.event.source
    return "something the scheduler did" if source == ev.SCHEDULER else f"something {source} did"


@of(FreedEarly)
def _freed_early(finding: Finding, facts: FreedEarly) -> Words:
    after = f"after event {facts.event.seq}"
    if facts.rule == SEND_OVER_EARLY.name:
        impact = f"what is sent as {''.join(finding.transfers[:1])} {after} may be KV of another request"
    else:
        impact = f"whoever gets these blocks {after} may have wrong KV in them"
    return broken(
        facts,
        f"blocks were freed too early: {facts.detail}",
        advice=(
            "Do not trust the output of who got the blocks since (`kvledger blame FILE G:B` names them), and reset the "
            "prefix cache. The fault is in the connector that freed them: report it with this file."
        ),
        impact=(impact,),
    )


@of_doubt(BeginningLost)
def _beginning_lost(doubt: BeginningLost) -> str:
    return f"events of the scheduler are lost at event {doubt.gap.seq}, and what is missing here may be among them"
