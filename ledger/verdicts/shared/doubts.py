"""Why what verdicts conclude from work that is open is not proven: how the log ends, and what is lost of it.

A doubt that only one verdict has stands in the file of that verdict. This file knows the events.
"""

from ledger import events as ev
from ledger.verdicts.base import Doubt


class LogIsTorn(Doubt, frozen=True, kw_only=True):
    """The log stops without a word, and nobody knows what the engine did next."""


class LogIsLive(Doubt, frozen=True, kw_only=True):
    """The log is still being written."""


class LogGoesOn(Doubt, frozen=True, kw_only=True):
    """The log was replayed up to a moment only."""


class GivesUpByItself(Doubt, frozen=True, kw_only=True):
    """The engine gives a transfer up in time, and the log ends before that.

    Attributes:
        what: `send` or `recv`.
        transfer: its id.
        deadline_ns: how long after its beginning the engine gives it up, in nanoseconds.
    """

    what: str
    transfer: str
    deadline_ns: int


class CodeDisagrees(Doubt, frozen=True, kw_only=True):
    """This code makes something else of the events than the engine did.

    Attributes:
        seq: the checkpoint at which that was first seen.
    """

    seq: int


class AnswersLost(Doubt, frozen=True, kw_only=True):
    """Events are lost, and an answer that reached the scheduler may be among them."""

    gap: ev.Gap


class SchedulerLost(Doubt, frozen=True, kw_only=True):
    """Events of the scheduler are lost, and no snapshot has followed that says what is open."""

    gap: ev.Gap


class WorkersLost(Doubt, frozen=True, kw_only=True):
    """Events of the workers are lost that would say what these ranks did."""

    gap: ev.Gap
    ranks: tuple[int, ...]


BLIND = (SchedulerLost, WorkersLost)
"""Doubts of work that the log has lost sight of."""
