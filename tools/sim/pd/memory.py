"""The GPU memory of all workers, by address: what a copy moves, and what the model writes and reads.

A worker holds some layers and some heads. The KV of a token, in a layer and a head, is a word made of all tokens up to
it, so that two words are equal exactly if they stand for the same KV. A copy goes by addresses, as the transfer
engine's does, so what is checked is upstream's own planning, too.

This file knows numpy and vLLM's request objects.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.request import Request

from tools.sim.pd.plan import BLOCK_SIZE, HEADS, LAYERS, Side
from tools.sim.plans import mix
from tools.sim.step import RequestInStep

WORD_BYTES = 4
WINDOW = 3 * BLOCK_SIZE
_REGION_BITS = 32


class Place(NamedTuple):
    """Where an address is."""

    engine: int
    rank: int
    layer: int
    block: int


class Worker:
    """The KV cache of one worker.

    Attributes:
        layers, heads: what it holds, as numbers of the model.
        addresses: where each of its layers begins.
        block_bytes: bytes of a block in a layer.
    """

    def __init__(self, engine: int, rank: int, side: Side) -> None:
        stage, tp_rank = divmod(rank, side.tp)
        per_stage, per_rank = LAYERS // side.pp, HEADS // side.tp
        self.layers = list(range(stage * per_stage, (stage + 1) * per_stage))
        self.heads = list(range(tp_rank * per_rank, (tp_rank + 1) * per_rank))
        self.block_bytes = per_rank * BLOCK_SIZE * WORD_BYTES
        self.words = np.zeros((per_stage, side.blocks, per_rank, BLOCK_SIZE), dtype=np.uint32)
        self.bytes = [self.words[layer].reshape(-1).view(np.uint8) for layer in range(per_stage)]
        self.addresses = [(1 + (engine * 64 + rank) * LAYERS + layer) << _REGION_BITS for layer in range(per_stage)]


class Machines:
    """All workers of a run.

    Args:
        sides: the engines, the decode last.
        groups: number of KV-cache groups; layers take turns.

    Attributes:
        touched: called with the engine, the blocks of a copy's source or target, whether it writes, and the transfers.
        wrong: called with the engine and a line when a step attends to wrong KV.
    """

    def __init__(self, sides: Sequence[Side], groups: int) -> None:
        self.workers = [[Worker(index, rank, side) for rank in range(side.ranks)] for index, side in enumerate(sides)]
        self.groups = groups
        self.touched: Callable[[int, int, int, int, bool, Sequence[str]], None] = lambda *_: None
        self.wrong: Callable[[int, str], None] = lambda *_: None
        self._by_region = {
            address >> _REGION_BITS: (index, rank, layer)
            for index, workers in enumerate(self.workers)
            for rank, worker in enumerate(workers)
            for layer, address in enumerate(worker.addresses)
        }
        self._salts = np.array(
            [[mix(layer, head) & 0xFFFFFFFF for head in range(HEADS)] for layer in range(LAYERS)], dtype=np.uint32
        )

    # --- transfers --------------------------------------------------------------------------------------------------

    def copy(
        self, source_engine: int, target_engine: int, transfers: Sequence[str], source: int, target: int, length: int
    ) -> None:
        """Copy bytes between two workers."""
        here, from_byte = self._at(source_engine, source, length, writes=False, transfers=transfers)
        there, to_byte = self._at(target_engine, target, length, writes=True, transfers=transfers)
        there[to_byte : to_byte + length] = here[from_byte : from_byte + length]

    def _at(self, engine: int, address: int, length: int, *, writes: bool, transfers: Sequence[str]) -> tuple[Any, int]:
        found, rank, layer = self._by_region[address >> _REGION_BITS]
        if found != engine:
            raise RuntimeError(f"a push of engine {engine} is about memory of engine {found}")
        worker = self.workers[engine][rank]
        offset = address & ((1 << _REGION_BITS) - 1)
        for block in range(offset // worker.block_bytes, (offset + length - 1) // worker.block_bytes + 1):
            self.touched(engine, rank, worker.layers[layer] % self.groups, block, writes, transfers)
        return worker.bytes[layer], offset

    # --- the model --------------------------------------------------------------------------------------------------

    def compute(self, engine: int, runs: Sequence[RequestInStep]) -> None:
        """Run a step: write the KV of its tokens, then attend to what is before them."""
        for request, start, count, tables in runs:
            names = self._names(request, start + count)
            for group, table in enumerate(tables):
                self._write(engine, group, table, names, start, start + count)
        for request, start, _, tables in runs:
            names = self._names(request, start)
            for group, table in enumerate(tables):
                self._attend(engine, request, group, table, names, start)

    def _names(self, request: Request, end: int) -> Any:
        """Return the word of each token up to `end`."""
        names: list[int] = request.__dict__.setdefault("simulated_names", [])
        tokens: Any = request._all_token_ids
        while len(names) < end:
            names.append(mix(names[-1] if names else 1, tokens[len(names)]) & 0xFFFFFFFF)
        return np.array(names[:end], dtype=np.uint32)

    def _write(self, engine: int, group: int, table: Sequence[int], names: Any, start: int, end: int) -> None:
        positions = np.arange(start, end)
        blocks, slots = np.array(table)[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        for worker in self.workers[engine]:
            for place, layer in enumerate(worker.layers):
                if layer % self.groups == group:
                    worker.words[place, blocks, :, slots] = names[start:end, None] ^ self._salts[layer, worker.heads]

    def _attend(self, engine: int, request: Request, group: int, table: Sequence[int], names: Any, start: int) -> None:
        # A window reaches one token further back. vLLM 0.32 and 0.33 give up the blocks before the window of a prompt
        # that is loaded whole, and then compute its last token again: that token misses the first of its window.
        low = max(0, start - WINDOW + 2) if group else 0
        if low >= start:
            return
        positions = np.arange(low, start)
        blocks, slots = np.array(table)[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        for rank, worker in enumerate(self.workers[engine]):
            for place, layer in enumerate(worker.layers):
                if layer % self.groups != group:
                    continue
                due = names[low:start, None] ^ self._salts[layer, worker.heads]
                found = worker.words[place, blocks, :, slots]
                if not np.array_equal(found, due):
                    token = int(np.argwhere((found != due).any(axis=1))[0][0])
                    self.wrong(
                        engine,
                        f"request {request.request_id} attends to token {low + token} in block {blocks[token]} of "
                        f"group {group}, layer {layer}, on rank {rank}, which holds other KV",
                    )
                    return
