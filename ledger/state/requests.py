"""What becomes of a request in the book. These events are observations: facts of vLLM, taken as they come.

This file knows events and the book.
"""

import msgspec

from ledger import events as ev
from ledger.state.handlers import Handlers
from ledger.state.projection import Projection
from ledger.state.records import Book, RequestRecord, RequestState

HANDLERS = Handlers()


@HANDLERS.on(ev.RequestQueued)
def _request_queued(state: Projection, event: ev.RequestQueued) -> None:
    state.book.requests[event.request] = RequestRecord(event.generation, since_seq=event.seq)


@HANDLERS.on(ev.RequestScheduled, ev.RequestResumed)
def _request_running(state: Projection, event: ev.RequestScheduled | ev.RequestResumed) -> None:
    enter(state.book, event.request, event.generation, "running", event.seq)


@HANDLERS.on(ev.RequestPreempted)
def _request_preempted(state: Projection, event: ev.RequestPreempted) -> None:
    enter(state.book, event.request, event.generation + 1, "preempted", event.seq)


def enter(book: Book, request: str, generation: int, state: RequestState, seq: int) -> None:
    """Let a request enter a state; its record begins anew if it is of another generation."""
    record = book.requests.get(request)
    if record is None or record.generation != generation:
        fresh = RequestRecord(generation, state, seq)
        if record is not None:
            fresh.failed_loads, fresh.after_failure = record.failed_loads, record.after_failure
        book.requests[request] = fresh
    else:
        record.state = state
        record.since_seq = seq
    if state == "running":
        book.requests[request].after_failure = msgspec.UNSET  # it found room, so the next hit is a new one


@HANDLERS.on(ev.RequestFinished, ev.RequestAborted)
def _request_ended(state: Projection, event: ev.RequestFinished | ev.RequestAborted) -> None:
    state.book.requests.pop(event.request, None)
    load = state.book.loads.get(state.book.loading.get(event.request, -1))
    if load is not None and not load.ended:
        load.ended = event.reason if isinstance(event, ev.RequestFinished) else "aborted"
