"""What the memories of both simulators take: a request in a step of the model. It knows vLLM's request objects."""

from collections.abc import Sequence
from typing import TypeAlias

from vllm.v1.request import Request

RequestInStep: TypeAlias = tuple[Request, int, int, Sequence[Sequence[int]]]
"""A request in a step: tokens that are computed before it, tokens of the step, and the block table by group."""
