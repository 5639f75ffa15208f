"""The smallest log that still has a finding, for a bug report.

Delta debugging (Zeller and Hildebrandt, 2002): leave parts out, in ever smaller pieces, as long as the finding stays.
First whole requests with their jobs and loads, then jobs and loads, then single events. What is left is numbered anew.
A smaller log must tell the same story: the same kind and certainty, no event refused and no kind found that were not in
the whole one.

This file knows events and the fold; it reads and writes no file.
"""

import enum
import re
from collections.abc import Callable, Hashable, Sequence

import msgspec

from ledger import events as ev
from ledger.replay.fold import Replay
from ledger.replay.incidents import CERTAINTIES
from ledger.verdicts.base import Finding

MAX_EVENTS = 200_000
"""Longer logs are sealed and sent whole: each trial replays what is left, and that would take hours."""

"""Places in the log, which change when events are left out."""

Unit = Callable[[ev.AnyEvent], Hashable]


class Minimal(msgspec.Struct):
    """A smaller log.

    Attributes:
        events: what is left, numbered from 1.
        finding: the finding, as the smaller log has it.
        trials: how many logs were tried.
    """

    events: list[ev.AnyEvent]
    finding: Finding
    trials: int


def minimize(
    events: Sequence[ev.AnyEvent], kind: str, ending: str = "torn", progress: Callable[[int, int], None] | None = None
) -> Minimal | None:
    """Return the smallest log found that still has a finding of `kind`; None if the whole one has none.

    Args:
        events: a log.
        kind: the kind of finding; of that kind the first of the most certain is kept.
        ending: how a log without `log_closed` ended, see `ledger.verdicts.history.End`.
        progress: told now and then the trials so far and the events left.

    Raises:
        ValueError: the log is longer than `MAX_EVENTS`.
    """
    if len(events) > MAX_EVENTS:
        raise ValueError(
            f"the log has {len(events):,} events, and at most {MAX_EVENTS:,} can be minimized; seal and send it whole"
        )
    search = _Search(kind, ending, progress)
    if not search.begin(events):
        return None
    kept = list(events)
    for unit in (_Lives(events), _works, _single):
        kept = search.reduce(kept, unit)
    numbered = renumbered(kept)
    finding = search.find(numbered)
    return Minimal(numbered, finding, search.trials) if finding is not None else None


def _stays(event: ev.AnyEvent) -> bool:
    """Whether an event is left in whatever happens: how a log ends and what it has lost decides how certain it is."""
    return isinstance(event, ev.LogOpened | ev.LogClosed | ev.Gap)


def renumbered(events: Sequence[ev.AnyEvent]) -> list[ev.AnyEvent]:
    """Return events with places from 1, without a hole. Digests of the whole log would not hold, so there are none."""
    kept = [event for event in events if not isinstance(event, ev.Checkpoint) or len(event.book)]
    return [msgspec.structs.replace(event, seq=place) for place, event in enumerate(kept, 1)]


class _Search:
    """Tries smaller logs against the finding of the whole one."""

    def __init__(self, kind: str, ending: str, progress: Callable[[int, int], None] | None) -> None:
        self._kind = kind
        self._ending = ending
        self._progress = progress
        self._kinds: set[str] = set()
        self._rules: set[str] = set()
        self._wanted: tuple[object, ...] = ()
        self.trials = 0

    def begin(self, events: Sequence[ev.AnyEvent]) -> bool:
        """Take the finding of the whole log as what must stay. Return whether there is one."""
        result = Replay().feed(events).result(self._ending)
        alike = [finding for finding in result.findings if finding.kind == self._kind]
        found = min(alike, key=lambda finding: CERTAINTIES.index(finding.certainty), default=None)
        if found is None:
            return False
        self._kinds = {finding.kind for finding in result.findings}
        self._rules = {refusal.rule for refusal in result.refusals}
        self._wanted = _signature(found)
        return True

    def find(self, events: Sequence[ev.AnyEvent]) -> Finding | None:
        """Return the finding in a smaller log; None if it is gone, or the story is another one."""
        self.trials += 1
        result = Replay().feed(events).result(self._ending)
        if {finding.kind for finding in result.findings} - self._kinds:
            return None
        if {refusal.rule for refusal in result.refusals} - self._rules:
            return None
        return next((finding for finding in result.findings if _signature(finding) == self._wanted), None)

    def reduce(self, events: list[ev.AnyEvent], unit: Unit) -> list[ev.AnyEvent]:
        """Return a smaller log, made by leaving out whole units, in halves, quarters, and so on."""
        units = list(dict.fromkeys(unit(event) for event in events if not _stays(event)))
        size = max(len(units) // 2, 1)
        while units:
            start, smaller = 0, False
            while start < len(units):
                left_out = set(units[start : start + size])
                trial = [event for event in events if _stays(event) or unit(event) not in left_out]
                if trial and self.find(renumbered(trial)) is not None:
                    events, smaller = trial, True
                    del units[start : start + size]
                else:
                    start += size
                if self._progress is not None:
                    self._progress(self.trials, len(events))
            if size == 1 and not smaller:
                break
            size = max(size // 2, 1)
        return events


def _signature(finding: Finding) -> tuple[object, ...]:
    return (
        finding.kind,
        finding.certainty,
        _shape(finding.facts),
        finding.ranks,
        finding.code,
        finding.blocks,
        finding.jobs[:1],
        finding.requests[:1],
    )


def _shape(value: object) -> Hashable:
    """Return facts without numbers and places, which another log has otherwise."""
    if isinstance(value, ev.Event):
        return ev.kind_of(value)
    if isinstance(value, msgspec.Struct):
        return type(value), tuple(_shape(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, str):
        return re.sub(r"events? \d+", "event", value)
    return value if isinstance(value, bool | enum.Enum) else None


class _Lives:
    """Puts an event to the request that it belongs to, by its own name or by its job or load."""

    def __init__(self, events: Sequence[ev.AnyEvent]) -> None:
        self._of_job = {event.job: event.request for event in events if isinstance(event, ev.JobRegistered)}
        self._of_load = {event.load: event.request for event in events if isinstance(event, ev.LoadPlanned)}

    def __call__(self, event: ev.AnyEvent) -> Hashable:
        if isinstance(event, ev.LogOpened | ev.LogClosed):
            return "the log", event.seq
        request = ev.request_of(event) or self._of_job.get(ev.job_of(event), "")
        return request or self._of_load.get(ev.load_of(event), "") or ("alone", event.seq)


def _works(event: ev.AnyEvent) -> Hashable:
    work = ev.named_work(event)
    return work.key if work is not None else ("alone", event.seq)


def _single(event: ev.AnyEvent) -> Hashable:
    return event.seq
