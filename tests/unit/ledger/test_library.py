"""The front door for programs: its names and how they are called, that it costs nothing, and that its page runs."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ledger
from ledger import events as ev
from tests.support.log_files import ROOT, writing

PAGE = ROOT / "docs" / "library.md"

SIGNATURES = {
    "doubts": "(case)",
    "open_log": "(path, *, tolerate=False)",
    "replay_logs": "(paths, *, moment=None, interest=None, progress=None)",
    "report_data": "(case)",
    "report_lines": "(case, *, check=False, width=80)",
    "seal_log": "(source, target, progress=None, *, salvage=False)",
    "state_at": "(path, moment=None)",
    "verify_log": "(path)",
}
"""How each function is called."""

TYPES = {
    "Case",
    "FileCorrupt",
    "FileMissing",
    "FileNewer",
    "Finding",
    "Incident",
    "Interest",
    "LedgerError",
    "LedgerFileError",
    "LedgerNotWritable",
    "LogFile",
    "LogResult",
    "Moment",
    "NotALedger",
    "NotInLog",
    "Problem",
    "Result",
    "SealReport",
    "State",
    "VerifyReport",
}
"""What a function returns, takes or raises."""


def called(function: Callable[..., object]) -> str:
    """How a function is called, without types."""
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def blocks() -> list[str]:
    """The Python code of the page, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_public_names_are_the_pinned_ones():
    assert sorted(ledger.__all__) == sorted([*SIGNATURES, *TYPES])
    assert {name: called(getattr(ledger, name)) for name in SIGNATURES} == SIGNATURES
    assert all(isinstance(getattr(ledger, name), type) for name in TYPES)


@pytest.mark.parametrize("name", sorted([*SIGNATURES, *TYPES]))
def test_every_public_name_says_what_it_is(name):
    assert (inspect.getdoc(getattr(ledger, name)) or "").strip()


def test_an_unknown_name_is_an_attribute_error_and_a_room_is_still_a_room():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ledger.no_such_name
    from ledger import replay, report

    assert (replay.__name__, report.__name__) == ("ledger.replay", "ledger.report")


def test_importing_the_package_loads_none_of_its_files():
    code = "import ledger, sys; print(sorted(name for name in sys.modules if name.startswith('ledger.')))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.strip() == "[]"


def test_the_page_names_every_function():
    assert {name for name in SIGNATURES if f"| `{name}(" not in PAGE.read_text()} == set()


@pytest.mark.parametrize("number", range(len(blocks())))
def test_the_code_on_the_page_runs(tmp_path, monkeypatch, number):
    write_run(tmp_path / "logs" / "engine-0.db")
    monkeypatch.chdir(tmp_path)
    run(blocks()[number])


def test_the_check_on_the_page_fails_on_a_log_with_a_finding(tmp_path, monkeypatch):
    write_run(tmp_path / "logs" / "engine-0.db", dies=True)
    monkeypatch.chdir(tmp_path)
    (check,) = (block for block in blocks() if "def test_" in block)
    with pytest.raises(AssertionError, match="Culprit"):
        run(check)


def write_run(path: Path, *, dies: bool = False) -> None:
    """Write the log of an engine that saved four requests; one that dies never hears from rank 1, and closes no log."""
    with writing(path) as (log, _):
        log.append(ev.LogOpened, engine="test-engine", boot="boot-1")
        for job in range(4):
            request, blocks = f"request-{job}", ((0, ((4 * job + 1, 4 * job + 3),)),)
            log.append(ev.RequestQueued, request=request, generation=1, prompt_tokens=96)
            log.append(ev.RequestScheduled, request=request, generation=1, scheduled_tokens=96)
            log.append(ev.JobRegistered, job=job, request=request, generation=1, ranks=((0, 1),), tokens=96)
            log.append(ev.PinTouched, job=job, blocks=blocks)
            log.append(ev.RequestFinished, request=request, generation=1, reason="stopped")
            for rank in range(1 if dies else 2):
                log.append(ev.RankCompleted, job=job, rank=rank)
            if not dies:
                log.append(ev.JobSettled, job=job)
                log.append(ev.BlocksFreed, job=job, blocks=blocks)
        if not dies:
            log.append(ev.LogClosed)


def run(code: str) -> None:
    """Run a block of the page, and the tests that it defines."""
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    for name, value in list(names.items()):
        if name.startswith("test_") and callable(value):
            value()
