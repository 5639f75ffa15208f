"""`kvledger browse`: a copy is served, on loopback, and nothing is left behind. The log is not touched."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ledger.browse import server
from ledger.cli import commands as cli
from ledger.errors import LedgerNotWritable
from ledger.file.seal import seal
from ledger.file.verify import verify
from tests.support.browsed import eventful, eventful_log
from tests.support.log_files import append_requests, small_disk, torn_log, writing

ROOT = Path(__file__).parents[4]


@contextmanager
def browsing(path: Path, temporary: Path, *options: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """The command as a user runs it, and the address that it prints."""
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "ledger", "browse", str(path), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def page(address: str) -> str:
    """The text of a page."""
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.read().decode()


def state_of(path: Path) -> dict[str, str]:
    """What lies in the folder of a file, byte for byte."""
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in path.parent.iterdir()}


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 0)]
)
def test_it_prints_an_address_serves_and_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, status: int):
    (tmp_path / "log").mkdir()
    path = eventful_log(tmp_path / "log")
    before = state_of(path)
    temporary = tmp_path / "temporary"
    with browsing(path, temporary) as (process, address):
        assert address.startswith("http://127.0.0.1:")
        assert "no answer from rank 1" in page(address)
        assert list(temporary.iterdir()), "no copy was made"
        process.send_signal(number)
        assert process.wait(30) == status
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert list(temporary.iterdir()) == []
    assert state_of(path) == before


def test_the_page_is_opened_in_the_users_browser_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told = tmp_path / "told"
    os.mkfifo(told)
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {told}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    with browsing(eventful_log(tmp_path), tmp_path / "temporary", "--open") as (_, address):
        assert told.read_text().strip() == address


def test_a_live_log_is_shown_and_goes_on(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    with writing(tmp_path / "live.db") as (log, writer):
        append_requests(log, 10)
        assert writer.flush()
        copy = server.make_copy(tmp_path / "live.db", tmp_path_factory.mktemp("copy"))
        append_requests(log, 10)
        assert writer.flush()
    report = verify(copy)
    assert report.ok
    assert report.events == 20


def test_a_log_whose_engine_was_killed_is_shown_with_its_tail(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path / "killed.db"
    written = torn_log(path)
    before = state_of(path)
    assert any(name.endswith("-wal") for name in before)
    copy = server.make_copy(path, tmp_path_factory.mktemp("copy"))
    assert verify(copy).events >= written
    assert state_of(path) == before


def test_an_incident_file_is_copied_with_its_seal(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    sealed = seal(eventful_log(tmp_path), tmp_path / "incident.db")
    copy = server.make_copy(tmp_path / "incident.db", tmp_path_factory.mktemp("copy"))
    report = verify(copy)
    assert report.ok
    assert report.chain_head == sealed.chain_head


def test_progress_goes_up_to_the_end(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    told: list[tuple[int, int]] = []
    path = eventful_log(tmp_path)
    server.make_copy(path, tmp_path_factory.mktemp("copy"), lambda _, done, total: told.append((done, total)))
    events = len(eventful().events)
    assert told[-1] == (2 * events, 2 * events)
    assert told == sorted(told)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("incident.db", "incident"),
        ("7f2c-0-20260131T140305-ab.db", "7f2c-0-20260131T140305-ab"),
        ("an incident, 3 a.m.", "an-incident-3-a.m"),
        ("-.db", "log"),
        ("_internal.db", "internal"),
        ("日本.db", "log"),
    ],
)
def test_the_name_of_a_file_becomes_a_name_in_addresses(name: str, shown: str):
    assert server.database_name(Path(name)) == shown


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), (b"", "is empty"), (b"text" * 100, "is not a SQLite database")],
)
def test_a_file_that_cannot_be_read_is_one_line_and_status_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
):
    path = tmp_path / "file.db"
    if content is not None:
        path.write_bytes(content)
    assert cli.run(["browse", str(path)]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert said in captured.err


def test_a_log_that_was_cut_is_one_line_and_status_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = eventful_log(tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert cli.run(["browse", str(path)]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_port_that_is_taken_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.run(["browse", str(eventful_log(tmp_path)), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"port {port}" in error


def test_a_host_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["browse", str(eventful_log(tmp_path)), "--host", "300.1.1.1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("part", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_no_room_for_the_copy_names_the_way_out(tmp_path: Path, part: float):
    """On disks that are full early on while the copy is sealed, and late, while tables are added."""
    path = tmp_path / "log.db"
    with writing(path) as (log, _):
        append_requests(log, 500)
    (tmp_path / "room").mkdir()
    needed_kib = server.make_copy(path, tmp_path / "room").stat().st_size // 1024
    with (
        small_disk(tmp_path / "small", int(part * needed_kib)) as folder,
        pytest.raises(LedgerNotWritable, match=r"disk is full.*TMPDIR"),
    ):
        server.make_copy(path, folder)
