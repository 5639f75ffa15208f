"""What `kvledger browse` costs on a large log: how long the copy takes, and each page and stored query in Datasette.

    python tools/bench/browse.py [--events 1000000] [--rounds 3] [--folder FOLDER]

The log is made up, the same for the same number: two ranks, one request at a time, preemptions, loads, one failure in
a hundred. Datasette runs in this process, as `kvledger browse` runs it: a query that takes longer than its usual one
second fails there, and here.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec

from ledger import events as ev
from ledger.browse import server
from ledger.browse.queries import QUERIES
from ledger.file.database import Database

BATCH_EVENTS = 20_000
START_TS_NS = 1_780_000_000_000_000_000
STEP_NS = 400_000
POOL_BLOCKS = 4_000
KEYS = 8
RANKS = ((0, 1),)


class Engine:
    """Tells the events of a made-up engine, one request after the other, each with its jobs, loads and transfers."""

    def __init__(self) -> None:
        self._draw = random.Random(0)
        self._seq = 0
        self._jobs = 0
        self._loads = 0
        self._calls = [0, 0]

    def events(self, number: int) -> Iterator[ev.Event]:
        """Yield `number` events or a few more."""
        yield self._say(
            ev.LogOpened, engine="bench", boot="bench", ranks=RANKS, tensor_parallel=2, num_blocks=POOL_BLOCKS
        )
        request = 0
        while self._seq < number:
            yield from self._request(f"cmpl-{request:08x}")
            request += 1

    def _say(self, kind: type[ev.Event], source: str = ev.SCHEDULER, **fields: Any) -> ev.Event:
        self._seq += 1
        now_ns = self._seq * STEP_NS
        return kind(self._seq, START_TS_NS + now_ns, now_ns, source, self._seq // 8, **fields)

    def _request(self, request: str) -> Iterator[ev.Event]:
        named: dict[str, Any] = {"request": request, "generation": 1}
        yield self._say(ev.RequestQueued, prompt_tokens=400, **named)
        if self._draw.random() < 0.3:
            yield from self._load(named)
        yield self._say(ev.RequestScheduled, scheduled_tokens=400, **named)
        while self._draw.random() < 0.2:
            yield from self._job(named)
            yield self._say(ev.RequestPreempted, **named)
            named = {"request": request, "generation": named["generation"] + 1}
            yield self._say(ev.RequestResumed, scheduled_tokens=400, **named)
        yield from self._job(named)
        yield self._say(ev.RequestFinished, reason="stopped", **named)

    def _blocks(self) -> Any:
        first = self._draw.randrange(1, POOL_BLOCKS - KEYS)
        return ((0, ((first, first + KEYS - 1),)),)

    def _job(self, named: dict[str, Any]) -> Iterator[ev.Event]:
        job, blocks = self._jobs, self._blocks()
        self._jobs += 1
        yield self._say(ev.JobRegistered, job=job, ranks=RANKS, tokens=400, **named)
        yield self._say(ev.PinTouched, job=job, blocks=blocks)
        failed = self._draw.random() < 0.01
        yield from self._calls_of("put", blocks, failed, job=job, request=named["request"])
        why = {"outcome": "failed", "code": "TRANSFER_FAILED", "raw": "-800"} if failed else {}
        for rank in (0, 1):
            if rank == 1 and self._draw.random() < 0.0005:
                return
            yield self._say(ev.RankCompleted, job=job, rank=rank, **why)
        yield self._say(ev.JobSettled, job=job)
        yield self._say(ev.BlocksFreed, job=job, blocks=blocks)

    def _load(self, named: dict[str, Any]) -> Iterator[ev.Event]:
        load, blocks = self._loads, self._blocks()
        self._loads += 1
        yield self._say(ev.LookupAnswered, hit_tokens=384, **named)
        yield self._say(ev.LoadPlanned, load=load, blocks=blocks, tokens=384, **named)
        yield self._say(ev.LoadRegistered, load=load, ranks=RANKS)
        failed = self._draw.random() < 0.01
        yield from self._calls_of("get", blocks, failed, load=load, request=named["request"])
        why = {"outcome": "failed", "code": "BLOCK_NOT_FOUND", "raw": "-704", "stage": "STORE_GET"} if failed else {}
        for rank in (0, 1):
            yield self._say(ev.RankLoaded, load=load, rank=rank, **why)
        yield self._say(ev.LoadSettled, load=load, outcome="failed" if failed else "loaded")

    def _calls_of(self, op: str, blocks: Any, failed: bool, **work: Any) -> Iterator[ev.Event]:
        keys = tuple(f"{self._draw.getrandbits(64):016x}" for _ in range(KEYS))
        for rank in (0, 1):
            transfer = f"{rank}-{self._calls[rank]}"
            self._calls[rank] += 1
            said = {"transfer": transfer, "rank": rank, "op": op, "bytes": 65_536 * KEYS, **work}
            yield self._say(ev.TransferStarted, f"rank {rank}", keys=keys, blocks=blocks, **said)
            code, raw = ("BLOCK_NOT_FOUND", "-704") if op == "get" else ("TRANSFER_FAILED", "-800")
            failures = (ev.KeyFailure(keys[0], raw, code, 0, blocks[0][1][0][0]),) if failed else ()
            yield self._say(
                ev.TransferFinished,
                f"rank {rank}",
                keys=KEYS,
                duration_ns=int(self._draw.expovariate(1 / 2e6)),
                outcome="partial" if failed else "ok",
                failed_keys=len(failures),
                failures=failures,
                **said,
            )


def make_log(path: Path, number: int) -> None:
    """Write a log of `number` events or a few more."""
    database = Database(path)
    database.create({"engine": "bench", "boot": "bench", "flush_interval_ms": "50"})
    batch: list[ev.Event] = []
    for event in Engine().events(number):
        batch.append(event)
        if len(batch) == BATCH_EVENTS:
            database.append(msgspec.json.encode(batch))
            batch.clear()
    database.append(msgspec.json.encode(batch))
    database.close()


def make(folder: Path, number: int) -> Path:
    """Make the log and the copy that `kvledger browse` would serve, and print what each took. Return the copy."""
    log = folder / f"log-{number}.db"
    if not log.exists():
        make_log(log, number)
    place = folder / "copy"
    place.mkdir(exist_ok=True)
    copy = place / f"{server.database_name(log)}.db"
    copy.unlink(missing_ok=True)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    server.make_copy(log, place)
    took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    before_mib, after_mib = log.stat().st_size / 2**20, copy.stat().st_size / 2**20
    print(f"copy of {number:,} events ({before_mib:,.0f} MiB) made in {took_s:.1f} s, {cpu_s:.1f} s of CPU")
    print(f"the copy has {after_mib:,.0f} MiB")
    return copy


async def ask(copy: Path, rounds: int) -> bool:
    """Ask each page and print the time of its slowest round. Return whether all answered within Datasette's limits."""
    datasette = server.make_datasette(copy)
    await datasette.invoke_startup()
    version = metadata.version("datasette")
    print(f"Datasette {version}; milliseconds, the slowest of {rounds} rounds")
    database = datasette.urls.database(copy.stem)
    complete = True
    for path in PAGES:
        slowest_ms, failed = 0.0, False
        for _ in range(rounds):
            started_s = time.perf_counter()
            response = await datasette.client.get(f"{database}{path}")
            slowest_ms = max(slowest_ms, (time.perf_counter() - started_s) * 1e3)
            failed |= response.status_code != HTTPStatus.OK or any(sign in response.text for sign in OVER_LIMIT)
        complete = complete and not failed
        print(f"{slowest_ms:10.0f}  {path or '/'}{'  FAILED' if failed else ''}")
    return complete


OVER_LIMIT = ("message-error", "facets-timed-out")
"""What Datasette writes into a page when it gave a query or a facet up."""

PAGES = (
    "",
    "/events",
    "/events?_facet=kind",
    "/events?_facet=rank",
    "/events?_sort_desc=seq",
    "/events?kind__exact=rank_completed",
    "/events?rank__exact=1",
    "/events?job__exact=100",
    "/events/500",
    "/jobs/100",
    "/transfers?transfer__exact=0-100",
    *(f"/{query.name}" for query in QUERIES if not query.parameters),
    "/request_story?request=cmpl-00000100",
    "/request_story?request=cmpl-",
    "/block_story?group=0&block=2000",
)


def main() -> int:
    """Exit status: 0, or 1 if a page failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the log here, and use the one that is here")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvledger-bench-")))
        return 0 if asyncio.run(ask(make(folder, arguments.events), arguments.rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
