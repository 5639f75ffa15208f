"""Which findings are parts of one incident, and in which order they are shown.

A failure that is not dealt with shows in several ways: the report that went to the wrong job, the blocks that stay held
for it, the end of the log. Each is a finding, and together they are one thing to look at. They belong together when
they are about the same job, load or transfer, or when the request that both name is all that the log has to tell them
apart. What merely waits behind an incident is not a part of it.

Pure: findings in, incidents out. This file knows findings and nothing else.
"""

from collections.abc import Hashable, Iterator, Sequence

import msgspec

from ledger.verdicts.base import Finding, Miscounted, Role

CERTAINTIES = ("proven", "suspected", "undecidable")
"""The most certain first."""

Found = Sequence[tuple[int, Finding]]
"""Findings of one case in the order of the report, each with the index of its log."""


class Incident(msgspec.Struct, frozen=True):
    """Findings that are one story.

    Attributes:
        members: the places of its findings in the list that was given, in that order.
        head: the one of them that says the cause.
    """

    members: tuple[int, ...]
    head: int

    @property
    def before(self) -> tuple[int, ...]:
        """The members that came before the cause and set it off."""
        return tuple(member for member in self.members if member < self.head)

    @property
    def after(self) -> tuple[int, ...]:
        """The members that came of it."""
        return tuple(member for member in self.members if member > self.head)


def earliest_cause_first(findings: list[Finding]) -> list[Finding]:
    """Return the findings of one log in the order of a report: by the first event that was not as it should be.

    A leak or a stall comes after what led to it, and a torn end after everything: it says why a log stops, and never
    why something before it went wrong.
    """
    causes = [finding for finding in findings if finding.is_a(Role.CAUSE)]

    def place(finding: Finding) -> tuple[bool, int, bool, int]:
        lead_seq = finding.lead_seq or finding.since_seq
        symptom = finding.is_a(Role.SYMPTOM)
        if symptom:
            leads = [each.lead_seq for each in causes if _same_work(each, finding)]
            lead_seq = max(lead_seq, min(leads, default=0))
        return finding.is_a(Role.ENDS_LOG), lead_seq, symptom, finding.since_seq

    return sorted(in_agreement(findings), key=place)


def in_agreement(findings: list[Finding]) -> list[Finding]:
    """Return the findings of one log, none of which speaks against another.

    To a job whose report was counted for another one, and to that other one, the book looks otherwise than what is
    known of the report: the one has none, and the other has settled.
    """
    counted: dict[int, Miscounted] = {}
    for finding in findings:
        if finding.miscounted is not None:
            counted.setdefault(finding.miscounted.report_of, finding.miscounted)
            counted.setdefault(finding.miscounted.counted_for, finding.miscounted)
    return [
        msgspec.structs.replace(finding, miscounted=counted[finding.jobs[0]])
        if finding.is_a(Role.SYMPTOM)
        and not finding.is_a(Role.HANGS)
        and len(finding.jobs) == 1
        and finding.jobs[0] in counted
        else finding
        for finding in findings
    ]


def grouped(found: Found) -> list[Incident]:
    """Return the incidents that the findings are, earliest cause first. Each finding is in exactly one of them."""
    groups = _Groups(len(found))
    holders: dict[Hashable, int] = {}
    for place, (log, finding) in enumerate(found):
        for subject in _subjects(log, finding):
            groups.unite(holders.setdefault(subject, place), place)
    for cause, effect in _led_to(found):
        groups.unite(cause, effect)
    for place, (_, finding) in enumerate(found):
        if finding.is_a(Role.ENDS_LOG):
            partner = _ended_in(place, found)
            if partner is not None:
                groups.unite(partner, place)
    return [Incident(members, _head(members, found)) for members in groups.members()]


def gravest(incidents: Sequence[Incident], found: Found) -> Incident:
    """Return the incident to show first of all: wrong KV that is proven, else what the engine has not dealt with."""

    def gravity(incident: Incident) -> int:
        members = [found[member][1] for member in incident.members]
        if any(finding.is_a(Role.WRONG_KV) and finding.certainty == "proven" for finding in members):
            return 0
        return 1 if any(finding.is_a(Role.CAUSE | Role.SYMPTOM) for finding in members) else 2

    return min(incidents, key=gravity)


def _same_work(one: Finding, other: Finding) -> bool:
    if one.jobs and other.jobs:
        return not set(one.jobs).isdisjoint(other.jobs)
    return _share_a_request(one, other)


def _own_requests(finding: Finding) -> list[str]:
    return [name for name in finding.requests if name not in finding.suffering]


def _subjects(log: int, finding: Finding) -> Iterator[Hashable]:
    """Yield what a finding is about. Two that share one of these are parts of one incident."""
    for job in finding.jobs:
        yield "job", log, job
    for other, job in finding.elsewhere:
        yield "job", other, job
    for load in finding.loads:
        yield "load", log, load
    for transfer in finding.transfers:
        yield "transfer", transfer
    if finding.cause:
        yield "cause", log, finding.kind, finding.cause


def _led_to(found: Found) -> Iterator[tuple[int, int]]:
    """Yield the places of a cause and of what came of it, where they share no job, load or transfer."""
    causes = [(place, log, each) for place, (log, each) in enumerate(found) if each.is_a(Role.CAUSE)]
    freed = [(at, log, each.lead_seq, _numbers(each)) for at, log, each in causes if each.is_a(Role.FREES_EARLY)]
    for place, (log, finding) in enumerate(found):
        if finding.is_a(Role.TAINTS):  # there may be thousands, and few of the others
            blocks, seq = _numbers(finding), finding.lead_seq
            led = (at for at, in_log, since, given in freed if in_log == log and since <= seq and given & blocks)
        elif finding.is_a(Role.SYMPTOM):
            led = (at for at, in_log, cause in causes if in_log == log and _left_waiting(cause, finding, at < place))
        elif finding.is_a(Role.ENDS_LOG) or finding.jobs or finding.loads or finding.transfers:
            continue
        else:
            led = (at for at, in_log, cause in causes if in_log == log and _share_a_request(cause, finding))
        yield from ((at, place) for at in led if at != place)


def _left_waiting(cause: Finding, symptom: Finding, is_earlier: bool) -> bool:
    if is_earlier and _same_work(cause, symptom):
        return True
    same_ranks = not set(cause.ranks).isdisjoint(symptom.ranks)
    return cause.is_a(Role.MISCOUNTS) and same_ranks and _share_a_request(cause, symptom)


def _share_a_request(one: Finding, other: Finding) -> bool:
    return not set(_own_requests(one)).isdisjoint(_own_requests(other))


def _numbers(finding: Finding) -> frozenset[int]:
    """Return the numbers of the blocks of a finding: there is one pool for all groups."""
    return frozenset(block for _, block in finding.blocks)


def _ended_in(torn: int, found: Found) -> int | None:
    """Return the place of the finding whose story the torn end of a log belongs to, or None if it stands alone.

    That is the last one about a request that the events just before the end name, else the first that lasted until
    the end.
    """
    log, end = found[torn]
    others = [(place, each) for place, (in_log, each) in enumerate(found) if in_log == log and place != torn]
    near = [place for place, each in others if not set(end.requests).isdisjoint(_own_requests(each))]
    lasted = [place for place, each in others if each.is_a(Role.LASTS)]
    return near[-1] if near else lasted[0] if lasted else None


def _head(members: Sequence[int], found: Found) -> int:
    """Return the member that says the cause: the first, or what the engine made of it; the most certain of alike."""
    head = members[0]
    if found[head][1].is_a(Role.REPORTED | Role.SYMPTOM):
        ends = any(found[member][1].is_a(Role.ENDS_LOG) for member in members)
        leads = Role.CAUSE | Role.ENDS_ENGINE if ends else Role.CAUSE  # a late result may end an engine
        head = next((member for member in members if found[member][1].is_a(leads)), head)
    kind, cause = found[head][1].kind, found[head][1].cause
    alike = [member for member in members if (found[member][1].kind, found[member][1].cause) == (kind, cause)]
    return min(alike, key=lambda member: CERTAINTIES.index(found[member][1].certainty))


class _Groups:
    """Places that are united into groups."""

    def __init__(self, number: int) -> None:
        self._first = list(range(number))

    def unite(self, one: int, other: int) -> None:
        """Put the groups of both together; the group is known by its first place."""
        first, second = sorted((self._find(one), self._find(other)))
        self._first[second] = first

    def members(self) -> list[tuple[int, ...]]:
        """Return the groups, each in order, by their first place."""
        groups: dict[int, list[int]] = {}
        for place in range(len(self._first)):
            groups.setdefault(self._find(place), []).append(place)
        return [tuple(groups[first]) for first in sorted(groups)]

    def _find(self, place: int) -> int:
        first = self._first
        while first[place] != place:
            first[place] = first[first[place]]
            place = first[place]
        return place
