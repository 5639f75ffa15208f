"""Block lists as ranges, and back.

A block is `(group, block)`: block numbers repeat across KV-cache groups. A log names many blocks, mostly in runs, so
events carry them as ranges. Order is kept, because it means something: a job frees its blocks tail first, and the keys
of a transfer stand in the order of its blocks. Pure functions; this file knows nothing but integers.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
"""First and last block of a run, both included. `last < first` is a run that counts down."""

Ranges: TypeAlias = tuple[Range, ...]

Blocks: TypeAlias = tuple[tuple[int, Ranges], ...]
"""Runs of blocks by KV-cache group, in order. A group may come more than once."""

NULL_BLOCK = 0
"""vLLM's placeholder block. It backs no KV, so it is never pinned, freed or reported as failed."""


def to_ranges(ids: Iterable[int]) -> Ranges:
    """Return `ids` as runs that count up or down by one, in the order given."""
    iterator = iter(ids)
    first = next(iterator, None)
    if first is None:
        return ()
    runs: list[Range] = []
    last, step = first, 0
    for block in iterator:
        difference = block - last
        if (difference == step and step) or (step == 0 and difference in (1, -1)):
            step = difference
        else:
            runs.append((first, last))
            first, step = block, 0
        last = block
    runs.append((first, last))
    return tuple(runs)


def spoken(numbers: Iterable[int]) -> str:
    """Return numbers as a person writes them: `1-3, 7`."""
    runs = to_ranges(numbers)
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def from_ranges(ranges: Ranges) -> list[int]:
    """Return the block numbers of `ranges`, in order."""
    ids: list[int] = []
    for first, last in ranges:
        if first <= last:
            ids.extend(range(first, last + 1))
        else:
            ids.extend(range(first, last - 1, -1))
    return ids


def by_group(groups: Iterable[tuple[int, Sequence[int]]]) -> Blocks:
    """Return `(group, block numbers)` pairs as `Blocks`; empty lists are left out."""
    return tuple((group, to_ranges(ids)) for group, ids in groups if ids)


def of_pairs(pairs: Iterable[tuple[int, int]]) -> Blocks:
    """Return `(group, block)` pairs as `Blocks`: the blocks of each group in the order in which they came."""
    groups: dict[int, list[int]] = {}
    for group, block in pairs:
        groups.setdefault(group, []).append(block)
    return by_group(groups.items())


def expand(blocks: Blocks) -> Iterator[tuple[int, int]]:
    """Yield every `(group, block)` of `blocks`, in order."""
    for group, ranges in blocks:
        for block in from_ranges(ranges):
            yield group, block


def numbers(blocks: Blocks) -> list[int]:
    """Return the block numbers of `blocks` in order, without their groups: what vLLM's block pool is addressed by."""
    if len(blocks) == 1:
        return from_ranges(blocks[0][1])
    return [block for _, ranges in blocks for block in from_ranges(ranges)]


def count(blocks: Blocks) -> int:
    """Return how many blocks `blocks` names."""
    return sum(abs(last - first) + 1 for _, ranges in blocks for first, last in ranges)


def names(blocks: Blocks, block: tuple[int, int]) -> bool:
    """Return whether `blocks` names that `(group, block)`."""
    group, number = block
    return any(
        min(first, last) <= number <= max(first, last) for each, runs in blocks if each == group for first, last in runs
    )
