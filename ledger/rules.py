"""What a rule of the book is: a stable name, and what kind of breach it is to break it.

The rules themselves are declared in `ledger.state.invariants`, beside the code that enforces them. This file knows
nothing of the project.
"""

import enum

import msgspec


class Breach(enum.StrEnum):
    """What it means that a rule was broken. The value is the name of the kind of finding that tells it."""

    EARLY_FREE = "early_free"
    OVER_REPORT = "over_report"
    STALE_COMPLETION = "stale_completion"
    DOUBLE_FREE = "double_free"
    UNREPORTED_FAILURE = "unreported_failure"
    LATE_EVENT = "late_event"
    OTHER = "broken_rule"


class Rule(msgspec.Struct, frozen=True):
    """A rule of the book.

    Attributes:
        name: its stable name, which `invariant_violated` records and users see.
        breach: what it means that it was broken.
        reported: what it means when a rank's report broke it, and no act of the scheduler; as `breach` if None.
    """

    name: str
    breach: Breach
    reported: Breach | None = None

    def breach_by(self, *, is_report: bool) -> Breach:
        """Return what it means that it was broken, by a rank's report or by the scheduler."""
        return self.reported if is_report and self.reported is not None else self.breach
