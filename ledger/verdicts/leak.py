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
from ledger import words
from ledger.blocks import Blocks, count, from_ranges
from ledger.verdicts.base import Finding, Kind, Role, Told, Verdict, listed
from ledger.verdicts.history import Chain, End, Trail
from ledger.verdicts.shared.ends import DOWN, is_down
from ledger.verdicts.shared.sample import Alike
from ledger.verdicts.shared.waits import (
    Wait,
    blocked_requests,
    certainty,
    describe,
    evidence,
    last_events,
    likewise,
    never_answered,
    waiting_behind,
    waits,
    with_events,
)

OTHER_LOG = (
    "Replay the decode engine's log together with this one: it shows whether the request arrived there, and asked."
)

RESTART = "Restart the engine when it can be spared: only that gives the held blocks back."

LEAK = Kind("leak", Role.SYMPTOM | Role.LASTS)


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

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._expired: Alike[_Expired] = Alike()

    def on_send_expired(self, event: ev.SendExpired) -> None:
        """Note blocks that were held for a decode engine in vain."""
        chain = self.trail.sends[event.request]
        lost = self.trail.lost_since(chain[0].seq if chain else 0)
        self._expired.add(_Expired(event, (*chain[:1], *chain[1:][-9:]), lost))

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each sort of waits, the oldest in front, and one for all expired sends."""
        opened = waits(self.trail, end)
        systematic = never_answered(self.trail, opened)
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
        certain, doubt = ("proven", "") if first.quarantined else certainty(end, group)
        ended = [view.last for view in first.doing("ended") if isinstance(view.last, ev.TransferFinished)]
        failed = [last for last in ended if last.outcome != "ok"]
        violated = [event for event in first.chain if isinstance(event, ev.InvariantViolated)]
        blocked = {name: each for name, each in blocked_requests(self.trail, end).items() if name != first.request}
        told = self._told(first, violated)
        held = words.plural(sum(count(wait.blocks) for wait in group), "block")
        codes = [each.code for last in failed for each in last.failures] + [last.code for last in failed]
        return Finding(
            of=LEAK,
            certainty=certain,
            since_seq=first.since_seq,
            requests=(*dict.fromkeys(wait.request for wait in group), *blocked),
            suffering=tuple(blocked),
            jobs=tuple(wait.number for wait in group if wait.what == "job"),
            blocks=listed(tuple(part for wait in group for part in wait.blocks)),
            ranks=first.ranks,
            code=next((code for code in codes if code), None),
            lead_seq=min([event.seq for event in (failed or ended or violated)], default=first.since_seq),
            chain=with_events(evidence(first), last_events(blocked)),
            transfers=tuple(wait.transfer for wait in group if wait.transfer),
            facts=Told(
                title=(
                    f"{first.name} of {words.request(first.request, first.generation)} {self._why(first, end)}"
                    f"{likewise(len(group) - 1, first.what)}; {held} held"
                ),
                culprit="; ".join(told),
                advice=self._advice(first, bool(failed), end),
                other_log=OTHER_LOG if first.what == "send" else "",
                doubt=doubt,
                shown=f"{first.name} is open since event {first.since_seq}, and still was at event {end.last.seq}"
                if doubt
                else "",
                impact=waiting_behind(blocked),
                also="" if _goes_on(end) or is_down(end) else RESTART,
            ),
        )

    @staticmethod
    def _why(first: Wait, end: End) -> str:
        open_for = words.span(first.open_ns)
        if first.quarantined:
            until = (
                "were held until the engine shut down" if is_down(end) else "stay held until the engine is restarted"
            )
            return f"is quarantined after a broken rule: its blocks {until}"
        if first.what == "send":
            return f"holds blocks for a decode engine that has not fetched them for {open_for}"
        if first.missing:
            settled = "had not settled by then" if _goes_on(end) else "did not settle in this log"
            return f"{settled}: no report of {words.ranks(first.ranks)} in {open_for}"
        freed = "had not freed its blocks by then" if _goes_on(end) else "did not free its blocks in this log"
        settled = next((event for event in first.chain if isinstance(event, ev.JobSettled)), None)
        how = f"settled at event {settled.seq} and " if settled is not None else ""
        why = "" if settled is not None else ", although every rank has reported"
        return f"{how}{freed}{why}; open for {open_for}"

    def _told(self, first: Wait, violated: list[ev.InvariantViolated]) -> list[str]:
        if first.quarantined:
            return [f"broken rule {event.rule}: {event.detail}" for event in violated] or ["a broken rule"]
        send = self.trail.state.book.sends.get(first.request) if first.what == "send" else None
        if send is not None and not send.pushes and all(how == "expired" for how in send.outcomes.values()):
            so_far = ", as far as this log goes" if first.blind else ""
            return [f"the decode engine, or the router before it: nobody has asked for this transfer{so_far}"]
        if not first.missing:
            return ["the scheduler: it settled the job and stopped before freeing"]
        return [describe(view, first.name.removeprefix("store ")) for view in first.missing]

    @staticmethod
    def _advice(first: Wait, failed: bool, end: End) -> str:
        if first.quarantined:
            return f"{DOWN} Report the broken rule with this file." if is_down(end) else RESTART
        if first.what == "send":
            return "See whether the request has arrived at a decode engine, and lives there."
        if not first.missing:
            return (
                "Look at the engine's log at its last step: it stopped between settling the job and freeing its blocks."
            )
        where = f"the worker log of {words.ranks(first.ranks)}"
        if _goes_on(end):
            later = "Replay the log without --until" if end.how == "as_of" else "Replay the log again in a minute"
            return f"{later}: the job may have settled since. If it has not, look at {where}."
        seen = next((view.last for view in first.missing if view.last is not None), None)
        at = f" at {words.clock(seen.ts_ns)} UTC" if seen is not None else ""
        error = " for the error" if failed else ""
        if is_down(end):
            return f"Look at {where}{at}{error}. {DOWN}"
        return f"Look at {where}{at}{error}; only a restart of the engine gives the blocks back."

    def _expiry(self) -> Finding:
        first = next((each for each in self._expired.kept if not each.hidden), self._expired.kept[0])
        event, send = first.event, f"send {first.event.transfer}"
        ready = _ready(first.chain)
        held = f"the blocks of {send} were held in vain"
        title = f"{send} of request {event.request} was freed only because it expired"
        if ready is not None:
            blocks = words.plural(count(ready.blocks), "block")
            held_for = words.span(event.mono_ns - ready.mono_ns)
            held = f"{held} for {held_for}"
            title = (
                f"{send} of request {event.request} held {blocks} for {held_for} in vain, and was freed only because "
                "it expired"
            )
        failed = [each for each in first.chain if isinstance(each, ev.RankSent) and each.code]
        inferred = ""
        if failed:
            why = words.failure(failed[0].code, failed[0].raw, failed[0].exception, failed[0].stage)
            culprit = f"the pushes of rank {failed[0].rank} failed: {why}"
        elif first.asked:
            culprit = "some decode workers asked and others did not: see whether all ranks of the decode engine lived"
        elif first.hidden:
            culprit = "the decode engine, or the router before it, if nobody asked for this transfer"
        else:
            culprit = "the decode engine, or the router before it: nobody asked for this transfer"
            inferred = "why: the request was rejected there, lost its client, or failed before asking"
        doubt = ""
        if first.lost is not None and first.hidden and not failed:
            doubt = f"{words.lost_at(first.lost)}, and that somebody asked for this transfer may be among them"
        return Finding(
            of=LEAK,
            certainty="undecidable" if doubt else "proven",
            since_seq=ready.seq if ready is not None else event.seq,
            requests=tuple(dict.fromkeys(each.event.request for each in self._expired.kept)),
            blocks=listed(tuple(part for each in self._expired.kept for part in _blocks(each.chain))),
            ranks=tuple(dict.fromkeys(rank for run in event.expired_ranks for rank in range(run[0], run[1] + 1))),
            code=failed[0].code if failed else None,
            lead_seq=event.seq,
            chain=(*first.chain, event),
            transfers=tuple(each.event.transfer for each in self._expired.kept),
            facts=Told(
                title=f"{title}{likewise(self._expired.number - 1, 'send')}",
                culprit=culprit,
                advice="Let the router tell the prefill engine when it gives a request up. Nothing is held any more.",
                other_log=OTHER_LOG,
                inferred=inferred,
                doubt=doubt,
                impact=(f"{held} and are free again",)
                if self._expired.number == 1
                else (
                    f"the blocks of {self._expired.number:,} sends were held until they expired, in vain, and are free now",
                ),
            ),
        )


def _goes_on(end: End) -> bool:
    """Return whether there is more to come after what was replayed, so that nothing can be said to be for ever."""
    return end.how in ("live", "as_of")


def _ready(chain: tuple[ev.Event, ...] | Chain) -> ev.SendReady | None:
    return next((event for event in chain if isinstance(event, ev.SendReady)), None)


def _blocks(chain: tuple[ev.Event, ...]) -> Blocks:
    ready = _ready(chain)
    return ready.blocks if ready is not None else ()
