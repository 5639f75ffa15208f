"""What a replay says, for a person: plain text, as wide as the reader has room.

The text needs no colour and no lines drawn, so that it reads the same on a terminal, in a ticket, through a pipe and
aloud. Its first lines alone say what happened and what to do, because somebody was just woken up; then comes what the
logs are, and then each incident with the events that show it. Pure: from results to text; this file prints nothing.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator

from ledger import words
from ledger.replay.case import Case
from ledger.replay.incidents import CERTAINTIES, Incident, gravest
from ledger.report.impact import engine, impact
from ledger.report.incidents import do_next, incident_section, members, shared, steps_of, transfer_section
from ledger.report.layout import WIDTH, Page
from ledger.report.logs import (
    check_section,
    interest_section,
    log_section,
    lost_events,
    open_section,
    story_section,
    taken_blocks,
)
from ledger.report.wording import say
from ledger.verdicts.base import Role

SUMMARY_CHARS = 160
"""What the first lines say of one incident, at most: two lines of a terminal."""


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
    shown_transfers = {transfer for incident in case.incidents for transfer in shared(incident, case)}
    for transfer, steps in case.transfers.items():
        if transfer not in shown_transfers:
            yield ""
            yield from transfer_section(transfer, steps, page)
    for index, log in enumerate(case.logs):
        name = f" of {log.path.name}" if len(case.logs) > 1 else ""
        if case.interest:
            yield ""
            yield from interest_section(log, name, page)
        else:
            yield ""
            yield from open_section(log.result, name, page, taken_blocks(case, index))
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
    ends = [each for _, each in members(first, case) if each.is_a(Role.ENDS_LOG) and each is not finding]
    torn = [brief for each in ends if (brief := say(each).brief)]
    also = f". Also, {torn[0]}" if torn else ""
    which = f"incident {incidents.index(first) + 1}" if len(incidents) > 1 else ""
    about = ", ".join(part for part in (which, finding.certainty if finding.certainty != "proven" else "") if part)
    sure = f" ({about})" if about else ""
    where = f" on engine {engine(case, case.findings[first.head][0])}" if len(case.logs) > 1 else ""
    what = _short(say(finding).short)
    yield from page.wrap("", f"What happened{where}{sure}: {what}{also}.", hanging=2)
    yield from page.wrap("", f"Impact: {impact(first, case)}.", hanging=2)
    # The only incident is shown once, so what to do about it stands here in full.
    steps = do_next(first, case) if len(incidents) == 1 else _short(_first_steps(first, case))
    yield from page.wrap("", f"Do next: {steps}", hanging=2)
    others = [f"{number} {_kind(case, each)}" for number, each in enumerate(incidents, 1) if each is not first]
    if others:
        yield from page.wrap("", f"Other incidents: {words.listed(others, 8)}.", hanging=2)


def _kind(case: Case, incident: Incident) -> str:
    finding = case.findings[incident.head][1]
    return f"{finding.kind} ({finding.certainty})"


def headline(case: Case) -> str:
    """Return the first line: why the files cannot be believed as they are, if so, and how much was found."""
    reasons = doubts(case)
    return " ".join([*(f"{reason}." for reason in reasons), _found(case, "Nothing else" if reasons else "Nothing")])


def doubts(case: Case) -> list[str]:
    """Return why the files cannot be believed as they are: they were changed, or today's code reads them otherwise."""
    reasons: list[str] = []
    for log in case.logs:
        name = log.path.name if len(case.logs) > 1 else "this file"
        if log.broken_seal:
            who = name if len(case.logs) > 1 else "This file"
            reasons.append(f"{who} was changed after it was sealed: {log.broken_seal}")
        if log.result.mismatch is not None:
            reasons.append(f"Today's code and {name} disagree at event {log.result.mismatch.seq}")
    return reasons


def _found(case: Case, nothing: str) -> str:
    """Return how much was found, the most certain first."""
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
        return f"{nothing} wrong was found{about}{f' in what is left; lost: {lost}' if lost else ''}."
    counted = Counter((finding.kind, finding.certainty) for _, finding in case.findings)
    kinds = sorted(counted.items(), key=lambda item: CERTAINTIES.index(item[0][1]))
    kinds_found = ", ".join(
        f"{f'{number} ' if number > 1 else ''}{kind} ({certain})" for (kind, certain), number in kinds
    )
    findings = words.plural(len(case.findings), "finding")
    incidents = f" in {words.plural(len(case.incidents), 'incident')}" if len(case.findings) > 1 else ""
    return f"{findings}{incidents}{about}: {kinds_found}"


def _short(sentence: str) -> str:
    return textwrap.shorten(words.shown(sentence), SUMMARY_CHARS, placeholder=" ...")


def _first_steps(incident: Incident, case: Case) -> str:
    """Return the first sentence of the advice, and further ones about what came of it as far as there is room."""
    first, *others = steps_of(incident, case)
    steps = re.split(r"(?<=[.?]) (?=[A-Z`])", first, maxsplit=1)[0]
    for step in others:
        if len(steps) + len(step) < SUMMARY_CHARS:
            steps = f"{steps} {step}"
    return steps


def _interest(case: Case) -> str:
    interest = case.interest
    parts = [
        f"request {interest.request}" if interest.request is not None else "",
        f"job {interest.job}" if interest.job is not None else "",
        f"block {interest.block[0]}:{interest.block[1]}" if interest.block is not None else "",
    ]
    named = " and ".join(part for part in parts if part)
    return f" about {named}" if named else ""
