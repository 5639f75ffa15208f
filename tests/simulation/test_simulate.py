"""The command: what it prints and saves when a run fails, and its exit status."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ledger.file.read import open_log
from ledger.state.apply import State
from tools.sim.shrink import shrink
from tools.sim.store import plan as pl

ROOT = Path(__file__).parents[2]


def simulate(*arguments, cwd=ROOT):
    command = [sys.executable, str(ROOT / "tools/simulate.py"), "store", "--jobs", "1", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_log_of_a_run_is_a_file_that_folds_to_the_state_at_its_end(play, tmp_path):
    path = tmp_path / "run.db"
    done = simulate("--seeds", "7", "--steps", "120", "--save", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    state = State()
    with open_log(path) as log:
        for event in log.events():
            state.apply(event)
    assert state.digest() == play(7, 120).state


def test_a_mistake_is_told_with_its_seed_step_and_event_and_saved_as_a_small_plan(tmp_path):
    found = simulate("--seeds", "0:200", "--canary", "pins-off", "--save", "failed.jsonl", cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "poison: key" in found.stdout
    assert "last event: {" in found.stdout
    assert "FOUND: pins-off (S1" in found.stdout
    plan = msgspec.json.decode((tmp_path / "failed.plan.json").read_bytes(), type=pl.Plan)
    assert len(plan.decisions) < 30
    assert (tmp_path / "failed.jsonl").read_text().startswith('{"kind":"log_opened"')
    again = simulate("--canary", "pins-off", "--plan", "failed.plan.json", "--no-shrink", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    healthy = simulate("--plan", "failed.plan.json", cwd=tmp_path)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert "PASSED" in healthy.stdout


@pytest.mark.parametrize(
    "arguments",
    [("--seeds", "5:5"), ("--faults", "fire"), ("--ranks", "0"), ("--canary", "none"), ("--plan", "missing")],
)
def test_wrong_usage_ends_with_status_2_and_one_line(arguments):
    done = simulate(*arguments)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("Error: ")


def test_shrinking_keeps_what_makes_a_plan_fail_and_little_else():
    plan = pl.draw(3, 300)
    needed = {plan.decisions[4], plan.decisions[len(plan.decisions) // 2]}
    smallest = shrink(plan, lambda smaller: needed <= set(smaller.decisions), failed_step=plan.steps)
    assert set(smallest.decisions) == needed
