"""Loads the blocks of one request from the store: all of them count, or none does.

A load is tried in *passes*. A pass asks the store for every block that is still missing, batch after batch, also after
a batch that failed. What failed for a reason that may pass is asked for again in a later pass, within a number of
retries and a deadline. Between two passes nobody waits: the load says when it is due (`due_s`), and whoever drives it
comes back then. At the end one `LoadResult` carries the outcome of every block, and which blocks may not be trusted.

`LoadPasses` is that logic, pure: no I/O and no clock; the caller passes the time in. The plugin's receive thread drives
it with the real store and the monotonic clock, the simulator with a simulated store and virtual time, through the same
`run_pass`. This file knows stable codes and block lists; it knows no vLLM, no torch and no Mooncake.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from connector.runtime.failures import NO_FAILURE, Failure
from ledger.blocks import Blocks, to_ranges
from ledger.codes import KVCacheErrorCode, Stage

Rollback: TypeAlias = Literal["request", "suffix"]


class Target(NamedTuple):
    """One key to load, and where its bytes go. A block has several keys where the store keeps it in shards.

    Attributes:
        group, block: the KV-cache group, and the block in it.
        start_token, end_token: the tokens of the request that the block holds, the last one excluded.
        addresses, sizes: the memory that the value fills, in order; sizes in bytes.
        staging_bytes: what the key takes of a staging buffer, if there is one.
    """

    key: str
    group: int
    block: int
    start_token: int
    end_token: int
    addresses: list[int]
    sizes: list[int]
    staging_bytes: int = 0


class Limits(NamedTuple):
    """What a load may cost.

    Attributes:
        max_retries: how often a block is asked for again.
        deadline_s: from the start of the load, in seconds; no pass begins after it, except the first.
        backoff_s: before the first retry; it doubles with each one.
        rollback: what a failure takes with it: all blocks of the load, or those from the first failed one on.
        batch_bytes: staging bytes in one call to the store; 0 for no bound.
        key_bytes: staging bytes of one key, above which it cannot be loaded at all; 0 for no bound.
    """

    max_retries: int = 2
    deadline_s: float = 10.0
    backoff_s: float = 0.05
    rollback: Rollback = "request"
    batch_bytes: int = 0
    key_bytes: int = 0


MAX_BACKOFF_S = 5.0
"""A longer pause than this between two passes helps no request that somebody waits for."""


Answer: TypeAlias = int | Failure
"""The outcome of one key in a call: the bytes that arrived, a negative code of the store, or why they do not count."""


class LoadResult(NamedTuple):
    """How a load ended.

    Attributes:
        failed: every key that was not loaded, and why, by position.
        invalid: the blocks that may not be trusted, by position: none of them counts as loaded.
        whole_request: whether vLLM must get the request, because naming blocks would leave it with KV that was
            not loaded: with several groups, and where upstream left blocks of the range out.
        kept_tokens: the tokens of the request up to which its KV is proven: local ones, and loaded ones before the
            first failure if the rollback keeps them.
        keys: how many keys the load had.
        bytes: how many bytes arrived and count.
        retries: how many passes there were after the first.
        gave_up: why the last retryable failure was not tried again: `retries`, `deadline`, or empty.
    """

    failed: tuple[tuple[Target, Failure], ...]
    invalid: tuple[tuple[int, int], ...]
    whole_request: bool
    kept_tokens: int
    keys: int
    bytes: int
    retries: int
    gave_up: str

    @property
    def loaded(self) -> bool:
        """Whether all blocks arrived."""
        return not self.failed

    @property
    def failure(self) -> Failure:
        """All that failed, by the cause of the first block in the request; `NO_FAILURE` if all blocks arrived."""
        if not self.failed:
            return NO_FAILURE
        _, first = self.failed[0]
        return first.of_blocks(blocks_of(target for target, _ in self.failed), len(self.failed))

    def by_cause(self) -> tuple[Failure, ...]:
        """Return a failure for each cause, with the blocks that failed so; that of the first block comes first."""
        causes: dict[tuple[str, str, str, str], list[tuple[Target, Failure]]] = {}
        for target, failure in self.failed:
            causes.setdefault(failure.cause, []).append((target, failure))
        return tuple(
            alike[0][1].of_blocks(blocks_of(target for target, _ in alike), len(alike)) for alike in causes.values()
        )


def blocks_of(targets: Iterable[Target]) -> Blocks:
    """Return the blocks of `targets`, each once, by group, in order."""
    groups: dict[int, dict[int, None]] = {}
    for target in targets:
        groups.setdefault(target.group, {})[target.block] = None
    return tuple((group, to_ranges(blocks)) for group, blocks in groups.items())


class LoadPasses:
    """The passes of one load.

    Args:
        targets: what to load, in any order.
        first_token: the token of the request at which the load begins; KV before it is local.
        limits: what the load may cost.
        now_s: the time, in seconds of the driver's clock.

    Attributes:
        due_s: when the next pass is due, in the driver's time; None once the load is done.
    """

    def __init__(self, targets: Sequence[Target], first_token: int, limits: Limits, now_s: float) -> None:
        self.targets = targets
        self._limits = limits
        self._first_token = first_token
        self._deadline_s = now_s + limits.deadline_s
        self._expected_bytes = [sum(target.sizes) for target in targets]
        self._missing = list(range(len(targets)))
        self._failed: dict[int, Failure] = {}
        self._tries = 0
        self._gave_up = ""
        self._by_block = _unbroken(targets, first_token)
        self._keeps_a_prefix = limits.rollback == "suffix" and self._by_block
        self.due_s: float | None = now_s if targets else None

    @property
    def done(self) -> bool:
        """Whether every block has its outcome."""
        return self.due_s is None

    def batches(self) -> list[list[int]]:
        """Begin a pass: return the calls to make in it, as indexes into `targets`. All of them are to be answered."""
        self._tries += 1
        limits = self._limits
        asked: list[int] = []
        for index in self._missing:
            if limits.key_bytes and self.targets[index].staging_bytes > limits.key_bytes:
                raw = f"{self.targets[index].staging_bytes} staging bytes, the buffer has {limits.key_bytes}"
                self._fail(index, Failure(KVCacheErrorCode.KV_OOM, raw, Stage.STORE_GET))
            else:
                asked.append(index)
        if not limits.batch_bytes:
            return [asked] if asked else []
        return self._split(asked, limits.batch_bytes)

    def _split(self, indexes: list[int], batch_bytes: int) -> list[list[int]]:
        batches: list[list[int]] = []
        left_bytes = 0
        for index in indexes:
            size = self.targets[index].staging_bytes
            if not batches or size > left_bytes:
                batches.append([])
                left_bytes = batch_bytes
            batches[-1].append(index)
            left_bytes -= size
        return batches

    def answer(self, batch: Sequence[int], answers: Sequence[Answer] | BaseException) -> None:
        """Take the answer to one call: one item for each key, or the exception that the call raised."""
        if isinstance(answers, BaseException):
            self._fail_all(batch, Failure.of(answers, Stage.STORE_GET))
            return
        if len(answers) != len(batch):
            raw = f"{len(answers)} answers for {len(batch)} keys"
            self._fail_all(batch, Failure(KVCacheErrorCode.UNKNOWN, raw, Stage.STORE_GET))
            return
        for index, answer in zip(batch, answers, strict=True):
            if answer == self._expected_bytes[index]:
                self._failed.pop(index, None)
            else:
                self._fail(index, self._failure(index, answer))

    def _fail_all(self, indexes: Iterable[int], failure: Failure) -> None:
        for index in indexes:
            self._fail(index, failure)

    def _fail(self, index: int, failure: Failure) -> None:
        self._failed[index] = msgspec.structs.replace(failure, tries=self._tries)

    def _failure(self, index: int, answer: Answer) -> Failure:
        if isinstance(answer, Failure):
            return answer
        if answer >= 0:
            # The store fills what there is and says how much: a value of another size was written under another layout.
            raw = f"{answer} bytes, expected {self._expected_bytes[index]}"
            return Failure(KVCacheErrorCode.VERSION_MISMATCH, raw, Stage.STORE_GET)
        return Failure.of(answer, Stage.STORE_GET)

    def end_pass(self, now_s: float) -> None:
        """End a pass: decide whether there is another one, and when."""
        self._missing = self._worth_retrying()
        self.due_s = None
        if not self._missing:
            return
        backoff_s = min(self._limits.backoff_s * 2 ** (self._tries - 1), MAX_BACKOFF_S)
        if self._tries > self._limits.max_retries:
            self._gave_up = "retries"
        elif now_s + backoff_s > self._deadline_s:
            self._gave_up = "deadline"
        else:
            self.due_s = now_s + backoff_s

    def _worth_retrying(self) -> list[int]:
        """Return what failed, may succeed, and would still count: behind a final failure nothing does."""
        final = [index for index, failure in self._failed.items() if not failure.retryable]
        if final and not self._keeps_a_prefix:
            return []
        end = min((self.targets[index].start_token for index in final), default=None)
        return [
            index
            for index in sorted(self._failed)
            if self._failed[index].retryable and (end is None or self.targets[index].start_token < end)
        ]

    def abandon(self, failure: Failure) -> None:
        """End the load now: what has not arrived has failed with `failure`, unless it had failed otherwise before."""
        self._fail_all((index for index in self._missing if index not in self._failed), failure)
        self._missing = []
        self.due_s = None

    def result(self) -> LoadResult:
        """Return how the load ended.

        Raises:
            RuntimeError: the load is not done.
        """
        if self.due_s is not None:
            raise RuntimeError("a load has no result before it is done")
        retries = max(self._tries - 1, 0)
        if not self._failed:
            end_token = max((target.end_token for target in self.targets), default=self._first_token)
            return LoadResult((), (), False, end_token, len(self.targets), sum(self._expected_bytes), retries, "")
        failed = sorted(self._failed, key=lambda index: _position(self.targets[index]))
        kept_tokens = self._first_token
        if self._keeps_a_prefix:
            kept_tokens = max(kept_tokens, self.targets[failed[0]].start_token)
        invalid = {
            (target.group, target.block): None
            for target in sorted(self.targets, key=_position)
            if target.end_token > kept_tokens
        }
        arrived = sum(size for index, size in enumerate(self._expected_bytes) if index not in self._failed)
        return LoadResult(
            tuple((self.targets[index], self._failed[index]) for index in failed),
            tuple(invalid),
            not self._by_block,
            kept_tokens,
            len(self.targets),
            arrived,
            retries,
            self._gave_up,
        )


def _unbroken(targets: Sequence[Target], first_token: int) -> bool:
    """Whether `targets` are of one group and cover all tokens from `first_token` on.

    Only then can vLLM get single blocks: it takes all before the first block named as computed, and blocks that
    upstream left out (those outside a sliding window, say) were not.
    """
    if len({target.group for target in targets}) > 1:
        return False
    covered = first_token
    for start, end in sorted({(target.start_token, target.end_token) for target in targets}):
        if start > covered:
            return False
        covered = max(covered, end)
    return True


def _position(target: Target) -> tuple[int, int]:
    return target.start_token, target.group


Get: TypeAlias = Callable[[Sequence[Target]], Sequence[Answer]]
"""Makes one call to the store for some targets and returns an answer for each. Raising is an answer for all of them."""


def run_pass(passes: LoadPasses, get: Get, clock_s: Callable[[], float]) -> None:
    """Carry out one pass of a load. Never raises for a failure of the store: failures are answers.

    Args:
        passes: the load; it must be due.
        get: makes one call to the store.
        clock_s: the driver's clock, in seconds.
    """
    for batch in passes.batches():
        targets = [passes.targets[index] for index in batch]
        try:
            answers: Sequence[Answer] | BaseException = get(targets)
        except Exception as error:  # noqa: BLE001 - whatever a store raises is the outcome of these keys
            answers = error
        passes.answer(batch, answers)
    passes.end_pass(clock_s())


class Store(Protocol):
    """The part of `MooncakeDistributedStore` that a load calls."""

    def batch_get_into_multi_buffers(
        self, keys: list[str], addrs: list[list[int]], sizes: list[list[int]], /
    ) -> Sequence[int]:
        """Fill the buffers of each key; return for each the bytes read, or a negative code."""
        ...


def get_from(store: Store) -> "Callable[[Sequence[Target]], Sequence[int]]":
    """Return a `Get` that asks a `MooncakeDistributedStore`, or a stand-in for it."""

    def get(targets: Sequence[Target]) -> Sequence[int]:
        return store.batch_get_into_multi_buffers(
            [target.key for target in targets],
            [target.addresses for target in targets],
            [target.sizes for target in targets],
        )

    return get
