"""`unreported_failure`: something failed, and the scheduler was not told, or told otherwise.

    loaded      a rank said that a load went well although its last call for it failed
    silence     a rank's last call for a load failed, or a peer failed a recv, and the scheduler was not told
    a rule      a load or recv that had failed was settled as if it had not

A put that fails without a report holds blocks and is a `leak`.
"""

from collections.abc import Iterable
from typing import ClassVar, TypeAlias

import msgspec

from ledger import events as ev
from ledger import words
from ledger.verdicts.base import Finding, Kind, Role, Told, listed
from ledger.verdicts.history import Chain, End, Trail
from ledger.verdicts.shared.ends import is_hard
from ledger.verdicts.shared.rules import RuleVerdict
from ledger.verdicts.shared.sample import KEPT, Alike
from ledger.verdicts.shared.waits import REPORT_NS, REPORT_STEPS, Wait, certainty, ended_request, likewise, waits

KEPT_SETTLED = 256
"""Loads that settled last and went well, as they say: evidence that speaks against it may come in later. More are kept
while evidence of them is on its way."""

UNREPORTED_FAILURE = Kind("unreported_failure", Role.CAUSE | Role.WRONG_KV)


class _Swallowed(msgspec.Struct, frozen=True):
    """A load that a rank said went well although its last call for it failed.

    Attributes:
        chain: the events of the load, late evidence included.
        doubt: why a later call may have made the failure good; empty if none can.
    """

    answer: ev.RankLoaded
    call: ev.TransferFinished
    settled: ev.LoadSettled
    chain: Chain
    doubt: str

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
    advice: ClassVar[str] = (
        "Do not trust the output of the request: it went on with KV that did not arrive. Look at the worker log of "
        "that rank at that time for the error."
    )

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._settled: dict[int, tuple[Chain, ev.LoadSettled]] = {}
        self._swallowed: dict[Sort, Alike[_Swallowed]] = {}
        self._ignored: dict[str, ev.ReportIgnored] = {}

    def on_load_settled(self, event: ev.LoadSettled) -> None:
        """Keep a load that went well: what shows that it did not, or made that good, may come in later."""
        chain = self.trail.loads[event.load]
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
            if _is_told(self.trail, end, chain, settled):
                self._take(swallowed, chain, settled)
        for alike in swallowed.values():
            yield self._answered_well(alike)
        for wait in waits(self.trail, end):
            if wait.what in ("load", "recv") and wait.overdue and not wait.failed:
                yield from self._silent(wait, end)

    def _take(self, into: dict[Sort, Alike[_Swallowed]], chain: Chain, settled: ev.LoadSettled) -> None:
        """Take the answers for a load that hid a failure."""
        for answer, call in _hidden(chain):
            doubt = self._doubt(chain[0], answer.rank)
            sort = answer.rank, _code(call)[0], bool(doubt)
            into.setdefault(sort, Alike()).add(_Swallowed(answer, call, settled, chain, doubt))

    @staticmethod
    def _answered_well(alike: Alike[_Swallowed]) -> Finding:
        first = alike.kept[0]
        answer, call, doubt = first.answer, first.call, first.doubt
        planned = first.chain[0]
        blocks = [each.chain[0].blocks for each in alike.kept if isinstance(each.chain[0], ev.LoadPlanned)]
        requests = tuple(dict.fromkeys(each.request for each in alike.kept))
        shown = sorted((planned, call, answer, first.settled), key=lambda event: event.seq)
        why = words.failure(*_code(call), call.exception)
        more = likewise(alike.number - 1, "load")
        whose, they = (f"the answer of request {first.request} is", "it")
        if len(requests) > 1:
            whose, they = ("the answers of these requests are", "they")
        return Finding(
            of=UNREPORTED_FAILURE,
            certainty="undecidable" if doubt else "proven",
            since_seq=call.seq,
            requests=requests,
            blocks=listed(tuple(part for each in blocks for part in each)),
            ranks=(answer.rank,),
            code=_code(call)[0] or None,
            lead_seq=call.seq,
            chain=tuple(shown),
            loads=tuple(dict.fromkeys(each.answer.load for each in alike.kept)),
            facts=Told(
                title=(
                    f"rank {answer.rank} answered that load {answer.load} of request {first.request} went well, although "
                    f"its last get{' in this log' if doubt else ''} ended {call.outcome}{': ' + why if why else ''}{more}"
                ),
                culprit=f"the worker of rank {answer.rank}, which said that all was loaded (event {answer.seq})",
                advice=(
                    "Do not trust the output of the request, and reset the prefix cache. Look for the error in the worker "
                    f"log of rank {answer.rank} at {words.clock(call.ts_ns)} UTC."
                    if not doubt
                    else f"See in the worker log of rank {answer.rank} from {words.clock(call.ts_ns)} UTC on whether it "
                    "tried again and got all. If not, do not trust the output of the request, and reset the prefix cache."
                ),
                doubt=doubt,
                impact=(
                    f"{whose} unreliable: {they} went on with KV that did not arrive"
                    if not doubt
                    else f"if KV did not arrive, {whose} unreliable",
                ),
            ),
        )

    def _doubt(self, planned: ev.Event, rank: int) -> str:
        """Return why the last get of a rank in this log may not be its last one; empty if it is."""
        for gap in self.trail.gaps:
            if gap.seq > planned.seq and gap.origin in (f"rank {rank}", "workers"):
                return (
                    f"{words.lost_at(gap)}, and a later get that went well may be among them; the log of that worker "
                    "would decide"
                )
        return ""

    def _until(self, wait: Wait) -> str:
        """Return up to where there is no report: what came after the end of the request was ignored."""
        ended = ended_request(self.trail, wait)
        late = self._ignored.get(wait.transfer or wait.name)
        if late is None or ended is None or late.seq < ended[0].seq:
            return ""
        return f" until the request {ended[1]}"

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
        code, why = _why(first)
        late = self._until(wait)
        certain, doubt = certainty(end, [wait])
        if doubt and wait.in_time and end.how == "closed" and wait.blind is None:
            # The engine would have given the wait up in time. That does not undo that it was not told.
            certain, doubt = "proven", None
        who = f"rank {first.rank}" + (f" and {first.peer}" if isinstance(first, ev.PeerSettled) and first.peer else "")
        at = words.clock(first.ts_ns)
        asked = wait.chain[0] if isinstance(wait.chain[0], ev.RecvRegistered) else None
        first_of_all = ""
        if asked is not None and code in ("PEER_UNREACHABLE", "PEER_NOT_READY"):
            where = f" ({asked.bootstrap})" if asked.bootstrap else ""
            first_of_all = (
                f"See whether prefill engine {asked.prefill or '(unknown)'}{where} lives, and can be reached from rank "
                f"{first.rank} of this engine. "
            )
        lives = " End the request: it gets no answer." if wait.request in self.state.book.requests else ""
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
            facts=Told(
                title=(
                    f"{wait.name} of {words.request(wait.request, wait.generation)} failed on {who}"
                    f"{': ' + why if why else ''}, and no report to the scheduler is in this log{late}"
                ),
                brief=(
                    f"{wait.name} of {words.request(wait.request, wait.generation)} failed on {who}"
                    f"{f': {code}' if code else ''}, and the scheduler got no report of it{' in time' if late else ''}"
                ),
                culprit=(
                    f"the worker of rank {first.rank}: its failure (event {first.seq}) did not reach the scheduler"
                    f"{' in time' if late else ''}"
                ),
                advice=f"{first_of_all}Look for the error in the worker log of rank {first.rank} at {at} UTC.{lives}",
            ),
        )


def _hidden(chain: Chain) -> Iterable[tuple[ev.RankLoaded, ev.TransferFinished]]:
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


def _is_told(trail: Trail, end: End, chain: Chain, settled: ev.LoadSettled) -> bool:
    """Return whether all evidence from before a load has settled would have come in when the log ends."""
    if end.how == "closed" and not is_hard(end):
        return True
    last_ns = settled.mono_ns
    if chain[-1].seq > settled.seq:  # it comes in late, so more may
        heard_ns = trail.times.at(chain[-1].seq)
        last_ns = end.now_mono_ns if heard_ns is None else heard_ns
    return end.step - settled.step >= REPORT_STEPS and end.now_mono_ns - last_ns >= REPORT_NS


def _code(call: ev.TransferFinished) -> tuple[str, str]:
    return (call.failures[0].code, call.failures[0].raw) if call.failures else (call.code, call.raw)


def _why(event: ev.TransferFinished | ev.PeerSettled) -> tuple[str, str]:
    if isinstance(event, ev.PeerSettled):
        return event.code, words.failure(event.code, event.raw, event.exception, event.stage)
    return _code(event)[0], words.failure(*_code(event), event.exception)
