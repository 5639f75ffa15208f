"""The command line: what it prints, and which status it ends with. Errors are one line, and never a traceback."""

import contextlib
import errno
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import unicodedata
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from ledger import __version__
from ledger.cli import commands as cli
from ledger.demo import incidents
from ledger.file.database import Database
from ledger.replay.select import Moment
from ledger.report.layout import WIDTH
from ledger.report.wording.say import PUBLIC_FIELDS
from tests.incidents.script import Script, save
from tests.support.log_files import changed

COMMAND = (sys.executable, "-m", "ledger")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}


def healthy() -> Script:
    log = Script(ranks=2, versions={"kvledger": "0.1.0"})
    log.runs("R")
    log.stores(0, "R", blocks=(1, 8), keys="abcdefgh")
    log.recalls(0, "R", blocks=(1, 8), keys="abcdefgh")
    log.finishes("R")
    return log.closes()


def leaking() -> Script:
    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 15))
    log.puts(0, 0, keys="abcdefghijk")
    log.reports(0, 0)
    call = log.put_begins(0, 1, keys="abcdefghijk")
    log.ends(call, "raised", exception="TimeoutError")
    log.finishes("R")
    log.passes(90, steps=500)
    return log.closes()


@pytest.fixture
def good(tmp_path: Path) -> str:
    return str(healthy().save(tmp_path / "good.db"))


@pytest.fixture
def bad(tmp_path: Path) -> str:
    return str(leaking().save(tmp_path / "bad.db"))


# --- exit status ------------------------------------------------------------------------------------------------------


def test_a_healthy_log_ends_with_0_and_says_so_first(good: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["replay", good]) == 0
    assert capsys.readouterr().out.startswith("Nothing wrong was found.\n")


def test_findings_end_with_1_and_lead_the_report(bad: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["replay", bad]) == 1
    out = capsys.readouterr().out
    assert out.startswith("1 finding: leak (proven)\n")
    assert "put #2 of rank 1 raised TimeoutError" in out
    assert "raised TimeoutError" in out


def test_a_sealed_file_that_was_changed_ends_with_1_and_the_first_line_names_it(
    good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sealed = tmp_path / "incident.db"
    assert cli.run(["seal", good, str(sealed)]) == 0
    changed(sealed, "UPDATE events SET data = replace(data, 'stopped', 'aborted')")
    capsys.readouterr()
    assert cli.run(["replay", str(sealed)]) == 1
    top = " ".join(capsys.readouterr().out.split("\n\n")[0].split())
    assert re.fullmatch(
        r"This file was changed after it was sealed: event \d+ is not the one that was sealed\. "
        r"Nothing else wrong was found\.",
        top,
    )
    assert cli.run(["replay", "--json", str(sealed)]) == 1
    (log,) = json.loads(capsys.readouterr().out)["story"]["logs"]
    assert log["broken_seal"] in top


@pytest.mark.parametrize("options", [[], ["--check"], ["--json"]])
def test_a_file_with_which_todays_code_disagrees_ends_with_1_and_the_first_line_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
):
    log = Script()
    log.runs("R")
    log.finishes("R")
    log.checkpoint(digest="f" * 64)
    path = log.closes().save(tmp_path / "differs.db")
    assert cli.run(["replay", *options, str(path)]) == 1
    out = capsys.readouterr().out
    if options == ["--json"]:
        assert json.loads(out)["story"]["logs"][0]["mismatch"]["seq"] == 5
    else:
        assert out.startswith("Today's code and this file disagree at event 5. Nothing else wrong was found.\n")


def test_a_file_that_was_changed_is_named_before_what_it_shows(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = Script("other")
    other.runs("R")
    other.finishes("R")
    healthy = str(other.closes().save(tmp_path / "other.db"))
    sealed = tmp_path / "incident.db"
    assert cli.run(["seal", bad, str(sealed)]) == 0
    changed(sealed, "UPDATE events SET data = replace(data, 'TimeoutError', 'OSError')")
    capsys.readouterr()
    assert cli.run(["replay", healthy, str(sealed)]) == 1
    top = " ".join(capsys.readouterr().out.split())
    assert top.startswith(
        "incident.db was changed after it was sealed: event 10 is not the one that was sealed. 1 finding: leak"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["replay"],
        ["replay", "--no-such-option", "x.db"],
        ["replay", "x.db", "--until", "yesterday"],
        ["replay", "x.db", "--block", "a:b"],
        ["replay", "x.db", "--job", "one"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "kvledger" in captured.err
    assert "Traceback" not in captured.err


def _other_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE other (a)")
    connection.commit()
    connection.close()


UNREADABLE = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"no database at all\n" * 100),
    "other": _other_database,
    "cut": lambda path: path.write_bytes(healthy().save(path.with_suffix(".whole")).read_bytes()[: 3 * 4096]),
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("command", ["replay", "state", "tail", "export", "verify"])
@pytest.mark.parametrize("wrong", UNREADABLE)
def test_a_file_that_cannot_be_read_ends_with_3_and_one_line(
    command: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / f"{wrong}.db"
    UNREADABLE[wrong](path)
    assert cli.run([command, str(path)]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvledger: {path}: ")
    assert captured.err.count("\n") == 1


def test_one_bad_file_of_several_ends_with_3(good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["replay", good, str(tmp_path / "missing.db")]) == 3
    assert capsys.readouterr().out == ""


def test_a_fault_of_our_own_is_one_line_too(
    good: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fault(*_: object, **__: object) -> None:
        raise RuntimeError("one\ntwo")

    monkeypatch.setattr("ledger.replay.case.replay_files", fault)
    assert cli.run(["replay", good]) == 3
    assert capsys.readouterr().err == (
        "kvledger: a fault of kvledger: RuntimeError: one two. Report it, with what KVLEDGER_TRACEBACK=1 shows.\n"
    )


def test_an_interrupt_is_one_line(good: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("ledger.replay.case.replay_files", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    try:
        assert cli.run(["replay", good]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "kvledger: interrupted\n"


def test_an_interrupt_while_modules_are_loaded_is_one_line(tmp_path: Path):
    # Stands in the place of click, which is the first that the command line imports.
    (tmp_path / "click.py").write_text(
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nsignal.raise_signal(signal.SIGINT)\n"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"kvledger: interrupted\n")


def test_an_export_whose_reader_goes_away_ends_as_by_sigpipe_and_says_nothing(tmp_path: Path):
    log = Script()
    for number in range(3000):  # more than a pipe holds
        log.arrives(f"request-{number}")
    path = log.closes().save(tmp_path / "long.db")
    with subprocess.Popen(
        [*COMMAND, "export", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as it:
        assert it.stdout is not None
        assert it.stderr is not None
        assert it.stdout.readline().startswith(b'{"kind":"log_opened"')
        it.stdout.close()
        assert it.stderr.read() == b""
        assert it.wait(60) == 141


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_goes_away_does_not_change_what_a_replay_found(bad: str, options: list[str]):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, "replay", bad, *options],
            stdout=writing,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("command", ["replay", "export", "--help"])
def test_output_that_a_full_disk_does_not_take_is_one_line(bad: str, command: str):
    arguments = [command] if command.startswith("-") else [command, bad]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT, timeout=60, check=False
        )
    assert done.returncode == 2
    assert done.stderr == b"kvledger: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_streams_that_the_shell_closed_do_not_change_the_status(bad: str, tmp_path: Path, closed: str):
    for path, status in ((bad, 1), (str(tmp_path / "missing.db"), 3)):
        command = ["sh", "-c", f'"$@" {closed}', "sh", *COMMAND, "replay", path]
        done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=60, check=False)
        assert done.returncode == status
        assert b"Traceback" not in done.stderr


def test_a_file_without_the_right_to_read_it_ends_with_3_and_one_line(
    bad: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # The kernel's answer to somebody else; root, as whom tests often run, may read everything.
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    assert cli.run(["replay", bad]) == 3
    err = capsys.readouterr().err
    assert err.startswith(f"kvledger: {bad}: cannot be read: ")
    assert err.count("\n") == 1


def test_the_installed_command_ends_with_the_status_of_the_library(bad: str):
    done = subprocess.run([*COMMAND, "replay", bad], capture_output=True, env=ENVIRONMENT, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == b""


# --- replay -----------------------------------------------------------------------------------------------------------


def test_the_data_has_exactly_the_promised_shape(bad: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["replay", "--json", bad]) == 1
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["log", "state", "findings", "story"]
    assert list(data["log"]) == ["files", "engine", "events", "first", "last", "clean_end", "gaps"]
    assert list(data["state"]) == ["digest", "open_jobs", "pinned_blocks", "waiting_loads"]
    assert list(data["findings"][0]) == list(PUBLIC_FIELDS)
    assert data["log"]["clean_end"] is True
    assert data["state"]["open_jobs"] == 1
    assert data["state"]["pinned_blocks"] == 11
    finding = data["findings"][0]
    assert (finding["kind"], finding["certainty"], finding["jobs"], finding["ranks"]) == ("leak", "proven", [0], [1])
    assert finding["blocks"] == [[0, block] for block in range(5, 16)]
    assert finding["requests"] == ["R"]
    assert finding["since_seq"] in finding["evidence"]


def test_the_data_of_a_healthy_log_has_no_findings(good: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["replay", "--json", good]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["findings"] == []
    story = data["story"]["logs"][0]
    assert story["calls"]["put"]["bytes"] == 2 * 8 * 4096
    assert story["loads"]["tokens_loaded"] == 128


def test_no_line_of_a_report_is_wider_than_a_terminal(good: str, bad: str, capsys: pytest.CaptureFixture[str]):
    cli.run(["replay", good, bad, "--check"])
    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= WIDTH or " " not in line.strip()[14:], line  # a path is never broken


def test_a_report_is_plain_text_when_piped(bad: str):
    done = subprocess.run([*COMMAND, "replay", bad], capture_output=True, env=ENVIRONMENT, timeout=60, check=False)
    assert done.stdout.isascii()
    assert b"\x1b" not in done.stdout


def test_until_shows_the_log_as_it_was_and_does_not_call_it_torn(bad: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["replay", bad, "--until", "6"]) == 0
    out = capsys.readouterr().out
    assert "replayed as far as event 6; the log goes on" in out
    assert "store job 0 of request R: open since event 4" in out


def test_a_date_alone_is_the_start_of_that_day():
    evening = datetime(2026, 1, 31, 20, tzinfo=UTC)
    midnight = datetime(2026, 1, 31, tzinfo=UTC)
    ts_ns = Moment("2026-01-31").ts_ns(int(evening.timestamp()) * 10**9)
    assert ts_ns is not None
    assert ts_ns // 10**9 == midnight.timestamp()
    # A time of day, however, may lie past the midnight that the log goes through.
    ts_ns = Moment("00:30").ts_ns(int(evening.timestamp()) * 10**9)
    assert ts_ns is not None
    assert ts_ns // 10**9 == midnight.timestamp() + 24.5 * 3600


def test_until_beyond_the_end_is_the_whole_log(bad: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["replay", bad, "--until", "100000"]) == 1
    assert "closed by the engine" in capsys.readouterr().out


def test_a_report_is_narrowed_to_a_request_a_job_or_a_block(bad: str, capsys: pytest.CaptureFixture[str]):
    for options in (["--request", "R"], ["--job", "0"], ["--block", "0:7"]):
        assert cli.run(["replay", bad, *options]) == 1
        assert "Time line: " in capsys.readouterr().out


def test_check_names_the_first_event_at_which_file_and_code_disagree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = Script()
    log.checks()
    log.runs("R")
    log.checkpoint(digest="f" * 64)
    path = log.closes().save(tmp_path / "differs.db")
    assert cli.run(["replay", "--check", str(path)]) == 1
    out = capsys.readouterr().out
    assert "first at event 5, agreed until event 2" in out
    assert "f" * 64 in out


def test_check_of_a_file_that_agrees_says_how_much_was_compared(good: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["replay", "--check", good]) == 0
    assert "good.db: its 1 checkpoint" in capsys.readouterr().out


# --- what a client may have written -----------------------------------------------------------------------------------

CONTROLS = "\x1b]0;owned\x07\x1b[2J\x7f\x9b31m\u202egnp\u2066\n       9  00:00:00.000  log closed: shutdown\r\t\u2028"


def on_a_terminal(arguments: list[str]) -> bytes:
    """What a terminal gets of a command."""
    terminal, end = pty.openpty()
    with subprocess.Popen([*COMMAND, *arguments], stdout=end, stderr=end, stdin=end, env=ENVIRONMENT) as process:
        os.close(end)
        said = b""
        with contextlib.suppress(OSError):  # it has hung up
            while part := os.read(terminal, 65536):
                said += part
        process.wait(60)
    os.close(terminal)
    assert process.returncode in (0, 1), said
    return said


def named(request: str) -> Script:
    log = Script(ranks=2)
    log.runs(request)
    log.saves(0, request, blocks=(5, 12))
    log.put_begins(0, 1, keys="abcdefgh")
    log.passes(100, steps=500)
    log.arrives("other")
    return log


@pytest.mark.parametrize(
    "command",
    [
        ["replay", "FILE"],
        ["replay", "FILE", "--request", "ID"],
        ["replay", "FILE", "--job", "0"],
        ["tail", "FILE"],
        ["state", "FILE"],
        ["why", "FILE", "ID"],
        ["why", "FILE", "ID-mistyped"],
        ["blame", "FILE", "0:5"],
        ["diff", "FILE", "1", "6"],
        ["blast-radius", "FILE", "--job", "0"],
        ["seal", "FILE", "NEW"],
        ["verify", "FILE"],
        ["minimize", "FILE", "--finding", "stall", "-o", "NEW"],
        ["minimize", "FILE", "--finding", "leak", "-o", "NEW"],
        ["replay", "NEW"],
    ],
)
@pytest.mark.parametrize("width", [80, 40])
def test_no_control_character_of_a_log_or_a_file_name_is_printed(
    command: list[str], width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", str(width))
    words = {
        "FILE": str(named(f"chat-{CONTROLS}").save(tmp_path / "log-\x1b[31m\n.db")),
        "NEW": str(tmp_path / "new-\x1b[31m\n.db"),
        "ID": f"chat-{CONTROLS}",
        "ID-mistyped": f"chut-{CONTROLS}",
    }
    cli.run([words.get(word, word) for word in command])
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert said
    assert [each for each in said if each != "\n" and unicodedata.category(each) in ("Cc", "Cf", "Zl", "Zp")] == []


def test_a_control_character_is_shown_by_its_number_and_ends_no_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = named("a\x1b[2Jb\nc\x9bd\u202ee")
    cli.run(["tail", str(log.save(tmp_path / "log.db"))])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(log.events)
    assert r"request a\x1b[2Jb\nc\x9bd\u202ee queued" in lines[1]


@pytest.mark.parametrize("command", [["replay"], ["replay", "--job", "0"], ["tail"], ["state"], ["diff", "1", "6"]])
def test_a_very_long_id_is_shown_by_its_begin_and_its_end(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = named(f"chat-{'x' * 10_000}-a475bf72").save(tmp_path / "log.db")
    name, *rest = command
    cli.run([name, str(path), *rest])
    out = capsys.readouterr().out
    assert re.search(r"chat-x{35}\.\.\.x{30,31}-a475bf72", out)
    assert "x" * 100 not in out
    if command == ["replay"]:
        top = " ".join(out.split("\n\n")[0].split())
        assert re.search(r"job 0 of request chat-x+\.\.\.x+-a475bf72 may hang", top)


@pytest.mark.parametrize("command", [["replay", "--json"], ["state", "--json"]])
def test_data_have_a_very_long_id_whole(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    request = f"chat-{'x' * 10_000}-a475bf72"
    name, *rest = command
    cli.run([name, str(named(request).save(tmp_path / "log.db")), *rest])
    assert request in capsys.readouterr().out


def test_on_a_terminal_no_control_character_of_a_log_is_printed_either(tmp_path: Path):
    path = named(f"chat-{CONTROLS}").save(tmp_path / "log-[red]\x1b[2J[/x].db")
    for command in (["replay", str(path)], ["tail", str(path)]):
        assert b"\x1b[2J" not in on_a_terminal(command)


# --- the others -------------------------------------------------------------------------------------------------------


def test_state_prints_the_book_at_a_moment(bad: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["state", bad, "--at", "5"]) == 0
    out = capsys.readouterr().out
    assert "Pinned      11 blocks" in out
    assert "blocks 5-15," in out
    assert cli.run(["state", bad, "--at", "5", "--json"]) == 0
    book = json.loads(capsys.readouterr().out)
    assert book["jobs"]["0"]["waiting"] == [0, 1]


def test_export_prints_the_events_as_they_are_stored(
    good: str, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
):
    assert cli.run(["export", good]) == 0
    assert capfdbinary.readouterr().out == healthy().lines()
    copy = tmp_path / "events.jsonl"
    assert cli.run(["export", good, "-o", str(copy)]) == 0
    assert copy.read_bytes() == healthy().lines()
    assert cli.run(["export", good, "-o", str(copy)]) == 2


def test_export_of_an_unreadable_file_leaves_no_file_behind(tmp_path: Path):
    copy = tmp_path / "events.jsonl"
    assert cli.run(["export", str(tmp_path / "missing.db"), "-o", str(copy)]) == 3
    assert not copy.exists()


@pytest.mark.parametrize("arguments", [["export"], ["minimize", "--finding", "leak"]])
def test_a_disk_that_fills_up_leaves_no_cut_file_and_is_told_with_the_folder(
    arguments: list[str],
    bad: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # A fake at the last step, when all is written: a small disk of its own takes the rights of root.
    monkeypatch.setattr("ledger.file.publish.publish", full)
    folder = tmp_path / "full"
    folder.mkdir()
    assert cli.run([*arguments, bad, "-o", str(folder / "new")]) == 2
    assert list(folder.iterdir()) == []
    err = capsys.readouterr().err
    assert err.startswith(f"kvledger: {folder / 'new'} cannot be written in the folder {folder}: the disk is full")
    assert err.count("\n") == 1


def test_minimize_writes_a_log_that_still_has_the_finding(bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = tmp_path / "small.db"
    assert cli.run(["minimize", bad, "--finding", "leak", "-o", str(small)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"bad.db", "small.db"}
    capsys.readouterr()
    assert cli.run(["replay", str(small)]) == 1
    assert "leak (proven)" in capsys.readouterr().out
    assert cli.run(["minimize", bad, "--finding", "leak", "-o", str(small)]) == 2
    assert "never overwritten" in capsys.readouterr().err


def test_minimize_by_a_kind_that_the_log_does_not_have_names_those_that_it_has(
    bad: str, good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = str(tmp_path / "small.db")
    assert cli.run(["minimize", bad, "--finding", "nonsense", "-o", target]) == 2
    assert "no finding of the kind 'nonsense'; it has: leak. See" in capsys.readouterr().err
    assert cli.run(["minimize", good, "--finding", "leak", "-o", target]) == 2
    assert "nothing wrong was found in it" in capsys.readouterr().err


def test_blast_radius_prints_the_keys_alone_for_a_search_in_the_list_of_a_store(capsys: pytest.CaptureFixture[str]):
    (poisoned,) = [str(path) for path in incidents() if path.stem == "poisoned-keys"]
    assert cli.run(["replay", poisoned, "--json"]) == 1
    job = str(json.loads(capsys.readouterr().out)["findings"][0]["jobs"][0])
    assert cli.run(["blast-radius", poisoned, "--job", job, "--json"]) == 1
    keys = json.loads(capsys.readouterr().out)["keys"]
    assert keys
    assert cli.run(["blast-radius", poisoned, "--job", job, "--keys"]) == 1
    assert capsys.readouterr().out.split() == keys


def test_seal_salvages_what_can_be_read_of_a_cut_log_and_says_what_is_lost(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    changed(bad, "DELETE FROM events WHERE seq = 4")
    assert cli.run(["seal", bad, str(tmp_path / "incident.db")]) == 3
    assert "seal --salvage" in capsys.readouterr().err
    assert cli.run(["seal", "--salvage", bad, str(tmp_path / "incident.db")]) == 0
    assert "1 event could not be read; a gap stands in each place" in capsys.readouterr().out
    # Without the event that registered its job nothing can be said of the leak, and that is said.
    assert cli.run(["replay", str(tmp_path / "incident.db")]) == 0
    assert "lost: 1 event." in capsys.readouterr().out.partition("\n\n")[0]
    assert cli.run(["state", str(tmp_path / "incident.db")]) == 0
    assert "What happened there is not in this answer." in " ".join(capsys.readouterr().out.split())


def test_a_blast_radius_is_not_complete_where_the_log_has_lost_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (poisoned,) = [path for path in incidents() if path.stem == "poisoned-keys"]
    copy = tmp_path / "copy.db"
    copy.write_bytes(poisoned.read_bytes())
    changed(copy, "DELETE FROM events WHERE seq = 331")
    assert cli.run(["seal", "--salvage", str(copy), str(tmp_path / "incident.db")]) == 0
    capsys.readouterr()
    cli.run(["blast-radius", str(tmp_path / "incident.db"), "--job", "7", "--json"])
    assert json.loads(capsys.readouterr().out)["complete"] is False


def test_a_name_that_is_no_text_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (poisoned,) = [path for path in incidents() if path.stem == "poisoned-keys"]
    named = tmp_path / os.fsdecode(b"\xffx.db")
    named.write_bytes(poisoned.read_bytes())
    assert cli.run(["replay", str(named), "--json"]) == 1
    assert "\\udcffx.db" in json.loads(capsys.readouterr().out)["log"]["files"][0]
    assert cli.run(["seal", "--salvage", str(named), str(tmp_path / "incident.db")]) == 0


def test_a_command_that_is_misspelt_is_asked_for_with_one_mark(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["replya"]) == 2
    assert capsys.readouterr().err.endswith("Did you mean 'replay'? See kvledger --help.\n")


def test_tail_prints_the_last_events_one_line_each(good: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["tail", "-n", "2", good]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[-1].endswith("log closed: shutdown")


def test_tail_follows_a_log_that_is_closed_to_its_end_and_stops(good: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["tail", "-f", "-n", "1", good]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_seal_and_verify(bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sealed = str(tmp_path / "incident.db")
    assert cli.run(["seal", bad, sealed]) == 0
    digest = capsys.readouterr().out.splitlines()[1]
    assert digest.startswith("digest ")
    assert cli.run(["verify", sealed]) == 0
    assert digest in capsys.readouterr().out
    assert cli.run(["replay", sealed]) == 1
    assert cli.run(["seal", bad, sealed]) == 2
    assert "never overwritten" in capsys.readouterr().err


def test_verify_of_a_changed_file_names_the_event(bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sealed = tmp_path / "incident.db"
    assert cli.run(["seal", bad, str(sealed)]) == 0
    changed(sealed, "UPDATE events SET data = replace(data, 'TimeoutError', 'OSError') WHERE seq = 10")
    assert cli.run(["verify", str(sealed)]) == 1
    out = capsys.readouterr().out
    assert "\nevent 10 is not the one that was sealed\n" in out


def test_reading_leaves_the_file_and_its_folder_as_they_were(bad: str, tmp_path: Path):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for arguments in (["replay", bad], ["state", bad], ["tail", bad], ["verify", bad]):
        cli.run(arguments)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvledger {__version__}\n"


def test_demo_without_an_incident_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("ledger.demo.incidents", list)
    assert cli.run(["demo"]) == 3
    assert "kvledger replay FILE" in capsys.readouterr().err


def test_demo_ends_with_the_next_command_to_type(
    bad: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("ledger.demo.incidents", lambda: [Path(bad)])
    assert cli.run(["demo"]) == 0
    out = capsys.readouterr().out
    assert "1 finding: leak (proven)" in out
    assert f"kvledger replay {bad} --job 0" in out


def test_demo_names_the_command_by_a_path_that_works_where_the_shell_does_not_find_it(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = tmp_path / "venv" / "bin" / "kvledger"
    command.parent.mkdir(parents=True)
    command.touch(mode=0o755)
    monkeypatch.setattr("ledger.demo.incidents", lambda: [Path(bad)])
    monkeypatch.setattr("sys.argv", [str(command)])
    monkeypatch.chdir(tmp_path)
    for path, typed in ((str(tmp_path), "venv/bin/kvledger"), (str(command.parent), "kvledger")):
        monkeypatch.setenv("PATH", path)
        assert cli.run(["demo"]) == 0
        assert f"\n  {typed} replay bad.db --job 0\n" in capsys.readouterr().out


def test_a_torn_log_is_told_from_a_live_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    events = leaking().events[:9]
    path = tmp_path / "live.db"
    database = Database(path)
    database.create({"engine": "e", "boot": "b", "flush_interval_ms": "50"})
    database.append(msgspec.json.encode(events))
    assert cli.run(["replay", str(path)]) == 0
    assert "still open: the engine writes it" in capsys.readouterr().out
    database.close()
    assert cli.run(["replay", str(path)]) == 1
    assert "torn_log (proven)" in capsys.readouterr().out


def test_files_of_one_incident_are_reported_together(good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = Script("other")
    other.runs("X")
    other.finishes("X")
    path = save(other.closes().events, tmp_path / "other.db")
    assert cli.run(["replay", good, str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["log"]["engine"] == "engine, other"
    assert [each["file"] for each in data["story"]["logs"]] == [good, str(path)]
