"""What the runs of both simulators share: what comes of a run."""

import msgspec

from tools.sim.check import Broken


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run.

    Attributes:
        steps: engine steps that were scheduled, the last ones included, in which everything settles.
        ended: `settled`, or `broken`: a check failed. A run of the store also ends with `violation` (the ledger stopped
            the engine over a broken report, as it should) or `died`.
        digest: SHA-256 over all events of all logs, as JSON.
        cpu_s: processor time; the one thing here that differs from machine to machine.
        seen: how often things happened.
        passed_over: failures of kinds that were not looked for.
        lines: the log of each engine by its name, one JSON line for each event, if they were asked for.
    """

    seed: int
    steps: int
    events: int
    ended: str
    digest: str
    cpu_s: float
    seen: dict[str, int]
    broken: Broken | None = None
    passed_over: dict[str, int] = {}
    lines: dict[str, list[bytes]] = {}
