"""Which findings are parts of one incident, and in which order they are told.

A failure that is not dealt with shows in several ways: the report that went to the wrong job, the blocks that stay held
for it, the end of the log. Each is a finding, and together they are one thing to look at. They belong together when
they are about the same job, load or transfer, or when the log has nothing else to tell them apart by than the request
that both name. What merely waits behind an incident is not a part of it.

Pure: findings in, incidents out. This file knows findings and nothing else.
"""

from collections.abc import Hashable, Iterator, Sequence

import msgspec

from ledger.verdicts.base import Finding

SYMPTOMS = ("leak", "stall")
"""Kinds that are what something else leads to."""

CAUSES = (
    "broken_rule",
    "double_free",
    "early_free",
    "missing_ranks",
    "over_report",
    "poison",
    "stale_completion",
    "unreported_failure",
)
"""Kinds that lead to a leak or a stall of the same job or request: its work had begun, and went wrong by this."""

REPORTED = ("evicted_before_load", "load_failed", "lost_store")
"""Kinds that the engine was told of and deals with. What it then does wrong is the cause, and not what set it off."""

FREED = ("double_free", "early_free")
"""Kinds by which blocks come to a new owner too early: poison of those blocks afterwards follows from it."""

MISCOUNTED = ("double_free", "early_free", "over_report", "stale_completion")
"""Kinds by which an answer was counted for other work than its own, which then is left to wait."""

WRONG_KV = ("double_free", "early_free", "poison", "unreported_failure")
"""Kinds after which a request may have been served KV that is not its own."""

OPEN = ("leak", "missing_ranks", "stall")
"""Kinds that last until the log ends, so that a torn end is a part of their story."""

CERTAINTIES = ("proven", "suspected", "undecidable")
"""The most certain first."""

Found = Sequence[tuple[int, Finding]]
"""Findings of one case in the order of the report, each with the index of its log."""


class Incident(msgspec.Struct, frozen=True):
    """Findings that are one story.

    Attributes:
        members: the places of its findings in the list that was given, in that order.
        head: the one of them that tells the cause.
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
    causes = [finding for finding in findings if finding.kind in CAUSES]

    def place(finding: Finding) -> tuple[bool, int, bool, int]:
        lead_seq = finding.lead_seq or finding.since_seq
        symptom = finding.kind in SYMPTOMS
        if symptom:
            leads = [each.lead_seq for each in causes if _same_work(each, finding)]
            lead_seq = max(lead_seq, min(leads, default=0))
        return finding.kind == "torn_log", lead_seq, symptom, finding.since_seq

    return sorted(in_agreement(findings), key=place)


def in_agreement(findings: list[Finding]) -> list[Finding]:
    """Return the findings of one log, none of which speaks against another.

    To a job whose report was counted for another one, and to that other one, the book looks otherwise than what is
    known of the report: the one has none, and the other has settled.
    """
    stories: dict[int, str] = {}
    for finding in findings:
        counted = finding.facts.get("miscounted")
        if counted is not None:
            report = f"its report of rank {counted['rank']} was counted for job {counted['counted_for']}"
            stories.setdefault(counted["report_of"], f"{report} (event {counted['seq']})")
            stories.setdefault(
                counted["counted_for"],
                f"the report of job {counted['report_of']} was counted for it (event {counted['seq']}), and its blocks "
                "were not freed",
            )
    return [_told_with(finding, stories) for finding in findings]


def _told_with(finding: Finding, stories: dict[int, str]) -> Finding:
    """Return a leak of one job with what is known of its report."""
    story = stories.get(finding.jobs[0]) if finding.kind == "leak" and len(finding.jobs) == 1 else None
    if story is None:
        return finding
    held = f"{len(finding.blocks):,} {'block is' if len(finding.blocks) == 1 else 'blocks are'} held"
    title = f"store job {finding.jobs[0]} of request {finding.requests[0]} holds its blocks: {story}; {held}"
    return msgspec.structs.replace(finding, title=title)


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
        if finding.kind == "torn_log":
            partner = _ended_in(place, found)
            if partner is not None:
                groups.unite(partner, place)
    return [Incident(members, _head(members, found)) for members in groups.members()]


def gravest(incidents: Sequence[Incident], found: Found) -> Incident:
    """Return the incident to tell first of all: wrong KV that is proven, else what the engine has not dealt with."""

    def gravity(incident: Incident) -> int:
        told = [found[member][1] for member in incident.members]
        if any(finding.kind in WRONG_KV and finding.certainty == "proven" for finding in told):
            return 0
        return 1 if any(finding.kind in (*CAUSES, *SYMPTOMS) for finding in told) else 2

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
    causes = [(place, log, each) for place, (log, each) in enumerate(found) if each.kind in CAUSES]
    freed = [(at, log, each.lead_seq, _numbers(each)) for at, log, each in causes if each.kind in FREED]
    for place, (log, finding) in enumerate(found):
        if finding.kind == "poison":  # there may be thousands, and few of the others
            blocks, seq = _numbers(finding), finding.lead_seq
            led = (at for at, in_log, since, given in freed if in_log == log and since <= seq and given & blocks)
        elif finding.kind in SYMPTOMS:
            led = (at for at, in_log, cause in causes if in_log == log and _left_waiting(cause, finding, at < place))
        elif finding.kind == "torn_log" or finding.jobs or finding.loads or finding.transfers:
            continue
        else:
            led = (at for at, in_log, cause in causes if in_log == log and _share_a_request(cause, finding))
        yield from ((at, place) for at in led if at != place)


def _left_waiting(cause: Finding, symptom: Finding, is_earlier: bool) -> bool:
    if is_earlier and _same_work(cause, symptom):
        return True
    same_ranks = not set(cause.ranks).isdisjoint(symptom.ranks)
    return cause.kind in MISCOUNTED and same_ranks and _share_a_request(cause, symptom)


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
    lasted = [place for place, each in others if each.kind in OPEN]
    return near[-1] if near else lasted[0] if lasted else None


def _head(members: Sequence[int], found: Found) -> int:
    """Return the member that tells the cause: the first, or what the engine made of it; the most certain of alike."""
    head = members[0]
    if found[head][1].kind in (*REPORTED, *SYMPTOMS):
        kinds = {found[member][1].kind for member in members}
        causes = {*CAUSES, "late_event"} if "torn_log" in kinds else CAUSES  # a late result may end an engine
        head = next((member for member in members if found[member][1].kind in causes), head)
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
