"""What a replay says, for a person: plain text, as wide as the reader has room.

The text needs no colour and no lines drawn, so that it reads the same on a terminal, in a ticket, through a pipe and
aloud. Its first lines alone tell what happened and what to do, because somebody was just woken up; then comes what the
logs are, and then each incident with the events that show it. Pure: from results to text; this file prints nothing.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from ledger import events as ev
from ledger import words
from ledger.blocks import Blocks, by_group, count, to_ranges
from ledger.case import Case, LogResult
from ledger.impact import DEALT_WITH, engine, impact
from ledger.incidents import CERTAINTIES, FREED, MISCOUNTED, Incident, gravest
from ledger.join import Step
from ledger.layout import WIDTH, Page
from ledger.replay import Result
from ledger.state import Job, Load
from ledger.story import Calls, Durations, Slow
from ledger.transfers import Recv, Send
from ledger.verdicts import Finding

SUMMARY_CHARS = 160
"""What the first lines say of one incident, at most: two lines of a terminal."""

END_REASONS = {"stopped": "stop token or string", "length_capped": "length limit"}
"""What vLLM's reasons for the end of a request mean, where their names say less."""

KEPT_EVIDENCE = 30
"""Events that are shown for one incident and one log; a longer proof is read from the data."""

KEPT_TIME_LINE = 60
"""Events of one time line of several logs that are shown."""

MARKED = 2
"""Lines that are marked one by one as placed by clocks; where there are more, one sentence says it of all."""

SILENCE_NS = 15_000_000_000
"""A log without an event for longer than this, in nanoseconds, was silent: an engine that idles says that it lives."""

SHOWN_KEYS = 8

CLOCK_SET_NS = 5_000_000_000
"""A difference of the two clocks that is no drift, and no event of a worker that came late."""


def text(case: Case, *, check: bool = False, width: int = WIDTH) -> Iterator[str]:
    """Yield the report, line by line.

    Args:
        check: say in full how file and code agree.
        width: columns that the reader has.
    """
    page = Page(width)
    yield from summary(case, page)
    for index, log in enumerate(case.logs):
        yield ""
        yield from log_section(log, index if len(case.logs) > 1 else None, page)
    if check:
        yield ""
        yield from check_section(case, page)
    if case.findings:
        yield ""
        yield "Incidents, earliest cause first"
        for number, incident in enumerate(case.incidents, 1):
            yield ""
            yield from incident_section(number, incident, case, page)
    told = {transfer for incident in case.incidents for transfer in _shared(incident, case)}
    for transfer, steps in case.transfers.items():
        if transfer not in told:
            yield ""
            yield from transfer_section(transfer, steps, page)
    for index, log in enumerate(case.logs):
        name = f" of {log.path.name}" if len(case.logs) > 1 else ""
        if case.interest:
            yield ""
            yield from interest_section(log, name, page)
        else:
            yield ""
            yield from open_section(log.result, name, page, _taken(case, index))
            yield ""
            yield from story_section(log.result, name, page)


# --- the first lines --------------------------------------------------------------------------------------------------


def summary(case: Case, page: Page) -> Iterator[str]:
    """Yield what was found, and of the gravest incident what happened and what to do."""
    yield from page.wrap("", headline(case))
    incidents = case.incidents
    if not incidents:
        return
    first = gravest(incidents, case.findings)
    finding = case.findings[first.head][1]
    torn = [each for _, each in _members(first, case) if each.kind == "torn_log" and each is not finding and each.brief]
    also = f". Also, {torn[0].brief}" if torn else ""
    which = f"incident {incidents.index(first) + 1}" if len(incidents) > 1 else ""
    about = ", ".join(part for part in (which, finding.certainty if finding.certainty != "proven" else "") if part)
    sure = f" ({about})" if about else ""
    where = f" on engine {engine(case, case.findings[first.head][0])}" if len(case.logs) > 1 else ""
    what = _short(finding.brief or finding.title)
    yield from page.wrap("", f"What happened{where}{sure}: {what}{also}.", hanging=2)
    yield from page.wrap("", f"Impact: {impact(first, case)}.", hanging=2)
    # The only incident is told once: what is to be done about it stands here in full.
    steps = do_next(first, case) if len(incidents) == 1 else _short(_first_steps(first, case))
    yield from page.wrap("", f"Do next: {steps}", hanging=2)
    others = [f"{number} {_kind(case, each)}" for number, each in enumerate(incidents, 1) if each is not first]
    if others:
        yield from page.wrap("", f"Other incidents: {words.listed(others, 8)}.", hanging=2)


def _kind(case: Case, incident: Incident) -> str:
    finding = case.findings[incident.head][1]
    return f"{finding.kind} ({finding.certainty})"


def headline(case: Case) -> str:
    """Return the first line: how much was found, the most certain first."""
    about = _interest(case)
    if not case.findings:
        if all(log.empty for log in case.logs):
            return "Nothing to judge: there is no event yet."
        early = [log.begins_ts_ns for log in case.logs if log.begins_ts_ns]
        if early and len(early) == len(case.logs):
            begins = (
                f"{'the log begins' if len(early) == 1 else 'the first log begins'} at {words.timestamp(min(early))}"
            )
            return f"Nothing to judge: there is no event before that moment; {begins}."
        lost = lost_events([log.result for log in case.logs])
        return f"Nothing wrong was found{about}{f' in what is left; lost: {lost}' if lost else ''}."
    counted = Counter((finding.kind, finding.certainty) for _, finding in case.findings)
    kinds = sorted(counted.items(), key=lambda item: CERTAINTIES.index(item[0][1]))
    told = ", ".join(f"{f'{number} ' if number > 1 else ''}{kind} ({certain})" for (kind, certain), number in kinds)
    findings = words.plural(len(case.findings), "finding")
    incidents = f" in {words.plural(len(case.incidents), 'incident')}" if len(case.findings) > 1 else ""
    return f"{findings}{incidents}{about}: {told}"


def _short(sentence: str) -> str:
    return textwrap.shorten(sentence, SUMMARY_CHARS, placeholder=" ...")


def _first_steps(incident: Incident, case: Case) -> str:
    """Return the first sentence of the advice, and further ones about what came of it as far as there is room."""
    first, *others = _steps(incident, case)
    told = re.split(r"(?<=[.?]) (?=[A-Z`])", first, maxsplit=1)[0]
    for step in others:
        if len(told) + len(step) < SUMMARY_CHARS:
            told = f"{told} {step}"
    return told


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
    gaps = words.gaps(result.trail.gaps)
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
        yield from page.row("Refused", f"{which}event {first.event.seq}, which the book does not accept: {first.rule}")


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
    return f"{words.span(mono_ns)}; the wall clock was set meanwhile, so that times of day mislead"


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


# --- incidents --------------------------------------------------------------------------------------------------------


def incident_section(number: int, incident: Incident, case: Case, page: Page) -> Iterator[str]:
    """Yield one incident in full: its cause, what came of it, what to do, and the events that show it."""
    index, head = case.findings[incident.head]
    several = len(case.logs) > 1
    # What stands in another log has its ids in that log, so it is told in its line and not in the lists.
    here = [finding for log, finding in _members(incident, case) if log == index]
    since = next((event.ts_ns for event in head.chain if event.seq == head.since_seq), None)
    suffering = dict.fromkeys(name for finding in here for name in finding.suffering)
    own = dict.fromkeys(name for finding in here for name in finding.requests if name not in finding.suffering)
    blocks = sorted({block for finding in here for block in finding.blocks})
    yield from page.wrap(f"{number}. ", f"{head.kind.upper()} ({head.certainty}): {head.title}")
    if several:
        yield from page.row("In", case.logs[index].path.name)
    yield from page.row("Since", f"event {head.since_seq}{f', {words.timestamp(since)}' if since is not None else ''}")
    yield from _consequences(incident, case, page)
    jobs = sorted({job for finding in here for job in finding.jobs})
    ranks = sorted({rank for finding in here for rank in finding.ranks})
    concerned = [
        f"{'request' if len(own) == 1 else 'requests'} {words.listed(own)}" if own else "",
        *(f"request {name}" for name in _elsewhere(incident, case, affected=False)),
        f"store {'job' if len(jobs) == 1 else 'jobs'} {words.ranges(to_ranges(jobs))}" if jobs else "",
        words.ranks(ranks) if ranks else "",
        words.these_blocks(_grouped(blocks), 8) if blocks else "",
        f"code {head.code}" if head.code and head.code not in head.title else "",
    ]
    affected = [name for name in suffering if name not in own]
    single = len(case.incidents) == 1
    for label, value in (
        ("Concerns", "; ".join(part for part in concerned if part)),
        (
            "Affected",
            "; ".join([*([words.listed(affected)] if affected else []), *_elsewhere(incident, case, affected=True)]),
        ),
        ("Impact", "" if single else f"{impact(incident, case)}."),
        ("Culprit", head.culprit),
        *(
            ("Note", note)
            for _, finding in _members(incident, case)
            for note in finding.notes[: None if finding is head else 2]
        ),
        *_certainties(incident, case),
        ("Do next", "" if single else do_next(incident, case)),
    ):
        if value:
            yield from page.row(label, value)
    yield from _keys(here, page)
    yield from _evidence(incident, case, page)


def _elsewhere(incident: Incident, case: Case, *, affected: bool) -> Iterator[str]:
    """Yield the requests that an incident concerns, or affects, in the other logs, engine by engine."""
    index = case.findings[incident.head][0]
    named: dict[int, dict[str, None]] = {}
    for place in incident.members:
        log, finding = case.findings[place]
        if log != index:
            suffers = finding.requests if finding.kind in DEALT_WITH else finding.suffering
            wanted = suffers if affected else [name for name in finding.requests if name not in suffers]
            named.setdefault(log, {}).update(dict.fromkeys(wanted))
    for log, requests in named.items():
        if requests:
            yield f"{words.listed(requests)} of engine {engine(case, log)}"


def do_next(incident: Incident, case: Case) -> str:
    """Return what to do about an incident, and on which engine: what stops it first, then what clears up after it."""
    return " ".join(_steps(incident, case))


def _steps(incident: Incident, case: Case) -> list[str]:
    index, head = case.findings[incident.head]
    # Commands are for a block of the incident and for the file of their own log.
    a_block = f" {head.blocks[0][0]}:{head.blocks[0][1]}" if head.blocks else " G:B"
    steps: dict[tuple[int, str], None] = {(index, head.advice.replace(" G:B", a_block)): None}
    urgent: dict[tuple[int, str], None] = {}
    for log, finding in _members(incident, case)[1:]:
        if finding.also:
            # Blocks that leak run out; whose fault it was can be seen to later.
            first = finding.kind == "leak" and head.kind in MISCOUNTED
            (urgent if first else steps).setdefault((log, finding.also))
    told = [head.other_log] if head.other_log else []
    before = -1
    steps = _together(steps)
    for log, step in (*urgent, *steps):
        named = step.replace(" FILE ", f" {words.file(case.logs[log].path)} ")
        told.append(named if log == before else f"On engine {engine(case, log)}: {named}")
        before = log
    return told


_SAME_FOR_A_JOB = re.compile(r"The same for the keys of job (\d+)\.")


def _together(steps: dict[tuple[int, str], None]) -> dict[tuple[int, str], None]:
    """Return the steps with those that say the same of one job each as one."""
    jobs: dict[int, list[str]] = {}
    for log, step in steps:
        if found := _SAME_FOR_A_JOB.fullmatch(step):
            jobs.setdefault(log, []).append(found[1])
    told = {(log, step): None for log, step in steps if not _SAME_FOR_A_JOB.fullmatch(step)}
    for log, numbers in jobs.items():
        options = " ".join(f"--job {number}" for number in numbers)
        what = f"job {numbers[0]}" if len(numbers) == 1 else f"jobs {', '.join(numbers)}"
        told[log, f"The same for the keys of {what}: add `{options}` there."] = None
    return told


def _members(incident: Incident, case: Case) -> list[tuple[int, Finding]]:
    """Return the findings of an incident, the cause first."""
    others = [place for place in incident.members if place != incident.head]
    return [case.findings[place] for place in (incident.head, *others)]


def _consequences(incident: Incident, case: Case, page: Page) -> Iterator[str]:
    """Yield the other findings of an incident, in short."""
    index, head = case.findings[incident.head]
    for place in incident.members:
        log, finding = case.findings[place]
        if place == incident.head:
            continue
        alike = (finding.kind, finding.cause) == (head.kind, head.cause)
        # What began later in the same log, with the same work, came after it; that is all that "then" claims.
        later = log == index and finding.kind != "torn_log" and finding.since_seq > (head.lead_seq or head.since_seq)
        label = "Also" if alike else "Before" if place < incident.head else "Then" if later else "Beside"
        where = f" (in {case.logs[log].path.name})" if log != index else ""
        told = finding.brief or finding.title
        yield from page.row(label, f"{finding.kind.upper()} ({finding.certainty}): {told}{where}")


def _certainties(incident: Incident, case: Case) -> Iterator[tuple[str, str]]:
    """Yield what is shown and what is concluded, of the cause and of the rest where it says so."""
    head = case.findings[incident.head][1]
    told: set[str] = set()
    for _, finding in _members(incident, case):
        if finding.kind == "torn_log" and finding is not head:
            continue  # its end is told with its log
        name = "" if finding is head else f"{finding.kind.upper()}: "
        if finding is not head and finding.kind == head.kind and finding.jobs:
            name = f"of job {words.listed(finding.jobs)}: "
        missing = "; ".join(part for part in (finding.doubt, finding.inferred) if part)
        if not missing or missing in told:
            continue
        told.add(missing)
        if finding.shown:
            yield "Proven", f"{name}{finding.shown}"
        yield "Not proven", f"{name}{missing}"


def _keys(findings: Sequence[Finding], page: Page) -> Iterator[str]:
    """Yield the keys that hold wrong KV and are still in the store, by the job that stored them."""
    for finding in findings:
        left = [each for each in finding.facts.get("tainted", ()) if not each["removed"]]
        keys = list(dict.fromkeys(each["key"] for each in left if each["certainty"] == finding.certainty))
        if not keys:
            continue
        more = f" and {len(keys) - SHOWN_KEYS} more, see --json" if len(keys) > SHOWN_KEYS else ""
        jobs = words.listed(finding.jobs)
        yield from page.row("Keys", f"of job {jobs} ({finding.certainty}): {', '.join(keys[:SHOWN_KEYS])}{more}")


def _shared(incident: Incident, case: Case) -> tuple[str, ...]:
    """Return the transfer that an incident is about in more than one log, if it is one only."""
    named = dict.fromkeys(name for _, finding in _members(incident, case) for name in finding.transfers)
    shared = tuple(name for name in named if name in case.transfers)
    return shared if len(shared) == 1 else ()


def _one_time_line(logs: dict[int, dict[int, ev.Event]], transfer: str, case: Case, page: Page) -> Iterator[str]:
    """Yield the events that show an incident and all of its transfer, of all logs, on one time axis."""
    steps = case.transfers[transfer]
    known = {(step.log, step.event.seq) for step in steps}
    left = {log: [events[seq] for seq in sorted(events) if (log, seq) not in known] for log, events in logs.items()}
    line: list[tuple[int, ev.Event, bool]] = []
    following = {log: [step.event.seq for step in steps if step.log == log] for log in left}
    for step in steps:
        for log, own in left.items():
            # What is no part of the transfer keeps its place in its own log, and is placed by the clock within that.
            while own and own[0].seq < following[log][0] if following[log] else own:
                if log != step.log and own[0].ts_ns > step.event.ts_ns:
                    break
                line.append((log, own.pop(0), False))
        line.append((step.log, step.event, step.by_clock))
        if step.log in following:
            following[step.log].pop(0)
    line += [(log, event, False) for log, events in left.items() for event in events]
    doubtful = sum(by_clock for _, _, by_clock in line)
    legend = ""
    if doubtful > MARKED:
        legend = "; only the clocks of the hosts say how the logs lie between each other"
    elif doubtful:
        legend = "; ?: only the clocks of two hosts say that it came after the line above"
    yield from page.wrap("  ", f"Evidence: transfer {transfer}, the number of the log in front{legend}", hanging=4)
    for log, event, by_clock in line[:KEPT_TIME_LINE]:
        yield from page.event(f"{'?' if by_clock and doubtful <= MARKED else ' '} {log + 1} ", event)
    if len(line) > KEPT_TIME_LINE:
        yield from page.wrap("    ", f"{words.plural(len(line) - KEPT_TIME_LINE, 'event')} left out here")


def _evidence(incident: Incident, case: Case, page: Page) -> Iterator[str]:
    logs: dict[int, dict[int, ev.Event]] = {}
    blocks: dict[tuple[int, int], set[int]] = {}
    head = case.findings[incident.head][1]
    own = set(head.requests) - set(head.suffering)
    for place in incident.members:
        index, finding = case.findings[place]
        chain = finding.chain
        if finding.kind == "torn_log" and place != incident.head:  # the last of all, and what is about this incident
            chain = tuple(event for event in chain[:-1] if getattr(event, "request", "") in own) + chain[-1:]
        logs.setdefault(index, {}).update((event.seq, event) for event in chain)
        for event in chain:
            blocks.setdefault((index, event.seq), set()).update(number for _, number in finding.blocks)
    for transfer in _shared(incident, case):
        yield from _one_time_line(logs, transfer, case, page)
        return
    unpinned = {
        (index, job)
        for index, finding in (case.findings[place] for place in incident.members)
        for job in finding.facts.get("unpinned", ())
    }
    refused = {index: {each.event.seq for each in case.logs[index].result.refusals} for index in logs}
    for index, events in logs.items():
        yield from page.wrap("  ", f"Evidence{f' in {case.logs[index].path.name}' if len(case.logs) > 1 else ''}")
        places = sorted(events)
        left_out = len(places) - KEPT_EVIDENCE
        for place in places if left_out <= 0 else places[: KEPT_EVIDENCE // 2]:
            event, note = _about(events[place], blocks[index, place])
            if isinstance(event, ev.JobRegistered) and (index, event.job) in unpinned:
                note = "; it pins no block: no pin_touched follows"
            if event.seq in refused[index]:
                note += "; the book refused this"
            yield from page.event("  ", event, note)
        if left_out > 0:
            yield from page.wrap("    ", f"{words.plural(left_out, 'event')} left out here; --json names all")
            for place in places[-KEPT_EVIDENCE // 2 :]:
                yield from page.event("  ", *_about(events[place], blocks[index, place]))


def _about(event: ev.Event, numbers: set[int]) -> tuple[ev.Event, str]:
    """Return an event with those of its blocks that an incident is about, and a note on how many more it names."""
    named: Blocks = getattr(event, "blocks", ())
    runs = [(group, min(run), max(run)) for group, each in named for run in each]
    about = [(group, block) for group, first, last in runs for block in numbers if first <= block <= last]
    left_out = count(named) - len(about)
    own_blocks = isinstance(event, ev.TransferStarted) and event.op == "get"  # of who loads, or all of its load
    if not about or not left_out or own_blocks:
        return event, ""
    return msgspec.structs.replace(event, blocks=_grouped(sorted(about))), f" (and {left_out} more)"


def transfer_section(transfer: str, steps: Sequence[Step], page: Page) -> Iterator[str]:
    """Yield both sides of a transfer on one time axis."""
    yield from page.wrap("", f"Transfer {transfer} in all logs")
    yield from page.wrap("  ", "The first number of a line is that of its log.")
    if any(step.by_clock for step in steps):
        yield from page.wrap(
            "  ", "? before a line: only the clocks of two hosts say that it came after the one above."
        )
    for step in steps:
        mark = "?" if step.by_clock else " "
        yield from page.event(f"{mark} {step.log + 1} ", step.event)


# --- what is open -----------------------------------------------------------------------------------------------------

Taken = dict[tuple[str, int | str], int]
"""The number of the incident by which somebody else got the blocks of a job, load or transfer."""


def _taken(case: Case, index: int) -> Taken:
    taken: Taken = {}
    for number, incident in enumerate(case.incidents, 1):
        for place in incident.members:
            log, finding = case.findings[place]
            if log != index or finding.kind not in (*FREED, "poison"):
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


def open_items(result: Result, taken: Taken) -> Iterator[str]:
    """Yield a line for each job, load and transfer that is open, and one for all requests."""
    book, end = result.state.book, result.end
    if end is None:
        return
    now_ns = end.now_mono_ns

    def age(opened: Job | Load | Send | Recv) -> str:
        return f"open since event {opened.since_seq}, for {words.span(max(now_ns - opened.since_mono_ns, 0))}"

    def blocks(verb: str, held: Blocks, *key: int | str) -> str:
        number = taken.get((str(key[0]), key[1]))
        if number is None:
            return f"{verb} {words.plural(count(held), 'block')}"
        named = words.plural(count(held), "block")
        return f"{verb} {named} in the book only: they were given away too early, see incident {number}"

    miscounted = [each.facts["miscounted"] for each in result.findings if "miscounted" in each.facts]
    counted = {each["report_of"]: each for each in miscounted}
    for number, job in book.jobs.items():
        given = counted.get(number)
        elsewhere = f", whose report was counted for job {given['counted_for']}" if given is not None else ""
        waits = "settled" if job.settled else "every rank has reported"
        waits = (
            f"waits for {words.ranks(job.waiting)}{elsewhere}"
            if job.waiting
            else f"{waits}, and its blocks were not freed"
        )
        kept = ", quarantined" if job.quarantined else ""
        yield (
            f"store job {number} of {words.request(job.request, job.generation)}: {age(job)}; {waits}; "
            f"{blocks('pins', job.blocks, 'job', number)}{kept}"
        )
    for number, load in book.loads.items():
        waits = f"waits for {words.ranks(load.waiting)}" if load.waiting else "not given to the workers yet"
        yield (
            f"load {number} of {words.request(load.request, load.generation)}: {age(load)}; {waits}; "
            f"{blocks('writes', load.blocks, 'load', number)}"
        )
    for request, send in book.sends.items():
        waits = f"waits for {words.ranks(send.waiting)}" if send.waiting else "every rank has reported"
        yield (
            f"send {send.transfer} of request {request}: {send.phase}, {age(send)}; {waits}; "
            f"{blocks('holds', send.blocks, 'transfer', send.transfer)}"
        )
    for request, recv in book.recvs.items():
        missing = recv.missing_ranks()
        waits = f"waits for {words.ranks(missing)}" if missing else "every peer has settled"
        yield (
            f"recv {recv.transfer} of request {request}: {age(recv)}; {waits}; "
            f"{blocks('holds', recv.blocks, 'transfer', recv.transfer)}"
        )
    states = Counter(record.state for record in book.requests.values())
    if states:
        yield "requests: " + ", ".join(f"{number} {state}" for state, number in states.items())


# --- the run in numbers -----------------------------------------------------------------------------------------------


def story_section(result: Result, name: str, page: Page) -> Iterator[str]:
    """Yield the run in numbers."""
    story = result.story
    lost = lost_events([result])
    yield from page.wrap("", f"Story in numbers{name}{', each of them at least' if lost else ''}")
    if lost:
        yield from page.row("Lost", f"{lost}, which are not in these numbers")
    reasons = ", ".join(
        f"{END_REASONS.get(reason, reason or 'no reason')}{f' {number:,}' if len(story.end_reasons) > 1 else ''}"
        for reason, number in story.end_reasons.items()
    )
    yield from page.row(
        "Requests",
        f"{story.requests:,} queued, {story.finished:,} finished{f' ({reasons})' if reasons else ''}, "
        f"{story.aborted:,} aborted, "
        f"{words.plural(story.preemptions, 'preemption')}",
    )
    if story.jobs or story.jobs_skipped:
        yield from page.row(
            "Store jobs",
            f"{story.jobs:,} registered, {story.jobs_settled:,} settled ({story.jobs_failed:,} with a failed rank), "
            f"{story.jobs_skipped:,} skipped; at most {words.plural(story.most_pinned_blocks, 'block')} pinned at a "
            "time"
            f"{_times('; held until they were freed for', story.job_held)}",
        )
    if story.loads:
        yield from page.row(
            "Loads",
            f"{story.loads:,} planned, {story.loads_settled:,} settled ({story.loads_failed:,} failed), "
            f"{words.plural(story.tokens_loaded, 'token')} loaded{_times('; waited', story.load_waited)}",
        )
    opened = _open_calls(result)
    for op in dict.fromkeys((*story.calls, *opened)):
        label = f"{op.capitalize()}{'es' if op == 'push' else 's'}"
        yield from page.row(label, _calls(story.calls.get(op, Calls()), opened.get(op, 0)))
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
        yield from page.row("P/D", ", ".join(transfers))
    if story.failures:
        most = sorted(story.failures.items(), key=lambda item: -item[1])[:5]
        yield from page.row("Failures", ", ".join(f"{code} on rank {rank}: {number}" for (code, rank), number in most))
    slowest = [
        (slow, op) for op, calls in story.calls.items() for slow in calls.slowest if _stands_out(slow, calls.durations)
    ]
    if slowest:
        yield "  Slowest transfers"
        for slow, op in sorted(slowest, reverse=True)[:5]:
            yield from page.wrap("    ", _slow(slow, op), hanging=6)
    slow_loads = [slow for slow in story.slowest_loads if _stands_out(slow, story.load_waited)]
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


# --- helpers ----------------------------------------------------------------------------------------------------------


def lost_events(results: Sequence[Result]) -> str:
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
    longest = words.span(durations.longest_ns)
    if words.span(durations.shortest_ns) == longest:
        return f"{label} {longest}{' each' if durations.number > 1 else ''}"
    if durations.number == 2:
        return f"{label} {words.span(durations.shortest_ns)} and {longest}"
    return f"{label} {words.span(durations.percentile_ns(50))} at the median, {longest} at most"


def _stands_out(slow: Slow, durations: Durations) -> bool:
    """Return whether one of the slowest tells more than the median and the longest beside it."""
    return durations.number >= 3 and slow.duration_ns > 1.2 * durations.percentile_ns(50)


def _open_calls(result: Result) -> Counter[str]:
    """Return how many calls have not returned, by sort, as far as the work that they are for is open."""
    trail = result.trail
    counted: Counter[str] = Counter()
    for chains in (trail.jobs, trail.loads, trail.sends, trail.recvs):
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
    more = f"; {opened:,}{' more' if calls.calls else ''} without a return in this log" if opened else ""
    return f"{words.plural(calls.calls, 'call')}{asked}{moved}{failed}{_times('; took', calls.durations)}{more}"


def _slow(slow: Slow, op: str) -> str:
    work = f"job {slow.job}" if slow.job >= 0 else f"load {slow.load}" if slow.load >= 0 else f"request {slow.request}"
    size = f", {words.size(slow.bytes)}" if slow.bytes else ""
    failed = slow.outcome not in ("", "ok")
    how = f", {slow.outcome}{f'{size} asked for' if size else ''}" if failed else size
    return f"{words.span(slow.duration_ns)}: {words.call(op, slow.what, slow.rank)} for {work}{how}, event {slow.seq}"


def _grouped(blocks: Sequence[tuple[int, int]]) -> Blocks:
    groups: dict[int, list[int]] = {}
    for group, block in blocks:
        groups.setdefault(group, []).append(block)
    return by_group(groups.items())
