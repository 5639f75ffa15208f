"""`early_free`: blocks were given back although somebody may still read or write them.

    a rule      a job or load was settled or freed while ranks had not answered
    a reuse     blocks of a load or recv were given to somebody while ranks may still write into them
    a call      a rank was still inside a call for a job or load that was over
    a start     a request ran on blocks into which ranks of its own load may still write

What comes of it, if the blocks are given away meanwhile, is `poison`. A start is undecidable where events of the
scheduler are lost since the load began: the request may have ended there, and come again on other blocks.
"""

from collections.abc import Hashable, Iterable
from typing import ClassVar, Literal, TypeAlias

import msgspec

from ledger import events as ev
from ledger.blocks import expand, numbers
from ledger.rules import Breach
from ledger.state.records import Load, Recv
from ledger.verdicts.base import Doubt, Facts, Finding, Kind, Role
from ledger.verdicts.history import End, EventList, History, forget_oldest
from ledger.verdicts.shared.rules import Broken, FreedEarly, RuleBroken, RuleVerdict
from ledger.verdicts.shared.sample import Sample

KEPT_AFTER = 6
"""Later events of the same work that are kept: they show that it was not over."""

WorkRef: TypeAlias = Literal["job", "load", "transfer"]

HeldWork: TypeAlias = tuple[WorkRef, int | str]
"""The sort of the work, and its id."""

EARLY_FREE = Kind(Breach.EARLY_FREE.value, Role.CAUSE | Role.FREES_EARLY | Role.MISCOUNTS | Role.WRONG_KV)


class EndLost(Doubt, frozen=True, kw_only=True):
    """Events are lost, and among them may be the end of the load or transfer.

    Attributes:
        again: the request may have ended there, too, and come again on other blocks.
    """

    gap: ev.Gap
    again: bool


class Released(Facts, frozen=True, kw_only=True):
    """Blocks that were free or in use again while a load, transfer or job may still have read or written them.

    Attributes:
        sort, id: the first work of which that is so.
        request: whose work it is.
        event: what shows it: blocks given to somebody, a request that runs, or a call that begins or ends.
        blocks: how many blocks are concerned.
        waiting: the ranks that had not answered, or the rank whose call it is.
        number: how many jobs, loads or transfers it is so for.
        reached: the requests that got the blocks or ran on them, of those that are kept.
        all_reached: whether these are all.
    """

    sort: WorkRef
    id: int | str
    request: str
    event: ev.BlocksAllocated | ev.RequestScheduled | ev.RequestResumed | ev.TransferStarted | ev.TransferFinished
    blocks: int
    waiting: tuple[int, ...]
    number: int
    reached: tuple[str, ...]
    all_reached: bool


class _Released(msgspec.Struct, frozen=True):
    event: ev.BlocksAllocated | ev.RequestScheduled | ev.RequestResumed | ev.TransferStarted | ev.TransferFinished
    subject: HeldWork
    request: str
    began: int
    blocks: tuple[tuple[int, int], ...]
    waiting: tuple[int, ...]
    before: tuple[ev.Event, ...]
    chain: EventList
    """Its events, which go on as long as it is open."""
    doubt: EndLost | None = None
    """Why it is not certain that it was early."""

    @property
    def sort(self) -> tuple[Hashable, ...]:
        """What it has in common with the releases that are in one finding with it."""
        return self.event.__class__, self.subject[0], self.waiting, self.doubt is not None


class EarlyFree(RuleVerdict):
    """Blocks given back too early."""

    kinds: ClassVar[tuple[Kind, ...]] = (EARLY_FREE,)
    facts: ClassVar[type[RuleBroken]] = FreedEarly

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._released: dict[tuple[Hashable, ...], Sample[_Released]] = {}
        self._seen: dict[HeldWork, None] = {}
        self._over = history.ended_work  # looked at for every call

    def finding(self, alike: Sample[Broken]) -> Finding:
        """Return the finding for one rule, with what shows that the work was not over."""
        found, first = super().finding(alike), alike.kept[0]
        return msgspec.structs.replace(found, chain=(*found.chain, *_after(first.chain, first.event)))

    def on_blocks_allocated(self, event: ev.BlocksAllocated) -> None:
        """Somebody gets blocks; a load or recv of somebody else into them must be over.

        A request that merely gives them up proves nothing: vLLM keeps the blocks of one that ends while it is loading.
        """
        book = self.state.book
        if not (book.loads or book.recvs):
            return
        given = set(numbers(event.blocks))  # one pool for all groups, so a number is one piece of memory
        for number, load in book.loads.items():
            self._reused(event, given, ("load", number), load.request, load, load.waiting, self.history.loads[number])
        for request, recv in book.recvs.items():
            self._reused(
                event,
                given,
                ("transfer", recv.transfer),
                request,
                recv,
                recv.missing_ranks(),
                self.history.recvs[request],
            )

    def _called(self, event: ev.TransferStarted | ev.TransferFinished) -> None:
        """A call began or ended; the job or load that it is for must not have been over.

        Evidence comes in late, so it is the step that the worker was told of, and its clock, that count.
        """
        if event.job >= 0:
            key: HeldWork = ("job", event.job)
        elif event.load >= 0:
            key = ("load", event.load)
        else:
            return
        over = self._over.get(key)
        if over is None or event.step <= over.event.step or event.ts_ns <= over.event.ts_ns:
            return
        blocks = over.event.blocks if isinstance(over.event, ev.BlocksFreed) else over.blocks
        self._keep(
            _Released(
                event, key, over.request, over.event.seq, tuple(expand(blocks)), (event.rank,), tuple(over.events), []
            )
        )

    on_transfer_started = on_transfer_finished = _called

    def _runs(self, event: ev.RequestScheduled | ev.RequestResumed) -> None:
        """A request runs; a load or recv of its own, given to the workers in an earlier step, must be over."""
        book = self.state.book
        if not (book.loading or book.recvs):
            return
        number = book.loading.get(event.request, -1)
        load, recv = book.loads.get(number), book.recvs.get(event.request)
        if load is not None and load.waiting:
            self._went_on(event, ("load", number), load, load.waiting, self.history.loads[number])
        if recv is not None and recv.blocks and recv.missing_ranks():
            self._went_on(
                event, ("transfer", recv.transfer), recv, recv.missing_ranks(), self.history.recvs[event.request]
            )

    on_request_scheduled = on_request_resumed = _runs

    def _went_on(
        self,
        event: ev.RequestScheduled | ev.RequestResumed,
        subject: HeldWork,
        opened: Load | Recv,
        waiting: tuple[int, ...],
        chain: list[ev.Event],
    ) -> None:
        began = next((each for each in chain if isinstance(each, ev.LoadRegistered | ev.RecvRegistered)), None)
        # A load that is not asynchronous is done within the step in which its request runs.
        if began is None or began.step >= event.step:
            return
        if not self.history.same_generation(event.request, event.generation, opened):
            return
        lost = self.history.lost_since(opened.since_seq)
        doubt = EndLost(gap=lost, again=True) if lost is not None else None
        blocks = tuple(sorted(expand(opened.blocks)))
        self._keep(
            _Released(event, subject, event.request, opened.since_seq, blocks, waiting, tuple(chain[-8:]), chain, doubt)
        )

    def _reused(
        self,
        event: ev.BlocksAllocated,
        given: set[int],
        subject: HeldWork,
        request: str,
        opened: Load | Recv,
        waiting: tuple[int, ...],
        chain: list[ev.Event],
    ) -> None:
        if not waiting or subject in self._seen:
            return
        if event.request == request and self.history.same_generation(request, event.generation, opened):
            return
        shared = tuple(sorted(block for block in expand(opened.blocks) if block[1] in given))
        if not shared:
            return
        lost = self.history.lost_since(opened.since_seq)
        gone = lost is not None and not self.history.restored_after(lost.seq)
        doubt = EndLost(gap=lost, again=False) if lost is not None and gone else None
        self._keep(
            _Released(event, subject, request, opened.since_seq, shared, waiting, tuple(chain[-8:]), chain, doubt)
        )

    def _keep(self, released: _Released) -> None:
        """Keep the first release of a job, load or transfer, or only count it."""
        if released.subject in self._seen:
            return
        self._seen[released.subject] = None
        forget_oldest(self._seen)
        self._released.setdefault(released.sort, Sample()).add(released)

    def findings(self, end: End) -> Iterable[Finding]:
        """Return the broken rules, and the loads whose blocks were given up under them, one finding for each sort."""
        yield from super().findings(end)
        settled: set[HeldWork] = set()
        for broken in self.broken:
            settled |= {("job", broken.job), ("load", broken.load), ("transfer", broken.transfer)}
        for alike in self._released.values():
            # Where a rule was broken by settling it, this is what came of it.
            kept = [each for each in alike.kept if each.subject not in settled]
            if kept:
                yield _early(kept, alike.number - (len(alike.kept) - len(kept)))


def _early(group: list[_Released], number: int) -> Finding:
    each = group[0]
    events = [*each.before, each.event, *_after(each.chain, each.event)]
    shown = {event.seq: event for event in events}
    subjects = [each.subject for each in group]
    names = dict.fromkeys(name for each in group for name in (each.request, each.event.request) if name)
    return Finding(
        of=EARLY_FREE,
        certainty="undecidable" if each.doubt is not None else "proven",
        since_seq=each.event.seq,
        requests=tuple(names),
        jobs=tuple(name for what, name in subjects if what == "job" and isinstance(name, int)),
        loads=tuple(name for what, name in subjects if what == "load" and isinstance(name, int)),
        blocks=tuple(sorted({block for each in group for block in each.blocks})),
        ranks=each.waiting,
        lead_seq=each.event.seq,
        chain=tuple(shown[seq] for seq in sorted(shown)),
        transfers=tuple(str(name) for what, name in subjects if what == "transfer"),
        doubt=each.doubt,
        facts=Released(
            sort=each.subject[0],
            id=each.subject[1],
            request=each.request,
            event=each.event,
            blocks=len(each.blocks),
            waiting=each.waiting,
            number=number,
            reached=tuple(dict.fromkeys(each.event.request for each in group)),
            all_reached=number <= len(group),
        ),
    )


def _after(chain: EventList, event: ev.Event) -> list[ev.Event]:
    """Return the first calls and answers that came after an event."""
    kinds = ev.TransferStarted | ev.TransferFinished | ev.PeerSettled | ev.RankSent | ev.RankLoaded | ev.RankCompleted
    return [each for each in chain if each.seq > event.seq and isinstance(each, kinds)][:KEPT_AFTER]
