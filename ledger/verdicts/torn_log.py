"""`torn_log`: the log has no `log_closed`, or it was closed because of an error. The last events are the evidence.

A log that is still being written is no incident. Whether its writer lives is a fact about the file, and the reader of
the file says so (`End.how`).
"""

from collections import deque
from collections.abc import Iterable
from typing import ClassVar

from ledger import events as ev
from ledger import words
from ledger.errors import Refused
from ledger.trail import End, Trail
from ledger.verdicts import Finding, Verdict

FLUSH_INTERVAL_MS = 50
"""The engine's own default of `flush_interval_ms`."""


class TornLog(Verdict):
    """Logs that stop, and engines that died."""

    kinds: ClassVar[tuple[str, ...]] = ("torn_log",)

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._broken: deque[tuple[ev.Event, str]] = deque(maxlen=3)

    def refused(self, event: ev.Event, refusal: Refused) -> None:
        """Remember what broke the books last."""
        self._broken.append((event, refusal.detail))

    def on_invariant_violated(self, event: ev.InvariantViolated) -> None:
        """Remember what broke the books last."""
        self._broken.append((event, event.detail))

    def on_report_ignored(self, event: ev.ReportIgnored) -> None:
        """Remember the last late result: an engine that did not expect one dies of it."""
        self._broken.append((event, f"a late result of a {event.what}: {event.why}"))

    def findings(self, end: End) -> Iterable[Finding]:
        """Return the torn end, with what came just before it."""
        closed = end.closed
        if closed is not None and closed.reason != "exception":
            return
        if closed is None and end.how != "torn":
            return
        near = [(event, detail) for event, detail in self._broken if end.step - event.step <= 2]
        flush_ms = self.trail.setting("flush_interval_ms", FLUSH_INTERVAL_MS)
        if closed is not None:
            title = f"the engine stopped because of an error: {closed.exception or 'no type was recorded'}"
            lost = "the log itself is whole"
        else:
            title = f"the log ends torn after event {end.last.seq} at {words.clock(end.last.ts_ns)}: nobody closed it"
            lost = f"what the engine did in its last {flush_ms:g} ms may not have reached the file"
        culprit = "the engine process: killed, or ended without shutting down"
        if near:
            culprit = f"just before the end: {near[-1][1]} (event {near[-1][0].seq})"
        elif closed is not None:
            culprit = f"the engine process; {closed.exception or 'the error'} stands in its log"
        shown = sorted(
            {event.seq: event for event in [*(event for event, _ in near), *end.tail]}.values(), key=lambda e: e.seq
        )
        yield Finding(
            kind="torn_log",
            certainty="proven",
            title=f"{title}; {lost}",
            since_seq=end.last.seq,
            culprit=culprit,
            advice="See the engine's own log and the kernel's (dmesg: out of memory) at that time.",
            lead_seq=end.last.seq,
            chain=tuple(shown),
        )
