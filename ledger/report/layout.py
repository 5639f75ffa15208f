"""How lines of text are laid out: plain words, no colour and no drawn lines, as wide as the reader has room.

From 60 columns on, labels and events stand in columns. Below that each label ends in a colon and goes on in its line,
and an event's text stands below its place, which also reads well aloud. The first use of an error's code is explained.
This file knows words and codes.
"""

import re
import textwrap
from collections.abc import Iterator

from ledger import codes, words
from ledger import events as ev

WIDTH = 80

NARROW = 60
"""Below this width there is no room for columns."""

EVENT_LEAD = 24
"""Width of the place and the time in front of an event's line."""

LABEL = 14
"""Width of the column of labels, e.g. `  Versions    `."""

_MEANINGS = {str(row.code): row.short for row in codes.CODES.values()}
_RAW = re.compile(r"raw (-\d+)\b(?! [A-Z_]{4})")
_CODE = re.compile(rf"\b({'|'.join(_MEANINGS)})\b(?: \((raw [^)]*)\))?")


class Page:
    """A page of text in the making.

    Args:
        width: columns that the reader has. A word that is longer, e.g. a path, is not broken.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self.width = width
        self._explained: set[str] = set()

    @property
    def is_narrow(self) -> bool:
        """Whether there is no room for columns."""
        return self.width < NARROW

    def row(self, label: str, value: str) -> Iterator[str]:
        """Yield a label with its value."""
        if self.is_narrow:
            yield from self.wrap("  ", f"{label}: {value}", hanging=4)
        else:
            yield from self.wrap(f"  {label:<{LABEL - 2}}", value)

    def event(self, lead: str, event: ev.Event, note: str = "") -> Iterator[str]:
        """Yield an event: its place, its time, who said it and what happened, with a note behind it."""
        line = f"{ev.line(event)}{note}"
        if self.is_narrow:
            place, _, rest = line.strip().partition("  ")
            time, _, said = rest.partition("  ")
            yield from self.wrap(f"{lead}event {place}, {time}", "")
            yield from self.wrap("    ", said)
        else:
            yield from self.wrap(lead, line, hanging=len(lead) + EVENT_LEAD)

    def wrap(self, lead: str, value: str, hanging: int | None = None) -> Iterator[str]:
        """Yield `value` behind `lead`, its further lines indented as far as the lead goes, or as `hanging` says."""
        yield from textwrap.wrap(
            self.explain(words.shown(value)),  # before white space is taken for the end of a word
            max(self.width, len(lead) + 10),
            initial_indent=lead,
            subsequent_indent=" " * (len(lead) if hanging is None else hanging),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [lead.rstrip()]

    def explain(self, value: str) -> str:
        """Return `value` with the meaning of each code, and the store's own name of it, beside its first use."""
        return _CODE.sub(self._explain, _RAW.sub(self._name, value))

    def _name(self, match: re.Match[str]) -> str:
        raw = match[1]
        name = codes.raw_name(raw)
        if not name or raw in self._explained:
            return match[0]
        self._explained.add(raw)
        return f"raw {raw} {name}"

    def _explain(self, match: re.Match[str]) -> str:
        code, raw = match[1], match[2]
        if code in self._explained:
            return match[0]
        self._explained.add(code)
        return f"{code} ({_MEANINGS[code]}{f'; {raw}' if raw else ''})"
