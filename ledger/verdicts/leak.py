"""`leak`: blocks are held, and nothing is going on that would give them back.

    a job       a rank's put has failed, raised or ended, and its report did not reach the scheduler; or nothing was
                ever seen of the rank; or every rank has reported and the blocks were not freed; or a broken rule put
                the job into quarantine
    a send      a prefill engine holds a finished request's blocks for a decode engine that does not fetch them. That is
                bounded: it gives up after the send's timeout (`send_expired`), and until then the blocks are gone

While a call to the store is open, a job is a `stall` instead. Where events of the scheduler are lost, that nobody asked
for a send is undecidable.
"""

from collections.abc import Hashable, Iterable
from typing import ClassVar

import msgspec

from ledger import events as ev
from ledger.blocks import Blocks, count, from_ranges
from ledger.verdicts.base import Doubt, Facts, Finding, Kind, Role, Verdict, listed
from ledger.verdicts.history import End, EventList, History
from ledger.verdicts.shared.sample import Sample
from ledger.verdicts.shared.waits import (
    Wait,
    Waiting,
    blocked_requests,
    certainty,
    evidence,
    last_events,
    longest_wait_ns,
    never_answered,
    waiting,
    waits,
    with_events,
)

LEAK = Kind("leak", Role.SYMPTOM | Role.LASTS)


class StillHeld(Facts, frozen=True, kw_only=True):
    """Jobs or sends that hold blocks, and nothing goes on that would end them.

    Attributes:
        first: the oldest of them.
        waits: how many there are.
        held_blocks: how many blocks they hold together.
        settled: that the oldest one settled, if it did.
        violated: rules that were broken for the oldest one.
        unasked: it is a send, and as far as the log goes nobody has asked for it.
        longest_wait_ns: for how long the first of the requests that suffer has waited to run, in nanoseconds.
    """

    first: Waiting
    waits: int
    held_blocks: int
    settled: ev.JobSettled | None
    violated: tuple[ev.InvariantViolated, ...]
    unasked: bool
    longest_wait_ns: int


class Expired(Facts, frozen=True, kw_only=True):
    """Sends that were not fetched in time, so that the prefill engine gave them up.

    Attributes:
        event: that the first of them expired.
        sends: how many there are.
        ready: that its blocks began to be held; None if the log has lost that.
        failed: the rank whose pushes failed, if one did.
        asked: a decode worker is known to have asked for it.
        hidden: nobody is known to have asked, and events are lost that may say otherwise.
    """

    event: ev.SendExpired
    sends: int
    ready: ev.SendReady | None
    failed: ev.RankSent | None
    asked: bool
    hidden: bool


class QuestionLost(Doubt, frozen=True, kw_only=True):
    """Events are lost, and that somebody asked for the transfer may be among them."""

    gap: ev.Gap


class _Expired(msgspec.Struct, frozen=True):
    """A send that nobody fetched in time.

    Attributes:
        lost: where events of the scheduler are lost that belong between its beginning and its end.
    """

    event: ev.SendExpired
    chain: tuple[ev.Event, ...]
    lost: ev.Gap | None

    @property
    def asked(self) -> bool:
        """Whether a decode worker is known to have asked: a rank pushed, or was done in time."""
        expired = set(from_ranges(self.event.expired_ranks))
        expected = next((from_ranges(each.ranks) for each in self.chain if isinstance(each, ev.SendRegistered)), ())
        pushed = any(
            isinstance(each, ev.SendStarted) or (isinstance(each, ev.RankSent) and each.pushes > 0)
            for each in self.chain
        )
        return pushed or not expired.issuperset(expected)

    @property
    def hidden(self) -> bool:
        """Whether somebody may have asked of whom this log has lost the trace."""
        return self.lost is not None and not self.asked


class Leak(Verdict):
    """Jobs that nobody will end, and sends that nobody fetches."""

    kinds: ClassVar[tuple[Kind, ...]] = (LEAK,)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._expired: Sample[_Expired] = Sample()

    def on_send_expired(self, event: ev.SendExpired) -> None:
        """Note blocks that were held for a decode engine until the time was up."""
        chain = self.history.sends[event.request]
        lost = self.history.lost_since(chain[0].seq if chain else 0)
        self._expired.add(_Expired(event, (*chain[:1], *chain[1:][-9:]), lost))

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each sort of waits, the oldest in front, and one for all expired sends."""
        opened = waits(self.history, end)
        systematic = never_answered(self.history, opened)
        called = {rank for wait in opened for rank in wait.ranks if wait.doing("in_call")}
        alike: dict[Hashable, list[Wait]] = {}
        for wait in opened:
            if wait.what in ("load", "recv") or wait in systematic:
                continue
            if wait.what == "job" and wait.doing("in_call"):
                continue
            if wait.what == "job" and wait.doing("silent") and called & set(wait.ranks):
                continue  # it queues behind a call that has not returned, and the stall names it
            if wait.quarantined or wait.overdue:
                alike.setdefault((wait.sort, tuple(view.doing for view in wait.missing)), []).append(wait)
        for group in alike.values():
            yield self._held(group, end)
        if self._expired.number:
            yield self._expiry()

    def _held(self, group: list[Wait], end: End) -> Finding:
        first = group[0]
        certain, doubt = ("proven", None) if first.quarantined else certainty(end, group)
        ended = [view.last for view in first.doing("ended") if isinstance(view.last, ev.TransferFinished)]
        failed = [last for last in ended if last.outcome != "ok"]
        violated = tuple(event for event in first.chain if isinstance(event, ev.InvariantViolated))
        blocked = {name: each for name, each in blocked_requests(self.history, end).items() if name != first.request}
        codes = [each.code for last in failed for each in last.failures] + [last.code for last in failed]
        return Finding(
            of=LEAK,
            certainty=certain,
            facts=StillHeld(
                first=waiting(self.history, first),
                waits=len(group),
                held_blocks=sum(count(wait.blocks) for wait in group),
                settled=next((event for event in first.chain if isinstance(event, ev.JobSettled)), None),
                violated=violated,
                unasked=self._is_unasked(first),
                longest_wait_ns=longest_wait_ns(blocked),
            ),
            since_seq=first.since_seq,
            requests=(*dict.fromkeys(wait.request for wait in group), *blocked),
            suffering=tuple(blocked),
            jobs=tuple(wait.number for wait in group if wait.what == "job"),
            blocks=listed(tuple(part for wait in group for part in wait.blocks)),
            ranks=first.ranks,
            code=next((code for code in codes if code), None),
            lead_seq=min([event.seq for event in (failed or ended or violated)], default=first.since_seq),
            doubt=doubt,
            chain=with_events(evidence(first), last_events(blocked)),
            transfers=tuple(wait.transfer for wait in group if wait.transfer),
        )

    def _is_unasked(self, first: Wait) -> bool:
        """Return whether nobody has asked for a send, as far as the log goes."""
        send = self.history.state.book.sends.get(first.request) if first.what == "send" else None
        return send is not None and not send.pushes and all(how == "expired" for how in send.outcomes.values())

    def _expiry(self) -> Finding:
        first = next((each for each in self._expired.kept if not each.hidden), self._expired.kept[0])
        event, ready = first.event, _ready(first.chain)
        failed = next((each for each in first.chain if isinstance(each, ev.RankSent) and each.code), None)
        doubt = None
        if first.lost is not None and first.hidden and failed is None:
            doubt = QuestionLost(gap=first.lost)
        return Finding(
            of=LEAK,
            certainty="proven" if doubt is None else "undecidable",
            facts=Expired(
                event=event,
                sends=self._expired.number,
                ready=ready,
                failed=failed,
                asked=first.asked,
                hidden=first.hidden,
            ),
            since_seq=ready.seq if ready is not None else event.seq,
            requests=tuple(dict.fromkeys(each.event.request for each in self._expired.kept)),
            blocks=listed(tuple(part for each in self._expired.kept for part in _blocks(each.chain))),
            ranks=tuple(dict.fromkeys(rank for run in event.expired_ranks for rank in range(run[0], run[1] + 1))),
            code=failed.code if failed is not None else None,
            lead_seq=event.seq,
            doubt=doubt,
            chain=(*first.chain, event),
            transfers=tuple(each.event.transfer for each in self._expired.kept),
        )


def _ready(chain: tuple[ev.Event, ...] | EventList) -> ev.SendReady | None:
    return next((event for event in chain if isinstance(event, ev.SendReady)), None)


def _blocks(chain: tuple[ev.Event, ...]) -> Blocks:
    ready = _ready(chain)
    return ready.blocks if ready is not None else ()
