"""A load counts whole or not at all, whatever the store answers: every combination of outcomes, batches and limits."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.runtime.failure_log import failure_line
from connector.runtime.failures import Failure
from connector.store.loader import Limits, LoadPasses, Target, get_from, run_pass
from ledger.blocks import expand
from ledger.codes import CODES, MOONCAKE, KVCacheErrorCode, Stage

BLOCK_TOKENS = 32
BLOCK_BYTES = 512

FINAL, RETRYABLE = -704, -900


class ScriptedStore:
    """A store that answers as it was told: for each key a list of answers, the last of which is repeated.

    A fake, because the real store cannot be made to give every combination of answers on demand.
    """

    def __init__(self, script):
        self.script = {key: list(answers) for key, answers in script.items()}
        self.asked = []
        self.calls = 0

    def batch_get_into_multi_buffers(self, keys, addrs, sizes):
        self.calls += 1
        self.asked.extend(keys)
        answers = []
        for key, size in zip(keys, sizes, strict=True):
            script = self.script[key]
            answer = script.pop(0) if len(script) > 1 else script[0]
            if isinstance(answer, BaseException):
                raise answer
            answers.append(sum(size) if answer == "ok" else answer)
        return answers


class Clock:
    """Virtual time: it moves when the driver waits for a pass to be due, and with every call to the store."""

    def __init__(self, call_s=0.0):
        self.now_s = 100.0
        self.call_s = call_s

    def __call__(self):
        self.now_s += self.call_s
        return self.now_s


def targets_of(blocks, first_block=0, group=0):
    return [
        Target(
            f"key{group}.{index}",
            group,
            block=1000 * group + 10 + index,
            start_token=(first_block + index) * BLOCK_TOKENS,
            end_token=(first_block + index + 1) * BLOCK_TOKENS,
            addresses=[index],
            sizes=[BLOCK_BYTES],
            staging_bytes=BLOCK_BYTES,
        )
        for index in range(blocks)
    ]


def load(targets, script, limits, first_token=0, clock=None):
    clock = clock or Clock()
    store = ScriptedStore(script)
    loading = LoadPasses(targets, first_token, limits, clock.now_s)
    passes = 0
    while not loading.done:
        clock.now_s = max(clock.now_s, loading.due_s or 0.0)
        run_pass(loading, get_from(store), clock)
        passes += 1
        assert passes <= limits.max_retries + 1
    return loading.result(), store, clock


def first(result):
    _, failure = result.failed[0]
    return failure


answers = st.one_of(
    st.just("ok"),
    st.sampled_from(sorted(MOONCAKE)),
    st.integers(min_value=-99999, max_value=-1),
    st.integers(min_value=0, max_value=2 * BLOCK_BYTES),
    st.sampled_from([TimeoutError(), ConnectionResetError(), MemoryError(), ValueError("?"), RuntimeError()]),
)


@st.composite
def loads(draw):
    groups = draw(st.integers(1, 2))
    first_block = draw(st.integers(0, 3))
    targets = [
        target
        for group in range(groups)
        for target in targets_of(draw(st.integers(1, 6)), first_block, group)
        if draw(st.integers(0, 9)) > 0  # now and then a block that upstream leaves out
    ]
    script = {target.key: draw(st.lists(answers, min_size=1, max_size=3)) for target in targets}
    limits = Limits(
        max_retries=draw(st.integers(0, 3)),
        deadline_s=draw(st.sampled_from([0.0, 0.2, 10.0])),
        backoff_s=draw(st.sampled_from([0.0, 0.1])),
        rollback=draw(st.sampled_from(["request", "suffix"])),
        batch_bytes=draw(st.sampled_from([0, BLOCK_BYTES, 3 * BLOCK_BYTES])),
        key_bytes=draw(st.sampled_from([0, 0, BLOCK_BYTES - 1])),
    )
    targets = draw(st.permutations(targets))
    return targets, script, limits, first_block * BLOCK_TOKENS


@given(loads())
@settings(max_examples=500)
def test_every_failure_has_a_stable_code_and_says_what_was_answered(case):
    targets, script, limits, first_token = case
    result, _, _ = load(targets, script, limits, first_token)
    for target, failure in result.failed:
        assert isinstance(failure.code, KVCacheErrorCode)
        assert isinstance(failure.stage, Stage)
        assert failure.raw
        assert target in targets


@given(loads())
@settings(max_examples=500)
def test_after_any_failure_no_block_of_the_load_counts_or_only_the_proven_prefix(case):
    targets, script, limits, first_token = case
    result, _, _ = load(targets, script, limits, first_token)
    trusted = {(target.group, target.block) for target in targets} - set(result.invalid)
    failed = {(target.group, target.block) for target, _ in result.failed}
    assert result.loaded == (not failed)
    assert not failed & trusted
    if not failed:
        assert not result.invalid
    elif limits.rollback == "request" or result.whole_request:
        assert not trusted
        assert result.kept_tokens == first_token
    else:
        # The proven prefix: every token of it is local, or in a block that was loaded.
        covered = {
            token
            for target in targets
            if (target.group, target.block) in trusted
            for token in range(target.start_token, target.end_token)
        }
        assert set(range(first_token, result.kept_tokens)) == covered


@given(loads())
@settings(max_examples=500)
def test_vllm_is_told_of_blocks_only_when_all_before_the_first_one_named_is_proven(case):
    targets, script, limits, first_token = case
    result, _, _ = load(targets, script, limits, first_token)
    if result.loaded or result.whole_request:
        return
    assert len({target.group for target in targets}) == 1
    first_named = min(target.start_token for target in targets if (target.group, target.block) in result.invalid)
    assert first_named == result.kept_tokens


@given(loads())
@settings(max_examples=500)
def test_every_block_is_tried_also_behind_a_batch_that_failed(case):
    targets, script, limits, first_token = case
    result, store, _ = load(targets, script, limits, first_token)
    too_big = {target.key for target in targets if limits.key_bytes and target.staging_bytes > limits.key_bytes}
    if not any(isinstance(answer, BaseException) for answers in script.values() for answer in answers):
        assert set(store.asked) == {target.key for target in targets} - too_big
    assert {target.key for target, failure in result.failed if failure.code == "KV_OOM"} >= too_big


@given(loads())
@settings(max_examples=500)
def test_only_what_may_heal_is_tried_again_and_never_beyond_the_bound(case):
    targets, script, limits, first_token = case
    result, store, clock = load(targets, script, limits, first_token)
    assert result.retries <= limits.max_retries
    assert clock.now_s - 100.0 <= limits.deadline_s + limits.backoff_s * 2**limits.max_retries
    for target in targets:
        assert store.asked.count(target.key) <= limits.max_retries + 1
    for target, failure in result.failed:
        if not CODES[failure.code].retryable:
            assert store.asked.count(target.key) <= failure.tries


@given(loads())
@settings(max_examples=200)
def test_the_groups_of_a_result_name_every_failed_block_once(case):
    targets, script, limits, first_token = case
    result, _, _ = load(targets, script, limits, first_token)
    grouped = [pair for group in result.by_cause() for pair in expand(group.blocks)]
    assert sorted(grouped) == sorted({(target.group, target.block) for target, _ in result.failed})
    assert sum(group.keys for group in result.by_cause()) == len(result.failed)
    if result.failed:
        assert result.by_cause()[0].code == first(result).code
        assert result.failed[0][0].start_token == min(target.start_token for target, _ in result.failed)


@pytest.mark.parametrize("batch_bytes", [0, 2 * BLOCK_BYTES])
@pytest.mark.parametrize("rollback", ["request", "suffix"])
def test_every_combination_of_outcomes_of_five_blocks_keeps_both_invariants(rollback, batch_bytes):
    targets = targets_of(5)
    limits = Limits(max_retries=1, rollback=rollback, batch_bytes=batch_bytes)
    outcomes = (["ok"], [FINAL], [RETRYABLE, "ok"], [RETRYABLE])
    for scripts in itertools.product(outcomes, repeat=5):
        script = {target.key: script for target, script in zip(targets, scripts, strict=True)}
        result, _, _ = load(targets, script, limits)
        arrives = [script[-1] == "ok" for script in scripts]
        assert result.loaded == all(arrives)
        assert all(failure.code in CODES for _, failure in result.failed)
        kept = arrives.index(False) if rollback == "suffix" and not all(arrives) else 0
        if not all(arrives):
            assert result.invalid == tuple((0, target.block) for target in targets[kept:])
            assert result.kept_tokens == kept * BLOCK_TOKENS


def ok_but(targets, **others):
    return {target.key: others.get(target.key.replace("key0.", "block"), ["ok"]) for target in targets}


def test_a_load_that_arrives_counts_whole():
    targets = targets_of(4)
    result, store, _ = load(targets, ok_but(targets), Limits())
    assert result.loaded
    assert result.invalid == ()
    assert result.kept_tokens == 4 * BLOCK_TOKENS
    assert result.bytes == 4 * BLOCK_BYTES
    assert (store.calls, result.retries) == (1, 0)


def test_an_empty_load_is_done_at_once():
    loading = LoadPasses([], 64, Limits(), 0.0)
    assert loading.done
    assert loading.result().loaded
    assert loading.result().kept_tokens == 64


def test_a_retry_asks_for_what_is_missing_and_nothing_else():
    targets = targets_of(4)
    result, store, _ = load(targets, ok_but(targets, block2=[RETRYABLE, "ok"]), Limits())
    assert result.loaded
    assert store.asked == ["key0.0", "key0.1", "key0.2", "key0.3", "key0.2"]
    assert result.retries == 1


def test_the_pause_before_a_retry_doubles():
    targets = targets_of(1)
    limits = Limits(max_retries=3, backoff_s=1.0, deadline_s=100.0)
    result, _, clock = load(targets, ok_but(targets, block0=[RETRYABLE]), limits)
    assert clock.now_s == 100.0 + 1.0 + 2.0 + 4.0
    assert result.gave_up == "retries"
    assert first(result).tries == 4


def test_no_retry_begins_after_the_deadline():
    targets = targets_of(1)
    limits = Limits(max_retries=100, backoff_s=1.0, deadline_s=10.0)
    result, _, clock = load(targets, ok_but(targets, block0=[RETRYABLE]), limits)
    assert clock.now_s == 107.0
    assert result.gave_up == "deadline"


def test_a_load_that_waited_beyond_its_deadline_is_tried_once():
    targets = targets_of(2)
    loading = LoadPasses(targets, 0, Limits(deadline_s=1.0), 0.0)
    run_pass(loading, get_from(ScriptedStore(ok_but(targets))), lambda: 50.0)
    assert loading.result().loaded


def test_a_final_failure_leaves_no_reason_to_retry_the_rest_of_a_load_that_rolls_back_whole():
    targets = targets_of(3)
    result, store, _ = load(targets, ok_but(targets, block0=[FINAL], block1=[RETRYABLE]), Limits())
    assert store.calls == 1
    assert [failure.code for _, failure in result.failed] == ["BLOCK_NOT_FOUND", "PEER_UNREACHABLE"]


def test_what_stands_before_a_final_failure_is_retried_when_a_prefix_is_kept():
    targets = targets_of(3)
    script = ok_but(targets, block0=[RETRYABLE, "ok"], block1=[FINAL], block2=[RETRYABLE])
    result, store, _ = load(targets, script, Limits(rollback="suffix"))
    assert store.asked == ["key0.0", "key0.1", "key0.2", "key0.0"]
    assert result.kept_tokens == BLOCK_TOKENS
    assert result.invalid == ((0, 11), (0, 12))


def test_a_load_with_holes_that_upstream_left_is_told_as_a_request():
    targets = [targets_of(5)[index] for index in (0, 3, 4)]
    result, _, _ = load(targets, ok_but(targets, block4=[FINAL]), Limits(rollback="suffix"))
    assert result.whole_request
    assert result.kept_tokens == 0
    assert result.invalid == ((0, 10), (0, 13), (0, 14))


def test_a_block_kept_in_shards_is_loaded_when_all_of_its_shards_are():
    shards = [targets_of(1)[0]._replace(key=f"shard{index}") for index in range(4)]
    result, _, _ = load(shards, {"shard0": ["ok"], "shard1": ["ok"], "shard2": [FINAL], "shard3": ["ok"]}, Limits())
    assert result.invalid == ((0, 10),)


def test_a_value_of_another_size_was_written_under_another_layout():
    targets = targets_of(2)
    result, _, _ = load(targets, ok_but(targets, block1=[BLOCK_BYTES // 2]), Limits())
    assert (first(result).code, first(result).raw) == ("VERSION_MISMATCH", "256 bytes, expected 512")


def test_an_exception_is_the_outcome_of_its_whole_batch_and_of_no_other():
    targets = targets_of(4)
    limits = Limits(max_retries=0, batch_bytes=2 * BLOCK_BYTES)
    result, store, _ = load(targets, ok_but(targets, block1=[ConnectionResetError(104, "")]), limits)
    assert store.calls == 2
    assert [target.key for target, _ in result.failed] == ["key0.0", "key0.1"]
    assert {(failure.code, failure.raw, failure.exception) for _, failure in result.failed} == {
        ("PEER_UNREACHABLE", "ConnectionResetError 104", "ConnectionResetError")
    }


def test_a_store_that_answers_for_fewer_keys_than_were_asked_for_is_not_believed():
    targets = targets_of(3)
    loading = LoadPasses(targets, 0, Limits(), 0.0)
    run_pass(loading, lambda _: [BLOCK_BYTES], lambda: 0.0)
    result = loading.result()
    assert len(result.invalid) == 3
    assert first(result).raw == "1 answers for 3 keys"


def test_a_rejected_block_is_final_and_named_by_its_stage():
    targets = targets_of(2)
    loading = LoadPasses(targets, 0, Limits(), 0.0)
    run_pass(
        loading,
        lambda _: [BLOCK_BYTES, Failure(KVCacheErrorCode.CRC_MISMATCH, "1 is not 2", Stage.VERIFY)],
        lambda: 0.0,
    )
    failure = first(loading.result())
    assert (failure.code, failure.stage, failure.raw) == ("CRC_MISMATCH", "VERIFY", "1 is not 2")


def test_an_abandoned_load_has_an_outcome_for_every_block():
    targets = targets_of(3)
    loading = LoadPasses(targets, 0, Limits(), 0.0)
    run_pass(loading, get_from(ScriptedStore(ok_but(targets, block1=[RETRYABLE]))), lambda: 0.0)
    loading.abandon(Failure(KVCacheErrorCode.CANCELLED, "shutdown", Stage.STORE_GET))
    result = loading.result()
    assert [(target.key, failure.code) for target, failure in result.failed] == [("key0.1", "PEER_UNREACHABLE")]
    assert len(result.invalid) == 3

    untouched = LoadPasses(targets, 0, Limits(), 0.0)
    untouched.abandon(Failure.of(ValueError("no plan"), Stage.STORE_GET))
    assert {failure.code for _, failure in untouched.result().failed} == {"UNKNOWN"}
    assert len(untouched.result().failed) == 3


def test_a_failure_becomes_a_line_that_carries_all_that_alerts_need():
    targets = targets_of(3)
    result, _, _ = load(targets, ok_but(targets, block1=[FINAL]), Limits())
    line = json.loads(failure_line(result.failure, "engine", request="req-1", load=7, rank=2))
    assert {name: line[name] for name in ("code", "stage", "raw", "raw_name", "request", "load", "rank", "blocks")} == {
        "code": "BLOCK_NOT_FOUND",
        "stage": "STORE_GET",
        "raw": "-704",
        "raw_name": "OBJECT_NOT_FOUND",
        "request": "req-1",
        "load": 7,
        "rank": 2,
        "blocks": [[0, [[11, 11]]]],
    }
    assert line["action"] == CODES[KVCacheErrorCode.BLOCK_NOT_FOUND].action
    assert not load(targets, ok_but(targets), Limits())[0].failure
