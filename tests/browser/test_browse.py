"""The pages of a log in a real browser, under Datasette 0.65 and an alpha of 1.0.

That a browser finds fault with nothing and asks nobody else for anything, is checked at the end of each test.
"""

import re

import pytest
from playwright.sync_api import Dialog, Page, expect

from ledger.browse.queries import QUERIES
from tests.browser import fonts
from tests.browser.conftest import Served
from tests.support.browsed import HANGING_JOB, NASTY

ROWS = "table.rows-and-columns tbody tr"


def test_both_datasettes_are_what_they_should_be(page: Page, served: Served, request: pytest.FixtureRequest):
    page.goto(served.address.rpartition("/")[0] + "/-/versions.json")
    version = page.evaluate("JSON.parse(document.body.innerText).datasette.version")
    assert version.startswith("1.0a" if "alpha" in request.node.name else "0.65")


def test_the_first_page_says_what_went_wrong_and_what_can_be_asked(page: Page, served: Served):
    page.goto(served.address)
    expect(page.locator("h1")).to_have_text("kvledger: eventful.db")
    expect(page.locator(".kv-findings li", has_text="no answer from rank 1")).to_have_count(1)
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


PATHS = (
    "", "/events", "/requests", "/jobs", "/jobs/2", "/loads", "/transfers", "/findings", "/open_work", "/timeline",
    "/what_went_wrong", "/open_at_end", "/pins_over_time", "/request_story?request=cmpl-2",
)  # fmt: skip

USUAL, WIDE, WIDER_THAN_ANY = 0.5, 0.6, 0.8
"""Widths of a character in em: of the usual fonts, of the widest one that is common, and of none."""

DESKTOP, PHONE = 1280, 390
"""Widths of a screen in pixels."""

OVER = "each => each.scrollWidth - each.clientWidth"
"""By how many pixels an element's content is wider than the element."""


def show_in_font(page: Page, character_em: float, screen: int) -> None:
    """Let the page use a font of the test's own, so that the machine's fonts decide nothing."""
    page.add_init_script(fonts.script(character_em))
    page.set_viewport_size({"width": screen, "height": 900})


def go(page: Page, address: str) -> None:
    """Go to a page, and wait until its font is there and its tables have been fitted."""
    page.goto(address)
    assert page.evaluate("document.fonts.ready.then(() => [...document.fonts].map(each => each.status))") == ["loaded"]


@pytest.mark.parametrize("screen", [DESKTOP, PHONE])
@pytest.mark.parametrize("character_em", [USUAL, WIDE])
def test_a_page_fits_on_a_screen(page: Page, served: Served, character_em: float, screen: int):
    show_in_font(page, character_em, screen)
    over: dict[str, list[int]] = {}
    for path in PATHS:
        go(page, f"{served.address}{path}")
        over[path] = [page.locator(":root").evaluate(OVER)]
        over[path] += [table.evaluate(OVER) for table in page.locator(".table-wrapper").all()]
        expect(page.locator(".kv-sideways").filter(visible=True)).to_have_count(0)
    assert {path: pixels for path, pixels in over.items() if any(pixels)} == {}


@pytest.mark.parametrize("screen", [DESKTOP, PHONE])
def test_what_is_too_wide_for_the_screen_says_so_and_scrolls_by_keyboard(page: Page, served: Served, screen: int):
    show_in_font(page, WIDER_THAN_ANY, screen)
    for path in PATHS:
        go(page, f"{served.address}{path}")
        assert page.locator(":root").evaluate(OVER) == 0, path
        for table in page.locator(".table-wrapper").all():
            is_wide = table.evaluate(OVER) > 0
            expect(page.locator(".kv-sideways").filter(visible=True)).to_have_count(int(is_wide))
            if is_wide:
                assert screen == DESKTOP, path  # a phone has a line for each value
                table.focus()
                page.keyboard.press("ArrowRight")
                expect(table).to_be_focused()
                page.wait_for_function("document.activeElement.scrollLeft > 0")


def test_a_window_that_grows_takes_the_sign_away(page: Page, served: Served):
    show_in_font(page, WIDE, 800)
    go(page, f"{served.address}/transfers")
    sign, table = page.locator(".kv-sideways"), page.locator(".table-wrapper")
    expect(sign).to_be_visible()
    expect(table).to_have_attribute("role", "region")
    page.set_viewport_size({"width": 2400, "height": 900})
    expect(sign).to_be_hidden()
    expect(table).not_to_have_attribute("role", "region")
    expect(table).not_to_have_class(re.compile("kv-tight"))
