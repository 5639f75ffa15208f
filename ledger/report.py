"""What a replay says, for a person (80 columns of plain text) and for a program (JSON).

The text needs no colour and no lines drawn, so that it reads the same on a terminal, in a ticket, through a pipe and
aloud. It leads with the findings, because somebody was just woken up. Pure: from results to text; this file prints
nothing.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ledger import events as ev
from ledger import words
from ledger.blast import BlastRadius
from ledger.blocks import count, to_ranges
from ledger.case import Case, LogResult
from ledger.join import Step
from ledger.questions import Diff, Use, Why
from ledger.replay import Result
from ledger.state import State
from ledger.story import Calls, Durations, Slow
from ledger.verdicts import Finding

WIDTH = 80

EVENT_LEAD = 24
"""Width of the place and the time in front of an event's line."""

LABEL = 14
"""Width of the column of labels, e.g. `  Versions    `."""


# --- text -------------------------------------------------------------------------------------------------------------


def text(case: Case, *, check: bool = False) -> Iterator[str]:
    """Yield the report, line by line.

    Args:
        check: say in full how file and code agree.
    """
    yield headline(case)
    for index, log in enumerate(case.logs):
        yield ""
        yield from log_section(log, index if len(case.logs) > 1 else None)
    if check:
        yield ""
        yield from check_section(case)
    if case.findings:
        yield ""
        yield "Findings, earliest cause first"
        for number, (index, finding) in enumerate(case.findings, 1):
            yield ""
            yield from finding_section(number, finding, case.logs[index] if len(case.logs) > 1 else None)
    for transfer, steps in case.transfers.items():
        yield ""
        yield from transfer_section(transfer, steps, case)
    for log in case.logs:
        name = f" of {log.path.name}" if len(case.logs) > 1 else ""
        if case.interest:
            yield ""
            yield from interest_section(log, name)
        else:
            yield ""
            yield from open_section(log.result, name)
            yield ""
            yield from story_section(log.result, name)


def headline(case: Case) -> str:
    """Return the first line: what was found."""
    about = _interest(case)
    if not case.findings:
        if all(log.empty for log in case.logs):
            return "Nothing to judge: there is no event yet."
        lost = _lost([log.result for log in case.logs])
        return f"Nothing wrong was found{about}{f' in what is left; {lost} were lost' if lost else ''}."
    kinds: dict[str, None] = {f"{finding.kind} ({finding.certainty})": None for _, finding in case.findings}
    return _one_line(f"{words.plural(len(case.findings), 'finding')}{about}: {', '.join(kinds)}")


def log_section(log: LogResult, index: int | None) -> Iterator[str]:
    """Yield what the log is."""
    result = log.result
    yield "Log" if index is None else f"Log {index + 1}"
    broken = f", but {log.broken_seal}: see kvledger verify" if log.broken_seal else ""
    yield from _row("File", f"{log.path}{f' (sealed{broken})' if log.sealed else ''}")
    if "minimized_from" in log.meta:
        yield from _row("Minimized", f"from {log.meta['minimized_from']}: what its finding does not need is left out")
    opened = result.opened
    if opened is not None:
        connector = f", {opened.connector}" if opened.connector else ""
        role = f" ({opened.role})" if opened.role else ""
        yield from _row("Engine", f"{opened.engine}, boot {opened.boot}{connector}{role}")
        if opened.versions:
            yield from _row("Versions", ", ".join(f"{name} {version}" for name, version in opened.versions.items()))
        expected = sum(last - first + 1 for first, last in opened.ranks)
        pool = f", {words.plural(opened.num_blocks, 'GPU block')}" if opened.num_blocks else ""
        yield from _row("Shape", f"{words.plural(expected, 'rank')} ({words.ranges(opened.ranks)}){pool}")
    if result.first is None or result.last is None:
        yield from _row("Events", "no event yet: its engine has just begun" if log.empty else "none up to this moment")
        return
    took = words.span(result.last.ts_ns - result.first.ts_ns)
    yield from _row("Span", f"{words.timestamp(result.first.ts_ns)} to {words.timestamp(result.last.ts_ns)}, {took}")
    yield from _row("Events", f"{result.events:,}, from {result.first.seq} to {result.last.seq}")
    yield from _row("End", ending(result))
    gaps = result.trail.gaps
    told = [f"{words.lost(gap.dropped)} of {gap.origin} at event {gap.seq} ({gap.reason})" for gap in gaps[:5]]
    more = [f"and {len(gaps) - 5} more gaps"] if len(gaps) > 5 else []
    yield from _row("Gaps", "; ".join([*told, *more]) or "none")
    if result.mismatch is not None:
        yield from _row(
            "Disagrees",
            f"this file and today's code disagree at event {result.mismatch.seq}; see kvledger replay --check",
        )
    if result.refused:
        first = result.refusals[0]
        yield from _row(
            "Refused",
            f"{words.plural(result.refused, 'event')} that the book does not accept, first event {first.event.seq} "
            f"({first.rule})",
        )


def ending(result: Result) -> str:
    """Return how the log ends, in words."""
    end = result.end
    if end is None:
        return "empty"
    if end.closed is not None:
        return (
            "closed by the engine"
            if end.closed.reason != "exception"
            else f"closed after {end.closed.exception or 'an error'}"
        )
    return {
        "torn": (
            f"torn: no log_closed after {words.clock(end.last.ts_ns)} UTC; the process ended hard, its disk took "
            "nothing more, or this copy lacks the end"
        ),
        "live": "still open: the engine writes it",
        "as_of": f"replayed as far as event {end.last.seq}; the log goes on",
    }[end.how]


def check_section(case: Case) -> Iterator[str]:
    """Yield how the files and today's code agree."""
    yield "Check"
    for log in case.logs:
        result = log.result
        if result.mismatch is not None:
            wrong = result.mismatch
            yield from _row(
                "Differs", f"{log.path.name}: first at event {wrong.seq}, agreed until event {wrong.agreed_until_seq}"
            )
            yield from _row("Expected", wrong.expected)
            yield from _row("Actual", wrong.actual)
        elif result.checkpoints:
            yield from _row("Agrees", f"{log.path.name}: all {words.plural(result.checkpoints, 'checkpoint')}")
        else:
            yield from _row("Unknown", f"{log.path.name}: has no checkpoint to compare with")
        for refusal in result.refusals[:5]:
            yield from _row("Refused", f"event {refusal.event.seq}, {refusal.rule}: {refusal.detail}")


def finding_section(number: int, finding: Finding, log: LogResult | None) -> Iterator[str]:
    """Yield one finding in full."""
    since = next((event.ts_ns for event in finding.chain if event.seq == finding.since_seq), None)
    rows = [
        ("In", log.path.name if log is not None else ""),
        ("Since", f"event {finding.since_seq}{f', {words.timestamp(since)}' if since is not None else ''}"),
        ("Requests", words.listed(finding.requests)),
        ("Jobs", words.listed(finding.jobs, 12)),
        ("Ranks", words.ranges(to_ranges(finding.ranks))),
        ("Blocks", _blocks(finding.blocks) if finding.blocks else ""),
        ("Code", finding.code or ""),
        ("Culprit", finding.culprit),
        *(("Time line", note) for note in finding.notes),
        ("Not proven", finding.doubt),
        ("Do next", finding.advice),
    ]
    yield from _wrap(f"{number}. ", f"{finding.kind.upper()} ({finding.certainty}): {finding.title}")
    for label, value in rows:
        if value:
            yield from _row(label, value)
    if finding.chain:
        yield "  Evidence"
        for event in finding.chain:
            yield from _event("  ", event)


def transfer_section(transfer: str, steps: Sequence[Step], case: Case) -> Iterator[str]:
    """Yield both sides of a transfer on one time axis."""
    yield f"Transfer {transfer} in all logs"
    if any(step.by_clock for step in steps):
        yield from _wrap(
            "  ",
            "A line with ? is placed behind the one before it by the clocks of two hosts alone; nothing else orders "
            "them.",
        )
    for step in steps:
        mark = "?" if step.by_clock else " "
        yield from _event(f"{mark} {step.log + 1} ", step.event)


def open_section(result: Result, name: str) -> Iterator[str]:
    """Yield what is open at the end, and since when."""
    lines = list(_open(result))
    yield f"Open at the end{name}: {words.plural(len(lines), 'item') if lines else 'nothing'}"
    for line in lines[:20]:
        yield from _wrap("  ", line, hanging=4)
    if len(lines) > 20:
        yield f"  and {len(lines) - 20} more; kvledger state lists all"


def _open(result: Result) -> Iterator[str]:
    book, end = result.state.book, result.end
    if end is None:
        return

    def age(since_seq: int, since_mono_ns: int) -> str:
        return f"open since event {since_seq}, for {words.span(max(end.now_mono_ns - since_mono_ns, 0))}"

    for number, job in book.jobs.items():
        waits = f"waits for {words.ranks(job.waiting)}" if job.waiting else "every rank has reported"
        kept = ", quarantined" if job.quarantined else ""
        yield (
            f"store job {number} of {words.request(job.request, job.generation)}: "
            f"{age(job.since_seq, job.since_mono_ns)}; "
            f"{waits}; pins {words.plural(count(job.blocks), 'block')}{kept}"
        )
    for number, load in book.loads.items():
        waits = f"waits for {words.ranks(load.waiting)}" if load.waiting else "not given to the workers yet"
        yield (
            f"load {number} of {words.request(load.request, load.generation)}: "
            f"{age(load.since_seq, load.since_mono_ns)}; "
            f"{waits}; writes {words.plural(count(load.blocks), 'block')}"
        )
    for request, send in book.sends.items():
        yield (
            f"send {send.transfer} of request {request}: {send.phase}, {age(send.since_seq, send.since_mono_ns)}; "
            f"waits for {words.ranks(send.waiting)}; holds {words.plural(count(send.blocks), 'block')}"
        )
    for request, recv in book.recvs.items():
        missing = recv.missing_ranks()
        waits = f"waits for {words.ranks(missing)}" if missing else "every peer has settled"
        yield (
            f"recv {recv.transfer} of request {request}: {age(recv.since_seq, recv.since_mono_ns)}; "
            f"{waits}; holds {words.plural(count(recv.blocks), 'block')}"
        )
    states: dict[str, int] = {}
    for record in book.requests.values():
        states[record.state] = states.get(record.state, 0) + 1
    if states:
        yield "requests: " + ", ".join(f"{number} {state}" for state, number in states.items())


def story_section(result: Result, name: str) -> Iterator[str]:
    """Yield the run in numbers."""
    story = result.story
    lost = _lost([result])
    yield f"Story in numbers{name}{', each of them at least' if lost else ''}"
    if lost:
        yield from _row("Lost", f"{lost}, which are not in these numbers")
    reasons = ", ".join(f"{reason or 'no reason'} {number}" for reason, number in story.end_reasons.items())
    yield from _row(
        "Requests",
        f"{story.requests:,} queued, {story.finished:,} finished{f' ({reasons})' if reasons else ''}, "
        f"{story.aborted:,} aborted, "
        f"{words.plural(story.preemptions, 'preemption')}",
    )
    if story.jobs or story.jobs_skipped:
        yield from _row(
            "Store jobs",
            f"{story.jobs:,} registered, {story.jobs_settled:,} settled ({story.jobs_failed:,} with a failed rank), "
            f"{story.jobs_skipped:,} skipped; at most {words.plural(story.most_pinned_blocks, 'block')} pinned at a "
            "time"
            f"{_times('; blocks held', story.job_held)}",
        )
    if story.loads:
        yield from _row(
            "Loads",
            f"{story.loads:,} planned, {story.loads_settled:,} settled ({story.loads_failed:,} failed), "
            f"{words.plural(story.tokens_loaded, 'token')} loaded{_times('; waited', story.load_waited)}",
        )
    for op, calls in story.calls.items():
        yield from _row(f"{op.capitalize()}{'es' if op == 'push' else 's'}", _calls(calls))
    transfers = [
        f"{words.plural(story.kinds.get(kind, 0), word)}"
        for kind, word in (
            ("send_registered", "send"),
            ("send_expired", "expired send"),
            ("recv_registered", "recv"),
            ("recv_failed", "failed recv"),
        )
        if story.kinds.get(kind)
    ]
    if transfers:
        yield from _row("P/D", ", ".join(transfers))
    if story.failures:
        most = sorted(story.failures.items(), key=lambda item: -item[1])[:5]
        yield from _row("Failures", ", ".join(f"{code} on rank {rank}: {number}" for (code, rank), number in most))
    slowest = sorted([slow for calls in story.calls.values() for slow in calls.slowest], reverse=True)[:5]
    if slowest:
        yield "  Slowest transfers"
        for slow in slowest:
            yield from _wrap("    ", _slow(slow), hanging=6)
    if story.slowest_loads:
        yield "  Slowest loads"
        for slow in story.slowest_loads:
            yield from _wrap(
                "    ",
                f"{words.span(slow.duration_ns)}: {slow.what} of request {slow.request}, event {slow.seq}",
                hanging=6,
            )


def interest_section(log: LogResult, name: str) -> Iterator[str]:
    """Yield the events that concern what the report was narrowed to."""
    events = log.events_of_interest
    yield f"Time line{name}: {words.plural(len(events), 'event')}"
    for event in events:
        yield from _event("", event)


def why_lines(answer: Why) -> Iterator[str]:
    """Yield why a request ended as it did."""
    yield from _wrap("", f"{answer.answer}.")
    yield ""
    yield "Because, the nearest cause first"
    for line in answer.because:
        yield from _wrap("  ", line, hanging=4)
    if answer.findings:
        yield ""
        yield "Findings about it, earliest cause first"
        for finding in answer.findings:
            yield from _wrap("  ", f"{finding.kind} ({finding.certainty}): {finding.title}", hanging=4)
            yield from _wrap("    ", f"look at: {finding.culprit}", hanging=6)
            yield from _wrap("    ", f"do next: {finding.advice}", hanging=6)


def blame_lines(block: tuple[int, int], uses: Sequence[Use]) -> Iterator[str]:
    """Yield who used a block."""
    yield f"Block {block[0]}:{block[1]}: {words.plural(len(uses), 'use')} on record"
    for use in uses:
        yield from _wrap(f"  {use.what:<9}", f"by {use.by}, {_when(use)}")
    if not uses:
        yield "  No job, load or transfer of this log names it."


def _when(use: Use) -> str:
    if use.last is None:
        return f"from event {use.first.seq} on ({words.clock(use.first.ts_ns)})"
    if use.last is use.first:
        return f"until event {use.last.seq} ({words.clock(use.last.ts_ns)})"
    took = words.span(use.last.ts_ns - use.first.ts_ns)
    return f"from event {use.first.seq} to {use.last.seq} ({words.clock(use.first.ts_ns)}, {took})"


def diff_lines(changes: Diff, first_seq: int, last_seq: int) -> Iterator[str]:
    """Yield what changed between two moments."""
    yield f"From event {first_seq} to event {last_seq}"
    yield from _row("Pinned", f"{changes.pinned_blocks[0]:,} blocks became {changes.pinned_blocks[1]:,}")
    yield from _row("Begun", words.listed(changes.begun, 20) or "nothing")
    yield from _row("Ended", words.listed(changes.ended, 20) or "nothing")
    for line in changes.moved:
        yield from _row("Changed", line)
    events = ", ".join(f"{kind} {number:,}" for kind, number in changes.kinds.items())
    yield from _row("Events", events or "none")


def radius_lines(radius: BlastRadius, names: Sequence[str]) -> Iterator[str]:
    """Yield how far the wrong KV of a job has come."""
    judged = (
        "as the poison verdict names them"
        if radius.judged
        else "all that it stored; no verdict says that it is poisoned"
    )
    yield from _wrap(
        "", f"Store job {radius.job} in {names[radius.log]}: {words.plural(len(radius.keys), 'key')}, {judged}"
    )
    for key in radius.keys[:50]:
        yield f"  {key}"
    if len(radius.keys) > 50:
        yield f"  and {len(radius.keys) - 50} more; --json has all"
    yield ""
    yield f"Requests reached: {len(radius.reached) or 'none in these logs'}"
    for spread in radius.reached:
        how = f"loaded key {spread.key}" if spread.how == "loaded" else "shared blocks with a request that was reached"
        who = words.request(spread.request, spread.generation)
        yield from _wrap("  ", f"{who} in {names[spread.log]}: {how} at event {spread.seq}", hanging=4)
    if radius.derived:
        yield ""
        yield f"Keys stored by them afterwards, from wrong KV: {len(radius.derived):,}"
        for key, (log, request) in list(radius.derived.items())[:50]:
            yield from _wrap("  ", f"{key} by request {request} in {names[log]}", hanging=4)
    if not radius.complete:
        yield "The chain is longer than what was followed; there may be more."


def next_lines(case: Case, name: str) -> Iterator[str]:
    """Yield the verdict in short, and the commands to type next for the file that is called `name`."""
    yield "The verdict:"
    for _, finding in case.findings:
        yield from _wrap("  ", f"{finding.kind} ({finding.certainty}): {finding.title}", hanging=4)
    job, kind = next(((f.jobs[0], f.kind) for _, f in case.findings if f.jobs), (None, ""))
    yield "Type next:"
    if job is not None:
        yield f"  kvledger replay {name} --job {job}"
    if kind == "poison":
        yield f"  kvledger blast-radius {name} --job {job}"
    yield f"  kvledger browse {name}"
    yield ""


def state_lines(state: State, last: ev.Event | None) -> Iterator[str]:
    """Yield a whole book as text."""
    book = state.book
    if last is not None:
        yield f"After event {last.seq} at {words.timestamp(last.ts_ns)}"
    yield from _row("Digest", state.digest())
    yield from _row("Pinned", words.plural(state.pinned_blocks(), "block"))
    for title, entries in (
        ("Requests", book.requests),
        ("Store jobs", book.jobs),
        ("Loads", book.loads),
        ("Sends", book.sends),
        ("Recvs", book.recvs),
    ):
        if entries:
            yield f"{title}: {len(entries)}"
            for key, entry in entries.items():
                yield from _wrap("  ", f"{key}  {_record(entry)}", hanging=6)


# --- JSON -------------------------------------------------------------------------------------------------------------


def data(case: Case) -> dict[str, Any]:
    """Return the report in the shape that `kvledger replay --json` promises. What is beyond it is in `story`."""
    results = [log.result for log in case.logs]
    firsts = [result.first.ts_ns for result in results if result.first is not None]
    lasts = [result.last.ts_ns for result in results if result.last is not None]
    return {
        "log": {
            "files": [str(log.path) for log in case.logs],
            "engine": ", ".join(dict.fromkeys(result.opened.engine for result in results if result.opened is not None)),
            "events": sum(result.events for result in results),
            "first": words.timestamp(min(firsts)) if firsts else None,
            "last": words.timestamp(max(lasts)) if lasts else None,
            "clean_end": all(_clean(result) for result in results),
            "gaps": [
                {
                    "file": str(log.path),
                    "seq": gap.seq,
                    "origin": gap.origin,
                    "dropped": gap.dropped,
                    "reason": gap.reason,
                    "first": words.timestamp(gap.first_ts_ns),
                    "last": words.timestamp(gap.last_ts_ns),
                }
                for log in case.logs
                for gap in log.result.trail.gaps
            ],
        },
        "state": {
            "digest": " ".join(result.state.digest() for result in results),
            "open_jobs": sum(len(result.state.book.jobs) for result in results),
            "pinned_blocks": sum(result.state.pinned_blocks() for result in results),
            "waiting_loads": sum(len(result.state.book.loads) + len(result.state.book.recvs) for result in results),
        },
        "findings": [finding.public() for _, finding in case.findings],
        "story": {
            "facts": [
                {"finding": number, **finding.facts}
                for number, (_, finding) in enumerate(case.findings)
                if finding.facts
            ],
            "transfers": {
                transfer: [
                    {"log": step.log, "seq": step.event.seq, "by_clock": step.by_clock, "what": words.line(step.event)}
                    for step in steps
                ]
                for transfer, steps in case.transfers.items()
            },
            "logs": [
                _log_data(log, [n for n, (i, _) in enumerate(case.findings) if i == index])
                for index, log in enumerate(case.logs)
            ],
        },
    }


def radius_data(radius: BlastRadius, names: Sequence[str]) -> dict[str, Any]:
    """Return a blast radius as data."""
    return {
        "job": radius.job,
        "file": names[radius.log],
        "judged": radius.judged,
        "complete": radius.complete,
        "keys": radius.keys,
        "reached": [
            {
                "file": names[spread.log],
                "request": spread.request,
                "generation": spread.generation,
                "seq": spread.seq,
                "how": spread.how,
                "key": spread.key,
                "round": spread.round,
            }
            for spread in radius.reached
        ],
        "derived": [
            {"key": key, "file": names[log], "request": request} for key, (log, request) in radius.derived.items()
        ],
    }


def _log_data(log: LogResult, findings: Sequence[int]) -> dict[str, Any]:
    result, story = log.result, log.result.story
    opened = result.opened
    return {
        "file": str(log.path),
        "sealed": log.sealed,
        "broken_seal": log.broken_seal or None,
        "minimized_from": log.meta.get("minimized_from"),
        "findings": list(findings),
        "engine": opened.engine if opened else None,
        "boot": opened.boot if opened else None,
        "versions": opened.versions if opened else {},
        "end": result.end.how if result.end else "empty",
        "events": result.events,
        "kinds": story.kinds,
        "checkpoints": result.checkpoints,
        "mismatch": None
        if result.mismatch is None
        else {
            "seq": result.mismatch.seq,
            "agreed_until_seq": result.mismatch.agreed_until_seq,
            "expected": result.mismatch.expected,
            "actual": result.mismatch.actual,
        },
        "refused": [
            {"seq": refusal.event.seq, "rule": refusal.rule, "detail": refusal.detail}
            for refusal in result.refusals[:20]
        ],
        "requests": {
            "queued": story.requests,
            "finished": story.finished,
            "aborted": story.aborted,
            "preemptions": story.preemptions,
            "end_reasons": story.end_reasons,
        },
        "jobs": {
            "registered": story.jobs,
            "settled": story.jobs_settled,
            "failed": story.jobs_failed,
            "skipped": story.jobs_skipped,
            "most_pinned_blocks": story.most_pinned_blocks,
            "held": _durations_data(story.job_held),
        },
        "loads": {
            "planned": story.loads,
            "settled": story.loads_settled,
            "failed": story.loads_failed,
            "tokens_loaded": story.tokens_loaded,
            "waited": _durations_data(story.load_waited),
        },
        "calls": {op: _calls_data(calls) for op, calls in story.calls.items()},
        "failures": [{"code": code, "rank": rank, "number": number} for (code, rank), number in story.failures.items()],
        "open": list(_open(result)),
        "time_line": [words.line(event) for event in log.events_of_interest],
    }


def _calls_data(calls: Calls) -> dict[str, Any]:
    return {
        "calls": calls.calls,
        "keys": calls.keys,
        "bytes": calls.bytes,
        "failed_calls": calls.failed_calls,
        "failed_keys": calls.failed_keys,
        "took": _durations_data(calls.durations),
        "slowest": [
            {
                "duration_ns": slow.duration_ns,
                "seq": slow.seq,
                "transfer": slow.what,
                "request": slow.request,
                "job": slow.job,
                "load": slow.load,
                "rank": slow.rank,
                "bytes": slow.bytes,
            }
            for slow in calls.slowest
        ],
    }


def _durations_data(durations: Durations) -> dict[str, int]:
    return {
        "number": durations.number,
        "p50_ns": durations.percentile_ns(50),
        "p99_ns": durations.percentile_ns(99),
        "longest_ns": durations.longest_ns,
    }


# --- helpers ----------------------------------------------------------------------------------------------------------


def _clean(result: Result) -> bool:
    return result.end is not None and result.end.closed is not None and result.end.closed.reason != "exception"


def _lost(results: Sequence[Result]) -> str:
    """Return how many events the gaps stand for, in words; empty if there is no gap."""
    dropped = [gap.dropped for result in results for gap in result.trail.gaps]
    known = words.lost(sum(dropped))
    return f"at least {known}" if 0 in dropped and sum(dropped) else known if dropped else ""


def _interest(case: Case) -> str:
    interest = case.interest
    parts = [
        f"request {interest.request}" if interest.request is not None else "",
        f"job {interest.job}" if interest.job is not None else "",
        f"block {interest.block[0]}:{interest.block[1]}" if interest.block is not None else "",
    ]
    named = " and ".join(part for part in parts if part)
    return f" about {named}" if named else ""


def _times(label: str, durations: Durations) -> str:
    if not durations.number:
        return ""
    return (
        f"{label} {words.span(durations.percentile_ns(50))} at the median, {words.span(durations.longest_ns)} at most"
    )


def _calls(calls: Calls) -> str:
    failed = f", {calls.failed_calls:,} failed ({words.plural(calls.failed_keys, 'key')})" if calls.failed_calls else ""
    return (
        f"{words.plural(calls.calls, 'call')}, {words.plural(calls.keys, 'key')}, {words.size(calls.bytes)}{failed}"
        f"{_times(';', calls.durations)}"
    )


def _slow(slow: Slow) -> str:
    work = f"job {slow.job}" if slow.job >= 0 else f"load {slow.load}" if slow.load >= 0 else f"request {slow.request}"
    moved = f", {words.size(slow.bytes)}" if slow.bytes else ""
    return f"{words.span(slow.duration_ns)}: {slow.what} of {work}, rank {slow.rank}{moved}, event {slow.seq}"


def _blocks(blocks: Sequence[tuple[int, int]]) -> str:
    groups: dict[int, list[int]] = {}
    for group, block in blocks:
        groups.setdefault(group, []).append(block)
    return words.blocks(tuple((group, to_ranges(ids)) for group, ids in groups.items()), 8)


def _record(entry: Any) -> str:
    fields = {name: getattr(entry, name) for name in entry.__struct_fields__}
    return ", ".join(
        f"{name} {words.blocks(value) if name == 'blocks' else value}"
        for name, value in fields.items()
        if value not in ((), {}, None)
    )


def _event(lead: str, event: ev.Event) -> Iterator[str]:
    yield from _wrap(lead, words.line(event), hanging=len(lead) + EVENT_LEAD)


def _row(label: str, value: str) -> Iterator[str]:
    yield from _wrap(f"  {label:<{LABEL - 2}}", value)


def _wrap(lead: str, value: str, hanging: int | None = None) -> Iterator[str]:
    yield from textwrap.wrap(
        value,
        WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * (len(lead) if hanging is None else hanging),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [lead.rstrip()]


def _one_line(line: str) -> str:
    return textwrap.shorten(line, WIDTH, placeholder=" ...")


def joined(lines: Iterable[str]) -> str:
    """Return lines as one text."""
    return "\n".join(lines) + "\n"
