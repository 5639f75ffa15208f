"""The fold: the events of a log through the very code that the engine ran, with all verdicts watching.

`Replay` takes events in the order of the log, from a file or from a list, and answers with a `Result`. An event that
the book refuses does not stop it: the state stays as it is, and the refusal is evidence. At each checkpoint the digest
of the fold is compared with the one that the engine recorded; the first difference is kept.

This file knows events, state, history, stats, verdicts and the order of their findings. It reads no file and prints
nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

import msgspec

from ledger import events as ev
from ledger.errors import Refused
from ledger.replay.incidents import earliest_cause_first
from ledger.replay.stats import RunStats, StatsCollector
from ledger.state.apply import State
from ledger.state.records import Book
from ledger.verdicts import all_verdicts
from ledger.verdicts.base import Finding, Role, Verdict
from ledger.verdicts.history import End, History, See

CHUNK_EVENTS = 2048
"""Events folded between two looks at progress and at the end: large enough that the looks cost nothing."""

TAIL_EVENTS = 6
"""Events before the end that a report of a torn log shows."""

KEPT_TAIL_EVENTS = 60
"""Events before the end from which those are chosen: an engine that idles says every 10 s that it is alive."""

KEPT_REFUSALS = 1000
"""Refused events that are kept in full. A connector that breaks a rule at every step would fill memory with the same
news."""

Seen = TypeVar("Seen", bound=ev.Event)


class Refusal(msgspec.Struct, frozen=True):
    """An event of the log that the book did not accept."""

    event: ev.AnyEvent
    rule: str
    detail: str


class Mismatch(msgspec.Struct, frozen=True):
    """The first checkpoint at which the fold and the engine's own digest differ.

    Attributes:
        seq: the checkpoint's place in the log.
        agreed_until_seq: the last checkpoint at which both agreed, 0 for the start of the log.
        expected: the digest that the engine recorded.
        actual: the digest of today's fold.
    """

    seq: int
    agreed_until_seq: int
    expected: str
    actual: str


class Result(msgspec.Struct):
    """What a log says.

    Attributes:
        opened: the log's first event, None if it is not there.
        first, last: the first and the last event that were folded, None for an empty log.
        end: how and where the log ends; None for an empty log.
        events: how many events were folded.
        checkpoints: how many digests were compared.
        uncompared: how many were not: they stand behind a place where the file had lost events.
        refusals: the first of the events that the book refused.
        refused: how many it refused.
        findings: what went wrong, earliest cause first.
    """

    state: State
    history: History
    stats: RunStats
    opened: ev.LogOpened | None = None
    first: ev.AnyEvent | None = None
    last: ev.AnyEvent | None = None
    end: End | None = None
    events: int = 0
    checkpoints: int = 0
    uncompared: int = 0
    refusals: list[Refusal] = []
    refused: int = 0
    mismatch: Mismatch | None = None
    findings: list[Finding] = []


class Replay:
    """One fold over one log.

    Args:
        verdicts: the verdicts to ask; all of the project's if not given.
        watch: called with each chunk of events after it was folded, for what only wants to look on.
    """

    def __init__(
        self,
        verdicts: Iterable[type[Verdict]] | None = None,
        watch: Callable[[list[ev.AnyEvent]], None] | None = None,
    ) -> None:
        self.state = State()
        self.history = History(self.state)
        self.verdicts = [verdict(self.history) for verdict in (all_verdicts() if verdicts is None else verdicts)]
        self._collector = StatsCollector(self.history)
        self._watch = watch
        self._result = Result(self.state, self.history, self._collector.stats)
        self._counts: Counter[type[ev.Event]] = Counter()
        self._agreed_until_seq = 0
        self._last_of_scheduler: ev.AnyEvent | None = None
        self._tail: list[ev.AnyEvent] = []
        self._table = self._dispatch()

    @property
    def last_seq(self) -> int:
        """The place of the last event that was folded, 0 for none."""
        return self._result.last.seq if self._result.last is not None else 0

    def feed(self, events: Iterable[ev.AnyEvent]) -> "Replay":
        """Fold `events`, which follow on those that were fed before, and return this replay."""
        iterator = iter(events)
        while chunk := list(islice(iterator, CHUNK_EVENTS)):
            self._fold(chunk)
            self._look_at(chunk)
        return self

    def result(self, ending: str = "torn") -> Result:
        """Return what the log says.

        Args:
            ending: how a log without `log_closed` ended: `torn`, `live` or `as_of`; see `End`.
        """
        result = self._result
        result.opened = self.history.opened
        self._collector.finish(self._counts)
        last = result.last
        if last is None:
            return result
        closed = self.history.closed
        latest = self._last_of_scheduler or last
        result.end = End(
            how="closed" if closed else ending,
            last=last,
            now_mono_ns=latest.mono_ns,
            step=latest.step,
            closed=closed,
            tail=_telling(self._tail),
            disagrees_after=result.mismatch.seq if result.mismatch else None,
        )
        found = [
            _placed(finding, result.end, self.history.lost_of_file)
            for verdict in self.verdicts
            for finding in verdict.findings(result.end)
        ]
        result.findings = earliest_cause_first(found)
        return result

    # --- the fold -----------------------------------------------------------------------------------------------------

    def _fold(self, chunk: list[ev.AnyEvent]) -> None:
        table = self._table
        for event in chunk:
            try:
                for see in table[event.__class__]:
                    see(event)
            except Refused as refused:
                self._refused(event, refused)

    def _look_at(self, chunk: list[ev.AnyEvent]) -> None:
        result = self._result
        if result.first is None:
            result.first = chunk[0]
        result.last = chunk[-1]
        self._tail = [*self._tail, *chunk[-KEPT_TAIL_EVENTS:]][-KEPT_TAIL_EVENTS:]
        result.events += len(chunk)
        self._counts.update(map(type, chunk))
        self.history.times.note(chunk)
        for event in reversed(chunk):
            if event.source == ev.SCHEDULER:
                self._last_of_scheduler = event
                break
        if self._watch is not None:
            self._watch(chunk)

    def _refused(self, event: ev.AnyEvent, refused: Refused) -> None:
        result = self._result
        result.refused += 1
        if result.refused <= KEPT_REFUSALS:
            result.refusals.append(Refusal(event, refused.rule, refused.detail))
        if self.history.lost_of_file is None:  # else what it refers to may be among what is lost
            for verdict in self.verdicts:
                verdict.refused(event, refused)

    def _checkpoint(self, event: ev.Checkpoint) -> None:
        result = self._result
        if len(event.book):
            self.state.restore(msgspec.json.decode(event.book, type=Book))
            self.history.follow(event.seq)
        if self.history.lost_of_file is not None:
            result.uncompared += 1
            return
        result.checkpoints += 1
        if result.mismatch is not None:
            return
        digest = self.state.digest()
        if digest == event.digest:
            self._agreed_until_seq = event.seq
        else:
            result.mismatch = Mismatch(event.seq, self._agreed_until_seq, event.digest, digest)

    def _dispatch(self) -> dict[type[ev.Event], tuple[See, ...]]:
        """Return who wants to see which kind, the state in front: what it refuses has not happened for the others."""
        table: dict[type[ev.Event], tuple[See, ...]] = {}
        for name, kind in ev.KINDS.items():
            method = f"on_{name.partition('@')[0]}"
            lookers = [*self.verdicts, self._collector]
            kept = self.history.takes(kind)
            table[kind] = (
                self.state.apply,
                *(getattr(looker, method) for looker in lookers if hasattr(looker, method)),
                *([kept] if kept is not None else []),
            )
        table[ev.Checkpoint] = (self._checkpoint, *table[ev.Checkpoint])
        return table


def replay(events: Iterable[ev.AnyEvent], ending: str = "torn") -> Result:
    """Return what `events` say; they are a whole log, in its order."""
    return Replay().feed(events).result(ending)


def until(
    events: Iterable[ev.AnyEvent], last_seq: int | None = None, last_ts_ns: int | None = None
) -> Iterator[ev.AnyEvent]:
    """Yield the events up to and with a place or a wall-clock time.

    Nothing is left out in between, as what is missing there would look like something that went wrong. The scheduler's
    clock says how far: all is yielded up to its last event within the time, evidence by clocks that are ahead included,
    and what follows that event up to the first one that is later.
    """
    held: list[ev.AnyEvent] = []
    for event in events:
        if last_seq is not None and event.seq > last_seq:
            return
        in_time = last_ts_ns is None or event.ts_ns <= last_ts_ns
        if event.source == ev.SCHEDULER:
            if not in_time:
                return
            yield from held
            held.clear()
        if held or not in_time:
            held.append(event)
        else:
            yield event


def _telling(tail: list[ev.AnyEvent]) -> tuple[ev.AnyEvent, ...]:
    """Return the last events that matter: of consecutive signs of life, the last one."""
    kept = [
        event
        for event, following in zip(tail, [*tail[1:], None], strict=True)
        if not (isinstance(event, ev.Checkpoint) and isinstance(following, ev.Checkpoint))
    ]
    return tuple(kept[-TAIL_EVENTS:])


def _placed(finding: Finding, end: End, lost: ev.Gap | None) -> Finding:
    """Return a finding with how its log ends, in doubt where a damaged file may have lost what speaks against it."""
    if lost is None or finding.is_a(Role.ENDS_LOG):
        return msgspec.structs.replace(finding, end=end)
    return msgspec.structs.replace(finding, end=end, certainty="undecidable", lost=lost)
