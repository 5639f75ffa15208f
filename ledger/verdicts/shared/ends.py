"""How the end of a log bears on the events before it: an engine that died has its cause among the last of them."""

from ledger import events as ev
from ledger.verdicts.history import End

NEAR_STEPS = 2
"""Engine steps before the end within which an event may be what the engine died of."""


def is_hard(end: End | None) -> bool:
    """Return whether the log stops without a word, or with an error."""
    if end is None:
        return False
    return end.how == "torn" if end.closed is None else end.closed.reason == "exception"


def is_down(end: End | None) -> bool:
    """Return whether the engine has shut down: it holds nothing any more, and there is no process to look at."""
    return end is not None and end.how == "closed"


def goes_on(end: End | None) -> bool:
    """Return whether more comes after what was replayed, so that nothing can be said to be for ever."""
    return end is not None and end.how in ("live", "as_of")


def is_near(event: ev.Event, end: End) -> bool:
    """Return whether an event is so close to the end that the engine may have died of it."""
    return end.step - event.step <= NEAR_STEPS
