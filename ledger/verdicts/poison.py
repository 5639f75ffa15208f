"""`poison`: a transfer read or wrote a block while it belonged to another request.

    a read      a put stores what the new owner had written under the old owner's key; whoever loads that key gets
                wrong KV
    a write     a get or a pull writes the old owner's KV over that of the new owner

It is judged by ownership. The log records who got a block that open work still names (`blocks_allocated`); the work
that was open then is on trial, and each of its calls that was open after that place is a access. How certain that is
depends on what orders the two, because a worker's evidence comes in late:

    proven      the call began after the worker had been told of a step later than the one that gave the block away: the
                new owner's first forward pass lay between
    suspected   the call was open when the block was given away, or the order of the two within a step is not recorded,
                or the new owner's own load or recv may have written the block afterwards, or events of the scheduler
                are lost before its first run, or both owners are lives of the same request, whose KV may be the same

The first 2,000 calls are shown one by one. Of further ones a finding says how many there are, and from where to where.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

from ledger import events as ev
from ledger.blocks import Blocks, expand, numbers
from ledger.state.records import Job, Load, Recv, Send
from ledger.verdicts.base import Facts, Finding, Kind, TaintedKey, Verdict
from ledger.verdicts.history import End, EventList, History
from ledger.verdicts.shared.poisoning import (
    GIVEN_AWAY,
    POISON,
    Block,
    BlockReuse,
    NoneProven,
    Overflow,
    StaleAccess,
    WorkAtRisk,
    WorkSort,
    doubt_of,
)

Call = tuple[str, int, str]
"""A transfer's id, its rank, and its peer."""

KEPT_REUSES = 2000
"""Events that give blocks away under open work, and are kept. A sound connector makes none."""

KEPT_RELEASES = 256

KEPT_LOADERS = 500

KEPT_ANSWERS = 4

KEPT_ACCESSES = 2000
"""Calls that touched blocks of another owner, and are shown one by one; further ones are counted."""

KEPT_CHANGED = 2000
"""Blocks that a worker has seen change, and that are shown one by one; further ones are counted."""


SHOWN_ACCESSES = 3
"""Calls of one job, load or transfer whose blocks are followed from owner to owner in words."""


class Touch(msgspec.Struct, frozen=True, kw_only=True):
    """A call that touched blocks of another owner, with what shows it.

    Attributes:
        blocks: `(group, block)` of those it touched.
        released: by what the old owner lost them, if it is remembered.
        reused: by what the new owner got them.
        started, finished: the call; it is not finished if the log has no end of it.
    """

    blocks: tuple[Block, ...]
    released: ev.Event | None
    reused: ev.BlocksAllocated
    started: ev.TransferStarted
    finished: ev.TransferFinished | None


class Touched(Facts, frozen=True, kw_only=True):
    """A job, load, send or recv whose calls touched blocks after they had been given to another owner.

    Attributes:
        sort, id: which job, load, send or recv.
        pinned: whether it held references on its blocks.
        old_owner: the request and generation that it belongs to.
        owners: the requests that the blocks were given to.
        reads: whether it read the blocks (a put or push), or wrote into them.
        stored: keys that it stored from them.
        pending: keys of puts that have no end in the log.
        loaders: requests that have loaded such keys.
        touches: the first of its calls; those that are proven, if there is one.
    """

    sort: WorkSort
    id: int | str
    pinned: bool
    old_owner: tuple[str, int]
    owners: tuple[str, ...]
    reads: bool
    stored: int
    pending: int
    loaders: tuple[str, ...]
    touches: tuple[Touch, ...]


class Changed(Facts, frozen=True, kw_only=True):
    """Blocks that a worker saw change under a put, when the log does not say who got them.

    Attributes:
        job, request: whose put it was.
        keys: keys that held other KV than was meant.
        left: how many of them could not be removed from the store.
    """

    job: int
    request: str
    keys: int
    left: int


class ManyTouched(Facts, frozen=True, kw_only=True):
    """Calls that touched blocks of other owners and blocks that changed, too many to be shown one by one.

    Attributes:
        calls: how many calls.
        proven: how many of them are proven.
        first, last: the first and the last call; None if there are changed blocks only.
        first_work, last_work: the sort and id of what they were for.
        changed: blocks that a worker saw change under a put.
        stores: whether keys in the store are concerned.
    """

    calls: int
    proven: int
    first: ev.TransferStarted | None
    last: ev.TransferStarted | None
    first_work: tuple[WorkSort, int | str] | None
    last_work: tuple[WorkSort, int | str] | None
    changed: int
    stores: bool


class Poison(Verdict):
    """Blocks that were read or written under a new owner.

    Attributes:
        accesses: the calls that touched blocks of another owner and have ended, as far as they are shown one by one.
        overflow: the others.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (POISON,)

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.accesses: list[StaleAccess] = []
        self.overflow = Overflow()
        self._reuses: list[BlockReuse] = []
        self._ends: list[ev.Event] = []
        self._open: dict[Call, list[StaleAccess]] = {}
        self._tainted: dict[str, StaleAccess] = {}
        self._moved: dict[str, list[StaleAccess]] = {}
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
        if len(self._reuses) >= KEPT_REUSES:
            self._forget_old_reuses()
        given = frozenset(numbers(event.blocks))
        reuse = BlockReuse(event, given, None, self._open_work(event, given), event)
        if not reuse.works:
            return
        self._reuses.append(reuse)
        for key, work in reuse.works.items():
            for started in _open_calls(self._chain(key)):
                self._judge(started, reuse, work)

    def _forget_old_reuses(self) -> None:
        """Drop the reuses whose work is over, and if none is, the oldest: the first ones show what happened."""
        book = self.state.book
        alive = [reuse for reuse in self._reuses if any(work.job in book.jobs for work in reuse.works.values())]
        self._reuses = alive[len(alive) // 2 :]

    def _open_work(self, event: ev.BlocksAllocated, given: frozenset[int]) -> dict[tuple[str, int | str], WorkAtRisk]:
        """Return the open work of other owners that names the blocks, or that may do so because it has pinned none."""
        book, history = self.state.book, self.history
        works: dict[tuple[str, int | str], WorkAtRisk] = {}
        for number, job in book.jobs.items():
            if self._is_owner(event, job.request, job) or (job.blocks and not _overlap(job.blocks, given)):
                continue
            began = _first(history.jobs.get(number))
            works["job", number] = WorkAtRisk(
                "store job", job.request, job.generation, began, pinned=bool(job.blocks), job=number
            )
        for number, load in book.loads.items():
            if not self._is_owner(event, load.request, load) and load.waiting and _overlap(load.blocks, given):
                began = _first(history.loads.get(number))
                works["load", number] = WorkAtRisk("load", load.request, load.generation, began, load=number)
        for request, recv in book.recvs.items():
            if not self._is_owner(event, request, recv) and recv.missing_ranks() and _overlap(recv.blocks, given):
                began = _first(history.recvs.get(request))
                works["transfer", recv.transfer] = WorkAtRisk(
                    "recv", request, recv.generation, began, transfer=recv.transfer
                )
        for request, send in book.sends.items():
            if not self._is_owner(event, request, send) and send.waiting and _overlap(send.blocks, given):
                began = _first(history.sends.get(request))
                works["transfer", send.transfer] = WorkAtRisk(
                    "send", request, send.generation, began, transfer=send.transfer
                )
        return works

    def _is_owner(self, event: ev.BlocksAllocated, request: str, opened: Job | Load | Send | Recv) -> bool:
        """Return whether it is the life of the request that the work belongs to which gets the blocks."""
        return event.request == request and self.history.same_generation(request, event.generation, opened)

    def _chain(self, key: tuple[str, int | str]) -> EventList:
        what, name = key
        if isinstance(name, int):
            return (self.history.jobs if what == "job" else self.history.loads).get(name, [])
        transfers = (*self.history.recvs.values(), *self.history.sends.values())
        found: EventList = []
        return next((chain for chain in transfers if chain and getattr(chain[0], "transfer", "") == name), found)

    def on_load_planned(self, event: ev.LoadPlanned) -> None:
        """Blocks that were given out for a load are written by the load."""
        for reuse in reversed(self._reuses):
            given = reuse.event
            if (given.step, given.request, given.generation) != (event.step, event.request, event.generation):
                return
            if reuse.numbers.issubset(numbers(event.blocks)):
                reuse.written, reuse.load = None, event.load

    def on_load_settled(self, event: ev.LoadSettled) -> None:
        """A load that ended well has written its blocks."""
        if event.outcome == "loaded":
            for reuse in self._reuses:
                if reuse.load == event.load and reuse.written is None:
                    reuse.written = event

    def on_recv_registered(self, event: ev.RecvRegistered) -> None:
        """A request that waits for a transfer does not run: its blocks are written by the transfer."""
        if not event.blocks:
            return
        for reuse in self._reuses:
            given = reuse.event
            is_its_own = (given.request, given.generation) == (event.request, event.generation)
            if is_its_own and reuse.ran is None and not self.history.is_reused_id(event.request, given.seq):
                reuse.written = None
                if reuse.numbers.issubset(numbers(event.blocks)):
                    reuse.transfer = event.transfer

    def on_recv_settled(self, event: ev.RecvSettled) -> None:
        """A transfer that ended well has written its blocks."""
        if event.outcome == "loaded":
            for reuse in self._reuses:
                if reuse.transfer == event.transfer and reuse.written is None:
                    reuse.written = event

    def _runs(self, event: ev.RequestScheduled | ev.RequestResumed) -> None:
        for reuse in self._reuses:
            given = reuse.event
            if (given.request, given.generation) != (event.request, event.generation):
                continue
            # An id that comes back begins with generation 1 again, and runs on other blocks.
            is_reused_id = self.history.is_reused_id(event.request, given.seq)
            if not is_reused_id and self.history.lost_since(given.seq) is None:
                reuse.written = reuse.written or event
                reuse.ran = reuse.ran or event

    on_request_scheduled = on_request_resumed = _runs

    # --- who read and wrote -----------------------------------------------------------------------------------------

    def on_transfer_started(self, event: ev.TransferStarted) -> None:
        """Judge a call that begins after its blocks were given away; note who loads a tainted key."""
        if self._reuses:
            key = _key(event)
            for reuse in self._reuses:
                work = reuse.works.get(key)
                if work is not None:
                    self._judge(event, reuse, work)
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
        for access in self._open.pop((event.transfer, event.rank, event.peer), ()):
            access.finished = event
            access.failed_keys = frozenset(failure.key for failure in event.failures)
            shown = access.open_after  # else it had ended before, and its evidence came in late
            if shown and len(self.accesses) < KEPT_ACCESSES:
                self.accesses.append(access)
            elif shown:
                self._leave_out(access)
                shown = False
            tainted = set(access.tainted_keys()) if shown else ()
            for key in access.keys:
                if self._tainted.get(key) is access and key not in tainted:
                    del self._tainted[key]

    def _leave_out(self, access: StaleAccess) -> None:
        """Count a call that is not shown one by one, and forget it."""
        self.overflow.add(access)
        transfer = access.work.transfer
        left = [each for each in self._moved.pop(transfer, ()) if each is not access]
        if left:
            self._moved[transfer] = left
        others: list[ev.PoisonCaught] = []
        for event in self._caught.pop((access.work.job, access.started.rank), ()):
            if event.key in access.keys:
                self.overflow.add_changed(event)
            else:
                others.append(event)
        if others:
            self._caught[access.work.job, access.started.rank] = others

    def on_peer_settled(self, event: ev.PeerSettled) -> None:
        """Keep what a peer answers after the blocks of its transfer were given away."""
        for access in self._moved.get(event.transfer, ()):
            if event.rank == access.started.rank and len(access.answers) < KEPT_ANSWERS:
                access.answers.append(event)

    def on_poison_caught(self, event: ev.PoisonCaught) -> None:
        """Keep what a worker has seen change under its put."""
        if self._caught_count >= KEPT_CHANGED or self.overflow.calls:
            self.overflow.add_changed(event)
            return
        self._caught_count += 1
        self._caught.setdefault((event.job, event.rank), []).append(event)

    def _judge(self, started: ev.TransferStarted, reuse: BlockReuse, work: WorkAtRisk) -> None:
        order = list(expand(started.blocks))
        touched = [index for index, block in enumerate(order) if block[1] in reuse.numbers]
        if not touched:
            return
        call = (started.transfer, started.rank, started.peer)
        if any(access.reuse is reuse and access.work is work for access in self._open.get(call, ())):
            return
        if reuse.released is None:
            reuse.released = self._released_before(reuse, work)
            reuse.lost_by = self._lost_by(reuse, work)
            reuse.ran = reuse.ran or self._ran_in_step(reuse)
        keys = tuple(started.keys[index] for index in touched if index < len(started.keys))
        access = StaleAccess(started, reuse, work, tuple(order[index] for index in touched), keys)
        if work.transfer:
            self._moved.setdefault(work.transfer, []).append(access)
        self._open.setdefault(call, []).append(access)
        for key in access.tainted_keys():
            self._tainted.setdefault(key, access)

    def _released_before(self, reuse: BlockReuse, work: WorkAtRisk) -> Any:
        """Return the event by which the old owner lost the blocks, the last one before the block was given away."""
        for event in reversed(self._ends):
            if getattr(event, "request", "") != work.request or event.seq > reuse.event.seq:
                continue
            if not isinstance(event, ev.BlocksReleased) or not reuse.numbers.isdisjoint(numbers(event.blocks)):
                return event
        return None

    def _lost_by(self, reuse: BlockReuse, work: WorkAtRisk) -> ev.Event | None:
        """Return the event after which the old owner had to give its blocks up."""
        preempted = (
            event
            for event in reversed(self._ends)
            if isinstance(event, ev.RequestPreempted)
            and (event.request, event.generation) == (work.request, work.generation)
        )
        ended = self.history.ended_requests.get(work.request)
        if ended is not None and (ended.generation != work.generation or ended.seq > reuse.event.seq):
            ended = None
        return next(preempted, ended)

    def _ran_in_step(self, reuse: BlockReuse) -> ev.Event | None:
        """Return the run of the new owner in the step in which it got the blocks."""
        life = self.history.requests.get(reuse.event.request, [])
        runs = [event for event in life if isinstance(event, ev.RequestScheduled | ev.RequestResumed)]
        return runs[-1] if runs and runs[-1].step == reuse.event.step else None

    # --- what was found ---------------------------------------------------------------------------------------------

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each job, load or recv, and one for all that is not shown one by one."""
        works: dict[tuple[str, int | str], list[StaleAccess]] = {}
        caught = {key: list(events) for key, events in self._caught.items()}
        still_open = (access for accesses in self._open.values() for access in accesses)
        for access in sorted((*self.accesses, *still_open), key=lambda access: access.judged_seq):
            seen = caught.get((access.work.job, access.started.rank), [])
            access.caught = [event for event in seen if event.key in access.keys]
            for event in access.caught:
                seen.remove(event)
            works.setdefault((access.work.sort, access.work.id), []).append(access)
        for accesses in works.values():
            yield self._finding(accesses)
        for (job, rank), events in caught.items():
            if events:
                yield _changed(job, rank, events)
        if self.overflow.calls or self.overflow.changed:
            yield _many(self.overflow)

    def _finding(self, accesses: list[StaleAccess]) -> Finding:
        proven = [access for access in accesses if access.proven]
        shown = proven or accesses
        first, work = shown[0], shown[0].work
        keys = list(dict.fromkeys(key for access in shown for key in access.tainted_keys()))
        stored = {key for access in shown if access.finished is not None for key in access.tainted_keys()}
        loads = [load for key in keys for load in self._loaders.get(key, ())]
        loaders = list(dict.fromkeys(load.request for load in loads if load.request))
        owners = list(dict.fromkeys(access.reuse.event.request for access in shown))
        return Finding(
            of=POISON,
            certainty="proven" if proven else "suspected",
            since_seq=first.reuse.event.seq,
            requests=tuple(dict.fromkeys([work.request, *owners, *loaders])),
            jobs=(work.job,) if work.job >= 0 else (),
            blocks=tuple(sorted({block for access in shown for block in access.blocks})),
            ranks=tuple(sorted({access.started.rank for access in shown})),
            cause=GIVEN_AWAY if work.job >= 0 else "",
            suffering=tuple(name for name in dict.fromkeys([*owners, *loaders]) if name != work.request),
            loads=(work.load,) if work.load >= 0 else (),
            transfers=(work.transfer,) if work.transfer else (),
            lead_seq=first.reuse.event.seq,
            chain=self._shown_by(shown, loads),
            unpinned_jobs=(work.job,) if work.job >= 0 and not work.pinned else (),
            tainted=self._tainted_keys(accesses),
            doubt=None if proven else doubt_of(first),
            facts=Touched(
                sort=work.sort,
                id=work.id,
                pinned=work.pinned,
                old_owner=(work.request, work.generation),
                owners=tuple(owners),
                reads=first.started.op in ("put", "push"),
                stored=len(stored),
                pending=len(keys) - len(stored),
                loaders=tuple(loaders),
                touches=tuple(map(_touch, shown[:SHOWN_ACCESSES])),
            ),
        )

    def _shown_by(self, accesses: list[StaleAccess], loads: list[ev.TransferStarted]) -> tuple[ev.Event, ...]:
        """Return the events that show stale accesses, and some loads of what they stored."""
        first, given = accesses[0], accesses[0].reuse
        ended = [end for load in loads for end in self._loading.get((load.transfer, load.rank, load.peer), ())]
        caught = [event for access in accesses for event in access.caught]
        events = [first.work.began, given.lost_by, given.released, given.event, given.written, given.ran]
        events += [first.started, first.finished, *first.answers, *loads[:4], *ended[:4], *caught[:4]]
        return _in_order(events)

    def _tainted_keys(self, accesses: list[StaleAccess]) -> tuple[TaintedKey, ...]:
        return tuple(
            TaintedKey(
                key=key,
                block=block,
                rank=access.started.rank,
                job=access.work.job,
                old_owner=(access.work.request, access.work.generation),
                new_owner=(access.reuse.event.request, access.reuse.event.generation),
                loaded_by=tuple(dict.fromkeys(load.request for load in self._loaders.get(key, ()))),
                certainty="proven" if access.is_proven(key) else "suspected",
                returned=access.finished is not None,
                removed=any(event.key == key and event.removed for event in access.caught),
            )
            for access in accesses
            for key, block in zip(access.keys, access.blocks, strict=False)
            if key in access.tainted_keys()
        )


def _touch(access: StaleAccess) -> Touch:
    return Touch(
        blocks=access.blocks,
        released=access.reuse.released,
        reused=access.reuse.event,
        started=access.started,
        finished=access.finished,
    )


def _changed(job: int, rank: int, events: list[ev.PoisonCaught]) -> Finding:
    """Return the finding for blocks that changed under a put, when the log does not say who got them."""
    first = events[0]
    return Finding(
        of=POISON,
        certainty="proven",
        since_seq=first.seq,
        requests=(first.request,) if first.request else (),
        jobs=(job,),
        blocks=tuple(sorted({(event.group, event.block) for event in events})),
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
        facts=Changed(
            job=job, request=first.request, keys=len(events), left=sum(not event.removed for event in events)
        ),
    )


def _many(overflow: Overflow) -> Finding:
    """Return the finding for all that is not shown one by one."""
    first, last = overflow.first, overflow.last
    calls = [access for access in (first, last) if access is not None]
    events = [event for access in calls for event in (access.reuse.event, access.started, access.finished)]
    chain = _in_order([*events, overflow.first_changed])
    proven = overflow.proven > 0 or overflow.changed > 0
    return Finding(
        of=POISON,
        certainty="proven" if proven else "suspected",
        since_seq=chain[0].seq,
        cause=GIVEN_AWAY if first is not None and first.work.job >= 0 else "",
        lead_seq=chain[0].seq,
        chain=chain,
        overflow=True,
        doubt=None if proven else NoneProven(),
        facts=ManyTouched(
            calls=overflow.calls,
            proven=overflow.proven,
            first=first.started if first is not None else None,
            last=last.started if last is not None else None,
            first_work=(first.work.sort, first.work.id) if first is not None else None,
            last_work=(last.work.sort, last.work.id) if last is not None else None,
            changed=overflow.changed,
            stores=overflow.changed > 0 or any(access.work.job >= 0 for access in calls),
        ),
    )


def _in_order(events: Iterable[ev.Event | None]) -> tuple[ev.Event, ...]:
    found = {event.seq: event for event in events if event is not None}
    return tuple(found[seq] for seq in sorted(found))


def _key(event: ev.TransferStarted) -> tuple[str, int | str]:
    if event.job >= 0:
        return "job", event.job
    if event.load >= 0:
        return "load", event.load
    return "transfer", event.transfer


def _open_calls(chain: EventList) -> list[ev.TransferStarted]:
    calls: dict[Call, ev.TransferStarted] = {}
    for event in chain:
        if isinstance(event, ev.TransferStarted):
            calls[event.transfer, event.rank, event.peer] = event
        elif isinstance(event, ev.TransferFinished):
            calls.pop((event.transfer, event.rank, event.peer), None)
    return list(calls.values())


def _first(chain: EventList | None) -> ev.Event | None:
    return chain[0] if chain else None


def _overlap(named: Blocks, given: frozenset[int]) -> bool:
    return not given.isdisjoint(numbers(named))
