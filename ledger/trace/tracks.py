"""Tracks, and slices, instants and counters on them: what a viewer of traces shows, kept so that it can show it.

A track never goes back in time, and slices on it nest; so slices that overlap get tracks of their own, which the viewer
merges by name. Memory grows with what is open. This file knows the place of an event, and nothing of what it means.
"""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from ledger import events as ev
from ledger import words

MOST_RANKS = 1_000_000
"""Ranks beyond this are drawn in any order: the place of a track is a small number."""

Args: TypeAlias = Mapping[str, str | int | bool | Sequence[str]]
"""EntryKind the viewer shows of a slice when it is chosen. Empty texts are left out."""


EntryKind: TypeAlias = Literal["begin", "end", "instant", "counter"]


class Track(msgspec.Struct):
    """A row of the picture.

    Attributes:
        id: its number in the trace, never 0.
        parent: the number of the track that it stands under; 0 for a process.
        place: its place among its siblings; the viewer merges siblings of one name into one track of several rows.
        process: the process number of a process track, else 0.
        unit: of a counter, what it counts.
        last_ns: the time of the last entry: a track never goes back.
    """

    id: int
    parent: int
    name: str
    place: int = 0
    process: int = 0
    unit: str = ""
    last_ns: int = 0


class Entry(msgspec.Struct, frozen=True):
    """A begin or an end of a slice, an instant, or a value of a counter.

    Attributes:
        log: the place of its log in the picture, from 0.
        ts_ns: time on the axis, in nanoseconds since 1970 as the first log's clock has it.
        flows: numbers of the arrows that go through it: entries with the same number are joined in the order of time.
        last_flows: those that end here.
    """

    log: int
    what: EntryKind
    track: int
    ts_ns: int
    name: str = ""
    category: str = ""
    args: Args = {}
    flows: tuple[int, ...] = ()
    last_flows: tuple[int, ...] = ()
    value: int = 0


Item: TypeAlias = Track | Entry

Key: TypeAlias = tuple[str | int, ...]
"""Names what is open: `("job", 2)`, `("request", "R")`, `("call", transfer, rank, peer)`."""


class Row(msgspec.Struct):
    """Tracks of one name and parent. Slices that overlap stand on different ones.

    Attributes:
        free: the tracks on which nothing is open, topmost first.
    """

    name: str
    parent: int
    place: int
    free: list[Track] = []


class Slice(msgspec.Struct):
    """A slice that has begun.

    Attributes:
        phase: the name of the slice within it; empty if there is none.
        request: of a load, its request.
        state: of a request, what the book says that it is doing.
        peers: of a recv, the workers of the prefill engine that it expects.
        told: what is added to its arguments when it ends.
    """

    row: Row
    track: Track
    category: str
    source: str
    since_seq: int
    phase: str = ""
    request: str = ""
    state: str = ""
    peers: tuple[str, ...] = ()
    told: dict[str, str | int] = {}


PLACES = (
    "findings",
    "alarms",
    "log",
    "waiting requests",
    "running requests",
    "pinned blocks",
    "open jobs",
    "open loads",
    "requests",
    "store jobs",
    "loads",
    "sends",
    "sends by peer",
    "recvs",
    "recvs by peer",
    "other events",
)
"""The tracks of an engine, top down. Its ranks follow."""

_UNITS = {
    "waiting requests": "requests",
    "running requests": "requests",
    "pinned blocks": "blocks",
    "open jobs": "jobs",
    "open loads": "loads",
}


class Tracks:
    """The tracks of one process, and what is put on them.

    Args:
        number: the place of the process among those of the picture, from 0.
        name: what to call it.

    Attributes:
        items: what was drawn and not taken yet. Whoever takes the items empties the list.
    """

    def __init__(self, number: int, name: str) -> None:
        self.items: list[Item] = []
        self._number = number
        self._tracks = 0
        self._rows: dict[tuple[int, str], Row] = {}
        self._fixed: dict[tuple[str, str], Track] = {}
        self._ranks: dict[int, Track] = {}
        self._open: dict[Key, Slice] = {}
        self._process = self._track(name, 0, process=number + 1)

    def _track(self, name: str, parent: int, place: int = 0, *, process: int = 0, unit: str = "") -> Track:
        self._tracks += 1
        track = Track((self._number + 1 << 40) + self._tracks, parent, name, place, process, unit)
        self.items.append(track)
        return track

    def _one(self, name: str, source: str) -> Track:
        """Return the track of that name for what a source has to say; the viewer shows those of all sources as one.

        Sources have clocks of their own, and a track never goes back.
        """
        track = self._fixed.get((name, source))
        if track is None:
            track = self._track(name, self._process.id, PLACES.index(name), unit=_UNITS.get(name, ""))
            self._fixed[name, source] = track
        return track

    def _row(self, name: str, parent: Track | None = None) -> Row:
        above = parent or self._process
        row = self._rows.get((above.id, name))
        if row is None:
            place = PLACES.index(name) if parent is None else 0
            row = self._rows[above.id, name] = Row(name, above.id, place)
        return row

    def _rank(self, rank: int) -> Track:
        track = self._ranks.get(rank)
        if track is None:
            place = len(PLACES) + min(max(rank, 0), MOST_RANKS)
            track = self._ranks[rank] = self._track(f"rank {rank}", self._process.id, place)
        return track

    def _put(
        self,
        what: EntryKind,
        track: Track,
        ts_ns: int,
        name: str = "",
        category: str = "",
        args: Args | None = None,
        flows: Sequence[int] = (),
        **more: Any,
    ) -> None:
        track.last_ns = max(track.last_ns, ts_ns)
        shown = {key: value for key, value in (args or {}).items() if value not in ("", ())}
        self.items.append(
            Entry(self._number, what, track.id, track.last_ns, name, category, shown, tuple(flows), **more)
        )

    def _begin(
        self,
        key: Key,
        row: Row,
        name: str,
        event: ev.Event,
        ts_ns: int,
        args: Args,
        flows: Sequence[int] = (),
    ) -> Slice:
        if key in self._open:
            self._close(key, ts_ns, {"end": f"not in this log; the next one of this name is event {event.seq}"})
        # The first row that was free by then: two threads of a rank may tell of their calls in another order.
        track = next((free for free in row.free if free.last_ns <= ts_ns), None)
        if track is None:
            track = self._track(row.name, row.parent, row.place)
        else:
            row.free.remove(track)
        category = str(key[0])
        opened = self._open[key] = Slice(row, track, category, event.source, event.seq)
        self._put("begin", track, ts_ns, name, category, {**args, **place_of(event)}, flows)
        return opened

    def _phase(self, key: Key, phase: str, ts_ns: int, args: Args | None = None) -> None:
        """Let an open slice enter a phase; an empty one ends the last."""
        opened = self._open.get(key)
        if opened is None or opened.phase == phase:
            return
        if opened.phase:
            self._put("end", opened.track, ts_ns)
        opened.phase = phase
        if phase:
            self._put("begin", opened.track, ts_ns, phase, opened.category, args)

    def _from(self, key: Key, ts_ns: int, name: str, flows: Sequence[int], last_flows: tuple[int, ...] = ()) -> None:
        """Mark where arrows leave what is open: the viewer lets an arrow leave a slice at its end, not at its begin."""
        opened = self._open.get(key)
        if opened is not None:
            self._put("instant", opened.track, ts_ns, name, opened.category, flows=flows, last_flows=last_flows)

    def _close(self, key: Key, ts_ns: int, args: Args | None = None) -> None:
        opened = self._open.get(key)
        if opened is None:
            return
        self._phase(key, "", ts_ns)
        del self._open[key]
        self._put("end", opened.track, ts_ns, args={**opened.told, **(args or {})})
        bisect.insort(opened.row.free, opened.track, key=lambda track: track.id)


def place_of(event: ev.Event) -> dict[str, str | int]:
    """Return where an event stands in the log, and what its own wall clock said: both as replay prints them."""
    return {"event": event.seq, "time": words.timestamp(event.ts_ns)}
