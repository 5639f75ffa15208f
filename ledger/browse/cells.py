"""Values as a person reads them: words for kinds, times, durations, sizes, what a code means, and links.

The name of a column says what its values are, in a table and in a query alike. Only what is shown changes: JSON and CSV
have the values as they are stored. Everything that a log holds is escaped: request ids come from clients.

This file knows events, codes and words, and makes HTML. It knows Datasette only as the maker of addresses.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec
from markupsafe import Markup

from ledger import events as ev
from ledger import words
from ledger.codes import CODES, KVCacheErrorCode

SHOWN_ITEMS = 6
"""Items of a list that are shown; a finding may name hundreds of requests."""

SHOWN_CHARACTERS = 16
"""Of a request's id, whose beginning distinguishes it from others; the whole id is in the tooltip and the address."""

SHOWN_JSON_CHARACTERS = 2_048
"""Of an event's JSON: as much as Datasette itself shows of a cell."""


class Urls(Protocol):
    """What is used of `datasette.urls`."""

    def table(self, database: str, table: str) -> str:
        """Return the address of a table."""
        ...

    def query(self, database: str, query: str) -> str:
        """Return the address of a stored query."""
        ...


class Links:
    """The addresses within one database.

    Args:
        tables: the tables that it has. There is no link to one that it has not.
        queries: the names of its stored queries.
    """

    def __init__(self, urls: Urls, database: str, tables: frozenset[str], queries: frozenset[str]) -> None:
        self._urls = urls
        self._database = database
        self._tables = tables
        self._queries = queries

    def row(self, table: str, key: int) -> str:
        """Return the address of a row; empty if there is no such table."""
        return f"{self._urls.table(self._database, table)}/{key}" if table in self._tables else ""

    def rows(self, table: str, **equal: object) -> str:
        """Return the address of the rows in which columns equal values; empty if there is no such table."""
        if table not in self._tables:
            return ""
        filters = urlencode({f"{column}__exact": value for column, value in equal.items()})
        return f"{self._urls.table(self._database, table)}?{filters}"

    def query(self, name: str, **parameters: object) -> str:
        """Return the address of a stored query; empty if there is no such query."""
        if name not in self._queries:
            return ""
        values = f"?{urlencode(parameters)}" if parameters else ""
        return f"{self._urls.query(self._database, name)}{values}"


def cell(value: Any, column: str, table: str | None, links: Links) -> Markup | None:
    """Return what is shown for a value, or None if Datasette's own way will do.

    Args:
        table: the table, None in a query.
    """
    if value is None or isinstance(value, bytes):
        return None
    show = _SHOW.get(column)
    if show is None:
        if column.endswith("_ts_ns"):
            show = _time
        elif column.endswith("_seq"):
            show = _event
        else:
            return None
    return show(value, table, links)


def _link(text: object, address: str, title: str = "") -> Markup:
    if not address:
        return Markup('<span title="{}">{}</span>').format(title, text) if title else Markup("{}").format(text)
    if title:
        return Markup('<a href="{}" title="{}">{}</a>').format(address, title, text)
    return Markup('<a href="{}">{}</a>').format(address, text)


def _titled(text: str, title: object) -> Markup:
    return Markup('<span class="kv-short" title="{}">{}</span>').format(title, text)


# --- times, durations, sizes ------------------------------------------------------------------------------------------


def _time(value: Any, table: str | None, links: Links) -> Markup | None:
    """A wall-clock time: local, to be compared with other logs of this place; UTC and the raw value on asking."""
    if not isinstance(value, int):
        return None
    try:
        utc = datetime.fromtimestamp(value // 1_000_000_000, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    local = utc.astimezone()
    fraction = f"{value % 1_000_000_000:09d}"
    exact = f"{utc:%Y-%m-%dT%H:%M:%S}.{fraction}Z"
    shown = f"{local:%Y-%m-%d %H:%M:%S}.{fraction[:3]}"
    return Markup('<time datetime="{0}" title="{0}&#10;{1} ns" data-ns="{1}">{2}</time>').format(exact, value, shown)


def zone() -> str:
    """Return the zone of the times that are shown, e.g. `CET, UTC+01:00`; `UTC` for UTC."""
    now = datetime.now().astimezone()
    offset = f"{now:%z}"
    name = now.tzname() or ""
    return "UTC" if offset == "+0000" else f"{name}, UTC{offset[:3]}:{offset[3:]}"


def _duration(value: Any, table: str | None, links: Links) -> Markup | None:
    return _titled(words.span(value), f"{value} ns") if isinstance(value, int) else None


def _size(value: Any, table: str | None, links: Links) -> Markup | None:
    return _titled(words.size(value), f"{value} bytes") if isinstance(value, int) else None


def _rate(value: Any, table: str | None, links: Links) -> Markup | None:
    return _titled(f"{words.size(value)}/s", f"{value} bytes/s") if isinstance(value, int) else None


def _percent(value: Any, table: str | None, links: Links) -> Markup | None:
    if not isinstance(value, int | float):
        return None
    bar = '<span class="kv-short"><meter class="kv-meter" min="0" max="100" value="{}"></meter> {}</span>'
    return Markup(bar).format(f"{value:.1f}", f"{value:.0f} %")


# --- what a name stands for -------------------------------------------------------------------------------------------


def _request(value: Any, table: str | None, links: Links) -> Markup | None:
    if not isinstance(value, str) or not value:
        return None
    shown = value if len(value) <= SHOWN_CHARACTERS else f"{value[: SHOWN_CHARACTERS - 1]}…"
    address = links.query("request_story", request=value) or links.rows("events", request=value)
    return _link(shown, address, "" if shown == value else value)


def _numbered(table_of: str, column: str) -> "Show":
    """A job or a load: its row, and from its row all its events."""

    def show(value: Any, table: str | None, links: Links) -> Markup | None:
        if not isinstance(value, int):
            return None
        if table == table_of:
            return _link(f"{value} (all its events)", links.rows("events", **{column: value}))
        return _link(value, links.row(table_of, value) or links.rows("events", **{column: value}))

    return show


def _transfer(value: Any, table: str | None, links: Links) -> Markup | None:
    if not isinstance(value, str) or not value:
        return None
    # A call to the store has a row; a P/D transfer has calls, and events of its own besides.
    is_call = _STORE_CALL.fullmatch(value) and table != "transfers"
    address = (links.rows("transfers", transfer=value) if is_call else "") or links.rows("events", transfer=value)
    shown = value if len(value) <= SHOWN_CHARACTERS else f"{value[: SHOWN_CHARACTERS - 1]}…"
    return _link(shown, address, "" if shown == value else value)


_STORE_CALL = re.compile(r"\d+-\d+")


def _rank(value: Any, table: str | None, links: Links) -> Markup | None:
    if not isinstance(value, int):
        return None
    return _link(value, links.rows("events", rank=value), f"what concerns rank {value}")


def _source(value: Any, table: str | None, links: Links) -> Markup | None:
    if table == "seal":  # there it is the name of a file
        return None
    return _link(value, links.rows("events", source=value), f"what {value} recorded")


def _event(value: Any, table: str | None, links: Links) -> Markup | None:
    return _link(value, links.row("events", value)) if isinstance(value, int) else None


def _kind(value: Any, table: str | None, links: Links) -> Markup | None:
    return _titled(value.replace("_", " "), value) if isinstance(value, str) else None


def _code(value: Any, table: str | None, links: Links) -> Markup | None:
    row = _row_of(value)
    title = f"{row.meaning}\n{row.action}" if row is not None else ""
    shown = Markup("_<wbr>").join(str(value).split("_"))  # it may be broken at a _ and nowhere else
    return _link(shown, links.rows("events", code=value), title)


def _meaning(value: Any, table: str | None, links: Links) -> Markup | None:
    row = _row_of(value)
    if row is None:
        return None
    again = "may succeed when tried again" if row.retryable else "does not succeed when only tried again"
    return Markup('<div class="kv-text">{} ({})<br>{}</div>').format(row.meaning, again, row.action)


def _row_of(value: Any) -> Any:
    try:
        return CODES[KVCacheErrorCode(value)]
    except ValueError:
        return None


def _outcome(value: Any, table: str | None, links: Links) -> Markup | None:
    if not isinstance(value, str):
        return None
    return Markup('<span class="{}">{}</span>').format("kv-bad" if _BAD.search(value) else "kv-good", value)


_BAD = re.compile("fail|raised|partial|not returned|aborted|expired|quarantined")


# --- lists, events, text ----------------------------------------------------------------------------------------------


def _listed(show: "Show") -> "Show":
    """A JSON array, each item as `show` shows it."""

    def show_all(value: Any, table: str | None, links: Links) -> Markup | None:
        if not isinstance(value, str):
            return None
        try:
            items = msgspec.json.decode(value, type=list[int | str])
        except msgspec.DecodeError:
            return None
        shown = [show(item, None, links) or Markup("{}").format(item) for item in items[:SHOWN_ITEMS]]
        more = f" and {len(items) - SHOWN_ITEMS:,} more" if len(items) > SHOWN_ITEMS else ""
        return Markup(", ").join(shown) + more

    return show_all


def _data(value: Any, table: str | None, links: Links) -> Markup | None:
    """An event: one sentence, and its JSON behind it."""
    if not isinstance(value, str):
        return None
    sentence = describe(value)
    if sentence is None:
        return None
    pretty = msgspec.json.format(value, indent=2)
    if len(pretty) > SHOWN_JSON_CHARACTERS:
        pretty = f"{pretty[:SHOWN_JSON_CHARACTERS]}\n… the rest is in this page's JSON"
    return Markup('<details class="kv-event"><summary>{}</summary><pre>{}</pre></details>').format(sentence, pretty)


def describe(data: str) -> str | None:
    """Return what an event says in an operator's words, or None if this kvledger does not know it."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        event = ev.decode(ev.lift(fields))
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return event.sentence()


def _text(value: Any, table: str | None, links: Links) -> Markup | None:
    return Markup('<div class="kv-text">{}</div>').format(value) if isinstance(value, str) else None


Show = Callable[[Any, "str | None", Links], "Markup | None"]

_SHOW: dict[str, Show] = {
    "ts_ns": _time,
    "duration_ns": _duration,
    "open_ns": _duration,
    "bytes": _size,
    "bytes_per_s": _rate,
    "pinned_percent": _percent,
    "request": _request,
    "job": _numbered("jobs", "job"),
    "load": _numbered("loads", "load"),
    "transfer": _transfer,
    "rank": _rank,
    "source": _source,
    "seq": _event,
    "kind": _kind,
    "code": _code,
    "meaning": _meaning,
    "outcome": _outcome,
    "end": _outcome,
    "state": _outcome,
    "requests": _listed(_request),
    "jobs": _listed(_numbered("jobs", "job")),
    "evidence": _listed(_event),
    "data": _data,
    "title": _text,
    "culprit": _text,
    "advice": _text,
    "reason": _text,
}
"""How the values of a column are shown, by its name. Names that end in `_ts_ns` and `_seq` are times and events."""
