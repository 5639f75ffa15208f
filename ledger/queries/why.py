"""Why a request ended as it did, or stands where it stands: its turns, backwards, and what it still waits for.

Answered from events and one fold, as data and lines of text. Which events turn the life of a request, they declare
themselves. This file reads no file and prints nothing.
"""

from collections.abc import Iterator, Sequence

import msgspec

from ledger import events as ev
from ledger import words
from ledger.replay.fold import Result
from ledger.state.open_work import OpenWork, of_request
from ledger.verdicts.base import Finding

_NOUNS = {"job": "store job", "recv": "transfer"}


class Why(msgspec.Struct, frozen=True):
    """What led to a request's end, or to where it stands.

    Attributes:
        answer: one sentence.
        because: what led there, the nearest cause first, as lines.
        turns: the events that turned its life, in order.
        findings: what the verdicts say of it.
    """

    request: str
    answer: str
    because: tuple[str, ...]
    turns: tuple[ev.AnyEvent, ...]
    findings: tuple[Finding, ...]


def why(request: str, events: Sequence[ev.AnyEvent], result: Result) -> Why | None:
    """Return why a request ended as it did; None if the log does not know it.

    Args:
        request: its id.
        events: the events that concern it, as `ledger.replay.select.Watch` collects them.
        result: the fold of its log.
    """
    if not events:
        return None
    findings = tuple(finding for finding in result.findings if request in finding.requests)
    ended = next(
        (event for event in reversed(events) if isinstance(event, ev.RequestFinished | ev.RequestAborted)), None
    )
    turns = tuple(event for event in events if ev.turned_its_request(event))
    record = result.state.book.requests.get(request)
    if ended is not None and record is None:
        after = ev.between(events[0], ended)
        answer = f"{ended.sentence()} at event {ended.seq}{f', {after} after it was first seen' if after else ''}"
    elif record is not None:
        before = ev.between(events[-1], result.end.last) if result.end is not None else ""
        last = f"; its last event is {before} before that" if before else ""
        answer = f"request {request} is {record.state} at the end of the log{last}"
    else:
        answer = f"request {request} is named, and the log does not have its end"
    return Why(request, answer, tuple(_because(events, turns, result, request, findings)), turns, findings)


def _because(
    events: Sequence[ev.AnyEvent],
    turns: Sequence[ev.AnyEvent],
    result: Result,
    request: str,
    findings: Sequence[Finding],
) -> Iterator[str]:
    book = result.state.book
    is_waiting = False
    still_open: list[str] = []
    for work in of_request(book, request):
        line = f"{_NOUNS.get(work.kind, work.kind)} {work.id} is open since event {work.since_seq} and {_waits(work)}"
        if work.kind in ("load", "recv"):
            is_waiting = True
            yield f"its {line}"
        elif work.kind == "job" and request in book.requests:
            yield f"its {line}"
        elif work.kind == "job":
            still_open.append(f"still open because of it, and not why it ended: {line}")
    for event in reversed(turns):
        yield f"event {event.seq}: {event.sentence()}"
    preemptions = sum(isinstance(event, ev.RequestPreempted) for event in events)
    if not turns and not is_waiting and not preemptions:
        kinds = list(dict.fromkeys(finding.kind for finding in findings))
        if kinds:
            yield f"no event of its own shows why; it is named by the findings below: {', '.join(kinds)}"
        else:
            yield "nothing went wrong with it that this log shows"
    yield from still_open


def _waits(work: OpenWork) -> str:
    """Return for whom open work waits."""
    if work.waiting or work.kind == "recv":
        return f"waits for {words.ranks(work.waiting)}"
    return "has settled and was not freed" if work.kind == "job" else "was not given to the workers"
