"""What the plans of both simulators share: what a plan is, and the dice that it is drawn with.

Dice use nothing of `random` but `Random.random()`, the one method whose values Python promises to keep across
versions. This file knows no vLLM.
"""

import random
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class Decision(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """One thing that a client or a fault does."""


class Plan(msgspec.Struct, frozen=True):
    """What happens in a run: it is drawn from `seed`, and without the seed it is still the same run.

    Attributes:
        steps: engine steps with clients and faults; after them everything must settle.
        shape: the engine, or the engines.
        decisions: what clients and faults do.
    """

    seed: int
    steps: int
    shape: Any
    decisions: tuple[Any, ...]


class Dice:
    """Draws from a seed, the same on every machine and every Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, bound: int) -> int:
        """Return a whole number in `[0, bound)`."""
        return int(self._random() * bound)

    def between(self, first: int, last: int) -> int:
        """Return a whole number in `[first, last]`."""
        return first + self.below(last - first + 1)

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self._random() < probability

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of `choices`."""
        return choices[self.below(len(choices))]


def mix(*numbers: int) -> int:
    """Return 64 bits that depend on all of `numbers` and look random: decisions that need no dice."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = ((state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 29
        state = (state * 0x94D049BB133111EB) & _MASK
        state ^= state >> 32
    return state


_MASK = (1 << 64) - 1


def number_of(name: str) -> int:
    """Return a number for a request id or a key, the same in every process."""
    return zlib.crc32(name.encode())
