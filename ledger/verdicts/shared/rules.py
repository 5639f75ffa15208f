"""A rule of the book that was broken: what all verdicts on one kind of breach share.

The engine noticed it and said so (`invariant_violated`), or the book refuses the event at replay. What it means to
break a rule stands beside the rule, in `ledger.state.invariants`.
"""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from ledger import events as ev
from ledger.errors import Refused
from ledger.state.invariants import breach_of
from ledger.verdicts.base import Doubt, Facts, Finding, Verdict, listed
from ledger.verdicts.history import End, EventList, History
from ledger.verdicts.shared.sample import Sample


class BeginningLost(Doubt, frozen=True, kw_only=True):
    """Events of the scheduler are lost, and what the rule misses may be among them."""

    gap: ev.Gap


class RuleBroken(Facts, frozen=True, kw_only=True):
    """A rule of the book was broken. Each kind of breach has a type of its own, which says no more.

    Attributes:
        rule: the rule's stable name.
        detail: what the book said when it was broken for the first time.
        event: the event that broke it then, or in which the engine says that it was broken.
        is_report: a rank's report broke it, and no act of the scheduler.
        rank: the rank whose report or act it was; -1 if it was none.
        times: how often it was broken.
    """

    rule: str
    detail: str
    event: ev.Event
    is_report: bool
    rank: int
    times: int


class FreedEarly(RuleBroken, frozen=True, kw_only=True):
    """Work was over, or its blocks were given back, before all had answered."""


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
    lost: ev.Gap | None
    """Where events of the scheduler are lost that may say why the rule was not broken; None if none are."""
    before: tuple[ev.Event, ...]
    """The beginning of that job, load or transfer and its last events before; how it ended if it was over."""
    chain: EventList
    """The events of it, which go on as long as it is open."""
    is_report: bool = False
    """Whether a rank's report broke it, and no act of the scheduler."""


class RuleVerdict(Verdict):
    """A verdict that finds broken rules of its kind: those whose breach has the name of its first kind.

    Attributes:
        facts: the type of the facts of its findings of broken rules.
    """

    facts: ClassVar[type[RuleBroken]] = RuleBroken

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.rules: dict[str, Sample[Broken]] = {}

    @property
    def broken(self) -> Iterable[Broken]:
        """All broken rules that are kept."""
        return (broken for alike in self.rules.values() for broken in alike.kept)

    def refused(self, event: ev.Event, refusal: Refused) -> None:
        """Take an event that the book refused, if its rule is of this kind."""
        is_report = isinstance(event, ev.RankCompleted | ev.RankLoaded | ev.RankSent | ev.PeerSettled)
        if breach_of(refusal.rule, is_report=is_report) == self.kinds[0].name:
            self.take(event, refusal.rule, refusal.detail, is_report)

    def on_invariant_violated(self, event: ev.InvariantViolated) -> None:
        """Take a broken rule that the engine noticed itself."""
        if breach_of(event.rule, is_report=event.rank >= 0) == self.kinds[0].name:
            self.take(event, event.rule, event.detail, event.rank >= 0)

    def take(
        self, event: ev.Event, rule: str, detail: str, is_report: bool, into: dict[str, Sample[Broken]] | None = None
    ) -> None:
        """Keep a broken rule with what the history knows of its job or load at this moment, or only count it."""
        known = (self.rules if into is None else into).setdefault(rule, Sample())
        if known.has_room:
            known.add(self._look_at(event, rule, detail, is_report))
        else:
            known.number += 1

    def _look_at(self, event: ev.Event, rule: str, detail: str, is_report: bool) -> Broken:
        job, load = getattr(event, "job", -1), getattr(event, "load", -1)
        history = self.history
        chain = history.jobs.get(job) or history.loads.get(load) or history.transfer_events(event) or []
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
            (gap for gap in history.gaps if gap.origin == ev.SCHEDULER and not history.restored_after(gap.seq)), None
        )
        shown = [*chain[:1], *chain[max(len(chain) - 4, 1) :]]
        if not chain:  # it is over, and how it ended says what the late event came after
            shown = history.last_end(request, job, load, transfer)
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
            lost=gap,
            before=tuple(shown),
            chain=chain,
            is_report=is_report,
        )

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each rule that was broken, led by the first time."""
        for alike in self.rules.values():
            yield self.finding(alike)

    def finding(self, alike: Sample[Broken]) -> Finding:
        """Return the finding for one rule."""
        group = alike.kept
        first = group[0]
        shown = [*first.before, *(broken.event for broken in group[:6])]
        return Finding(
            of=self.kinds[0],
            certainty="undecidable" if first.lost is not None else "proven",
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
            doubt=BeginningLost(gap=first.lost) if first.lost is not None else None,
            facts=self.facts(
                rule=first.rule,
                detail=first.detail,
                event=first.event,
                is_report=first.is_report,
                rank=first.rank,
                times=alike.number,
            ),
        )
