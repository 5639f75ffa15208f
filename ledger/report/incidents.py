"""The part of a report about incidents: cause, consequences, what to do, and the events that show it.

Pure: from results to lines; this file prints nothing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from ledger import events as ev
from ledger import words
from ledger.blocks import Blocks, count, of_pairs, to_ranges
from ledger.replay.case import Case
from ledger.replay.incidents import Incident
from ledger.replay.join import TimelineStep
from ledger.report.impact import engine, impact
from ledger.report.layout import Page
from ledger.report.wording import SameForJob, say
from ledger.verdicts.base import Finding, Role

KEPT_EVIDENCE = 30
"""Events that are shown for one incident and one log; a longer proof is read from the data."""

KEPT_TIME_LINE = 60
"""Events of one time line of several logs that are shown."""

MARKED = 2
"""Lines that are marked one by one as placed by clocks; where there are more, one sentence says it of all."""

SHOWN_KEYS = 8

SHOWN_JOBS = 20
"""Jobs that are written out as options of a command, and runs of jobs that are named where there are more."""

SHOWN_ALIKE = 8
"""Findings of one kind and certainty beside the cause that are shown one by one; the others are counted."""


# --- incidents --------------------------------------------------------------------------------------------------------


def incident_section(number: int, incident: Incident, case: Case, page: Page) -> Iterator[str]:
    """Yield one incident in full: its cause, what came of it, what to do, and the events that show it."""
    index, head = case.findings[incident.head]
    said = say(head)
    several = len(case.logs) > 1
    # What stands in another log has its ids in that log, so it stands in its own line and not in the lists.
    here = [finding for log, finding in members(incident, case) if log == index]
    since = next((event.ts_ns for event in head.chain if event.seq == head.since_seq), None)
    suffering = dict.fromkeys(name for finding in here for name in finding.suffering)
    own = dict.fromkeys(name for finding in here for name in finding.requests if name not in finding.suffering)
    blocks = sorted({block for finding in here for block in finding.blocks})
    yield from page.wrap(f"{number}. ", f"{head.kind.upper()} ({head.certainty}): {said.title}")
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
        words.these_blocks(of_pairs(blocks), 8) if blocks else "",
        f"code {head.code}" if head.code and head.code not in said.title else "",
    ]
    affected = [name for name in suffering if name not in own]
    single = len(case.incidents) == 1
    shown = [case.findings[place][1] for place in _shown(incident, case)]
    for label, value in (
        ("Concerns", "; ".join(part for part in concerned if part)),
        (
            "Affected",
            "; ".join([*([words.listed(affected)] if affected else []), *_elsewhere(incident, case, affected=True)]),
        ),
        ("Impact", "" if single else f"{impact(incident, case)}."),
        ("Culprit", said.culprit),
        *(("Note", note) for finding in shown for note in say(finding).notes[: None if finding is head else 2]),
        *_certainties(incident, case),
        ("Do next", "" if single else do_next(incident, case)),
    ):
        if value:
            yield from page.row(label, value)
    yield from _keys(
        [case.findings[place][1] for place in _shown(incident, case) if case.findings[place][0] == index], page
    )
    yield from _evidence(incident, case, page)


def _elsewhere(incident: Incident, case: Case, *, affected: bool) -> Iterator[str]:
    """Yield the requests that an incident concerns, or affects, in the other logs, engine by engine."""
    index = case.findings[incident.head][0]
    named: dict[int, dict[str, None]] = {}
    for place in incident.members:
        log, finding = case.findings[place]
        if log != index:
            suffers = finding.requests if finding.is_a(Role.RECURS) else finding.suffering
            wanted = suffers if affected else [name for name in finding.requests if name not in suffers]
            named.setdefault(log, {}).update(dict.fromkeys(wanted))
    for log, requests in named.items():
        if requests:
            yield f"{words.listed(requests)} of engine {engine(case, log)}"


def do_next(incident: Incident, case: Case) -> str:
    """Return what to do about an incident, and on which engine: what stops it first, then what clears up after it."""
    return " ".join(steps_of(incident, case))


def steps_of(incident: Incident, case: Case) -> list[str]:
    """Return what to do about an incident, step by step."""
    index, head = case.findings[incident.head]
    # Commands are for a block of the incident and for the file of their own log.
    a_block = f" {head.blocks[0][0]}:{head.blocks[0][1]}" if head.blocks else " G:B"
    said = say(head)
    steps: dict[tuple[int, str], None] = {(index, said.advice.replace(" G:B", a_block)): None}
    urgent: dict[tuple[int, str], None] = {}
    same: dict[int, dict[int, None]] = {}
    for log, finding in members(incident, case)[1:]:
        step = say(finding).also
        if isinstance(step, SameForJob):
            same.setdefault(log, {})[step.job] = None
        elif step:
            # Blocks that leak run out; whose fault it was can be seen to later.
            first = finding.is_a(Role.SYMPTOM) and head.is_a(Role.MISCOUNTS)
            (urgent if first else steps).setdefault((log, step))
    steps.update(((log, _same_for_jobs(list(jobs))), None) for log, jobs in same.items())
    lines = [said.other_log] if said.other_log else []
    before = -1
    for log, step in (*urgent, *steps):
        named = step.replace(" FILE ", f" {words.file(case.logs[log].path)} ")
        lines.append(named if log == before else f"On engine {engine(case, log)}: {named}")
        before = log
    return lines


def _same_for_jobs(jobs: list[int]) -> str:
    """Return the step that is the same for the keys of further jobs."""
    options = " ".join(f"--job {number}" for number in jobs[:SHOWN_JOBS])
    if len(jobs) > SHOWN_JOBS:
        which = words.ranges(to_ranges(sorted(jobs)), SHOWN_JOBS)
        what, add = f"the {len(jobs):,} jobs {which}", f"add `{options}` and so on there, a --job for each."
    else:
        what = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {', '.join(map(str, jobs))}"
        add = f"add `{options}` there."
    return f"The same for the keys of {what}: {add}"


def members(incident: Incident, case: Case) -> list[tuple[int, Finding]]:
    """Return the findings of an incident, the cause first."""
    others = [place for place in incident.members if place != incident.head]
    return [case.findings[place] for place in (incident.head, *others)]


def _consequences(incident: Incident, case: Case, page: Page) -> Iterator[str]:
    """Yield the other findings of an incident, in short."""
    index, head = case.findings[incident.head]
    shown = _shown(incident, case)
    for place in sorted(shown):
        log, finding = case.findings[place]
        if place == incident.head:
            continue
        alike = (finding.kind, finding.cause) == (head.kind, head.cause)
        # What began later in the same log, with the same work, came after it; that is all that "led to" claims.
        later = (
            log == index and not finding.is_a(Role.ENDS_LOG) and finding.since_seq > (head.lead_seq or head.since_seq)
        )
        label = "Preceded by" if place < incident.head and not alike else "Led to" if later and not alike else "Also"
        where = f" (in {case.logs[log].path.name})" if log != index else ""
        yield from page.row(label, f"{finding.kind.upper()} ({finding.certainty}): {say(finding).short}{where}")
    left = Counter(_sort(case.findings[place][1]) for place in set(incident.members).difference(shown))
    if left:
        sorts = ", ".join(f"{number:,} {kind} ({certainty})" for (kind, certainty), number in left.items())
        yield from page.row("Also", f"{sorts}, which are not shown one by one here; --json names all")


def _shown(incident: Incident, case: Case) -> list[int]:
    """Return the places of the findings that are shown one by one, the cause first."""
    counted: Counter[tuple[str, str]] = Counter()
    shown = [incident.head]
    for place in incident.members:
        finding = case.findings[place][1]
        if place != incident.head and (counted[_sort(finding)] < SHOWN_ALIKE or finding.overflow):
            counted[_sort(finding)] += 1
            shown.append(place)
    return shown


def _sort(finding: Finding) -> tuple[str, str]:
    return finding.kind, finding.certainty


def _certainties(incident: Incident, case: Case) -> Iterator[tuple[str, str]]:
    """Yield what is shown and what is concluded, of the cause and of the rest where it says so."""
    head = case.findings[incident.head][1]
    named: set[str] = set()
    for place in _shown(incident, case):
        finding = case.findings[place][1]
        if finding.is_a(Role.ENDS_LOG) and finding is not head:
            continue  # its end is shown with its log
        name = "" if finding is head else f"{finding.kind.upper()}: "
        if finding is not head and finding.kind == head.kind and finding.jobs:
            name = f"of job {words.listed(finding.jobs)}: "
        said = say(finding)
        missing = said.not_proven
        if not missing or missing in named:
            continue
        named.add(missing)
        if said.shown:
            yield "Proven", f"{name}{said.shown}"
        yield "Not proven", f"{name}{missing}"


def _keys(findings: Sequence[Finding], page: Page) -> Iterator[str]:
    """Yield the keys that hold wrong KV and are still in the store, by the job that stored them."""
    for finding in findings:
        left = [each for each in finding.tainted if not each.removed]
        keys = list(dict.fromkeys(each.key for each in left if each.certainty == finding.certainty))
        if not keys:
            continue
        more = f" and {len(keys) - SHOWN_KEYS} more, see --json" if len(keys) > SHOWN_KEYS else ""
        jobs = words.listed(finding.jobs)
        yield from page.row("Keys", f"of job {jobs} ({finding.certainty}): {', '.join(keys[:SHOWN_KEYS])}{more}")


def shared(incident: Incident, case: Case) -> tuple[str, ...]:
    """Return the transfer that an incident is about in more than one log, if it is one only."""
    named = dict.fromkeys(name for _, finding in members(incident, case) for name in finding.transfers)
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
        if finding.is_a(Role.ENDS_LOG) and place != incident.head:  # the last of all, and what is about this incident
            chain = tuple(event for event in chain[:-1] if getattr(event, "request", "") in own) + chain[-1:]
        logs.setdefault(index, {}).update((event.seq, event) for event in chain)
        for event in chain:
            blocks.setdefault((index, event.seq), set()).update(number for _, number in finding.blocks)
    for transfer in shared(incident, case):
        yield from _one_time_line(logs, transfer, case, page)
        return
    unpinned = {
        (index, job)
        for index, finding in (case.findings[place] for place in incident.members)
        for job in finding.unpinned_jobs
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
                note += "; the state refused this"
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
    return msgspec.structs.replace(event, blocks=of_pairs(sorted(about))), f" (and {left_out} more)"


def transfer_section(transfer: str, steps: Sequence[TimelineStep], page: Page) -> Iterator[str]:
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
