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

from connector.runtime.failures import FailureLog, LedgerStoreStats
from connector.runtime.rebase import rebase_class
from connector.store.load_thread import LedgerRecvingThread, Loader, RunningLoad, Ticket, TimedRetries, limits_of
from connector.store.recording_store import RecordingStore
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


class Desk:
    """A receive thread of the plugin with its store, and everything that it tells."""

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
        loader = Loader(
            rank=0,
            kv_groups=tuple(range(groups)),
            limits=limits_of(parse(settings), self.thread),
            name=str,
            report=self._reported,
            failures=self.failures,
            retries=self.retries,
        )
        rebase_class(self.thread, LedgerRecvingThread).open(loader)
        self.thread.start()

    def _reported(self, request, report):
        self.reports.append(report)
        self.answered.release()

    def load(self, request, blocks, load=0, cached=0, ticket=None):
        """Queue a load of `blocks` (one list for each group)."""
        tokens = len(blocks[0]) * BLOCK_TOKENS
        req_meta = ReqMeta(
            req_id=request,
            token_len_chunk=0,
            block_ids=tuple(blocks),
            block_hashes=[f"{request}{number}".encode() for number in range(len(blocks[0]))],
            load_spec=LoadSpec(cached, tokens, True, token_len=tokens),
        )
        req_meta.kvledger_load = ticket = ticket or Ticket(load)  # type: ignore[attr-defined]
        self.queue.put(req_meta)
        return ticket

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
    desk = Desk(store)
    desk.load("a", [[5, 6, 7]], load=3)
    (report,) = desk.wait()
    assert (report.load, report.rank, report.outcome, report.retries) == (3, 0, "loaded", 0)
    assert [[each.rsplit("@", 1)[-1] for each in call] for call in store.calls] == [[key("a", n) for n in range(3)]]
    assert desk.finished() == {"a"}
    assert not desk.thread.get_and_clear_block_ids_with_load_errors()
    assert not desk.lines


def test_every_block_of_a_failed_load_is_reported_to_vllm_with_code_and_stage_of_each_failure():
    desk = Desk(ScriptedStore({key("a", 1): [-704], key("a", 3): [-601]}))
    desk.load("a", [[5, 6, 7, 8]])
    (report,) = desk.wait()
    assert (report.outcome, report.code, report.stage, report.raw) == ("failed", "BLOCK_NOT_FOUND", "STORE_GET", "-704")
    assert [(each.code, list(expand(each.blocks))) for each in report.failures] == [
        ("BLOCK_NOT_FOUND", [(0, 6)]),
        ("PERMISSION_DENIED", [(0, 8)]),
    ]
    assert desk.finished() == {"a"}
    assert desk.thread.get_and_clear_block_ids_with_load_errors() == {5, 6, 7, 8}
    lines = [json.loads(line) for line in desk.lines]
    assert [(line["code"], line["request"], line["failed_blocks"]) for line in lines] == [
        ("BLOCK_NOT_FOUND", "a", 1),
        ("PERMISSION_DENIED", "a", 1),
    ]


def test_a_load_that_waits_for_its_retry_holds_up_no_load_behind_it():
    store = ScriptedStore({key("a", 0): [-900]})
    desk = Desk(store, load_retry_backoff_ms=60_000, load_deadline_s=1000.0)
    ticket = desk.load("a", [[5]], load=0)
    desk.load("b", [[6]], load=1)
    assert [report.load for report in desk.wait()] == [1]
    assert desk.queue.unfinished_tasks == 1  # the load that waits; closing the store waits for it
    ticket.cancelled = True
    desk.retries.bring_cancelled()
    assert [report.load for report in desk.wait()] == [1, 0]
    assert desk.finished() == {"a", "b"}


def test_a_retry_that_succeeds_leaves_no_failure():
    desk = Desk(ScriptedStore({key("a", 1): [-900, -703]}), load_retry_backoff_ms=1)
    desk.load("a", [[5, 6]])
    (report,) = desk.wait()
    assert (report.outcome, report.retries) == ("loaded", 2)
    assert not desk.lines
    stats = LedgerStoreStats()
    desk.failures.move_to(stats)
    assert stats.reduce() == {"load_retries": 2}


def test_a_load_of_a_request_that_ended_is_not_tried_again():
    store = ScriptedStore({key("a", 0): [-900]})
    desk = Desk(store, load_retry_backoff_ms=60_000, load_deadline_s=1000.0)
    ticket = desk.load("a", [[5]])
    desk.load("b", [[6]], load=1)
    desk.wait()
    ticket.cancelled = True
    desk.retries.bring_cancelled()
    assert [report.outcome for report in desk.wait()] == ["loaded", "failed"]
    assert len(store.calls) == 2
    assert desk.finished() == {"a", "b"}


def test_a_load_whose_request_ends_during_its_call_is_not_tried_again():
    tickets = []

    class EndsMeanwhile(ScriptedStore):
        def batch_get_into_multi_buffers(self, keys, addrs, sizes):
            tickets[0].cancelled = True
            return super().batch_get_into_multi_buffers(keys, addrs, sizes)

    store = EndsMeanwhile({key("a", 0): [-900]})
    desk = Desk(store, load_retry_backoff_ms=60_000, load_deadline_s=1000.0)
    tickets.append(Ticket(0))
    desk.load("a", [[5]], ticket=tickets[0])
    (report,) = desk.wait()
    assert (report.outcome, len(store.calls)) == ("failed", 1)


class CancelledMeanwhile(Ticket):
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
    load = RunningLoad("a", "a", CancelledMeanwhile(), None)  # type: ignore[arg-type]
    retries.put_back(load, retries.now_s() + 1000.0)
    retries.bring_cancelled()
    assert receive_queue.get(timeout=PATIENCE_S) is load


def test_a_load_whose_request_ended_in_the_queue_is_not_begun():
    store = ScriptedStore()
    desk = Desk(store)
    ticket = Ticket(0)
    ticket.cancelled = True
    desk.load("a", [[5]], ticket=ticket)
    (report,) = desk.wait()
    assert (report.outcome, report.code, store.calls) == ("failed", "CANCELLED", [])
    assert desk.finished() == {"a"}


def test_upstreams_log_of_tiers_is_kept(monkeypatch):
    monkeypatch.setenv("VLLM_MOONCAKE_STORE_TIER_LOG", "1")
    asked = []

    class Tiers(ScriptedStore):
        def batch_get_replica_desc(self, keys):
            asked.extend(keys)
            return {}

    desk = Desk(Tiers())
    desk.load("a", [[5]])
    desk.wait()
    assert [each.rsplit("@", 1)[-1] for each in asked] == [key("a", 0)]


def test_closing_ends_what_waits_and_what_would_wait():
    store = ScriptedStore({key("a", 0): [-900], key("b", 0): [-900]})
    desk = Desk(store, load_retry_backoff_ms=60_000, load_deadline_s=1000.0)
    desk.load("a", [[5]], load=0)
    desk.load("c", [[7]], load=2)
    desk.wait()
    desk.retries.close()
    desk.wait()
    desk.load("b", [[6]], load=1)
    assert {report.load: report.outcome for report in desk.wait()} == {0: "failed", 1: "failed", 2: "loaded"}
    assert desk.finished() == {"a", "b", "c"}


def test_with_several_groups_the_request_is_reported_and_no_block():
    desk = Desk(ScriptedStore({key("a", 1): [-704]}), groups=2)
    desk.load("a", [[5, 6], [7, 8]])
    (report,) = desk.wait()
    assert desk.finished() == {"a"}
    assert desk.thread.get_and_clear_failed_requests() == {"a"}
    assert not desk.thread.get_and_clear_block_ids_with_load_errors()
    assert report.invalid == ()
    assert {group for group, _ in expand(report.blocks)} == {0}


def test_a_load_that_upstream_left_holes_in_is_reported_as_a_request():
    # A sliding window: the first two blocks of the range are not loaded, so no prefix of it may count.
    desk = Desk(ScriptedStore({key("a", 3): [-704]}), masks=[[False, False, True, True]], load_rollback="suffix")
    desk.load("a", [[0, 0, 7, 8]])
    desk.wait()
    assert desk.finished() == {"a"}
    assert desk.thread.get_and_clear_failed_requests() == {"a"}
    assert not desk.thread.get_and_clear_block_ids_with_load_errors()


def test_a_load_with_nothing_for_this_rank_is_loaded():
    # Upstream divides by the number of keys here, and the request would wait for ever.
    store = ScriptedStore()
    desk = Desk(store, masks=[[False, False]])
    desk.load("a", [[5, 6]])
    (report,) = desk.wait()
    assert report.outcome == "loaded"
    assert not store.calls
    assert desk.finished() == {"a"}


def test_a_load_that_upstream_cannot_plan_fails_with_all_its_blocks():
    desk = Desk(ScriptedStore())
    broken = ReqMeta(
        req_id="a",
        token_len_chunk=0,
        block_ids=([7, 8, 9],),
        block_hashes=[b"only one"],
        load_spec=LoadSpec(BLOCK_TOKENS, 3 * BLOCK_TOKENS, True, token_len=3 * BLOCK_TOKENS),
    )
    broken.kvledger_load = Ticket(0)  # type: ignore[attr-defined]
    desk.queue.put(broken)
    (report,) = desk.wait()
    assert (report.outcome, report.code, report.exception) == ("failed", "UNKNOWN", "AssertionError")
    assert desk.finished() == {"a"}
    assert desk.thread.get_and_clear_block_ids_with_load_errors() == {8, 9}


def test_a_load_larger_than_the_staging_buffer_is_split_and_goes_on_behind_a_call_that_failed():
    # Upstream stops at the first call that fails, and the blocks of the others are neither loaded nor reported.
    budget = 5 * (BLOCK_BYTES + 8192)
    store = ScriptedStore({key("a", 0): [ConnectionResetError(104, "reset")]})
    desk = Desk(store, budget=budget, load_max_retries=0)
    desk.load("a", [list(range(1, 13))])
    (report,) = desk.wait()
    assert len(store.calls) > 2
    assert sum(map(len, store.calls)) == 12
    assert report.exception == "ConnectionResetError"
    assert report.code == "PEER_UNREACHABLE"
    assert len(list(expand(report.blocks))) == len(store.calls[0])
    assert desk.thread.get_and_clear_block_ids_with_load_errors() == set(range(1, 13))


def test_a_value_longer_or_shorter_than_its_block_is_of_another_layout():
    # The store's own codes for both say other things as well.
    store = ScriptedStore({key("a", 0): [-600], key("a", 1): [-800], key("a", 2): [-800]})
    store.sizes = {key("a", 0): 2 * BLOCK_BYTES, key("a", 1): BLOCK_BYTES // 2, key("a", 2): BLOCK_BYTES}
    desk = Desk(store, load_max_retries=0)
    desk.load("a", [[5, 6, 7]])
    (report,) = desk.wait()
    assert [(each.code, each.raw) for each in report.failures] == [
        ("VERSION_MISMATCH", "-600: the value has 8192 bytes, the block 4096"),
        ("VERSION_MISMATCH", "-800: the value has 2048 bytes, the block 4096"),
        ("TRANSFER_FAILED", "-800"),
    ]


def test_a_report_that_raises_still_ends_the_wait_of_the_request():
    desk = Desk(ScriptedStore())

    def broken(report):
        raise RuntimeError("the desk is closed")

    desk.thread._loader = desk.thread._loader._replace(report=broken)
    desk.load("a", [[5]])
    assert desk.finished() == {"a"}


@pytest.mark.parametrize("rollback", ["request", "suffix"])
def test_blocks_are_reported_as_the_rollback_says(rollback):
    desk = Desk(ScriptedStore({key("a", 2): [-704]}), load_rollback=rollback)
    desk.load("a", [[5, 6, 7, 8]])
    (report,) = desk.wait()
    expected = {5, 6, 7, 8} if rollback == "request" else {7, 8}
    assert {block for _, block in expand(report.invalid)} == expected
    assert desk.finished() == {"a"}
    assert desk.thread.get_and_clear_block_ids_with_load_errors() == expected
