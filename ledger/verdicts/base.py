"""What a verdict is and what it yields: `Verdict` looks at one log, `Finding` is one thing that went wrong.

This file knows events, the state and the history.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from ledger import events as ev
from ledger.blocks import Blocks, expand
from ledger.errors import Refused
from ledger.verdicts.history import End, History

Certainty: TypeAlias = Literal["proven", "suspected", "undecidable"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong. The fields up to `advice` are the public shape of `kvledger replay --json`.

    Attributes:
        kind: the stable name of what went wrong; see the verdict's file.
        certainty: `proven`, `suspected` or `undecidable`.
        title: one sentence for someone who was just woken up.
        since_seq: the event at which the work or the state in question began.
        requests: ids of the requests concerned, those that suffer included.
        jobs: store jobs concerned.
        blocks: `(group, block)` of the blocks concerned.
        ranks: the ranks concerned: for a wait, those that did not answer.
        code: the stable code of the error behind it, if there is one.
        culprit: who or what to look at.
        advice: what to do next.
        lead_seq: the first event that was not as it should be; the report leads with the earliest.
        doubt: why it is not proven, and what would decide. Empty when it is.
        chain: the events that show it, in order.
        notes: lines of text that the report adds, e.g. the time line of a block.
        facts: what else is known, as data; it stands in the `story` of the public report.
        loads: loads concerned.
        suffering: those of `requests` that only bear the consequences: they wait behind it, or loaded what was wrong.
        elsewhere: jobs of other logs that it is about: index of the log, and job. Known when logs are joined.
        cause: a name for why it happened; findings of one kind and one cause in a log are one incident.
        shown: what of the culprit and title the events show, where they show a part of it only.
        inferred: the part that is concluded from them.
        brief: the title in fewer words, where it is long.
        other_log: what the log of the other side would tell; moot once it is replayed together with this one.
        also: what is to be done about it as well, when it is the consequence of another finding.
        impact: who suffers from it and how, as far as the log shows: clauses that `;` may join.
    """

    kind: str
    certainty: Certainty
    title: str
    since_seq: int
    requests: tuple[str, ...] = ()
    jobs: tuple[int, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    ranks: tuple[int, ...] = ()
    code: str | None = None
    culprit: str = ""
    advice: str = ""
    lead_seq: int = 0
    doubt: str = ""
    chain: tuple[ev.Event, ...] = ()
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = {}
    loads: tuple[int, ...] = ()
    suffering: tuple[str, ...] = ()
    elsewhere: tuple[tuple[int, int], ...] = ()
    cause: str = ""
    shown: str = ""
    inferred: str = ""
    also: str = ""
    brief: str = ""
    other_log: str = ""
    impact: tuple[str, ...] = ()

    @property
    def transfers(self) -> tuple[str, ...]:
        """The P/D transfers concerned."""
        return tuple(self.facts.get("transfers", ()))

    @property
    def evidence(self) -> tuple[int, ...]:
        """The places in the log of the events that show it."""
        return tuple(event.seq for event in self.chain)

    def public(self) -> dict[str, Any]:
        """Return the fields of the public shape. What keeps a finding from being proven is said in its advice."""
        shape = {name: getattr(self, name) for name in PUBLIC_FIELDS}
        doubt = f"Not proven: {self.doubt}" if self.doubt else ""
        shape["advice"] = " ".join(part for part in (self.other_log, self.advice, doubt) if part)
        return shape


PUBLIC_FIELDS = (
    "kind",
    "certainty",
    "title",
    "since_seq",
    "requests",
    "jobs",
    "blocks",
    "ranks",
    "code",
    "evidence",
    "culprit",
    "advice",
)


class Verdict:
    """Looks at one log for one kind of fault, or for a few that only the same look can tell apart.

    Args:
        history: what is open, with its events; `history.state` is the book after the event at hand.

    Attributes:
        kinds: the kinds of finding it may yield.
    """

    kinds: ClassVar[tuple[str, ...]] = ()

    def __init__(self, history: History) -> None:
        self.history = history
        self.state = history.state

    def refused(self, event: ev.Event, refusal: Refused) -> None:
        """Take note of an event that the book did not accept."""

    def findings(self, end: End) -> Iterable[Finding]:
        """Return what was found, once the log has ended."""
        return ()


def listed(blocks: Blocks) -> tuple[tuple[int, int], ...]:
    """Return blocks as findings hold them: single `(group, block)` pairs, sorted, each once."""
    return tuple(sorted(set(expand(blocks))))
