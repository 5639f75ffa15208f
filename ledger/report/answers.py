"""What the other questions are answered with, for a person: why, blame, diff, blast-radius, state, demo.

Pure: from answers to text; this file prints nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ledger import events as ev
from ledger import words
from ledger.queries.blame import BlockUse
from ledger.queries.blast_radius import BlastRadius
from ledger.queries.diff import Diff
from ledger.queries.why import Why
from ledger.replay.case import Case
from ledger.replay.incidents import grouped
from ledger.report.layout import WIDTH, Page
from ledger.report.wording import SameForJob, say
from ledger.state.apply import State
from ledger.verdicts.base import Finding, Role


def why_lines(answer: Why, width: int = WIDTH) -> Iterator[str]:
    """Yield why a request ended as it did."""
    page = Page(width)
    yield from page.wrap("", f"{answer.answer}.")
    yield ""
    yield "Because, the nearest cause first"
    for line in answer.because:
        yield from page.wrap("  ", line, hanging=4)
    if answer.findings:
        yield ""
        yield "Findings about it, earliest cause first"
        found = [(0, finding) for finding in answer.findings]
        for incident in grouped(found):
            head = answer.findings[incident.head]
            others = [answer.findings[place] for place in incident.members if place != incident.head]
            said = say(head)
            yield from page.wrap("  ", f"{head.kind} ({head.certainty}): {said.title}", hanging=4)
            for finding in others:
                line = f"with it: {finding.kind} ({finding.certainty}): {say(finding).short}"
                yield from page.wrap("    ", line, hanging=6)
            steps = [said.other_log, said.advice, *dict.fromkeys(_step(finding) for finding in others)]
            yield from page.wrap("    ", f"look at: {said.culprit}", hanging=6)
            yield from page.wrap("    ", f"do next: {' '.join(step for step in steps if step)}", hanging=6)


def _step(finding: Finding) -> str:
    step = say(finding).also
    return f"The same for the keys of job {step.job}." if isinstance(step, SameForJob) else step


def blame_lines(block: tuple[int, int], uses: Sequence[BlockUse], width: int = WIDTH) -> Iterator[str]:
    """Yield who used a block."""
    page = Page(width)
    yield f"Block {block[0]}:{block[1]}: {words.plural(len(uses), 'use')} on record"
    for use in uses:
        yield from page.wrap(f"  {use.what:<9}", f"by {use.by}, {_when(use)}")
    if not uses:
        yield "  No job, load or transfer of this log names it."


def _when(use: BlockUse) -> str:
    if use.last is None:
        return f"from event {use.first.seq} on ({words.clock(use.first.ts_ns)})"
    if use.last is use.first:
        return f"until event {use.last.seq} ({words.clock(use.last.ts_ns)})"
    took = ev.between(use.first, use.last)
    return f"from event {use.first.seq} to {use.last.seq} ({words.clock(use.first.ts_ns)}{f', {took}' if took else ''})"


def diff_lines(changes: Diff, first_seq: int, last_seq: int, width: int = WIDTH) -> Iterator[str]:
    """Yield what changed between two moments."""
    page = Page(width)
    yield f"From event {first_seq} to event {last_seq}"
    yield from page.row("Pinned", f"{changes.pinned_blocks[0]:,} blocks became {changes.pinned_blocks[1]:,}")
    yield from page.row("Begun", words.listed(changes.begun, 20) or "nothing")
    yield from page.row("Ended", words.listed(changes.ended, 20) or "nothing")
    for line in changes.moved:
        yield from page.row("Changed", line)
    events = ", ".join(f"{kind} {number:,}" for kind, number in changes.kinds.items())
    yield from page.row("Events", events or "none")


def radius_lines(radius: BlastRadius, names: Sequence[str], width: int = WIDTH) -> Iterator[str]:
    """Yield how far the wrong KV of a job has come."""
    page = Page(width)
    judged = (
        "as the poison verdict names them"
        if radius.judged
        else "all that it stored; no verdict says that it is poisoned"
    )
    yield from page.wrap(
        "", f"Store job {radius.job} in {names[radius.log]}: {words.plural(len(radius.keys), 'key')}, {judged}"
    )
    for key in radius.keys[:50]:
        yield f"  {key}"
    if len(radius.keys) > 50:
        yield f"  and {len(radius.keys) - 50} more; --json has all"
    yield ""
    yield f"Requests reached: {len(radius.reached) or 'none in these logs'}"
    for spread in radius.reached:
        how = (
            f"loaded key {spread.key}, with any other keys of the same get"
            if spread.how == "loaded"
            else "shared blocks with a request that was reached"
        )
        who = words.request(spread.request, spread.generation)
        yield from page.wrap("  ", f"{who} in {names[spread.log]}: {how} at event {spread.seq}", hanging=4)
    if radius.derived:
        yield ""
        yield f"Keys stored by them afterwards, from wrong KV: {len(radius.derived):,}"
        for key, (log, request) in list(radius.derived.items())[:50]:
            yield from page.wrap("  ", f"{key} by request {request} in {names[log]}", hanging=4)
    if not radius.followed:
        yield "The chain is longer than what was followed; more requests may be reached."


def lost_lines(name: str, gaps: Sequence[ev.Gap], width: int = WIDTH) -> Iterator[str]:
    """Yield what an answer could not know, because the log has lost it."""
    if gaps:
        lost = f"{name} has lost {ev.losses(gaps)}. What happened there is not in this answer."
        yield from Page(width).row("Lost", lost)


def next_lines(case: Case, name: str, width: int = WIDTH) -> Iterator[str]:
    """Yield the verdict in short, and the commands to type next for the file that is called `name`."""
    page = Page(width)
    yield "The verdict:"
    causes = [case.findings[incident.head][1] for incident in case.incidents]
    for finding in causes:
        yield from page.wrap("  ", f"{finding.kind} ({finding.certainty}): {say(finding).short}", hanging=4)
    first = next((finding for finding in causes if finding.jobs), None)
    yield "Type next:"
    if first is not None:
        yield f"  kvledger replay {name} --job {first.jobs[0]}"
        if first.is_a(Role.TAINTS):
            yield f"  kvledger blast-radius {name} --job {first.jobs[0]}"
    yield f"  kvledger browse {name}"
    yield ""


def state_lines(state: State, last: ev.Event | None, width: int = WIDTH) -> Iterator[str]:
    """Yield a whole book as text."""
    page = Page(width)
    book = state.book
    if last is None:
        yield "There is no event before that moment."
    else:
        yield f"After event {last.seq} at {words.timestamp(last.ts_ns)}"
    yield from page.row("Digest", state.digest())
    yield from page.row("Pinned", words.plural(state.pinned_blocks(), "block"))
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
                yield from page.wrap("  ", f"{key}  {_record(entry)}", hanging=6)


def _record(entry: Any) -> str:
    fields = {name: getattr(entry, name) for name in entry.__struct_fields__}
    return ", ".join(
        f"{name} {words.blocks(value) if name == 'blocks' else value}"
        for name, value in fields.items()
        if value not in ((), {}, None, "", msgspec.UNSET)
    )
