"""Who used a block: owned, pinned, read or wrote it, and from which event to which.

Which events begin and end a use, they declare themselves. This file knows events; it reads no file and prints nothing.
"""

from collections.abc import Hashable, Iterable

import msgspec

from ledger import events as ev
from ledger import words
from ledger.blocks import names


class BlockUse(msgspec.Struct, frozen=True):
    """One use of a block.

    Attributes:
        what: `owned`, `pinned`, `read`, or `written`.
        by: who: a request, a job, a transfer.
        first: the event at which it began.
        last: the event at which it ended; None if it is open.
    """

    what: str
    by: str
    first: ev.AnyEvent
    last: ev.AnyEvent | None = None


def blame(events: Iterable[ev.AnyEvent], block: tuple[int, int]) -> list[BlockUse]:
    """Return who owned, pinned, read and wrote a block, by the beginning of each use.

    The log names owners only while open work names the block: what a request did with it otherwise is not recorded.

    Args:
        events: the events that concern the block, as `ledger.replay.select.Watch` collects them.
        block: its group and number.
    """
    uses: list[BlockUse] = []
    opened: dict[Hashable, int] = {}
    for event in events:
        begun = _begun(event) if _may_use(event, block) else None
        if begun is not None and not (event.about.step == "ends" and begun[0] in opened):
            opened[begun[0]] = len(uses)
            uses.append(BlockUse(begun[1], begun[2], event))
        place = opened.pop(_ended(event), None)
        if place is not None:
            uses[place] = msgspec.structs.replace(uses[place], last=event)
    return sorted(uses, key=lambda use: use.first.seq)


def _may_use(event: ev.AnyEvent, block: tuple[int, int]) -> bool:
    """Return whether an event names the block, or none: the calls of one job may each be for blocks of their own."""
    blocks = ev.blocks_of(event)
    return not blocks or names(blocks, block)


def _key(event: ev.AnyEvent) -> Hashable:
    """Return what tells the uses of one work from those of others; None if the event is about no work."""
    if isinstance(event, ev.TransferStarted | ev.TransferFinished):
        return "call", event.transfer, event.rank, event.peer
    subject = ev.subject_of(event)
    return (event.about.work, subject.id) if subject is not None else None


def _begun(event: ev.AnyEvent) -> tuple[Hashable, str, str] | None:
    """Return what use begins with an event: its key, what it is, and by whom."""
    use = event.about.uses
    if not use:
        return None
    if isinstance(event, ev.TransferStarted):
        use = "read" if event.op in ("put", "push") else "written"
    return _key(event), use, _by(event)


def _by(event: ev.AnyEvent) -> str:
    """Return who uses the blocks of an event."""
    subject = ev.subject_of(event)
    if isinstance(event, ev.TransferStarted):
        work = f" of {subject.name}" if subject is not None and subject.work in ("job", "load") else ""
        return f"{event.op} {event.transfer}{work} on rank {event.rank}"
    if subject is None:
        return ev.kind_of(event)
    generation = event.generation if isinstance(event, ev.BlocksAllocated | ev.BlocksReleased | ev.LoadPlanned) else 1
    if subject.work == "request":
        return words.request(subject.request, generation)
    whose = f" of {words.request(subject.request, generation)}" if subject.request else ""
    return f"{'store ' if subject.work == 'job' else ''}{subject.name}{whose}"


def _ended(event: ev.AnyEvent) -> Hashable:
    """Return the key of the use that ends with an event."""
    return _key(event) if event.about.step == "ends" else None
