"""Runs each scenario of the real engine once for the whole session, in a process of its own, and gives what it left.

Scenarios that fail say so with the end of their output: an engine's own error is more than any assertion could tell.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ledger import events as ev
from ledger.reader import open_log
from ledger.state import State

SCENARIO_TIMEOUT_S = 240


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


@pytest.fixture(scope="session")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Return a function that runs a scenario by name, once, and gives its `Run`."""
    runs: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in runs:
            folder = tmp_path_factory.mktemp(name)
            runs[name] = Run(run_scenario("tests.engine.scenarios", name, folder), folder)
        return runs[name]

    return run


def run_scenario(module: str, name: str, folder: Path, timeout_s: float = SCENARIO_TIMEOUT_S) -> dict[str, Any]:
    """Run `python -m module name folder` and return the result that it wrote."""
    output = folder / "output.txt"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", module, name, str(folder)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)
            status = None
    result = folder / "result.json"
    if status != 0 or not result.exists():
        tail = output.read_text(errors="replace")[-6000:]
        pytest.fail(f"scenario {name} ended with status {status}:\n{tail}", pytrace=False)
    return json.loads(result.read_text())
