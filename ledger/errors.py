"""Every exception of kvledger, in one tree.

    LedgerError
    ├── Refused              the book does not accept an event; nothing was changed
    ├── InvariantViolation   the books are broken; the engine must not go on unnoticed
    ├── SettingsError        the configuration names what does not exist, or gives a value that cannot be
    ├── UnsupportedVersion   the vLLM or Mooncake in use lacks what the plugin extends
    ├── LedgerNotWritable    the audit log cannot be written where the settings say
    ├── NotInLog             no log has the request, job or block that was asked for
    └── LedgerFileError      a file that was asked for cannot be read
        ├── FileMissing
        ├── NotALedger
        ├── FileCorrupt
        └── FileNewer

Messages are one line and say what to do. This file knows what a rule is, and nothing else of the project.
"""

from ledger.rules import Rule


class LedgerError(Exception):
    """The base of all errors that kvledger raises."""


class Refused(LedgerError):
    """The book does not accept an event, and was not changed.

    Attributes:
        rule: the rule's stable name, e.g. `rank_reported_twice`.
        detail: one line in an operator's words.
    """

    def __init__(self, rule: Rule, detail: str) -> None:
        super().__init__(f"{rule.name}: {detail}")
        self.rule = rule.name
        self.detail = detail


class InvariantViolation(LedgerError):
    """The books are broken: what was recorded and what is reported cannot both be true. Blocks stay pinned.

    Attributes:
        rule: the rule's stable name, as in the `invariant_violated` event.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class SettingsError(LedgerError):
    """One or more settings are wrong. The message lists all of them."""


class UnsupportedVersion(LedgerError):
    """The vLLM or Mooncake in use lacks members that the plugin extends. The message names them."""


class LedgerNotWritable(LedgerError):
    """The audit log cannot be created at the configured path."""


class NotInLog(LedgerError):
    """No log has the request, job or block that was asked for. The message says what there is; status 2."""


class LedgerFileError(LedgerError):
    """A ledger file cannot be read. The message says what to do; the command line ends with status 3."""


class FileMissing(LedgerFileError):
    """There is no file at that path."""


class NotALedger(LedgerFileError):
    """The file is not a kvledger log: empty, not SQLite, or another program's database."""


class FileCorrupt(LedgerFileError):
    """The file is a kvledger log but cut off or damaged where it must be whole."""


class FileNewer(LedgerFileError):
    """The file was written by a newer kvledger than this one."""
