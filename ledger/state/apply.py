"""The book: what the scheduler knows, as a projection of the log.

`State.apply` is the only way to change it. It is deterministic: no I/O, no clock, no configuration; everything it needs
is in the event. It accepts an event, or refuses it with a named rule and changes nothing. The live scheduler and
`kvledger replay` run this same code, so a file and the engine that wrote it can be compared by a digest.

Two sorts of events pass through here. *Decisions* are the connector's own (a job is registered, blocks are freed): the
rules of the book hold for them, and what breaks a rule is refused. *Observations* are what vLLM did (a request was
scheduled, preempted, finished): they are facts, so they are taken as they come.

This file knows events and block lists. P/D transfers have their rules in `ledger.state.pd`.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import msgspec

from ledger import events as ev
from ledger.blocks import NULL_BLOCK, Blocks, expand, from_ranges, spoken
from ledger.errors import Refused
from ledger.state import invariants as inv
from ledger.state import pd as transfers
from ledger.state.pd import Recv, Send

RequestState: TypeAlias = Literal["queued", "loading", "running", "preempted"]
"""Where a request is, as far as the connector was told. `loading` is vLLM's WAITING_FOR_REMOTE_KVS."""


class RequestRecord(msgspec.Struct):
    """A request that vLLM has not ended yet."""

    generation: int
    state: RequestState = "queued"
    since_seq: int = 0
    looked_up: tuple[int, int] | None = None
    """The last answer of the store: hit tokens and local tokens."""
    failed_loads: dict[int, int] = {}
    """How many loads of this request failed, by the token up to which they would have brought it."""
    skipping: bool = False
    """Its last save was skipped, so further skips are not news."""
    after_failure: Literal["deferred", "answered"] | msgspec.UnsetType = msgspec.UNSET
    """What its lookups with a hit were told since its last load failed. A planned load, or a run, begins anew."""


class Job(msgspec.Struct):
    """A store job from its registration until its blocks are freed."""

    request: str
    generation: int
    since_seq: int
    since_mono_ns: int
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    """Ranks that have not reported, lowest first."""
    outcomes: dict[int, str] = {}
    blocks: Blocks = ()
    tokens: int = 0
    settled: bool = False
    quarantined: bool = False
    """A report contradicted the book: the blocks stay pinned for good."""
    suspected: bool = False


class Load(msgspec.Struct):
    """A load from its plan until it settles."""

    request: str
    generation: int
    since_seq: int
    since_mono_ns: int
    blocks: Blocks
    tokens: int = 0
    end_token: int = 0
    """The token up to which the load brings the request."""
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    outcomes: dict[int, str] = {}
    failed: bool = False
    suspected: bool = False
    ended: str | msgspec.UnsetType = msgspec.UNSET
    """How its request ended while the load was open."""


class Book(msgspec.Struct):
    """All that is in the projection.

    Its JSON is what the digest is taken of, so it holds nothing without a fixed order.
    """

    requests: dict[str, RequestRecord] = {}
    jobs: dict[int, Job] = {}
    loads: dict[int, Load] = {}
    loading: dict[str, int] = {}
    """The open load of a request."""
    next_job: int = 0
    next_load: int = 0
    violations: int = 0
    sends: dict[str, Send] = {}
    """The open send of a request: its blocks go to a decode engine."""
    recvs: dict[str, Recv] = {}
    """The open recv of a request: its blocks come from a prefill engine."""
    prefills: dict[str, dict[int, tuple[str, ...]]] = {}
    """The workers of a prefill engine that wrote to each rank at last, for the engines used last."""


Handler: TypeAlias = Callable[[Any], None]

BlockCounts: TypeAlias = dict[int, dict[int, int]]
"""A count by block, by KV-cache group."""


class State:
    """The projection, its indexes, and `apply`.

    Attributes:
        book: the projection itself. Read it freely; only `apply` writes it.
        pins: how many jobs pin each block, by group. An index of `book.jobs`.
        targets: how many loads write each block, by group. An index of `book.loads`.
        held: how many sends and recvs name each block, by group. An index of `book.sends` and `book.recvs`.
        pending_jobs: how many jobs still wait for a rank and will be settled. An index of `book.jobs`.
    """

    def __init__(self, book: Book | None = None) -> None:
        self.book = Book()
        self.pins: BlockCounts = {}
        self.targets: BlockCounts = {}
        self.held: BlockCounts = {}
        self.pending_jobs = 0
        self._handlers: dict[type[ev.Event], Handler] = {
            ev.RequestQueued: self._request_queued,
            ev.RequestScheduled: self._request_running,
            ev.RequestPreempted: self._request_preempted,
            ev.RequestResumed: self._request_running,
            ev.RequestFinished: self._request_ended,
            ev.RequestAborted: self._request_ended,
            ev.JobRegistered: self._job_registered,
            ev.JobSkipped: self._job_skipped,
            ev.PinTouched: self._pin_touched,
            ev.RankCompleted: self._rank_completed,
            ev.JobSettled: self._job_settled,
            ev.BlocksFreed: self._blocks_freed,
            ev.LookupAnswered: self._lookup_answered,
            ev.LookupDeferred: self._lookup_deferred,
            ev.LookupSuppressed: self._lookup_suppressed,
            ev.LoadPlanned: self._load_planned,
            ev.LoadRegistered: self._load_registered,
            ev.RankLoaded: self._rank_loaded,
            ev.LoadFailed: self._load_failed,
            ev.LoadSettled: self._load_settled,
            ev.InvariantViolated: self._invariant_violated,
            ev.StallSuspected: self._stall_suspected,
            **{kind: functools.partial(rule, self) for kind, rule in transfers.RULES.items()},
        }
        if book is not None:
            self.restore(book)

    # --- reading ----------------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Return the book as JSON, in the order in which its parts came: the same bytes for the same events."""
        return _ENCODER.encode(self.book)

    def digest(self) -> str:
        """Return the SHA-256 of `encode()`, in hex."""
        return hashlib.sha256(self.encode()).hexdigest()

    def restore(self, book: Book) -> None:
        """Take over a whole book, as a checkpoint after a gap carries it."""
        self.book = book
        self.pins = {}
        self.targets = {}
        self.held = {}
        self.pending_jobs = 0
        for job in book.jobs.values():
            _count_up(self.pins, job.blocks)
            if not job.quarantined:
                self.pending_jobs += 1
        for load in book.loads.values():
            _count_up(self.targets, load.blocks)
        for transfer in (*book.sends.values(), *book.recvs.values()):
            self.hold(transfer.blocks)

    def hold(self, blocks: Blocks) -> None:
        """Count one more open transfer over `blocks`. For `ledger.state.pd` alone."""
        _count_up(self.held, blocks)

    def let_go(self, blocks: Blocks) -> None:
        """Count one open transfer less over `blocks`. For `ledger.state.pd` alone."""
        _count_down(self.held, blocks)

    def pinned_blocks(self) -> int:
        """Return how many different blocks jobs pin."""
        return sum(map(len, self.pins.values()))

    def unpinned(self, blocks: Blocks) -> int:
        """Return how many of `blocks` no job pins yet."""
        return sum(block not in self.pins.get(group, ()) for group, block in expand(blocks))

    def named(self, group: int, ids: Iterable[int]) -> list[int]:
        """Return those blocks of `ids`, given out in `group`, that an open job, load or transfer names, in order.

        Named in whichever group: vLLM has one pool for all groups, so a number is one piece of memory, and a block that
        one group gives up may come back in another.
        """
        named = [counts for index in (self.pins, self.targets, self.held) for counts in index.values() if counts]
        if len(named) == 1:
            counts = named[0]
            return [block for block in ids if block in counts]
        return [block for block in ids if any(block in counts for counts in named)]

    # --- writing ----------------------------------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        """Change the state as `event` says.

        Raises:
            Refused: a rule of the book forbids the event. Nothing was changed.
        """
        handler = self._handlers.get(event.__class__)
        if handler is not None:
            handler(event)

    # --- requests: observations, taken as they come -------------------------------------------------------------------

    def _request_queued(self, event: ev.RequestQueued) -> None:
        self.book.requests[event.request] = RequestRecord(event.generation, since_seq=event.seq)

    def _request_running(self, event: ev.RequestScheduled | ev.RequestResumed) -> None:
        self._enter(event.request, event.generation, "running", event.seq)

    def _request_preempted(self, event: ev.RequestPreempted) -> None:
        self._enter(event.request, event.generation + 1, "preempted", event.seq)

    def _enter(self, request: str, generation: int, state: RequestState, seq: int) -> None:
        record = self.book.requests.get(request)
        if record is None or record.generation != generation:
            fresh = RequestRecord(generation, state, seq)
            if record is not None:
                fresh.failed_loads, fresh.after_failure = record.failed_loads, record.after_failure
            self.book.requests[request] = fresh
        else:
            record.state = state
            record.since_seq = seq
        if state == "running":
            self.book.requests[request].after_failure = msgspec.UNSET  # it found room, so the next hit is a new one

    def _request_ended(self, event: ev.RequestFinished | ev.RequestAborted) -> None:
        self.book.requests.pop(event.request, None)
        load = self.book.loads.get(self.book.loading.get(event.request, -1))
        if load is not None and not load.ended:
            load.ended = event.reason if isinstance(event, ev.RequestFinished) else "aborted"

    # --- store jobs ---------------------------------------------------------------------------------------------------

    def _job_registered(self, event: ev.JobRegistered) -> None:
        book = self.book
        if event.job < book.next_job:
            raise Refused(inv.JOB_ID_REUSED, f"job {event.job} was registered before; the next id is {book.next_job}")
        ranks = tuple(from_ranges(event.ranks))
        if not ranks:
            raise Refused(inv.JOB_WITHOUT_RANKS, f"job {event.job} names no rank that could ever report")
        book.jobs[event.job] = Job(
            event.request, event.generation, event.seq, event.mono_ns, ranks, ranks, tokens=event.tokens
        )
        book.next_job = event.job + 1
        self.pending_jobs += 1
        record = book.requests.get(event.request)
        if record is not None:
            record.skipping = False

    def _job_skipped(self, event: ev.JobSkipped) -> None:
        record = self.book.requests.get(event.request)
        if record is not None:
            record.skipping = True

    def _pin_touched(self, event: ev.PinTouched) -> None:
        job = self._job(event.job)
        if job.blocks:
            raise Refused(inv.PINNED_TWICE, f"job {event.job} has pinned its blocks already")
        if job.settled or job.outcomes:
            raise Refused(inv.PINNED_LATE, f"job {event.job} pins blocks after a rank has reported")
        if _names_null_block(event.blocks):
            raise Refused(inv.NULL_BLOCK_PINNED, f"job {event.job} pins the null block, which backs no KV")
        job.blocks = event.blocks
        _count_up(self.pins, event.blocks)

    def _rank_completed(self, event: ev.RankCompleted) -> None:
        job = self._job(event.job)
        rank = event.rank
        if rank not in job.waiting:
            if rank in job.outcomes:
                raise Refused(inv.RANK_REPORTED_TWICE, f"rank {rank} had reported job {event.job} before")
            raise Refused(
                inv.UNEXPECTED_RANK, f"rank {rank} is not one of the ranks {spoken(job.ranks)} of job {event.job}"
            )
        job.waiting = tuple([other for other in job.waiting if other != rank])
        job.outcomes[rank] = event.outcome

    def _job_settled(self, event: ev.JobSettled) -> None:
        job = self._job(event.job)
        if job.waiting:
            missing = spoken(job.waiting)
            raise Refused(inv.SETTLED_EARLY, f"job {event.job} cannot settle while ranks {missing} have not reported")
        if job.settled:
            raise Refused(inv.SETTLED_TWICE, f"job {event.job} had settled before")
        if job.quarantined:
            raise Refused(inv.JOB_QUARANTINED, f"job {event.job} is quarantined: its blocks stay pinned")
        job.settled = True
        if not job.blocks:
            self._forget_job(event.job)

    def _blocks_freed(self, event: ev.BlocksFreed) -> None:
        job = self._job(event.job)
        if not job.settled:
            missing = spoken(job.waiting)
            raise Refused(
                inv.FREED_EARLY, f"blocks of job {event.job} cannot be freed while ranks {missing} may read them"
            )
        if job.quarantined:
            raise Refused(inv.JOB_QUARANTINED, f"job {event.job} is quarantined: its blocks stay pinned")
        if event.blocks != job.blocks:
            raise Refused(inv.FREED_OTHER_BLOCKS, f"job {event.job} frees blocks that are not the ones it pinned")
        _count_down(self.pins, job.blocks)
        self._forget_job(event.job)

    def _job(self, number: int) -> Job:
        job = self.book.jobs.get(number)
        if job is None:
            if number < self.book.next_job:
                raise Refused(inv.JOB_ALREADY_SETTLED, f"job {number} has settled, and its blocks were freed")
            raise Refused(inv.UNKNOWN_JOB, f"job {number} was never registered")
        return job

    def _forget_job(self, number: int) -> None:
        del self.book.jobs[number]
        self.pending_jobs -= 1

    # --- loads --------------------------------------------------------------------------------------------------------

    def _lookup_answered(self, event: ev.LookupAnswered) -> None:
        record = self.book.requests.get(event.request)
        if record is not None:
            record.looked_up = (event.hit_tokens, event.local_tokens)
            if record.after_failure and event.hit_tokens:
                record.after_failure = "answered"

    def _lookup_deferred(self, event: ev.LookupDeferred) -> None:
        record = self.book.requests.get(event.request)
        if record is not None:
            record.after_failure = "deferred"

    def _lookup_suppressed(self, event: ev.LookupSuppressed) -> None:
        record = self.book.requests.get(event.request)
        if record is not None:
            record.looked_up = (0, event.local_tokens)
            record.after_failure = "answered"

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        book = self.book
        if event.load < book.next_load:
            raise Refused(inv.LOAD_ID_REUSED, f"load {event.load} was planned before; the next id is {book.next_load}")
        if event.request in book.loading:
            other = book.loading[event.request]
            raise Refused(
                inv.LOAD_STILL_OPEN, f"request {event.request} plans load {event.load} while load {other} is open"
            )
        if _names_null_block(event.blocks):
            raise Refused(inv.NULL_BLOCK_LOADED, f"load {event.load} writes into the null block, which backs no KV")
        end_token = event.local_tokens + event.tokens
        book.loads[event.load] = Load(
            event.request, event.generation, event.seq, event.mono_ns, event.blocks, event.tokens, end_token
        )
        book.loading[event.request] = event.load
        _count_up(self.targets, event.blocks)
        book.next_load = event.load + 1
        self._enter(event.request, event.generation, "loading", event.seq)
        book.requests[event.request].after_failure = msgspec.UNSET

    def _load_registered(self, event: ev.LoadRegistered) -> None:
        load = self._load(event.load)
        if load.ranks:
            raise Refused(inv.LOAD_REGISTERED_TWICE, f"load {event.load} was given to the workers before")
        load.ranks = tuple(from_ranges(event.ranks))
        load.waiting = load.ranks

    def _rank_loaded(self, event: ev.RankLoaded) -> None:
        load = self._load(event.load)
        rank = event.rank
        if rank not in load.waiting:
            if rank in load.outcomes:
                raise Refused(inv.RANK_LOADED_TWICE, f"rank {rank} had answered load {event.load} before")
            raise Refused(
                inv.UNEXPECTED_RANK, f"rank {rank} is not one of the ranks {spoken(load.ranks)} of load {event.load}"
            )
        load.waiting = tuple([other for other in load.waiting if other != rank])
        load.outcomes[rank] = event.outcome

    def _load_failed(self, event: ev.LoadFailed) -> None:
        load = self._load(event.load)
        if load.failed:
            raise Refused(inv.LOAD_FAILED_TWICE, f"load {event.load} had failed before; a load fails once")
        load.failed = True

    def _load_settled(self, event: ev.LoadSettled) -> None:
        load = self._load(event.load)
        if load.waiting and tuple(from_ranges(event.missing)) != load.waiting:
            missing = spoken(load.waiting)
            raise Refused(
                inv.LOAD_SETTLED_EARLY, f"load {event.load} cannot settle while ranks {missing} may still write"
            )
        if load.failed and event.outcome == "loaded":
            raise Refused(inv.FAILURE_IS_STICKY, f"load {event.load} failed on a rank and cannot settle as loaded")
        del self.book.loads[event.load]
        del self.book.loading[load.request]
        _count_down(self.targets, load.blocks)
        record = self.book.requests.get(load.request)
        if record is None:
            return
        if event.outcome == "failed":
            record.failed_loads[load.end_token] = record.failed_loads.get(load.end_token, 0) + 1
        if record.state == "loading" and record.generation == load.generation:
            record.state = "queued"
            record.since_seq = event.seq
            record.looked_up = None

    def _load(self, number: int) -> Load:
        load = self.book.loads.get(number)
        if load is None:
            if number < self.book.next_load:
                raise Refused(inv.LOAD_ALREADY_SETTLED, f"load {number} has settled")
            raise Refused(inv.UNKNOWN_LOAD, f"load {number} was never planned")
        return load

    # --- the log itself -----------------------------------------------------------------------------------------------

    def _invariant_violated(self, event: ev.InvariantViolated) -> None:
        self.book.violations += 1
        job = self.book.jobs.get(event.job)
        if job is not None and not job.quarantined:
            job.quarantined = True
            self.pending_jobs -= 1
        for opened in (self.book.sends.get(event.request), self.book.recvs.get(event.request)):
            if opened is not None and opened.transfer == event.transfer:
                opened.quarantined = True

    def _stall_suspected(self, event: ev.StallSuspected) -> None:
        book = self.book
        opened = book.jobs.get(event.job) or book.loads.get(event.load)
        if opened is not None:
            opened.suspected = True
        for transfer in (book.sends.get(event.request), book.recvs.get(event.request)):
            if transfer is not None and transfer.transfer == event.transfer:
                transfer.suspected = True


def _names_null_block(blocks: Blocks) -> bool:
    return any(min(run) <= NULL_BLOCK for _, ranges in blocks for run in ranges)


def _count_up(counts: BlockCounts, blocks: Blocks) -> None:
    for group, ranges in blocks:
        ids = from_ranges(ranges)
        counted = counts.setdefault(group, {})
        fresh = dict.fromkeys(ids, 1)
        if len(fresh) == len(ids) and counted.keys().isdisjoint(fresh):
            counted.update(fresh)
        else:
            for block in ids:
                counted[block] = counted.get(block, 0) + 1


def _count_down(counts: BlockCounts, blocks: Blocks) -> None:
    for group, ranges in blocks:
        counted = counts[group]
        for block in from_ranges(ranges):
            left = counted[block] - 1
            if left:
                counted[block] = left
            else:
                del counted[block]


_ENCODER = msgspec.json.Encoder()
