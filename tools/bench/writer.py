"""What writing the log costs a busy engine: one JSON statement a batch against `executemany`, and the writer itself.

    python tools/bench/writer.py [--rounds 5] [--seconds 2] [--batch 1000]

Python's lock is the scarce thing: while the engine computes, a writer that takes it for every row gets little of it and
makes the engine wait each time. All ways are measured in one process, in turns, so that whatever else the machine does
falls on all of them:

    idle     rows a second of processor time while no other thread of the process runs
    busy     rows a second while another thread never rests, and how long that thread stood still: the longest stall
             within a batch, the median over all batches, and the longest of all
    nobody   the same busy thread while nothing is written, looked at every 10 ms: what the machine alone does to it
    writer   `ledger.live.writer.Writer` on a log to which the busy thread appends as fast as it can, looked at likewise

Figures while busy mean something on a machine that is otherwise at rest: compare with the line `nobody`.

Bias: written by the authors of the writer. The rows that `executemany` gets are tuples of what the statement takes out
of the JSON; its JSON is encoded by the same library.
"""

import argparse
import gc
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec

from ledger import events as ev
from ledger.file import migrate, schema, sqlite
from ledger.live.log import Log
from ledger.live.writer import Writer
from ledger.state.apply import State

ENCODER = msgspec.json.Encoder()
COLUMNS = (*schema.EXTRACTED, "kind", "data")
ROW_BY_ROW = f"INSERT INTO events ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"


def batch_of(first: int, size: int) -> list[ev.Event]:
    """Events as a busy engine makes them: half of the scheduler, half evidence with keys and blocks."""
    made: list[ev.Event] = []
    for seq in range(first, first + size):
        now = {"seq": seq, "ts_ns": 10**18 + seq, "mono_ns": 10**12 + seq, "step": seq // 10}
        if seq % 2:
            made.append(ev.RankCompleted(**now, source=ev.SCHEDULER, job=seq, rank=seq % 4))
        else:
            keys = tuple(f"{seq:08x}{key:08x}" for key in range(4))
            call = {
                "transfer": f"0-{seq}",
                "rank": 0,
                "op": "put",
                "request": f"request-{seq}",
                "job": seq,
                "keys": keys,
            }
            made.append(ev.TransferStarted(**now, source="rank 0", **call, blocks=((0, ((1, 4),)),), bytes=65_536))
    return made


class Way:
    """One way to put batches into a file of its own."""

    def __init__(self, folder: Path, name: str, write: Callable[[sqlite3.Connection, list[ev.Event]], object]) -> None:
        self.name = name
        self._write = write
        path = folder / f"{name}.db"
        migrate.create(path)
        self._connection = sqlite.open_to_write(path)
        self._next_seq = 1

    def run(self, seconds: float, size: int, clock: Callable[[], float], watched: "BusyThread | None" = None) -> float:
        """Write for so long, by `clock`; return rows a second of the writing alone."""
        rows, spent_s = 0, 0.0
        while spent_s < seconds:
            batch = batch_of(self._next_seq, size)
            self._next_seq += size
            if watched is not None:
                time.sleep(0.001)  # so that the stall for which making the batch is to blame is over
                watched.look(keep=False)
            start = clock()
            self._write(self._connection, batch)
            spent_s += clock() - start
            if watched is not None:
                watched.look()
            rows += size
        return rows / spent_s


def one_statement(connection: sqlite3.Connection, batch: list[ev.Event]) -> None:
    """Write as `ledger.live.writer` does."""
    connection.execute(schema.APPEND, (ENCODER.encode(batch),))


def executemany(connection: sqlite3.Connection, batch: list[ev.Event]) -> None:
    """Write as one would."""
    rows = [
        (
            *[getattr(event, name, None) for name in schema.EXTRACTED],
            ev.kind_of(event),
            ENCODER.encode(event).decode(),
        )
        for event in batch
    ]
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(ROW_BY_ROW, rows)
    connection.execute("COMMIT")


class BusyThread:
    """A thread that computes and never rests, and knows for how long it stood still.

    Attributes:
        stalls_ms: the longest stall between two looks, for each look.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._longest_ns = 0
        self.stalls_ms: list[float] = []

    def look(self, *, keep: bool = True) -> None:
        """Note the longest stall since the last look, and begin anew."""
        longest_ns, self._longest_ns = self._longest_ns, 0
        if keep:
            self.stalls_ms.append(longest_ns / 1e6)

    def watch(self, seconds: float) -> None:
        """Look every 10 ms, which is about as long as a batch takes."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            time.sleep(0.01)
            self.look()

    def __enter__(self) -> "BusyThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        work, ended, clock = self._work, self._end.is_set, time.perf_counter_ns
        last_ns = clock()
        while not ended():
            work()
            now_ns = clock()
            if now_ns - last_ns > self._longest_ns:  # noqa: PLR1730 - a call would cost as much as what is measured
                self._longest_ns = now_ns - last_ns
            last_ns = now_ns


def compute() -> int:
    """A few microseconds of plain Python."""
    return sum(range(50))


def writer_under_load(folder: Path, round_: int, seconds: float) -> tuple[float, list[float]]:
    """Return rows a second written, and the stalls of the appending thread in milliseconds."""
    log = Log(State(), checkpoint_interval_events=0)
    writer = Writer(log, folder / f"writer-{round_}.db")
    writer.start()

    def append() -> None:
        if log.queued_events < 50_000:
            log.append(ev.RequestScheduled, request="request", generation=1, computed_tokens=1, scheduled_tokens=1)

    start = time.perf_counter()
    with BusyThread(append) as busy:
        busy.watch(seconds)
    spent_s = time.perf_counter() - start
    written = writer.written_seq
    if not writer.close(timeout_s=120):
        raise SystemExit("the writer could not write its log; the figures mean nothing")
    return written / spent_s, busy.stalls_ms


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of writing, for each way in each round")
    parser.add_argument("--batch", type=int, default=1_000, help="rows in a batch")
    arguments = parser.parse_args()
    gc.disable()  # its pauses belong to nobody here
    idle: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    stalls: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = (Way(folder, "one statement", one_statement), Way(folder, "executemany", executemany))
        for round_ in range(arguments.rounds):
            for way in ways:
                idle.setdefault(way.name, []).append(way.run(arguments.seconds, arguments.batch, time.thread_time))
            for way in ways:
                with BusyThread(compute) as other:
                    rate = way.run(arguments.seconds, arguments.batch, time.perf_counter, other)
                busy.setdefault(way.name, []).append(rate)
                stalls.setdefault(way.name, []).extend(other.stalls_ms)
            rate, stalled = writer_under_load(folder, round_, arguments.seconds)
            busy.setdefault("writer", []).append(rate)
            stalls.setdefault("writer", []).extend(stalled)
            with BusyThread(compute) as other:
                other.watch(arguments.seconds)
            stalls.setdefault("nobody", []).extend(other.stalls_ms)
            print(f"round {round_ + 1} of {arguments.rounds} done", file=sys.stderr, flush=True)
    middle = statistics.median
    print(f"SQLite {sqlite3.sqlite_version}, Python {sys.version.split()[0]}, {arguments.batch} rows a batch, medians")
    print(f"{'':16}{'rows/s idle':>14}{'rows/s busy':>14}{'stall in a batch':>20}{'longest stall':>16}")
    for line, waits in stalls.items():
        rates = [f"{middle(rates[line]):,.0f}" if line in rates else "" for rates in (idle, busy)]
        print(f"{line:16}{rates[0]:>14}{rates[1]:>14}{middle(waits):17.2f} ms{max(waits):13.1f} ms")
    ours, other_way = (way.name for way in ways)
    ratios = [one / many for one, many in zip(busy[ours], busy[other_way], strict=True)]
    print(
        f"one statement against executemany: {middle(ratios):.1f} times the rows while busy (median of the rounds), "
        f"{middle(stalls[other_way]) / middle(stalls[ours]):.1f} times shorter stalls"
    )


if __name__ == "__main__":
    main()
