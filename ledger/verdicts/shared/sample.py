"""Many of one sort: the first ones, which show what it is, and how many there were in all.

What happens again and again must neither fill the memory nor be counted as less than it was. This file knows no event.
"""

from typing import Generic, TypeVar

KEPT = 200
"""How many of one sort are kept; the rest is only counted."""

T = TypeVar("T")


class Sample(Generic[T]):
    """The first of many, and their number.

    Attributes:
        kept: the first ones.
        number: how many in all.
    """

    __slots__ = ("kept", "number")

    def __init__(self) -> None:
        self.kept: list[T] = []
        self.number = 0

    @property
    def has_room(self) -> bool:
        """Whether a further one is kept."""
        return len(self.kept) < KEPT

    def copy(self) -> "Sample[T]":
        """Return another one of the same, to which more can be added."""
        made: Sample[T] = Sample()
        made.kept, made.number = [*self.kept], self.number
        return made

    def add(self, one: T) -> None:
        """Count one, and keep it if there is room."""
        self.number += 1
        if self.has_room:
            self.kept.append(one)
