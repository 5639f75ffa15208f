"""Reads the events of a log: live, closed, torn or sealed.

Old versions of an event are lifted here, one step at a time, when they are read; stored rows stay as they are. How the
file is opened, and what its damage means, is in `ledger.file.open`. This file knows events and the table they are in.
"""

import operator
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from ledger import events as ev
from ledger.errors import FileCorrupt, FileNewer
from ledger.file import sqlite
from ledger.file.explain import brief
from ledger.file.live_mark import is_live
from ledger.file.open import COPY_AGAIN, DAMAGE, UPGRADE, LogDatabase

PAGE_EVENTS = 2_000
"""Events read at a time, each page in a read transaction of its own: a long one makes a live log's `-wal` grow."""

Ending: TypeAlias = Literal["closed", "torn", "live"]
"""How a log ends: with `log_closed`, without it, or not yet, because an engine writes it."""


def open_log(path: Path | str, *, tolerate: bool = False) -> "LogFile":
    """Return an open log; close it, or use it in a `with`.

    Args:
        path: the file.
        tolerate: read what can be read of a damaged file; `LogFile.damage` says what cannot.

    Raises:
        FileMissing, NotALedger, FileCorrupt, FileNewer: the file cannot be read; one line that says what to do.
    """
    return LogFile(Path(path), tolerate=tolerate)


class EventPage(NamedTuple):
    """Some events in a row: the place and the line of each as they are stored, and the events."""

    rows: list[tuple[int, bytes]]
    events: list[ev.AnyEvent]


class LogFile(LogDatabase):
    """An open log and its events. The attributes are those of `LogDatabase`."""

    def __init__(self, path: Path, *, tolerate: bool = False) -> None:
        super().__init__(path, tolerate=tolerate)
        try:
            _ = self.first_seq, self.last_seq  # a file that was cut may have lost either end
        except BaseException:
            self.close()
            raise

    # --- what the log is ----------------------------------------------------------------------------------------------

    @property
    def first_seq(self) -> int:
        """The place of the first event, 0 for an empty log."""
        return self._seq("SELECT min(seq) FROM events")

    @property
    def last_seq(self) -> int:
        """The place of the newest event, 0 for an empty log. It grows while the log is live."""
        return self._seq("SELECT max(seq) FROM events")

    @property
    def end(self) -> Ending:
        """How the log ends: `closed`, `torn`, or `live`. For a sealed file: how it ended when it was sealed."""
        live = is_live(self._file)  # asked first: a log that is closed meanwhile must not look torn
        if self._rows("SELECT kind FROM events ORDER BY seq DESC LIMIT 1") == [("log_closed",)]:
            return "closed"
        if self.sealed:
            return "live" if self._rows('SELECT "end" FROM seal') == [("live",)] else "torn"
        return "live" if live else "torn"

    def check_not_empty(self) -> None:
        """Refuse a log that holds no event and that nobody writes: what its engine wrote is not in this file.

        Each log begins with `log_opened`, so without an event there is nothing to judge, and nothing that was healthy.

        Raises:
            FileCorrupt: there is no event, and there will be none.
        """
        if self.last_seq or self.end != "torn":
            return
        wal = sqlite.wal_path(self.path).name
        if self.sealed:
            why = (
                "it was sealed from a copy without its -wal file, most likely. Seal the log again where it was written"
            )
        elif self._immutable:
            why = f"most likely its -wal file was not copied. Copy {wal} too, beside it"
        else:
            why = (
                f"{wal} is cut, or the engine ended before its first flush. Copy both again from the host that wrote it"
            )
        raise FileCorrupt(f"{self.path}: holds no event; {why}.")

    @property
    def held_back_ms(self) -> int:
        """How many milliseconds of events the writer of a torn log may have held in memory when it was killed."""
        text = self.meta.get("flush_interval_ms", "")
        return int(text) if text.isdecimal() else 0

    @property
    def lacks_wal(self) -> bool:
        """Whether a torn log has no `-wal`, although a killed engine leaves one behind.

        It was copied without it, and lacks the newest events; or another program has moved the `-wal` into the file.
        """
        return not self.sealed and self._immutable and self.end == "torn"

    # --- its events ---------------------------------------------------------------------------------------------------

    def events(self, after_seq: int = 0, until_seq: int | None = None) -> Iterator[ev.AnyEvent]:
        """Yield the events after `after_seq` up to `until_seq`, both places in the log, in order.

        Of a live log, yields what is there when the end is reached; a later call goes on from there.

        Raises:
            FileCorrupt: an event is missing or cannot be read, and damage is not tolerated.
            FileNewer: an event is of a kind or version that this kvledger does not know.
        """
        after, last = after_seq, until_seq if until_seq is not None else _LAST_PLACE
        while after < last:
            before = after
            events = self._read_in_bulk(after, last)
            if events is None:
                after, page = self._read_page(after, last)
                events = page.events
            else:
                after += len(events)
            if after == before:
                return
            yield from events

    def pages(self, after_seq: int = 0, until_seq: int | None = None) -> Iterator[EventPage]:
        """Yield the same events as `events`, a page at a time, each with its line as it is stored."""
        after, last = after_seq, until_seq if until_seq is not None else _LAST_PLACE
        while after < last:
            before = after
            after, page = self._read_page(after, last)
            if after == before:
                return
            yield page

    def gaps(self) -> list[ev.Gap]:
        """Return all gaps of the log, without a fold.

        Raises:
            FileCorrupt: the file is damaged.
        """
        lines = [bytes(data) for (data,) in self.query("SELECT data FROM events WHERE kind = 'gap' ORDER BY seq")]
        return _GAPS_DECODER.decode(b"[" + b",".join(lines) + b"]")

    def _read_in_bulk(self, after: int, last: int) -> list[ev.AnyEvent] | None:
        """Return the next events, none at the end; None if they need a closer look.

        Two calls for a whole page: to fetch and to decode each event alone would double what replay costs.
        """
        self._follow()
        bounds = (after, last, PAGE_EVENTS)
        try:
            ((count, newest, lines),) = self._patiently(lambda: self._connection.execute(_BULK, bounds).fetchall())
            events = _PAGE_DECODER.decode(b"[" + (lines or b"") + b"]")
        except (*DAMAGE, msgspec.DecodeError):
            return None  # an older version of an event, more than SQLite puts into one text, or damage
        if count and newest != after + count:
            return None
        return events if [event.seq for event in events] == list(range(after + 1, after + count + 1)) else None

    def _read_page(self, after: int, last: int) -> tuple[int, EventPage]:
        """Return the place of the last event that was looked at, and the events up to there."""
        rows = self._fetch(_PAGE, (after, last, PAGE_EVENTS))
        places = [after, *[seq for seq, _ in rows]]
        if any(map(operator.ge, places, places[1:])):
            self._give_up_or_salvage(sqlite3.DatabaseError("events come out of order"))
            rows = self._fetch(_PAGE, (after, last, PAGE_EVENTS))
        if not rows:
            return after, EventPage([], [])
        page = self._decode(rows)
        self._check_order(after, rows, page.events)
        return rows[-1][0], page

    def _decode(self, rows: list[tuple[int, bytes]]) -> EventPage:
        try:
            # One call for a page: a call for each event would cost as much again as the events.
            return EventPage(rows, _PAGE_DECODER.decode(b"[" + b",".join([data for _, data in rows]) + b"]"))
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
            pass  # found out below which event it is; a TypeError is a NULL where a page was lost
        page = EventPage([], [])
        for seq, data in rows:
            try:
                event = self._decode_one(seq, data)
            except FileCorrupt as problem:
                if not self._tolerate:
                    raise
                self.damage.append(str(problem))
            else:
                page.rows.append((seq, data))
                page.events.append(event)
        return page

    def _decode_one(self, seq: int, data: bytes) -> ev.AnyEvent:
        try:
            fields = ev.lift(_FIELDS_DECODER.decode(data))
            tag = fields.get("kind")
            if isinstance(tag, str) and tag not in ev.KINDS:
                raise FileNewer(f"{self.path}: event {seq} is a '{tag}', which this kvledger does not know. {UPGRADE}")
            return ev.decode(fields)
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
            raise FileCorrupt(f"{self.path}: event {seq} cannot be read: {brief(error)}. {COPY_AGAIN}") from error

    def _check_order(self, after: int, rows: list[tuple[int, bytes]], events: list[ev.AnyEvent]) -> None:
        places = [seq for seq, _ in rows]
        if places == [event.seq for event in events] and places[-1] - after == len(places):
            return
        problems: list[str] = []
        expected = after + 1
        for seq in places:
            if seq - expected == 1:
                problems.append(f"event {expected} is missing")
            elif seq != expected:
                problems.append(f"events {expected} to {seq - 1} are missing")
            expected = seq + 1
        if len(events) == len(places):
            problems.extend(
                f"event {seq} says that it is event {event.seq}"
                for seq, event in zip(places, events, strict=True)
                if seq != event.seq
            )
        if problems and not self._tolerate:
            raise FileCorrupt(f"{self.path}: {problems[0]}. {COPY_AGAIN}")
        self.damage.extend(f"{self.path}: {problem}." for problem in problems)

    def _seq(self, query: str) -> int:
        return self._rows(query)[0][0] or 0


def gaps_of(path: Path) -> list[ev.Gap]:
    """Return what a log has lost.

    Raises:
        LedgerFileError: the file cannot be read.
    """
    with open_log(path) as log:
        return log.gaps()


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the events of a log as lines of JSON, as they are stored, some thousands at a time.

    Raises:
        LedgerFileError: the file cannot be read.
    """
    with open_log(path) as log:
        log.check_not_empty()
        for page in log.pages():
            yield b"\n".join([data for _, data in page.rows]) + b"\n"


_PAGE = "SELECT seq, data FROM events WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
_BULK = f"SELECT count(*), max(seq), group_concat(data) FROM ({_PAGE})"  # noqa: S608 - the statement above
_LAST_PLACE = 2**63 - 1
_GAPS_DECODER: msgspec.json.Decoder[list[ev.Gap]] = msgspec.json.Decoder(list[ev.Gap])
_PAGE_DECODER: msgspec.json.Decoder[list[ev.AnyEvent]] = msgspec.json.Decoder(list[ev.AnyEvent])
_FIELDS_DECODER: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
