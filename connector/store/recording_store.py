"""A proxy of the Mooncake store that records each put and get as evidence, and remembers how the calls went.

Upstream's transfer threads call the store; the proxy stands in its place, passes every call on unchanged, and notes
keys, blocks, bytes, duration and raw codes. It adds no failure of its own: a call that it cannot describe goes through
undescribed. It knows the store's calls and upstream's layouts, and nothing of scheduling.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    ChunkedTokenDatabase,
    RankLocalStoreLayout,
    TPShardedStoreLayout,
)

from connector.runtime.evidence import EvidenceSender
from connector.runtime.failures import NO_FAILURE, Failure
from connector.store.integrity import ChangedBlock, Guard, GuardedStore
from ledger import events as ev
from ledger.blocks import Blocks, to_ranges
from ledger.codes import KVCacheErrorCode, Stage, translate

KEY_HASH_LENGTH = 16
"""Hex digits of a key's hash that are recorded.

64 bits are enough to distinguish the keys of a store, and nobody can get a prompt from them.
"""

MAX_FAILURES = 64
"""Failed keys that an event lists; it gives the number of all."""


class StoreWork:
    """What a transfer thread is doing: a job or a load, and how its calls to the store went.

    Attributes:
        lookups, puts, gets: how many such calls were made.
        stage: where the first failure was, or where the next call would fail.
    """

    def __init__(self, request: str, *, job: int = -1, load: int = -1) -> None:
        self.request = request
        self.job = job
        self.load = load
        self.lookups = 0
        self.puts = 0
        self.gets = 0
        self.stage = Stage.STORE_GET if load >= 0 else Stage.STORE_PUT
        self._first = NO_FAILURE
        self._failed_keys = 0
        self._failed_places: dict[tuple[int, int], None] = {}

    @property
    def failed_blocks(self) -> tuple[Blocks, int]:
        """The blocks that failed in all calls, as far as they are known, and how many keys."""
        return in_order(list(self._failed_places)), self._failed_keys

    @property
    def failure(self) -> Failure:
        """All that failed, by the cause of the first key or call that did; `NO_FAILURE` if nothing did."""
        return self._first.of_blocks(*self.failed_blocks) if self._first else NO_FAILURE

    def rejected(self, code: KVCacheErrorCode, raw: str, places: Sequence[tuple[int, int]]) -> None:
        """Note that what was moved may not be used, although the store took it."""
        self._count(len(places), places)
        if not self._first:
            self.stage = Stage.VERIFY
            self._first = Failure(code, raw, self.stage)

    def failed(self, raw: int | BaseException, keys: int, places: Sequence[tuple[int, int]] = ()) -> None:
        """Note a failure."""
        self._count(keys, places)
        if not self._first:
            self._first = Failure.of(raw, self.stage)

    def _count(self, keys: int, places: Sequence[tuple[int, int]]) -> None:
        self._failed_keys += keys
        self._failed_places.update(dict.fromkeys(places))


class BlockLocator:
    """Finds the block that a store address belongs to.

    Args:
        databases: upstream's token databases, one for each group that the store knows.
        kv_groups: the KV-cache group of each.
    """

    def __init__(self, databases: Sequence[ChunkedTokenDatabase], kv_groups: Sequence[int]) -> None:
        self._databases = databases
        self._kv_groups = kv_groups

    def locate(self, key: str, address: int) -> tuple[int, int]:
        """Return the `(group, block)` that starts at `address`, for a key of upstream's form; block -1 if unknown."""
        group = group_of(key)
        if not 0 <= group < len(self._databases):
            return 0, -1
        layout = self._databases[group].store_layout
        for base, stride in _segments(layout):
            offset = address - base
            if stride and offset >= 0 and offset % stride == 0:
                return self._kv_groups[group], offset // stride
        return self._kv_groups[group], -1


class RecordingStore:
    """Stands in for a `MooncakeDistributedStore`. Calls outside a `working` block are passed on unrecorded.

    Args:
        store: the real store.
        rank: this worker's rank.
        sender: where evidence goes, None for none.
    """

    def __init__(self, store: Any, rank: int, sender: EvidenceSender | None) -> None:
        self._store = store
        self._rank = rank
        self._sender = sender
        self._locator: BlockLocator | None = None
        self._numbers = itertools.count()
        self._current = threading.local()

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the real store."""
        return getattr(self._store, name)

    def close(self) -> Any:
        """Send what evidence is left, then close the store: upstream calls this once its threads have drained."""
        if self._sender is not None:
            self._sender.close()
        return self._store.close()

    def guard_with(self, guard: Guard) -> None:
        """Give values a trailer with fingerprint and layout from now on."""
        self._store = GuardedStore(self._store, guard, self._block_changed)

    def locate_with(self, locator: BlockLocator) -> None:
        """Use `locator` from now on; before, blocks are not named."""
        self._locator = locator

    @property
    def work(self) -> StoreWork | None:
        """The work of the calling thread, if it is in a `working` block."""
        return getattr(self._current, "work", None)

    @contextlib.contextmanager
    def working(self, work: StoreWork) -> Generator[StoreWork]:
        """Count and record the calls that this thread makes inside the block as `work`'s."""
        self._current.work = work
        try:
            yield work
        finally:
            self._current.work = None

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Ask which keys exist. Polls are not recorded; a failure is noted for the work."""
        work = self.work
        if work is None:
            return self._store.batch_is_exist(keys)
        work.lookups += 1
        try:
            return self._store.batch_is_exist(keys)
        except Exception as error:
            work.failed(error, len(keys))
            raise

    def batch_put_from_multi_buffers(
        self, keys: list[str], addrs: list[list[int]], sizes: list[list[int]], *args: Any
    ) -> list[int]:
        """Put; the result is the real store's."""
        work = self.work
        if work is not None:
            work.puts += 1
        return self._recorded("put", self._store.batch_put_from_multi_buffers, keys, addrs, sizes, *args)

    def batch_get_into_multi_buffers(
        self, keys: list[str], addrs: list[list[int]], sizes: list[list[int]], *args: Any
    ) -> list[int]:
        """Get; the result is the real store's."""
        work = self.work
        if work is not None:
            work.gets += 1
        return self._recorded("get", self._store.batch_get_into_multi_buffers, keys, addrs, sizes, *args)

    def _recorded(
        self,
        op: str,
        call: Callable[..., list[int]],
        keys: list[str],
        addrs: list[list[int]],
        sizes: list[list[int]],
        *args: Any,
    ) -> list[int]:
        work = self.work
        if work is None:
            return call(keys, addrs, sizes, *args)
        transfer = f"{self._rank}-{next(self._numbers)}"
        places = self._places(keys, addrs)
        total_bytes = sum(map(sum, sizes))
        self._emit(
            ev.TransferStarted,
            transfer=transfer,
            rank=self._rank,
            op=op,
            request=work.request,
            job=work.job,
            load=work.load,
            keys=tuple(key_hash(key) for key in keys),
            blocks=in_order(places),
            bytes=total_bytes,
        )
        about: dict[str, Any] = {
            "transfer": transfer,
            "rank": self._rank,
            "op": op,
            "request": work.request,
            "job": work.job,
            "load": work.load,
            "keys": len(keys),
        }
        started_ns = time.perf_counter_ns()
        try:
            results = call(keys, addrs, sizes, *args)
        except Exception as error:
            duration_ns = time.perf_counter_ns() - started_ns
            work.failed(error, len(keys), places)
            self._emit(
                ev.TransferFinished,
                outcome="raised",
                duration_ns=duration_ns,
                failed_keys=len(keys),
                exception=type(error).__name__,
                **about,
            )
            raise
        duration_ns = time.perf_counter_ns() - started_ns
        failures = [(index, raw) for index, raw in enumerate(results) if raw < 0]
        if failures:
            work.failed(failures[0][1], len(failures), [places[index] for index, _ in failures])
        self._emit(
            ev.TransferFinished,
            outcome="ok" if not failures else "failed" if len(failures) == len(keys) else "partial",
            bytes=total_bytes if not failures else total_bytes - sum(sum(sizes[index]) for index, _ in failures),
            duration_ns=duration_ns,
            failed_keys=len(failures),
            failures=tuple(
                ev.KeyFailure(key_hash(keys[index]), str(raw), str(translate(raw).code), *places[index])
                for index, raw in failures[:MAX_FAILURES]
            ),
            **about,
        )
        return results

    def _block_changed(self, changed: ChangedBlock) -> None:
        """Record that a block changed under the put that the calling thread is making."""
        place = self._places([changed.key], [[changed.address]])[0]
        work = self.work
        if work is not None:
            raw = f"fingerprint {changed.after:016x} after the put, {changed.before:016x} before"
            work.rejected(KVCacheErrorCode.CRC_MISMATCH, raw, [place])
        self._emit(
            ev.PoisonCaught,
            rank=self._rank,
            key=key_hash(changed.key),
            group=place[0],
            block=place[1],
            before=f"{changed.before:016x}",
            after=f"{changed.after:016x}",
            removed=changed.removed == 0,
            request=work.request if work is not None else "",
            job=work.job if work is not None else -1,
            raw=str(changed.removed) if changed.removed else "",
        )

    def _places(self, keys: list[str], addrs: list[list[int]]) -> list[tuple[int, int]]:
        """Return the `(group, block)` of each key."""
        locator = self._locator
        if locator is None:
            return [(group_of(key), -1) for key in keys]
        return [locator.locate(key, address[0]) for key, address in zip(keys, addrs, strict=True)]

    def _emit(self, kind: type[ev.AnyEvent], **fields: Any) -> None:
        sender = self._sender
        if sender is not None:
            sender.emit(kind(0, time.time_ns(), time.monotonic_ns(), sender.origin, sender.step, **fields))


def key_hash(key: str) -> str:
    """Return the name in the log of a key of upstream's form: the first digits of its prefix hash."""
    return key.rsplit("@", 1)[-1][:KEY_HASH_LENGTH]


def in_order(places: Sequence[tuple[int, int]]) -> Blocks:
    """Return `(group, block)` pairs as `Blocks` in the same order; a group comes again each time it changes."""
    return tuple(
        (group, to_ranges([block for _, block in run]))
        for group, run in itertools.groupby(places, key=lambda pair: pair[0])
    )


def group_of(key: str) -> int:
    """Return the store group that a key of upstream's form (`...@group:<n>@<hash>`) names, -1 if it names none."""
    marker = key.rsplit("@", 1)[0].rpartition("@group:")[2]
    return int(marker) if marker.isdigit() else -1


def _segments(layout: object) -> list[tuple[int, int]]:
    """Return base address and bytes between blocks for each place where a block's first segment may start."""
    if isinstance(layout, RankLocalStoreLayout):
        return list(zip(layout.kv_caches_base_addr[:1], layout.block_len[:1], strict=False))
    if isinstance(layout, TPShardedStoreLayout):
        bases, strides = layout._shard_addr_bases, layout._shard_block_strides  # pyright: ignore[reportPrivateUsage] - no public way to an address
        return [(int(base[0]), int(stride[0])) for base, stride in zip(bases, strides, strict=True) if len(base)]
    return []
