"""vLLM's real v1 scheduler and block pool in a plain process, with a connector attached: no model, no worker.

For tests of the connector's contract and for benchmarks. What is replaced, and nothing else: the lookup client (it
would ask a worker over a socket) answers from a table, and model outputs are made up. The simulator has a world of its
own in `tools/sim`.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Before vLLM is imported: it reads these once.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONHASHSEED", "0")

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    MooncakeStoreWorkerMetadata,
    TailKeyBoundary,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from connector import plugin
from connector.store.metadata import JobReport, LedgerWorkerMetadata, LoadReport

UPSTREAM = "MooncakeStoreConnector"
OURS = "KVLedgerStoreConnector"
BLOCK_SIZE = 16
STATE_BLOCK_SIZE = 64

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


class TableLookup:
    """Stands in for the lookup client, which would ask a worker over a socket: answers hit lengths from a table."""

    def __init__(self) -> None:
        self.hits: dict[str, int] = {}
        """Tokens that the store holds of a request, by request id; none if it is not named."""

    def lookup(
        self, req_id: str, num_tokens: int, block_hashes: Sequence[Any], non_block: bool = False
    ) -> MooncakeLookupResult:
        """Return the hit length of a request."""
        del num_tokens, block_hashes, non_block
        hit = self.hits.get(req_id, 0)
        return MooncakeLookupResult(hit, (TailKeyBoundary(0, hit),) if hit else ())

    def discard(self, req_id: str) -> None:
        """Forget nothing: the table has no pending lookups."""


class PlainScheduler:
    """A scheduler, its connector, and how to step them.

    Args:
        connector: the connector's name.
        extra: keys for `kv_connector_extra_config`.
        num_blocks: blocks of the pool, the null block among them.
        world_size: ranks whose reports the connector waits for.
        hybrid: a second KV-cache group with the states of a Mamba model, whose blocks are four times as long.
        transfer: further fields of vLLM's `KVTransferConfig`.
    """

    def __init__(
        self,
        connector: str = OURS,
        extra: dict[str, Any] | None = None,
        *,
        num_blocks: int = 40,
        world_size: int = 1,
        hybrid: bool = False,
        **transfer: Any,
    ) -> None:
        plugin.register()
        init_none_hash(sha256)
        self._folder = tempfile.TemporaryDirectory(prefix="plain-scheduler-")
        ours = {"ledger_path": self._folder.name, "evidence": False, **(extra or {})}
        if connector.startswith("KVLedger"):
            extra = ours
        elif connector == "MultiConnector":
            named = [
                {"kv_connector": OURS, "kv_role": "kv_both", "kv_connector_extra_config": ours},
                {"kv_connector": UPSTREAM, "kv_role": "kv_both", "kv_connector_extra_config": {"lookup_rpc_port": 1}},
            ]
            extra = {"connectors": named}
        config = VllmConfig(
            model_config=ModelConfig(
                model=self._model(), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, is_encoder_decoder=False
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                **{
                    "kv_connector": connector,
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": extra or {},
                    **transfer,
                }
            ),
        )
        config.cache_config.num_gpu_blocks = num_blocks
        config.parallel_config.world_size = world_size
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        if hybrid:
            config.cache_config.mamba_cache_mode = "align"
            state = MambaSpec(
                block_size=STATE_BLOCK_SIZE, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"
            )
            groups.append(KVCacheGroupSpec(["state"], state))
        kv_cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache, config)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache,
            log_stats=False,
            block_size=block_size,
            hash_block_size=hash_block_size,
            structured_output_manager=StructuredOutputManager(config),
        )
        attached: Any = self.scheduler.connector
        children: list[Any] = getattr(attached, "sub_connectors", [attached])
        self.connector: Any = children[0]
        """The connector; ours when it is a child of a `MultiConnector`."""
        self.half: Any = self.connector.connector_scheduler
        self.lookup = TableLookup()
        for child in children:
            if hasattr(child.connector_scheduler, "client"):  # the P/D connector looks nothing up
                child.connector_scheduler.client.close()
                child.connector_scheduler.client = self.lookup
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)

    def _model(self) -> str:
        (Path(self._folder.name) / "config.json").write_text(json.dumps(MODEL))
        return self._folder.name

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def add(
        self, request_id: str, tokens: list[int], max_tokens: int = 16, transfer: dict[str, Any] | None = None
    ) -> Request:
        """Queue a request and return it; `transfer` is what a router gives along for a P/D transfer."""
        extra_args = {"kv_transfer_params": transfer} if transfer is not None else None
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args)
        request = Request(request_id, tokens, params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> SchedulerOutput:
        """Return what the scheduler decides for the next step."""
        return self.scheduler.schedule()

    def update(self, output: SchedulerOutput, **connector_output: Any) -> None:
        """End a step: every scheduled request that has no tokens left to compute gets one token; workers answer."""
        ids = list(output.num_scheduled_tokens)
        sampled = [[7] if self._samples(request_id) else [] for request_id in ids]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
                kv_connector_output=KVConnectorOutput(**connector_output),
            ),
        )

    def _samples(self, request_id: str) -> bool:
        request = self.scheduler.requests.get(request_id)
        return request is not None and request.num_computed_tokens >= request.num_tokens

    def step(self, jobs: Iterable[JobReport] = (), loads: Iterable[LoadReport] = (), **answer: Any) -> SchedulerOutput:
        """Schedule, and end the step with these reports of the workers."""
        output = self.schedule()
        self.update(output, kv_connector_worker_meta=self.reports(jobs, loads), **answer)
        return output

    def reports(
        self, jobs: Iterable[JobReport], loads: Iterable[LoadReport] = ()
    ) -> MooncakeStoreWorkerMetadata | None:
        """Return worker metadata as the connector in use wants it, None when there is nothing to report."""
        job_list, load_list = list(jobs), list(loads)
        if not job_list and not load_list:
            return None
        if self.connector.__class__.__name__ == UPSTREAM:
            counts: dict[int, int] = {}
            for report in job_list:
                counts[report.job] = counts.get(report.job, 0) + 1
            return MooncakeStoreWorkerMetadata(completed_saves=counts)
        return LedgerWorkerMetadata(jobs=job_list, loads=load_list)

    def close(self) -> None:
        """Shut the connector down and remove its files."""
        self.connector.shutdown()
        self._folder.cleanup()


def jobs_of(output: SchedulerOutput) -> list[int]:
    """Return the ids of the store jobs that a step gave to the workers."""
    metadata: Any = output.kv_connector_metadata
    return [req_meta.store_job_id for req_meta in metadata.requests if req_meta.can_save]
