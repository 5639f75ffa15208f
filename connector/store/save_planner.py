"""Has upstream plan a save without carrying it out, for fingerprints of its blocks when it is registered.

Which blocks a job puts under which keys is worked out by upstream's send thread when it takes the job up. By then the
blocks may already belong to another request; that is what the fingerprints are to show. So the same function of
upstream runs here, on the engine's thread, against a store that says it holds nothing and takes everything. This file
does no I/O.
"""

import queue
import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import KVCacheStoreSendingThread

from connector.store.integrity import PlannedPut


class _NotingStore:
    """Holds nothing, takes everything, and notes what it was given."""

    def __init__(self) -> None:
        self.planned: list[PlannedPut] = []

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Answer that no key exists."""
        return [0] * len(keys)

    def batch_put_from_multi_buffers(
        self, keys: list[str], addrs: list[list[int]], sizes: list[list[int]], config: object
    ) -> list[int]:
        """Note what is put, and answer that all went well."""
        self.planned.extend(map(PlannedPut, keys, addrs, sizes))
        return [0] * len(keys)


class _NoEvent:
    """The GPU event of a job: planning reads no block, so there is nothing to wait for."""

    def synchronize(self) -> None:
        """Return at once."""


class SavePlanner(KVCacheStoreSendingThread):
    """Upstream's send thread, never started, of which only the planning is used.

    Args:
        thread: the thread whose jobs are planned.
    """

    def __init__(self, thread: KVCacheStoreSendingThread) -> None:
        self._noting = _NotingStore()
        super().__init__(
            self._noting,
            thread.coord,
            thread.token_databases,
            thread.block_size,
            thread.tp_rank,
            thread.group_put_steps,
            thread.kv_role,
            threading.Event(),
            group_participates=thread.group_participates,
        )
        self._thread = thread
        self.request_queue: queue.Queue[Any] = queue.Queue()

    def plan(self, req_meta: ReqMeta) -> list[PlannedPut]:
        """Return what the job of `req_meta` will put at most: what the store does not hold of it is put then."""
        self._noting.planned = []
        self._saved_offset = self._thread._saved_offset  # read: where the thread would resume
        self.request_queue.put(None)  # upstream counts it as done, and nobody else takes it
        self.request_queue.get_nowait()
        event, req_meta.current_event = req_meta.current_event, _NoEvent()  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
        try:
            self._handle_request(req_meta)
        finally:
            req_meta.current_event = event
        return self._noting.planned

    def is_live_store_job(self, req_meta: ReqMeta) -> bool:
        """Return True: a job is planned when it is registered."""
        return True

    def finish_store_job(self, req_meta: ReqMeta) -> None:
        """Do nothing: the job has not begun."""

    def _record_saved(self, req_meta: ReqMeta, token_len: int) -> None:
        """Do nothing: nothing was saved."""

    def _should_skip_request(self, req_id: str) -> bool:
        return False
