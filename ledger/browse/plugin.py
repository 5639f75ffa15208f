"""The Datasette plugin: one module for Datasette 0.65 and for the alphas of 1.0.

What differs between the two:

    stored queries      0.65 asks for them at each page (`canned_queries`); 1.0 is told once (`add_query`)
    titles, meanings    0.65 asks (`get_metadata`); 1.0 is told once (`set_..._metadata`)

Every Datasette of an environment in which kvledger is installed loads this plugin. At its start it looks at the header
of each database file, 72 bytes, and does nothing for those that are not kvledger logs. Logs that are attached later are
shown as any other database.

This file knows Datasette's hooks; what is shown is said in the other files of this folder.
"""

import copy
import logging
import re
import sqlite3
import weakref
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from datasette import hookimpl
from datasette.utils import to_css_class  # pyright: ignore[reportUnknownVariableType] - Datasette leaves it untyped
from datasette.utils.asgi import Response
from jinja2 import BaseLoader, ChoiceLoader, Environment, TemplateNotFound
from markupsafe import Markup

from ledger.browse import pages
from ledger.browse.cells import Links, cell
from ledger.browse.queries import QUERIES, Query
from ledger.file.explain import explain
from ledger.file.sqlite import is_log

logger = logging.getLogger("kvledger")

STYLE_PATH = "/-/kvledger.css"
SCRIPT_PATH = "/-/kvledger.js"


class BrowsedLog(msgspec.Struct, frozen=True):
    """A database of this Datasette that is a kvledger log."""

    tables: frozenset[str]
    queries: tuple[Query, ...]
    metadata: dict[str, Any]

    def links(self, datasette: Any, database: str) -> Links:
        """Return the addresses within it. Nothing of Datasette may be kept here, or none would ever be let go."""
        return Links(datasette.urls, database, self.tables, frozenset(query.name for query in self.queries))


_logs: weakref.WeakKeyDictionary[Any, dict[str, BrowsedLog]] = weakref.WeakKeyDictionary()
"""By Datasette, and by the name of the database."""


def _log(datasette: Any, database: str | None) -> BrowsedLog | None:
    return _logs.get(datasette, {}).get(database or "")


# --- when Datasette starts --------------------------------------------------------------------------------------------


@hookimpl
def startup(datasette: Any) -> Callable[[], Awaitable[None]]:
    """Look which databases are logs, and learn what their pages say."""

    async def look() -> None:
        found = [
            name for name, database in datasette.databases.items() if database.path and is_log(Path(database.path))
        ]
        for name in found:
            try:
                log = await _read(datasette, name)
            except (sqlite3.Error, msgspec.DecodeError) as error:
                # It may be damaged, or of a newer kvledger. The other databases are to be served all the same.
                logger.warning("kvledger: %s is shown without titles and links: %s.", name, explain(error))
                continue
            _logs.setdefault(datasette, {})[name] = log
            if hasattr(datasette, "add_query"):
                await _tell(datasette, name, log)

    return look


async def _read(datasette: Any, name: str) -> BrowsedLog:
    tables, facts = await datasette.get_database(name).execute_fn(_facts)
    log = BrowsedLog(tables, tuple(query for query in QUERIES if query.needs <= tables), {})
    return msgspec.structs.replace(log, metadata=_metadata(log, facts, log.links(datasette, name)))


def _facts(connection: sqlite3.Connection) -> tuple[frozenset[str], pages.LogFacts]:
    """Return the names of the tables, and what is known of the log."""

    def rows(sql: str) -> list[Any]:
        return [tuple(row) for row in connection.execute(sql)]

    tables = frozenset(name for (name,) in rows("SELECT name FROM sqlite_master WHERE type = 'table'"))
    if not {"events", "meta"} <= tables:
        return tables, pages.LogFacts({}, {}, 0, 0, 0, "", "")
    first = rows("SELECT ts_ns, data FROM events ORDER BY seq LIMIT 1")
    last = rows("SELECT seq, ts_ns FROM events ORDER BY seq DESC LIMIT 1")
    seal = rows('SELECT source, "end" FROM seal') if "seal" in tables else []
    opened: dict[str, Any] = msgspec.json.decode(first[0][1]) if first else {}
    return tables, pages.LogFacts(
        meta=dict(rows("SELECT key, value FROM meta")),
        opened=opened if opened.get("kind") == "log_opened" else {},
        events=last[0][0] if last else 0,
        first_ts_ns=first[0][0] if first else 0,
        last_ts_ns=last[0][1] if last else 0,
        source=seal[0][0] if seal else "",
        end=seal[0][1] if seal else "",
        findings=tuple(title for (title,) in rows("SELECT title FROM findings WHERE part = 'cause' ORDER BY place"))
        if "findings" in tables
        else None,
    )


def _metadata(log: BrowsedLog, facts: pages.LogFacts, links: Links) -> dict[str, Any]:
    """Return what Datasette calls the metadata of a database."""
    from ledger.browse.tables import meanings  # noqa: PLC0415 - SQLAlchemy takes 0.3 s, and is needed for logs alone

    columns = meanings()
    return {
        "title": pages.title(facts),
        "description_html": str(pages.log_page(facts, log.queries, links)),
        "tables": {
            table: {
                "title": pages.TABLES[table][0],
                "description_html": str(pages.table_page(table, links)),
                "columns": columns.get(table, {}),
            }
            for table in sorted(log.tables & pages.TABLES.keys())
        },
    }


async def _tell(datasette: Any, name: str, log: BrowsedLog) -> None:
    """Tell a Datasette that does not ask. What its own configuration says already, stands."""
    for query in log.queries:
        await datasette.add_query(
            name,
            query.name,
            query.sql.strip(),
            title=query.title,
            description=query.description,
            hide_sql=True,
            parameters=query.parameters,
            is_trusted=True,
            source="kvledger",
        )
    said = await datasette.get_database_metadata(name)
    for key in ("title", "description_html"):
        if key not in said:
            await datasette.set_database_metadata(name, key, log.metadata[key])
    for table, entry in log.metadata["tables"].items():
        said = await datasette.get_resource_metadata(name, table)
        for key in ("title", "description_html"):
            if key not in said:
                await datasette.set_resource_metadata(name, table, key, entry[key])
        for column, meaning in entry["columns"].items():
            if not await datasette.get_column_metadata(name, table, column):
                await datasette.set_column_metadata(name, table, column, "description", meaning)


# --- what Datasette 0.65 asks for -------------------------------------------------------------------------------------


@hookimpl(optionalhook=True)
def get_metadata(datasette: Any, key: str | None, database: str | None, table: str | None) -> dict[str, Any]:
    """Return titles and meanings."""
    # A copy, because Datasette merges other metadata into what it gets.
    logs = {name: copy.deepcopy(log.metadata) for name, log in _logs.get(datasette, {}).items()}
    return {"databases": logs} if logs else {}


@hookimpl(optionalhook=True)
def canned_queries(datasette: Any, database: str, actor: Any) -> dict[str, dict[str, Any]]:
    """Return the stored queries of a log."""
    log = _log(datasette, database)
    return {
        query.name: {
            "sql": query.sql.strip(),
            "title": query.title,
            "description": query.description,
            "hide_sql": True,
            "params": list(query.parameters),
        }
        for query in (log.queries if log is not None else ())
    }


# --- pages ------------------------------------------------------------------------------------------------------------


@hookimpl
def render_cell(value: Any, column: str, table: str | None, database: str, datasette: Any) -> Markup | None:
    """Return what is shown for a value of a log."""
    log = _log(datasette, database)
    return cell(value, column, table, log.links(datasette, database)) if log is not None else None


@hookimpl
def prepare_jinja2_environment(env: Any, datasette: Any) -> None:
    """Give the query pages of a log a title; Datasette's own is the SQL of the query."""
    env.loader = ChoiceLoader([env.loader, _QueryTitles(datasette)])


class _QueryTitles(BaseLoader):
    """Has the template of query pages that Datasette asks for by the name of a database: for logs, and for no other."""

    def __init__(self, datasette: Any) -> None:
        self._datasette = datasette

    def get_source(self, environment: Environment, template: str) -> tuple[str, None, None]:
        """Return the template.

        Raises:
            TemplateNotFound: it is not of a log.
        """
        if any(template == f"query-{to_css_class(database)}.html" for database in _logs.get(self._datasette, {})):
            return _QUERY_TEMPLATE, None, None
        raise TemplateNotFound(template)

    def list_templates(self) -> list[str]:
        """Return none: Datasette looks through them for pages."""
        return []


_QUERY_TEMPLATE = (
    '{% extends "query.html" %}{% block title %}{{ metadata.title or "Query" }} - {{ database }}{% endblock %}'
)


@hookimpl
def extra_css_urls(database: str | None, datasette: Any) -> list[str]:
    """Return the style of a log's pages."""
    return [STYLE_PATH] if _log(datasette, database) is not None else []


@hookimpl
def extra_js_urls(database: str | None, datasette: Any) -> list[dict[str, Any]]:
    """Return what makes wide tables fit. A module, because those run when the page is there."""
    return [{"url": SCRIPT_PATH, "module": True}] if _log(datasette, database) is not None else []


@hookimpl
def register_routes() -> list[tuple[str, Callable[[], Awaitable[Response]]]]:
    """Serve both."""

    async def style() -> Response:
        return Response(_file(STYLE_PATH), content_type="text/css")

    async def script() -> Response:
        return Response(_file(SCRIPT_PATH), content_type="text/javascript")

    return [(f"^{re.escape(path)}$", serve) for path, serve in ((STYLE_PATH, style), (SCRIPT_PATH, script))]


def _file(path: str) -> str:
    return files("ledger.browse").joinpath(path.rpartition("/")[2]).read_text("utf-8")
