"""`late_event`: a result came for work that was over, or twice. It must change nothing; it points to something else.

A result for a load, send or recv that has settled was recorded and ignored (`report_ignored`), or the book refused it.
"""

from collections.abc import Iterable
from typing import ClassVar

from ledger import events as ev
from ledger.rules import Breach
from ledger.verdicts.base import Facts, Finding, Kind, Role
from ledger.verdicts.history import End, History
from ledger.verdicts.shared.rules import RuleBroken, RuleVerdict
from ledger.verdicts.shared.sample import Sample

LATE_EVENT = Kind(Breach.LATE_EVENT.value, Role.ENDS_ENGINE)


class CameLate(RuleBroken, frozen=True, kw_only=True):
    """A result for work that was over, which the book refuses."""


class Ignored(Facts, frozen=True, kw_only=True):
    """Results for work that was over, which the engine recorded and ignored.

    Attributes:
        first: the first of them.
        results: how many there are.
    """

    first: ev.ReportIgnored
    results: int


class LateEvent(RuleVerdict):
    """Results for what was over."""

    kinds: ClassVar[tuple[Kind, ...]] = (LATE_EVENT,)
    facts: ClassVar[type[RuleBroken]] = CameLate

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._ignored: dict[tuple[str, str], Sample[ev.ReportIgnored]] = {}
        self._before: dict[tuple[str, str], list[ev.Event]] = {}

    def on_report_ignored(self, event: ev.ReportIgnored) -> None:
        """Note a result that came late."""
        sort = event.what, event.why
        if sort not in self._ignored:
            self._before[sort] = self.history.last_end(event.request, load=event.load, transfer=event.transfer)
        self._ignored.setdefault(sort, Sample()).add(event)

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each sort of late result."""
        yield from super().findings(end)
        for (what, why), alike in self._ignored.items():
            late = alike.kept
            first = late[0]
            yield Finding(
                of=LATE_EVENT,
                certainty="proven",
                since_seq=first.seq,
                requests=tuple(dict.fromkeys(event.request for event in late if event.request)),
                ranks=tuple(sorted({event.rank for event in late if event.rank >= 0})),
                code=first.code or None,
                lead_seq=first.seq,
                chain=(*self._before[what, why], *late[:10]),
                loads=tuple(dict.fromkeys(event.load for event in late if event.load >= 0)),
                transfers=tuple(dict.fromkeys(event.transfer for event in late if event.transfer)),
                facts=Ignored(first=first, results=alike.number),
            )
