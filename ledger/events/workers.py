"""Evidence: what only a worker knows of its calls to the store or to a peer. It never changes the state.

This file knows the envelope, the shape of a block list and words.
"""

# ruff: noqa: D102 - `sentence` is what the base says, of each kind

from typing import ClassVar

import msgspec

from ledger import words
from ledger.blocks import Blocks
from ledger.events.base import About, Event
from ledger.events.subject import subject_of

# --- evidence from the workers ----------------------------------------------------------------------------------------


class KeyFailure(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, array_like=True):
    """A key that failed in a transfer: the key's hash, what the store returned, its stable code, and the block."""

    key: str
    raw: str
    code: str
    group: int = 0
    block: int = -1


class TransferStarted(Event, frozen=True, gc=False, omit_defaults=True, tag="transfer_started"):
    """A worker called the store or a peer, and bytes may move from now on.

    A call to the store has keys, and the n-th key is that of the n-th of `blocks`.

    Attributes:
        transfer: names the call to the store; for a push or a pull, the P/D transfer, whose calls `peer` tells apart.
        op: `put` and `push` read the blocks; `get` and `pull` write them.
        keys: hashes of the keys, without model and rank.
        peer: the worker of the other engine.
    """

    about = About("call", "begins", uses="called")
    evidence: ClassVar[bool] = True

    transfer: str
    rank: int
    op: str
    request: str = ""
    job: int = -1
    load: int = -1
    keys: tuple[str, ...] = ()
    blocks: Blocks = ()
    bytes: int = 0
    peer: str = ""

    def sentence(self) -> str:
        what = [words.plural(len(self.keys), "key")] if self.keys else []
        what += [words.size(self.bytes)] if self.bytes else []
        what += [words.these_blocks(self.blocks)] if self.blocks else []
        return f"{_call(self)} began{': ' if what else ''}{', '.join(what)}"


class TransferFinished(Event, frozen=True, gc=False, omit_defaults=True, tag="transfer_finished"):
    """The store's or the peer's answer to one call. No `transfer_finished` means that the call has not returned.

    Attributes:
        transfer, peer: as in the call's `transfer_started`.
        outcome: `ok`, `partial` (some keys failed), `failed` (all did), or `raised`.
        duration_ns: of the call, in nanoseconds.
        failed_keys: how many keys failed; `failures` lists the first of them.
        code, raw: of a push or a pull that failed; a call to the store has them for each key.
    """

    about = About("call", "ends", turns="when_failed")
    evidence: ClassVar[bool] = True

    transfer: str
    rank: int
    op: str
    outcome: str = "ok"
    request: str = ""
    job: int = -1
    load: int = -1
    keys: int = 0
    bytes: int = 0
    duration_ns: int = 0
    failed_keys: int = 0
    failures: tuple[KeyFailure, ...] = ()
    exception: str = ""
    peer: str = ""
    code: str = ""
    raw: str = ""

    def sentence(self) -> str:
        failed = f", {words.plural(self.failed_keys, 'key')} failed" if self.failed_keys else ""
        codes = sorted({words.failure(each.code, each.raw, "") for each in self.failures})
        why = ", ".join([*codes, words.failure(self.code, self.raw, self.exception)]).strip(", ")
        after = words.span(self.duration_ns)
        return f"{_call(self)} ended {self.outcome} after {after}{failed}{': ' + why if why else ''}"


class PoisonCaught(Event, frozen=True, gc=False, omit_defaults=True, tag="poison_caught"):
    """A block changed between the registration of its job and the end of the put.

    So the store got other KV than was meant.

    A worker with `integrity` on emits it. It does not say who wrote into the block: `blocks_allocated` does.

    Attributes:
        key: hash of the key.
        before, after: the block's fingerprint at registration and after the put, in hex.
        removed: whether the key is gone from the store. If not, `raw` is the store's answer, and readers that have
            integrity off may load it.
    """

    about = About("named")
    evidence: ClassVar[bool] = True

    rank: int
    key: str
    group: int
    block: int
    before: str
    after: str
    removed: bool
    request: str = ""
    job: int = -1
    raw: str = ""

    def sentence(self) -> str:
        group = f" (group {self.group})" if self.group else ""
        return (
            f"block {self.block}{group} changed while job {self.job} put it: fingerprint "
            f"{self.before} became {self.after}; key {self.key} "
            + ("was removed" if self.removed else f"could NOT be removed (raw {self.raw})")
        )


def _call(event: TransferStarted | TransferFinished) -> str:
    work = subject_of(event)
    if work is None or work.work not in ("job", "load"):
        peer = f" with {event.peer}" if event.peer else ""
        return f"{event.op} of {event.transfer}{peer}"
    whose = f" of request {event.request}" if work.work == "load" and event.request else ""
    return f"{words.call_of_its_rank(event.op, event.transfer, event.rank)} for {work.name}{whose}"
