"""`torn_log`: the log has no `log_closed`, or it was closed because of an error. The last events are the evidence.

That there is no `log_closed` is all that is proven. A process that was killed, a disk that took nothing more and a copy
without the whole of its `-wal` look the same from here.

A log that is still being written is no incident. Whether its writer lives is a fact about the file, and the reader of
the file says so (`End.how`).
"""

from collections import deque
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from ledger import events as ev
from ledger.errors import Refused
from ledger.rules import Breach
from ledger.state.invariants import breach_of
from ledger.verdicts.base import Facts, Finding, Kind, Role, Verdict
from ledger.verdicts.history import End, History
from ledger.verdicts.shared.ends import is_hard, is_near

FLUSH_INTERVAL_MS = 50
"""The engine's own default of `flush_interval_ms`."""

TORN_LOG = Kind("torn_log", Role.ENDS_LOG)


class LastWord(msgspec.Struct, frozen=True):
    """The last thing of note before the end, close enough for the engine to have died of it.

    Attributes:
        refusal: what the book said if it refused the event; empty if it did not.
        is_late: it is a result that came too late, which has a finding of its own.
    """

    event: ev.Event
    refusal: str
    is_late: bool


class NoLogClosed(Facts, frozen=True, kw_only=True):
    """The log has no `log_closed`.

    Attributes:
        engine: the engine's name; empty if the log does not say.
        last: the last event.
        last_word: what came just before it; None if nothing of note did.
        flush_ms: the engine's own flush interval, in milliseconds.
    """

    engine: str
    last: ev.Event
    last_word: LastWord | None
    flush_ms: float


class ClosedByError(Facts, frozen=True, kw_only=True):
    """The engine closed the log because of an error.

    Attributes:
        engine: the engine's name; empty if the log does not say.
        last: the last event.
        last_word: what came just before it; None if nothing of note did.
        exception: the type of the error; empty if none was recorded.
    """

    engine: str
    last: ev.Event
    last_word: LastWord | None
    exception: str


class TornLog(Verdict):
    """Logs that stop, and engines that died."""

    kinds: ClassVar[tuple[Kind, ...]] = (TORN_LOG,)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._notables: deque[LastWord] = deque(maxlen=6)

    def refused(self, event: ev.Event, refusal: Refused) -> None:
        """Remember what broke the books last."""
        is_late = breach_of(refusal.rule, is_report=True) is Breach.LATE_EVENT
        self._notables.append(LastWord(event, refusal.detail, is_late))

    def _notable(self, event: ev.InvariantViolated | ev.ReportIgnored | ev.LoadFailed | ev.LoadRecovered) -> None:
        self._notables.append(LastWord(event, "", isinstance(event, ev.ReportIgnored)))

    on_invariant_violated = on_report_ignored = on_load_failed = on_load_recovered = _notable

    def findings(self, end: End) -> Iterable[Finding]:
        """Return the torn end, with what came just before it."""
        if not is_hard(end):
            return
        near = [each for each in self._notables if is_near(each.event, end)]
        engine = self.history.opened.engine if self.history.opened is not None else ""
        last_word = near[-1] if near else None
        facts: Facts
        if end.closed is None:
            flush_ms = self.history.setting("flush_interval_ms", FLUSH_INTERVAL_MS)
            facts = NoLogClosed(engine=engine, last=end.last, last_word=last_word, flush_ms=flush_ms)
        else:
            exception = end.closed.exception
            facts = ClosedByError(engine=engine, last=end.last, last_word=last_word, exception=exception)
        shown = {event.seq: event for event in [*(each.event for each in near), *end.tail]}
        yield Finding(
            of=TORN_LOG,
            certainty="proven",
            since_seq=end.last.seq,
            requests=tuple(dict.fromkeys(request for each in near if (request := _request(each.event)))),
            lead_seq=end.last.seq,
            chain=tuple(shown[seq] for seq in sorted(shown)),
            facts=facts,
        )


def _request(event: ev.Event) -> str:
    return str(getattr(event, "request", ""))
