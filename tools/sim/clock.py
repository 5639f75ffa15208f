"""Virtual time, and calls that wait in it.

A transfer takes time; upstream's code that makes it is an ordinary function that blocks. Such a function runs here as
a greenlet: it is suspended in the middle of the call and goes on when virtual time has come that far. That is a stack
of its own, and no thread: one thing runs at a time, in an order that only the plan decides.

This file knows nothing of what waits.
"""

import heapq
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

STEP_NS = 10_000_000
"""How long an engine step takes in virtual time: 10 ms, as with a small model."""

EPOCH_NS = 1_700_000_000_000_000_000
"""Where the wall clock of every run starts."""


class Call(greenlet):
    """A suspended function. `item` is what it works on, for those that it calls."""

    item: Any = None


class Clock:
    """The time of one run.

    Attributes:
        now_ns: virtual time since the start of the run.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._hub = getcurrent()
        self._order = 0
        self._due: list[tuple[int, int, Call | Callable[[], None]]] = []
        self._parked: list[Call] = []
        self._calls: dict[Call, None] = {}

    def wall_ns(self) -> int:
        """Return what a wall clock would show."""
        return EPOCH_NS + self.now_ns

    def mono_ns(self) -> int:
        """Return what a monotonic clock would show."""
        return self.now_ns

    def at(self, when_ns: int, what: Callable[[], None]) -> None:
        """Do `what` when virtual time reaches `when_ns`."""
        self._order += 1
        heapq.heappush(self._due, (when_ns, self._order, what))

    def start(self, function: Callable[[], None], delay_ns: int = 0) -> Call:
        """Run `function` as a call that may wait, from `delay_ns` on."""
        call = Call(function, self._hub)
        self._calls[call] = None
        self._order += 1
        heapq.heappush(self._due, (self.now_ns + delay_ns, self._order, call))
        return call

    def in_call(self) -> bool:
        """Return whether the caller may wait: True within a call, False in the engine's own flow."""
        return getcurrent() is not self._hub

    def wait(self, duration_ns: int) -> None:
        """Suspend the current call for `duration_ns`."""
        call = getcurrent()
        self._order += 1
        heapq.heappush(self._due, (self.now_ns + duration_ns, self._order, call))  # type: ignore[arg-type]
        self._hub.switch()

    def park(self) -> None:
        """Suspend the current call until `release`."""
        self._parked.append(getcurrent())  # type: ignore[arg-type]
        self._hub.switch()

    def release(self) -> None:
        """Let every parked call go on, now."""
        parked, self._parked = self._parked, []
        for call in parked:
            self._order += 1
            heapq.heappush(self._due, (self.now_ns, self._order, call))

    def advance(self, until_ns: int) -> None:
        """Let time pass, and everything that is due happen, in order."""
        due = self._due
        while due and due[0][0] <= until_ns:
            when_ns, _, what = heapq.heappop(due)
            self.now_ns = max(self.now_ns, when_ns)
            if isinstance(what, Call):
                what.switch()
                if what.dead:
                    self._calls.pop(what, None)
            else:
                what()
        self.now_ns = max(self.now_ns, until_ns)

    def close(self) -> None:
        """Abandon every call that is still suspended."""
        self._due.clear()
        self._parked.clear()
        for call in list(self._calls):
            if not call.dead:
                call.throw(GreenletExit)
        self._calls.clear()
