"""What an incident means for those who use the engine: whose answers, whose time, which blocks, and whether it goes on.

The findings say what became of requests; what is held is read from the books as they are at the end of the logs. Pure:
from results to text. This file knows the case, and prints nothing.
"""

from collections.abc import Iterator

from ledger.blocks import numbers
from ledger.replay.case import Case
from ledger.replay.incidents import Incident
from ledger.report.wording import Answers, Clause, answers, say
from ledger.state.open_work import open_work
from ledger.verdicts.base import Role


def impact(incident: Incident, case: Case) -> str:
    """Return who suffers from an incident and how, and whether it was over when the logs ended."""
    clauses: list[tuple[Clause, str]] = []
    for place in (incident.head, *(place for place in incident.members if place != incident.head)):
        index, finding = case.findings[place]
        where = f" (engine {engine(case, index)})" if index != case.findings[incident.head][0] else ""
        clauses += [(clause, where) for clause in say(finding).impact]
    held = list(_held(incident, case))
    parts = dict.fromkeys([*_together(clauses), *_stored(incident, case)])
    if not parts:
        parts["no request is seen to suffer"] = None
    if held:
        parts.update(dict.fromkeys(held))
    elif _is_over(incident, case):
        parts["it is over: nothing is left open at the end"] = None
    return "; ".join(parts)


def _together(clauses: list[tuple[Clause, str]]) -> Iterator[str]:
    """Yield clauses in words, those that say the same of other requests as one, where the first of them stood."""
    alike: dict[tuple[str, bool, str], dict[str, None]] = {}
    for clause, where in clauses:
        if isinstance(clause, Answers):
            alike.setdefault((clause.how, clause.proven, where), {}).update(dict.fromkeys(clause.requests))
    for clause, where in clauses:
        if not isinstance(clause, Answers):
            yield f"{clause}{where}"
        elif requests := alike.pop((clause.how, clause.proven, where), None):
            yield f"{answers(Answers(tuple(requests), clause.how, clause.proven))}{where}"


def engine(case: Case, index: int) -> str:
    """Return the name of the engine that wrote a log, or of the file if the log does not say.

    Where logs of several boots of one engine are replayed together, the boot is part of it.
    """
    names = [log.result.opened.engine if log.result.opened is not None else log.path.name for log in case.logs]
    opened = case.logs[index].result.opened
    boot = f", boot {opened.boot}" if opened is not None and names.count(names[index]) > 1 else ""
    return f"{names[index]}{boot}"


def _held(incident: Incident, case: Case) -> Iterator[str]:
    """Yield how many blocks its jobs, loads and transfers hold, for each engine."""
    for index, log in enumerate(case.logs):
        end = log.result.end
        blocks = _blocks(incident, case, index)
        if end is None or not blocks:
            continue
        opened = log.result.opened
        pool = f" of {opened.num_blocks - 1:,}" if opened is not None and opened.num_blocks else ""
        where = f" of engine {engine(case, index)}" if len(case.logs) > 1 else ""
        one = len(blocks) == 1 and not pool
        when = {
            "closed": f"{'was' if one else 'were'} still held when the engine shut down",
            "torn": f"{'was' if one else 'were'} held when the log ends",
            "live": f"{'is' if one else 'are'} held now",
        }.get(end.how, f"{'was' if one else 'were'} held then")
        yield f"{len(blocks):,}{pool} block{'' if one else 's'}{where} {when}"


def _blocks(incident: Incident, case: Case, index: int) -> set[int]:
    """Return the blocks of a log that the incident's open work holds, but for those that were given away."""
    book = case.logs[index].result.state.book
    own = [case.findings[place][1] for place in incident.members if case.findings[place][0] == index]
    lost = [finding for finding in own if finding.is_a(Role.FREES_EARLY | Role.TAINTS)]
    jobs = {job for each in own for job in each.jobs} - {job for each in lost for job in each.jobs}
    loads = {load for each in own for load in each.loads} - {load for each in lost for load in each.loads}
    moved = {name for each in own for name in each.transfers} - {name for each in lost for name in each.transfers}
    named = {"job": jobs, "load": loads, "send": moved, "recv": moved}
    found = [work.blocks for work in open_work(book) if work.id in named[work.kind]]
    return {block for blocks in found for block in numbers(blocks)}


def _stored(incident: Incident, case: Case) -> Iterator[str]:
    """Yield that what was stored is sound, where a report was counted for the wrong job and no block changed hands."""
    for index in {case.findings[place][0] for place in incident.members}:
        found = [finding for log, finding in case.findings if log == index]
        own = [case.findings[place][1] for place in incident.members if case.findings[place][0] == index]
        miscounted = any(each.is_a(Role.MISCOUNTS) and not each.is_a(Role.FREES_EARLY) for each in own)
        moved = any(each.is_a(Role.TAINTS | Role.FREES_EARLY) for each in found)
        history = case.logs[index].result.history
        if not miscounted or moved or history.gaps or not history.evidence_is_on():
            continue
        yield "no block changed its owner under a put: what was stored is sound, as far as this log goes"


def _is_over(incident: Incident, case: Case) -> bool:
    found = [case.findings[place] for place in incident.members]
    if any(finding.is_a(Role.RECURS | Role.WRONG_KV | Role.HANGS) or finding.tainted for _, finding in found):
        return False
    ends = [case.logs[index].result.end for index, _ in found]
    return all(end is not None and end.how == "closed" for end in ends)
