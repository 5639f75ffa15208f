"""What the commands that play many seeds share: how seeds are named, the processes, and the log of a run as a file.

It knows nothing of a plan or a run, so that the simulator of the store and that of P/D both use it, and the scorer too.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from ledger import events as ev
from ledger.live.log import Log
from ledger.live.writer import Writer
from ledger.state.apply import State

W = TypeVar("W")
R = TypeVar("R")

CLOSE_TIMEOUT_S = 60.0


def played(work: Sequence[W], play: Callable[[W], R], processes: int, in_order: bool = False) -> Iterator[R]:
    """Play all work, in several processes if there is enough of it, and yield results as they come, or in order."""
    processes = min(processes, len(work))
    if processes < 2:
        yield from map(play, work)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:  # vLLM is imported, and no thread was started
        yield from (pool.imap if in_order else pool.imap_unordered)(play, work, chunksize=4)


class Seeds(click.ParamType[range]):
    """The seeds that `A:B` names, B excluded, or the one that a number names."""

    name = "seeds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> range:
        """Return them."""
        first, colon, last = str(value).partition(":")
        if not first.isdigit() or (colon and not (last.isdigit() and int(first) < int(last))):
            self.fail(f"'{value}' names no seed; write A:B with A below B", param, ctx)
        return range(int(first), int(last) if colon else int(first) + 1)


def write_log(lines: Iterable[bytes], path: Path, engine: str, seed: int) -> None:
    """Write the log of a run, lines of JSON, as the plugin's writer makes it."""
    decode = msgspec.json.Decoder[Any](ev.AnyEvent).decode
    log = Log(State(), queue_limit_events=1 << 30, checkpoint_interval_events=0)
    log._queue.extend(decode(line) for line in lines)
    log._next_seq = len(log._queue) + 1
    writer = Writer(log, path, engine=engine, boot=f"seed-{seed}")
    writer.start()
    writer.close(CLOSE_TIMEOUT_S)
