"""`early_free`: blocks were given back although somebody may still read or write them.

    a rule      a job or load was settled or freed while ranks had not answered
    a grant     blocks of a load or recv were given to somebody while ranks may still write into them
    a call      a rank was still inside a call for a job or load that was over
    a start     a request ran on blocks into which ranks of its own load may still write

What comes of it, if the blocks are given away meanwhile, is `poison`. A start is undecidable where events of the
scheduler are lost since the load began: the request may have ended there, and come again on other blocks.
"""

from collections.abc import Hashable, Iterable
from typing import ClassVar

import msgspec

from ledger import events as ev
from ledger import words
from ledger.blocks import expand, numbers
from ledger.rules import Breach
from ledger.state.apply import Load
from ledger.state.pd import Recv
from ledger.verdicts.base import Finding, Kind, Role, Told
from ledger.verdicts.history import Chain, End, Trail, forget_oldest
from ledger.verdicts.shared.rules import Broken, FreedEarly, RuleBroken, RuleVerdict
from ledger.verdicts.shared.sample import Alike
from ledger.verdicts.shared.waits import likewise

KEPT_AFTER = 6
"""Later events of the same work that are kept: they show that it was not over."""

Subject = tuple[str, int | str]
"""`("job", id)`, `("load", id)` or `("transfer", id)`."""

EARLY_FREE = Kind(Breach.EARLY_FREE.value, Role.CAUSE | Role.FREES_EARLY | Role.MISCOUNTS | Role.WRONG_KV)


class _Released(msgspec.Struct, frozen=True):
    event: ev.BlocksAllocated | ev.RequestScheduled | ev.RequestResumed | ev.TransferStarted | ev.TransferFinished
    subject: Subject
    request: str
    began: int
    blocks: tuple[tuple[int, int], ...]
    waiting: tuple[int, ...]
    before: tuple[ev.Event, ...]
    chain: Chain
    """Its events, which go on as long as it is open."""
    doubt: str = ""
    """Why it is not certain that it was early; empty if it is."""

    @property
    def what(self) -> str:
        """What it is called: `store job 3`, `load 4`, `transfer x1`."""
        return f"{self.noun} {self.subject[1]}"

    @property
    def noun(self) -> str:
        """What it is: `store job`, `load`, `transfer`."""
        return "store job" if self.subject[0] == "job" else self.subject[0]

    @property
    def sort(self) -> tuple[Hashable, ...]:
        """What it has in common with the releases that one finding tells together with it."""
        return self.event.__class__, self.subject[0], self.waiting, bool(self.doubt)


class EarlyFree(RuleVerdict):
    """Blocks given back too early."""

    kinds: ClassVar[tuple[Kind, ...]] = (EARLY_FREE,)
    facts: ClassVar[type[RuleBroken]] = FreedEarly
    advice: ClassVar[str] = (
        "Do not trust the output of who got the blocks since (`kvledger blame FILE G:B` names them), and reset the "
        "prefix cache. The fault is in the connector that freed them: report it with this file."
    )

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._released: dict[tuple[Hashable, ...], Alike[_Released]] = {}
        self._told: dict[Subject, None] = {}
        self._over = trail.over  # looked at for every call

    def finding(self, alike: Alike[Broken]) -> Finding:
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
            self._hit(event, given, ("load", number), load.request, load, load.waiting, self.trail.loads[number])
        for request, recv in book.recvs.items():
            self._hit(
                event,
                given,
                ("transfer", recv.transfer),
                request,
                recv,
                recv.missing_ranks(),
                self.trail.recvs[request],
            )

    def _called(self, event: ev.TransferStarted | ev.TransferFinished) -> None:
        """A call began or ended; the job or load that it is for must not have been over.

        Evidence comes in late, so it is the step that the worker was told of, and its clock, that count.
        """
        if event.job >= 0:
            key: Subject = ("job", event.job)
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
                event, key, over.request, over.event.seq, tuple(expand(blocks)), (event.rank,), tuple(over.told), []
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
            self._went_on(event, ("load", number), load, load.waiting, self.trail.loads[number])
        if recv is not None and recv.blocks and recv.missing_ranks():
            self._went_on(
                event, ("transfer", recv.transfer), recv, recv.missing_ranks(), self.trail.recvs[event.request]
            )

    on_request_scheduled = on_request_resumed = _runs

    def _went_on(
        self,
        event: ev.RequestScheduled | ev.RequestResumed,
        subject: Subject,
        opened: Load | Recv,
        waiting: tuple[int, ...],
        chain: list[ev.Event],
    ) -> None:
        began = next((each for each in chain if isinstance(each, ev.LoadRegistered | ev.RecvRegistered)), None)
        # A load that is not asynchronous is done within the step in which its request runs.
        if began is None or began.step >= event.step:
            return
        if not self.trail.same_life(event.request, event.generation, opened):
            return
        lost = self.trail.lost_since(opened.since_seq)
        doubt = (
            f"{words.lost_at(lost)}, and the request may have ended there and come again, on other blocks"
            if lost is not None
            else ""
        )
        blocks = tuple(sorted(expand(opened.blocks)))
        self._keep(
            _Released(event, subject, event.request, opened.since_seq, blocks, waiting, tuple(chain[-8:]), chain, doubt)
        )

    def _hit(
        self,
        event: ev.BlocksAllocated,
        given: set[int],
        subject: Subject,
        request: str,
        opened: Load | Recv,
        waiting: tuple[int, ...],
        chain: list[ev.Event],
    ) -> None:
        if not waiting or subject in self._told:
            return
        if event.request == request and self.trail.same_life(request, event.generation, opened):
            return
        hit = tuple(sorted(block for block in expand(opened.blocks) if block[1] in given))
        if not hit:
            return
        lost = self.trail.lost_since(opened.since_seq)
        gone = lost is not None and not self.trail.restored_after(lost.seq)
        doubt = f"{words.lost_at(lost)}, and it may have ended there" if lost is not None and gone else ""
        self._keep(_Released(event, subject, request, opened.since_seq, hit, waiting, tuple(chain[-8:]), chain, doubt))

    def _keep(self, released: _Released) -> None:
        """Keep the first release of a job, load or transfer, or only count it."""
        if released.subject in self._told:
            return
        self._told[released.subject] = None
        forget_oldest(self._told)
        self._released.setdefault(released.sort, Alike()).add(released)

    def findings(self, end: End) -> Iterable[Finding]:
        """Return the broken rules, and the loads whose blocks were given up under them, those of one sort together."""
        yield from super().findings(end)
        told: set[Subject] = set()
        for broken in self.broken:
            told |= {("job", broken.job), ("load", broken.load), ("transfer", broken.transfer)}
        for alike in self._released.values():
            # Where a rule was broken by settling it, this is what came of it.
            kept = [each for each in alike.kept if each.subject not in told]
            if kept:
                yield self._early(kept, alike.number - (len(alike.kept) - len(kept)))

    def _early(self, group: list[_Released], number: int) -> Finding:
        each = group[0]
        blocks, ranks = words.plural(len(each.blocks), "block"), words.ranks(each.waiting)
        if isinstance(each.event, ev.BlocksAllocated):
            to = "another life of request" if each.event.request == each.request else "request"
            how = f"were given to {to} {each.event.request} while {ranks} may still write into them"
            title = f"{blocks} of {each.what} of request {each.request} {how}"
            culprit = f"the scheduler freed the blocks of {each.what} before every rank had settled"
        elif isinstance(each.event, ev.TransferStarted | ev.TransferFinished):
            verb = "began" if isinstance(each.event, ev.TransferStarted) else "ended"
            call = words.call_of_its_rank(each.event.op, each.event.transfer, each.event.rank)
            title = f"rank {each.event.rank}'s {call} {verb} after {each.what} of request {each.request} was over"
            culprit = f"the scheduler counted {each.what} as done on rank {each.event.rank} before it was"
        else:
            went = "may have gone on" if each.doubt else "went on"
            title = f"request {each.request} {went} while {ranks} may still write into its {blocks} ({each.what})"
            culprit = f"the scheduler counted {each.what} as finished before every rank had answered"
        events = [*each.before, each.event, *_after(each.chain, each.event)]
        shown = {event.seq: event for event in events}
        subjects = [each.subject for each in group]
        names = dict.fromkeys(name for each in group for name in (each.request, each.event.request) if name)
        transfers = [name for what, name in subjects if what == "transfer"]
        return Finding(
            of=EARLY_FREE,
            certainty="undecidable" if each.doubt else "proven",
            since_seq=each.event.seq,
            requests=tuple(names),
            jobs=tuple(name for what, name in subjects if what == "job" and isinstance(name, int)),
            loads=tuple(name for what, name in subjects if what == "load" and isinstance(name, int)),
            blocks=tuple(sorted({block for each in group for block in each.blocks})),
            ranks=each.waiting,
            lead_seq=each.event.seq,
            chain=tuple(shown[seq] for seq in sorted(shown)),
            transfers=tuple(map(str, transfers)),
            facts=Told(
                title=f"{title}{likewise(number - 1, each.noun)}",
                culprit=culprit,
                advice=self.advice,
                doubt=each.doubt,
                impact=(_impact(group, number),),
            ),
        )


def _impact(group: list[_Released], number: int) -> str:
    """Return whose KV may be wrong: of who runs on the blocks, or of whoever gets them."""
    if isinstance(group[0].event, ev.TransferStarted | ev.TransferFinished):
        return "the answer of whoever got these blocks, or loads what was stored from them, may be wrong"
    names = list(dict.fromkeys(each.event.request for each in group))
    if number == 1 or len(names) == 1:
        return f"the answer of request {names[0]} may be wrong"
    least = "at least " if number > len(group) else ""
    return f"the answers of {least}{len(names)} requests ({words.listed(names)}) may be wrong"


def _after(chain: Chain, event: ev.Event) -> list[ev.Event]:
    """Return the first calls and answers that came after an event."""
    kinds = ev.TransferStarted | ev.TransferFinished | ev.PeerSettled | ev.RankSent | ev.RankLoaded | ev.RankCompleted
    return [each for each in chain if each.seq > event.seq and isinstance(each, kinds)][:KEPT_AFTER]
