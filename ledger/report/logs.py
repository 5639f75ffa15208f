"""The part of a report about the logs: what each one is, what is open at its end, and its run in numbers.

Pure: from results to lines; this file prints nothing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from ledger import events as ev
from ledger import words
from ledger.blocks import count
from ledger.replay.case import Case, LogResult
from ledger.replay.fold import Result
from ledger.replay.stats import Calls, Durations, Slow
from ledger.report.layout import Page
from ledger.state.open_work import OpenWork, open_work
from ledger.state.records import Job, Load, Send
from ledger.verdicts.base import Role

END_REASONS = {"stopped": "stop token or string", "length_capped": "length limit"}
"""What vLLM's reasons for the end of a request mean, where their names say less."""

SILENCE_NS = 15_000_000_000
"""A log without an event for longer than this, in nanoseconds, was silent: an engine that idles says that it lives."""

CLOCK_SET_NS = 5_000_000_000
"""A difference of the two clocks that is no drift, and no event of a worker that came late."""


# --- the logs ---------------------------------------------------------------------------------------------------------


def log_section(log: LogResult, index: int | None, page: Page) -> Iterator[str]:
    """Yield what the log is."""
    result = log.result
    yield "Log" if index is None else f"Log {index + 1}"
    broken = f", but {log.broken_seal}: see kvledger verify" if log.broken_seal else ""
    yield from page.row("File", f"{log.path}{f' (sealed{broken})' if log.sealed else ''}")
    if "minimized_from" in log.meta:
        yield from page.row(
            "Minimized", f"from {log.meta['minimized_from']}: what its finding does not need is left out"
        )
    if result.opened is not None:
        yield from _engine(result.opened, page)
    if result.first is None or result.last is None:
        none = "none up to this moment"
        yield from page.row("Events", "no event yet: its engine has just begun" if log.empty else none)
        return
    yield from page.row(
        "Span", f"{words.timestamp(result.first.ts_ns)} to {words.timestamp(result.last.ts_ns)}, {_length(result)}"
    )
    gaps = ev.losses(result.history.gaps)
    no_gap = "" if gaps else ", without a gap"
    yield from page.row("Events", f"{result.events:,}, from {result.first.seq} to {result.last.seq}{no_gap}")
    yield from page.row("End", ending(result))
    if gaps:
        yield from page.row("Gaps", gaps)
    if result.mismatch is not None:
        where = f"event {result.mismatch.seq}"
        yield from page.row("Disagrees", f"this file and today's code disagree at {where}; see kvledger replay --check")
    if result.refused:
        first = result.refusals[0]
        which = f"{result.refused:,} events, the first of them " if result.refused > 1 else ""
        yield from page.row("Refused", f"{which}event {first.event.seq}, which the state does not accept: {first.rule}")


def _length(result: Result) -> str:
    """Return how long a log is, by the scheduler's monotonic clock where the wall clock was set meanwhile."""
    if result.first is None or result.last is None:
        return ""
    wall_ns = result.last.ts_ns - result.first.ts_ns
    if result.end is None or result.first.source != ev.SCHEDULER:
        return words.span(wall_ns)
    mono_ns = result.end.now_mono_ns - result.first.mono_ns
    if abs(wall_ns - mono_ns) < CLOCK_SET_NS:
        return words.span(wall_ns)
    return f"{words.span(mono_ns)}; the wall clock was changed meanwhile, so do not trust times of day"


def _engine(opened: ev.LogOpened, page: Page) -> Iterator[str]:
    connector = f", {opened.connector}" if opened.connector else ""
    role = f" ({opened.role})" if opened.role else ""
    yield from page.row("Engine", f"{opened.engine}, boot {opened.boot}{connector}{role}")
    if opened.versions:
        yield from page.row("Versions", ", ".join(f"{name} {version}" for name, version in opened.versions.items()))
    expected = words.count_of(opened.ranks)
    which = f" ({words.ranges(opened.ranks)})" if expected > 1 else ""
    sizes = f" of {words.listed(dict.fromkeys(opened.block_sizes))} tokens" if opened.block_sizes else ""
    usable = words.plural(opened.num_blocks - 1, "usable GPU block")
    pool = f"; {usable}{sizes}" if opened.num_blocks else ""  # without the null block, which holds no KV
    groups = len(opened.block_sizes)
    grouped = f"; {groups} groups of blocks, a block that is named without one is of group 0" if groups > 1 else ""
    yield from page.row("Shape", f"{words.plural(expected, 'rank')}{which}{pool}{grouped}")


def ending(result: Result) -> str:
    """Return how the log ends, in words."""
    end = result.end
    if end is None:
        return "empty"
    before = end.tail[-2:-1]
    silent_ns = end.last.ts_ns - before[0].ts_ns if before and not isinstance(end.last, ev.Checkpoint) else 0
    silence = f"; no event in the {words.span(silent_ns)} before it" if silent_ns >= SILENCE_NS else ""
    if end.closed is not None:
        return (
            "closed by the engine as it shut down"
            if end.closed.reason != "exception"
            else f"closed after {end.closed.exception or 'an error'}"
        )
    return {
        "torn": (
            f"torn: no log_closed after {words.clock(end.last.ts_ns)} UTC{silence}; the process ended hard, its disk "
            "took nothing more, or this copy lacks the end"
        ),
        "live": "still open: the engine writes it",
        "as_of": f"replayed as far as event {end.last.seq}; the log goes on",
    }[end.how]


def check_section(case: Case, page: Page) -> Iterator[str]:
    """Yield how the files and today's code agree."""
    yield "Check"
    for log in case.logs:
        result = log.result
        if result.mismatch is not None:
            wrong = result.mismatch
            yield from page.row(
                "Differs", f"{log.path.name}: first at event {wrong.seq}, agreed until event {wrong.agreed_until_seq}"
            )
            yield from page.row("Expected", wrong.expected)
            yield from page.row("Actual", wrong.actual)
        elif result.checkpoints:
            compared = words.plural(result.checkpoints, "checkpoint")
            yield from page.row("Agrees", f"{log.path.name}: {'all ' if result.checkpoints > 1 else 'its '}{compared}")
        else:
            yield from page.row("Unknown", f"{log.path.name}: has no checkpoint to compare with")
        if result.uncompared:
            behind = words.plural(result.uncompared, "checkpoint")
            yield from page.row("Left out", f"{log.path.name}: {behind} behind the first place where it lost events")
        for refusal in result.refusals[:5]:
            yield from page.row("Refused", f"event {refusal.event.seq}, {refusal.rule}: {refusal.detail}")


# --- what is open -----------------------------------------------------------------------------------------------------

Taken = dict[tuple[str, int | str], int]
"""The number of the incident by which somebody else got the blocks of a job, load or transfer."""


def taken_blocks(case: Case, index: int) -> Taken:
    """Return whose blocks in a log were given away too early, and by which incident."""
    taken: Taken = {}
    for number, incident in enumerate(case.incidents, 1):
        for place in incident.members:
            log, finding = case.findings[place]
            if log != index or not finding.is_a(Role.FREES_EARLY | Role.TAINTS):
                continue
            for what, names in (("job", finding.jobs), ("load", finding.loads), ("transfer", finding.transfers)):
                for name in names:
                    taken.setdefault((what, name), number)
    return taken


def open_section(result: Result, name: str, page: Page, taken: Taken) -> Iterator[str]:
    """Yield what is open at the end, and since when."""
    lines = list(open_items(result, taken))
    yield from page.wrap("", f"Open at the end{name}: {words.plural(len(lines), 'item') if lines else 'nothing'}")
    for line in lines[:20]:
        yield from page.wrap("  ", line, hanging=4)
    if len(lines) > 20:
        yield from page.wrap("  ", f"and {len(lines) - 20} more; kvledger state lists all")


_HOLDS = {"job": "pins", "load": "writes", "send": "holds", "recv": "holds"}


def _nobody_is_missing(work: OpenWork) -> str:
    """Return what is said of open work for which everybody has answered."""
    match work.record:
        case Job(settled=settled):
            return f"{'settled' if settled else 'every rank has reported'}, and its blocks were not freed"
        case Load():
            return "not given to the workers yet"
        case Send():
            return "every rank has reported"
        case _:
            return "every peer has settled"


def open_items(result: Result, taken: Taken) -> Iterator[str]:
    """Yield a line for each job, load and transfer that is open, and one for all requests."""
    book, end = result.state.book, result.end
    if end is None:
        return
    now_ns = end.now_mono_ns

    counted = {each.miscounted.report_of: each.miscounted for each in result.findings if each.miscounted is not None}
    for work in open_work(book):
        number = taken.get(("transfer" if work.is_transfer else work.kind, work.id))
        held = f"{_HOLDS[work.kind]} {words.plural(count(work.blocks), 'block')}"
        if number is not None:
            held += f" in the ledger only: they were given away too early, see incident {number}"
        given = counted.get(int(work.id)) if work.kind == "job" else None
        elsewhere = f", whose report was counted for job {given.counted_for}" if given is not None else ""
        waits = f"waits for {words.ranks(work.waiting)}{elsewhere}" if work.waiting else _nobody_is_missing(work)
        whose = f"request {work.request}" if work.is_transfer else words.request(work.request, work.generation)
        phase = f"{work.record.phase}, " if isinstance(work.record, Send) else ""
        age = f"open since event {work.since_seq}, for {words.span(max(now_ns - work.since_mono_ns, 0))}"
        kept = ", quarantined" if work.kind == "job" and work.quarantined else ""
        name = f"store {work.name}" if work.kind == "job" else work.name
        yield f"{name} of {whose}: {phase}{age}; {waits}; {held}{kept}"
    states = Counter(record.state for record in book.requests.values())
    if states:
        yield "requests: " + ", ".join(f"{number} {state}" for state, number in states.items())


# --- the run in numbers -----------------------------------------------------------------------------------------------


def story_section(result: Result, name: str, page: Page) -> Iterator[str]:
    """Yield the run in numbers."""
    stats = result.stats
    lost = lost_events([result])
    yield from page.wrap("", f"The run in numbers{name}{', each of them at least' if lost else ''}")
    if lost:
        yield from page.row("Lost", f"{lost}, not in these numbers")
    reasons = ", ".join(
        f"{END_REASONS.get(reason, reason or 'no reason')}{f' {number:,}' if len(stats.end_reasons) > 1 else ''}"
        for reason, number in stats.end_reasons.items()
    )
    yield from page.row(
        "Requests",
        f"{stats.requests:,} queued, {stats.finished:,} finished{f' ({reasons})' if reasons else ''}, "
        f"{stats.aborted:,} aborted, "
        f"{words.plural(stats.preemptions, 'preemption')}",
    )
    if stats.jobs or stats.jobs_skipped:
        yield from page.row(
            "Store jobs",
            f"{stats.jobs:,} registered, {stats.jobs_settled:,} settled ({stats.jobs_failed:,} with a failed rank), "
            f"{stats.jobs_skipped:,} skipped; at most {words.plural(stats.most_pinned_blocks, 'block')} pinned at a "
            "time"
            f"{_times('; freed after', stats.job_held)}",
        )
    if stats.loads:
        yield from page.row(
            "Loads",
            f"{stats.loads:,} planned, {stats.loads_settled:,} settled ({stats.loads_failed:,} failed), "
            f"{words.plural(stats.tokens_loaded, 'token')} loaded{_times('; waited', stats.load_waited)}",
        )
    opened = _open_calls(result)
    for op in dict.fromkeys((*stats.calls, *opened)):
        label = f"{op.capitalize()}{'es' if op == 'push' else 's'}"
        yield from page.row(label, _calls(stats.calls.get(op, Calls()), opened.get(op, 0)))
    transfers = [
        f"{words.plural(stats.kinds.get(kind, 0), word)}"
        for kind, word in (
            ("send_registered", "send"),
            ("send_expired", "expired send"),
            ("recv_registered", "recv"),
            ("recv_failed", "failed recv"),
        )
        if stats.kinds.get(kind)
    ]
    if transfers:
        yield from page.row("P/D", ", ".join(transfers))
    if stats.failures:
        most = sorted(stats.failures.items(), key=lambda item: -item[1])[:5]
        yield from page.row("Failures", ", ".join(f"{code} on rank {rank}: {number}" for (code, rank), number in most))
    slowest = [
        (slow, op) for op, calls in stats.calls.items() for slow in calls.slowest if _stands_out(slow, calls.durations)
    ]
    if slowest:
        yield "  Slowest transfers"
        for slow, op in sorted(slowest, reverse=True)[:5]:
            yield from page.wrap("    ", _slow(slow, op), hanging=6)
    slow_loads = [slow for slow in stats.slowest_loads if _stands_out(slow, stats.load_waited)]
    if slow_loads:
        yield "  Slowest loads"
        for slow in slow_loads:
            yield from page.wrap(
                "    ",
                f"{words.span(slow.duration_ns)}: {slow.what} of request {slow.request}, event {slow.seq}",
                hanging=6,
            )


def interest_section(log: LogResult, name: str, page: Page) -> Iterator[str]:
    """Yield the events that concern what the report was narrowed to."""
    events = log.events_of_interest
    yield from page.wrap("", f"Time line{name}: {words.plural(len(events), 'event')}")
    for event in events:
        yield from page.event("", event)


def _times(label: str, durations: Durations) -> str:
    if not durations.number:
        return ""
    longest = words.span(durations.longest_ns)
    if words.span(durations.shortest_ns) == longest:
        return f"{label} {longest}{' each' if durations.number > 1 else ''}"
    if durations.number == 2:
        return f"{label} {words.span(durations.shortest_ns)} and {longest}"
    return f"{label} {words.span(durations.percentile_ns(50))} at the median, {longest} at most"


def _stands_out(slow: Slow, durations: Durations) -> bool:
    """Return whether one of the slowest says more than the median and the longest already do."""
    return durations.number >= 3 and slow.duration_ns > 1.2 * durations.percentile_ns(50)


def _open_calls(result: Result) -> Counter[str]:
    """Return how many calls have not returned, by sort, as far as the work that they are for is open."""
    history = result.history
    counted: Counter[str] = Counter()
    for chains in (history.jobs, history.loads, history.sends, history.recvs):
        for chain in chains.values():
            calls: dict[tuple[str, int, str], str] = {}
            for event in chain:
                if isinstance(event, ev.TransferStarted):
                    calls[event.transfer, event.rank, event.peer] = event.op
                elif isinstance(event, ev.TransferFinished):
                    calls.pop((event.transfer, event.rank, event.peer), None)
            counted.update(calls.values())
    return counted


def _calls(calls: Calls, opened: int) -> str:
    asked = f" for {words.plural(calls.keys, 'key')}" if calls.keys else ""
    moved = f", {words.size(calls.bytes)} moved" if calls.bytes or calls.keys else ""
    keys = f" ({words.plural(calls.failed_keys, 'key')})" if calls.failed_keys else ""
    failed = f", {calls.failed_calls:,} failed{keys}" if calls.failed_calls else ""
    more = f"; {opened:,}{' more' if calls.calls else ''} still open when the log ends" if opened else ""
    return f"{words.plural(calls.calls, 'call')}{asked}{moved}{failed}{_times('; took', calls.durations)}{more}"


def _slow(slow: Slow, op: str) -> str:
    work = f"job {slow.job}" if slow.job >= 0 else f"load {slow.load}" if slow.load >= 0 else f"request {slow.request}"
    size = f", {words.size(slow.bytes)}" if slow.bytes else ""
    failed = slow.outcome not in ("", "ok")
    how = f", {slow.outcome}{f'{size} asked for' if size else ''}" if failed else size
    return f"{words.span(slow.duration_ns)}: {words.call(op, slow.what, slow.rank)} for {work}{how}, event {slow.seq}"


def lost_events(results: Sequence[Result]) -> str:
    """Return how many events the gaps stand for, in words; empty if there is no gap."""
    dropped = [gap.dropped for result in results for gap in result.history.gaps]
    known = words.lost(sum(dropped))
    return f"at least {known}" if 0 in dropped and sum(dropped) else known if dropped else ""
