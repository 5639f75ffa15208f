"""`retry_loop`: the store promises a hit, the load fails, the request goes back, and is promised the same hit again.

Each round costs a load and the request gets nowhere. kvledger's connector breaks the loop after `load_max_cycles`
rounds (`lookup_suppressed`); a loop that was broken is no finding of its own.
"""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from ledger import events as ev
from ledger.verdicts.base import Facts, Finding, Kind, Role, Verdict
from ledger.verdicts.history import End, History

ROUNDS = 3
"""Rounds that make a loop. Two may be chance: a key evicted twice."""

KEPT_LOOPS = 200
"""Requests that went round and are kept; the rest is only counted."""

RETRY_LOOP = Kind("retry_loop", Role.RECURS)


class Rounds(Facts, frozen=True, kw_only=True):
    """Requests that were promised the same hit again and again.

    Attributes:
        request: the first of them, of which the rest is said.
        requests: how many there are.
        tokens: tokens of the hit.
        rounds: how often it was promised, and its load failed.
        code: the stable code of the last failure; empty if none is recorded.
    """

    request: str
    requests: int
    tokens: int
    rounds: int
    code: str


class _Rounds(msgspec.Struct):
    number: int
    hit_tokens: int
    chain: list[ev.Event]
    code: str = ""


class RetryLoop(Verdict):
    """Requests that fail the same load again and again."""

    kinds: ClassVar[tuple[Kind, ...]] = (RETRY_LOOP,)

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
        yield Finding(
            of=RETRY_LOOP,
            certainty="proven",
            facts=Rounds(
                request=requests[0],
                requests=self._number,
                tokens=first.hit_tokens,
                rounds=first.number,
                code=first.code,
            ),
            since_seq=first.chain[0].seq,
            requests=tuple(requests),
            code=first.code or None,
            lead_seq=first.chain[0].seq,
            chain=tuple(first.chain),
            loads=tuple(event.load for event in first.chain if isinstance(event, ev.LoadPlanned)),
        )
