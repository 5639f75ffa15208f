"""What a verdict is and what it yields: `Verdict` looks at one log, `Finding` is one thing that went wrong.

A finding is data: what was found, as facts of its own type, and never a sentence. `ledger.report.wording` makes the
sentences, at the edge. A kind of finding is declared once, as a `Kind`, in the file of the verdict that finds it; its
`Role` is all that others know of it.

This file knows events, the state and the history.
"""

import enum
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from ledger import events as ev
from ledger.blocks import Blocks, expand
from ledger.errors import Refused
from ledger.verdicts.history import End, History

Certainty: TypeAlias = Literal["proven", "suspected", "undecidable"]


class Role(enum.Flag):
    """What a kind of finding is to other findings, and what it says of requests and blocks.

    Attributes:
        CAUSE: it leads to a leak or a stall of the same job or request: work had begun, and went wrong by this.
        SYMPTOM: it is what something else leads to.
        REPORTED: the engine was told of it and deals with it. What it then does wrong is the cause, and not this.
        RECURS: it ends with each load; whether the next load goes well is another matter.
        FREES_EARLY: blocks come to a new owner too early by it; poison of those blocks afterwards follows from it.
        MISCOUNTS: an answer was counted for other work than its own by it, and that work is left to wait.
        WRONG_KV: after it a request may have been served KV that is not its own.
        TAINTS: a transfer has touched blocks of another owner: keys or blocks hold wrong KV.
        LASTS: it lasts until the log ends, so that a torn end is a part of the same incident.
        HANGS: it cannot be said that it is over because nothing is held any more.
        ENDS_ENGINE: it may be what an engine died of, if it is the last thing before a torn end.
        ENDS_LOG: it says why a log stops, and never why something before that went wrong.
    """

    CAUSE = enum.auto()
    SYMPTOM = enum.auto()
    REPORTED = enum.auto()
    RECURS = enum.auto()
    FREES_EARLY = enum.auto()
    MISCOUNTS = enum.auto()
    WRONG_KV = enum.auto()
    TAINTS = enum.auto()
    LASTS = enum.auto()
    HANGS = enum.auto()
    ENDS_ENGINE = enum.auto()
    ENDS_LOG = enum.auto()


class Kind(msgspec.Struct, frozen=True):
    """A kind of finding: its stable name, which data and users know, and its role."""

    name: str
    role: Role


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a verdict has found, as data. Each sort of finding has a type of its own, in its verdict's file.

    `ledger.report.wording` has one function for each such type. `kvledger replay --json` gives the fields as they are,
    with the places of events in place of the events.
    """


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """Why a finding is not proven, and what would decide. Each reason has a type of its own, beside who gives it."""


class OtherSide(msgspec.Struct, frozen=True, kw_only=True):
    """What another log that is told together with this one knows of the same key or transfer."""


class Miscounted(msgspec.Struct, frozen=True):
    """A report that was counted for another job than its own.

    Attributes:
        seq: the event that reported it.
    """

    rank: int
    report_of: int
    counted_for: int
    seq: int


class TaintedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key in the store that holds, or may hold, the KV of another request.

    Attributes:
        block: `(group, block)` from which it was put.
        old_owner, new_owner: request and generation; the new owner is None if the log does not say who it was.
        loaded_by: requests that have loaded it.
        returned: the call that put it has returned, as far as the log goes.
        removed: the worker that saw it has taken it out of the store again.
    """

    key: str
    block: tuple[int, int]
    rank: int
    job: int
    old_owner: tuple[str, int]
    new_owner: tuple[str, int] | None
    loaded_by: tuple[str, ...]
    certainty: Certainty
    returned: bool = True
    removed: bool


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong.

    Attributes:
        of: what kind of thing it is.
        certainty: `proven`, `suspected` or `undecidable`.
        facts: what was found; its type tells how the finding is worded.
        since_seq: the event at which the work or the state in question began.
        requests: ids of the requests concerned, those that suffer included.
        suffering: those of `requests` that only bear the consequences: they wait behind it, or loaded what was wrong.
        jobs: store jobs concerned.
        loads: loads concerned.
        transfers: P/D transfers concerned.
        blocks: `(group, block)` of the blocks concerned.
        ranks: the ranks concerned: for a wait, those that did not answer.
        code: the stable code of the error behind it, if there is one.
        lead_seq: the first event that was not as it should be; the report leads with the earliest.
        doubt: why it is not proven; None when it is.
        chain: the events that show it, in order.
        cause: a name for why it happened; findings of one kind and one cause in a log are one incident.
        end: how the log ends in which it was found; the fold says it of each finding.
        lost: where a damaged file has lost events that may say otherwise; the fold says it of each finding.
        tainted: keys in the store that hold, or may hold, wrong KV by it.
        missing_keys: keys that could not be loaded, and when by the wall clock, in nanoseconds.
        unpinned_jobs: those of `jobs` that held no references on their blocks.
        overflow: it stands for many that are only counted.
        miscounted: how a report of its job, or one for its job, was counted for another job, where that is known.
        elsewhere: jobs of other logs that it is about: index of the log, and job. Known when logs are joined.
        other_side: what other logs know of its keys and transfers. Known when logs are joined.
    """

    of: Kind
    certainty: Certainty
    facts: Facts
    since_seq: int
    requests: tuple[str, ...] = ()
    suffering: tuple[str, ...] = ()
    jobs: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    transfers: tuple[str, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    ranks: tuple[int, ...] = ()
    code: str | None = None
    lead_seq: int = 0
    doubt: Doubt | None = None
    chain: tuple[ev.Event, ...] = ()
    cause: str = ""
    end: End | None = None
    lost: ev.Gap | None = None
    tainted: tuple[TaintedKey, ...] = ()
    missing_keys: tuple[tuple[str, int], ...] = ()
    unpinned_jobs: tuple[int, ...] = ()
    overflow: bool = False
    miscounted: Miscounted | None = None
    elsewhere: tuple[tuple[int, int], ...] = ()
    other_side: tuple[OtherSide, ...] = ()

    @property
    def kind(self) -> str:
        """The stable name of what went wrong."""
        return self.of.name

    @property
    def evidence(self) -> tuple[int, ...]:
        """The places in the log of the events that show it."""
        return tuple(event.seq for event in self.chain)

    def is_a(self, role: Role) -> bool:
        """Return whether findings of this kind have a role, or one of several that are joined by `|`."""
        return bool(self.of.role & role)


def as_data(value: Any) -> Any:
    """Return facts as plain data: structs as objects, and for an event its place in the log."""
    if isinstance(value, ev.Event):
        return value.seq
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, msgspec.Struct):
        return {name: as_data(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: as_data(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple | set | frozenset):
        return [as_data(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value


class Verdict:
    """Looks at one log for one kind of fault, or for a few that only the same look can tell apart.

    Args:
        history: what is open, with its events; `history.state` is the book after the event at hand.

    Attributes:
        kinds: the kinds of finding it may yield.
    """

    kinds: ClassVar[tuple[Kind, ...]] = ()

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
