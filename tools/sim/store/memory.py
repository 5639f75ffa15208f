"""Whose tokens each GPU block holds, on each rank: the truth that no ledger can know.

A block holds *units* of KV, one for each of vLLM's prefix hashes that falls into it. A unit is named by the hash of the
prefix that ends with it, which covers every token up to there, so two units hold the same KV exactly if their names are
equal. A unit that is not full is named by the prefix before it and the tokens in it. A block of a Mamba group holds one
state, named by the prefix after which the model had it.

The model writes when a step runs, a load writes when its bytes arrive. A step that attends to a unit which holds
something else has computed wrong KV, and says so.

This file knows vLLM's request objects, and nothing of schedulers, stores or ledgers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm.v1.request import Request

from tools.sim.step import RequestInStep

STALE = ("stale",)
"""What is written for tokens that were taken back."""


class Group(NamedTuple):
    """A KV-cache group.

    Attributes:
        units: prefix hashes in a block.
        window: tokens that attention looks back, 0 for all.
        salt: what tells this group's content from another's.
        states: a block holds the model's state after some tokens, and not the KV of its own tokens (Mamba).
    """

    units: int
    window: int = 0
    salt: bytes = b""
    states: bool = False


class Memory:
    """The KV blocks of all ranks.

    Args:
        ranks: how many ranks.
        blocks: blocks in the pool of each rank.
        unit_tokens: tokens that one prefix hash covers beyond the one before.
        groups: the KV-cache groups.
        wrong: called with one line when a step attends to wrong KV.
    """

    def __init__(
        self, ranks: int, blocks: int, unit_tokens: int, groups: Sequence[Group], wrong: Callable[[str], None]
    ) -> None:
        self._stride = max(group.units for group in groups)
        self._unit_tokens = unit_tokens
        self._groups = tuple(groups)
        self._wrong = wrong
        self._ranks: list[list[Any]] = [[None] * (blocks * self._stride) for _ in range(ranks)]

    # --- transfers --------------------------------------------------------------------------------------------------

    def read(self, rank: int, block: int) -> tuple[Any, ...]:
        """Return what a block holds."""
        start = block * self._stride
        return tuple(self._ranks[rank][start : start + self._stride])

    def write(self, rank: int, block: int, content: Sequence[Any]) -> None:
        """Let a block hold `content`, as `read` returned it."""
        start = block * self._stride
        self._ranks[rank][start : start + self._stride] = content

    def spoil(self, rank: int, block: int, why: str) -> None:
        """Let a block hold nothing of use."""
        self.write(rank, block, [(why,)] * self._stride)

    def salt_of(self, group: int) -> bytes:
        """Return what tells a group's content from another's."""
        return self._groups[group].salt

    # --- the model --------------------------------------------------------------------------------------------------

    def compute(self, runs: Sequence[RequestInStep], copies: Sequence[tuple[int, int]] = ()) -> None:
        """Run a step: write the KV of all its tokens, and attend to what is before them.

        The model goes layer by layer over the whole batch, so a request may attend to a block that another one fills in
        the same step. vLLM relies on that.

        Args:
            runs: what is computed.
            copies: source and target of blocks that are copied before.
        """
        for source, target in copies:
            for rank in range(len(self._ranks)):
                self.write(rank, target, self.read(rank, source))
        for request, start, count, tables in runs:
            for number, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
                if group.states:
                    self._advance(request, number, table, start, start + count)
                else:
                    self._write_tokens(request, number, table, start, start + count)
        for request, start, _, tables in runs:
            for number, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
                if not group.states:
                    self._attend(request, number, table, start)

    def _write_tokens(self, request: Request, number: int, table: Sequence[int], start: int, end: int) -> None:
        group, size, stride = self._groups[number], self._unit_tokens, self._stride
        if start % size:
            self._attend_partly(request, number, table, start)
        for unit in range(start // size, (end - 1) // size + 1):
            block = table[unit // group.units]
            if block:
                name = self._name(request, group, min(end, (unit + 1) * size))
                place = block * stride + unit % group.units
                for content in self._ranks:
                    content[place] = name

    def _attend(self, request: Request, number: int, table: Sequence[int], start: int) -> None:
        """Compare the full units before `start` with the request's own prefix."""
        group, size, stride = self._groups[number], self._unit_tokens, self._stride
        low = max(0, start - group.window + 1) // size if group.window else 0
        high = start // size
        expected: Sequence[Any] = request.block_hashes[low:high]
        if group.salt:
            expected = [name + group.salt for name in expected]
        units = group.units
        if units == 1:
            places = [block * stride for block in table[low:high]] if stride > 1 else table[low:high]
        else:
            places = [table[unit // units] * stride + unit % units for unit in range(low, high)]
        for rank, content in enumerate(self._ranks):
            found = [content[place] for place in places]
            if found != expected:
                self._report(request, number, rank, places, found, expected)

    def _attend_partly(self, request: Request, number: int, table: Sequence[int], start: int) -> None:
        """Compare the tokens before `start` in its own unit, which this step goes on to fill."""
        group, size = self._groups[number], self._unit_tokens
        unit = start // size
        place = table[unit // group.units] * self._stride + unit % group.units
        part = self._name(request, group, start)
        full = self._name(request, group, (unit + 1) * size)
        kept = start - unit * size
        for rank, content in enumerate(self._ranks):
            found = content[place]
            longer = isinstance(found, tuple) and len(found) == 3 and (*found[:2], found[2][:kept]) == part
            if found not in (full, part) and not longer:
                self._report(request, number, rank, [place], [found], [part])

    def _advance(self, request: Request, number: int, table: Sequence[int], start: int, end: int) -> None:
        """Take the state after `start` tokens from its block, and leave the one after `end` tokens in its own."""
        group, stride = self._groups[number], self._stride
        tokens = group.units * self._unit_tokens
        if start:
            place = table[(start - 1) // tokens] * stride
            due = self._name(request, group, start)
            for rank, content in enumerate(self._ranks):
                if content[place] != due:
                    self._report(request, number, rank, [place], [content[place]], [due])
        block = table[(end - 1) // tokens]
        if block:
            state = self._name(request, group, end)
            for content in self._ranks:
                content[block * stride] = state

    def _name(self, request: Request, group: Group, end: int) -> Any:
        """Return the name of the unit that ends after `end` tokens of the request."""
        tokens: list[int] = request._all_token_ids
        size = self._unit_tokens
        if end > len(tokens):
            return STALE
        if end % size == 0:
            return request.block_hashes[end // size - 1] + group.salt
        whole = end // size
        parent = request.block_hashes[whole - 1] if whole else b""
        return (group.salt, parent, tuple(tokens[whole * size : end]))

    def _report(
        self,
        request: Request,
        number: int,
        rank: int,
        places: Sequence[int],
        found: Sequence[Any],
        expected: Sequence[Any],
    ) -> None:
        for place, got, due in zip(places, found, expected, strict=False):
            if got != due:
                self._wrong(
                    f"request {request.request_id} attends to block {place // self._stride} of group {number} on rank "
                    f"{rank}, which holds {shown(got)} instead of {shown(due)}"
                )
                return
        self._wrong(f"request {request.request_id} has {len(expected)} units computed, and a table of {len(places)}")


def shown(content: Any) -> str:
    """Return the name of a unit, or of a block's units, as a reader of a failure wants it."""
    if content is None:
        return "nothing"
    if isinstance(content, bytes):
        return content.hex()[:12]
    if len(content) == 3 and isinstance(content[2], tuple):
        return f"{len(content[2])} tokens after {content[1].hex()[:12] or 'the start'}"
    return ", ".join(shown(part) if not isinstance(part, str) else part for part in content)
