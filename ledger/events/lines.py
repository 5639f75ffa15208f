"""Events as lines of a page: with their place and time, gaps in a row as one, and the time between two of them.

This file knows the kinds of the log itself and words.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from ledger import words
from ledger.events.base import SCHEDULER, Event
from ledger.events.log import Gap

SHOWN_GAPS = 5
"""Losses that are shown one by one."""


def line(event: Event) -> str:
    """Return an event as one line: its place, its time, who said it, and what happened."""
    source = "" if event.source == SCHEDULER else f"{event.source}: "
    return f"{event.seq:>8}  {words.clock(event.ts_ns)}  {source}{event.sentence()}"


def lines(events: Iterable[Event]) -> Iterator[tuple[int, str]]:
    """Yield each event's place and line; gaps in a row, of which a salvaged file may have thousands, as one."""
    for is_gap, run in itertools.groupby(events, key=lambda event: isinstance(event, Gap)):
        if not is_gap:
            yield from ((event.seq, line(event)) for event in run)
            continue
        found = [event for event in run if isinstance(event, Gap)]
        told = (
            line(found[0])
            if len(found) == 1
            else f"{found[0].seq:>8}  {words.clock(found[0].ts_ns)}  GAPS: {losses(found)}"
        )
        yield found[-1].seq, told


def between(first: Event, last: Event) -> str:
    """Return the time from an event to a later one of the same log; empty if no clock tells it.

    It is by the monotonic clock where one process emitted both, as a wall clock may be set in between. Else the wall
    clocks tell, unless by them the later one came first.
    """
    one_clock = first.source == last.source
    duration_ns = last.mono_ns - first.mono_ns if one_clock else last.ts_ns - first.ts_ns
    return words.span(duration_ns) if duration_ns >= 0 else ""


def lost_at(gap: Gap) -> str:
    """Return what a gap says is lost, and where: `3 events of rank 0 are lost at event 9 (the queue was full)`."""
    verb = "is" if gap.dropped == 1 else "are"
    return f"{words.lost(gap.dropped)} of {gap.origin} {verb} lost at event {gap.seq} ({gap.reason})"


def losses(found: Sequence[Gap]) -> str:
    """Return what is lost, those in a row of one origin and reason as one; empty if nothing is."""
    runs: list[list[Gap]] = []
    for gap in found:
        before = runs[-1][-1] if runs else None
        if before is not None and (before.seq + 1, before.origin, before.reason) == (gap.seq, gap.origin, gap.reason):
            runs[-1].append(gap)
        else:
            runs.append([gap])
    told: list[str] = []
    for run in runs[:SHOWN_GAPS]:
        first, last = run[0], run[-1]
        counted = sum(gap.dropped for gap in run) if all(gap.dropped for gap in run) else 0
        where = f"event {first.seq}" if len(run) == 1 else f"events {first.seq} to {last.seq}"
        told.append(f"{words.lost(counted)} of {first.origin} at {where} ({first.reason})")
    if len(runs) > SHOWN_GAPS:
        told.append(f"and {words.plural(len(runs) - SHOWN_GAPS, 'more gap')}")
    return "; ".join(told)
