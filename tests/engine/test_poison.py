"""A real poisoning and its truth.

The keys that `replay` names are those whose bytes in the store are wrong, no more and no fewer.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from connector.store.integrity import TRAILER_BYTES
from ledger import events as ev
from ledger.file.read import open_log
from ledger.queries.blast_radius import blast_radius
from ledger.replay.fold import replay
from tests.engine.conftest import Run, RunOnce
from tests.engine.expected import WRONG_RELATIVE_ERROR, stored, wrong_keys

PoisonRun = Callable[[str], Run]


@pytest.fixture(scope="module")
def poison_run(run_once: RunOnce) -> PoisonRun:
    return lambda name: run_once("poison", name, timeout_s=700)


def keys_named(log: Path) -> set[str]:
    """Return the keys that the poison findings of a log name."""
    with open_log(log) as file:
        findings = [finding for finding in replay(file.events()).findings if finding.kind == "poison"]
    keys: set[str] = set()
    for finding in findings:
        for job in finding.jobs:
            with open_log(log) as file:
                (radius,) = blast_radius([file.events], job)
            keys.update(radius.keys)
    return keys


@pytest.mark.timeout(900)
def test_replay_names_exactly_the_keys_whose_bytes_are_wrong(poison_run: PoisonRun) -> None:
    run = poison_run("poisoned")
    wrong = wrong_keys(run, poison_run("clean"))
    assert wrong, "the run was not slow enough to poison a key"
    assert keys_named(run.logs[0]) == wrong


@pytest.mark.timeout(900)
def test_replay_names_the_jobs_the_blocks_both_owners_and_the_requests_that_loaded_the_keys(
    poison_run: PoisonRun,
) -> None:
    run = poison_run("poisoned")
    events = run.events()
    loaded = {
        (event.request, key)
        for event in events
        if isinstance(event, ev.TransferStarted) and event.op == "get"
        for key in event.keys
    }
    pinned = {event.job: event.blocks for event in events if isinstance(event, ev.PinTouched)}
    findings = [finding for finding in replay(events).findings if finding.kind == "poison"]
    for finding in findings:
        (job,) = finding.jobs
        assert finding.blocks
        assert pinned[job]
        assert len(finding.requests) >= 2  # the owner whose key it is, and the one who got the block
        (radius,) = blast_radius([lambda: iter(events)], job)
        readers = {(reach.request, reach.key) for reach in radius.reached if reach.how == "loaded"}
        assert readers <= loaded
        assert {request for request, key in loaded if key in radius.keys} <= {request for request, _ in readers}


@pytest.mark.timeout(900)
def test_with_references_the_same_run_has_no_wrong_key_and_no_finding(poison_run: PoisonRun) -> None:
    run = poison_run("pinned")
    assert wrong_keys(run, poison_run("clean")) == set()
    assert replay(run.events(), "closed").findings == []


@pytest.mark.timeout(900)
def test_tokens_stay_right_since_the_damage_is_in_the_store(poison_run: PoisonRun) -> None:
    assert poison_run("poisoned").result["first"] == poison_run("clean").result["first"]


@pytest.mark.timeout(900)
def test_with_fingerprints_every_poisoned_key_is_caught_in_the_act_and_removed(poison_run: PoisonRun) -> None:
    run, right = poison_run("guarded"), stored(poison_run("clean"))
    events = run.events()
    caught = [event for event in events if isinstance(event, ev.PoisonCaught)]
    assert caught, "the run was not slow enough to poison a key"
    assert all(event.removed and event.before != event.after and event.block > 0 for event in caught)
    jobs = {event.job for event in caught}
    told = {event.job for event in events if isinstance(event, ev.RankCompleted) and event.code == "CRC_MISMATCH"}
    assert jobs == told
    lines = [json.loads(line) for line in (run.folder / "failures.jsonl").read_text().splitlines()]
    assert {(line["code"], line["stage"]) for line in lines if line.get("job") in jobs} == {("CRC_MISMATCH", "VERIFY")}

    # What is left in the store is right, and so is everything that was loaded from it.
    held = json.loads((run.folder / "truth.json").read_text())
    assert held
    for key, value in held.items():
        block = torch.frombuffer(bytearray(base64.b64decode(value)[:-TRAILER_BYTES]), dtype=torch.bfloat16).float()
        assert ((block - right[key[:16]]).norm() / right[key[:16]].norm()).item() < WRONG_RELATIVE_ERROR
    assert run.result["first"] == poison_run("clean").result["first"]
