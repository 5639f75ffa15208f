"""The Datasette plugin, on the Datasette that is installed: what it says of a log, and that it is silent elsewhere."""

import asyncio
import contextlib
import re
import sqlite3
import time
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

import msgspec
import pytest
from datasette.app import Datasette
from datasette.plugins import pm
from hypothesis import given

from ledger import events as ev
from ledger.browse import pages, plugin, server, tables
from ledger.browse.cells import Links, cell, describe
from ledger.browse.extras import BlockRanges
from ledger.browse.queries import QUERIES
from ledger.browse.timeline import MOST_INTERVALS, Timeline
from ledger.codes import CODES
from ledger.file import schema
from ledger.file.seal import seal
from ledger.replay.fold import Replay
from tests.incidents.script import Script
from tests.support.browsed import FAILED_LOAD, HANGING_JOB, NASTY, PUT_JOB, eventful, eventful_log
from tests.support.log_files import logged
from tests.support.strategies import events

PARAMETERS = {"request_story": "?request=cmpl-2", "block_story": "?group=0&block=10"}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The plugin is registered, also where kvledger is not installed."""
    was = pm.is_registered(plugin)
    if not was:
        pm.register(plugin, name="kvledger")
    yield
    if not was:
        pm.unregister(plugin)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `kvledger browse` serves."""
    return server.make_copy(eventful_log(tmp_path_factory.mktemp("log")), tmp_path_factory.mktemp("copy"))


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An incident file, as it is handed around."""
    folder = tmp_path_factory.mktemp("sealed")
    return seal(eventful_log(folder), folder / "incident.db").target


def ask(datasette: Datasette, *paths: str) -> list[str]:
    """The text of each page; each must be there."""

    async def get() -> list[str]:
        await datasette.invoke_startup()
        texts = []
        for path in paths:
            response = await datasette.client.get(path)
            assert response.status_code == 200, f"{path}: {response.text}"
            texts.append(response.text)
        return texts

    return asyncio.run(get())


def served(copy: Path, *paths: str) -> list[str]:
    """The text of pages of a log, as `kvledger browse` serves them."""
    return ask(server.make_datasette(copy), *(f"/{copy.stem}{path}" for path in paths))


# --- other databases --------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Another program's database that happens to use the words of ours."""
    path = tmp_path / "foreign.db"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE events (seq INTEGER PRIMARY KEY, ts_ns INTEGER, kind TEXT, job INTEGER, code TEXT, data TEXT);"
        "CREATE TABLE meta (key TEXT, value TEXT);"
        "INSERT INTO events VALUES (1, 1780000000000000000, 'job_registered', 7, 'KV_OOM', '{}');"
    )
    connection.close()
    return path


FOREIGN_PAGES = ("/", "/foreign", "/foreign/events", "/foreign/events/1", "/foreign?sql=select+*+from+events")


def stable(page: str) -> str:
    """A page without what differs from one time to the next, and without blanks that show nothing."""
    return re.sub(r"\s+", " ", re.sub(r"Queries took [\d.]+\s*ms|csrftoken.*", "", page))


def test_a_database_of_another_program_is_shown_as_without_the_plugin(foreign: Path):
    with_plugin = ask_all(foreign)
    pm.unregister(plugin)
    try:
        without = ask_all(foreign)
    finally:
        pm.register(plugin, name="kvledger")
    assert with_plugin == without
    assert not any("kv-" in page or "job registered" in page for page in with_plugin)


def ask_all(foreign: Path) -> list[str]:
    datasette = Datasette([str(foreign)])

    async def get() -> list[str]:
        await datasette.invoke_startup()
        return [stable((await datasette.client.get(path, follow_redirects=True)).text) for path in FOREIGN_PAGES]

    return asyncio.run(get())


def test_a_log_beside_another_database_changes_nothing_there(foreign: Path, copy: Path):
    alone = ask_all(foreign)
    datasette = Datasette([str(foreign), str(copy)])
    (page, row) = ask(datasette, "/foreign/events", "/foreign/events/1")
    assert "kv-" not in page
    assert "job_registered" in row
    assert [stable(page), stable(row)] == alone[2:4]


@pytest.mark.parametrize("content", [b"", b"SQLite", b"SQLite format 3\0" + bytes(60), b"x" * 200])
def test_a_file_without_the_mark_is_no_log(tmp_path: Path, content: bytes):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert not plugin.is_log(path)


def test_a_file_that_is_gone_is_no_log(tmp_path: Path):
    assert not plugin.is_log(tmp_path / "gone.db")


def test_a_file_with_the_mark_is_a_log(sealed: Path):
    assert plugin.is_log(sealed)


# --- the pages of a log -----------------------------------------------------------------------------------------------


def test_the_first_page_says_what_the_log_is_and_what_went_wrong(copy: Path):
    (page,) = served(copy, "")
    for text in ("eventful.db", "prefill-7", "vllm 0.32.0", "torn", "What went wrong", "no answer from rank 1"):
        assert text in page


def test_findings_stand_incident_by_incident_with_the_cause_first(copy: Path):
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        rows = connection.execute("SELECT incident, part, kind FROM findings ORDER BY place").fetchall()
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    for _, parts in groupby(rows, key=lambda row: row[0]):
        assert [part for _, part, _ in parts].index("cause") == 0
    assert len({row[2] for row in rows}) > 1


def test_every_stored_query_is_offered_with_what_it_answers(copy: Path):
    (page,) = served(copy, "")
    for query in QUERIES:
        assert f'<a href="/eventful/{query.name}">{query.title}</a>' in page


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_every_stored_query_finds_something(copy: Path, query):
    (page,) = served(copy, f"/{query.name}{PARAMETERS.get(query.name, '')}")
    assert query.title in page
    assert "message-error" not in page
    assert '<table class="rows-and-columns"' in page


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.name)
def test_a_stored_query_reads_the_tables_that_it_says_it_needs(copy: Path, query):
    read = set()

    def watch(action: int, table: str | None, *_: object) -> int:
        if action == sqlite3.SQLITE_READ and table:
            read.add(table)
        return sqlite3.SQLITE_OK

    connection = sqlite3.connect(copy)
    real = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.set_authorizer(watch)
    connection.execute(query.sql, dict.fromkeys(query.parameters, "")).fetchall()
    connection.close()
    assert read & real == query.needs


def test_a_story_without_its_parameter_is_empty(copy: Path):
    for page in served(copy, "/request_story", "/block_story"):
        assert "0 results" in page


def test_a_request_is_found_by_how_its_id_begins(copy: Path):
    (page,) = served(copy, "/request_story.json?request=cmpl-&_shape=array")
    assert {row["request"] for row in decoded(page)} - {None} == {"cmpl-1", "cmpl-2"}


def test_a_request_that_is_the_beginning_of_others_is_itself(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    log = Script()
    log.runs("R")
    log.runs("R2")
    copy = server.make_copy(log.save(tmp_path / "log.db"), tmp_path_factory.mktemp("copy"))
    (page,) = served(copy, "/request_story.json?request=R&_shape=array")
    assert {row["request"] for row in decoded(page)} == {"R"}


def test_the_story_of_a_request_has_the_events_of_its_jobs_and_loads(copy: Path):
    (page,) = served(copy, "/request_story.json?request=cmpl-2&_shape=array")
    rows = decoded(page)
    kinds = {row["kind"] for row in rows}
    assert {"request_preempted", "rank_completed", "blocks_freed", "rank_loaded", "load_settled"} <= kinds
    assert [row["seq"] for row in rows] == sorted(row["seq"] for row in rows)


def test_the_story_of_a_block_ends_where_its_transfers_end(copy: Path):
    (page,) = served(copy, "/block_story.json?group=&block=10&_shape=array")
    assert [row["kind"] for row in decoded(page)] == [
        "pin_touched",
        *["transfer_started", "transfer_finished"] * 2,
        "blocks_freed",
    ]


def test_what_is_open_says_who_has_not_answered(copy: Path):
    (page,) = served(copy, "/open_at_end.json?_shape=array")
    rows = {row["what"]: row for row in decoded(page)}
    assert (rows["store job"]["job"], rows["store job"]["waits_for"]) == (HANGING_JOB, "rank 1")
    assert rows["store job"]["open_ns"] > 40_000_000_000
    assert rows["recv"]["waits_for"] == "tp0 pp0 for rank 0, tp1 pp0 for rank 0"


def test_a_call_that_has_not_returned_is_the_slowest(copy: Path):
    (page,) = served(copy, "/slowest_transfers.json?_shape=array")
    slowest = decoded(page)[0]
    assert (slowest["job"], slowest["rank"], slowest["outcome"]) == (HANGING_JOB, 1, "not returned")


def test_failures_are_counted_by_code_and_rank(copy: Path):
    (page,) = served(copy, "/failures.json?_shape=array")
    assert {(row["code"], row["rank"], row["kind"], row["events"]) for row in decoded(page)} == {
        ("BLOCK_NOT_FOUND", 0, "rank_loaded", 1),
        ("BLOCK_NOT_FOUND", 0, "transfer_finished", 1),
        ("TRANSFER_FAILED", 1, "rank_completed", 1),
    }


def test_an_event_links_to_what_it_names(copy: Path):
    (page,) = served(copy, "/events?kind__exact=transfer_started&job__exact=0")
    assert f'<a href="/eventful/jobs/{PUT_JOB}">' in page
    assert '<a href="/eventful/request_story?request=cmpl-1">' in page
    assert re.search(r'<a href="/eventful/transfers\?transfer__exact=0-\d+">', page)
    assert re.search(r'<a href="/eventful/events\?rank__exact=0"[^>]*>0</a>', page)


def test_a_job_and_a_load_link_to_all_their_events(copy: Path):
    job, load = served(copy, f"/jobs/{PUT_JOB}", f"/loads/{FAILED_LOAD}")
    assert f'<a href="/eventful/events?job__exact={PUT_JOB}">' in job
    assert f'<a href="/eventful/events?load__exact={FAILED_LOAD}">' in load


def test_a_page_says_kinds_in_words_and_keeps_the_name(copy: Path):
    (page,) = served(copy, "/events")
    assert '<span class="kv-short" title="job_registered">job registered</span>' in page


def test_a_code_says_what_it_means(copy: Path):
    (page,) = served(copy, "/failures")
    assert page.count("holds no readable copy of the block") >= 2  # beside the code, and when pointed at


def test_json_has_the_values_as_they_are_stored(copy: Path):
    (page,) = served(copy, "/events.json?_shape=array&kind__exact=log_opened")
    (row,) = decoded(page)
    assert isinstance(row["ts_ns"], int)
    assert row["kind"] == "log_opened"


def test_what_a_client_chose_as_an_id_cannot_become_html(copy: Path):
    paths = ["", "/events", "/requests", "/what_went_wrong", "/open_at_end", f"/jobs/{HANGING_JOB}", "/alarms"]
    for page in served(copy, *paths):
        assert NASTY not in page
        assert "alert('R')</script>" not in page


def test_pages_load_nothing_from_elsewhere(copy: Path):
    for page in served(copy, "", "/events", "/pins_over_time"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="([^"]*)"', page)
        assert loaded
        assert not [address for address in loaded if "//" in address.replace("http://localhost/", "/")]


def test_the_style_is_served_and_what_makes_wide_tables_fit(copy: Path):
    page, style, script = ask(server.make_datasette(copy), f"/{copy.stem}", plugin.STYLE_PATH, plugin.SCRIPT_PATH)
    assert f'href="{plugin.STYLE_PATH}"' in page
    assert f'type="module" src="{plugin.SCRIPT_PATH}"' in page
    assert ".kv-queries" in style
    assert "kv-sideways" in script


# --- a log that kvledger browse did not prepare -----------------------------------------------------------------------


def test_an_incident_file_in_plain_datasette_has_the_queries_that_it_can_answer(sealed: Path):
    page, slowest = ask(Datasette([], immutables=[str(sealed)]), "/incident", "/incident/slowest_transfers")
    assert "slowest_transfers" in page
    assert "open_at_end" not in page
    assert '<table class="rows-and-columns"' in slowest


def test_a_log_that_is_not_sealed_says_so(tmp_path: Path):
    path = eventful_log(tmp_path)
    page, events = ask(Datasette([str(path)]), "/eventful", "/eventful/events?job__exact=0")
    assert "not sealed" in page
    assert "job registered" in events
    assert "/eventful/jobs/" not in events


def test_the_manual_names_every_stored_query():
    manual = (Path(__file__).parents[4] / "docs" / "browse.md").read_text()
    listed = re.findall(r"^\| (.+?) \| `(\w+)", manual, flags=re.MULTILINE)
    assert listed == [(query.title, query.name) for query in QUERIES]


def test_a_log_of_a_newer_kvledger_keeps_no_database_from_being_served(foreign: Path, tmp_path: Path):
    eventful_log(tmp_path)
    path = seal(tmp_path / "eventful.db", tmp_path / "newer.db").target
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE seal RENAME COLUMN source TO origin")
    connection.close()
    with logged() as lines:
        page, newer = ask(Datasette([str(foreign), str(path)]), "/foreign/events", "/newer/events")
    assert "job_registered" in page
    assert "job_registered" in newer
    assert "newer is shown without titles" in lines.wait_for("newer")


# --- values -----------------------------------------------------------------------------------------------------------


class Urls:
    """Addresses without a Datasette."""

    def table(self, database: str, table: str) -> str:
        return f"/{database}/{table}"

    query = table


LINKS = Links(Urls(), "log", frozenset({"events", "jobs"}), frozenset({"request_story"}))


def shown(value: object, column: str, table: str | None = None) -> str:
    """What is shown, as HTML."""
    return str(cell(value, column, table, LINKS))


def test_a_time_is_local_and_keeps_its_nanoseconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        html = shown(1_780_000_000_123_456_789, "since_ts_ns")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert ">2026-05-29 01:56:40.123<" in html
    assert "2026-05-28T20:26:40.123456789Z" in html
    assert "1780000000123456789 ns" in html


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, "text", 1.5, ""])
@pytest.mark.parametrize("column", ["since_ts_ns", "first_seq", *pages.COUNTED, "job", "data", "jobs", "outcome"])
def test_a_value_that_is_not_what_its_column_says_is_shown_all_the_same(value: object, column: str):
    cell(value, column, None, LINKS)


def test_a_duration_has_a_unit_that_fits():
    assert ">12.3 ms<" in shown(12_345_678, "duration_ns")


def test_nothing_links_to_a_table_that_is_not_there():
    assert shown(7, "load") == '<a href="/log/events?load__exact=7">7</a>'
    assert "href" not in str(cell(7, "load", None, Links(Urls(), "log", frozenset(), frozenset())))


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_its_meaning_and_what_to_do(code):
    assert CODES[code].meaning.split("'")[0] in shown(str(code), "code")


@given(events)
def test_every_event_is_described(event: ev.Event):
    assert describe(msgspec.json.encode(event).decode())


def test_an_event_of_a_newer_kvledger_is_shown_as_it_is():
    assert describe('{"kind": "block_sublimated", "seq": 1}') is None
    assert describe("not JSON") is None
    assert cell('{"kind": "block_sublimated"}', "data", None, LINKS) is None


# --- what browsing adds -----------------------------------------------------------------------------------------------


def test_every_table_has_a_title_and_every_column_a_meaning():
    meanings = tables.meanings()
    assert set(meanings) == set(pages.TABLES)
    assert {*schema.log.tables, *schema.sealed.tables, *tables.browsed.tables} == set(meanings)
    assert not [(table, column) for table, columns in meanings.items() for column, text in columns.items() if not text]


def folded(log: Script) -> Timeline:
    """The time line of a log."""
    replay = Replay([Timeline]).feed(log.events)
    return next(each for each in replay.verdicts if isinstance(each, Timeline))


def test_the_time_line_keeps_the_greatest_value_of_a_long_log():
    log = Script()
    log.runs("R")
    for job in range(3 * MOST_INTERVALS):
        log.passes(0.01)
        log.saves(job, "R", blocks=(1, 60 if job == MOST_INTERVALS else 10))
        log.reports(job)
    intervals = folded(log).intervals
    assert MOST_INTERVALS / 2 < len(intervals) <= MOST_INTERVALS
    # An interval that begins while the blocks are pinned has them too.
    assert 1 <= [interval.pinned_blocks for interval in intervals].count(60) <= 2
    assert {interval.pinned_blocks for interval in intervals[5:]} == {10, 60}
    assert all(before.to_ts_ns < after.from_ts_ns for before, after in pairwise(intervals))


def test_the_time_line_counts_preemptions_and_failures_once():
    intervals = folded(eventful()).intervals
    assert sum(interval.preemptions for interval in intervals) == 1
    assert sum(interval.failures for interval in intervals) == 2


def test_a_block_that_was_pinned_all_through_an_idle_hour_counts_when_it_is_freed():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(1, 10))
    log.passes(3600)
    log.reports(0)
    assert folded(log).intervals[-1].pinned_blocks == 10


def test_blocks_of_one_event_are_listed_once_and_in_both_directions():
    event = ev.PinTouched(1, 1, 1, "scheduler", 1, job=0, blocks=((0, ((9, 5), (9, 5))), (1, ((3, 3),))))
    assert list(BlockRanges().rows([event])) == [(0, 5, 9, 1), (1, 3, 3, 1)]


def decoded(text: str) -> list[dict]:
    """Rows of a JSON page."""
    return msgspec.json.decode(text)
