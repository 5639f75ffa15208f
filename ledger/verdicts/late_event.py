"""`late_event`: a result came for work that was over, or twice. It must change nothing; it points to something else.

A result for a load, send or recv that has settled was recorded and ignored (`report_ignored`), or the book refused it.
"""

from collections.abc import Iterable
from typing import ClassVar

from ledger import events as ev
from ledger import words
from ledger.verdicts.base import Finding, Kind, Role, Told
from ledger.verdicts.history import End, Trail
from ledger.verdicts.shared.ends import is_hard, is_near
from ledger.verdicts.shared.rules import Broken, RuleVerdict
from ledger.verdicts.shared.sample import Alike

LATE_EVENT = Kind("late_event", Role.ENDS_ENGINE)


class LateEvent(RuleVerdict):
    """Results for what was over."""

    kinds: ClassVar[tuple[Kind, ...]] = (LATE_EVENT,)
    lead: ClassVar[str] = "a result{} came too late: "

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._ignored: dict[tuple[str, str], Alike[ev.ReportIgnored]] = {}
        self._before: dict[tuple[str, str], list[ev.Event]] = {}

    def on_report_ignored(self, event: ev.ReportIgnored) -> None:
        """Note a result that came late."""
        sort = event.what, event.why
        if sort not in self._ignored:
            self._before[sort] = self.trail.last_end(event.request, load=event.load, transfer=event.transfer)
        self._ignored.setdefault(sort, Alike()).add(event)

    def advise(self, first: Broken, end: End) -> str:
        """Return what to do next."""
        return _advice(first.event, end)

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each sort of late result."""
        yield from super().findings(end)
        for (what, why), alike in self._ignored.items():
            late, number = alike.kept, alike.number
            first = late[0]
            subject = first.transfer or (f"load {first.load}" if first.load >= 0 else what)
            times = f" ({number:,} such results)" if number > 1 else ""
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
                facts=Told(
                    title=f"{_result(first, subject)} came too late and was ignored: {why}{times}",
                    culprit=words.ranks([first.rank]) if first.rank >= 0 else f"the other side of the {what}",
                    advice=_advice(first, end),
                ),
            )


def _result(event: ev.ReportIgnored, subject: str) -> str:
    """Return what came and from whom, and that it was a failure, as far as the event says."""
    who = f" of rank {event.rank}" if event.rank >= 0 else ""
    if event.code:
        return f"a failed result{who} for {subject}, {event.code},"
    return f"a result{who} for {subject}"


def _advice(event: ev.Event, end: End) -> str:
    if is_hard(end) and is_near(event, end):
        return (
            f"Look for an error about this request in the engine's own log at {words.clock(event.ts_ns)} UTC: this log "
            "ends right after the result, which makes it the first suspect."
        )
    return "Nothing, if this is all: it changed nothing. See in the evidence what had ended the work before it came."
