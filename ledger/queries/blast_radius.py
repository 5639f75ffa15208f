"""The blast radius of a poisoned store job: which keys hold wrong KV, who loaded them, and what was made from that.

Wrong KV spreads in two ways. A request loads a tainted key, computes on top of it, and saves what it computed under
keys of its own. Or it shares blocks with such a request in the engine's own prefix cache. Keys are the same in every
engine that shares a store, so the logs of several engines are followed together, in rounds, until a round adds nothing.

What is certain and what is not: a request that loaded a tainted key read it. What it saved afterwards is *derived*:
computed from wrong KV, unless it was a block in front of the tainted one. A request that pinned a block of such a
request while that one lived has *shared* it. A call that had returned before the job that stored wrong KV was
registered has not read it: the key held something else then. Only within one log is that order known; in the others
every load of the key counts.

This file knows events and how to read them again; it prints nothing.
"""

from collections.abc import Iterable, Sequence

import msgspec

from ledger import events as ev
from ledger.blocks import expand
from ledger.replay.fold import Replay
from ledger.replay.join import ReadEvents
from ledger.verdicts.poison import Poison

ROUNDS_LIMIT = 64
"""Rounds through the logs. Each follows wrong KV by one load; a longer chain is followed as far as that."""

NO_RETURN_SEQ = 2**63 - 1
"""The place at which a call returned of which the log has no return: behind all that it has."""


class Spread(msgspec.Struct, frozen=True):
    """A request that was reached.

    Attributes:
        log: the index of its log.
        seq: the event by which it was reached.
        how: `loaded` (from the store) or `shared` (blocks of a request that was reached).
        key: the key that it loaded, empty for shared blocks.
        round: how many loads lie between it and the poisoned job.
    """

    log: int
    request: str
    generation: int
    seq: int
    how: str
    key: str
    round: int


class BlastRadius(msgspec.Struct):
    """How far a job's wrong KV has come.

    Attributes:
        job: the job.
        log: the index of its log.
        judged: whether a poison verdict names the keys; if not, all keys that the job stored are taken.
        keys: tainted keys that the job stored itself.
        derived: by key, the log and request that stored it after having read wrong KV.
        reached: the requests that were reached, in the order in which they were found.
        followed: whether every chain was followed to its end.
        complete: whether it was, and no log has lost events in which more could have been reached.
    """

    job: int
    log: int
    judged: bool = False
    keys: list[str] = []
    derived: dict[str, tuple[int, str]] = {}
    reached: list[Spread] = []
    followed: bool = True
    complete: bool = True


def blast_radius(readers: Sequence[ReadEvents], job: int, log: int | None = None) -> list[BlastRadius]:
    """Return how far the wrong KV of a job has come through the logs.

    Every engine numbers its jobs from 0, so that several logs may have a poisoned job of that number: each is followed.

    Args:
        readers: read each log; called several times.
        job: the store job.
        log: the index of the log that has the job; if not given, each log in which it is poisoned, and if it is
            poisoned in none, each that has it.

    Returns:
        One for each log; none if no log has that job.
    """
    seeds = {index: _seed(readers[index](), job) for index in (range(len(readers)) if log is None else [log])}
    chosen = [index for index, seed in seeds.items() if seed.judged]
    chosen = chosen or [index for index, seed in seeds.items() if seed.seen]
    return [_spread(readers, job, index, seeds[index]) for index in chosen]


def _spread(readers: Sequence[ReadEvents], job: int, log: int, seed: "_Seed") -> BlastRadius:
    radius = BlastRadius(job, log, seed.judged, list(seed.keys))
    tainted = {key: _Taint(0, {log: seed.registered_seq}) for key in seed.keys}
    marked: dict[tuple[int, str], Spread] = {}
    for _ in range(ROUNDS_LIMIT):
        before = _known(tainted, marked)
        for index, read in enumerate(readers):
            source = (job, seed.registered_seq) if index == log else (-1, 0)
            _Round(index, tainted, marked, radius, *source).follow(read())
        if _known(tainted, marked) == before:
            return radius
    radius.followed = radius.complete = False
    return radius


class _Taint(msgspec.Struct):
    """A key that holds wrong KV.

    Attributes:
        round: how many loads lie between it and the poisoned job.
        since: by log, the place at which the first job that stored wrong KV under it was registered; 0 if not known.
    """

    round: int
    since: dict[int, int]

    def may_be_read(self, log: int, until_seq: int) -> bool:
        """Return whether a call that lasted to that place of a log may have read wrong KV."""
        return any(other != log or until_seq > first for other, first in self.since.items())

    def store(self, log: int, seq: int) -> None:
        """Note that a job that was registered at that place of a log stored wrong KV under the key, too."""
        self.since[log] = min(self.since.get(log, seq), seq)


def _known(tainted: dict[str, _Taint], marked: dict[tuple[int, str], Spread]) -> tuple[int, ...]:
    """Return what changes with everything that is found: it grows, but for the places, which become earlier."""
    places = [first for taint in tainted.values() for first in taint.since.values()]
    return len(tainted), len(marked), len(places), sum(places)


class _Seed(msgspec.Struct):
    keys: list[str] = []
    judged: bool = False
    seen: bool = False
    registered_seq: int = 0


def _seed(events: Iterable[ev.AnyEvent], job: int) -> _Seed:
    """Return the keys that a job tainted: those that the verdicts on it name together, or all that it stored."""
    seed = _Seed()
    stored: dict[str, None] = {}
    open_calls: dict[tuple[str, int], ev.TransferStarted] = {}

    def look(chunk: list[ev.AnyEvent]) -> None:
        for event in chunk:
            if ev.job_of(event) != job:
                continue
            seed.seen = True
            if isinstance(event, ev.JobRegistered):
                seed.registered_seq = seed.registered_seq or event.seq
            if isinstance(event, ev.TransferStarted) and event.op == "put":
                open_calls[event.transfer, event.rank] = event
                stored.update(dict.fromkeys(event.keys))
            elif isinstance(event, ev.TransferFinished) and event.op == "put":
                started = open_calls.pop((event.transfer, event.rank), None)
                failed = {failure.key for failure in event.failures}
                if started is not None and event.outcome in ("failed", "raised"):
                    failed = set(started.keys)
                for key in failed:
                    stored.pop(key, None)

    replay = Replay([Poison], watch=look).feed(events)
    findings = [finding for finding in replay.result("live").findings if job in finding.jobs]
    named = dict.fromkeys(entry.key for finding in findings for entry in finding.tainted)
    seed.judged = bool(findings)
    seed.keys = list(named if findings else stored)
    return seed


class _Round:
    """One way through one log."""

    def __init__(
        self,
        log: int,
        tainted: dict[str, _Taint],
        marked: dict[tuple[int, str], Spread],
        radius: BlastRadius,
        source: int,
        source_seq: int,
    ) -> None:
        self._log = log
        self._tainted = tainted
        self._marked = marked
        self._radius = radius
        self._source = source
        self._source_seq = source_seq
        self._generations: dict[str, int] = {}
        self._loads: dict[int, ev.LoadPlanned] = {}
        self._jobs: dict[int, ev.JobRegistered] = {}
        self._holders: dict[tuple[int, int], str] = {}
        """The reached request that holds a block now."""
        self._early: dict[tuple[str, int], ev.TransferStarted] = {}
        """Gets that are open and began before wrong KV was stored under any of their keys."""

    def follow(self, events: Iterable[ev.AnyEvent]) -> None:
        """Mark what can be marked from what is known."""
        for event in events:
            if isinstance(event, ev.TransferStarted):
                self._call(event)
            elif isinstance(event, ev.TransferFinished):
                self._return(event)
            elif isinstance(event, ev.LoadPlanned):
                self._loads[event.load] = event
                self._generations[event.request] = event.generation
            elif isinstance(event, ev.JobRegistered):
                self._jobs[event.job] = event
                self._generations[event.request] = event.generation
            elif isinstance(event, ev.PinTouched):
                self._pin(event)
            elif isinstance(event, ev.BlocksFreed):
                self._jobs.pop(event.job, None)
            elif isinstance(event, ev.LoadSettled):
                self._loads.pop(event.load, None)
            elif isinstance(event, ev.RequestPreempted | ev.RequestFinished | ev.RequestAborted):
                for block in [block for block, request in self._holders.items() if request == event.request]:
                    del self._holders[block]
        for started in self._early.values():
            self._load(started, NO_RETURN_SEQ)

    def _call(self, event: ev.TransferStarted) -> None:
        if event.op == "get":
            if not self._load(event, event.seq) and not self._tainted.keys().isdisjoint(event.keys):
                self._early[event.transfer, event.rank] = event
        elif event.op == "put" and event.job != self._source:
            registered = self._jobs.get(event.job)
            request = registered.request if registered is not None else event.request
            spread = self._marked.get((self._log, request))
            if spread is None or (registered is not None and registered.seq < spread.seq):
                return
            since = registered.seq if registered is not None else 0
            for key in event.keys:
                if key not in self._tainted:
                    self._tainted[key] = _Taint(spread.round, {})
                    self._radius.derived[key] = (self._log, request)
                self._tainted[key].store(self._log, since)

    def _return(self, event: ev.TransferFinished) -> None:
        started = self._early.pop((event.transfer, event.rank), None)
        if started is not None:
            self._load(started, event.seq)

    def _load(self, event: ev.TransferStarted, until_seq: int) -> bool:
        """Mark who got a tainted key by a call that lasted to that place at least; return whether the call got one."""
        hit = next((key for key in event.keys if self._may_be_read(key, until_seq)), None)
        planned = self._loads.get(event.load)
        request = planned.request if planned is not None else event.request
        if hit is None or not request:
            return hit is not None
        self._reach(request, event.seq, "loaded", hit, self._tainted[hit].round + 1)
        for block in expand(planned.blocks if planned is not None else event.blocks):
            self._holders[block] = request
        return True

    def _may_be_read(self, key: str, until_seq: int) -> bool:
        taint = self._tainted.get(key)
        # All wrong KV comes from the poisoned job, so in its log there is none before it, whoever stored the key.
        return taint is not None and until_seq > self._source_seq and taint.may_be_read(self._log, until_seq)

    def _pin(self, event: ev.PinTouched) -> None:
        registered = self._jobs.get(event.job)
        if registered is None:
            return
        request = registered.request
        blocks = list(expand(event.blocks))
        owner = next((self._holders[block] for block in blocks if self._holders.get(block, request) != request), None)
        if owner is not None:
            self._reach(request, event.seq, "shared", "", self._marked[self._log, owner].round)
        if (self._log, request) in self._marked:
            for block in blocks:
                self._holders.setdefault(block, request)

    def _reach(self, request: str, seq: int, how: str, key: str, number: int) -> None:
        if (self._log, request) not in self._marked:
            generation = self._generations.get(request, 1)
            spread = Spread(self._log, request, generation, seq, how, key, number)
            self._marked[self._log, request] = spread
            self._radius.reached.append(spread)
