"""Has upstream plan a load, and takes the plan instead of carrying it out.

Which keys a load needs, and which addresses their bytes go to, depends on groups, masks, shards and partial tails;
upstream works that out and asks the store at once, in one function. Here that function runs against a store that does
not answer: it ends where it would have asked, and what it asked for is the plan. Which block and which tokens belong to
a key is seen on the way. This file knows upstream's receive thread and its token databases; it does no I/O.
"""

import queue
import threading
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ChunkedTokenDatabase, ReqMeta, StoreLayout
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreRecvingThread,
    _estimate_disk_offload_staging_bytes,  # pyright: ignore[reportPrivateUsage] - what a key takes of upstream's buffer
)
from vllm.utils.math_utils import cdiv

from connector.store.loader import Target
from ledger.blocks import NULL_BLOCK


class _Asked(BaseException):
    """Leaves upstream's function at its call to the store. No `Exception`, which upstream would take for a failure."""

    def __init__(self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> None:
        super().__init__()
        self.keys = keys
        self.addresses = addresses
        self.sizes = sizes


class _SilentStore:
    """Stands where upstream asks the store."""

    def batch_get_into_multi_buffers(
        self, keys: list[str], addrs: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Never returns: raises what was asked for."""
        raise _Asked(keys, addrs, sizes)

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, object]:
        """Return no replicas: upstream would log the tiers of a call that is not made here."""
        return {}


class _WatchedLayout:
    """Passes everything on to a layout of upstream, and notes which chunk and block each list of addresses is of."""

    def __init__(self, layout: StoreLayout, group: int, seen: "dict[int, tuple[int, int, int, int]]") -> None:
        self._layout = layout
        self._group = group
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layout, name)

    def prepare_values(
        self, chunks: Sequence[tuple[int, int]], block_ids: list[int], shard_ids: Sequence[int]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Return what the layout returns."""
        addresses, sizes, blocks = self._layout.prepare_values(chunks, block_ids, shard_ids)
        for (start, end), block, address in zip(chunks, blocks, addresses, strict=True):
            # Upstream keeps these lists as they are, in another order: the list itself identifies its key.
            self._seen[id(address)] = (self._group, block, start, end)
        return addresses, sizes, blocks


class _WatchedDatabase:
    """Passes everything on to a token database of upstream, with its layout watched."""

    def __init__(
        self, database: ChunkedTokenDatabase, group: int, seen: "dict[int, tuple[int, int, int, int]]"
    ) -> None:
        self._database = database
        self.store_layout = _WatchedLayout(database.store_layout, group, seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


class LoadPlanner(KVCacheStoreRecvingThread):
    """Upstream's receive thread, never started, of which only the planning is used.

    Args:
        thread: the thread whose loads are planned.
        kv_groups: the KV-cache group of each group that the store knows.
    """

    def __init__(self, thread: KVCacheStoreRecvingThread, kv_groups: Sequence[int]) -> None:
        self._seen: dict[int, tuple[int, int, int, int]] = {}
        self._kv_groups = kv_groups
        databases: list[Any] = [
            _WatchedDatabase(database, kv_groups[index], self._seen)
            for index, database in enumerate(thread.token_databases)
        ]
        super().__init__(
            _SilentStore(),
            thread.coord,
            databases,
            thread.block_size,
            thread.tp_rank,
            threading.Event(),
            # Without a budget upstream asks for everything at once; `LoadPasses` splits by the budget.
            disk_offload_buffer_budget_bytes=None,
            request_queue=queue.Queue(),
            group_participates=thread.group_participates,
            is_hma_required=False,
        )
        self._stages = thread.disk_offload_buffer_budget_bytes is not None

    def plan(self, req_meta: ReqMeta) -> list[Target]:
        """Return what the load of `req_meta` asks the store for; nothing, if this rank has nothing to load.

        Raises:
            Exception: upstream cannot plan it.
        """
        self._seen.clear()
        try:
            self._handle_request(req_meta)
        except _Asked as asked:
            return [self._named(*asked_for) for asked_for in zip(asked.keys, asked.addresses, asked.sizes, strict=True)]
        except ZeroDivisionError:
            # Upstream spreads the keys over the ranks and does not expect that there are none.
            if not self._seen:
                return []
            raise
        raise RuntimeError("vLLM planned a load and did not ask the store; this vLLM is not supported")

    def _named(self, key: str, addresses: list[int], sizes: list[int]) -> Target:
        group, block, start, end = self._seen[id(addresses)]
        staging_bytes = _estimate_disk_offload_staging_bytes(sizes) if self._stages else 0
        return Target(key, group, block, start, end, addresses, sizes, staging_bytes)

    def unplanned(self, req_meta: ReqMeta) -> list[Target]:
        """Return the blocks of a load that upstream could not plan, without keys: none of them may count."""
        spec = req_meta.load_spec
        if spec is None:
            return []
        targets: list[Target] = []
        for index, blocks in enumerate(req_meta.block_ids):
            size = self.token_databases[index].block_size
            first, last = spec.vllm_cached_tokens // size, cdiv(spec.token_len, size)
            targets.extend(
                Target("", self._kv_groups[index], block, number * size, (number + 1) * size, [], [])
                for number, block in enumerate(blocks[first:last], first)
                if block != NULL_BLOCK
            )
        return targets
