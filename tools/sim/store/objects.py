"""A Mooncake store that is not there: objects in a dictionary, the plan's faults, and the moments when bytes move.

A fake, because the faults it has to show cannot be made to happen in a real one at will. It answers the calls that
upstream's worker code makes, with the codes that Mooncake documents. A put reads each block at a moment inside the
call, so what it stores is what the block holds *then*; a get writes each block at such a moment. Both ask the checks
whether the transfer may touch that block.

This file knows the call signatures of the store, addresses as `workers` registers them, and no ledger.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tools.sim.clock import STEP_NS, Clock, getcurrent
from tools.sim.plans import mix, number_of
from tools.sim.store import plan as pl
from tools.sim.store.memory import Memory

BASE_ADDRESS = 1 << 20
BLOCK_BYTES = 4096
"""Where a rank's KV blocks lie, and how long one is. Only the block's number is ever taken from an address."""

OBJECT_NOT_FOUND = -704
NO_AVAILABLE_HANDLE = -200
TRANSFER_FAIL = -800

PIECES = 3
"""A batch's bytes move at this many moments."""


class TransferWatch(Protocol):
    """What the store asks the checks."""

    def reads(self, rank: int, item: Any, block: int) -> None:
        """A put reads a block."""
        ...

    def writes(self, rank: int, item: Any, block: int) -> None:
        """A get writes a block."""
        ...

    def stored(self, rank: int, item: Any, key: str, block: int, content: Any) -> None:
        """A key becomes visible to everyone."""
        ...


class Faults:
    """The plan's faults, found when their moment comes.

    Attributes:
        active: False once faults have stopped.
        hits: how many calls were struck, by fault; failed calls by code.
    """

    def __init__(self, plan: pl.Plan, clock: Clock) -> None:
        self.active = True
        self.hits: dict[str, int] = {}
        self._clock = clock
        self._seed = plan.seed
        self._counts: dict[tuple[str, str, int], int] = {}
        self._calls: dict[tuple[str, str, int, int], pl.CallFault] = {}
        self._twice: dict[tuple[str, str, int], None] = {}
        self._stalls: dict[int, list[tuple[int, int]]] = {}
        self._pressure: list[tuple[int, int]] = []
        for fault in plan.decisions:
            if isinstance(fault, pl.CallFault):
                self._calls[fault.call, fault.request, fault.rank, fault.nth] = fault
            elif isinstance(fault, pl.Stall):
                window = (fault.step * STEP_NS, (fault.step + fault.steps) * STEP_NS)
                self._stalls.setdefault(fault.rank, []).append(window)
            elif isinstance(fault, pl.Pressure):
                self._pressure.append((fault.step * STEP_NS, (fault.step + fault.steps) * STEP_NS))

    def take(self, call: str, request: str, rank: int) -> pl.CallFault | None:
        """Count a call, and return the fault that strikes it, if one does."""
        counted = (call, request, rank)
        nth = self._counts.get(counted, 0)
        self._counts[counted] = nth + 1
        if not self._calls or not self.active:
            return None
        fault = self._calls.get((call, request, rank, nth))
        if fault is not None:
            what = f"code {fault.value}" if fault.fault == "code" else fault.fault
            self.hits[what] = self.hits.get(what, 0) + 1
            if fault.fault == "twice":
                self._twice[counted] = None
        return fault

    def answers_twice(self, call: str, request: str, rank: int) -> bool:
        """Return whether the last call of this kind is to be answered twice; True once only."""
        if (call, request, rank) not in self._twice:
            return False
        del self._twice[call, request, rank]
        return True

    def raise_if_due(self, call: str, request: str, rank: int) -> None:
        """Raise what the plan says for this call.

        Raises:
            RuntimeError: the plan has a `raise` here.
        """
        fault = self.take(call, request, rank)
        if fault is not None and fault.fault == "raise":
            raise RuntimeError(f"simulated: {call} of {request} raised on rank {rank}")

    def stalled_for_ns(self, rank: int) -> int:
        """Return for how long this rank's transfers stand still from now on."""
        if not self.active:
            return 0
        now = self._clock.now_ns
        return max((end - now for first, end in self._stalls.get(rank, ()) if first <= now < end), default=0)

    def under_pressure(self) -> bool:
        """Return whether the store has no space now."""
        now = self._clock.now_ns
        return self.active and any(first <= now < end for first, end in self._pressure)

    def duration_ns(self, call: str, request: str, rank: int) -> int:
        """Return how long a call takes that nothing strikes: mostly less than a step, now and then several."""
        roll = mix(self._seed, number_of(call + request), rank, self._counts.get((call, request, rank), 0))
        steps = 1 if roll % 8 else 2 + (roll >> 20) % 10
        return steps * (STEP_NS // 20 + (roll >> 40) % STEP_NS)

    def chosen(self, keys: Sequence[str], share: int) -> list[bool]:
        """Return which of `keys` a fault strikes: about `share` thousandths of them, and at least one."""
        struck = [mix(self._seed, number_of(key)) % 1000 < share for key in keys]
        if keys and not any(struck):
            struck[0] = True
        return struck


class Store:
    """The objects that all ranks share.

    Attributes:
        objects: what is stored under each key: the content of the block when it was read.
    """

    def __init__(self, seed: int) -> None:
        self.objects: dict[str, Any] = {}
        self.evictions = 0
        self._seed = seed

    def evict(self, share: int) -> None:
        """Give up about `share` thousandths of the keys."""
        self.evictions += 1
        for key in [key for key in self.objects if mix(self._seed, self.evictions, number_of(key)) % 1000 < share]:
            del self.objects[key]


class RankStore:
    """One rank's handle of the store, with the methods of `MooncakeDistributedStore` that upstream calls."""

    def __init__(
        self, store: Store, rank: int, clock: Clock, faults: Faults, memory: Memory, watch: TransferWatch
    ) -> None:
        self._store = store
        self._rank = rank
        self._clock = clock
        self._faults = faults
        self._memory = memory
        self._watch = watch

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Return 1 for each key that is there, else 0."""
        if self._clock.in_call():
            request = getcurrent().item.req_id  # type: ignore[attr-defined]
            self._stand_still()
            self._faults.raise_if_due("exists", request, self._rank)
            self._clock.wait(self._faults.duration_ns("exists", request, self._rank) // 8)
        objects = self._store.objects
        return [1 if key in objects else 0 for key in keys]

    def batch_put_from_multi_buffers(
        self, keys: list[str], addrs: list[list[int]], sizes: list[list[int]], config: object = None
    ) -> list[int]:
        """Store what the blocks hold when they are read; return 0 or a negative code for each key."""
        blocks = [(address[0] - BASE_ADDRESS) // BLOCK_BYTES for address in addrs]
        item = getcurrent().item  # type: ignore[attr-defined]
        values: list[Any] = []

        def read(index: int) -> None:
            self._watch.reads(self._rank, item, blocks[index])
            values.append(self._memory.read(self._rank, blocks[index]))

        codes = self._move("put", item, keys, read)
        for key, block, value, code in zip(keys, blocks, values, codes, strict=False):
            if code >= 0:
                self._store.objects[key] = value
                self._watch.stored(self._rank, item, key, block, value)
        return codes

    def batch_get_into_multi_buffers(
        self, keys: list[str], addrs: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Write the stored contents into the blocks; return the bytes or a negative code for each key."""
        blocks = [(address[0] - BASE_ADDRESS) // BLOCK_BYTES for address in addrs]
        item = getcurrent().item  # type: ignore[attr-defined]
        objects = self._store.objects
        missing: list[bool] = [False] * len(keys)

        def write(index: int) -> None:
            value = objects.get(keys[index])
            if value is None:
                missing[index] = True
                return
            self._watch.writes(self._rank, item, blocks[index])
            self._memory.write(self._rank, blocks[index], value)

        codes = self._move("get", item, keys, write)
        for index, code in enumerate(codes):
            if code >= 0:
                codes[index] = OBJECT_NOT_FOUND if missing[index] else BLOCK_BYTES
            elif not missing[index] and code == TRANSFER_FAIL:
                self._watch.writes(self._rank, item, blocks[index])
                self._memory.spoil(self._rank, blocks[index], "torn")
        return codes

    def remove_all(self, force: bool = False) -> int:
        """Empty the store."""
        self._store.objects.clear()
        return 0

    def close(self) -> None:
        """Nothing to close."""

    def _move(self, call: str, item: Any, keys: list[str], touch: Callable[[int], None]) -> list[int]:
        """Touch every key's block at some moment, as long as the call takes, and return a code for each key."""
        clock, faults = self._clock, self._faults
        self._stand_still()
        duration_ns = faults.duration_ns(call, item.req_id, self._rank)
        fault = faults.take(call, item.req_id, self._rank)
        kind = fault.fault if fault is not None else ""
        if call == "put" and faults.under_pressure():
            clock.wait(duration_ns // 4)
            return [NO_AVAILABLE_HANDLE] * len(keys)
        if fault is not None and kind == "late":
            duration_ns += fault.value * STEP_NS
        count = len(keys)
        done = 0
        for piece in range(PIECES):
            clock.wait(duration_ns // PIECES)
            if kind == "hang" and piece == 1 and faults.active:
                clock.park()
            end = count * (piece + 1) // PIECES
            for index in range(done, end):
                touch(index)
            done = end
            if kind == "raise" and piece == 1:
                raise RuntimeError(f"simulated: {call} of {item.req_id} raised on rank {self._rank}")
        if fault is not None and kind == "code":
            return [fault.value if struck else 0 for struck in faults.chosen(keys, fault.share)]
        if kind == "hang" and fault is not None and fault.share < 1000:
            return [TRANSFER_FAIL] * count
        return [0] * count

    def _stand_still(self) -> None:
        while stalled_ns := self._faults.stalled_for_ns(self._rank):
            self._clock.wait(stalled_ns)
