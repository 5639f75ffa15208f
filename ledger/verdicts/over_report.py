"""`over_report`: a rank reported more than it owes: twice, for a job that is over, or without being asked.

A count of answers reaches zero too early by such a report, and the blocks are freed while another rank still reads
them. The books name ranks instead of counting, so they notice. When the second report can only belong to an older job
of the same request, it is a `stale_completion` instead.
"""

from typing import ClassVar

from ledger import events as ev
from ledger import words
from ledger.errors import Refused
from ledger.trail import End
from ledger.verdicts._rules import Broken, RuleVerdict
from ledger.verdicts._stale import owed_by_an_older_job


class OverReport(RuleVerdict):
    """Reports beyond what was expected."""

    kinds: ClassVar[tuple[str, ...]] = ("over_report",)
    lead: ClassVar[str] = "a report too many{}: "
    advice: ClassVar[str] = (
        "Look at the worker log of that rank at {}: which job did it really finish? Another one may still wait for "
        "this report."
    )

    def advise(self, first: Broken, end: End) -> str:
        """Return what to do next."""
        held = " The blocks stay pinned, which is safe; do not free them by hand." if first.blocks else ""
        return f"{self.advice.format(words.clock(first.event.ts_ns) + ' UTC')}{held}"

    def refused(self, event: ev.Event, refusal: Refused) -> None:
        """Take what the book refused, unless an older job is owed exactly this report."""
        if isinstance(event, ev.RankCompleted) and owed_by_an_older_job(self.trail, event) is not None:
            return
        super().refused(event, refusal)
