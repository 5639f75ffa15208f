"""Whose blocks are whose, as far as open work names them. Emitted by the scheduler half.

This file knows the envelope, the shape of a block list and words.
"""

# ruff: noqa: D102 - `sentence` is what the base says, of each kind

from ledger import words
from ledger.blocks import Blocks
from ledger.events.base import About, Event

# --- ownership --------------------------------------------------------------------------------------------------------


class BlocksAllocated(Event, frozen=True, gc=False, omit_defaults=True, tag="blocks_allocated"):
    """vLLM gave these blocks to a request to write into, while open work still names them.

    Only blocks that an open job, load or transfer names are recorded. A block that is shared by a prefix hit is not
    allocated anew and not listed.
    """

    about = About("blocks", "begins", uses="owned")

    request: str
    generation: int
    blocks: Blocks

    def sentence(self) -> str:
        request = words.request(self.request, self.generation)
        return f"{words.these_blocks(self.blocks)} {words.was(self.blocks)} given to {request}"


class BlocksReleased(Event, frozen=True, gc=False, omit_defaults=True, tag="blocks_released"):
    """A request gave up these blocks while open work still names them. A job's own pins hold them all the same."""

    about = About("blocks", "ends", uses="owned")

    request: str
    generation: int
    blocks: Blocks

    def sentence(self) -> str:
        request = words.request(self.request, self.generation)
        return f"{words.these_blocks(self.blocks)} {words.was(self.blocks)} given up by {request}"
