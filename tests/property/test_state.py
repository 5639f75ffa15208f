"""The book alone: events are accepted and keep the invariants, or are refused by name and change nothing.

The machine draws events from a small world (few requests, jobs, loads, transfers, ranks and blocks), so that they
meet. Some rules steer: they draw what a connector would do next, so that the depths of the book are reached. What must
hold is computed here from the book and from what was accepted, with no code of `ledger.state.apply`.
"""

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ledger import events as ev
from ledger.blocks import to_ranges
from ledger.errors import Refused
from ledger.state.apply import State
from ledger.state.records import Book

REQUESTS = st.sampled_from(("a", "b", "c"))
GENERATIONS = st.integers(1, 3)
JOBS = st.integers(0, 5)
LOADS = st.integers(0, 5)
RANK = st.integers(-1, 3)
RANKS = st.lists(st.integers(0, 2), max_size=3).map(to_ranges)
TRANSFERS = st.sampled_from(("t1", "t2"))
PEERS = st.sampled_from(("", "tp0 pp0", "tp1 pp0"))
RUNS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=3).map(tuple)
BLOCKS = st.lists(st.tuples(st.integers(0, 1), RUNS), max_size=2).map(tuple)
OUTCOME = st.sampled_from(("stored", "failed", "loaded", "ok", "sent", "expired", "withdrawn", "released", "cancelled"))

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "request": REQUESTS,
    "generation": GENERATIONS,
    "job": JOBS,
    "load": LOADS,
    "rank": RANK,
    "ranks": RANKS,
    "missing": RANKS,
    "expired_ranks": RANKS,
    "failed_ranks": RANKS,
    "transfer": TRANSFERS,
    "peer": PEERS,
    "peers": st.lists(PEERS, max_size=2).map(tuple),
    "blocks": BLOCKS,
    "outcome": OUTCOME,
    "action": st.sampled_from(("recomputed", "failed", "gone")),
    "prefill": st.sampled_from(("", "p1")),
}
"""How fields that the book reads are drawn. All others keep their defaults, or are empty."""

NAME = re.compile(r"[a-z_]+")
CHANGING = [
    kind for kind in ev.KINDS.values() if not kind.evidence and kind not in (ev.Gap, ev.LogOpened, ev.LogClosed)
]
"""Kinds that may change the state, and those of which it is tested that they do not."""


def of_kind(kind: type[ev.Event]) -> st.SearchStrategy[dict[str, Any]]:
    """The fields of an event, but for its envelope."""
    drawn: dict[str, st.SearchStrategy[Any]] = {}
    for field in msgspec.structs.fields(kind)[5:]:
        if field.name in FIELDS:
            drawn[field.name] = FIELDS[field.name]
        elif field.required:
            drawn[field.name] = st.just("" if field.type is str else 0)
    return st.fixed_dictionaries(drawn)


ANY_EVENT = st.sampled_from(CHANGING).flatmap(lambda kind: st.tuples(st.just(kind), of_kind(kind)))


def numbers(ranges: Any) -> list[int]:
    """The numbers of inclusive ranges that may count down."""
    return [
        number
        for first, last in ranges
        for number in (range(first, last + 1) if first <= last else range(first, last - 1, -1))
    ]


def counted(opened: Any) -> dict[tuple[int, int], int]:
    """How many of `opened` name each `(group, block)`."""
    counts: dict[tuple[int, int], int] = {}
    for each in opened:
        for group, ranges in each.blocks:
            for block in numbers(ranges):
                counts[group, block] = counts.get((group, block), 0) + 1
    return counts


def flat(index: dict[int, dict[int, int]]) -> dict[tuple[int, int], int]:
    """An index of the state, as `counted` gives it."""
    return {(group, block): count for group, blocks in index.items() for block, count in blocks.items()}


def indexes(state: State) -> tuple[Any, ...]:
    """All indexes of a state, in a form that can be compared."""
    return flat(state.pins), flat(state.targets), flat(state.held), state.pending_jobs


class Ledger(RuleBasedStateMachine):
    """A state, and what is known of it from the events that it accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State()
        self.seq = 0
        self.expected: dict[int, set[int]] = {}
        self.reported: dict[int, set[int]] = {}
        self.freed: set[int] = set()
        self.settled_loads: set[int] = set()

    def give(self, kind: type[ev.Event], **fields: Any) -> bool:
        """Apply an event. Return whether it was accepted; a refusal must have a name and leave everything alone."""
        self.seq += 1
        event = kind(self.seq, self.seq * 10, self.seq, ev.SCHEDULER, 1, **fields)
        before, index_before = self.state.encode(), indexes(self.state)
        refused = None
        try:
            self.state.apply(event)
        except Refused as error:
            refused = error
        if refused is None:
            self.remember(event)
            return True
        assert NAME.fullmatch(refused.rule)
        assert refused.detail
        assert self.state.encode() == before
        assert indexes(self.state) == index_before
        return False

    def remember(self, event: ev.Event) -> None:
        """Note what an accepted event says, and that it may say so."""
        match event:
            case ev.JobRegistered():
                assert event.job not in self.expected
                self.expected[event.job] = set(numbers(event.ranks))
                self.reported[event.job] = set()
            case ev.RankCompleted():
                assert event.rank in self.expected[event.job] - self.reported[event.job]
                self.reported[event.job].add(event.rank)
            case ev.JobSettled():
                assert self.reported[event.job] == self.expected[event.job]
            case ev.BlocksFreed():
                assert self.reported[event.job] == self.expected[event.job]
                assert event.job not in self.freed
                self.freed.add(event.job)
            case ev.LoadSettled():
                assert event.load not in self.settled_loads
                self.settled_loads.add(event.load)
            case _:
                pass

    @rule(drawn=ANY_EVENT)
    def anything(self, drawn):
        self.give(drawn[0], **drawn[1])

    # What a connector would do next.

    @rule(request=REQUESTS, generation=GENERATIONS, ranks=RANKS, blocks=BLOCKS)
    def save(self, request, generation, ranks, blocks):
        job = self.state.book.next_job
        if self.give(ev.JobRegistered, job=job, request=request, generation=generation, ranks=ranks):
            self.give(ev.PinTouched, job=job, blocks=blocks)

    @precondition(lambda self: any(job.waiting for job in self.state.book.jobs.values()))
    @rule(data=st.data(), outcome=OUTCOME)
    def a_rank_reports(self, data, outcome):
        waiting = [(number, rank) for number, job in self.state.book.jobs.items() for rank in job.waiting]
        job, rank = data.draw(st.sampled_from(waiting))
        assert self.give(ev.RankCompleted, job=job, rank=rank, outcome=outcome)

    @precondition(lambda self: any(not job.waiting for job in self.state.book.jobs.values()))
    @rule(data=st.data())
    def a_job_ends(self, data):
        number = data.draw(st.sampled_from([n for n, job in self.state.book.jobs.items() if not job.waiting]))
        job = self.state.book.jobs[number]
        blocks, broken = job.blocks, job.quarantined
        if not job.settled:
            assert self.give(ev.JobSettled, job=number) is not broken
        if blocks:
            assert self.give(ev.BlocksFreed, job=number, blocks=blocks) is not broken

    @rule(request=REQUESTS, generation=GENERATIONS, ranks=RANKS, blocks=BLOCKS)
    def load(self, request, generation, ranks, blocks):
        load = self.state.book.next_load
        if self.give(ev.LoadPlanned, load=load, request=request, generation=generation, blocks=blocks):
            self.give(ev.LoadRegistered, load=load, ranks=ranks)

    @precondition(lambda self: self.state.book.loads)
    @rule(data=st.data(), fails=st.booleans())
    def a_load_goes_on(self, data, fails):
        number = data.draw(st.sampled_from(list(self.state.book.loads)))
        load = self.state.book.loads[number]
        if load.waiting:
            rank = data.draw(st.sampled_from(load.waiting))
            assert self.give(ev.RankLoaded, load=number, rank=rank, outcome="failed" if fails else "loaded")
            if fails and not load.failed:
                assert self.give(ev.LoadFailed, load=number, rank=rank)
        else:
            assert self.give(ev.LoadSettled, load=number, outcome="failed" if load.failed else "loaded")

    @precondition(lambda self: self.state.book.recvs)
    @rule(data=st.data(), peers=st.lists(PEERS.filter(bool), min_size=1, max_size=2, unique=True), ok=st.booleans())
    def a_recv_goes_on(self, data, peers, ok):
        request = data.draw(st.sampled_from(list(self.state.book.recvs)))
        recv = self.state.book.recvs[request]
        about = {"transfer": recv.transfer, "request": request}
        if recv.unnamed:
            assert self.give(ev.PeersNamed, rank=recv.unnamed[0], peers=tuple(peers), **about)
        elif recv.waiting:
            rank, peer = recv.waiting[-1]
            assert self.give(ev.PeerSettled, rank=rank, peer=peer, outcome="ok" if ok else "failed", **about)
            if not ok and not recv.failed:
                assert self.give(ev.RecvFailed, rank=rank, peer=peer, **about)
        elif not recv.failed and any(outcome != "ok" for *_, outcome in recv.outcomes):
            assert self.give(ev.RecvFailed, rank=0, **about)
        else:
            accepted = self.give(ev.RecvSettled, outcome="failed" if recv.failed else "loaded", **about)
            assert accepted is not recv.quarantined

    # What must hold at any time.

    @invariant()
    def indexes_are_what_the_book_says(self):
        book = self.state.book
        assert flat(self.state.pins) == counted(book.jobs.values())
        assert flat(self.state.targets) == counted(book.loads.values())
        assert flat(self.state.held) == counted([*book.sends.values(), *book.recvs.values()])
        assert self.state.pending_jobs == sum(not job.quarantined for job in book.jobs.values())
        assert self.state.pinned_blocks() == len(counted(book.jobs.values()))

    @invariant()
    def jobs_wait_for_those_that_have_not_reported(self):
        for number, job in self.state.book.jobs.items():
            assert set(job.waiting) == self.expected[number] - self.reported[number]
            assert set(job.outcomes) == self.reported[number]
            assert not (job.settled and job.waiting)
            assert number < self.state.book.next_job
            assert number not in self.freed

    @invariant()
    def a_request_has_at_most_one_open_load_and_it_is_found(self):
        book = self.state.book
        assert {load.request: number for number, load in book.loads.items()} == book.loading
        assert len(book.loading) == len(book.loads)
        for number, load in book.loads.items():
            assert set(load.waiting) | set(load.outcomes) == set(load.ranks)
            assert not set(load.waiting) & set(load.outcomes)
            assert number < book.next_load

    @invariant()
    def no_open_work_names_the_null_block(self):
        book = self.state.book
        opened = [*book.jobs.values(), *book.loads.values(), *book.sends.values(), *book.recvs.values()]
        assert all(block != 0 for _, block in counted(opened))

    @invariant()
    def a_written_book_is_read_back_the_same(self):
        read = State(msgspec.json.decode(self.state.encode(), type=Book))
        assert read.digest() == self.state.digest()
        assert indexes(read) == indexes(self.state)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("kind", [ev.TransferStarted, ev.TransferFinished], ids=["started", "finished"])
@given(data=st.data())
def test_evidence_never_changes_the_state(kind, data):
    state = State()
    state.apply(ev.JobRegistered(1, 0, 0, ev.SCHEDULER, 1, job=0, request="a", generation=1, ranks=((0, 0),)))
    before = state.encode()
    state.apply(kind(2, 0, 0, "rank 0", 1, **data.draw(of_kind(kind))))
    assert state.encode() == before


@given(events=st.lists(ANY_EVENT, max_size=40))
def test_the_same_events_give_the_same_bytes(events):
    states = State(), State()
    for state in states:
        for seq, (kind, fields) in enumerate(events, 1):
            try:
                state.apply(kind(seq, seq, seq, ev.SCHEDULER, 1, **fields))
            except Refused:
                continue
    assert states[0].encode() == states[1].encode()
    assert states[0].digest() == states[1].digest()
