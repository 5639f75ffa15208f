"""What the worker half of the store connector reports, and in which step, on upstream's real classes."""

import json
import queue
import threading
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker

from connector.runtime.failure_log import FailureLog
from connector.store.integrity import Fingerprints, Guard, PlannedPut
from connector.store.load_thread import RankLoad
from connector.store.metadata import JobReport, LoadReport
from connector.store.recording_store import RecordingStore, StoreWork
from connector.store.stats import FAILURES, LedgerStoreStats
from connector.store.worker import LedgerSendingThread, LedgerStoreWorker, StoreOutbox
from tests.support.log_files import logged


def test_a_loads_report_goes_with_vllms_own_answer_and_not_before_it():
    reports = StoreOutbox(0)
    loaded = LoadReport(3, 0, "loaded")
    reports.add_load("a", loaded)
    assert reports.take() is None
    reports.add_answered({"a"})
    taken = reports.take()
    assert taken is not None
    assert (taken.loads, taken.answered) == ([loaded], ["a"])
    assert reports.take() is None


class Retrying:
    """Counts how often cancelled loads were to be brought back."""

    brought = 0

    def bring_cancelled(self) -> None:
        """Count."""
        self.brought += 1


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> LedgerStoreWorker:
    """A worker half without caches and store, whose upstream finishes the loads that a test names."""
    made = LedgerStoreWorker.__new__(LedgerStoreWorker)
    made._outbox, made._loads, made._step, made.retries = StoreOutbox(0), {}, 0, Retrying()  # type: ignore[assignment]
    made._sender = None
    finished: set[str] = set()
    made.finished = finished  # type: ignore[attr-defined]
    monkeypatch.setattr(MooncakeStoreWorker, "start_load_kv", lambda *_: None)
    monkeypatch.setattr(
        MooncakeStoreWorker, "get_transfer_results", lambda *_: SimpleNamespace(finished_recving=set(finished))
    )
    return made


def give(worker: LedgerStoreWorker, step: int, loads: dict[str, int]) -> list[RankLoad]:
    """Let a step give loads to the worker, and return them."""
    requests = [SimpleNamespace(req_id=request) for request in loads]
    worker.start_load_kv(SimpleNamespace(kvledger=(step, loads), requests=requests))  # type: ignore[arg-type]
    return [request.kvledger_load for request in requests]


def test_a_load_of_a_request_that_ended_is_cancelled_wherever_it_is(worker: LedgerStoreWorker):
    (ended, other) = give(worker, 1, {"a": 0, "b": 1})
    give(worker, 2, {})
    worker.get_transfer_results({"a"}, None)  # type: ignore[arg-type]
    assert (ended.cancelled, other.cancelled, worker.retries.brought) == (True, False, 1)  # type: ignore[attr-defined]


def test_a_load_of_a_request_that_came_back_in_the_step_in_which_it_ended_goes_on(worker: LedgerStoreWorker):
    (before,) = give(worker, 1, {"a": 0})
    (after,) = give(worker, 2, {"a": 1})
    worker.get_transfer_results({"a"}, None)  # type: ignore[arg-type]
    assert (before.cancelled, after.cancelled) == (True, False)


def test_nothing_is_kept_of_loads_that_were_answered(worker: LedgerStoreWorker):
    give(worker, 1, {"a": 0, "b": 1})
    worker.finished.update(("a", "b"))  # type: ignore[attr-defined]
    worker.get_transfer_results(set(), None)  # type: ignore[arg-type]
    assert not worker._loads


class NoRoom(Fingerprints):
    """An accelerator without room for the copy that fingerprints need."""

    def of(self, addresses: object, sizes: object) -> torch.Tensor:
        """Raise what torch raises then."""
        raise torch.OutOfMemoryError("no room for the copy")


def test_a_save_whose_fingerprints_cannot_be_taken_is_made_without_and_ends_no_engine():
    cache = torch.zeros(4, 64)
    thread = LedgerSendingThread.__new__(LedgerSendingThread)
    thread._guard = Guard(NoRoom([cache]), [b"x" * 16], lambda _: 0, 1)
    planned = [PlannedPut("k@group:0@00", [cache.data_ptr()], [256])]
    thread._planner = SimpleNamespace(plan=lambda _: planned)  # type: ignore[assignment]
    thread._name = str
    thread.done_task_lock, thread.stored_requests, thread.request_queue = threading.Lock(), {}, queue.Queue()
    with logged() as said:
        for number in range(2):
            thread.add_request(SimpleNamespace(req_id=f"r{number}", store_job_id=number))  # type: ignore[arg-type]
    assert thread.request_queue.qsize() == 2
    (line,) = said.lines
    assert "request r0" in line


def test_a_block_that_failed_under_several_keys_is_one_failed_block():
    class Full:
        def batch_put_from_multi_buffers(self, keys: list[str], *_: object) -> list[int]:
            return [-200] * len(keys)

    lines: list[str] = []
    thread = LedgerSendingThread.__new__(LedgerSendingThread)
    thread._outbox, thread._failures = StoreOutbox(0), FailureLog("e", lines.append)
    thread.store = RecordingStore(Full(), 0, None)
    thread.store.locate_with(SimpleNamespace(locate=lambda _, address: (0, address)))  # type: ignore[arg-type]
    blocks = [5, 5, 5, 5, 6, 6, 6, 6]  # two blocks, in four shards each
    with thread.store.working(StoreWork("r", job=0)) as work:
        thread.store.batch_put_from_multi_buffers(
            [f"k@group:0@{number:02}" for number in range(8)], [[block] for block in blocks], [[8]] * 8
        )
        thread._report_failure(JobReport(0, 0, "failed", work.failure))
    assert json.loads(lines[0])["failed_blocks"] == 2
    stats = LedgerStoreStats()
    thread._failures.move_to(stats)
    assert stats.data[FAILURES][0]["blocks"] == 2
