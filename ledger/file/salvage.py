"""Takes events out of a damaged database: what its pages still hold, whether or not a path leads to them.

In a file that was cut, the pages that say where the others are may be gone while the events are there, so that SQLite
finds none of them. This reads the pages themselves, those of a `-wal` first. A row counts as an event when it has as
many columns as an event has, and its text is a line that names the row's own place in the log.

The format is that of https://www.sqlite.org/fileformat2.html; section numbers in the comments are of that page. This
file knows it, and nothing of events but that they are JSON with a `seq`.
"""

import mmap
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ledger.file import sqlite

HEADER_BYTES = 100
EVENT_COLUMNS = 14
"""Columns of the table `events` since its first revision; a later one only adds some."""

PAGE_EVENTS = 1_000
"""Events that are copied at a time."""

_TABLE_LEAF = 0x0D
_WAL_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24


def events(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield place and line of every event that the file and its `-wal` hold, in no order. Some may come twice."""
    with _Pages(path) as pages:
        for number in range(1, pages.count + 1):
            yield from _events_of(pages, number)


def copy(path: Path, target: Path, meta: list[tuple[str, str]]) -> None:
    """Make a log of what can be read of `path`, with these rows of `meta`."""
    from ledger.file import migrate  # noqa: PLC0415 - it takes 0.4 s, and few files are damaged

    migrate.create(target)
    connection = sqlite3.connect(target, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", meta)
        # Through a table of their own, because pages are not in the order of the log.
        connection.execute("CREATE TEMP TABLE found (seq INTEGER PRIMARY KEY, line TEXT)")
        connection.executemany("INSERT INTO found VALUES (?, CAST(? AS TEXT)) ON CONFLICT DO NOTHING", events(path))
        rows = connection.execute("SELECT line FROM found ORDER BY seq")
        while page := rows.fetchmany(PAGE_EVENTS):
            append(connection, [line for (line,) in page])
        connection.execute("COMMIT")
    finally:
        connection.close()


def append(connection: sqlite3.Connection, lines: list[str]) -> None:
    """Append events, each a line of JSON, and leave out those that are none."""
    from ledger.file import schema  # noqa: PLC0415 - as above

    try:
        connection.execute(schema.APPEND, (f"[{','.join(lines)}]",))
    except sqlite3.Error:
        if len(lines) == 1:
            return  # damaged within; the reader will see that it is missing
        half = len(lines) // 2
        append(connection, lines[:half])
        append(connection, lines[half:])


class _Place(msgspec.Struct):
    """All that has to be known of a line."""

    seq: int


class _Pages:
    """The pages of a database, in the newest version that there is."""

    def __init__(self, path: Path) -> None:
        self._database = _map(path)
        self._wal = _map(sqlite.wal_path(path))
        header = self._database[:HEADER_BYTES]
        size = int.from_bytes(header[16:18], "big")
        self.page_bytes = 65_536 if size == 1 else size
        self.usable_bytes = self.page_bytes - header[20]
        self._newer = dict(self._frames())
        self.count = max(len(self._database) // self.page_bytes + 1, max(self._newer, default=0))

    def __enter__(self) -> "_Pages":
        return self

    def __exit__(self, *_: object) -> None:
        for data in (self._database, self._wal):
            if isinstance(data, mmap.mmap):
                data.close()

    def read(self, number: int) -> bytes:
        """Return a page; short or empty where the file ends before it does."""
        if number in self._newer:
            start = self._newer[number]
            return self._wal[start : start + self.page_bytes]
        start = (number - 1) * self.page_bytes
        return self._database[start : start + self.page_bytes]

    def _frames(self) -> Iterator[tuple[int, int]]:
        """Yield page and offset of each frame of the `-wal` (4.1); those of an earlier round have other salts."""
        salts = self._wal[16:24]
        frame = _FRAME_HEADER_BYTES + self.page_bytes
        for start in range(_WAL_HEADER_BYTES, len(self._wal) - frame + 1, frame):
            if self._wal[start + 8 : start + 16] != salts:
                return
            yield int.from_bytes(self._wal[start : start + 4], "big"), start + _FRAME_HEADER_BYTES


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):  # mmap takes no empty file
        return b""


def _events_of(pages: _Pages, number: int) -> Iterator[tuple[int, bytes]]:
    """Yield the events of a page, if it is a leaf of a table (1.6)."""
    page = pages.read(number)
    start = HEADER_BYTES if number == 1 else 0
    if len(page) < start + 8 or page[start] != _TABLE_LEAF:
        return
    cells = int.from_bytes(page[start + 3 : start + 5], "big")
    for cell in range(cells):
        pointer = start + 8 + 2 * cell
        offset = int.from_bytes(page[pointer : pointer + 2], "big")
        try:
            found = _event_at(pages, page, offset)
        except IndexError:  # the page ends within the cell
            continue
        if found is not None:
            yield found


def _event_at(pages: _Pages, page: bytes, offset: int) -> tuple[int, bytes] | None:
    """Return the event in a cell (1.6, 2.1): the last column of its record."""
    length, offset = _varint(page, offset)
    seq, offset = _varint(page, offset)
    payload = _payload(pages, page, offset, length)
    if payload is None:
        return None
    header_bytes, at = _varint(payload, 0)
    types: list[int] = []
    while at < header_bytes:
        serial_type, at = _varint(payload, at)
        types.append(serial_type)
    if len(types) < EVENT_COLUMNS or types[EVENT_COLUMNS - 1] < 13 or types[EVENT_COLUMNS - 1] % 2 == 0:
        return None
    end = length - sum(_content_bytes(serial_type) for serial_type in types[EVENT_COLUMNS:])
    line = payload[end - _content_bytes(types[EVENT_COLUMNS - 1]) : end]
    try:
        line.decode()
        place = _PLACE_DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return (seq, line) if place.seq == seq else None


def _payload(pages: _Pages, page: bytes, offset: int, length: int) -> bytes | None:
    """Return a cell's content, with what overflows into other pages (1.6); None where some of it is missing."""
    usable = pages.usable_bytes
    most = usable - 35
    if length <= most:
        content = page[offset : offset + length]
        return content if len(content) == length else None
    least = (usable - 12) * 32 // 255 - 23
    local = least + (length - least) % (usable - 4)
    if local > most:
        local = least
    parts = [page[offset : offset + local]]
    missing = length - local
    following = int.from_bytes(page[offset + local : offset + local + 4], "big")
    while missing > 0:
        overflow = pages.read(following) if following else b""
        part = overflow[4 : 4 + min(missing, usable - 4)]
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
        following = int.from_bytes(overflow[:4], "big")
    content = b"".join(parts)
    return content if len(content) == length else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of one to nine bytes (1.6) and the place behind it."""
    value = 0
    for byte in range(8):
        value = value << 7 | data[at + byte] & 0x7F
        if data[at + byte] < 0x80:
            return value, at + byte + 1
    return value << 8 | data[at + 8], at + 9


def _content_bytes(serial_type: int) -> int:
    """Return how long a value of a serial type is (2.1)."""
    if serial_type >= 12:
        return (serial_type - 12) // 2
    return (0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0)[serial_type]


_PLACE_DECODER: msgspec.json.Decoder[_Place] = msgspec.json.Decoder(_Place)
