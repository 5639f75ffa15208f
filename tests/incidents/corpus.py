"""The corpus: public incidents told as logs, each with the verdict it must reach and a twin that must stay silent.

The logs themselves are the files in `logs/`, one line of JSON for each event. The scripts below say how they were told;
they write a file that is not there yet, and never touch one that is. Run `python -m tests.incidents.corpus` after
adding a story.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ledger import events as ev
from tests.incidents.script import Script
from tools.scoring.common import Must

LOGS = Path(__file__).parent / "logs"

Story = Callable[[], dict[str, Script]]
"""Tells an incident: the logs of its engines by name."""


class Expected(Must, frozen=True, kw_only=True):
    """A finding that a log must have. `jobs`, `blocks`: those that it must name; None for any."""

    log: str = "engine"
    jobs: tuple[int, ...] | None = None
    blocks: tuple[tuple[int, int], ...] | None = None


class Incident(msgspec.Struct, frozen=True):
    """A row of the corpus.

    Attributes:
        id: as in the table of public incidents; K and a number for a kind that has none.
        source: where it was reported.
        story, twin: the logs with the fault, and without it.
        expected: all findings of the story, earliest cause first.
    """

    id: str
    title: str
    source: str
    story: Story
    twin: Story
    expected: tuple[Expected, ...]

    def logs(self, healthy: bool = False) -> dict[str, list[ev.AnyEvent]]:
        """Return the events of each log, as they stand in the files."""
        prefix = f"{self.id}.{'twin' if healthy else 'story'}."
        found = {path.name.removeprefix(prefix).removesuffix(".jsonl"): path for path in LOGS.glob(f"{prefix}*.jsonl")}
        return {name: _read(path) for name, path in sorted(found.items())}


def _read(path: Path) -> list[ev.AnyEvent]:
    decoder = msgspec.json.Decoder(ev.AnyEvent)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def keys(prefix: str, number: int = 8) -> list[str]:
    """Hashes of keys, short enough to be read."""
    return [f"{prefix}{index:02d}" for index in range(number)]


def blocks(first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Blocks of group 0, as findings name them."""
    return tuple((0, block) for block in range(first, last + 1))


def _before(log: Script, number: int = 2) -> None:
    """A bit of ordinary life, so that an incident does not stand at the first event."""
    for index in range(number):
        request = f"before-{index}"
        log.runs(request)
        log.stores(index, request, blocks=(1 + 10 * index, 8 + 10 * index), keys=keys(f"b{index}"))
        log.finishes(request)


# --- the store --------------------------------------------------------------------------------------------------------


def overwritten(*, pins: bool) -> dict[str, Script]:
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=pins)
    log.steps()
    log.preempts("R")
    log.takes_back("R", (5, 12))
    log.arrives("R2", tokens=128)
    if not pins:
        log.gives("R2", (5, 12))
    log.request_scheduled(request="R2", generation=1, scheduled_tokens=128)
    log.passes(0.6, steps=20)
    log.puts(0, keys=keys("r"))
    log.reports(0)
    log.resumes("R")
    log.finishes("R2")
    log.finishes("R", 2)
    log.runs("R3")
    log.recalls(0, "R3", blocks=(20, 27), keys=keys("r"))
    log.finishes("R3")
    return {"engine": log.closes()}


def preempted_twice(*, by_job: bool) -> dict[str, Script]:
    log = Script()
    _before(log)
    log.runs("R")
    log.saves(2, "R", blocks=(30, 37))
    log.steps()
    log.preempts("R")
    log.takes_back("R", (30, 37))
    log.resumes("R")
    log.saves(3, "R", blocks=(40, 47), generation=2)
    log.puts(2, keys=keys("old"), takes_s=0.4)
    if by_job:
        log.reports(2)
        log.puts(3, keys=keys("new"))
        log.reports(3)
    else:
        log.steps()
        log.rank_completed(job=3, rank=0)  # of job 2, but reports are kept by request
        log.job_settled(job=3)
        log.steps()
        log.puts(3, keys=keys("new"))
        log.steps()
        log.rank_completed(job=3, rank=0)
    log.finishes("R", 2)
    log.passes(90, steps=2000)
    log.arrives("Q")
    log.passes(5)
    if by_job:
        log.steps()
        log.request_scheduled(request="Q", generation=1)
        log.finishes("Q")
    return {"engine": log.closes()}


def raises(*, reports: bool) -> dict[str, Script]:
    log = Script(ranks=2)
    _before(log)
    log.runs("R")
    log.saves(2, "R", blocks=(40, 47))
    log.puts(2, 0, keys=keys("r"))
    log.reports(2, 0)
    call = log.put_begins(2, 1, keys=keys("r"))
    log.passes(0.2)
    log.ends(call, "raised", exception="RuntimeError")
    if reports:
        log.reports(2, 1, "failed", exception="RuntimeError")
    log.finishes("R")
    log.passes(120, steps=5000)
    return {"engine": log.closes()}


def tensor_parallel(*, answering: int) -> dict[str, Script]:
    log = Script(ranks=8)
    for number in range(4):
        request = f"R{number}"
        log.runs(request)
        log.saves(number, request, blocks=(1 + 10 * number, 8 + 10 * number))
        for rank in range(8):
            log.puts(number, rank, keys=keys(f"{number}"))
        for rank in range(answering):
            log.reports(number, rank)
        log.finishes(request)
    log.passes(120, steps=5000)
    return {"engine": log.closes()}


def lookup_of_some_ranks(*, missing: tuple[int, ...]) -> dict[str, Script]:
    log = Script(ranks=4, policy="recompute")
    for number in range(3):
        request = f"R{number}"
        log.arrives(request)
        log.loads(number, request, blocks=(1 + 10 * number, 8 + 10 * number))
        for rank in range(4):
            call = log.get_begins(number, rank, keys=keys(f"{number}"))
            log.passes(0.005)
            if rank in missing:
                log.ends(call, "failed", code="BLOCK_NOT_FOUND", raw="-704")
            else:
                log.ends(call)
        for rank in range(4):
            if rank in missing:
                log.answers(number, rank, "failed", code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
            else:
                log.answers(number, rank)
        log.steps()
        log.request_scheduled(request=request, generation=1)
        log.finishes(request)
    return {"engine": log.closes()}


def recovers(*, dies: bool) -> dict[str, Script]:
    log = Script(policy="recompute")
    _before(log)
    log.arrives("R")
    log.loads(0, "R", blocks=(30, 37))
    call = log.get_begins(0, keys=keys("r"))
    log.passes(0.02)
    if dies:
        log.ends(call, "failed", code="TRANSFER_FAILED", raw="-800")
        log.answers(0, 0, "failed", code="TRANSFER_FAILED", raw="-800", stage="STORE_GET")
        return {"engine": log}
    log.ends(call)
    log.answers(0)
    log.steps()
    log.request_scheduled(request="R", generation=1)
    log.finishes("R")
    return {"engine": log.closes()}


def dead_client(*, dies: bool) -> dict[str, Script]:
    writer = Script("writer")
    _before(writer)
    writer.runs("R")
    writer.saves(2, "R", blocks=(30, 37))
    call = writer.put_begins(2, keys=keys("r"))
    if dies:
        writer.finishes("R")
        writer.passes(70, steps=3000)
        writer.arrives("R-next")
    else:
        writer.passes(0.01)
        writer.ends(call)
        writer.reports(2)
        writer.finishes("R")
        writer.closes()
    reader = Script("reader", start_s=10, policy="recompute")
    for number in range(2):
        request = f"Q{number}"
        reader.arrives(request)
        reader.loads(number, request, blocks=(1 + 10 * number, 8 + 10 * number))
        call = reader.get_begins(number, keys=keys("r"))
        reader.passes(0.01)
        if dies:
            reader.ends(call, "failed", code="PEER_NOT_READY", raw="-703")
            reader.answers(number, 0, "failed", code="PEER_NOT_READY", raw="-703", stage="STORE_GET")
        else:
            reader.ends(call)
            reader.answers(number)
        reader.steps()
        reader.request_scheduled(request=request, generation=1)
        reader.finishes(request)
    return {"writer": writer, "reader": reader.closes()}


def gone(*, after_s: float, stored_here: bool, gone: bool) -> dict[str, Script]:
    log = Script(policy="recompute")
    if stored_here:
        log.runs("R")
        log.stores(0, "R", blocks=(1, 8), keys=keys("r"))
        log.finishes("R")
    log.passes(30, steps=100)
    log.arrives("Q")
    log.loads(0, "Q", blocks=(11, 18))
    log.passes(after_s, steps=10)
    call = log.get_begins(0, keys=keys("r"))
    log.passes(0.002)
    if gone:
        log.ends(call, "failed", code="BLOCK_NOT_FOUND", raw="-704")
        log.answers(0, 0, "failed", code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
    else:
        log.ends(call)
        log.answers(0)
    log.steps()
    log.request_scheduled(request="Q", generation=1)
    log.finishes("Q")
    return {"engine": log.closes()}


def slow_batch(*, takes_s: float) -> dict[str, Script]:
    log = Script(policy="recompute")
    log.arrives("Q")
    log.loads(0, "Q", blocks=(11, 18))
    call = log.get_begins(0, keys=keys("q"))
    log.passes(takes_s, steps=50)
    if takes_s > 5:
        log.ends(call, "failed", code="LEASE_EXPIRED", raw="-707")
        log.answers(0, 0, "failed", code="LEASE_EXPIRED", raw="-707", stage="STORE_GET")
    else:
        log.ends(call)
        log.answers(0)
    log.steps()
    log.request_scheduled(request="Q", generation=1)
    log.finishes("Q")
    return {"engine": log.closes()}


def s17() -> dict[str, Script]:
    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    first = [log.put_begins(0, rank, keys=keys("g1")) for rank in range(2)]
    log.steps()
    log.preempts("R")
    log.takes_back("R", (5, 12))
    log.resumes("R", tokens=160)
    log.saves(1, "R", blocks=(20, 29), generation=2)
    second = [log.put_begins(1, rank, keys=keys("g2", 10)) for rank in range(2)]
    log.passes(0.3, steps=10)
    for call in (*second, *first):  # the younger job is done before the older one
        log.ends(call)
    log.reports(1, 0)
    log.reports(0, 1)
    log.reports(1, 1)
    log.reports(0, 0)
    log.finishes("R", 2)
    return {"engine": log.closes()}


def s18() -> dict[str, Script]:
    log = Script()
    _before(log)
    log.arrives("R")
    log.passes(0.1)
    log.request_aborted(request="R", generation=1, was="queued")
    log.runs("Q")
    log.finishes("Q")
    return {"engine": log.closes()}


# --- prefill and decode -----------------------------------------------------------------------------------------------


def pull_fails(*, silently: bool) -> dict[str, Script]:
    prefill, decode = Script("prefill"), Script("decode", policy="fail")
    prefill.runs("P-R", tokens=128)
    prefill.sends("x1", "P-R")
    prefill.holds("x1", "P-R", blocks=(5, 12))
    decode.arrives("R", tokens=128)
    decode.receives("x1", "R", blocks=(30, 37))
    if silently:
        decode.passes(2)
        decode.pull_ends("x1", "R", outcome="failed", code="PEER_UNREACHABLE", raw="", exception="ConnectError")
        decode.passes(300, steps=9000)
        decode.request_aborted(request="R", generation=1, was="loading")
        decode.passes(250, steps=3000)
        decode.report_ignored(
            what="recv", why="the request has ended", transfer="x1", request="R", rank=0, code="LOAD_TIMEOUT"
        )
        prefill.passes(480, steps=9000)
        prefill.rank_sent(transfer="x1", request="P-R", rank=0, outcome="expired")
        prefill.send_expired(transfer="x1", request="P-R", expired_ranks=((0, 0),))
    else:
        prefill.pushes("x1", "P-R")
        prefill.send_settled(transfer="x1", request="P-R")
        decode.passes(0.2)
        decode.pull_ends("x1", "R")
        decode.peer_answers("x1", "R")
        decode.received("x1", "R")
        decode.steps()
        decode.request_scheduled(request="R", generation=1)
        decode.finishes("R")
    return {"prefill": prefill.closes(), "decode": decode.closes()}


def _both_open() -> Script:
    log = Script()
    log.arrives("R", tokens=128)
    log.receives("x-in", "R", blocks=(5, 12))
    log.sends("x-out", "R")
    log.passes(0.2, steps=3)
    return log


def s5a() -> dict[str, Script]:
    log = _both_open()
    log.request_aborted(request="R", generation=1, was="loading")
    log.send_settled(transfer="x-out", request="R", outcome="withdrawn")
    log.pull_ends("x-in", "R")
    log.peer_answers("x-in", "R")
    log.received("x-in", "R")
    log.rank_sent(transfer="x-out", request="R", rank=0, outcome="expired")
    return {"engine": log}


def s5b() -> dict[str, Script]:
    log = _both_open()
    log.pull_ends("x-in", "R")
    log.peer_answers("x-in", "R")
    log.received("x-in", "R")
    log.request_aborted(request="R", generation=1, was="queued")
    log.send_settled(transfer="x-out", request="R", outcome="withdrawn")
    log.rank_sent(transfer="x-out", request="R", rank=0, outcome="expired")
    return {"engine": log}


def s5c() -> dict[str, Script]:
    log = _both_open()
    log.peer_answers("x-in", "R", outcome="failed", code="CANCELLED", stage="RECV")
    log.request_aborted(request="R", generation=1, was="loading")
    log.recv_recovered(transfer="x-in", request="R", generation=1, action="gone")
    log.received("x-in", "R", "failed")
    log.send_settled(transfer="x-out", request="R", outcome="withdrawn")
    log.pull_ends("x-in", "R")
    log.peer_settled(transfer="x-in", request="R", rank=0, peer="tp0 pp0")
    return {"engine": log}


def s5_twin() -> dict[str, Script]:
    log = _both_open()
    log.request_aborted(request="R", generation=1, was="loading")
    log.send_settled(transfer="x-out", request="R", outcome="withdrawn")
    log.pull_ends("x-in", "R")
    log.peer_answers("x-in", "R")
    log.received("x-in", "R")
    return {"engine": log.closes()}


def two_peers(*, freed_early: bool) -> dict[str, Script]:
    log = Script("decode", policy="recompute")
    log.arrives("R", tokens=128)
    log.receives("x1", "R", blocks=(5, 12), peers=("tp0 pp0", "tp1 pp0"))
    log.passes(0.1)
    if freed_early:
        log.peer_answers("x1", "R", peer="tp0 pp0", outcome="failed", code="TRANSFER_FAILED", stage="SEND")
        log.received("x1", "R", "failed")
        log.takes_back("R", (5, 12))
        log.arrives("R2", tokens=128)
        log.gives("R2", (5, 12))
        log.steps()
        log.request_scheduled(request="R2", generation=1, scheduled_tokens=128)
        log.passes(0.5, steps=8)
        log.pull_ends("x1", "R", outcome="failed", code="TRANSFER_FAILED")
        log.peer_answers("x1", "R", peer="tp1 pp0")
        log.finishes("R2")
        log.request_aborted(request="R", generation=1, was="queued")
        return {"decode": log.closes()}
    log.peer_answers("x1", "R", peer="tp0 pp0")
    log.passes(0.5, steps=8)
    log.pull_ends("x1", "R")
    log.peer_answers("x1", "R", peer="tp1 pp0")
    log.received("x1", "R")
    log.steps()
    log.request_scheduled(request="R", generation=1)
    log.finishes("R")
    log.runs("R2")
    log.finishes("R2")
    return {"decode": log.closes()}


def never_asked(*, asks: bool) -> dict[str, Script]:
    prefill, decode = Script("prefill"), Script("decode")
    prefill.runs("P-R", tokens=128)
    prefill.sends("x1", "P-R")
    prefill.holds("x1", "P-R", blocks=(5, 12))
    decode.arrives("R", tokens=128)
    if asks:
        decode.receives("x1", "R", blocks=(30, 37))
        prefill.pushes("x1", "P-R")
        prefill.send_settled(transfer="x1", request="P-R")
        decode.pull_ends("x1", "R")
        decode.peer_answers("x1", "R")
        decode.received("x1", "R")
        decode.steps()
        decode.request_scheduled(request="R", generation=1)
        decode.finishes("R")
    else:
        decode.passes(0.3)
        decode.request_aborted(request="R", generation=1, was="queued")
        prefill.passes(480, steps=9000)
        prefill.rank_sent(transfer="x1", request="P-R", rank=0, outcome="expired")
        prefill.send_expired(transfer="x1", request="P-R", expired_ranks=((0, 0),))
    return {"prefill": prefill.closes(), "decode": decode.closes()}


def four_stages(*, waits_for_all: bool) -> dict[str, Script]:
    log = Script("prefill", ranks=4)
    log.runs("R", tokens=128)
    log.sends("x1", "R")
    log.holds("x1", "R", blocks=(5, 12))
    log.pushes("x1", "R", 0, peer="tp0 pp0")
    if not waits_for_all:
        log.send_settled(transfer="x1", request="R")
    for rank in (1, 2, 3):
        log.pushes("x1", "R", rank, peer=f"tp0 pp{rank // 2}")
    if waits_for_all:
        log.send_settled(transfer="x1", request="R")
    return {"prefill": log.closes()}


def gone_before_the_write_ends(*, late: bool) -> dict[str, Script]:
    log = Script("decode")
    log.arrives("R", tokens=128)
    log.receives("x1", "R", blocks=(5, 12))
    log.passes(0.1, steps=2)
    log.request_aborted(request="R", generation=1, was="loading")
    log.passes(0.5, steps=5)
    log.pull_ends("x1", "R")
    log.peer_answers("x1", "R")
    log.received("x1", "R")
    if late:
        log.steps()
        log.report_ignored(
            what="recv", why="vLLM was told before that this request has received", transfer="x1", request="R", rank=0
        )
    log.runs("Q")
    log.finishes("Q")
    return {"decode": log.closes()}


# --- kinds that no public incident shows alone ------------------------------------------------------------------------


def hung(*, hangs: bool) -> dict[str, Script]:
    log = Script(ranks=2)
    _before(log)
    log.runs("R")
    log.saves(2, "R", blocks=(30, 37))
    log.puts(2, 0, keys=keys("r"))
    log.reports(2, 0)
    call = log.put_begins(2, 1, keys=keys("r"))
    log.runs("R2")
    log.saves(3, "R2", blocks=(40, 47))
    log.puts(3, 0, keys=keys("r2"))
    log.reports(3, 0)
    if hangs:
        log.finishes("R")
        log.finishes("R2")
        log.passes(61, steps=2000)
        for number, request in ((2, "R"), (3, "R2")):
            log.stall_suspected(job=number, request=request, waited_ns=61_000_000_000, missing=((1, 1),))
        log.arrives("Q")
        log.passes(20, steps=500)
        return {"engine": log.closes()}
    log.passes(0.05)
    log.ends(call)
    log.reports(2, 1)
    log.puts(3, 1, keys=keys("r2"))
    log.reports(3, 1)
    log.finishes("R")
    log.finishes("R2")
    return {"engine": log.closes()}


def rounds(number: int) -> dict[str, Script]:
    log = Script(policy="recompute", settings={"load_max_cycles": "0"})
    log.arrives("R")
    for load in range(number):
        log.loads(load, "R", blocks=(5, 12))
        call = log.get_begins(load, keys=keys("r"))
        log.passes(0.01)
        log.ends(call, "failed", code="TRANSFER_FAILED", raw="-800")
        log.answers(load, 0, "failed", code="TRANSFER_FAILED", raw="-800", stage="STORE_GET")
    log.steps()
    log.request_scheduled(request="R", generation=1)
    log.finishes("R")
    return {"engine": log.closes()}


def answers_twice(*, twice: bool) -> dict[str, Script]:
    log = Script(ranks=2, settings={"on_invariant_violation": "quarantine"})
    _before(log)
    log.runs("R")
    log.saves(2, "R", blocks=(30, 37))
    log.puts(2, 0, keys=keys("r"))
    log.reports(2, 0)
    if twice:
        log.invariant_violated(
            rule="rank_reported_twice", detail="rank 0 had reported job 2 before", job=2, rank=0, request="R"
        )
    log.puts(2, 1, keys=keys("r"))
    log.reports(2, 1)
    log.finishes("R")
    return {"engine": log.closes()}


def frees(*, times: int) -> dict[str, Script]:
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.puts(0, keys=keys("r"))
    log.steps()
    log.rank_completed(job=0, rank=0)
    log.job_settled(job=0)
    freed = log.state.book.jobs[0].blocks
    for _ in range(times):
        log.blocks_freed(job=0, blocks=freed)
    log.finishes("R")
    return {"engine": log.closes()}


def stuck(*, seconds: float) -> dict[str, Script]:
    log = Script()
    _before(log)
    for number in range(3):
        log.arrives(f"Q{number}")
    log.passes(seconds, steps=1)
    return {"engine": log.closes()}


def said_loaded(*, failed: bool) -> dict[str, Script]:
    log = Script(ranks=2)
    log.arrives("R")
    log.loads(0, "R", blocks=(5, 12))
    log.gets(0, 0, keys=keys("r"))
    call = log.get_begins(0, 1, keys=keys("r"))
    log.passes(0.01)
    if failed:
        log.ends(call, "partial", code="BLOCK_NOT_FOUND", raw="-704")
    else:
        log.ends(call)
    log.answers(0, 0)
    log.answers(0, 1)
    log.steps()
    log.request_scheduled(request="R", generation=1)
    log.finishes("R")
    return {"engine": log.closes()}


def gap(*, hides: bool) -> dict[str, Script]:
    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.puts(0, 0, keys=keys("r"))
    log.reports(0, 0)
    if hides:
        log.gap(origin="rank 1", dropped=2, reason="the engine process did not take them")
        log.passes(90, steps=900)
    else:
        log.puts(0, 1, keys=keys("r"))
        log.reports(0, 1)
    log.finishes("R")
    return {"engine": log.closes()}


def goes_on(*, early: bool) -> dict[str, Script]:
    log = Script(ranks=2)
    log.arrives("R")
    log.loads(0, "R", blocks=(5, 12))
    log.gets(0, 0, keys=keys("r"))
    call = log.get_begins(0, 1, keys=keys("r"))
    log.answers(0, 0)
    if early:
        log.steps()
        log.request_scheduled(request="R", generation=1, computed_tokens=128, scheduled_tokens=2)
    log.passes(0.2, steps=10)
    log.ends(call)
    log.answers(0, 1)
    if not early:
        log.steps()
        log.request_scheduled(request="R", generation=1)
    log.finishes("R")
    return {"engine": log.closes()}


# --- the table --------------------------------------------------------------------------------------------------------

INCIDENTS: tuple[Incident, ...] = (
    Incident(
        "S1",
        "a queued put reads blocks that were given to another request",
        "vllm#52360",
        partial(overwritten, pins=False),
        partial(overwritten, pins=True),
        (
            Expected(
                kind="poison",
                jobs=(0,),
                ranks=(0,),
                requests=("R", "R2", "R3"),
                blocks=blocks(5, 12),
                says=("held no references", "8 keys of request R", "given to request R2", "loaded by R3"),
            ),
        ),
    ),
    Incident(
        "S2",
        "a late report of an old job is counted for the request's new one",
        "vllm#51637",
        partial(preempted_twice, by_job=False),
        partial(preempted_twice, by_job=True),
        (
            Expected(
                kind="stale_completion", jobs=(2, 3), ranks=(0,), requests=("R",), says=("job 2", "counted for job 3")
            ),
            Expected(kind="leak", jobs=(2,), ranks=(0,), blocks=blocks(30, 37)),
            Expected(kind="leak", jobs=(3,), ranks=(), blocks=blocks(40, 47)),
        ),
    ),
    Incident(
        "S3",
        "a rank raises between the registration of a put and its report",
        "vllm#43742",
        partial(raises, reports=False),
        partial(raises, reports=True),
        (
            Expected(
                kind="leak",
                jobs=(2,),
                ranks=(1,),
                requests=("R",),
                blocks=blocks(40, 47),
                says=("RuntimeError", "rank 1"),
            ),
        ),
    ),
    Incident(
        "S4",
        "a pull fails and the scheduler is never told",
        "vllm#50719, #55870, #35943",
        partial(pull_fails, silently=True),
        partial(pull_fails, silently=False),
        (
            Expected(
                kind="unreported_failure",
                log="decode",
                ranks=(0,),
                requests=("R",),
                says=(
                    "PEER_UNREACHABLE",
                    "ConnectError",
                    "no report of it reached the scheduler",
                    "was not asked for it",
                ),
            ),
            Expected(
                kind="stall",
                log="decode",
                ranks=(0,),
                requests=("R",),
                blocks=blocks(30, 37),
                says=("was not asked for it",),
            ),
            Expected(
                kind="leak", log="prefill", requests=("P-R",), blocks=blocks(5, 12), says=("expired", "nobody asked")
            ),
            Expected(kind="late_event", log="decode", ranks=(0,), requests=("R",)),
        ),
    ),
    Incident(
        "S5a",
        "an abort with a receive and a send open: the late send kills the engine",
        "vllm#46240",
        s5a,
        s5_twin,
        (
            Expected(kind="late_event", ranks=(0,), requests=("R",), says=("no open send x-out",)),
            Expected(kind="torn_log", says=("just before the end", "no open send x-out")),
        ),
    ),
    Incident(
        "S5b",
        "the same, received before the abort",
        "vllm#46240",
        s5b,
        s5_twin,
        (
            Expected(kind="late_event", ranks=(0,), requests=("R",), says=("no open send x-out",)),
            Expected(kind="torn_log", says=("just before the end", "no open send x-out")),
        ),
    ),
    Incident(
        "S5c",
        "the same, with the receive coming last",
        "vllm#46240",
        s5c,
        s5_twin,
        (
            Expected(kind="load_failed", ranks=(0,), requests=("R",), says=("CANCELLED",)),
            Expected(kind="late_event", ranks=(0,), requests=("R",), says=("no open recv x-in",)),
            Expected(kind="torn_log", says=("just before the end", "no open recv x-in")),
        ),
    ),
    Incident(
        "S6",
        "blocks are freed on the first failure while a sibling still writes",
        "vllm#56104",
        partial(two_peers, freed_early=True),
        partial(two_peers, freed_early=False),
        (
            Expected(kind="load_failed", log="decode", requests=("R",), says=("TRANSFER_FAILED", "tp0 pp0")),
            Expected(
                kind="early_free",
                log="decode",
                requests=("R",),
                blocks=blocks(5, 12),
                says=("tp1 pp0", "may still write"),
            ),
            Expected(
                kind="poison",
                certainty="suspected",
                log="decode",
                ranks=(0,),
                requests=("R", "R2"),
                blocks=blocks(5, 12),
                says=("may have written into", "given to request R2"),
            ),
        ),
    ),
    Incident(
        "S7",
        "only one of eight ranks ever answers",
        "vllm#53903, #23917",
        partial(tensor_parallel, answering=1),
        partial(tensor_parallel, answering=8),
        (
            Expected(
                kind="missing_ranks",
                jobs=(0, 1, 2, 3),
                ranks=(1, 2, 3, 4, 5, 6, 7),
                requests=("R0", "R1", "R2", "R3"),
                says=("systematic", "ranks 1-7", "rank 0 answered"),
            ),
        ),
    ),
    Incident(
        "S9",
        "the lookup asks only for some ranks' keys",
        "vllm#46855",
        partial(lookup_of_some_ranks, missing=(2, 3)),
        partial(lookup_of_some_ranks, missing=()),
        (
            Expected(
                kind="load_failed",
                ranks=(2, 3),
                requests=("R0", "R1", "R2"),
                says=("systematic", "ranks 2-3", "BLOCK_NOT_FOUND"),
            ),
        ),
    ),
    Incident(
        "S10",
        "the recovery of a failed load kills the engine",
        "vllm#54870",
        partial(recovers, dies=True),
        partial(recovers, dies=False),
        (
            Expected(kind="load_failed", ranks=(0,), requests=("R",), says=("TRANSFER_FAILED",)),
            Expected(
                kind="torn_log", requests=("R",), says=("just before the end", "after load 0, request R: recomputed")
            ),
        ),
    ),
    Incident(
        "S11",
        "a prefill holds blocks for a decode that never asks",
        "vllm#50425, #41269",
        partial(never_asked, asks=False),
        partial(never_asked, asks=True),
        (
            Expected(
                kind="leak", log="prefill", requests=("P-R",), blocks=blocks(5, 12), says=("expired", "nobody asked")
            ),
        ),
    ),
    Incident(
        "S12",
        "a send is called finished after the first of four stages",
        "vllm#56033",
        partial(four_stages, waits_for_all=False),
        partial(four_stages, waits_for_all=True),
        (
            Expected(
                kind="early_free", log="prefill", requests=("R",), blocks=blocks(5, 12), says=("ranks", "may read")
            ),
        ),
    ),
    Incident(
        "S13",
        "a client dies inside a put, and its keys stay unready",
        "Mooncake#974, #2427",
        partial(dead_client, dies=True),
        partial(dead_client, dies=False),
        (
            Expected(
                kind="stall",
                certainty="suspected",
                log="writer",
                jobs=(2,),
                ranks=(0,),
                says=("without a return",),
            ),
            Expected(
                kind="load_failed",
                log="reader",
                ranks=(0,),
                requests=("Q0", "Q1"),
                says=("PEER_NOT_READY", "writer", "job 2"),
            ),
            Expected(kind="torn_log", log="writer"),
        ),
    ),
    Incident(
        "S14",
        "a key that was stored is gone within its lease",
        "Mooncake#1817",
        partial(gone, after_s=0.2, stored_here=True, gone=True),
        partial(gone, after_s=0.2, stored_here=True, gone=False),
        (Expected(kind="lost_store", certainty="suspected", ranks=(0,), requests=("Q",), says=("had put the key",)),),
    ),
    Incident(
        "S15",
        "a whole batch outlasts the lease",
        "Mooncake#3076",
        partial(slow_batch, takes_s=7.4),
        partial(slow_batch, takes_s=2),
        (Expected(kind="load_failed", ranks=(0,), requests=("Q",), says=("LEASE_EXPIRED", "7.40 s", "lease is 5 s")),),
    ),
    Incident(
        "S16",
        "a request is gone before the write of its KV ends",
        "vllm#43265",
        partial(gone_before_the_write_ends, late=True),
        partial(gone_before_the_write_ends, late=False),
        (Expected(kind="late_event", log="decode", ranks=(0,), requests=("R",)),),
    ),
    Incident("S17", "a request is admitted again while its stores run", "vllm#46014", s17, s17, ()),
    Incident("S18", "the abort of a request that was never scheduled", "vllm#49118", s18, s18, ()),
    Incident(
        "K1",
        "a put that never returns, and the jobs behind it",
        "",
        partial(hung, hangs=True),
        partial(hung, hangs=False),
        (
            Expected(
                kind="stall",
                jobs=(2, 3),
                ranks=(1,),
                requests=("R", "Q"),
                blocks=blocks(30, 37),
                says=("without a return", "behind the same call: 3"),
            ),
        ),
    ),
    Incident(
        "K2",
        "a load that fails is promised again and again",
        "",
        partial(rounds, 5),
        partial(rounds, 0),
        (
            Expected(kind="retry_loop", requests=("R",), says=("5 times", "lookup")),
            Expected(kind="load_failed", ranks=(0,), requests=("R",), says=("TRANSFER_FAILED",)),
        ),
    ),
    Incident(
        "K3",
        "a rank reports a job twice, and the job is quarantined",
        "",
        partial(answers_twice, twice=True),
        partial(answers_twice, twice=False),
        (
            Expected(kind="over_report", jobs=(2,), ranks=(0,), requests=("R",), blocks=blocks(30, 37)),
            Expected(kind="leak", jobs=(2,), requests=("R",), says=("quarantined", "rank_reported_twice")),
        ),
    ),
    Incident(
        "K4",
        "blocks of a job are freed twice",
        "",
        partial(frees, times=2),
        partial(frees, times=1),
        (Expected(kind="double_free", jobs=(0,), blocks=blocks(5, 12)),),
    ),
    Incident(
        "K5",
        "requests wait, and nothing is open",
        "",
        partial(stuck, seconds=200),
        partial(stuck, seconds=0.5),
        (Expected(kind="stall", certainty="suspected", requests=("Q0", "Q1", "Q2"), says=("scheduler itself",)),),
    ),
    Incident(
        "K6",
        "a key is gone longer after the lookup than its lease",
        "",
        partial(gone, after_s=8, stored_here=True, gone=True),
        partial(gone, after_s=8, stored_here=True, gone=False),
        (Expected(kind="evicted_before_load", certainty="suspected", ranks=(0,), requests=("Q",), says=("lease",)),),
    ),
    Incident(
        "K7",
        "a rank answers that a failed load went well",
        "",
        partial(said_loaded, failed=True),
        partial(said_loaded, failed=False),
        (Expected(kind="unreported_failure", ranks=(1,), requests=("R",), blocks=blocks(5, 12), says=("rank 1",)),),
    ),
    Incident(
        "K8",
        "a gap hides what a rank did",
        "",
        partial(gap, hides=True),
        partial(gap, hides=False),
        (Expected(kind="leak", certainty="undecidable", jobs=(0,), ranks=(1,), requests=("R",)),),
    ),
    Incident(
        "K9",
        "a request runs while a rank still writes its load",
        "",
        partial(goes_on, early=True),
        partial(goes_on, early=False),
        (
            Expected(
                kind="early_free",
                ranks=(1,),
                requests=("R",),
                blocks=blocks(5, 12),
                says=("went on while rank 1", "load 0"),
            ),
        ),
    ),
)
"""Every row, by number."""


def write_missing() -> list[Path]:
    """Write the logs that are not there yet, and return their paths."""
    LOGS.mkdir(exist_ok=True)
    written: list[Path] = []
    for incident in INCIDENTS:
        for name, story in (("story", incident.story), ("twin", incident.twin)):
            for log, script in story().items():
                path = LOGS / f"{incident.id}.{name}.{log}.jsonl"
                if not path.exists():
                    path.write_bytes(script.lines())
                    written.append(path)
    return written


if __name__ == "__main__":
    for path in write_missing():
        print(path)
