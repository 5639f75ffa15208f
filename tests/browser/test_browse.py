"""The pages of a log in a real browser, under Datasette 0.65 and an alpha of 1.0.

That a browser finds fault with nothing and asks nobody else for anything, is checked at the end of each test.
"""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Dialog, Page, expect

from ledger.browse.queries import QUERIES
from tests.browser.conftest import ALPHA, WIDTH, Served
from tests.support.browsed import HANGING_JOB, NASTY

ROWS = "table.rows-and-columns tbody tr"


def test_both_datasettes_are_what_they_should_be(page: Page, served: Served, request: pytest.FixtureRequest):
    page.goto(served.address.rpartition("/")[0] + "/-/versions.json")
    version = page.evaluate("JSON.parse(document.body.innerText).datasette.version")
    assert version == ALPHA if "alpha" in request.node.name else version.startswith("0.65")


def test_the_first_page_says_what_went_wrong_and_what_can_be_asked(page: Page, served: Served):
    page.goto(served.address)
    expect(page.locator("h1")).to_have_text("kvledger: eventful.db")
    expect(page.locator(".kv-findings li", has_text="no answer of rank 1")).to_have_count(1)
    expect(page.locator(".kv-queries dt a")).to_have_text([query.title for query in QUERIES])
    expect(page.locator("h2#queries")).to_be_hidden()


def test_an_event_leads_to_its_job_and_the_job_to_all_its_events(page: Page, served: Served):
    page.goto(f"{served.address}/events?kind__exact=job_registered")
    page.locator(ROWS).last.locator("td.col-job a").click()
    expect(page.locator("h1")).to_have_text(f"jobs: {HANGING_JOB}")
    page.get_by_role("link", name=f"{HANGING_JOB} (all its events)").click()
    expect(page.locator("td.col-kind")).to_have_text(
        [
            "job registered",
            "pin touched",
            "transfer started",
            "transfer finished",
            "rank completed",
            "transfer started",
            "stall suspected",
        ]
    )


def test_an_event_leads_to_its_request_load_transfer_and_rank(page: Page, served: Served):
    for column, title in (
        ("request", "The story of one request"),
        ("load", "loads: 1"),
        ("transfer", "Transfers"),
        ("rank", "Events"),
    ):
        page.goto(f"{served.address}/events?kind__exact=transfer_started&load__exact=1")
        page.locator(ROWS).first.locator(f"td.col-{column} a").click()
        expect(page.locator("h1")).to_have_text(title)
        assert page.locator(ROWS).count()


def test_each_stored_query_has_a_title_and_gives_rows(page: Page, served: Served):
    page.goto(served.address)
    links = page.locator(".kv-queries dt a")
    for place, query in enumerate(QUERIES):
        links.nth(place).click()
        expect(page).to_have_title(f"{query.title} - eventful")
        if query.parameters:
            for name in query.parameters:
                page.get_by_label(name).fill({"request": "cmpl-2", "group": "", "block": "10"}[name])
            page.get_by_role("button", name="Run SQL").click()
        expect(page.locator("h1")).to_have_text(query.title)
        expect(page.locator(".message-error")).to_have_count(0)
        assert page.locator(ROWS).count() > 0, query.name
        page.goto(served.address)


def test_a_sentence_opens_into_the_whole_event(page: Page, served: Served):
    page.goto(f"{served.address}/events")
    event = page.locator(ROWS).nth(4).locator("details")
    expect(event.locator("pre")).to_be_hidden()
    event.locator("summary").click()
    expect(event.locator("pre")).to_contain_text('"kind": "pin_touched"')


def test_a_hostile_request_id_is_only_text(page: Page, served: Served):
    dialogs: list[str] = []

    def dismiss(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dismiss)
    for path in ("", "/events", "/requests", "/what_went_wrong", "/open_at_end"):
        page.goto(f"{served.address}{path}")
    page.get_by_role("link", name=re.compile("<script>")).first.click()
    expect(page.get_by_label("request")).to_have_value(NASTY)
    assert page.locator(ROWS).count()
    assert dialogs == []


@pytest.mark.parametrize("path", ["", "/events", "/what_went_wrong", "/open_at_end", "/pins_over_time", "/jobs/2"])
def test_a_page_fits_on_a_screen(page: Page, served: Served, tmp_path: Path, path: str):
    page.goto(f"{served.address}{path}")
    picture = page.screenshot(path=tmp_path / "page.png")  # stays with a failed test's other files
    assert len(picture) > 10_000
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH
    for table in page.locator(".table-wrapper").all():
        assert table.evaluate("each => each.scrollWidth - each.clientWidth") == 0
