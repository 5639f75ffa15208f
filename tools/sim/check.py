"""What the checks of both simulators share: what a failed check says, and how failures and sights are counted."""

import msgspec


class Broken(msgspec.Struct, frozen=True):
    """A check that failed.

    Attributes:
        kind: which, as in the docstring of the simulator's `checks`.
        detail: one line.
        step: the engine step.
        event: the last event of the log when it was seen, as JSON.
    """

    kind: str
    detail: str
    step: int
    event: str = ""


class Checks:
    """The checks of one run.

    Args:
        only: look for these kinds alone and let others pass; None to stop at the first of any kind.

    Attributes:
        broken: the first check that failed.
        passed_over: how often checks of other kinds failed, when only some are looked for.
        seen: how often things happened, to know what a run covered.
        step: the engine step.
    """

    def __init__(self, only: frozenset[str] | None = None) -> None:
        self.broken: Broken | None = None
        self.passed_over: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.step = 0
        self._only = only

    def fail(self, kind: str, detail: str) -> None:
        """Note that a check failed; the run ends with this step."""
        if self._only is not None and kind not in self._only:
            self.passed_over[kind] = self.passed_over.get(kind, 0) + 1
        elif self.broken is None:
            self.broken = Broken(kind, detail, self.step, self.last_event())

    def last_event(self) -> str:
        """Return the last event of the log, as JSON; empty if there is none."""
        raise NotImplementedError

    def count(self, what: str, times: int = 1) -> None:
        """Count what a run covered."""
        self.seen[what] = self.seen.get(what, 0) + times


def described(error: BaseException) -> str:
    """Return an error with the place where it was raised, in one line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}" if trace is not None else "?"
    return f"{type(error).__name__} at {where}: {error}".replace("\n", " ")
