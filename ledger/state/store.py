"""The rules of store jobs and loads. These events are decisions of the connector: what breaks a rule is refused.

This file knows events and the book.
"""

import msgspec

from ledger import events as ev
from ledger.blocks import from_ranges, spoken
from ledger.errors import Refused
from ledger.state import invariants as inv
from ledger.state.counts import count_down, count_up
from ledger.state.handlers import Handlers, names_null_block
from ledger.state.projection import Projection
from ledger.state.records import Book, Job, Load
from ledger.state.requests import enter

HANDLERS = Handlers()

# --- store jobs ---------------------------------------------------------------------------------------------------


@HANDLERS.on(ev.JobRegistered)
def _job_registered(state: Projection, event: ev.JobRegistered) -> None:
    book = state.book
    if event.job < book.next_job:
        raise Refused(inv.JOB_ID_REUSED, f"job {event.job} was registered before; the next id is {book.next_job}")
    ranks = tuple(from_ranges(event.ranks))
    if not ranks:
        raise Refused(inv.JOB_WITHOUT_RANKS, f"job {event.job} names no rank that could ever report")
    book.jobs[event.job] = Job(
        event.request, event.generation, event.seq, event.mono_ns, ranks, ranks, tokens=event.tokens
    )
    book.next_job = event.job + 1
    state.pending_jobs += 1
    record = book.requests.get(event.request)
    if record is not None:
        record.skipping = False


@HANDLERS.on(ev.JobSkipped)
def _job_skipped(state: Projection, event: ev.JobSkipped) -> None:
    record = state.book.requests.get(event.request)
    if record is not None:
        record.skipping = True


@HANDLERS.on(ev.PinTouched)
def _pin_touched(state: Projection, event: ev.PinTouched) -> None:
    job = _job(state.book, event.job)
    if job.blocks:
        raise Refused(inv.PINNED_TWICE, f"job {event.job} has pinned its blocks already")
    if job.settled or job.outcomes:
        raise Refused(inv.PINNED_LATE, f"job {event.job} pins blocks after a rank has reported")
    if names_null_block(event.blocks):
        raise Refused(inv.NULL_BLOCK_PINNED, f"job {event.job} pins the null block, which backs no KV")
    job.blocks = event.blocks
    count_up(state.pins, event.blocks)


@HANDLERS.on(ev.RankCompleted)
def _rank_completed(state: Projection, event: ev.RankCompleted) -> None:
    job = _job(state.book, event.job)
    rank = event.rank
    if rank not in job.waiting:
        if rank in job.outcomes:
            raise Refused(inv.RANK_REPORTED_TWICE, f"rank {rank} had reported job {event.job} before")
        raise Refused(
            inv.UNEXPECTED_RANK, f"rank {rank} is not one of the ranks {spoken(job.ranks)} of job {event.job}"
        )
    job.waiting = tuple([other for other in job.waiting if other != rank])
    job.outcomes[rank] = event.outcome


@HANDLERS.on(ev.JobSettled)
def _job_settled(state: Projection, event: ev.JobSettled) -> None:
    job = _job(state.book, event.job)
    if job.waiting:
        missing = spoken(job.waiting)
        raise Refused(inv.SETTLED_EARLY, f"job {event.job} cannot settle while ranks {missing} have not reported")
    if job.settled:
        raise Refused(inv.SETTLED_TWICE, f"job {event.job} had settled before")
    if job.quarantined:
        raise Refused(inv.JOB_QUARANTINED, f"job {event.job} is quarantined: its blocks stay pinned")
    job.settled = True
    if not job.blocks:
        _forget_job(state, event.job)


@HANDLERS.on(ev.BlocksFreed)
def _blocks_freed(state: Projection, event: ev.BlocksFreed) -> None:
    job = _job(state.book, event.job)
    if not job.settled:
        missing = spoken(job.waiting)
        raise Refused(inv.FREED_EARLY, f"blocks of job {event.job} cannot be freed while ranks {missing} may read them")
    if job.quarantined:
        raise Refused(inv.JOB_QUARANTINED, f"job {event.job} is quarantined: its blocks stay pinned")
    if event.blocks != job.blocks:
        raise Refused(inv.FREED_OTHER_BLOCKS, f"job {event.job} frees blocks that are not the ones it pinned")
    count_down(state.pins, job.blocks)
    _forget_job(state, event.job)


def _job(book: Book, number: int) -> Job:
    job = book.jobs.get(number)
    if job is None:
        if number < book.next_job:
            raise Refused(inv.JOB_ALREADY_SETTLED, f"job {number} has settled, and its blocks were freed")
        raise Refused(inv.UNKNOWN_JOB, f"job {number} was never registered")
    return job


def _forget_job(state: Projection, number: int) -> None:
    del state.book.jobs[number]
    state.pending_jobs -= 1


# --- loads --------------------------------------------------------------------------------------------------------


@HANDLERS.on(ev.LookupAnswered)
def _lookup_answered(state: Projection, event: ev.LookupAnswered) -> None:
    record = state.book.requests.get(event.request)
    if record is not None:
        record.looked_up = (event.hit_tokens, event.local_tokens)
        if record.after_failure and event.hit_tokens:
            record.after_failure = "answered"


@HANDLERS.on(ev.LookupDeferred)
def _lookup_deferred(state: Projection, event: ev.LookupDeferred) -> None:
    record = state.book.requests.get(event.request)
    if record is not None:
        record.after_failure = "deferred"


@HANDLERS.on(ev.LookupSuppressed)
def _lookup_suppressed(state: Projection, event: ev.LookupSuppressed) -> None:
    record = state.book.requests.get(event.request)
    if record is not None:
        record.looked_up = (0, event.local_tokens)
        record.after_failure = "answered"


@HANDLERS.on(ev.LoadPlanned)
def _load_planned(state: Projection, event: ev.LoadPlanned) -> None:
    book = state.book
    if event.load < book.next_load:
        raise Refused(inv.LOAD_ID_REUSED, f"load {event.load} was planned before; the next id is {book.next_load}")
    if event.request in book.loading:
        other = book.loading[event.request]
        raise Refused(
            inv.LOAD_STILL_OPEN, f"request {event.request} plans load {event.load} while load {other} is open"
        )
    if names_null_block(event.blocks):
        raise Refused(inv.NULL_BLOCK_LOADED, f"load {event.load} writes into the null block, which backs no KV")
    end_token = event.local_tokens + event.tokens
    book.loads[event.load] = Load(
        event.request, event.generation, event.seq, event.mono_ns, event.blocks, event.tokens, end_token
    )
    book.loading[event.request] = event.load
    count_up(state.targets, event.blocks)
    book.next_load = event.load + 1
    enter(book, event.request, event.generation, "loading", event.seq)
    book.requests[event.request].after_failure = msgspec.UNSET


@HANDLERS.on(ev.LoadRegistered)
def _load_registered(state: Projection, event: ev.LoadRegistered) -> None:
    load = _load(state.book, event.load)
    if load.ranks:
        raise Refused(inv.LOAD_REGISTERED_TWICE, f"load {event.load} was given to the workers before")
    load.ranks = tuple(from_ranges(event.ranks))
    load.waiting = load.ranks


@HANDLERS.on(ev.RankLoaded)
def _rank_loaded(state: Projection, event: ev.RankLoaded) -> None:
    load = _load(state.book, event.load)
    rank = event.rank
    if rank not in load.waiting:
        if rank in load.outcomes:
            raise Refused(inv.RANK_LOADED_TWICE, f"rank {rank} had answered load {event.load} before")
        raise Refused(
            inv.UNEXPECTED_RANK, f"rank {rank} is not one of the ranks {spoken(load.ranks)} of load {event.load}"
        )
    load.waiting = tuple([other for other in load.waiting if other != rank])
    load.outcomes[rank] = event.outcome


@HANDLERS.on(ev.LoadFailed)
def _load_failed(state: Projection, event: ev.LoadFailed) -> None:
    load = _load(state.book, event.load)
    if load.failed:
        raise Refused(inv.LOAD_FAILED_TWICE, f"load {event.load} had failed before; a load fails once")
    load.failed = True


@HANDLERS.on(ev.LoadSettled)
def _load_settled(state: Projection, event: ev.LoadSettled) -> None:
    load = _load(state.book, event.load)
    if load.waiting and tuple(from_ranges(event.missing)) != load.waiting:
        missing = spoken(load.waiting)
        raise Refused(inv.LOAD_SETTLED_EARLY, f"load {event.load} cannot settle while ranks {missing} may still write")
    if load.failed and event.outcome == "loaded":
        raise Refused(inv.FAILURE_IS_STICKY, f"load {event.load} failed on a rank and cannot settle as loaded")
    del state.book.loads[event.load]
    del state.book.loading[load.request]
    count_down(state.targets, load.blocks)
    record = state.book.requests.get(load.request)
    if record is None:
        return
    if event.outcome == "failed":
        record.failed_loads[load.end_token] = record.failed_loads.get(load.end_token, 0) + 1
    if record.state == "loading" and record.generation == load.generation:
        record.state = "queued"
        record.since_seq = event.seq
        record.looked_up = None


def _load(book: Book, number: int) -> Load:
    load = book.loads.get(number)
    if load is None:
        if number < book.next_load:
            raise Refused(inv.LOAD_ALREADY_SETTLED, f"load {number} has settled")
        raise Refused(inv.UNKNOWN_LOAD, f"load {number} was never planned")
    return load
