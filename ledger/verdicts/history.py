"""What is open, and the events that led there: the memory that verdicts share during a fold.

The book (`ledger.state`) holds what the scheduler needs to go on. A verdict needs more: when a rank's call to the store
began, what raised, what the request went through. The history keeps exactly those events, for work that is open and
requests that live, and drops them when the work ends. So memory grows with what is open and not with the file.

This file knows events and the state. It draws no conclusions.
"""

# ruff: noqa: D102 - a method `on_<kind>` takes the events of that kind, as the class says

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import islice
from types import MethodType
from typing import Any, TypeAlias

import msgspec

from ledger import events as ev
from ledger.blocks import Blocks
from ledger.state.apply import State
from ledger.state.open_work import OpenWork, open_work
from ledger.state.records import Job, Load, Recv, Send

EventList: TypeAlias = list[ev.Event]
"""The events of one job, load or request, in the order of the log."""

See: TypeAlias = Callable[[Any], None]
"""Takes an event of the kinds that it wants to see."""

KEPT_EVENTS_PER_REQUEST = 200
"""A request that is preempted for ever must not fill memory: its first event and its newest ones are kept."""


KEPT_ENDED = 1024
"""Jobs, loads, transfers and requests that are remembered after they ended, for reports and evidence that come late:
so many at least, and twice as many at most."""

KEPT_TIMES = 4096
"""Times of the scheduler that are remembered: so many at least, and twice as many at most."""

EXACT_NS = 100_000_000
"""By how much such a time may be too late, in nanoseconds, as long as it is not one of the oldest."""

RequestEnd: TypeAlias = ev.RequestFinished | ev.RequestAborted


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A job, load or transfer that has ended. It holds no container: thousands of them cost the collector nothing.

    Attributes:
        event: the event that ended it: for a job, when its blocks were freed.
        blocks: the blocks of a load; those of a job stand in `event`.
        began: its first event.
        answer: the last one before it ended, as a rule the last answer of a rank or peer.
    """

    request: str
    event: ev.Event
    blocks: Blocks = ()
    began: ev.Event | None = None
    answer: ev.Event | None = None

    @property
    def events(self) -> list[ev.Event]:
        """What is remembered of it, in the order of the log."""
        events = {event.seq: event for event in (self.began, self.answer, self.event) if event is not None}
        return list(events.values())


class Times:
    """When the log had come to a place, by the scheduler's monotonic clock.

    The monotonic clocks of two hosts have nothing in common, so how long ago a rank's evidence came in is told by the
    events of the scheduler beside it. Not all of these are kept: of events that follow each other within `EXACT_NS` the
    first and the last, and of the oldest ones fewer. So memory is fixed, and a time is a little too late rather than
    too early, wherever it stands in the log.
    """

    def __init__(self) -> None:
        self._seqs: list[int] = []
        self._mono_ns: list[int] = []
        self._until_ns = 0
        self._last: ev.Event | None = None
        """The last event of the scheduler, if it is not kept."""

    def __len__(self) -> int:
        return len(self._seqs)

    def note(self, events: Sequence[ev.Event]) -> None:
        """Take note of the next events of the log."""
        last = self._last
        for event in events:
            if event.source != ev.SCHEDULER:
                continue
            if event.mono_ns < self._until_ns:
                last = event
                continue
            for edge in (last, event) if last is not None else (event,):
                self._seqs.append(edge.seq)
                self._mono_ns.append(edge.mono_ns)
            self._until_ns = event.mono_ns + EXACT_NS
            last = None
        self._last = last
        if len(self._seqs) > 2 * KEPT_TIMES:
            del self._seqs[:KEPT_TIMES:2], self._mono_ns[:KEPT_TIMES:2]

    def at(self, seq: int) -> int | None:
        """Return when the scheduler was at a place in the log or soon after it, in nanoseconds; None if it never was.

        That is the time of the first of its events there that is known.
        """
        index = bisect_left(self._seqs, seq)
        if index < len(self._seqs):
            return self._mono_ns[index]
        return self._last.mono_ns if self._last is not None and self._last.seq >= seq else None


class History:
    """The events of all open work. Fed after the state has accepted an event, and after the verdicts have seen it.

    So a verdict that sees the event that ends a job still finds the job's events here, and finds it gone in the book.

    Attributes:
        jobs: by job id, from `job_registered` until the blocks are freed.
        jobs_of: the ids of a request's open jobs, oldest first.
        loads: by load id, from `load_planned` until `load_settled`.
        sends, recvs: P/D transfers by request id, from their registration until they are over.
        requests: by request id, from the first event that names it until it ends.
        answered: by rank, the last event by which that rank answered a job or a load.
        reported: by rank, its last report of a store job.
        ended_work: the jobs, loads and transfers that ended last, by `("job", "load" or "transfer", id)`.
        ended_requests: the requests that ended last, by their id.
        request_end_while_open: how the request of a job, load or recv ended that is still open, by the key of
            `ended_work`. An id may come back meanwhile, and end again.
        opened: the log's first event, if the log has it.
        closed: the event that closed the log, if it was closed.
        gaps: all gaps of the log.
        lost_of_file: the first of them where the file itself has lost events.
        times: when the log had come to a place.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.jobs: dict[int, EventList] = {}
        self.jobs_of: dict[str, list[int]] = {}
        self.loads: dict[int, EventList] = {}
        self.sends: dict[str, EventList] = {}
        self.recvs: dict[str, EventList] = {}
        self.requests: dict[str, EventList] = {}
        self.answered: dict[int, ev.RankCompleted | ev.RankLoaded] = {}
        self.reported: dict[int, ev.RankCompleted] = {}
        self.opened: ev.LogOpened | None = None
        self.closed: ev.LogClosed | None = None
        self.gaps: list[ev.Gap] = []
        self.lost_of_file: ev.Gap | None = None
        self.times = Times()
        self._restored_seq = 0
        self.ended_work: dict[tuple[str, int | str], Ended] = {}
        self.ended_requests: dict[str, RequestEnd] = {}
        self.request_end_while_open: dict[tuple[str, int | str], RequestEnd] = {}
        self._owners: dict[int, str] = {}

    @property
    def expected_ranks(self) -> int:
        """How many ranks the engine has, as far as the log says."""
        if self.opened is None:
            return 1
        return sum(last - first + 1 for first, last in self.opened.ranks)

    def setting(self, name: str, default: float) -> float:
        """Return a numeric setting of the engine: `log_opened` holds those that differ from their defaults."""
        if self.opened is None:
            return default
        try:
            return float(self.opened.settings.get(name, default))
        except ValueError:
            return default

    def evidence_is_on(self) -> bool:
        """Return whether the workers' calls to the store are recorded: asked for, and an address was free for them."""
        asked_for = self.opened is None or self.opened.settings.get("evidence", "True") == "True"
        return asked_for and not any(gap.origin == "workers" and gap.dropped == 0 for gap in self.gaps)

    def restored_after(self, seq: int) -> bool:
        """Return whether the book was replaced as a whole after that place, so that a gap there hides nothing of it."""
        return self._restored_seq > seq

    def follow(self, seq: int) -> None:
        """Drop what the book does not hold, after it was replaced as a whole at `seq`, and begin what it holds anew."""
        self._restored_seq = seq
        book = self.state.book
        self.jobs = {number: self.jobs.get(number, []) for number in book.jobs}
        self.jobs_of = {}
        self._owners = {number: job.request for number, job in book.jobs.items()}
        for number, job in book.jobs.items():
            self.jobs_of.setdefault(job.request, []).append(number)
        self.loads = {number: self.loads.get(number, []) for number in book.loads}
        self.sends = {name: self.sends.get(name, []) for name in book.sends}
        self.recvs = {name: self.recvs.get(name, []) for name in book.recvs}
        self.requests = {name: self.requests.get(name, []) for name in book.requests}
        opened = {ended_key(work) for work in open_work(book)}
        self.request_end_while_open = {
            key: event for key, event in self.request_end_while_open.items() if key in opened
        }

    def same_generation(self, request: str, generation: int, opened: Job | Load | Send | Recv) -> bool:
        """Return whether open work of a request belongs to the life that now has this generation, as far as is known.

        An id that comes back after its request has ended begins with generation 1 again, so it counts, too, when this
        life began and whether the request of the work has ended. Of a load the book itself says so.
        """
        ended = isinstance(opened, Load) and bool(opened.ended)
        return generation == opened.generation and not ended and not self.is_reused_id(request, opened.since_seq)

    def is_reused_id(self, request: str, seq: int) -> bool:
        """Return whether the life that a request's id has now is known to have begun behind that place in the log."""
        life = self.requests.get(request)
        return bool(life) and isinstance(life[0], ev.RequestQueued) and life[0].seq > seq

    def events_of(self, work: OpenWork) -> EventList:
        """Return the events of open work, in the order of the log; none that came before a gap hid its beginning."""
        chains: dict[Any, EventList] = {"job": self.jobs, "load": self.loads, "send": self.sends, "recv": self.recvs}[
            work.kind
        ]
        return chains.get(work.request if work.is_transfer else work.id, [])

    def lost_since(self, seq: int) -> ev.Gap | None:
        """Return the first gap behind that place in which events of the scheduler are lost; None if there is none.

        A book that came again after it brings back what is open, but not what happened.
        """
        return next((gap for gap in self.gaps if gap.seq > seq and gap.origin in (ev.SCHEDULER, ev.WHOLE_FILE)), None)

    def transfer_events(self, event: ev.Event) -> EventList | None:
        """Return the events of the open send or recv that an event of a P/D transfer belongs to."""
        if event.about.step == "begins":
            return None
        chains = {"send": self.sends, "recv": self.recvs}.get(event.about.work)
        return chains.get(ev.request_of(event)) if chains is not None else None

    def last_end(self, request: str, job: int = -1, load: int = -1, transfer: str = "") -> list[ev.Event]:
        """Return what is remembered of a job, load or transfer and how its request ended, in the order of the log."""
        keys: tuple[tuple[str, int | str], ...] = (("job", job), ("load", load), ("transfer", transfer))
        found = [event for key in keys if (over := self.ended_work.get(key)) is not None for event in over.events]
        if request in self.ended_requests:
            found.append(self.ended_requests[request])
        return sorted(found, key=lambda event: event.seq)

    def request_of_ended_job(self, job: int) -> str:
        """Return the request of a job that ended not long ago; empty if it is not known any more."""
        over = self.ended_work.get(("job", job))
        return over.request if over is not None else ""

    def takes(self, kind: type[ev.Event]) -> See | None:
        """Return what takes the events of a kind: a method `on_<kind>`, else the one for what they are about.

        None if they are about nothing that is followed here.
        """
        own: See | None = getattr(self, f"on_{str(kind.__struct_config__.tag).partition('@')[0]}", None)
        if own is not None:
            return own
        default = _BY_SUBJECT.get((kind.about.work, kind.about.step))
        return MethodType(default, self) if default is not None else None

    # --- requests ---------------------------------------------------------------------------------------------------

    def _request_begins(self, event: Any) -> None:
        self.requests[event.request] = [event]

    def _request(self, event: Any) -> None:
        chain = self.requests.get(event.request)
        if chain is None:
            self.requests[event.request] = [event]
            return
        chain.append(event)
        if len(chain) > KEPT_EVENTS_PER_REQUEST:
            del chain[1 : KEPT_EVENTS_PER_REQUEST // 2]

    def on_load_recovered(self, event: ev.LoadRecovered) -> None:
        if event.request in self.requests:
            self._request(event)

    def _request_ends(self, event: Any) -> None:
        self.requests.pop(event.request, None)
        for job in self.jobs_of.get(event.request, ()):
            self.request_end_while_open.setdefault(("job", job), event)
        book = self.state.book
        load, recv = book.loading.get(event.request), book.recvs.get(event.request)
        if load is not None:
            self.request_end_while_open.setdefault(("load", load), event)
        if recv is not None:
            self.request_end_while_open.setdefault(("transfer", recv.transfer), event)
        ended = self.ended_requests
        ended[event.request] = event
        forget_oldest(ended)

    # --- store jobs -------------------------------------------------------------------------------------------------

    def _job_begins(self, event: Any) -> None:
        self.jobs[event.job] = [event]
        self.jobs_of.setdefault(event.request, []).append(event.job)
        self._owners[event.job] = event.request

    def _job(self, event: Any) -> None:
        chain = self.jobs.get(event.job)
        if chain is not None:
            chain.append(event)

    def on_rank_completed(self, event: ev.RankCompleted) -> None:
        self._job(event)
        self.answered[event.rank] = self.reported[event.rank] = event

    def on_job_settled(self, event: ev.JobSettled) -> None:
        if event.job in self.state.book.jobs:
            self._job(event)
        else:
            self._job_ends(event)

    def _job_ends(self, event: Any) -> None:
        job = event.job
        chain = self.jobs.pop(job, None)
        if chain is None:
            return
        request = self._owners.pop(job)
        jobs = self.jobs_of[request]
        jobs.remove(job)
        if not jobs:
            del self.jobs_of[request]
        self._note_ended(("job", job), Ended(request, event, (), *_ends(chain)))

    def _note_ended(self, key: tuple[str, int | str], what: "Ended") -> None:
        self.request_end_while_open.pop(key, None)
        ended = self.ended_work
        ended[key] = what
        forget_oldest(ended)

    # --- loads ------------------------------------------------------------------------------------------------------

    def _load_begins(self, event: Any) -> None:
        self.loads[event.load] = [event]

    def _load(self, event: Any) -> None:
        chain = self.loads.get(event.load)
        if chain is not None:
            chain.append(event)

    def on_rank_loaded(self, event: ev.RankLoaded) -> None:
        self._load(event)
        self.answered[event.rank] = event

    def _load_ends(self, event: Any) -> None:
        chain = self.loads.pop(event.load, None)
        planned = chain[0] if chain else None
        if isinstance(planned, ev.LoadPlanned):
            self._note_ended(("load", event.load), Ended(planned.request, event, planned.blocks, *_ends(chain or [])))

    # --- P/D transfers ----------------------------------------------------------------------------------------------

    def _send_begins(self, event: Any) -> None:
        self.sends[event.request] = [event]

    def _send(self, event: Any) -> None:
        chain = self.sends.get(event.request)
        if chain is not None:
            chain.append(event)

    def _send_ends(self, event: Any) -> None:
        self._transfer_ends(event, self.sends.pop(event.request, None))

    def _recv_begins(self, event: Any) -> None:
        self.recvs[event.request] = [event]

    def _recv(self, event: Any) -> None:
        chain = self.recvs.get(event.request)
        if chain is not None:
            chain.append(event)

    def _recv_ends(self, event: Any) -> None:
        self._transfer_ends(event, self.recvs.pop(event.request, None))

    def _transfer_ends(self, event: Any, chain: EventList | None) -> None:
        if chain is not None:
            self._note_ended(("transfer", event.transfer), Ended(event.request, event, (), *_ends(chain)))

    # --- evidence and suspicions, of the work that their fields name ------------------------------------------------

    def _named(self, event: Any) -> None:
        # Most events are calls, so their fields are asked for here and not by way of `ev.subject_of`.
        job: int = getattr(event, "job", -1)
        load: int = getattr(event, "load", -1) if job < 0 else -1
        chain = self.jobs.get(job) if job >= 0 else self.loads.get(load)
        if chain is not None:
            chain.append(event)
        elif job < 0 and load < 0:
            request, transfer = ev.request_of(event), ev.transfer_of(event)
            for chain in (self.sends.get(request), self.recvs.get(request)):
                if chain and ev.transfer_of(chain[0]) == transfer:
                    chain.append(event)

    # --- the log itself ---------------------------------------------------------------------------------------------

    def on_log_opened(self, event: ev.LogOpened) -> None:
        self.opened = event

    def on_log_closed(self, event: ev.LogClosed) -> None:
        self.closed = event

    def on_gap(self, event: ev.Gap) -> None:
        self.gaps.append(event)
        if event.origin == ev.WHOLE_FILE and self.lost_of_file is None:
            self.lost_of_file = event


_BY_SUBJECT: dict[tuple[str, str], Callable[[History, Any], None]] = {
    ("request", "begins"): History._request_begins,
    ("request", "goes_on"): History._request,
    ("request", "ends"): History._request_ends,
    ("job", "begins"): History._job_begins,
    ("job", "goes_on"): History._job,
    ("job", "ends"): History._job_ends,
    ("load", "begins"): History._load_begins,
    ("load", "goes_on"): History._load,
    ("load", "ends"): History._load_ends,
    ("send", "begins"): History._send_begins,
    ("send", "goes_on"): History._send,
    ("send", "ends"): History._send_ends,
    ("recv", "begins"): History._recv_begins,
    ("recv", "goes_on"): History._recv,
    ("recv", "ends"): History._recv_ends,
    ("call", "begins"): History._named,
    ("call", "goes_on"): History._named,
    ("call", "ends"): History._named,
    ("named", "goes_on"): History._named,
}
"""What becomes of the events of a kind that has no method of its own, by what they are about."""


def ended_key(work: OpenWork) -> ev.WorkKey:
    """Return the key that open work has in `History.ended_work` and `History.request_end_while_open`."""
    return ("transfer" if work.is_transfer else work.kind), work.id


def _ends(chain: EventList) -> tuple[ev.Event | None, ev.Event | None]:
    """Return the first event of a chain, and its last one but for a job's settling, which says nothing of its own."""
    if not chain:
        return None, None
    last = chain[-1]
    return chain[0], chain[-2] if last.__class__ is ev.JobSettled and len(chain) > 1 else last


def forget_oldest(known: dict[Any, Any]) -> None:
    """Forget the older half of what is known, if it is more than twice `KEPT_ENDED`.

    One at a time would cost more: a dictionary is slow to find its first.
    """
    if len(known) > 2 * KEPT_ENDED:
        for key in list(islice(known, KEPT_ENDED)):
            del known[key]


class End(msgspec.Struct, frozen=True):
    """How and where a log ends.

    Attributes:
        how: `closed` (there is a `log_closed`), `torn` (the writer is gone without one), `live` (the writer still
            writes), `as_of` (the log was replayed up to a moment only).
        last: the last event.
        now_mono_ns: the scheduler's monotonic clock at its last event, in nanoseconds.
        step: the scheduler's step at that event.
        closed: the `log_closed` event.
        tail: the last few events.
        disagrees_after: the checkpoint at which the fold and the engine's own digest first differed, if any.
    """

    how: str
    last: ev.Event
    now_mono_ns: int
    step: int
    closed: ev.LogClosed | None = None
    tail: tuple[ev.Event, ...] = ()
    disagrees_after: int | None = None
