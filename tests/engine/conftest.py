"""Runs each scenario of the real engine once for the whole session, in a process of its own, and gives what it left.

Scenarios that fail say so with the end of their output: an engine's own error is more than any assertion could tell.
"""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from ledger import events as ev
from ledger.file.read import open_log
from ledger.state.apply import State

SCENARIO_TIMEOUT_S = 240

RESULT, OUTPUT = "result.json", "output.txt"
"""What a scenario leaves in its folder beside its logs: its result, if it came to its end, and all that it printed."""


class Run(NamedTuple):
    """What a scenario left: its result, and the events of its audit logs in the order of the files' names."""

    result: dict[str, Any]
    folder: Path

    @property
    def logs(self) -> list[Path]:
        """The audit logs, oldest first."""
        return sorted((self.folder / "ledger").glob("*.db"), key=lambda path: path.stat().st_mtime)

    def events(self) -> list[ev.AnyEvent]:
        """The events of the only log."""
        (path,) = self.logs
        with open_log(path) as log:
            return list(log.events())


class Fold(NamedTuple):
    """A log folded with the code that the engine ran."""

    state: State
    digests: list[tuple[str, str]]
    """What the engine recorded and what the fold gives, for each checkpoint."""


def fold(events: list[ev.AnyEvent]) -> Fold:
    """Fold events and compare with every checkpoint. A refused event raises."""
    state = State()
    digests = []
    for event in events:
        state.apply(event)
        if isinstance(event, ev.Checkpoint):
            digests.append((event.digest, state.digest()))
    return Fold(state, digests)


class RunOnce(Protocol):
    """Runs a scenario of a module of this folder, unless this session has run it already."""

    def __call__(self, module: str, name: str, timeout_s: float = SCENARIO_TIMEOUT_S) -> Run:
        """Return the run of `name`."""
        ...


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> RunOnce:
    """Return a function that runs a scenario once, also where several workers of pytest-xdist share the session.

    A worker that asks for a run which another one is making waits for it.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def run(module: str, name: str, timeout_s: float = SCENARIO_TIMEOUT_S) -> Run:
        folder = shared / name
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return Run(result_of(name, folder, "as before"), folder)
            folder.mkdir()
            return Run(run_scenario(f"tests.engine.{module}", name, folder, timeout_s), folder)

    return run


@pytest.fixture(scope="session")
def scenario(run_once: RunOnce) -> Callable[[str], Run]:
    """Return a function that gives the `Run` of a scenario of the store by name."""
    return lambda name: run_once("scenarios", name)


def run_scenario(module: str, name: str, folder: Path, timeout_s: float = SCENARIO_TIMEOUT_S) -> dict[str, Any]:
    """Run `python -m module name folder` and return the result that it wrote."""
    with (folder / OUTPUT).open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", module, name, str(folder)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)
            status = None
    if status != 0:
        (folder / RESULT).unlink(missing_ok=True)
    return result_of(name, folder, f"with status {status}")


def result_of(name: str, folder: Path, how: str) -> dict[str, Any]:
    """Return the result that a scenario wrote; without one, fail with the end of what it printed."""
    result = folder / RESULT
    if not result.exists():
        tail = (folder / OUTPUT).read_text(errors="replace")[-6000:]
        pytest.fail(f"scenario {name} ended {how}:\n{tail}", pytrace=False)
    return json.loads(result.read_text())
