"""What the log says of open work: that a report contradicts the book, and that work is suspected to be stalled.

This file knows events and the book.
"""

from ledger import events as ev
from ledger.state.handlers import Handlers
from ledger.state.projection import Projection

HANDLERS = Handlers()


@HANDLERS.on(ev.InvariantViolated)
def _invariant_violated(state: Projection, event: ev.InvariantViolated) -> None:
    state.book.violations += 1
    job = state.book.jobs.get(event.job)
    if job is not None and not job.quarantined:
        job.quarantined = True
        state.pending_jobs -= 1
    for opened in (state.book.sends.get(event.request), state.book.recvs.get(event.request)):
        if opened is not None and opened.transfer == event.transfer:
            opened.quarantined = True


@HANDLERS.on(ev.StallSuspected)
def _stall_suspected(state: Projection, event: ev.StallSuspected) -> None:
    book = state.book
    opened = book.jobs.get(event.job) or book.loads.get(event.load)
    if opened is not None:
        opened.suspected = True
    for transfer in (book.sends.get(event.request), book.recvs.get(event.request)):
        if transfer is not None and transfer.transfer == event.transfer:
            transfer.suspected = True
