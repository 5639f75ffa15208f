"""`torn_log`: the log has no `log_closed`, or it was closed because of an error. The last events are the evidence.

That there is no `log_closed` is all that is proven. A process that was killed, a disk that took nothing more and a copy
without the whole of its `-wal` look the same from here.

A log that is still being written is no incident. Whether its writer lives is a fact about the file, and the reader of
the file says so (`End.how`).
"""

from collections import deque
from collections.abc import Iterable
from typing import ClassVar

from ledger import events as ev
from ledger import words
from ledger.errors import Refused
from ledger.verdicts.base import Finding, Kind, Role, Told, Verdict
from ledger.verdicts.history import End, Trail
from ledger.verdicts.shared.ends import is_hard, is_near
from ledger.verdicts.shared.rules import kind_of_rule

FLUSH_INTERVAL_MS = 50
"""The engine's own default of `flush_interval_ms`."""

TORN_ENDS = (
    "the process ended hard, or its disk took nothing at the end, or this copy lacks the end (its -wal was cut or not "
    "copied); the log alone does not tell which"
)
"""All that a missing `log_closed` leaves open."""

CLOSED_ADVICE = "See the engine's own log at that time for the error."


ALSO = "See the engine's own log from {} UTC on for why this log ends."
"""What is to be done as well; the finding of a late result just before the end says it itself."""

TORN_LOG = Kind("torn_log", Role.ENDS_LOG)


class TornLog(Verdict):
    """Logs that stop, and engines that died."""

    kinds: ClassVar[tuple[Kind, ...]] = (TORN_LOG,)

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._telling: deque[tuple[ev.Event, str, bool]] = deque(maxlen=6)

    def refused(self, event: ev.Event, refusal: Refused) -> None:
        """Remember what broke the books last."""
        is_late = kind_of_rule(refusal.rule, is_report=True) == "late_event"
        self._telling.append((event, refusal.detail, is_late))

    def _notable(self, event: ev.InvariantViolated | ev.ReportIgnored | ev.LoadFailed | ev.LoadRecovered) -> None:
        self._telling.append((event, words.describe(event), isinstance(event, ev.ReportIgnored)))

    on_invariant_violated = on_report_ignored = on_load_failed = on_load_recovered = _notable

    def _engine(self) -> str:
        return self.trail.opened.engine if self.trail.opened is not None else "(unknown)"

    def findings(self, end: End) -> Iterable[Finding]:
        """Return the torn end, with what came just before it."""
        if not is_hard(end):
            return
        closed = end.closed
        near = [(event, detail) for event, detail, _ in self._telling if is_near(event, end)]
        flush_ms = self.trail.setting("flush_interval_ms", FLUSH_INTERVAL_MS)
        error = closed.exception or "no type was recorded" if closed is not None else ""
        if closed is not None:
            title = f"the engine stopped because of an error, {error}; the log itself is whole"
        else:
            title = (
                f"the log ends torn after event {end.last.seq} at {words.clock(end.last.ts_ns)}: there is no log_closed"
            )
        culprit = f"the engine process: {error} stands in its log" if closed else TORN_ENDS
        if near:
            last_word = f"at event {near[-1][0].seq}: {near[-1][1]}"
            culprit = (
                f"just before the end, {last_word}" if closed else f"{TORN_ENDS}; just before the end, {last_word}"
            )
        inferred = "why the log ends" if closed is None else "that the engine died of it" if near else ""
        shown = {event.seq: event for event in [*(event for event, _ in near), *end.tail]}
        yield Finding(
            of=TORN_LOG,
            certainty="proven",
            since_seq=end.last.seq,
            requests=tuple(dict.fromkeys(_request(event) for event, _ in near if _request(event))),
            lead_seq=end.last.seq,
            chain=tuple(shown[seq] for seq in sorted(shown)),
            facts=Told(
                title=title,
                culprit=culprit,
                advice=CLOSED_ADVICE
                if closed
                else (
                    "Replay it on the host that wrote it, or copy the -wal file too. If it ends alike there, see the "
                    "engine's own log after that time (does it live, does it say that its audit log cannot be written?) "
                    "and the kernel's (dmesg) for a process killed for memory. If the disk took what it was given, the "
                    f"engine's last {flush_ms:g} ms are missing; if not, there is no bound."
                ),
                inferred=inferred,
                brief=f"the log ends torn after event {end.last.seq}" if closed is None else "",
                impact=(
                    f"engine {self._engine()} may be down: its log ends at {words.clock(end.last.ts_ns)} UTC"
                    if closed is None
                    else f"engine {self._engine()} is down",
                ),
                also="" if near and self._telling[-1][2] else ALSO.format(words.clock(end.last.ts_ns)),
            ),
        )


def _request(event: ev.Event) -> str:
    return str(getattr(event, "request", ""))
