"""The words of `double_free`."""

from ledger.report.wording.rules import broken
from ledger.report.wording.words import Words, of
from ledger.state.invariants import FREED_OTHER_BLOCKS
from ledger.verdicts.base import Finding
from ledger.verdicts.double_free import FreedTwice


@of(FreedTwice)
def _freed_twice(finding: Finding, facts: FreedTwice) -> Words:
    job = f"job {finding.jobs[0]}" if finding.jobs else "a job"
    other = facts.rule == FREED_OTHER_BLOCKS.name
    what = f"{job} frees blocks that it never pinned" if other else f"the blocks of {job} were to be freed twice"
    return broken(
        facts,
        f"{what}: {facts.detail}",
        advice=(
            "Treat KV of these blocks as wrong from that event on: reset the prefix cache. `kvledger blame FILE G:B` "
            "says who uses a block."
        ),
        impact=(f"whoever uses these blocks after event {facts.event.seq} may share them with another request",),
    )
