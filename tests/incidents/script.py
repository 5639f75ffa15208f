"""A small language to tell an incident as a log: who did what, in which order, and when.

    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 15))          # job_registered, pin_touched
    log.puts(0, rank=0, keys="abc")            # transfer_started, transfer_finished
    log.reports(0, rank=0)                     # rank_completed; the last rank settles the job and frees its blocks
    log.closes()

A script is told by hand, so it can tell what no sound connector would do. Any kind of event can be said by its name:
`log.request_aborted(request="R", generation=1)`; inside `with log.rank(1):` it is evidence of that rank. Time moves by
`log.passes(seconds)` and a millisecond with each event, steps by `log.steps(number)`.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ledger import events as ev
from ledger.blocks import Blocks, by_group, count, from_ranges, to_ranges
from ledger.errors import Refused
from ledger.file.database import Database
from ledger.state.apply import State

START_TS_NS = 1_780_000_000_000_000_000
"""28 May 2026; any fixed moment would do."""

START_MONO_NS = 5_000_000_000_000
TICK_NS = 1_000_000
BLOCK_BYTES = 4096
BLOCK_TOKENS = 16

PROMPT_TOKENS = 130
"""Eight full blocks and a bit: only full blocks are saved, and a hit never covers the whole prompt."""

Which = tuple[int, int] | Sequence[int] | None


def run(first: int, last: int) -> list[int]:
    """The blocks from `first` to `last`."""
    return list(range(first, last + 1))


class Script:
    """A log in the making.

    Attributes:
        events: what was told so far.
        state: the book, as far as it accepts what was told.
    """

    def __init__(
        self, engine: str = "engine", *, ranks: int = 1, opens: bool = True, start_s: float = 0.0, **opened: Any
    ) -> None:
        self.events: list[ev.AnyEvent] = []
        self.state = State()
        self.ranks = ranks
        self._now_ns = int(start_s * 1e9)
        self._step = 0
        self._source = ev.SCHEDULER
        self._calls = 0
        self._blocks: dict[int, Blocks] = {}
        self._owner: dict[int, tuple[str, int]] = {}
        if opens:
            self.log_opened(
                engine=engine,
                boot=f"{engine}-boot",
                ranks=((0, ranks - 1),),
                tensor_parallel=ranks,
                num_blocks=100,
                block_sizes=(BLOCK_TOKENS,),
                **opened,
            )

    # --- time and place ---------------------------------------------------------------------------------------------

    def passes(self, seconds: float, *, steps: int = 0) -> "Script":
        """Let time pass."""
        self._now_ns += int(seconds * 1e9)
        self._step += steps
        return self

    def steps(self, number: int = 1) -> "Script":
        """Let the engine step."""
        self._step += number
        return self

    @contextlib.contextmanager
    def rank(self, rank: int, *, step: int | None = None) -> Generator[None]:
        """What is said inside is evidence of that rank, as of its own step."""
        before, own = self._source, self._step
        self._source = f"rank {rank}"
        self._step = own if step is None else step
        yield
        self._source, self._step = before, own

    def __getattr__(self, kind: str) -> Callable[..., ev.AnyEvent]:
        if kind not in ev.KINDS:
            raise AttributeError(kind)

        def say(**fields: Any) -> ev.AnyEvent:
            return self._say(ev.KINDS[kind], **fields)

        return say

    def _say(self, kind: type[ev.Event], **fields: Any) -> Any:
        self._now_ns += TICK_NS
        event: Any = kind(
            len(self.events) + 1,
            START_TS_NS + self._now_ns,
            START_MONO_NS + self._now_ns,
            self._source,
            self._step,
            **fields,
        )
        with contextlib.suppress(Refused):
            self.state.apply(event)
        self.events.append(event)
        return event

    # --- requests ---------------------------------------------------------------------------------------------------

    def arrives(self, request: str, generation: int = 1, *, tokens: int = PROMPT_TOKENS) -> None:
        """A request enters the waiting queue."""
        self.request_queued(request=request, generation=generation, prompt_tokens=tokens)

    def runs(self, request: str, *, tokens: int = PROMPT_TOKENS) -> None:
        """A request arrives and is scheduled in a step of its own."""
        self.arrives(request, tokens=tokens)
        self.steps()
        self.request_scheduled(request=request, generation=1, scheduled_tokens=tokens)

    def preempts(self, request: str, generation: int = 1) -> None:
        """A request loses its blocks."""
        self.request_preempted(request=request, generation=generation)

    def resumes(self, request: str, generation: int = 2, *, tokens: int = PROMPT_TOKENS) -> None:
        """A request runs again, as a new generation."""
        self.steps()
        self.request_resumed(request=request, generation=generation, scheduled_tokens=tokens)

    def finishes(self, request: str, generation: int = 1, reason: str = "stopped") -> None:
        """A request ends."""
        self.request_finished(request=request, generation=generation, reason=reason)

    # --- store jobs -------------------------------------------------------------------------------------------------

    def saves(
        self,
        job: int,
        request: str,
        *,
        blocks: Which = None,
        generation: int = 1,
        pins: bool = True,
        ranks: int | None = None,
    ) -> None:
        """A store job is registered, and pins its blocks."""
        self._blocks[job] = _blocks(blocks)
        self._owner[job] = (request, generation)
        expected = ((0, (self.ranks if ranks is None else ranks) - 1),)
        self.job_registered(
            job=job, request=request, generation=generation, ranks=expected, tokens=_tokens(self._blocks[job])
        )
        if pins and self._blocks[job]:
            self.pin_touched(job=job, blocks=self._blocks[job])

    def put_begins(self, job: int, rank: int = 0, *, keys: Sequence[str] = (), blocks: Which = None) -> str:
        """A rank calls the store to put a job's blocks. Returns the transfer."""
        return self._begins(
            "put", rank, keys, _blocks(blocks) or self._blocks[job], job=job, request=self._owner[job][0]
        )

    def get_begins(self, load: int, rank: int = 0, *, keys: Sequence[str] = (), blocks: Which = None) -> str:
        """A rank calls the store to get a load's blocks. Returns the transfer."""
        opened = self.state.book.loads.get(load)
        named = _blocks(blocks) or (opened.blocks if opened is not None else ())
        return self._begins("get", rank, keys, named, load=load, request=opened.request if opened is not None else "")

    def ends(self, transfer: str, outcome: str = "ok", *, code: str = "", raw: str = "", exception: str = "") -> None:
        """A call to the store returns, or raises."""
        started: Any = next(
            e for e in reversed(self.events) if isinstance(e, ev.TransferStarted) and e.transfer == transfer
        )
        failures: tuple[ev.KeyFailure, ...] = ()
        if code:
            numbers = [(group, block) for group, runs in started.blocks for block in from_ranges(runs)]
            pairs = zip(started.keys, numbers, strict=False)
            failures = tuple(ev.KeyFailure(key, raw, code, group, block) for key, (group, block) in pairs)
        with self.rank(started.rank):
            self.transfer_finished(
                transfer=transfer,
                rank=started.rank,
                op=started.op,
                outcome=outcome,
                request=started.request,
                job=started.job,
                load=started.load,
                keys=len(started.keys),
                bytes=started.bytes,
                duration_ns=START_TS_NS + self._now_ns + TICK_NS - started.ts_ns,
                failed_keys=len(failures) or (len(started.keys) if outcome in ("failed", "raised") else 0),
                failures=failures,
                exception=exception,
            )

    def puts(self, job: int, rank: int = 0, *, keys: Sequence[str] = (), takes_s: float = 0.01) -> None:
        """A rank puts a job's blocks, and the call returns."""
        transfer = self.put_begins(job, rank, keys=keys)
        self.passes(takes_s)
        self.ends(transfer)

    def gets(self, load: int, rank: int = 0, *, keys: Sequence[str] = (), takes_s: float = 0.01) -> None:
        """A rank gets a load's blocks, and the call returns."""
        transfer = self.get_begins(load, rank, keys=keys)
        self.passes(takes_s)
        self.ends(transfer)

    def reports(self, job: int, rank: int = 0, outcome: str = "stored", **why: str) -> None:
        """A rank's report of a job reaches the scheduler. The last one settles the job and frees its blocks."""
        self.steps()
        self.rank_completed(job=job, rank=rank, outcome=outcome, **why)
        opened = self.state.book.jobs.get(job)
        if opened is None or opened.waiting or opened.settled or opened.quarantined:
            return
        failed = to_ranges(sorted(rank for rank, outcome in opened.outcomes.items() if outcome == "failed"))
        self.job_settled(job=job, failed_ranks=failed)
        if opened.blocks:
            self.blocks_freed(job=job, blocks=opened.blocks)

    def stores(self, job: int, request: str, *, blocks: Which, keys: Sequence[str] = (), generation: int = 1) -> None:
        """A job from its beginning to its end, on every rank."""
        self.saves(job, request, blocks=blocks, generation=generation)
        for rank in range(self.ranks):
            self.puts(job, rank, keys=keys)
        for rank in range(self.ranks):
            self.reports(job, rank)

    # --- loads ------------------------------------------------------------------------------------------------------

    def loads(self, load: int, request: str, *, blocks: Which, generation: int = 1) -> None:
        """The store has a hit that fills the blocks, and a load is planned and given to the workers."""
        hit = _tokens(_blocks(blocks))
        self.lookup_answered(request=request, generation=generation, hit_tokens=hit)
        self.load_planned(load=load, request=request, generation=generation, blocks=_blocks(blocks), tokens=hit)
        self.load_registered(load=load, ranks=((0, self.ranks - 1),))

    def answers(self, load: int, rank: int = 0, outcome: str = "loaded", **why: Any) -> None:
        """A rank's answer to a load reaches the scheduler. The last one settles the load."""
        self.steps()
        opened = self.state.book.loads[load]
        self.rank_loaded(load=load, rank=rank, outcome=outcome, **why)
        if outcome == "failed" and not opened.failed:
            self.load_failed(load=load, rank=rank, **why)
        if not opened.waiting:
            self.load_settled(load=load, outcome="failed" if opened.failed else "loaded")
            if opened.failed:
                action = "recomputed" if opened.request in self.state.book.requests else "gone"
                self.load_recovered(load=load, request=opened.request, generation=opened.generation, action=action)

    def recalls(self, load: int, request: str, *, blocks: Which, keys: Sequence[str] = (), generation: int = 1) -> None:
        """A load from its beginning to its end, on every rank."""
        self.loads(load, request, blocks=blocks, generation=generation)
        for rank in range(self.ranks):
            self.gets(load, rank, keys=keys)
        for rank in range(self.ranks):
            self.answers(load, rank)

    # --- P/D transfers ----------------------------------------------------------------------------------------------

    def sends(self, transfer: str, request: str, *, generation: int = 1) -> None:
        """Prefill side: a request runs that will be sent."""
        self.send_registered(transfer=transfer, request=request, generation=generation, ranks=((0, self.ranks - 1),))

    def holds(
        self, transfer: str, request: str, *, blocks: Which, generation: int = 1, timeout_s: float = 480.0
    ) -> None:
        """Prefill side: the prompt is computed, and its blocks are held until they were sent."""
        self.finishes(request, generation, reason="length_capped")
        self.send_ready(
            transfer=transfer,
            request=request,
            generation=generation,
            blocks=_blocks(blocks),
            timeout_ns=int(timeout_s * 1e9),
        )

    def pushes(
        self, transfer: str, request: str, rank: int = 0, *, peer: str = "tp0 pp0", takes_s: float = 0.01
    ) -> None:
        """Prefill side: a decode worker asks, the rank pushes, and says so."""
        blocks = self.state.book.sends[request].blocks
        self.steps()
        self.send_started(transfer=transfer, request=request, rank=rank, peer=peer)
        about = {"transfer": transfer, "rank": rank, "op": "push", "request": request, "peer": peer}
        with self.rank(rank):
            self.transfer_started(**about, blocks=blocks)
            self.passes(takes_s)
            self.transfer_finished(**about, duration_ns=int(takes_s * 1e9) + TICK_NS)
        self.steps()
        self.rank_sent(transfer=transfer, request=request, rank=rank, pushes=1)

    def receives(
        self,
        transfer: str,
        request: str,
        *,
        blocks: Which,
        peers: Sequence[str] = ("tp0 pp0",),
        generation: int = 1,
        timeout_s: float = 540.0,
    ) -> None:
        """Decode side: every rank asks the prefill's workers, and a request waits."""
        self.recv_registered(
            transfer=transfer,
            request=request,
            generation=generation,
            blocks=_blocks(blocks),
            ranks=((0, self.ranks - 1),),
            prefill="prefill",
            timeout_ns=int(timeout_s * 1e9),
        )
        for rank in range(self.ranks):
            self.peers_named(transfer=transfer, request=request, rank=rank, peers=tuple(peers))
            with self.rank(rank):
                self.transfer_started(transfer=transfer, rank=rank, op="pull", request=request, blocks=_blocks(blocks))

    def pull_ends(self, transfer: str, request: str, rank: int = 0, outcome: str = "ok", **why: str) -> None:
        """Decode side: a rank's pull is over on the worker."""
        began_ns = next(
            event.ts_ns
            for event in reversed(self.events)
            if isinstance(event, ev.TransferStarted) and (event.transfer, event.rank) == (transfer, rank)
        )
        with self.rank(rank):
            self.transfer_finished(
                transfer=transfer,
                rank=rank,
                op="pull",
                request=request,
                outcome=outcome,
                duration_ns=START_TS_NS + self._now_ns + TICK_NS - began_ns,
                **why,
            )

    def peer_answers(
        self, transfer: str, request: str, *, rank: int = 0, peer: str = "tp0 pp0", outcome: str = "ok", **why: str
    ) -> None:
        """Decode side: what a peer answered reaches the scheduler."""
        self.steps()
        self.peer_settled(transfer=transfer, request=request, rank=rank, peer=peer, outcome=outcome, **why)
        recv = self.state.book.recvs.get(request)
        if outcome == "failed" and recv is not None and not recv.failed:
            self.recv_failed(transfer=transfer, request=request, rank=rank, peer=peer, blocks=recv.blocks, **why)

    def received(self, transfer: str, request: str, outcome: str = "loaded") -> None:
        """Decode side: vLLM is told that the transfer is over."""
        self.recv_settled(transfer=transfer, request=request, outcome=outcome)

    # --- ownership --------------------------------------------------------------------------------------------------

    def gives(self, request: str, blocks: Which, generation: int = 1) -> None:
        """vLLM gives blocks that open work names to a request."""
        self.blocks_allocated(request=request, generation=generation, blocks=_blocks(blocks))

    def takes_back(self, request: str, blocks: Which, generation: int = 1) -> None:
        """A request gives up blocks that open work names."""
        self.blocks_released(request=request, generation=generation, blocks=_blocks(blocks))

    # --- the log ----------------------------------------------------------------------------------------------------

    def checks(self) -> None:
        """The engine records the digest of its book."""
        book = self.state.book
        self.checkpoint(
            digest=self.state.digest(),
            open_jobs=len(book.jobs),
            pinned_blocks=self.state.pinned_blocks(),
            waiting_loads=len(book.loads),
        )

    def closes(self, **why: str) -> "Script":
        """The engine closes the log."""
        self.checks()
        self.log_closed(**why)
        return self

    def lines(self) -> bytes:
        """The log as lines of JSON."""
        return b"".join(_ENCODER.encode(event) + b"\n" for event in self.events)

    def save(self, path: Path) -> Path:
        """Write the log as a file that kvledger reads."""
        return save(self.events, path)

    def _begins(self, op: str, rank: int, keys: Sequence[str], blocks: Blocks, **work: Any) -> str:
        self._calls += 1
        transfer = f"{rank}-{self._calls}"
        count = len(keys)
        with self.rank(rank):
            self.transfer_started(
                transfer=transfer, rank=rank, op=op, keys=tuple(keys), blocks=blocks, bytes=count * BLOCK_BYTES, **work
            )
        return transfer


def save(events: Sequence[ev.AnyEvent], path: Path) -> Path:
    """Write events as a log that kvledger reads, and return its path."""
    opened = next((event for event in events if isinstance(event, ev.LogOpened)), None)
    names = {"engine": opened.engine, "boot": opened.boot} if opened is not None else {"engine": "script"}
    database = Database(path)
    database.create({**names, "flush_interval_ms": "50"})
    database.append(_ENCODER.encode(list(events)))
    database.close()
    return path


def _blocks(blocks: Which) -> Blocks:
    if not blocks:
        return ()
    if isinstance(blocks, tuple) and len(blocks) == 2:
        return ((0, ((blocks[0], blocks[1]),)),)
    return by_group([(0, list(blocks))])


def _tokens(blocks: Blocks) -> int:
    """Return how many tokens fill the blocks of the first group; those of a job that names none fill eight."""
    return BLOCK_TOKENS * (count(blocks[:1]) if blocks else 8)


_ENCODER = msgspec.json.Encoder()
