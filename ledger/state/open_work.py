"""One view of what is open: store jobs, loads, sends and recvs, with what they have in common.

The book keeps them in four tables, because the rules of each differ. Whoever asks what is open, for whom it waits and
which blocks it holds asks here. This file knows the records and what an event is about.
"""

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import msgspec

from ledger import events as ev
from ledger.blocks import Blocks
from ledger.state.records import Book, Job, Load, Recv, Send

WorkKind: TypeAlias = Literal["job", "load", "send", "recv"]


class OpenWork(msgspec.Struct, frozen=True):
    """A store job, load, send or recv that is open.

    Attributes:
        kind: which of the four.
        id: the number of the job or load, or the id of the transfer.
        request: the request that it belongs to.
        since_seq, since_mono_ns: when it was registered or planned; of a send, when it was ready.
        ranks: the ranks that must answer; none of a load that the workers do not know yet.
        waiting: those that have not, lowest first.
        answered: those that have, lowest first.
        blocks: the blocks that it pins, holds or writes.
        begun: whether ranks may read or write these blocks by now.
        failed: whether a rank or peer failed it.
        quarantined: a report contradicted the book: its blocks stay held for good.
        suspected: whether a `stall_suspected` names it.
        timeout_ns: after this time its workers give it up by themselves, in nanoseconds; 0 if never.
        record: what the book has of it.
    """

    kind: WorkKind
    id: int | str
    request: str
    generation: int
    since_seq: int
    since_mono_ns: int
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    answered: tuple[int, ...]
    blocks: Blocks
    begun: bool
    failed: bool
    quarantined: bool
    suspected: bool
    timeout_ns: int
    record: Job | Load | Send | Recv

    @property
    def name(self) -> str:
        """What it is called: `job 2`, `recv x1`."""
        return f"{self.kind} {self.id}"

    @property
    def key(self) -> ev.WorkKey:
        """What tells it from other work."""
        return self.kind, self.id

    @property
    def is_transfer(self) -> bool:
        """Whether it is a P/D transfer, which is found by its request and not by a number."""
        return self.kind in ("send", "recv")


def open_work(book: Book) -> Iterator[OpenWork]:
    """Yield all that is open: jobs, loads, sends, recvs, of each the oldest first."""
    for number, job in book.jobs.items():
        yield _of_job(number, job)
    for number, load in book.loads.items():
        yield _of_load(number, load)
    for request, send in book.sends.items():
        yield _of_send(request, send)
    for request, recv in book.recvs.items():
        yield _of_recv(request, recv)


def find(book: Book, subject: ev.Subject) -> OpenWork | None:
    """Return the open work that an event is about, see `ledger.events.subject_of`; None if that is not open."""
    look = _FIND.get(subject.work)
    return look(book, subject) if look is not None else None


def of_request(book: Book, request: str) -> Iterator[OpenWork]:
    """Yield what is open of a request: its load, recv and send, of which it has one at most, and its jobs."""
    load = book.loading.get(request)
    if load is not None:
        yield _of_load(load, book.loads[load])
    if request in book.recvs:
        yield _of_recv(request, book.recvs[request])
    if request in book.sends:
        yield _of_send(request, book.sends[request])
    for number, job in book.jobs.items():
        if job.request == request:
            yield _of_job(number, job)


def _of_job(number: int, job: Job) -> OpenWork:
    return OpenWork(
        kind="job",
        id=number,
        request=job.request,
        generation=job.generation,
        since_seq=job.since_seq,
        since_mono_ns=job.since_mono_ns,
        ranks=job.ranks,
        waiting=job.waiting,
        answered=tuple(sorted(job.outcomes)),
        blocks=job.blocks,
        begun=True,
        failed="failed" in job.outcomes.values(),
        quarantined=job.quarantined,
        suspected=job.suspected,
        timeout_ns=0,
        record=job,
    )


def _of_load(number: int, load: Load) -> OpenWork:
    return OpenWork(
        kind="load",
        id=number,
        request=load.request,
        generation=load.generation,
        since_seq=load.since_seq,
        since_mono_ns=load.since_mono_ns,
        ranks=load.ranks,
        waiting=load.waiting,
        answered=tuple(sorted(load.outcomes)),
        blocks=load.blocks,
        begun=bool(load.ranks),
        failed=load.failed,
        quarantined=False,
        suspected=load.suspected,
        timeout_ns=0,
        record=load,
    )


def _of_send(request: str, send: Send) -> OpenWork:
    return OpenWork(
        kind="send",
        id=send.transfer,
        request=request,
        generation=send.generation,
        since_seq=send.since_seq,
        since_mono_ns=send.since_mono_ns,
        ranks=send.ranks,
        waiting=send.waiting,
        answered=tuple(sorted(send.outcomes)),
        blocks=send.blocks,
        begun=send.phase != "registered",
        failed=False,
        quarantined=send.quarantined,
        suspected=send.suspected,
        timeout_ns=send.timeout_ns,
        record=send,
    )


def _of_recv(request: str, recv: Recv) -> OpenWork:
    waiting = recv.missing_ranks()
    return OpenWork(
        kind="recv",
        id=recv.transfer,
        request=request,
        generation=recv.generation,
        since_seq=recv.since_seq,
        since_mono_ns=recv.since_mono_ns,
        ranks=recv.ranks,
        waiting=waiting,
        answered=tuple(sorted({rank for rank, _, _ in recv.outcomes} - set(waiting))),
        blocks=recv.blocks,
        begun=True,
        failed=recv.failed,
        quarantined=recv.quarantined,
        suspected=recv.suspected,
        timeout_ns=recv.timeout_ns,
        record=recv,
    )


def _find_job(book: Book, subject: ev.Subject) -> OpenWork | None:
    job = book.jobs.get(int(subject.id))
    return _of_job(int(subject.id), job) if job is not None else None


def _find_load(book: Book, subject: ev.Subject) -> OpenWork | None:
    load = book.loads.get(int(subject.id))
    return _of_load(int(subject.id), load) if load is not None else None


def _find_send(book: Book, subject: ev.Subject) -> OpenWork | None:
    send = book.sends.get(subject.request)
    return _of_send(subject.request, send) if send is not None and send.transfer == subject.id else None


def _find_recv(book: Book, subject: ev.Subject) -> OpenWork | None:
    recv = book.recvs.get(subject.request)
    return _of_recv(subject.request, recv) if recv is not None and recv.transfer == subject.id else None


_FIND: dict[str, Callable[[Book, ev.Subject], OpenWork | None]] = {
    "job": _find_job,
    "load": _find_load,
    "send": _find_send,
    "recv": _find_recv,
    "transfer": lambda book, subject: _find_recv(book, subject) or _find_send(book, subject),
}
