"""What the simulated engines of both simulators share: vLLM's scheduler, its tiny model, and a step of it.

vLLM keeps some request ids in sets, whose order differs from process to process, and frees blocks in that order. So
that a seed means the same run everywhere, `OrderedScheduler` makes these few places go in order of the id.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from vllm.config import ModelConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tools.sim.step import RequestInStep

VOCABULARY = 500
MAX_MODEL_LEN = 2048


def quiet() -> None:
    """Silence what vLLM and the plugin say: thousands of runs would drown the result, and the log is checked anyway."""
    for name in ("vllm", "kvledger"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


class Batch(NamedTuple):
    """A step between its schedule and its output.

    Attributes:
        runs: what the model computes.
        sampled: for each of them, whether a token is sampled.
    """

    output: SchedulerOutput
    runs: list[RequestInStep]
    sampled: list[bool]


class SortedIds(set[str]):
    """A set of request ids that is walked in their order."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


class OrderedScheduler(Scheduler):
    """vLLM's scheduler, walking its sets of request ids in order."""

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End requests one by one."""
        if request_ids is None or isinstance(request_ids, str):
            return super().finish_requests(request_ids, finished_status)
        ended: list[Request] = []
        for request_id in sorted(request_ids):
            ended.extend(super().finish_requests(request_id, finished_status))
        return ended


class OrderedAsyncScheduler(OrderedScheduler, AsyncScheduler):
    """The same for vLLM's asynchronous scheduler."""


# --- a step -----------------------------------------------------------------------------------------------------------


def scheduled(scheduler: Scheduler) -> Batch:
    """Let the scheduler schedule a step, and return it with what the model computes."""
    output = scheduler.schedule()
    requests, manager = scheduler.requests, scheduler.kv_cache_manager
    counts = output.num_scheduled_tokens
    runs: list[RequestInStep] = []
    sampled: list[bool] = []
    started = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    started.extend(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for request_id, computed in started:
        request = requests[request_id]
        runs.append((request, computed, counts[request_id], manager.get_block_ids(request_id)))
        sampled.append(not request.is_prefill_chunk)
    return Batch(output, runs, sampled)


def combined(
    batch: Batch,
    answers: Sequence[KVConnectorOutput | None],
    sample: Callable[[Request, int], int],
    aggregate: Callable[[Any], ModelRunnerOutput | None],
) -> ModelRunnerOutput:
    """Return the output of a step, with the answers of all ranks as vLLM's aggregator combines them.

    Args:
        batch: the step.
        answers: one for each rank. The aggregator writes into the first one.
        sample: returns the token of a request at a position.
        aggregate: vLLM's aggregator.
    """
    ids = [request.request_id for request, *_ in batch.runs]
    tokens = [
        [sample(request, start + count)] if sampled else []
        for (request, start, count, _), sampled in zip(batch.runs, batch.sampled, strict=True)
    ]
    outputs = [
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            kv_connector_output=answer,
        )
        for answer in answers
    ]
    output = aggregate(outputs)
    if output is None:
        raise RuntimeError("vLLM's aggregator dropped the output")
    return output


# --- configuration ----------------------------------------------------------------------------------------------------


def hash_of_block(value: Any) -> bytes:
    """Hash what vLLM hashes for a block: the parent's hash, its tokens, and extra keys.

    The parent of a first block is a number that vLLM draws for each process; here it is nothing.
    """
    if isinstance(value, tuple) and value[0] == kv_cache_utils.NONE_HASH:
        value = (b"", *value[1:])
    return hashlib.sha256(repr(value).encode()).digest()[:16]


@lru_cache(maxsize=1)
def model_config() -> ModelConfig:
    folder = Path(tempfile.mkdtemp(prefix="kvledger-sim-"))
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "vocab_size": 512,
                "max_position_embeddings": MAX_MODEL_LEN,
                "torch_dtype": "bfloat16",
            }
        )
    )
    if not hasattr(kv_cache_utils, "NONE_HASH"):
        kv_cache_utils.init_none_hash(hash_of_block)
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_MODEL_LEN)
