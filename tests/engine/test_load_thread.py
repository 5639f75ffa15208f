"""The receive thread: how it plans with upstream, retries out of the way of others, and always answers.

Upstream's thread, token databases and layouts are real; the store is scripted, because the real one cannot be made to
fail on demand key by key. Real stores are met in `test_load_errors`.
"""

import json
import queue
import threading
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    ChunkedTokenDatabase,
    KeyMetadata,
    LoadSpec,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import KVCacheStoreRecvingThread

from connector.runtime.failure_log import FailureLog
from connector.runtime.rebase import rebase_class
from connector.store.load_thread import LedgerRecvingThread, RankLoad, RecvSetup, TimedRetries, limits_of
from connector.store.recording_store import RecordingStore
from connector.store.stats import LedgerStoreStats
from ledger.blocks import expand
from ledger.settings import parse

BLOCK_TOKENS, BLOCK_BYTES, BASE = 32, 4096, 1 << 20
PATIENCE_S = 30


class ScriptedStore:
    """Answers each key with the next of its scripted answers, and with success where there are none."""

    def __init__(self, script=None):
        self.script = script or {}
        self.calls = []
        self.sizes = {}

    def batch_get_into_multi_buffers(self, keys, addrs, sizes):
        self.calls.append(list(keys))
        answers = []
        for key, size in zip(keys, sizes, strict=True):
            scripted = self.script.get(key.rsplit("@", 1)[-1], [])
            answer = scripted.pop(0) if scripted else sum(size)
            if isinstance(answer, BaseException):
                raise answer
            answers.append(answer)
        return answers

    def get_size(self, key):
        return self.sizes.get(key.rsplit("@", 1)[-1], -704)


class Receiver:
    """A receive thread of the plugin with its store, and all that it reports."""

    def __init__(self, store, groups=1, budget=None, masks=None, **settings):
        self.reports = []
        self.lines = []
        self.answered = threading.Semaphore(0)
        self.queue = queue.Queue()
        databases = []
        for group in range(groups):
            metadata = KeyMetadata("m", tp_rank=0, pcp_rank=0, dcp_rank=0, pp_rank=0, group_id=group)
            database = ChunkedTokenDatabase(metadata, BLOCK_TOKENS)
            database.set_kv_caches_base_addr([BASE * (group + 1)])
            database.set_block_len([BLOCK_BYTES])
            databases.append(database)
        coordinator = SimpleNamespace(
            load_mask=lambda hashes, tokens: masks or [[True] * (tokens // BLOCK_TOKENS)] * groups
        )
        self.thread = KVCacheStoreRecvingThread(
            RecordingStore(store, 0, None),
            coordinator,  # type: ignore[arg-type]
            databases,
            BLOCK_TOKENS,
            0,
            threading.Event(),
            disk_offload_buffer_budget_bytes=budget,
            request_queue=self.queue,
            is_hma_required=groups > 1,
        )
        self.retries = TimedRetries(self.queue)
        self.failures = FailureLog("engine", self.lines.append)
        setup = RecvSetup(
            rank=0,
            kv_groups=tuple(range(groups)),
            limits=limits_of(parse(settings), self.thread),
            name=str,
            report=self._reported,
            failures=self.failures,
            retries=self.retries,
        )
        rebase_class(self.thread, LedgerRecvingThread).open(setup)
        self.thread.start()

    def _reported(self, request, report):
        self.reports.append(report)
        self.answered.release()

    def load(self, request, blocks, load=0, cached=0, queued=None):
        """Queue a load of `blocks` (one list for each group)."""
        tokens = len(blocks[0]) * BLOCK_TOKENS
        req_meta = ReqMeta(
            req_id=request,
            token_len_chunk=0,
            block_ids=tuple(blocks),
            block_hashes=[f"{request}{number}".encode() for number in range(len(blocks[0]))],
            load_spec=LoadSpec(cached, tokens, True, token_len=tokens),
        )
        req_meta.kvledger_load = queued = queued or RankLoad(request, load)  # type: ignore[attr-defined]
        self.queue.put(req_meta)
        return queued

    def wait(self, count=1):
        """Wait until `count` loads more were answered, and return all reports."""
        for _ in range(count):
            assert self.answered.acquire(timeout=PATIENCE_S)
        return self.reports

    def finished(self):
        """Requests whose load vLLM counts as finished, once the queue counts all as done."""
        self.queue.join()
        return self.thread.get_and_clear_finished_requests()


def key(request, number):
    """The hash in the key of a request's block."""
    return f"{request}{number}".encode().hex()


def test_a_load_is_planned_by_upstream_and_asks_for_every_block_once():
    store = ScriptedStore()
    receiver = Receiver(store)
    receiver.load("a", [[5, 6, 7]], load=3)
    (report,) = receiver.wait()
    assert (report.load, report.rank, report.outcome, report.retries) == (3, 0, "loaded", 0)
    assert [[each.rsplit("@", 1)[-1] for each in call] for call in store.calls] == [[key("a", n) for n in range(3)]]
    assert receiver.finished() == {"a"}
    assert not receiver.thread.get_and_clear_block_ids_with_load_errors()
    assert not receiver.lines


def test_every_block_of_a_failed_load_is_reported_to_vllm_with_code_and_stage_of_each_failure():
    receiver = Receiver(ScriptedStore({key("a", 1): [-704], key("a", 3): [-601]}))
    receiver.load("a", [[5, 6, 7, 8]])
    (report,) = receiver.wait()
    failure = report.failure
    assert (report.outcome, failure.code, failure.stage, failure.raw) == (
        "failed",
        "BLOCK_NOT_FOUND",
        "STORE_GET",
        "-704",
    )
    assert [(each.code, list(expand(each.blocks))) for each in report.failures] == [
        ("BLOCK_NOT_FOUND", [(0, 6)]),
        ("PERMISSION_DENIED", [(0, 8)]),
    ]
    assert receiver.finished() == {"a"}
    assert receiver.thread.get_and_clear_block_ids_with_load_errors() == {5, 6, 7, 8}
    lines = [json.loads(line) for line in receiver.lines]
    assert [(line["code"], line["request"], line["failed_blocks"]) for line in lines] == [
        ("BLOCK_NOT_FOUND", "a", 1),
        ("PERMISSION_DENIED", "a", 1),
    ]


def test_a_load_that_waits_for_its_retry_holds_up_no_load_behind_it():
    store = ScriptedStore({key("a", 0): [-900]})
    receiver = Receiver(store, load_retry_backoff_ms=60_000, load_deadline_s=1000.0)
    load = receiver.load("a", [[5]], load=0)
    receiver.load("b", [[6]], load=1)
    assert [report.load for report in receiver.wait()] == [1]
    assert receiver.queue.unfinished_tasks == 1  # the load that waits; closing the store waits for it
    load.cancelled = True
    receiver.retries.bring_cancelled()
    assert [report.load for report in receiver.wait()] == [1, 0]
    assert receiver.finished() == {"a", "b"}


def test_a_retry_that_succeeds_leaves_no_failure():
    receiver = Receiver(ScriptedStore({key("a", 1): [-900, -703]}), load_retry_backoff_ms=1)
    receiver.load("a", [[5, 6]])
    (report,) = receiver.wait()
    assert (report.outcome, report.retries) == ("loaded", 2)
    assert not receiver.lines
    stats = LedgerStoreStats()
    receiver.failures.move_to(stats)
    assert stats.reduce() == {"load_retries": 2}


def test_a_load_of_a_request_that_ended_is_not_tried_again():
    store = ScriptedStore({key("a", 0): [-900]})
    receiver = Receiver(store, load_retry_backoff_ms=60_000, load_deadline_s=1000.0)
    load = receiver.load("a", [[5]])
    receiver.load("b", [[6]], load=1)
    receiver.wait()
    load.cancelled = True
    receiver.retries.bring_cancelled()
    assert [report.outcome for report in receiver.wait()] == ["loaded", "failed"]
    assert len(store.calls) == 2
    assert receiver.finished() == {"a", "b"}


def test_a_load_whose_request_ends_during_its_call_is_not_tried_again():
    loads = []

    class EndsMeanwhile(ScriptedStore):
        def batch_get_into_multi_buffers(self, keys, addrs, sizes):
            loads[0].cancelled = True
            return super().batch_get_into_multi_buffers(keys, addrs, sizes)

    store = EndsMeanwhile({key("a", 0): [-900]})
    receiver = Receiver(store, load_retry_backoff_ms=60_000, load_deadline_s=1000.0)
    loads.append(RankLoad("a", 0))
    receiver.load("a", [[5]], queued=loads[0])
    (report,) = receiver.wait()
    assert (report.outcome, len(store.calls)) == ("failed", 1)


class CancelledMeanwhile(RankLoad):
    """Is cancelled by the engine's thread just after a receive thread has looked at it for the first time."""

    reads, value = 0, False

    @property
    def cancelled(self):
        was = self.value
        self.reads += 1
        self.value = self.value or self.reads == 1
        return was

    @cancelled.setter
    def cancelled(self, value):
        self.value = value


def test_a_load_that_is_cancelled_while_it_is_put_back_stays_cancelled():
    receive_queue = queue.Queue()
    receive_queue.put(None)  # the item that the load is until it comes back
    receive_queue.get()
    retries = TimedRetries(receive_queue)
    load = CancelledMeanwhile("a")
    retries.put_back(load, retries.now_s() + 1000.0)
    retries.bring_cancelled()
    assert receive_queue.get(timeout=PATIENCE_S) is load


def test_a_load_whose_request_ended_in_the_queue_is_not_begun():
    store = ScriptedStore()
    receiver = Receiver(store)
    load = RankLoad("a", 0)
    load.cancelled = True
    receiver.load("a", [[5]], queued=load)
    (report,) = receiver.wait()
    assert (report.outcome, report.failure.code, store.calls) == ("failed", "CANCELLED", [])
    assert receiver.finished() == {"a"}


def test_upstreams_log_of_tiers_is_kept(monkeypatch):
    monkeypatch.setenv("VLLM_MOONCAKE_STORE_TIER_LOG", "1")
    asked = []

    class Tiers(ScriptedStore):
        def batch_get_replica_desc(self, keys):
            asked.extend(keys)
            return {}

    receiver = Receiver(Tiers())
    receiver.load("a", [[5]])
    receiver.wait()
    assert [each.rsplit("@", 1)[-1] for each in asked] == [key("a", 0)]


def test_closing_ends_what_waits_and_what_would_wait():
    store = ScriptedStore({key("a", 0): [-900], key("b", 0): [-900]})
    receiver = Receiver(store, load_retry_backoff_ms=60_000, load_deadline_s=1000.0)
    receiver.load("a", [[5]], load=0)
    receiver.load("c", [[7]], load=2)
    receiver.wait()
    receiver.retries.close()
    receiver.wait()
    receiver.load("b", [[6]], load=1)
    assert {report.load: report.outcome for report in receiver.wait()} == {0: "failed", 1: "failed", 2: "loaded"}
    assert receiver.finished() == {"a", "b", "c"}


def test_with_several_groups_the_request_is_reported_and_no_block():
    receiver = Receiver(ScriptedStore({key("a", 1): [-704]}), groups=2)
    receiver.load("a", [[5, 6], [7, 8]])
    (report,) = receiver.wait()
    assert receiver.finished() == {"a"}
    assert receiver.thread.get_and_clear_failed_requests() == {"a"}
    assert not receiver.thread.get_and_clear_block_ids_with_load_errors()
    assert report.invalid == ()
    assert {group for group, _ in expand(report.failure.blocks)} == {0}


def test_a_load_that_upstream_left_holes_in_is_reported_as_a_request():
    # A sliding window: the first two blocks of the range are not loaded, so no prefix of it may count.
    receiver = Receiver(
        ScriptedStore({key("a", 3): [-704]}), masks=[[False, False, True, True]], load_rollback="suffix"
    )
    receiver.load("a", [[0, 0, 7, 8]])
    receiver.wait()
    assert receiver.finished() == {"a"}
    assert receiver.thread.get_and_clear_failed_requests() == {"a"}
    assert not receiver.thread.get_and_clear_block_ids_with_load_errors()


def test_a_load_with_nothing_for_this_rank_is_loaded():
    # Upstream divides by the number of keys here, and the request would wait for ever.
    store = ScriptedStore()
    receiver = Receiver(store, masks=[[False, False]])
    receiver.load("a", [[5, 6]])
    (report,) = receiver.wait()
    assert report.outcome == "loaded"
    assert not store.calls
    assert receiver.finished() == {"a"}


def test_a_load_that_upstream_cannot_plan_fails_with_all_its_blocks():
    receiver = Receiver(ScriptedStore())
    broken = ReqMeta(
        req_id="a",
        token_len_chunk=0,
        block_ids=([7, 8, 9],),
        block_hashes=[b"only one"],
        load_spec=LoadSpec(BLOCK_TOKENS, 3 * BLOCK_TOKENS, True, token_len=3 * BLOCK_TOKENS),
    )
    broken.kvledger_load = RankLoad("a", 0)  # type: ignore[attr-defined]
    receiver.queue.put(broken)
    (report,) = receiver.wait()
    assert (report.outcome, report.failure.code, report.failure.exception) == ("failed", "UNKNOWN", "AssertionError")
    assert receiver.finished() == {"a"}
    assert receiver.thread.get_and_clear_block_ids_with_load_errors() == {8, 9}


def test_a_load_larger_than_the_staging_buffer_is_split_and_goes_on_behind_a_call_that_failed():
    # Upstream stops at the first call that fails, and the blocks of the others are neither loaded nor reported.
    budget = 5 * (BLOCK_BYTES + 8192)
    store = ScriptedStore({key("a", 0): [ConnectionResetError(104, "reset")]})
    receiver = Receiver(store, budget=budget, load_max_retries=0)
    receiver.load("a", [list(range(1, 13))])
    (report,) = receiver.wait()
    assert len(store.calls) > 2
    assert sum(map(len, store.calls)) == 12
    assert report.failure.exception == "ConnectionResetError"
    assert report.failure.code == "PEER_UNREACHABLE"
    assert len(list(expand(report.failure.blocks))) == len(store.calls[0])
    assert receiver.thread.get_and_clear_block_ids_with_load_errors() == set(range(1, 13))


def test_a_value_longer_or_shorter_than_its_block_is_of_another_layout():
    # The store's own codes for both say other things as well.
    store = ScriptedStore({key("a", 0): [-600], key("a", 1): [-800], key("a", 2): [-800]})
    store.sizes = {key("a", 0): 2 * BLOCK_BYTES, key("a", 1): BLOCK_BYTES // 2, key("a", 2): BLOCK_BYTES}
    receiver = Receiver(store, load_max_retries=0)
    receiver.load("a", [[5, 6, 7]])
    (report,) = receiver.wait()
    assert [(each.code, each.raw) for each in report.failures] == [
        ("VERSION_MISMATCH", "-600: the value has 8192 bytes, the block 4096"),
        ("VERSION_MISMATCH", "-800: the value has 2048 bytes, the block 4096"),
        ("TRANSFER_FAILED", "-800"),
    ]


def test_a_report_that_raises_still_ends_the_wait_of_the_request():
    receiver = Receiver(ScriptedStore())

    def broken(report):
        raise RuntimeError("the receiver is closed")

    receiver.thread._setup = receiver.thread._setup._replace(report=broken)
    receiver.load("a", [[5]])
    assert receiver.finished() == {"a"}


@pytest.mark.parametrize("rollback", ["request", "suffix"])
def test_blocks_are_reported_as_the_rollback_says(rollback):
    receiver = Receiver(ScriptedStore({key("a", 2): [-704]}), load_rollback=rollback)
    receiver.load("a", [[5, 6, 7, 8]])
    (report,) = receiver.wait()
    expected = {5, 6, 7, 8} if rollback == "request" else {7, 8}
    assert {block for _, block in expand(report.invalid)} == expected
    assert receiver.finished() == {"a"}
    assert receiver.thread.get_and_clear_block_ids_with_load_errors() == expected
