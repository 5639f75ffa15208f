"""How the state takes an event: a function of the projection and one event, registered with the kinds it takes.

A handler changes the projection, or raises `Refused` before it has changed anything. This file knows events and the
projection.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from ledger import events as ev
from ledger.blocks import NULL_BLOCK, Blocks
from ledger.state.projection import Projection

Handler: TypeAlias = Callable[[Projection, Any], None]

R = TypeVar("R", bound=Handler)


class Handlers(dict[type[ev.Event], Handler]):
    """The handlers of one part of the state, by the kind of event that they take."""

    def on(self, *kinds: type[ev.Event]) -> Callable[[R], R]:
        """Register the function below for events of these kinds."""

        def register(handler: R) -> R:
            self.update(dict.fromkeys(kinds, handler))
            return handler

        return register


def names_null_block(blocks: Blocks) -> bool:
    """Return whether the null block is among `blocks`. It backs no KV."""
    return any(min(run) <= NULL_BLOCK for _, ranges in blocks for run in ranges)
