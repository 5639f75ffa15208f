"""A headless Chromium, and `kvledger browse` under both Datasettes that it supports."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request, Response, sync_playwright

from tests.support.browsed import eventful_log
from tools import lock

ROOT = Path(__file__).parents[2]

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")

CHROMIUM_ARGUMENTS = (
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--no-first-run",
    # Nothing but the pages under test is asked for.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

WIDTH, HEIGHT = 1280, 900


@pytest.fixture(scope="session")
def alpha() -> Path:
    """The folder that has Datasette's alpha, to be put before the installed packages."""
    folder = Path(sys.prefix) / "beside" / lock.DATASETTE_ALPHA.name
    assert folder.is_dir(), "this Datasette is missing from the environment: `make env` puts it there"
    return folder


@dataclass
class Served:
    """A log that is being served.

    Attributes:
        address: of its first page.
        folder: where the log lies.
    """

    address: str
    folder: Path


@pytest.fixture(scope="module", params=["installed", "alpha"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The eventful log, served by the command as a user runs it."""
    paths = [str(ROOT)]
    if request.param == "alpha":
        paths.insert(0, str(request.getfixturevalue("alpha")))
    folder = tmp_path_factory.mktemp("log")
    process = subprocess.Popen(
        [sys.executable, "-m", "ledger", "browse", str(eventful_log(folder))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield Served(process.stdout.readline().strip(), folder)
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A headless Chromium: the machine's own."""
    path = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if path is None:
        pytest.fail("no Chromium here; `make test` says which Debian packages are missing")
    # Not for the session: while Playwright runs, no other test of this thread can run an event loop.
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=list(CHROMIUM_ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser, served: Served) -> Iterator[Page]:
    """A page of a new profile. At its end, nothing was complained about, and nothing was asked for elsewhere."""
    context = chromium.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    page = context.new_page()
    found: list[str] = []
    here = urlsplit(served.address).netloc

    def answered(response: Response) -> None:
        if response.status >= HTTPStatus.BAD_REQUEST:
            found.append(f"{response.status}: {response.url}")

    def sent(request: Request) -> None:
        if urlsplit(request.url).netloc != here:
            found.append(f"asked elsewhere: {request.url}")

    def failed(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # that is a test that left the page before all of it was there
            found.append(f"{request.failure}: {request.url}")

    page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("requestfailed", failed)
    page.on("response", answered)
    page.on("request", sent)
    yield page
    context.close()
    assert found == []
