"""`over_report`: a rank reported more than it owes: twice, for a job that is over, or without being asked.

A count of answers reaches zero too early by such a report, and the blocks are freed while another rank still reads
them. The books name ranks instead of counting, so they notice. When the rank had finished an older job of the same
request, and no report of that one comes, it is a `stale_completion` instead. Where it is not known whether the rank had
finished it, this is not proven.
"""

from collections.abc import Iterable
from typing import ClassVar, TypeVar

import msgspec

from ledger import events as ev
from ledger.errors import Refused
from ledger.rules import Breach
from ledger.verdicts.base import Finding, Kind, Role
from ledger.verdicts.history import End, History
from ledger.verdicts.shared.rules import Broken, RuleBroken, RuleVerdict
from ledger.verdicts.shared.sample import KEPT, Sample
from ledger.verdicts.shared.stale import RULES, Reading, any_owed, older_jobs, whose

K = TypeVar("K")

KEPT_OPEN = 1000
"""Jobs and ranks of which a report may be that of an older job. Further reports are judged as those of the last one."""

OVER_REPORT = Kind(Breach.OVER_REPORT.value, Role.CAUSE | Role.MISCOUNTS)


class _Open(msgspec.Struct):
    """Reports of a rank for a job of which it is not known yet whose they were.

    Attributes:
        report: the first of them.
        older: the older jobs that waited for a report of that rank then.
        rules: the rules that they broke.
    """

    report: ev.RankCompleted
    older: tuple[int, ...]
    rules: dict[str, Sample[Broken]] = {}


class ReportedTooMuch(RuleBroken, frozen=True, kw_only=True):
    """A rank reported more than it owes."""


class OverReport(RuleVerdict):
    """Reports beyond what was expected."""

    kinds: ClassVar[tuple[Kind, ...]] = (OVER_REPORT,)
    facts: ClassVar[type[RuleBroken]] = ReportedTooMuch

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._open: dict[tuple[int, int], _Open] = {}

    def refused(self, event: ev.Event, refusal: Refused) -> None:
        """Take what the book refused; what may be the report of an older job waits until it is known whose it was."""
        older = older_jobs(self.history, event) if isinstance(event, ev.RankCompleted) and refusal.rule in RULES else ()
        if not isinstance(event, ev.RankCompleted) or not older:
            super().refused(event, refusal)
            return
        work = event.job, event.rank
        known = self._open.get(work)
        if known is None or not any_owed(self.history, known.older, event.rank):
            self._settle()
            if len(self._open) < KEPT_OPEN:
                self._open[work] = _Open(event, older)
            else:
                work = next(reversed(self._open))
        self.take(event, refusal.rule, refusal.detail, is_report=True, into=self._open[work].rules)

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each rule, and one for each reason why it is not known whose reports they were."""
        rules = {rule: alike.copy() for rule, alike in self.rules.items()}
        doubtful: dict[tuple[str, Reading], Sample[Broken]] = {}
        for opened in self._open.values():
            reading = whose(self.history, end, opened.report, opened.older)
            if reading.owed is not None:
                continue
            for rule, alike in opened.rules.items():
                if reading.doubt is not None:
                    _merge(doubtful, (rule, reading), alike)
                else:
                    _merge(rules, rule, alike)
        for alike in rules.values():
            yield self.finding(alike)
        for (_, reading), alike in doubtful.items():
            found = self.finding(alike)
            if found.doubt is None:
                found = msgspec.structs.replace(found, certainty=reading.certainty, doubt=reading.doubt)
            yield found

    def _settle(self) -> None:
        """Take the reports that were not those of older jobs: each of these has got its own."""
        for work, opened in list(self._open.items()):
            if not any_owed(self.history, opened.older, work[1]):
                for rule, alike in self._open.pop(work).rules.items():
                    _merge(self.rules, rule, alike)


def _merge(into: dict[K, Sample[Broken]], key: K, more: Sample[Broken]) -> None:
    """Add broken rules to those of a key, which may have been broken before or after them."""
    known = into.setdefault(key, Sample())
    known.kept = sorted((*known.kept, *more.kept), key=lambda broken: broken.event.seq)[:KEPT]
    known.number += more.number
