"""What changed between two moments of a log: what began, ended and moved, and how many events lie between.

This file knows the book and events; it reads no file and prints nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ledger import events as ev
from ledger.state.apply import State
from ledger.state.records import Book


class Diff(msgspec.Struct, frozen=True):
    """What changed between two moments of a log.

    Attributes:
        begun, ended: jobs, loads, sends, recvs and requests that are open at the later moment only, at the earlier
        only.
        moved: what is open at both and stands differently, as a line each.
        pinned_blocks: how many blocks are pinned at the earlier and at the later moment.
        kinds: how many events of each kind lie between.
    """

    begun: tuple[str, ...]
    ended: tuple[str, ...]
    moved: tuple[str, ...]
    pinned_blocks: tuple[int, int]
    kinds: dict[str, int]


def diff(earlier: State, later: State, between: Iterable[ev.AnyEvent]) -> Diff:
    """Return what changed from one book to a later one of the same log."""
    begun: list[str] = []
    ended: list[str] = []
    moved: list[str] = []
    tables = _tables(later.book)
    for noun, old in _tables(earlier.book).items():
        new = tables[noun]
        begun += [f"{noun} {key}" for key in new if key not in old]
        ended += [f"{noun} {key}" for key in old if key not in new]
        moved += [f"{noun} {key}: {change}" for key in old if key in new and (change := _change(old[key], new[key]))]
    counts = Counter(ev.kind_of(event) for event in between)
    return Diff(
        tuple(begun),
        tuple(ended),
        tuple(moved),
        (earlier.pinned_blocks(), later.pinned_blocks()),
        dict(counts.most_common()),
    )


def _tables(book: Book) -> dict[str, Mapping[int | str, msgspec.Struct]]:
    """Return what a book holds of each sort, by what one of them is called."""
    return {
        "request": {**book.requests},
        "store job": {**book.jobs},
        "load": {**book.loads},
        "send": {**book.sends},
        "recv": {**book.recvs},
    }


def _value(value: Any) -> str:
    return "nothing" if value in ((), {}, None, "", msgspec.UNSET) else f"{value}"


def _change(old: msgspec.Struct, new: msgspec.Struct) -> str:
    changes: list[str] = []
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if before != after and name != "since_seq":
            changes.append(f"{name.replace('_', ' ')} {_value(before)} became {_value(after)}")
    return ", ".join(changes)
