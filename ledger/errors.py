"""Every exception of kvledger, in one tree.

    LedgerError
    ├── Refused              the book does not accept an event; nothing was changed
    ├── InvariantViolation   the books are broken; the engine must not go on unnoticed
    ├── SettingsError        the configuration names what does not exist, or gives a value that cannot be
    ├── UnsupportedVersion   the vLLM or Mooncake in use lacks what the plugin extends
    ├── LedgerNotWritable    the audit log cannot be written where the settings say
    ├── NotInLog             no log has the request, job or block that was asked for
    ├── KVTransferError      KV cache could not be moved; carries the stable code and what it concerns
    └── LedgerFileError      a file that was asked for cannot be read
        ├── FileMissing
        ├── NotALedger
        ├── FileCorrupt
        └── FileNewer

Messages are one line and say what to do. This file knows the stable codes, block lists and what a rule
is, nothing else of the project.
"""

from ledger.blocks import Blocks
from ledger.codes import CODES, KVCacheErrorCode, Stage, raw_name
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


class KVTransferError(LedgerError):
    """KV cache could not be moved.

    Attributes:
        code: the stable code; alerts match it and never the message.
        stage: where it failed.
        raw, exception: the raw error, and the type of the exception if there was one.
        request, job, load, transfer: what it concerns; empty or -1 where there is none.
        rank: the rank on which it failed.
        blocks: the blocks that failed.
    """

    def __init__(  # noqa: PLR0913 - one argument for each thing that an alert may ask for
        self,
        *,
        code: KVCacheErrorCode,
        stage: Stage,
        raw: str = "",
        exception: str = "",
        request: str = "",
        job: int = -1,
        load: int = -1,
        transfer: str = "",
        rank: int = -1,
        blocks: Blocks = (),
    ) -> None:
        self.code = code
        self.stage = stage
        self.raw = raw
        self.exception = exception
        self.request = request
        self.job = job
        self.load = load
        self.transfer = transfer
        self.rank = rank
        self.blocks = blocks
        work = f"load {load}" if load >= 0 else f"job {job}" if job >= 0 else f"transfer {transfer}"
        said = f" ({f'{raw} {raw_name(raw)}'.strip()})" if raw else ""
        super().__init__(
            f"{work} of request {request} failed on rank {rank} at {stage}: {code}{said}. {CODES[code].action}"
        )


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
