"""What poison is judged by: work on trial, blocks that were given to a new owner under it, calls that touched them.

This file knows events; which calls are stale accesses, `poison` decides.
"""

from typing import Literal, TypeAlias

import msgspec

from ledger import events as ev
from ledger.verdicts.base import Doubt, Kind, Role

Block = tuple[int, int]

WorkSort: TypeAlias = Literal["store job", "load", "recv", "send"]

POISON = Kind("poison", Role.CAUSE | Role.WRONG_KV | Role.TAINTS)

GIVEN_AWAY = "the blocks of a job were given away"
"""The cause of all findings about jobs: in one log they are one incident."""


class WorkAtRisk(msgspec.Struct):
    """A job, load, send or recv that was open when a block was given away.

    Attributes:
        began: its first event.
        pinned: whether it held references on its blocks.
        job, load, transfer: its id, in the field of its sort; -1 and empty in the others.
    """

    sort: WorkSort
    request: str
    generation: int
    began: ev.Event | None
    pinned: bool = True
    job: int = -1
    load: int = -1
    transfer: str = ""

    @property
    def id(self) -> int | str:
        """Its number or name among the works of its sort."""
        if self.job >= 0:
            return self.job
        return self.load if self.load >= 0 else self.transfer


class BlockReuse(msgspec.Struct):
    """Blocks that were given to a new owner while work of the old one was open.

    Blocks are compared by number alone: vLLM has one pool for all KV-cache groups, so what one group gives up may come
    back in another, and it is the same memory.

    Attributes:
        works: the work that was open then, by what its calls are found by.
        written: the event from whose step on the new owner has written into the block; None if it may not have. A
            request that is scheduled writes in the step in which it gets the block. One that loads or receives has
            written when that has ended well, or when it runs.
        load, transfer: by which load or recv the new owner fills the blocks; -1 and empty if by none.
        lost_by: why the old owner lost its blocks, as far as it is remembered: it was preempted, finished or aborted.
        ran: the first run of the new owner that is known, with these blocks.
    """

    event: ev.BlocksAllocated
    numbers: frozenset[int]
    released: ev.BlocksReleased | ev.RequestPreempted | ev.RequestFinished | ev.RequestAborted | None
    works: dict[tuple[str, int | str], WorkAtRisk]
    written: ev.Event | None = None
    load: int = -1
    transfer: str = ""
    lost_by: ev.Event | None = None
    ran: ev.Event | None = None


class StaleAccess(msgspec.Struct):
    """A call that touched blocks of another owner."""

    started: ev.TransferStarted
    reuse: BlockReuse
    work: WorkAtRisk
    blocks: tuple[Block, ...]
    keys: tuple[str, ...]
    finished: ev.TransferFinished | None = None
    failed_keys: frozenset[str] = frozenset()
    caught: list[ev.PoisonCaught] = []
    answers: list[ev.PeerSettled] = []
    """What the peers of a transfer answered after the block was given away."""

    @property
    def judged_seq(self) -> int:
        """The event at which it was found: its own begin, or the reuse under it."""
        return max(self.started.seq, self.reuse.event.seq)

    @property
    def proven(self) -> bool:
        """Whether the events exclude that the blocks still held their old owner's KV, or some were seen to change."""
        return bool(self.caught) or self.overwritten

    @property
    def overwritten(self) -> bool:
        """Whether the new owner's first forward pass lay before the call."""
        written, finished = self.reuse.written, self.finished
        failed = finished is not None and finished.outcome in ("failed", "raised")
        return (
            written is not None
            and not failed  # a call that failed may never have touched the block
            and self.started.step > written.step
            and self.started.ts_ns > written.ts_ns
            and self.reuse.event.request != self.work.request
        )

    @property
    def open_after(self) -> bool:
        """Whether the call was open after the block was given away, as far as its end is known."""
        finished = self.finished
        return finished is None or finished.step > self.reuse.event.step or finished.ts_ns > self.reuse.event.ts_ns

    def is_proven(self, key: str) -> bool:
        """Return whether a key's block is known to have changed."""
        return self.overwritten or any(event.key == key for event in self.caught)

    def tainted_keys(self) -> list[str]:
        """Return the keys under which a put stored the blocks of another owner."""
        if self.started.op != "put" or (self.finished is not None and self.finished.outcome in ("failed", "raised")):
            return []
        return [key for key in self.keys if key not in self.failed_keys]


class Overflow(msgspec.Struct):
    """Stale accesses that are counted and not shown one by one.

    Attributes:
        calls: calls that touched blocks of another owner.
        proven: how many of them are proven to have done so after the other had written.
        first, last: the first and the last of them.
        changed: blocks that a worker has seen change.
        first_changed: the first of them.
    """

    calls: int = 0
    proven: int = 0
    first: StaleAccess | None = None
    last: StaleAccess | None = None
    changed: int = 0
    first_changed: ev.PoisonCaught | None = None

    def add(self, access: StaleAccess) -> None:
        """Count a call that has ended."""
        self.calls += 1
        self.proven += access.proven
        self.first = self.first or access
        self.last = access

    def add_changed(self, event: ev.PoisonCaught) -> None:
        """Count a block that was seen to change."""
        self.changed += 1
        self.first_changed = self.first_changed or event


class CallFailed(Doubt, frozen=True, kw_only=True):
    """The call failed, and nobody recorded whether it had touched the block by then."""


class SameRequest(Doubt, frozen=True, kw_only=True):
    """Both owners are lives of one request, whose KV may be the same."""


class OpenBefore(Doubt, frozen=True, kw_only=True):
    """The call was open when the block was given away, and may have moved its bytes before."""


class OwnTransfer(Doubt, frozen=True, kw_only=True):
    """The new owner itself waited for a load or recv, which may have filled the blocks afterwards.

    Attributes:
        request: the new owner.
    """

    request: str


class OrderUnknown(Doubt, frozen=True, kw_only=True):
    """It is not recorded whether the call came before or after the new owner's first forward pass."""


class NoneProven(Doubt, frozen=True, kw_only=True):
    """Of many that are counted, none is proven by itself."""


def doubt_of(access: StaleAccess) -> Doubt:
    """Return why a stale access is not proven."""
    if access.finished is not None and access.finished.outcome in ("failed", "raised"):
        return CallFailed()
    if access.reuse.event.request == access.work.request:
        return SameRequest()
    if access.started.seq < access.reuse.event.seq:
        return OpenBefore()
    if access.reuse.load >= 0 or access.reuse.transfer:
        return OwnTransfer(request=access.reuse.event.request)
    return OrderUnknown()
