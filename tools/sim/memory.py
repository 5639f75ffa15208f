"""Whose tokens each GPU block holds, on each rank: the truth that no ledger can know.

The content of a block is named by the prefix that ends with it: vLLM's own block hash covers every token up to there,
so two blocks hold the same KV exactly if their hashes are equal. A block that is not full is named by its prefix and
the tokens in it. The model writes when a step runs, a load writes when its bytes arrive; a step that attends to a
block which holds something else has computed wrong KV, and says so.

This file knows vLLM's request objects, and nothing of schedulers, stores or ledgers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from vllm.v1.request import Request

STALE = ("stale",)
"""The content of a block that was written for tokens which were taken back."""


class Group(NamedTuple):
    """A KV-cache group.

    Attributes:
        block_size: tokens in a block.
        hashes_per_block: how many of vLLM's hashes fall into a block.
        window: tokens that attention looks back, 0 for all.
        salt: what tells this group's content from another's.
    """

    block_size: int
    hashes_per_block: int
    window: int
    salt: bytes


Run: TypeAlias = tuple[Request, int, int, Sequence[Sequence[int]]]
"""A request in a step: tokens that are computed before it, tokens of the step, and the block table by group."""


class Memory:
    """The KV blocks of all ranks.

    Args:
        ranks: how many ranks.
        blocks: blocks in the pool of each rank.
        groups: the KV-cache groups.
        wrong: called with one line when a step attends to wrong KV.

    Attributes:
        content: what each block holds, by rank and block number.
    """

    def __init__(self, ranks: int, blocks: int, groups: Sequence[Group], wrong: Callable[[str], None]) -> None:
        self.content: list[list[Any]] = [[None] * blocks for _ in range(ranks)]
        self.groups = tuple(groups)
        self._wrong = wrong

    def compute(self, runs: Sequence[Run]) -> None:
        """Run a step: write the KV of all its tokens, and attend to what is before them.

        The model goes layer by layer over the whole batch, so a request may attend to a block that another one fills in
        the same step. vLLM relies on that.
        """
        for request, start, count, tables in runs:
            for group, table in zip(self.groups, tables, strict=True):
                if start % group.block_size:
                    self._attend_partly(request, group, table[start // group.block_size], start)
                self._write(request, group, table, start, start + count)
        for request, start, _, tables in runs:
            for group, table in zip(self.groups, tables, strict=True):
                self._attend(request, group, table, start)

    def _write(self, request: Request, group: Group, table: Sequence[int], start: int, end: int) -> None:
        tokens: list[int] = request._all_token_ids
        size = group.block_size
        for index in range(start // size, (end - 1) // size + 1):
            block = table[index]
            if block:
                value = self._named(group, request.block_hashes, tokens, index, min(end, (index + 1) * size))
                for rank in self.content:
                    rank[block] = value

    def _attend(self, request: Request, group: Group, table: Sequence[int], start: int) -> None:
        size, step = group.block_size, group.hashes_per_block
        first = start // size
        low = max(0, start - group.window + 1) // size if group.window else 0
        hashes = request.block_hashes[low * step + step - 1 : first * step : step]
        expected = [value + group.salt for value in hashes] if group.salt else hashes
        ids = table[low:first]
        for rank, content in enumerate(self.content):
            found = [content[block] for block in ids]
            if found != expected:
                self._report(request, group, rank, low, ids, found, expected)

    def _attend_partly(self, request: Request, group: Group, block: int, start: int) -> None:
        size = group.block_size
        index = start // size
        tokens: list[int] = request._all_token_ids
        full = self._named(group, request.block_hashes, tokens, index, (index + 1) * size)
        part = self._named(group, request.block_hashes, tokens, index, start)
        kept = start - index * size
        for rank, content in enumerate(self.content):
            found = content[block]
            longer = isinstance(found, tuple) and len(found) == 3 and (*found[:2], found[2][:kept]) == part
            if found not in (full, part) and not longer:
                self._report(request, group, rank, index, [block], [found], [part])

    def _named(self, group: Group, hashes: Sequence[bytes], tokens: Sequence[int], index: int, end: int) -> Any:
        size, step = group.block_size, group.hashes_per_block
        if end > len(tokens):
            return STALE
        if end == (index + 1) * size:
            return hashes[(index + 1) * step - 1] + group.salt
        parent = hashes[index * step - 1] if index else b""
        return (group.salt, parent, tuple(tokens[index * size : end]))

    def _report(
        self,
        request: Request,
        group: Group,
        rank: int,
        low: int,
        ids: Sequence[int],
        found: list[Any],
        expected: list[Any],
    ) -> None:
        for offset, (block, got, due) in enumerate(zip(ids, found, expected, strict=False)):
            if got != due:
                self._wrong(
                    f"request {request.request_id} attends to block {block} (number {low + offset} of group "
                    f"{self.groups.index(group)}) on rank {rank}, which holds {shown(got)} instead of {shown(due)}"
                )
                return
        self._wrong(f"request {request.request_id} has {len(expected)} full blocks computed, and a table of {len(ids)}")


def shown(content: Any) -> str:
    """Return a content as a reader of a failure wants it."""
    if content is None:
        return "nothing"
    if isinstance(content, bytes):
        return content.hex()[:12]
    if len(content) == 3:
        return f"{len(content[2])} tokens after {content[1].hex()[:12] or 'the start'}"
    return " ".join(str(part) for part in content)
