"""How many open works name each block. Pure functions over counts; this file knows block lists and nothing else."""

from typing import TypeAlias

from ledger.blocks import Blocks, from_ranges

BlockCounts: TypeAlias = dict[int, dict[int, int]]
"""A count by block, by KV-cache group."""


def count_up(counts: BlockCounts, blocks: Blocks) -> None:
    """Count one more open work over `blocks`."""
    for group, ranges in blocks:
        ids = from_ranges(ranges)
        counted = counts.setdefault(group, {})
        fresh = dict.fromkeys(ids, 1)
        if len(fresh) == len(ids) and counted.keys().isdisjoint(fresh):
            counted.update(fresh)
        else:
            for block in ids:
                counted[block] = counted.get(block, 0) + 1


def count_down(counts: BlockCounts, blocks: Blocks) -> None:
    """Count one open work less over `blocks`."""
    for group, ranges in blocks:
        counted = counts[group]
        for block in from_ranges(ranges):
            left = counted[block] - 1
            if left:
                counted[block] = left
            else:
                del counted[block]
