"""The blast radius of a poisoned store job: which keys hold wrong KV, who loaded them, and what was made from that.

Wrong KV spreads in two ways. A request loads a tainted key, computes on top of it, and saves what it computed under
keys of its own. Or it shares blocks with such a request in the engine's own prefix cache. Keys are the same in every
engine that shares a store, so the logs of several engines are followed together, in rounds, until a round adds nothing.

What is certain and what is not: a request that loaded a tainted key read it. What it saved afterwards is *derived*:
computed from wrong KV, unless it was a block in front of the tainted one. A request that pinned a block of such a
request while that one lived has *shared* it.

This file knows events and how to read them again; it prints nothing.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from ledger import events as ev
from ledger.blocks import expand
from ledger.replay import Replay
from ledger.verdicts.poison import Poison

Events = Callable[[], Iterable[ev.AnyEvent]]

ROUNDS_LIMIT = 64
"""Rounds through the logs. Each follows wrong KV by one load; a chain that is longer is told as far as that."""


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


def blast_radius(readers: Sequence[Events], job: int, log: int | None = None) -> BlastRadius | None:
    """Return how far the wrong KV of a job has come through the logs; None if no log has that job.

    Args:
        readers: read each log; called several times.
        job: the store job.
        log: the index of the log that has the job; the first in which it is poisoned, else the first that has it.
    """
    seeds = [_seed(read(), job) for read in readers]
    candidates = range(len(readers)) if log is None else [log]
    chosen = next((index for index in candidates if seeds[index].judged), None)
    if chosen is None:
        chosen = next((index for index in candidates if seeds[index].keys or seeds[index].seen), None)
    if chosen is None:
        return None
    seed = seeds[chosen]
    radius = BlastRadius(job, chosen, seed.judged, list(seed.keys))
    tainted = dict.fromkeys(seed.keys, 0)
    marked: dict[tuple[int, str], Spread] = {}
    for number in range(1, ROUNDS_LIMIT + 1):
        before = (len(tainted), len(marked))
        for index, read in enumerate(readers):
            _Round(index, number, tainted, marked, radius, job if index == chosen else -1).follow(read())
        if (len(tainted), len(marked)) == before:
            return radius
    radius.followed = radius.complete = False
    return radius


class _Seed(msgspec.Struct):
    keys: list[str] = []
    judged: bool = False
    seen: bool = False


def _seed(events: Iterable[ev.AnyEvent], job: int) -> _Seed:
    """Return the keys that a job tainted: those that the verdicts on it name together, or all that it stored."""
    seed = _Seed()
    stored: dict[str, None] = {}
    open_calls: dict[tuple[str, int], ev.TransferStarted] = {}

    def look(chunk: list[ev.AnyEvent]) -> None:
        for event in chunk:
            if getattr(event, "job", -1) != job:
                continue
            seed.seen = True
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
    named = dict.fromkeys(entry["key"] for finding in findings for entry in finding.facts["tainted"])
    seed.judged = bool(findings)
    seed.keys = list(named if findings else stored)
    return seed


class _Round:
    """One way through one log."""

    def __init__(
        self,
        log: int,
        number: int,
        tainted: dict[str, int],
        marked: dict[tuple[int, str], Spread],
        radius: BlastRadius,
        source: int,
    ) -> None:
        self._log = log
        self._number = number
        self._tainted = tainted
        self._marked = marked
        self._radius = radius
        self._source = source
        self._generations: dict[str, int] = {}
        self._loads: dict[int, ev.LoadPlanned] = {}
        self._jobs: dict[int, ev.JobRegistered] = {}
        self._holders: dict[tuple[int, int], str] = {}
        """The reached request that holds a block now."""

    def follow(self, events: Iterable[ev.AnyEvent]) -> None:
        """Mark what can be marked from what is known."""
        for event in events:
            if isinstance(event, ev.TransferStarted):
                self._call(event)
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

    def _call(self, event: ev.TransferStarted) -> None:
        if event.op == "get":
            hit = next((key for key in event.keys if key in self._tainted), None)
            planned = self._loads.get(event.load)
            request = planned.request if planned is not None else event.request
            if hit is not None and request:
                self._reach(request, event.seq, "loaded", hit, self._tainted[hit] + 1)
                for block in expand(planned.blocks if planned is not None else event.blocks):
                    self._holders[block] = request
        elif event.op == "put" and event.job != self._source:
            registered = self._jobs.get(event.job)
            request = registered.request if registered is not None else event.request
            spread = self._marked.get((self._log, request))
            if spread is None or (registered is not None and registered.seq < spread.seq):
                return
            for key in event.keys:
                if key not in self._tainted:
                    self._tainted[key] = spread.round
                    self._radius.derived[key] = (self._log, request)

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
