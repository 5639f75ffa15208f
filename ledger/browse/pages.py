"""Titles and descriptions: what a page is about, and where to go from it.

This file knows the words of the tables and makes HTML; it reads nothing.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from markupsafe import Markup

from ledger import words
from ledger.browse.cells import Links, zone
from ledger.browse.queries import Query

TABLES: dict[str, tuple[str, str]] = {
    "events": ("Events", "Every event, in order. Open a sentence to see the whole event."),
    "requests": ("Requests", "One row for each life of a request: a preempted request comes back as a new generation."),
    "jobs": ("Store jobs", "One row for each store job. On its own page, its number leads to all its events."),
    "loads": (
        "Loads",
        "One row for each load from the store. On a load's own page, its number leads to all its events.",
    ),
    "transfers": ("Transfers", "One row for each call to the store or to a peer."),
    "findings": ("Findings", "What went wrong, incident by incident, earliest cause first."),
    "open_work": ("Open work", "What had not ended at the end of the log."),
    "timeline": ("Time line", "How much was open and pinned at the most, in each of a few hundred intervals."),
    "block_ranges": ("Block ranges", "Which events concern which blocks."),
    "meta": ("Who wrote the log", "Written once, when the log was made."),
    "seal": ("The seal", "How the log was sealed. kvledger verify checks a file against it."),
    "chain": ("Hash chain", "One link for each event, so that a changed event can be named."),
}
"""The title of each table, and what it is, in one sentence or two."""

HIDDEN = ("alembic_version", "block_ranges", "chain")
"""Tables that serve programs."""

COUNTED = ("kind", "source", "rank", "code")
"""Columns of `events` by which a person counts first."""


class LogFacts(msgspec.Struct, frozen=True):
    """What is known of a log when its pages are made.

    Attributes:
        meta: the table `meta`.
        opened: the fields of `log_opened`; empty if the log has none.
        events: how many there are.
        first_ts_ns, last_ts_ns: wall clock of the first and the last event, 0 for an empty log.
        source: the name of the file that was sealed; empty for a log that is not sealed.
        end: how the log ended, as in the table `seal`; empty for a log that is not sealed.
        findings: what went wrong, in one sentence for each incident; None if nobody looked.
    """

    meta: Mapping[str, str]
    opened: Mapping[str, Any]
    events: int
    first_ts_ns: int
    last_ts_ns: int
    source: str
    end: str
    findings: tuple[str, ...] | None = None


def title(facts: LogFacts) -> str:
    """Return the title of a log's page."""
    return f"kvledger: {facts.source or facts.meta.get('engine', 'a log')}"


def log_page(facts: LogFacts, queries: tuple[Query, ...], links: Links) -> Markup:
    """Return what stands at the top of a log's page: the log, what went wrong, and what can be asked."""
    parts = [Markup('<div class="kv-log">'), _facts(facts), _findings(facts, links)]
    if queries:
        parts += [Markup("<h2>Ask</h2><dl class=kv-queries>")]
        parts += [
            Markup('<dt><a href="{}">{}</a></dt><dd>{}</dd>').format(
                links.query(each.name), each.title, each.description
            )
            for each in queries
        ]
        parts += [Markup("</dl>")]
    if not facts.source:
        parts += [
            Markup(
                "<p>This log is not sealed: it has no indexes and no summary tables. "
                "<code>kvledger browse FILE</code> shows more, and disturbs no engine.</p>"
            )
        ]
    return Markup().join([*parts, Markup("</div>")])


def _facts(facts: LogFacts) -> Markup:
    rows = [
        ("Engine", facts.opened.get("engine") or facts.meta.get("engine", "")),
        ("Boot", facts.opened.get("boot") or facts.meta.get("boot", "")),
    ]
    versions: dict[str, str] = facts.opened.get("versions") or {}
    rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    rows.append(("Events", _span(facts)))
    rows.append(("End", _ENDS.get(facts.end, "")))
    rows.append(("Times", f"{_zones()}; point at one for its nanoseconds"))
    shown = [Markup("<dt>{}</dt><dd>{}</dd>").format(name, value) for name, value in rows if value]
    return Markup('<dl class="kv-facts">{}</dl>').format(Markup().join(shown))


def _zones() -> str:
    local = zone()
    return local if local == "UTC" else f"in {local}; within sentences in UTC"


_ENDS = {
    "closed": "closed: the engine ended the log",
    "torn": "torn: no log_closed; the process ended hard, its disk took nothing more, or the copy lacks the end",
    "live": "open: the engine was still writing when this copy was made",
}


def _span(facts: LogFacts) -> str:
    number = words.plural(facts.events, "event")
    if not facts.first_ts_ns:
        return number
    length = words.span(facts.last_ts_ns - facts.first_ts_ns)
    return f"{number} in {length}, from {words.timestamp(facts.first_ts_ns)} to {words.timestamp(facts.last_ts_ns)}"


def _findings(facts: LogFacts, links: Links) -> Markup:
    if facts.findings is None:
        return Markup()
    if not facts.findings:
        return Markup("<p>Nothing wrong was found.</p>")
    items = [Markup("<li>{}</li>").format(sentence) for sentence in facts.findings[:SHOWN_FINDINGS]]
    more = len(facts.findings) - SHOWN_FINDINGS
    if more > 0:
        items.append(Markup("<li>and {} more</li>").format(more))
    return Markup('<h2><a href="{}">What went wrong</a></h2><ol class="kv-findings">{}</ol>').format(
        links.query("what_went_wrong"), Markup().join(items)
    )


SHOWN_FINDINGS = 5
"""Incidents on the first page; the query has all, with what came of each."""


def table_page(table: str, links: Links) -> Markup:
    """Return what stands at the top of a table's page."""
    sentence = Markup("{}").format(TABLES[table][1])
    if table != "events":
        return sentence
    address = links.rows("events").rstrip("?")
    counts = [Markup('<a href="{}?_facet={}">{}</a>').format(address, column, column) for column in COUNTED]
    return sentence + Markup(" Count by {}.").format(Markup(", ").join(counts))
