"""How events, times and sizes are said to an operator. Pure text; this file knows events and nothing else.

Plain ASCII words that read well aloud and in a log collector. All times are UTC, because an incident's logs come from
more than one place.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ledger import events as ev
from ledger.blocks import Blocks, Ranges


def clock(ts_ns: int) -> str:
    """Return a wall-clock time as `14:03:05.123`."""
    return datetime.fromtimestamp(ts_ns // 1_000_000 / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]


def timestamp(ts_ns: int) -> str:
    """Return a wall-clock time as `2026-01-31T14:03:05.123Z`."""
    return datetime.fromtimestamp(ts_ns // 1_000_000 / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def span(duration_ns: int) -> str:
    """Return a duration with the unit that fits it: `850 us`, `12.3 ms`, `4.56 s`, `3 min 05 s`, `2 h 03 min`.

    One below zero, as a wall clock that was set may give, keeps its sign.
    """
    if duration_ns < 0:
        return f"-{span(-duration_ns)}"
    seconds = duration_ns / 1e9
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def between(first: ev.Event, last: ev.Event) -> str:
    """Return the time from an event to a later one of the same log; empty if no clock tells it.

    It is by the monotonic clock where one process emitted both, as a wall clock may be set in between. Else the wall
    clocks tell, unless by them the later one came first.
    """
    one_clock = first.source == last.source
    duration_ns = last.mono_ns - first.mono_ns if one_clock else last.ts_ns - first.ts_ns
    return span(duration_ns) if duration_ns >= 0 else ""


def size(number_bytes: int) -> str:
    """Return a size in binary units: `812 B`, `3.4 MiB`."""
    value = float(number_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def file(path: Path | str) -> str:
    """Return a file's name or path as text that every encoding takes: a name may be bytes that are no UTF-8."""
    return str(path).encode(errors="backslashreplace").decode()


_STEERING = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {number: f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" for number in _STEERING}
_ESCAPES.update({ord("\n"): r"\n", ord("\r"): r"\r", ord("\t"): r"\t"})


def escaped(text: str) -> str:
    r"""Return one line of text without what steers a terminal, ends a line or turns its direction.

    Ids come from clients, and names of files from anywhere. Each such character is shown by its number, `\x1b`.
    """
    return text.translate(_ESCAPES)


LONG_WORD = 256
"""Characters of the longest word that people are shown whole; paths, keys and what vLLM makes up as ids are shorter."""

KEPT_OF_A_WORD = 40
"""Characters of a longer one that are shown of its begin, and of its end."""


def shown(text: str) -> str:
    """Return one line of text as people are shown it: escaped, and the middle of very long words left out.

    A client may send an id of 10 kB; its begin and its end tell it from others. Data have it whole.
    """
    return _LONG_WORD.sub(lambda word: f"{word[0][:KEPT_OF_A_WORD]}...{word[0][-KEPT_OF_A_WORD:]}", escaped(text))


_LONG_WORD = re.compile(rf"\S{{{LONG_WORD + 1},}}")


def plural(number: int, noun: str, many: str = "") -> str:
    """Return `1 block`, `2 blocks`."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def lost(number: int) -> str:
    """Return how many events a gap stands for: 0 means that nobody could count them."""
    return plural(number, "event") if number else "an unknown number of events"


def lost_at(gap: ev.Gap) -> str:
    """Return what a gap says is lost, and where: `3 events of rank 0 are lost at event 9 (the queue was full)`."""
    verb = "is" if gap.dropped == 1 else "are"
    return f"{lost(gap.dropped)} of {gap.origin} {verb} lost at event {gap.seq} ({gap.reason})"


SHOWN_GAPS = 5
"""Losses that are told one by one."""


def gaps(found: Sequence[ev.Gap]) -> str:
    """Return what is lost, those in a row of one origin and reason as one; empty if nothing is."""
    runs: list[list[ev.Gap]] = []
    for gap in found:
        before = runs[-1][-1] if runs else None
        if before is not None and (before.seq + 1, before.origin, before.reason) == (gap.seq, gap.origin, gap.reason):
            runs[-1].append(gap)
        else:
            runs.append([gap])
    told: list[str] = []
    for run in runs[:SHOWN_GAPS]:
        first, last = run[0], run[-1]
        counted = sum(gap.dropped for gap in run) if all(gap.dropped for gap in run) else 0
        where = f"event {first.seq}" if len(run) == 1 else f"events {first.seq} to {last.seq}"
        told.append(f"{lost(counted)} of {first.origin} at {where} ({first.reason})")
    if len(runs) > SHOWN_GAPS:
        told.append(f"and {plural(len(runs) - SHOWN_GAPS, 'more gap')}")
    return "; ".join(told)


def ranges(runs: Ranges, limit: int = 8) -> str:
    """Return `1, 4-7`, the first `limit` runs of it."""
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:limit])
    return text if len(runs) <= limit else f"{text}, ..."


def ranks(numbers: Iterable[int]) -> str:
    """Return `rank 1` or `ranks 1-3, 7`."""
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ranges(tuple((first, last) for first, last in runs))
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"


def rank_runs(runs: Ranges) -> str:
    """Return `rank 1` or `ranks 1-3, 7`, of ranks as an event holds them."""
    return f"{'rank' if count_of(runs) == 1 else 'ranks'} {ranges(runs)}"


def count_of(runs: Ranges) -> int:
    """Return how many numbers the runs name."""
    return sum(abs(last - first) + 1 for first, last in runs)


def blocks(named: Blocks, limit: int = 6) -> str:
    """Return `5-15`, or with several groups `5-15 (group 0); 3 (group 1)`, the first `limit` runs of each.

    Where no group is named it is group 0, as in the options of the command line: most engines have no other.
    """
    if len(named) == 1 and named[0][0] == 0:
        return _sorted_ranges(named[0][1], limit)
    return "; ".join(f"{_sorted_ranges(runs, limit)} (group {group})" for group, runs in named) or "none"


def _sorted_ranges(runs: Ranges, limit: int) -> str:
    """Return the runs of blocks, which stand in the order of a table, in the order of their numbers."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted((min(run), max(run)) for run in runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return ranges(tuple(merged), limit)


def these_blocks(named: Blocks, limit: int = 6) -> str:
    """Return `block 3`, `blocks 5-15` or `blocks 5-15 (group 0); 3 (group 1)`."""
    one = len(named) == 1 and count_of(named[0][1]) == 1
    return f"{'block' if one else 'blocks'} {blocks(named, limit)}"


def call(op: str, transfer: str, rank: int) -> str:
    """Return what a call is called: `put #7 of rank 0`.

    A worker numbers its calls to the store, `0-7`. A transfer between engines has a name: `pull of x1 by rank 0`.
    """
    number = _number(transfer, rank)
    return f"{op} #{number} of rank {rank}" if number else f"{op} of {transfer} by rank {rank}"


def call_of_its_rank(op: str, transfer: str, rank: int) -> str:
    """Return what a call is called where its rank was just named: `put #7`, `pull of x1`."""
    number = _number(transfer, rank)
    return f"{op} #{number}" if number else f"{op} of {transfer}"


def _number(transfer: str, rank: int) -> str:
    lead, dash, number = transfer.partition("-")
    return number if dash and lead == str(rank) and number.isdigit() else ""


def was(named: Blocks) -> str:
    """Return the verb that goes with `these_blocks`: `was` for one block, `were` for more."""
    return "was" if len(named) == 1 and count_of(named[0][1]) == 1 else "were"


def request(name: str, generation: int = 1) -> str:
    """Return `request R`, with its generation if it was preempted before."""
    return f"request {name}" if generation <= 1 else f"request {name} (generation {generation})"


def listed(names: Iterable[object], limit: int = 6) -> str:
    """Return `a, b, c and 4 more`."""
    every = [str(name) for name in names]
    if len(every) <= limit:
        return ", ".join(every)
    return f"{', '.join(every[: limit - 1])} and {len(every) - limit + 1} more"


def failure(code: str, raw: str, exception: str, stage: str = "") -> str:
    """Return why something failed: `BLOCK_NOT_FOUND (raw -704), TimeoutError, at STORE_GET`; empty if not known."""
    parts = [f"{code} (raw {raw})" if code and raw else code or (f"raw {raw}" if raw else "")]
    parts += [exception, f"at {stage}" if stage else ""]
    return ", ".join(part for part in parts if part)


def line(event: ev.Event) -> str:
    """Return an event as one line: its place, its time, who said it, and what happened."""
    source = "" if event.source == ev.SCHEDULER else f"{event.source}: "
    return f"{event.seq:>8}  {clock(event.ts_ns)}  {source}{describe(event)}"


def lines(events: Iterable[ev.Event]) -> Iterator[tuple[int, str]]:
    """Yield each event's place and line; gaps in a row, of which a salvaged file may have thousands, as one."""
    for is_gap, run in itertools.groupby(events, key=lambda event: isinstance(event, ev.Gap)):
        if not is_gap:
            yield from ((event.seq, line(event)) for event in run)
            continue
        found = [event for event in run if isinstance(event, ev.Gap)]
        told = line(found[0]) if len(found) == 1 else f"{found[0].seq:>8}  {clock(found[0].ts_ns)}  GAPS: {gaps(found)}"
        yield found[-1].seq, told


def describe(event: ev.Event) -> str:
    """Return what happened, in an operator's words, without place and time."""
    teller = _TELLERS.get(event.__class__)
    return teller(event) if teller is not None else _fields(event)


def _fields(event: ev.Event) -> str:
    """Return a kind that has no sentence of its own, with all its fields that are set."""
    envelope = {"seq", "ts_ns", "mono_ns", "source", "step"}
    told: list[str] = []
    for name, default in zip(event.__struct_fields__[5:], _defaults(event), strict=True):
        value = getattr(event, name)
        if name not in envelope and value != default:
            told.append(these_blocks(value) if name == "blocks" else f"{name} {value}")
    return " ".join([ev.kind_of(event).replace("_", " "), *([f"({', '.join(told)})"] if told else [])])


def _defaults(event: ev.Event) -> list[object]:
    own = event.__struct_fields__[5:]
    given = event.__struct_defaults__
    return [object()] * (len(own) - len(given)) + list(given[-len(own) :] if own else ())


def _because(event: Any) -> str:
    why = failure(getattr(event, "code", ""), getattr(event, "raw", ""), event.exception, getattr(event, "stage", ""))
    return f": {why}" if why else ""


def _work(event: Any) -> str:
    if event.job >= 0:
        return f"job {event.job}"
    if event.load >= 0:
        return f"load {event.load}"
    return (
        f"transfer {event.transfer}" if event.transfer else f"request {event.request}" if event.request else "the books"
    )


def _late(event: ev.ReportIgnored) -> str:
    of = f" of request {event.request}" if event.request else ""
    return f"{event.what} {event.transfer or (event.load if event.load >= 0 else '')}".rstrip() + of


def _run(event: ev.RequestScheduled | ev.RequestResumed) -> str:
    verb = "resumed" if isinstance(event, ev.RequestResumed) else "scheduled"
    return (
        f"{request(event.request, event.generation)} {verb}: {plural(event.scheduled_tokens, 'token')} in this step, "
        f"{event.computed_tokens:,} already computed"
    )


def _started(event: ev.TransferStarted) -> str:
    what = [plural(len(event.keys), "key")] if event.keys else []
    what += [size(event.bytes)] if event.bytes else []
    what += [these_blocks(event.blocks)] if event.blocks else []
    return f"{_call(event)} began{': ' if what else ''}{', '.join(what)}"


def _finished(event: ev.TransferFinished) -> str:
    failed = f", {plural(event.failed_keys, 'key')} failed" if event.failed_keys else ""
    codes = sorted({failure(each.code, each.raw, "") for each in event.failures})
    why = ", ".join([*codes, failure(event.code, event.raw, event.exception)]).strip(", ")
    return f"{_call(event)} ended {event.outcome} after {span(event.duration_ns)}{failed}{': ' + why if why else ''}"


def _call(event: ev.TransferStarted | ev.TransferFinished) -> str:
    if event.job < 0 and event.load < 0:
        peer = f" with {event.peer}" if event.peer else ""
        return f"{event.op} of {event.transfer}{peer}"
    whose = f" of request {event.request}" if event.load >= 0 and event.request else ""
    return f"{call_of_its_rank(event.op, event.transfer, event.rank)} for {_work(event)}{whose}"


_TELLERS: dict[type[ev.Event], Callable[[Any], str]] = {
    ev.RequestQueued: lambda e: f"request {e.request} queued, {plural(e.prompt_tokens, 'prompt token')}",
    ev.RequestScheduled: _run,
    ev.RequestResumed: _run,
    ev.RequestPreempted: lambda e: (
        f"request {e.request} preempted: generation {e.generation} ended, its blocks were taken"
    ),
    ev.RequestFinished: lambda e: f"{request(e.request, e.generation)} finished{': ' + e.reason if e.reason else ''}",
    ev.RequestAborted: lambda e: f"{request(e.request, e.generation)} aborted{' while ' + e.was if e.was else ''}",
    ev.JobRegistered: lambda e: (
        f"store job {e.job} registered for {request(e.request, e.generation)}; {rank_runs(e.ranks)} must report"
    ),
    ev.PinTouched: lambda e: f"job {e.job} pins {these_blocks(e.blocks)}",
    ev.JobSkipped: lambda e: (
        f"a save of {request(e.request, e.generation)} was skipped: {e.reason} ({e.limit}) was reached"
    ),
    ev.RankCompleted: lambda e: f"rank {e.rank} reported job {e.job}: {e.outcome}{_because(e)}",
    ev.JobSettled: lambda e: (
        f"job {e.job} settled: every rank has reported"
        f"{f'; failed on {rank_runs(e.failed_ranks)}' if e.failed_ranks else ''}"
    ),
    ev.BlocksFreed: lambda e: f"job {e.job} freed {these_blocks(e.blocks)}",
    ev.LookupAnswered: lambda e: (
        f"the lookup of {request(e.request, e.generation)} answered {plural(e.hit_tokens, 'token')} beyond "
        f"{e.local_tokens:,} held locally"
    ),
    ev.LookupDeferred: lambda e: (
        f"the lookup of {request(e.request, e.generation)} was put off once, since its last load failed "
        f"({plural(e.hit_tokens, 'token')} in the store)"
    ),
    ev.LookupSuppressed: lambda e: (
        f"{request(e.request, e.generation)} was told of no hit ({plural(e.hit_tokens, 'token')} in the store): "
        + (
            f"{plural(e.failures, 'load')} up to the same token failed"
            if e.failures
            else "a load of it had failed, and since then a hit found no room"
        )
    ),
    ev.LoadPlanned: lambda e: (
        f"load {e.load} planned for {request(e.request, e.generation)}: {plural(e.tokens, 'token')} into "
        f"{these_blocks(e.blocks)}"
    ),
    ev.LoadRegistered: lambda e: f"load {e.load} given to the workers; {rank_runs(e.ranks)} must answer",
    ev.RankLoaded: lambda e: f"rank {e.rank} answered load {e.load}: {e.outcome}{_because(e)}",
    ev.LoadFailed: lambda e: f"load {e.load} failed on rank {e.rank}{_because(e)}",
    ev.LoadSettled: lambda e: (
        f"load {e.load} settled: {e.outcome}{f'; {rank_runs(e.missing)} had not answered' if e.missing else ''}"
    ),
    ev.LoadRecovered: lambda e: f"after load {e.load}, {request(e.request, e.generation)}: {e.action}",
    ev.ReportIgnored: lambda e: (
        f"a late result{f' of rank {e.rank}' if e.rank >= 0 else ''} for {_late(e)}"
        f"{f', failed with {e.code},' if e.code else ''} was ignored: {e.why}"
    ),
    ev.SendRegistered: lambda e: (
        f"{request(e.request, e.generation)} will be sent as {e.transfer}; {rank_runs(e.ranks)} must report"
    ),
    ev.SendReady: lambda e: (
        f"send {e.transfer} ready: {these_blocks(e.blocks)} of {request(e.request, e.generation)} are held"
        f"{f', for {span(e.timeout_ns)} at most' if e.timeout_ns else ''}"
    ),
    ev.SendStarted: lambda e: f"rank {e.rank} was asked for {e.transfer} by {e.peer} and begins to push",
    ev.RankSent: lambda e: (
        f"rank {e.rank} is done with send {e.transfer}: {e.outcome}, {plural(e.pushes, 'push', 'pushes')}{_because(e)}"
    ),
    ev.SendSettled: lambda e: f"send {e.transfer} of request {e.request} settled: {e.outcome}",
    ev.SendExpired: lambda e: (
        f"send {e.transfer} of request {e.request} expired: {rank_runs(e.expired_ranks)} waited in vain"
    ),
    ev.RecvRegistered: lambda e: (
        f"{request(e.request, e.generation)} waits for {e.transfer} from prefill engine {e.prefill or '(unknown)'}: "
        f"{these_blocks(e.blocks)}, {rank_runs(e.ranks)}"
    ),
    ev.PeersNamed: lambda e: (
        f"rank {e.rank} asks {'worker' if len(e.peers) == 1 else 'workers'} {', '.join(e.peers)} of the prefill for "
        f"{e.transfer}"
    ),
    ev.PeerSettled: lambda e: (
        f"{e.peer or 'the search for peers'} settled {e.transfer} for rank {e.rank}: {e.outcome}{_because(e)}"
    ),
    ev.RecvFailed: lambda e: f"recv {e.transfer} of request {e.request} failed on rank {e.rank}{_because(e)}",
    ev.RecvSettled: lambda e: f"recv {e.transfer} of request {e.request} settled: {e.outcome}",
    ev.RecvRecovered: lambda e: f"after recv {e.transfer}, {request(e.request, e.generation)}: {e.action}",
    ev.BlocksAllocated: lambda e: (
        f"{these_blocks(e.blocks)} {was(e.blocks)} given to {request(e.request, e.generation)}"
    ),
    ev.BlocksReleased: lambda e: (
        f"{these_blocks(e.blocks)} {was(e.blocks)} given up by {request(e.request, e.generation)}"
    ),
    ev.TransferStarted: _started,
    ev.TransferFinished: _finished,
    ev.PoisonCaught: lambda e: (
        f"block {e.block}{f' (group {e.group})' if e.group else ''} changed while job {e.job} put it: fingerprint "
        f"{e.before} became {e.after}; key {e.key} "
        + ("was removed" if e.removed else f"could NOT be removed (raw {e.raw})")
    ),
    ev.LogOpened: lambda e: f"log opened by engine {e.engine}, boot {e.boot}",
    ev.Checkpoint: lambda e: (
        f"checkpoint {e.digest[:12]}: {plural(e.open_jobs, 'open job')}, {plural(e.pinned_blocks, 'pinned block')}, "
        f"{plural(e.waiting_loads, 'open load')}"
    ),
    ev.Gap: lambda e: f"GAP: {lost(e.dropped)} of {e.origin} lost: {e.reason}",
    ev.InvariantViolated: lambda e: f"BROKEN RULE {e.rule}: {e.detail}",
    ev.StallSuspected: lambda e: (
        f"{_work(e)} suspected to be stalled: open for {span(e.waited_ns)}"
        f"{f', no answer of {rank_runs(e.missing)}' if e.missing else ''}"
    ),
    ev.LogClosed: lambda e: f"log closed: {e.reason}{' ' + e.exception if e.exception else ''}",
}
