"""The book with its indexes by block: what is asked of it, and how a whole book is taken over.

This file knows the records and their counts.
"""

import hashlib
from collections.abc import Iterable

import msgspec

from ledger.blocks import Blocks, expand
from ledger.state.counts import BlockCounts, count_up
from ledger.state.records import Book


class Projection:
    """The book and its indexes.

    Attributes:
        book: the projection itself. Read it freely; only the rules write it.
        pins: how many jobs pin each block, by group. An index of `book.jobs`.
        targets: how many loads write each block, by group. An index of `book.loads`.
        held: how many sends and recvs name each block, by group. An index of `book.sends` and `book.recvs`.
        pending_jobs: how many jobs still wait for a rank and will be settled. An index of `book.jobs`.
    """

    def __init__(self, book: Book | None = None) -> None:
        self.book = Book()
        self.pins: BlockCounts = {}
        self.targets: BlockCounts = {}
        self.held: BlockCounts = {}
        self.pending_jobs = 0
        if book is not None:
            self.restore(book)

    def encode(self) -> bytes:
        """Return the book as JSON, in the order in which its parts came: the same bytes for the same events."""
        return _ENCODER.encode(self.book)

    def digest(self) -> str:
        """Return the SHA-256 of `encode()`, in hex."""
        return hashlib.sha256(self.encode()).hexdigest()

    def restore(self, book: Book) -> None:
        """Take over a whole book, as a checkpoint after a gap carries it."""
        self.book = book
        self.pins = {}
        self.targets = {}
        self.held = {}
        self.pending_jobs = 0
        for job in book.jobs.values():
            count_up(self.pins, job.blocks)
            if not job.quarantined:
                self.pending_jobs += 1
        for load in book.loads.values():
            count_up(self.targets, load.blocks)
        for transfer in (*book.sends.values(), *book.recvs.values()):
            count_up(self.held, transfer.blocks)

    def pinned_blocks(self) -> int:
        """Return how many different blocks jobs pin."""
        return sum(map(len, self.pins.values()))

    def unpinned(self, blocks: Blocks) -> int:
        """Return how many of `blocks` no job pins yet."""
        return sum(block not in self.pins.get(group, ()) for group, block in expand(blocks))

    def named(self, group: int, ids: Iterable[int]) -> list[int]:
        """Return those blocks of `ids`, given out in `group`, that an open job, load or transfer names, in order.

        Named in whichever group: vLLM has one pool for all groups, so a number is one piece of memory, and a block that
        one group gives up may come back in another.
        """
        named = [counts for index in (self.pins, self.targets, self.held) for counts in index.values() if counts]
        if len(named) == 1:
            counts = named[0]
            return [block for block in ids if block in counts]
        return [block for block in ids if any(block in counts for counts in named)]


_ENCODER = msgspec.json.Encoder()
