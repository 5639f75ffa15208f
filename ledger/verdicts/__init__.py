"""What went wrong, judged from a log: one file in this folder for each kind of finding.

A verdict is a class that extends `Verdict` and stands in a module of this folder.
Being there is all that registers it. It names the events it wants by its methods: `on_rank_completed(event)` is called
for each `rank_completed` that the book accepted, so an event costs only the verdicts that asked for it. `refused(event,
refusal)` is called for what the book did not accept. `findings(end)` is called once, at the end of the log.

    base       what a verdict is, and what a finding is
    history    what is open, with the events that led there: the memory that verdicts share
    shared     looks that several verdicts have in common

What every verdict owes its reader:

*   a healthy log has no finding; a false alarm is a fault;
*   *proven* means that the events exclude any other reading; *suspected*, that they speak for it; *undecidable*, that a
    gap, a missing file or a torn end hides the answer, and then `doubt` says what would decide;
*   memory grows with what is open, not with the file.

This folder knows events, the state and their words.
"""

import importlib
import pkgutil
from functools import cache

from ledger.verdicts.base import Kind, Verdict


@cache
def all_verdicts() -> tuple[type[Verdict], ...]:
    """Return every verdict of this folder, in the order of the names of their files."""
    found: list[type[Verdict]] = []
    for module_info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        found.extend(
            each
            for each in vars(module).values()
            if isinstance(each, type)
            and issubclass(each, Verdict)
            and each is not Verdict
            and each.__module__ == module.__name__
        )
    return tuple(found)


@cache
def all_kinds() -> dict[str, Kind]:
    """Return every kind of finding by its name, as the verdicts declare them."""
    return {kind.name: kind for verdict in all_verdicts() for kind in verdict.kinds}
