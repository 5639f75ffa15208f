"""`over_report`: a rank reported more than it owes: twice, for a job that is over, or without being asked.

A count of answers reaches zero too early by such a report, and the blocks are freed while another rank still reads
them. The books name ranks instead of counting, so they notice. When an older job of the same request waits for a report
of that rank, and none comes, it is a `stale_completion` instead.
"""

from typing import ClassVar

from ledger import events as ev
from ledger import words
from ledger.errors import Refused
from ledger.trail import End, Trail
from ledger.verdicts._ends import DOWN, is_down
from ledger.verdicts._rules import Alike, Broken, RuleVerdict, kind_of_rule
from ledger.verdicts._stale import owed_by_an_older_job


class OverReport(RuleVerdict):
    """Reports beyond what was expected."""

    kinds: ClassVar[tuple[str, ...]] = ("over_report",)
    lead: ClassVar[str] = "a report too many{}: "
    advice: ClassVar[str] = (
        "Look at the worker log of that rank at {}: which job did it really finish? Another one may still wait for "
        "this report."
    )

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._owed: dict[tuple[int, int], dict[str, Alike]] = {}
        """Reports that may be those of an older job, by that job and the rank."""

    def advise(self, first: Broken, end: End) -> str:
        """Return what to do next."""
        safe = DOWN if is_down(end) else "The blocks stay pinned, which is safe; do not free them by hand."
        held = f" {safe}" if first.blocks else ""
        return f"{self.advice.format(words.clock(first.event.ts_ns) + ' UTC')}{held}"

    def on_rank_completed(self, event: ev.RankCompleted) -> None:
        """Take the reports that were not those of an older job: it has got its own."""
        if self._owed:
            for rule, alike in self._owed.pop((event.job, event.rank), {}).items():
                self.rules.setdefault(rule, Alike()).add(alike)

    def refused(self, event: ev.Event, refusal: Refused) -> None:
        """Take what the book refused; what an older job is owed waits until that one gets its report."""
        owed = owed_by_an_older_job(self.trail, event) if isinstance(event, ev.RankCompleted) else None
        if owed is None:
            super().refused(event, refusal)
        elif isinstance(event, ev.RankCompleted) and kind_of_rule(refusal.rule, is_report=True) in self.kinds:
            waiting = self._owed.setdefault((owed.job, event.rank), {})
            self.take(event, refusal.rule, refusal.detail, is_report=True, into=waiting)
