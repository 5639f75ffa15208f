"""Which broken rule of the book is which kind of finding, and the look that all of these verdicts share.

A rule is broken in a log in two ways. The engine noticed it and said so: `invariant_violated`. Or the log holds an
event that the book does not accept: it comes from a connector that does not keep these rules, and the fold refuses it.
"""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from ledger import events as ev
from ledger import words
from ledger.errors import Refused
from ledger.verdicts.base import Certainty, Finding, Told, Verdict, listed
from ledger.verdicts.history import Chain, End, Trail
from ledger.verdicts.shared.sample import Alike

EARLY_FREE = frozenset(
    {
        "freed_early",
        "settled_early",
        "load_settled_early",
        "send_over_early",
        "withdrawn_late",
        "recv_settled_early",
    }
)
OVER_REPORT = frozenset(
    {
        "rank_reported_twice",
        "unexpected_rank",
        "rank_loaded_twice",
        "rank_sent_twice",
        "peer_settled_twice",
        "unexpected_peer",
        "load_failed_twice",
        "recv_failed_twice",
    }
)
STALE = frozenset({"unknown_job", "unknown_load"})
DOUBLE_FREE = frozenset({"settled_twice", "freed_other_blocks"})
UNREPORTED = frozenset({"failure_is_sticky", "unreported_failure", "send_not_served", "loaded_from_nobody"})
LATE = frozenset({"load_already_settled", "unknown_send", "unknown_recv"})


def kind_of_rule(rule: str, is_report: bool) -> str:
    """Return the kind of finding that a broken rule is.

    Args:
        rule: the rule's stable name.
        is_report: a rank's report broke it, and no act of the scheduler.
    """
    if rule == "job_already_settled":
        return "over_report" if is_report else "double_free"
    for kind, rules in (
        ("early_free", EARLY_FREE),
        ("over_report", OVER_REPORT),
        ("stale_completion", STALE),
        ("double_free", DOUBLE_FREE),
        ("unreported_failure", UNREPORTED),
        ("late_event", LATE),
    ):
        if rule in rules:
            return kind
    return "broken_rule"


class Broken(msgspec.Struct, frozen=True):
    """A rule that an event broke."""

    event: ev.Event
    rule: str
    detail: str
    request: str
    job: int
    load: int
    rank: int
    transfer: str
    blocks: tuple[tuple[int, int], ...]
    began: int
    """Where the job, load or transfer began, or the event's own place."""
    blind: str
    """Why the log cannot show that the rule was broken; empty if it can."""
    before: tuple[ev.Event, ...]
    """The beginning of that job, load or transfer and its last events before; how it ended if it was over."""
    chain: Chain
    """The events of it, which go on as long as it is open."""
    is_report: bool = False
    """Whether a rank's report broke it, and no act of the scheduler."""


class RuleVerdict(Verdict):
    """A verdict that finds broken rules of its kind. Subclasses say what that means and what to do."""

    advice: ClassVar[str] = ""
    lead: ClassVar[str] = ""
    """What stands in front of the rule's own words, so that they say what is wrong; {} is whose report it was."""

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self.rules: dict[str, Alike[Broken]] = {}

    @property
    def broken(self) -> Iterable[Broken]:
        """All broken rules that are kept."""
        return (broken for alike in self.rules.values() for broken in alike.kept)

    def refused(self, event: ev.Event, refusal: Refused) -> None:
        """Take an event that the book refused, if its rule is of this kind."""
        is_report = isinstance(event, ev.RankCompleted | ev.RankLoaded | ev.RankSent | ev.PeerSettled)
        if kind_of_rule(refusal.rule, is_report) in [kind.name for kind in self.kinds]:
            self.take(event, refusal.rule, refusal.detail, is_report)

    def on_invariant_violated(self, event: ev.InvariantViolated) -> None:
        """Take a broken rule that the engine noticed itself."""
        if kind_of_rule(event.rule, event.rank >= 0) in [kind.name for kind in self.kinds]:
            self.take(event, event.rule, event.detail, event.rank >= 0)

    def take(
        self, event: ev.Event, rule: str, detail: str, is_report: bool, into: dict[str, Alike[Broken]] | None = None
    ) -> None:
        """Keep a broken rule with what the trail knows of its job or load at this moment, or only count it."""
        known = (self.rules if into is None else into).setdefault(rule, Alike())
        if known.has_room:
            known.add(self._look_at(event, rule, detail, is_report))
        else:
            known.number += 1

    def _look_at(self, event: ev.Event, rule: str, detail: str, is_report: bool) -> Broken:
        job, load = getattr(event, "job", -1), getattr(event, "load", -1)
        trail = self.trail
        chain = trail.jobs.get(job) or trail.loads.get(load) or trail.transfer_chain(event) or []
        book, transfer = self.state.book, getattr(event, "transfer", "")
        opened = book.jobs.get(job) or book.loads.get(load)
        request = getattr(event, "request", "") or (opened.request if opened is not None else "")
        moved = next((each for each in (book.sends.get(request), book.recvs.get(request)) if each is not None), None)
        if opened is not None:
            blocks = opened.blocks
        elif moved is not None and transfer == moved.transfer:
            blocks = moved.blocks
        else:
            blocks = getattr(event, "blocks", ())
        gap = next(
            (gap for gap in trail.gaps if gap.origin == ev.SCHEDULER and not trail.restored_after(gap.seq)), None
        )
        shown = [*chain[:1], *chain[max(len(chain) - 4, 1) :]]
        if not chain:  # it is over, and how it ended says what the late event came after
            shown = trail.last_end(request, job, load, transfer)
        return Broken(
            event=event,
            rule=rule,
            detail=detail,
            request=request,
            job=job,
            load=load,
            rank=getattr(event, "rank", -1),
            transfer=transfer,
            blocks=listed(blocks),
            began=chain[0].seq if chain else event.seq,
            blind=f"events of the scheduler are lost at event {gap.seq}, which may be what is missing here"
            if gap
            else "",
            before=tuple(shown),
            chain=chain,
            is_report=is_report,
        )

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each rule that was broken, led by the first time."""
        for alike in self.rules.values():
            yield self.finding(alike, end)

    def advise(self, first: Broken, end: End) -> str:
        """Return what to do next."""
        return self.advice

    def impact(self, first: Broken) -> tuple[str, ...]:
        """Return who may suffer from it."""
        return ()

    def finding(self, alike: Alike[Broken], end: End) -> Finding:
        """Return the finding for one rule."""
        group, number = alike.kept, alike.number
        first = group[0]
        certain: Certainty = "undecidable" if first.blind else "proven"
        shown = [*first.before, *(broken.event for broken in group[:6])]
        # What the engine noticed itself says all in its detail; what only the fold refuses is named with the event.
        noticed = isinstance(first.event, ev.InvariantViolated)
        said = "" if noticed else f" (event {first.event.seq}: {words.describe(first.event)})"
        who = f" of rank {first.rank}" if first.is_report and first.rank >= 0 else ""
        times = f" ({number:,} times in all)" if number > 1 else ""
        return Finding(
            of=self.kinds[0],
            certainty=certain,
            since_seq=first.event.seq,
            requests=tuple(dict.fromkeys(broken.request for broken in group if broken.request)),
            jobs=tuple(dict.fromkeys(broken.job for broken in group if broken.job >= 0)),
            blocks=tuple(sorted({block for broken in group for block in broken.blocks})),
            ranks=tuple(sorted({broken.rank for broken in group if broken.rank >= 0})),
            code=None,
            lead_seq=first.event.seq,
            chain=tuple({event.seq: event for event in sorted(shown, key=lambda event: event.seq)}.values()),
            loads=tuple(dict.fromkeys(broken.load for broken in group if broken.load >= 0)),
            transfers=tuple(dict.fromkeys(broken.transfer for broken in group if broken.transfer)),
            facts=Told(
                title=f"{self.lead.format(who)}{first.detail}{said}{times}",
                culprit=f"{_who(first)}, which broke the rule {first.rule} at event {first.event.seq}",
                advice=self.advise(first, end),
                impact=self.impact(first),
                doubt=first.blind,
            ),
        )


def _who(broken: Broken) -> str:
    """Return whose act broke the rule, as far as the event says: who is at fault is not in it."""
    if broken.is_report and broken.rank >= 0:
        return f"a report of rank {broken.rank}"
    return "an act of the scheduler" if broken.event.source == ev.SCHEDULER else f"an act of {broken.event.source}"
