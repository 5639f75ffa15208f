"""A seed is one run: again, in another process, under another hash seed, and with asserts removed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEDS = range(300, 312)
STEPS = 150


def digest_in_a_process(hash_seed, *flags):
    """The digest over all logs of the seeds, played in another process."""
    command = [sys.executable, *flags, "tools/simulate.py", "store", "--seeds", f"{SEEDS.start}:{SEEDS.stop}"]
    done = subprocess.run(
        [*command, "--steps", str(STEPS), "--jobs", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"Digest of all logs: (\w+)", done.stdout)[0]


@pytest.fixture(scope="module")
def digest():
    return digest_in_a_process("0")


def test_a_seed_is_the_same_run_again(play):
    first, second = play(SEEDS.start, STEPS), play(SEEDS.start, STEPS)
    assert (first.digest, first.state, first.steps) == (second.digest, second.state, second.steps)


def test_a_seed_is_the_same_run_whatever_the_order_of_sets_and_hashes(digest):
    assert digest_in_a_process("1") == digest


def test_a_seed_is_the_same_run_without_asserts(digest):
    assert digest_in_a_process("2", "-O") == digest
