"""`unreported_failure`: something failed, and the scheduler was not told, or told otherwise.

    loaded      a rank said that a load went well although its last call for it failed
    silence     a rank's last call for a load failed, or a peer failed a recv, and the scheduler was not told
    a rule      a load or recv that had failed was settled as if it had not

A put that fails without a report holds blocks and is a `leak`.
"""

from collections.abc import Iterable
from typing import ClassVar, Literal, TypeAlias

import msgspec

from ledger import events as ev
from ledger.rules import Breach
from ledger.verdicts.base import Doubt, Facts, Finding, Kind, Role, listed
from ledger.verdicts.history import End, EventList, History, RequestEnd
from ledger.verdicts.shared.ends import is_hard
from ledger.verdicts.shared.rules import RuleBroken, RuleVerdict
from ledger.verdicts.shared.sample import KEPT, Sample
from ledger.verdicts.shared.waits import REPORT_NS, REPORT_STEPS, Wait, certainty, waits

KEPT_SETTLED = 256
"""Loads that settled last and went well, as they say: evidence that speaks against it may come in later. More are kept
while evidence of them is on its way."""

UNREPORTED_FAILURE = Kind(Breach.UNREPORTED_FAILURE.value, Role.CAUSE | Role.WRONG_KV)


class LaterGetLost(Doubt, frozen=True, kw_only=True):
    """Events of the worker are lost, and a later get that went well may be among them."""

    gap: ev.Gap


class SettledAsIfWell(RuleBroken, frozen=True, kw_only=True):
    """A load or transfer that had failed was settled as if it had not."""


class AnsweredWell(Facts, frozen=True, kw_only=True):
    """A rank answered that a load went well, although its last get for it had failed.

    Attributes:
        load, request: the first such load, and whose it was.
        call: the end of its last get.
        answer: what the rank answered.
        times: how many such loads there are.
    """

    load: int
    request: str
    rank: int
    call: ev.TransferFinished
    answer: ev.RankLoaded
    times: int


class NotReported(Facts, frozen=True, kw_only=True):
    """A load or recv failed on a rank, and the scheduler was not told, or not in time.

    Attributes:
        what: `load` or `recv`.
        number: the id of the load; -1 for a recv.
        transfer: the id of the transfer; empty for a load.
        failure: the first failure.
        until: how the request ended, if a report came after that, and was ignored; None if no report came.
        asked: how the scheduler asked for a recv.
        is_open: the request has not ended.
    """

    what: Literal["load", "recv"]
    number: int
    transfer: str
    request: str
    generation: int
    failure: ev.TransferFinished | ev.PeerSettled
    until: RequestEnd | None
    asked: ev.RecvRegistered | None
    is_open: bool


class _Swallowed(msgspec.Struct, frozen=True):
    """A load that a rank said went well although its last call for it failed.

    Attributes:
        chain: the events of the load, late evidence included.
        lost: where events are lost among which a later call may have made the failure good; None if none can have.
    """

    answer: ev.RankLoaded
    call: ev.TransferFinished
    settled: ev.LoadSettled
    chain: EventList
    lost: ev.Gap | None

    @property
    def request(self) -> str:
        """Whose load it was."""
        planned = self.chain[0]
        return planned.request if isinstance(planned, ev.LoadPlanned) else self.call.request


Sort: TypeAlias = tuple[int, str, bool]
"""A rank, a code, and whether there is a doubt."""


class UnreportedFailure(RuleVerdict):
    """Failures that were swallowed."""

    kinds: ClassVar[tuple[Kind, ...]] = (UNREPORTED_FAILURE,)
    facts: ClassVar[type[RuleBroken]] = SettledAsIfWell

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._settled: dict[int, tuple[EventList, ev.LoadSettled]] = {}
        self._swallowed: dict[Sort, Sample[_Swallowed]] = {}
        self._ignored: dict[str, ev.ReportIgnored] = {}

    def on_load_settled(self, event: ev.LoadSettled) -> None:
        """Keep a load that went well: what shows that it did not, or made that good, may come in later."""
        chain = self.history.loads[event.load]
        if event.outcome != "loaded" or not chain:
            return
        self._settled[event.load] = chain, event
        while len(self._settled) > KEPT_SETTLED:
            load, (chain, settled) = next(iter(self._settled.items()))
            if event.step - settled.step < REPORT_STEPS or event.mono_ns - settled.mono_ns < REPORT_NS:
                break
            del self._settled[load]
            self._take(self._swallowed, chain, settled)

    def _came_late(self, event: ev.TransferStarted | ev.TransferFinished) -> None:
        """Take evidence of a load that has settled."""
        known = self._settled.get(event.load)
        if known is not None:
            known[0].append(event)

    on_transfer_started = on_transfer_finished = _came_late

    def findings(self, end: End) -> Iterable[Finding]:
        """Return the failures that were hidden, and those that were met with silence."""
        yield from super().findings(end)
        swallowed = {sort: alike.copy() for sort, alike in self._swallowed.items()}
        for chain, settled in self._settled.values():
            if _is_told(self.history, end, chain, settled):
                self._take(swallowed, chain, settled)
        for alike in swallowed.values():
            yield self._answered_well(alike)
        for wait in waits(self.history, end):
            if wait.what in ("load", "recv") and wait.overdue and not wait.failed:
                yield from self._silent(wait, end)

    def _take(self, into: dict[Sort, Sample[_Swallowed]], chain: EventList, settled: ev.LoadSettled) -> None:
        """Take the answers for a load that hid a failure."""
        for answer, call in _hidden(chain):
            lost = self._lost(chain[0], answer.rank)
            sort = answer.rank, code_of(call), lost is not None
            into.setdefault(sort, Sample()).add(_Swallowed(answer, call, settled, chain, lost))

    @staticmethod
    def _answered_well(alike: Sample[_Swallowed]) -> Finding:
        first = alike.kept[0]
        answer, call, lost = first.answer, first.call, first.lost
        planned = first.chain[0]
        blocks = [each.chain[0].blocks for each in alike.kept if isinstance(each.chain[0], ev.LoadPlanned)]
        requests = tuple(dict.fromkeys(each.request for each in alike.kept))
        shown = sorted((planned, call, answer, first.settled), key=lambda event: event.seq)
        return Finding(
            of=UNREPORTED_FAILURE,
            certainty="undecidable" if lost is not None else "proven",
            since_seq=call.seq,
            requests=requests,
            blocks=listed(tuple(part for each in blocks for part in each)),
            ranks=(answer.rank,),
            code=code_of(call) or None,
            lead_seq=call.seq,
            chain=tuple(shown),
            loads=tuple(dict.fromkeys(each.answer.load for each in alike.kept)),
            doubt=LaterGetLost(gap=lost) if lost is not None else None,
            facts=AnsweredWell(
                load=answer.load,
                request=first.request,
                rank=answer.rank,
                call=call,
                answer=answer,
                times=alike.number,
            ),
        )

    def _lost(self, planned: ev.Event, rank: int) -> ev.Gap | None:
        """Return where a later get of a rank may be lost, so that the last one in this log need not be its last."""
        return next(
            (gap for gap in self.history.gaps if gap.seq > planned.seq and gap.origin in (f"rank {rank}", "workers")),
            None,
        )

    def _until(self, wait: Wait) -> RequestEnd | None:
        """Return the end of the request if a report came after that, and was ignored; None if none came."""
        ended = self.history.request_end_while_open.get(
            ("transfer", wait.transfer) if wait.transfer else (wait.what, wait.number)
        )
        late = self._ignored.get(wait.transfer or wait.name)
        return ended if ended is not None and late is not None and late.seq > ended.seq else None

    def on_report_ignored(self, event: ev.ReportIgnored) -> None:
        """Note a report that came too late to be taken."""
        if len(self._ignored) < KEPT:
            self._ignored[event.transfer or f"load {event.load}"] = event

    def _silent(self, wait: Wait, end: End) -> Iterable[Finding]:
        failures: list[ev.TransferFinished | ev.PeerSettled] = [
            view.last
            for view in wait.doing("ended")
            if isinstance(view.last, ev.TransferFinished) and view.last.outcome != "ok"
        ]
        failures += [each for each in wait.chain if isinstance(each, ev.PeerSettled) and each.outcome != "ok"]
        if not failures:
            return
        first = min(failures, key=lambda event: event.seq)
        code = code_of(first)
        certain, doubt = certainty(end, [wait])
        if doubt and wait.in_time and end.how == "closed" and wait.blind is None:
            # The engine would have given the wait up in time. That does not undo that it was not told.
            certain, doubt = "proven", None
        asked = wait.chain[0] if isinstance(wait.chain[0], ev.RecvRegistered) else None
        yield Finding(
            of=UNREPORTED_FAILURE,
            certainty=certain,
            since_seq=first.seq,
            requests=(wait.request,),
            blocks=listed(wait.blocks),
            ranks=tuple(sorted({event.rank for event in failures})),
            code=code or None,
            lead_seq=first.seq,
            doubt=doubt,
            chain=(wait.chain[0], *failures[:6]),
            loads=(wait.number,) if wait.what == "load" else (),
            transfers=(wait.transfer,) if wait.transfer else (),
            facts=NotReported(
                what="load" if wait.what == "load" else "recv",
                number=wait.number,
                transfer=wait.transfer,
                request=wait.request,
                generation=wait.generation,
                failure=first,
                until=self._until(wait),
                asked=asked,
                is_open=wait.request in self.state.book.requests,
            ),
        )


def _hidden(chain: EventList) -> Iterable[tuple[ev.RankLoaded, ev.TransferFinished]]:
    """Yield the answers `loaded` of ranks whose last call had failed, with that call.

    A rank with a call that has not returned is left out. The steps say what was before the answer: the clocks of two
    hosts do not.
    """
    for answer in chain:
        if not isinstance(answer, ev.RankLoaded) or answer.outcome != "loaded":
            continue
        is_open: dict[str, None] = {}
        last: ev.TransferFinished | None = None
        for call in chain:
            if isinstance(call, ev.TransferStarted) and call.rank == answer.rank:
                is_open[call.transfer] = None
            elif isinstance(call, ev.TransferFinished) and call.rank == answer.rank:
                is_open.pop(call.transfer, None)
                last = call
        if last is not None and last.outcome != "ok" and last.step <= answer.step and not is_open:
            yield answer, last


def _is_told(history: History, end: End, chain: EventList, settled: ev.LoadSettled) -> bool:
    """Return whether all evidence from before a load has settled would have come in when the log ends."""
    if end.how == "closed" and not is_hard(end):
        return True
    last_ns = settled.mono_ns
    if chain[-1].seq > settled.seq:  # it comes in late, so more may
        heard_ns = history.times.at(chain[-1].seq)
        last_ns = end.now_mono_ns if heard_ns is None else heard_ns
    return end.step - settled.step >= REPORT_STEPS and end.now_mono_ns - last_ns >= REPORT_NS


def code_of(event: ev.TransferFinished | ev.PeerSettled) -> str:
    """Return the code of a failure: that of its first key, if keys failed one by one; empty if none is recorded."""
    if isinstance(event, ev.TransferFinished) and event.failures:
        return event.failures[0].code
    return event.code
