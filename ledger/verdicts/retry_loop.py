"""`retry_loop`: the store promises a hit, the load fails, the request goes back, and is promised the same hit again.

Each round costs a load and the request gets nowhere. kvledger's connector breaks the loop after `load_max_cycles`
rounds (`lookup_suppressed`); a loop that was broken is no finding of its own.
"""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from ledger import events as ev
from ledger import words
from ledger.verdicts.base import Finding, Verdict
from ledger.verdicts.history import End, History

ROUNDS = 3
"""Rounds that make a loop. Two may be chance: a key evicted twice."""

KEPT_LOOPS = 200
"""Requests that went round and are kept; the rest is only counted."""


class _Rounds(msgspec.Struct):
    number: int
    hit_tokens: int
    chain: list[ev.Event]
    code: str = ""


class RetryLoop(Verdict):
    """Requests that fail the same load again and again."""

    kinds: ClassVar[tuple[str, ...]] = ("retry_loop",)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._rounds: dict[str, _Rounds] = {}
        self._loops: dict[str, _Rounds] = {}
        self._number = 0

    def on_load_settled(self, event: ev.LoadSettled) -> None:
        """Count a round when the load failed; a load that went well ends the counting."""
        chain = self.history.loads[event.load]
        planned = chain[0] if chain else None
        if not isinstance(planned, ev.LoadPlanned):
            return
        # A request that has ended does not go round. Under the policy `fail` it ends before its load settles.
        if event.outcome != "failed" or planned.request not in self.state.book.requests:
            self._rounds.pop(planned.request, None)
            return
        failed = next((each for each in chain if isinstance(each, ev.LoadFailed)), None)
        known = self._rounds.get(planned.request)
        if known is None or known.hit_tokens != planned.tokens:
            known = _Rounds(0, planned.tokens, [])
            self._rounds[planned.request] = known
        known.number += 1
        known.code = failed.code if failed is not None else ""
        if len(known.chain) < 12:
            known.chain += [planned, event]
        if known.number == ROUNDS and planned.request not in self._loops:
            self._number += 1
            if self._number <= KEPT_LOOPS:
                self._loops[planned.request] = known

    def _ended(self, event: ev.RequestFinished | ev.RequestAborted) -> None:
        if self._rounds:
            self._rounds.pop(event.request, None)

    on_request_finished = on_request_aborted = _ended

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for all requests that went round."""
        if not self._loops:
            return
        requests = list(self._loops)
        first = self._loops[requests[0]]
        more = f" and {words.plural(self._number - 1, 'more request')}" if self._number > 1 else ""
        who = "the request got" if self._number == 1 else f"{self._number:,} requests got"
        yield Finding(
            kind="retry_loop",
            certainty="proven",
            title=(
                f"request {requests[0]}{more} was promised the same {words.plural(first.hit_tokens, 'token')} "
                f"{first.number} times, and the load failed each time{f' with {first.code}' if first.code else ''}"
            ),
            since_seq=first.chain[0].seq,
            requests=tuple(requests),
            code=first.code or None,
            culprit="the lookup, which promises keys that cannot be loaded",
            shown="each lookup had the hit, and each load of it failed",
            inferred="why the loads fail; the failed loads that are told with this one say what is known",
            advice="Set load_max_cycles above 0, so that such a request is computed; then see why the load fails.",
            lead_seq=first.chain[0].seq,
            impact=(f"{who} nowhere for {first.number} rounds",),
            chain=tuple(first.chain),
            loads=tuple(event.load for event in first.chain if isinstance(event, ev.LoadPlanned)),
        )
