"""Makes a whole log of what can be read of a damaged one: a `gap` stands in the place of each event that is lost.

Where `ledger.file.salvage` finds events in the pages of a file, this puts them back into the order of a log. It knows
the reader and SQL.
"""

import sqlite3
from pathlib import Path

import msgspec

from ledger import events as ev
from ledger.errors import FileCorrupt
from ledger.file import salvage
from ledger.file.read import LogFile


def rebuild(log: LogFile, path: Path) -> int:
    """Make a log of the events that can be read of a damaged one, with gaps. Return how many are lost."""
    from ledger.file import migrate  # noqa: PLC0415 - it takes 0.4 s

    migrate.create(path)
    connection = sqlite3.connect(path, isolation_level=None)
    lost = 0
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", log.meta.items())
        place = 1
        for page in log.pages():
            lines: list[str] = []
            for (seq, data), event in zip(page.rows, page.events, strict=True):
                if event.seq != seq or seq < place:
                    continue  # it says that it is another event: nothing in it can be believed
                lines.extend(_gap_at(missing, event) for missing in range(place, seq))
                lost += seq - place
                lines.append(data.decode())
                place = seq + 1
            salvage.append(connection, lines)
        connection.execute("COMMIT")
    finally:
        connection.close()
    if place == 1:
        raise FileCorrupt(f"{log.path}: no event can be read; there is nothing to salvage.")
    return lost


def _gap_at(seq: int, following: ev.AnyEvent) -> str:
    """Return the line of a gap in the place of an event that is lost, stamped as the next one that is there."""
    gap = ev.Gap(
        seq,
        following.ts_ns,
        following.mono_ns,
        "scheduler",
        following.step,
        origin=ev.WHOLE_FILE,
        dropped=1,
        reason="it was damaged there, and was salvaged",
    )
    return msgspec.json.encode(gap).decode()
