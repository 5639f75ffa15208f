"""`poison`: a transfer read or wrote a block while it belonged to another request.

    a read      a put stores what the new owner had written under the old owner's key; whoever loads that key gets
                wrong KV
    a write     a get or a pull writes the old owner's KV over that of the new owner

It is judged by ownership. The log records who got a block that open work still names (`blocks_allocated`); the work
that was open then is on trial, and each of its calls that was open after that place is a hit. How certain that is
depends on what orders the two, because a worker's evidence comes in late:

    proven      the call began after the worker had been told of a step later than the one that gave the block away: the
                new owner's first forward pass lay between
    suspected   the call was open when the block was given away, or the order of the two within a step is not recorded,
                or the new owner's own load or recv may have written the block afterwards, or events of the scheduler
                are lost before its first run, or both owners are lives of the same request, whose KV may be the same

The first 2,000 calls are told one by one. Of further ones a finding says how many there are, and from where to where.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from ledger import events as ev
from ledger import words
from ledger.blocks import Blocks, expand, numbers, of_pairs
from ledger.state.apply import Job, Load
from ledger.state.pd import Recv, Send
from ledger.verdicts.base import Finding, Kind, TaintedKey, Told, Verdict
from ledger.verdicts.history import Chain, End, Trail
from ledger.verdicts.shared.poisoning import (
    GIVEN_AWAY,
    POISON,
    Grant,
    Hit,
    Untold,
    Work,
    advice_for,
    culprit_of,
    doubt_of,
    impact_of,
    shown_by,
    time_line,
    untold_finding,
)

Call = tuple[str, int, str]
"""A transfer's id, its rank, and its peer."""

KEPT_GRANTS = 2000
"""Events that give blocks away under open work, and are kept. A sound connector makes none."""

KEPT_RELEASES = 256

KEPT_LOADERS = 500

KEPT_ANSWERS = 4

KEPT_HITS = 2000
"""Calls that touched blocks of another owner, and are told one by one; further ones are counted."""

KEPT_CAUGHT = 2000
"""Blocks that a worker has seen change, and that are told one by one; further ones are counted."""


class Poison(Verdict):
    """Blocks that were read or written under a new owner.

    Attributes:
        hits: the calls that touched blocks of another owner and have ended, as far as they are told one by one.
        untold: the others.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (POISON,)

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self.hits: list[Hit] = []
        self.untold = Untold()
        self._grants: list[Grant] = []
        self._ends: list[ev.Event] = []
        self._open: dict[Call, list[Hit]] = {}
        self._tainted: dict[str, Hit] = {}
        self._moved: dict[str, list[Hit]] = {}
        self._loaders: dict[str, list[ev.TransferStarted]] = {}
        self._loading: dict[Call, list[ev.TransferFinished]] = {}
        self._loader_count = 0
        self._caught: dict[tuple[int, int], list[ev.PoisonCaught]] = {}
        self._caught_count = 0

    # --- who owned what ---------------------------------------------------------------------------------------------

    def on_blocks_released(self, event: ev.BlocksReleased) -> None:
        """Remember who gave up blocks that open work names."""
        self._end(event)

    def on_request_preempted(self, event: ev.RequestPreempted) -> None:
        """Remember who lost blocks while work was open."""
        if self.state.book.jobs:
            self._end(event)

    def _end(self, event: ev.Event) -> None:
        self._ends.append(event)
        if len(self._ends) > 2 * KEPT_RELEASES:
            del self._ends[:KEPT_RELEASES]

    def on_blocks_allocated(self, event: ev.BlocksAllocated) -> None:
        """Put the work that is open on trial, and its calls that are open already."""
        if len(self._grants) >= KEPT_GRANTS:
            self._forget_old_grants()
        given = frozenset(numbers(event.blocks))
        grant = Grant(event, given, None, self._open_work(event, given), event)
        if not grant.works:
            return
        self._grants.append(grant)
        for key, work in grant.works.items():
            for started in _open_calls(self._chain(key)):
                self._judge(started, grant, work)

    def _forget_old_grants(self) -> None:
        """Drop the grants whose work is over, and if none is, the oldest: the first ones have told the story."""
        book = self.state.book
        alive = [grant for grant in self._grants if any(work.job in book.jobs for work in grant.works.values())]
        self._grants = alive[len(alive) // 2 :]

    def _open_work(self, event: ev.BlocksAllocated, given: frozenset[int]) -> dict[tuple[str, int | str], Work]:
        """Return the open work of other owners that names the blocks, or that may do so because it has pinned none."""
        book, trail = self.state.book, self.trail
        works: dict[tuple[str, int | str], Work] = {}
        for number, job in book.jobs.items():
            if self._is_owner(event, job.request, job) or (job.blocks and not _overlap(job.blocks, given)):
                continue
            chain = trail.jobs.get(number)
            began = chain[0] if chain else None
            works["job", number] = Work(
                f"store job {number}", number, job.request, job.generation, began, bool(job.blocks)
            )
        for number, load in book.loads.items():
            if not self._is_owner(event, load.request, load) and load.waiting and _overlap(load.blocks, given):
                chain = trail.loads.get(number)
                works["load", number] = Work(
                    f"load {number}", -1, load.request, load.generation, chain[0] if chain else None, True, load=number
                )
        for request, recv in book.recvs.items():
            if not self._is_owner(event, request, recv) and recv.missing_ranks() and _overlap(recv.blocks, given):
                chain = trail.recvs.get(request)
                works["transfer", recv.transfer] = Work(
                    f"recv {recv.transfer}",
                    -1,
                    request,
                    recv.generation,
                    chain[0] if chain else None,
                    True,
                    transfer=recv.transfer,
                )
        for request, send in book.sends.items():
            if not self._is_owner(event, request, send) and send.waiting and _overlap(send.blocks, given):
                chain = trail.sends.get(request)
                works["transfer", send.transfer] = Work(
                    f"send {send.transfer}",
                    -1,
                    request,
                    send.generation,
                    chain[0] if chain else None,
                    True,
                    transfer=send.transfer,
                )
        return works

    def _is_owner(self, event: ev.BlocksAllocated, request: str, opened: Job | Load | Send | Recv) -> bool:
        """Return whether it is the life of the request that the work belongs to which gets the blocks."""
        return event.request == request and self.trail.same_life(request, event.generation, opened)

    def _chain(self, key: tuple[str, int | str]) -> Chain:
        what, name = key
        if isinstance(name, int):
            return (self.trail.jobs if what == "job" else self.trail.loads).get(name, [])
        transfers = (*self.trail.recvs.values(), *self.trail.sends.values())
        found: Chain = []
        return next((chain for chain in transfers if chain and getattr(chain[0], "transfer", "") == name), found)

    def on_load_planned(self, event: ev.LoadPlanned) -> None:
        """Blocks that were given out for a load are written by the load."""
        for grant in reversed(self._grants):
            given = grant.event
            if (given.step, given.request, given.generation) != (event.step, event.request, event.generation):
                return
            if grant.numbers.issubset(numbers(event.blocks)):
                grant.written, grant.load = None, event.load

    def on_load_settled(self, event: ev.LoadSettled) -> None:
        """A load that ended well has written its blocks."""
        if event.outcome == "loaded":
            for grant in self._grants:
                if grant.load == event.load and grant.written is None:
                    grant.written = event

    def on_recv_registered(self, event: ev.RecvRegistered) -> None:
        """A request that waits for a transfer does not run: its blocks are written by the transfer."""
        if not event.blocks:
            return
        for grant in self._grants:
            given = grant.event
            is_its_own = (given.request, given.generation) == (event.request, event.generation)
            if is_its_own and grant.ran is None and not self.trail.came_later(event.request, given.seq):
                grant.written = None
                if grant.numbers.issubset(numbers(event.blocks)):
                    grant.transfer = event.transfer

    def on_recv_settled(self, event: ev.RecvSettled) -> None:
        """A transfer that ended well has written its blocks."""
        if event.outcome == "loaded":
            for grant in self._grants:
                if grant.transfer == event.transfer and grant.written is None:
                    grant.written = event

    def _runs(self, event: ev.RequestScheduled | ev.RequestResumed) -> None:
        for grant in self._grants:
            given = grant.event
            if (given.request, given.generation) != (event.request, event.generation):
                continue
            # An id that comes back begins with generation 1 again, and runs on other blocks.
            came_later = self.trail.came_later(event.request, given.seq)
            if not came_later and self.trail.lost_since(given.seq) is None:
                grant.written = grant.written or event
                grant.ran = grant.ran or event

    on_request_scheduled = on_request_resumed = _runs

    # --- who read and wrote -----------------------------------------------------------------------------------------

    def on_transfer_started(self, event: ev.TransferStarted) -> None:
        """Judge a call that begins after its blocks were given away; note who loads a tainted key."""
        if self._grants:
            key = _key(event)
            for grant in self._grants:
                work = grant.works.get(key)
                if work is not None:
                    self._judge(event, grant, work)
        if self._tainted and event.op == "get":
            for key in event.keys:
                if key in self._tainted and self._loader_count < KEPT_LOADERS:
                    self._loader_count += 1
                    self._loaders.setdefault(key, []).append(event)
                    self._loading.setdefault((event.transfer, event.rank, event.peer), [])

    def on_transfer_finished(self, event: ev.TransferFinished) -> None:
        """Close the calls that were judged, and those that loaded a tainted key."""
        loading = self._loading.get((event.transfer, event.rank, event.peer))
        if loading is not None:
            loading.append(event)
        if not self._open:
            return
        for hit in self._open.pop((event.transfer, event.rank, event.peer), ()):
            hit.finished = event
            hit.failed_keys = frozenset(failure.key for failure in event.failures)
            told = hit.open_after  # else it had ended before, and its evidence came in late
            if told and len(self.hits) < KEPT_HITS:
                self.hits.append(hit)
            elif told:
                self._leave_out(hit)
                told = False
            tainted = set(hit.tainted_keys()) if told else ()
            for key in hit.keys:
                if self._tainted.get(key) is hit and key not in tainted:
                    del self._tainted[key]

    def _leave_out(self, hit: Hit) -> None:
        """Count a call that is not told one by one, and forget it."""
        self.untold.add(hit)
        transfer = hit.work.transfer
        left = [each for each in self._moved.pop(transfer, ()) if each is not hit]
        if left:
            self._moved[transfer] = left
        others: list[ev.PoisonCaught] = []
        for event in self._caught.pop((hit.work.job, hit.started.rank), ()):
            if event.key in hit.keys:
                self.untold.add_caught(event)
            else:
                others.append(event)
        if others:
            self._caught[hit.work.job, hit.started.rank] = others

    def on_peer_settled(self, event: ev.PeerSettled) -> None:
        """Keep what a peer answers after the blocks of its transfer were given away."""
        for hit in self._moved.get(event.transfer, ()):
            if event.rank == hit.started.rank and len(hit.answers) < KEPT_ANSWERS:
                hit.answers.append(event)

    def on_poison_caught(self, event: ev.PoisonCaught) -> None:
        """Keep what a worker has seen change under its put."""
        if self._caught_count >= KEPT_CAUGHT or self.untold.calls:
            self.untold.add_caught(event)
            return
        self._caught_count += 1
        self._caught.setdefault((event.job, event.rank), []).append(event)

    def _judge(self, started: ev.TransferStarted, grant: Grant, work: Work) -> None:
        order = list(expand(started.blocks))
        touched = [index for index, block in enumerate(order) if block[1] in grant.numbers]
        if not touched:
            return
        call = (started.transfer, started.rank, started.peer)
        if any(hit.grant is grant and hit.work is work for hit in self._open.get(call, ())):
            return
        if grant.released is None:
            grant.released = self._released_before(grant, work)
            grant.lost_by = self._lost_by(grant, work)
            grant.ran = grant.ran or self._ran_in_step(grant)
        keys = tuple(started.keys[index] for index in touched if index < len(started.keys))
        hit = Hit(started, grant, work, tuple(order[index] for index in touched), keys)
        if work.transfer:
            self._moved.setdefault(work.transfer, []).append(hit)
        self._open.setdefault(call, []).append(hit)
        for key in hit.tainted_keys():
            self._tainted.setdefault(key, hit)

    def _released_before(self, grant: Grant, work: Work) -> Any:
        """Return the event by which the old owner lost the blocks, the last one before the block was given away."""
        for event in reversed(self._ends):
            if getattr(event, "request", "") != work.request or event.seq > grant.event.seq:
                continue
            if not isinstance(event, ev.BlocksReleased) or not grant.numbers.isdisjoint(numbers(event.blocks)):
                return event
        return None

    def _lost_by(self, grant: Grant, work: Work) -> ev.Event | None:
        """Return the event after which the old owner had to give its blocks up."""
        preempted = (
            event
            for event in reversed(self._ends)
            if isinstance(event, ev.RequestPreempted)
            and (event.request, event.generation) == (work.request, work.generation)
        )
        ended = self.trail.ended.get(work.request)
        if ended is not None and (ended.generation != work.generation or ended.seq > grant.event.seq):
            ended = None
        return next(preempted, ended)

    def _ran_in_step(self, grant: Grant) -> ev.Event | None:
        """Return the run of the new owner in the step in which it got the blocks."""
        life = self.trail.requests.get(grant.event.request, [])
        runs = [event for event in life if isinstance(event, ev.RequestScheduled | ev.RequestResumed)]
        return runs[-1] if runs and runs[-1].step == grant.event.step else None

    # --- what was found ---------------------------------------------------------------------------------------------

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each job, load or recv, and one for all that is not told one by one."""
        works: dict[str, list[Hit]] = {}
        caught = {key: list(events) for key, events in self._caught.items()}
        still_open = (hit for hits in self._open.values() for hit in hits)
        for hit in sorted((*self.hits, *still_open), key=lambda hit: hit.judged_seq):
            seen = caught.get((hit.work.job, hit.started.rank), [])
            hit.caught = [event for event in seen if event.key in hit.keys]
            for event in hit.caught:
                seen.remove(event)
            works.setdefault(hit.work.name, []).append(hit)
        for hits in works.values():
            yield self._finding(hits)
        for (job, rank), events in caught.items():
            if events:
                yield self._changed(job, rank, events)
        if self.untold.calls or self.untold.caught:
            yield untold_finding(self.untold)

    def _finding(self, hits: list[Hit]) -> Finding:
        proven = [hit for hit in hits if hit.proven]
        told = proven or hits
        first, work = told[0], told[0].work
        blocks = tuple(sorted({block for hit in told for block in hit.blocks}))
        keys = list(dict.fromkeys(key for hit in told for key in hit.tainted_keys()))
        stored = {key for hit in told if hit.finished is not None for key in hit.tainted_keys()}
        loads = [load for key in keys for load in self._loaders.get(key, ())]
        loaders = list(dict.fromkeys(load.request for load in loads if load.request))
        owners = list(dict.fromkeys(hit.grant.event.request for hit in told))
        reads = first.started.op in ("put", "push")
        grant = first.grant.event
        new = f"{words.request(grant.request, grant.generation)}" + (
            f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        )
        old = words.request(work.request, work.generation)
        which = words.these_blocks(of_pairs(blocks), 8)
        they = "it" if len(blocks) == 1 else "they"
        hold = "may hold" if not proven else "holds" if len(stored) == 1 else "hold"
        if reads:
            read = "read" if proven else "may have read"
            title = f"{work.name} of {old} {read} {which} after {they} had been given to {new}"
            if stored:
                title += f": {words.plural(len(stored), 'key')} of {old} {hold} KV of another request"
            if len(stored) < len(keys):
                pending = words.plural(len(keys) - len(stored), "key")
                title += f"; no return of a put of {pending} is in this log, and it may store KV of another request"
        else:
            wrote = "wrote" if proven else "may have written"
            title = f"{work.name} of {old} {wrote} into {which} after {they} had been given to {new}"
        did = ("read" if reads else "wrote into") if proven else f"may have {'read' if reads else 'written into'}"
        brief = f"{work.name} {did} its {words.plural(len(blocks), 'block')} after {they} had been given to {new}"
        if stored:
            brief = f"{words.plural(len(stored), 'key')} {hold} KV of another request: {brief}"
        caught = [event for hit in told for event in hit.caught]
        given = first.grant
        events = [work.began, given.lost_by, given.released, grant, given.written, given.ran, first.started]
        loads_ended = [end for load in loads for end in self._loading.get((load.transfer, load.rank, load.peer), ())]
        events += [first.finished, *first.answers, *loads[:4], *loads_ended[:4], *caught[:4]]
        writes = () if reads else owners
        chain = {event.seq: event for event in events if event is not None}
        return Finding(
            of=POISON,
            certainty="proven" if proven else "suspected",
            since_seq=grant.seq,
            requests=tuple(dict.fromkeys([work.request, *owners, *loaders])),
            jobs=(work.job,) if work.job >= 0 else (),
            blocks=blocks,
            ranks=tuple(sorted({hit.started.rank for hit in told})),
            cause=GIVEN_AWAY if work.job >= 0 else "",
            suffering=tuple(name for name in dict.fromkeys([*owners, *loaders]) if name != work.request),
            loads=(work.load,) if work.load >= 0 else (),
            transfers=(work.transfer,) if work.transfer else (),
            lead_seq=grant.seq,
            chain=tuple(chain[seq] for seq in sorted(chain)),
            unpinned_jobs=(work.job,) if work.job >= 0 and not work.pinned else (),
            tainted=tuple(
                TaintedKey(
                    key=key,
                    block=block,
                    rank=hit.started.rank,
                    job=work.job,
                    old_owner=(work.request, work.generation),
                    new_owner=(hit.grant.event.request, hit.grant.event.generation),
                    loaded_by=tuple(dict.fromkeys(load.request for load in self._loaders.get(key, ()))),
                    certainty="proven" if hit.is_proven(key) else "suspected",
                    returned=hit.finished is not None,
                    removed=any(event.key == key and event.removed for event in hit.caught),
                )
                for hit in hits
                for key, block in zip(hit.keys, hit.blocks, strict=False)
                if key in hit.tainted_keys()
            ),
            facts=Told(
                title=title + (f"; loaded by {words.listed(loaders)}" if loaders else ""),
                culprit=culprit_of(work),
                advice=advice_for(work, keys),
                also=f"The same for the keys of job {work.job}." if keys else "",
                shown="" if proven else shown_by(first),
                doubt="" if proven else doubt_of(first),
                notes=tuple(time_line(told)),
                brief=brief,
                impact=impact_of(loaders, writes, keys, proven=bool(proven)),
            ),
        )

    @staticmethod
    def _changed(job: int, rank: int, events: list[ev.PoisonCaught]) -> Finding:
        """Return the finding for blocks that changed under a put, when the log does not say who got them."""
        first = events[0]
        left = [event for event in events if not event.removed]
        blocks = tuple(sorted({(event.group, event.block) for event in events}))
        return Finding(
            of=POISON,
            certainty="proven",
            since_seq=first.seq,
            requests=(first.request,) if first.request else (),
            jobs=(job,),
            blocks=blocks,
            ranks=(rank,),
            code="CRC_MISMATCH",
            lead_seq=first.seq,
            chain=tuple(events[:8]),
            tainted=tuple(
                TaintedKey(
                    key=event.key,
                    block=(event.group, event.block),
                    rank=rank,
                    job=job,
                    old_owner=(event.request, 0),
                    new_owner=None,
                    loaded_by=(),
                    certainty="proven",
                    removed=event.removed,
                )
                for event in events
            ),
            facts=Told(
                title=(
                    f"{words.these_blocks(of_pairs(blocks))} changed while store job {job} of request {first.request} put "
                    f"{'it' if len(blocks) == 1 else 'them'}: {words.plural(len(events), 'key')} held other KV than was "
                    f"meant, and {f'{len(left)} could not be removed' if left else 'were removed'}"
                ),
                culprit="whoever wrote into these blocks under the job; the log does not say who got them",
                advice=(
                    "Remove the keys that are left from the store, or change cache_prefix."
                    if left
                    else "The keys are gone, so nothing wrong can be loaded; see why the job's blocks were not held."
                ),
            ),
        )


def _key(event: ev.TransferStarted) -> tuple[str, int | str]:
    if event.job >= 0:
        return "job", event.job
    if event.load >= 0:
        return "load", event.load
    return "transfer", event.transfer


def _open_calls(chain: Chain) -> list[ev.TransferStarted]:
    calls: dict[Call, ev.TransferStarted] = {}
    for event in chain:
        if isinstance(event, ev.TransferStarted):
            calls[event.transfer, event.rank, event.peer] = event
        elif isinstance(event, ev.TransferFinished):
            calls.pop((event.transfer, event.rank, event.peer), None)
    return list(calls.values())


def _overlap(named: Blocks, given: frozenset[int]) -> bool:
    return not given.isdisjoint(numbers(named))
