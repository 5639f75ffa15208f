"""Another connector beside the plugin, under vLLM's `MultiConnector`: it has hits of its own, and loads them.

A fake: it stands for any connector that is not ours, and does what the plugin must live with. vLLM asks both for hits
and lets one of them load; the outputs of a step hold the finished loads of both. Its loads bring what the model would
have computed. This file knows vLLM's connector interface and the simulated memory, and nothing of the plugin.
"""

from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from tools.sim.clock import STEP_NS, Clock
from tools.sim.plans import mix, number_of
from tools.sim.store.memory import Memory


class OtherLoad(NamedTuple):
    """A load of the other connector: what to write into which blocks."""

    request: str
    blocks: list[int]
    contents: list[bytes]


class OtherMetadata(KVConnectorMetadata):
    """What the other connector tells its workers in a step."""

    def __init__(self, loads: list[OtherLoad]) -> None:
        self.loads = loads


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's half. It has a hit for about every third prompt, and knows no failure."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[arg-type]
        self._block_size = vllm_config.cache_config.block_size
        self._planned: list[OtherLoad] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how much of a prompt is there, if it is one of those."""
        roll = mix(number_of(request.block_hashes[0].hex()), request.num_tokens) if request.block_hashes else 1
        hit = roll % (request.num_tokens // self._block_size + 1) * self._block_size if roll % 3 == 0 else 0
        new = min(hit, (request.num_tokens - 1) // self._block_size * self._block_size) - num_computed_tokens
        return (new, True) if new > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan a load."""
        if num_external_tokens <= 0:
            return
        (table,) = blocks.get_block_ids()
        first = len(table) - num_external_tokens // self._block_size  # the load's blocks are those allocated last
        last = len(table)
        self._planned.append(OtherLoad(request.request_id, table[first:last], request.block_hashes[first:last]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OtherMetadata:
        """Give what was planned to the workers."""
        planned, self._planned = self._planned, []
        return OtherMetadata(planned)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold nothing."""
        return False, None

    # The workers' half is `OtherWorker`.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Not used here."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Not used here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Not used here."""

    def wait_for_save(self) -> None:
        """Not used here."""


class OtherWorker:
    """One rank's half of the other connector."""

    def __init__(self, rank: int, memory: Memory, clock: Clock) -> None:
        self._rank = rank
        self._memory = memory
        self._clock = clock
        self._finished: list[str] = []

    def run(self, metadata: OtherMetadata) -> None:
        """Begin the loads of a step; each takes some steps."""
        for load in metadata.loads:
            steps = 1 + mix(number_of(load.request), self._rank, len(load.blocks)) % 4
            self._clock.at(self._clock.now_ns + steps * STEP_NS, lambda load=load: self._arrive(load))  # type: ignore[misc]

    def _arrive(self, load: OtherLoad) -> None:
        for block, content in zip(load.blocks, load.contents, strict=True):
            self._memory.write(self._rank, block, (content,))
        self._finished.append(load.request)

    def take_finished(self) -> list[str]:
        """Return the requests whose loads have arrived since the last call."""
        finished, self._finished = self._finished, []
        return finished
