"""How fast a log is replayed: the fold alone, with all verdicts, a file from disk, and `eventsourcing` beside it.

    python tools/bench/replay.py [--events 1000000,10000000] [--file-events 1000000] [--eventsourcing-python PATH]

Each line is measured in a process of its own and printed as JSON: events a second of CPU time on one core, and by how
much the process grew while it read. The log is a busy engine with two ranks: prefills with saves, loads from the store,
preemptions, evidence of every call. It is made in pieces of a second or so, and making it is not counted.

`eventsourcing` is the widely used Python library for this pattern. It reads the same number of events from SQLite, with
aggregates about as long as our requests, through its own mapper and JSON transcoder, and builds its objects; it folds
nothing and judges nothing. It is not a dependency: name a Python that has it.

Bias: written by the authors of one of the two.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

EVENTS_OF_AGGREGATE = 20
"""Events of one request in our log, about; so long is an aggregate there."""


def pieces(events: int, size: int = 200_000) -> "Iterator[list[object]]":  # noqa: PLR0915 - one request, from end to end
    """The log of a busy engine, in pieces; it ends with `log_closed`."""
    from ledger import events as ev

    made: list[object] = []
    seq, done = 0, 0
    second_ns = 1_000_000_000

    def say(kind: type[ev.Event], source: str = ev.SCHEDULER, **fields: object) -> None:
        nonlocal seq
        seq += 1
        now_ns = seq * 20_000
        made.append(kind(seq, 1_780_000_000 * second_ns + now_ns, now_ns, source, seq // 40, **fields))

    say(ev.LogOpened, engine="bench", boot="bench", ranks=((0, 1),), num_blocks=4096, block_sizes=(16,))
    number = 0
    while done + len(made) < events - 1:
        request, first = f"cmpl-{number:012x}-0", 1 + number * 16 % 4000
        blocks = ((0, ((first, first + 11),)),)
        keys = tuple(f"{number:08x}{block:08x}" for block in range(12))
        loads = number % 4 == 0
        say(ev.RequestQueued, request=request, generation=1, prompt_tokens=192)
        if loads:
            load = number // 4
            say(ev.LookupAnswered, request=request, generation=1, hit_tokens=192)
            say(ev.LoadPlanned, load=load, request=request, generation=1, blocks=blocks, tokens=192)
            say(ev.LoadRegistered, load=load, ranks=((0, 1),))
            for rank in (0, 1):
                call = {"transfer": f"{rank}-g{number}", "rank": rank, "op": "get", "request": request, "load": load}
                say(ev.TransferStarted, f"rank {rank}", **call, keys=keys, blocks=blocks, bytes=49152)
                say(
                    ev.TransferFinished,
                    f"rank {rank}",
                    **call,
                    keys=12,
                    bytes=49152,
                    duration_ns=900_000 + number % 999,
                )
            for rank in (0, 1):
                say(ev.RankLoaded, load=load, rank=rank)
            say(ev.LoadSettled, load=load)
        say(ev.RequestScheduled, request=request, generation=1, computed_tokens=0, scheduled_tokens=192)
        say(ev.JobRegistered, job=number, request=request, generation=1, ranks=((0, 1),), tokens=192)
        say(ev.PinTouched, job=number, blocks=blocks)
        for rank in (0, 1):
            call = {"transfer": f"{rank}-p{number}", "rank": rank, "op": "put", "request": request, "job": number}
            say(ev.TransferStarted, f"rank {rank}", **call, keys=keys, blocks=blocks, bytes=49152)
            say(ev.TransferFinished, f"rank {rank}", **call, keys=12, bytes=49152, duration_ns=700_000 + number % 997)
        generation = 1
        if number % 10 == 0:
            say(ev.RequestPreempted, request=request, generation=1)
            say(ev.BlocksReleased, request=request, generation=1, blocks=blocks)
            generation = 2
            say(ev.RequestResumed, request=request, generation=2, computed_tokens=0, scheduled_tokens=192)
        for rank in (0, 1):
            say(ev.RankCompleted, job=number, rank=rank)
        say(ev.JobSettled, job=number)
        say(ev.BlocksFreed, job=number, blocks=blocks)
        say(ev.RequestFinished, request=request, generation=generation, reason="stopped")
        number += 1
        if len(made) >= size:
            done += len(made)
            yield made
            made = []
    say(ev.LogClosed)
    yield made


def grown_mb() -> float:
    """The largest size that this process had so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_fold(events: int, verdicts: bool) -> dict[str, object]:
    from ledger.replay.fold import Replay
    from ledger.verdicts import all_verdicts

    replay = Replay(all_verdicts() if verdicts else ())
    cpu_s, folded, start_mb = 0.0, 0, 0.0
    for number, piece in enumerate(pieces(events)):
        started_s = time.process_time()
        replay.feed(piece)  # type: ignore[arg-type]
        cpu_s += time.process_time() - started_s
        folded += len(piece)
        if number == 1:  # from then on two pieces at a time are in memory
            start_mb = grown_mb()
    started_s = time.process_time()
    result = replay.result()
    cpu_s += time.process_time() - started_s
    if result.refused or result.findings:
        raise SystemExit(f"the bench's log is not sound: {result.refusals[:3]} {result.findings[:3]}")
    what = "fold with all verdicts" if verdicts else "fold alone"
    return {
        "what": what,
        "events": folded,
        "events_per_s": round(folded / cpu_s),
        "grew_mb": round(grown_mb() - start_mb),
    }


def measure_file(events: int) -> dict[str, object]:
    import msgspec

    from ledger.file.database import Database
    from ledger.replay.case import replay_files

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.db"
        database = Database(path)
        database.create({"engine": "bench", "boot": "bench", "flush_interval_ms": "50"})
        for piece in pieces(events, 5000):
            database.append(msgspec.json.encode(piece))
        database.close()
        start_mb, started_s = grown_mb(), time.process_time()
        case = replay_files([path])
        cpu_s = time.process_time() - started_s
        read = case.logs[0].result.events
    return {
        "what": "file from disk, with all verdicts",
        "events": read,
        "events_per_s": round(read / cpu_s),
        "grew_mb": round(grown_mb() - start_mb),
    }


EVENTSOURCING = """
import json, resource, sys, tempfile, time, uuid
from pathlib import Path
from eventsourcing.domain import Aggregate, event
from eventsourcing.persistence import JSONTranscoder, Mapper, UUIDAsHex, DatetimeAsISO
from eventsourcing.sqlite import SQLiteAggregateRecorder, SQLiteApplicationRecorder, SQLiteDatastore

class Request(Aggregate):
    @event("Queued")
    def __init__(self, request, generation, prompt_tokens):
        self.request, self.ranks = request, []
    @event("RankCompleted")
    def completed(self, job, rank, outcome):
        self.ranks.append(rank)

events, length = int(sys.argv[1]), int(sys.argv[2])
with tempfile.TemporaryDirectory() as folder:
    recorder = SQLiteApplicationRecorder(SQLiteDatastore(str(Path(folder) / "es.db")))
    recorder.create_table()
    transcoder = JSONTranscoder()
    transcoder.register(UUIDAsHex())
    transcoder.register(DatetimeAsISO())
    mapper = Mapper(transcoder)
    made = 0
    while made < events:
        request = Request(f"cmpl-{made}", 1, 192)
        for number in range(length - 1):
            request.completed(made, number % 2, "stored")
        stored = [mapper.to_stored_event(each) for each in request.collect_events()]
        recorder.insert_events(stored)
        made += len(stored)
    start_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    started = time.process_time()
    read, after = 0, 1
    while notifications := recorder.select_notifications(start=after, limit=2000):
        for each in notifications:
            mapper.to_domain_event(each)
            read += 1
        after = notifications[-1].id + 1
    seconds = time.process_time() - started
grew = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - start_mb
print(json.dumps({"what": "eventsourcing, read from SQLite and mapped", "events": read,
                  "events_per_s": round(read / seconds), "grew_mb": round(grew)}))
"""


def in_own_process(python: str, *arguments: str) -> None:
    """Run one measurement in a fresh process, and print its line."""
    done = subprocess.run([python, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    print(done.stdout.strip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--events", default="1000000,10000000", help="lengths of the log for the fold")
    parser.add_argument("--file-events", default="1000000", help="lengths of the log for the file")
    parser.add_argument("--eventsourcing-python", default="", help="a Python that has eventsourcing installed")
    parser.add_argument("--part", nargs=2, metavar=("PART", "EVENTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part, events = options.part[0], int(options.part[1])
        print(json.dumps(measure_file(events) if part == "file" else measure_fold(events, part == "verdicts")))
        return
    for events in options.events.split(","):
        for part in ("fold", "verdicts"):
            in_own_process(sys.executable, __file__, "--part", part, events)
    for events in options.file_events.split(","):
        in_own_process(sys.executable, __file__, "--part", "file", events)
        if options.eventsourcing_python:
            in_own_process(options.eventsourcing_python, "-c", EVENTSOURCING, events, str(EVENTS_OF_AGGREGATE))


if __name__ == "__main__":
    main()
