"""kvledger as a library: open a log, replay it, get its findings, seal it, verify it. `docs/library.md` shows how.

The names in `__all__` are what a program may rely on. Each is loaded when it is first asked for, so that importing
`ledger` costs an engine nothing. Errors are those of `ledger.errors`; all are a `LedgerError`.

This package knows nothing of vLLM, torch, Mooncake or ZeroMQ, so that an engineer opens an incident on a laptop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ledger.errors import FileCorrupt as FileCorrupt
    from ledger.errors import FileMissing as FileMissing
    from ledger.errors import FileNewer as FileNewer
    from ledger.errors import LedgerError as LedgerError
    from ledger.errors import LedgerFileError as LedgerFileError
    from ledger.errors import LedgerNotWritable as LedgerNotWritable
    from ledger.errors import NotALedger as NotALedger
    from ledger.errors import NotInLog as NotInLog
    from ledger.file.read import LogFile as LogFile
    from ledger.file.read import open_log as open_log
    from ledger.file.seal import SealReport as SealReport
    from ledger.file.seal import seal as seal_log
    from ledger.file.verify import Problem as Problem
    from ledger.file.verify import VerifyReport as VerifyReport
    from ledger.file.verify import verify as verify_log
    from ledger.replay.case import Case as Case
    from ledger.replay.case import LogResult as LogResult
    from ledger.replay.case import replay_files as replay_logs
    from ledger.replay.case import state_at as state_at
    from ledger.replay.fold import Result as Result
    from ledger.replay.incidents import Incident as Incident
    from ledger.replay.select import Interest as Interest
    from ledger.replay.select import Moment as Moment
    from ledger.report.data import data as report_data
    from ledger.report.page import doubts as doubts
    from ledger.report.page import text as report_lines
    from ledger.state.apply import State as State
    from ledger.verdicts.base import Finding as Finding

__version__ = "0.1.0"

__all__ = [
    "Case",
    "FileCorrupt",
    "FileMissing",
    "FileNewer",
    "Finding",
    "Incident",
    "Interest",
    "LedgerError",
    "LedgerFileError",
    "LedgerNotWritable",
    "LogFile",
    "LogResult",
    "Moment",
    "NotALedger",
    "NotInLog",
    "Problem",
    "Result",
    "SealReport",
    "State",
    "VerifyReport",
    "doubts",
    "open_log",
    "replay_logs",
    "report_data",
    "report_lines",
    "seal_log",
    "state_at",
    "verify_log",
]

_PLACES = {
    "ledger.errors": (
        "FileCorrupt",
        "FileMissing",
        "FileNewer",
        "LedgerError",
        "LedgerFileError",
        "LedgerNotWritable",
        "NotALedger",
        "NotInLog",
    ),
    "ledger.file.read": ("LogFile", "open_log"),
    "ledger.file.seal": ("SealReport", "seal_log"),
    "ledger.file.verify": ("Problem", "VerifyReport", "verify_log"),
    "ledger.replay.case": ("Case", "LogResult", "replay_logs", "state_at"),
    "ledger.replay.fold": ("Result",),
    "ledger.replay.incidents": ("Incident",),
    "ledger.replay.select": ("Interest", "Moment"),
    "ledger.report.data": ("report_data",),
    "ledger.report.page": ("doubts", "report_lines"),
    "ledger.state.apply": ("State",),
    "ledger.verdicts.base": ("Finding",),
}
"""Where each public name is defined."""

_THERE = {
    "replay_logs": "replay_files",
    "report_data": "data",
    "report_lines": "text",
    "seal_log": "seal",
    "verify_log": "verify",
}
"""Its name there, if it is another: `ledger.replay` and `ledger.report` are packages, and stay reachable as such."""

_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PLACE_OF[name]), _THERE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
