"""What failed: one value from the call that failed to the event, the line of the failure log and the counters.

Both connectors make it where the call fails, workers report it to the scheduler, and what events hold of it is written
here and nowhere else. Which request, job, load or transfer failed stands beside it, in the report that carries it. This
file knows stable codes, block lists and events.
"""

from typing import TypedDict

import msgspec

from ledger.blocks import Blocks
from ledger.codes import CODES, KVCacheErrorCode, Stage, translate
from ledger.events import BlockFailures


class CauseFields(TypedDict):
    """What every event of a failure holds: the stable code, the raw error, and the type of an exception."""

    code: str
    raw: str
    exception: str


class FailureFields(CauseFields):
    """`CauseFields` and where it failed, for events that have a stage."""

    stage: str


class Failure(msgspec.Struct, frozen=True):
    """Why KV cache could not be moved, and which blocks.

    Attributes:
        code: the stable code, a `KVCacheErrorCode`; empty in `NO_FAILURE` alone.
        raw: the raw error, as `ledger.codes.translate` returns it.
        stage: where it failed, a `Stage`.
        exception: the type of the exception, if one was raised.
        blocks: the blocks that failed.
        keys: how many keys of theirs failed.
        tries: how often the store was asked.
    """

    code: str
    raw: str
    stage: str
    exception: str = ""
    blocks: Blocks = ()
    keys: int = 0
    tries: int = 1

    @classmethod
    def of(cls, raw: int | BaseException, stage: Stage) -> "Failure":
        """Return the failure that a code of the store or an exception means."""
        translated = translate(raw)
        exception = type(raw).__name__ if isinstance(raw, BaseException) else ""
        return cls(translated.code, translated.raw, stage, exception)

    def __bool__(self) -> bool:
        """Whether something failed: False for `NO_FAILURE`."""
        return bool(self.code)

    def __str__(self) -> str:
        raw = self.raw if self.exception in self.raw else f"{self.exception}: {self.raw}"
        return f"{self.code} at {self.stage} ({raw})"

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later."""
        return CODES[KVCacheErrorCode(self.code)].retryable

    @property
    def cause(self) -> tuple[str, str, str, str]:
        """What blocks that failed in one way have in common: code, raw error, stage, exception."""
        return self.code, self.raw, self.stage, self.exception

    def of_blocks(self, blocks: Blocks, keys: int = 0) -> "Failure":
        """Return the same failure of other blocks, and of how many keys of theirs."""
        return msgspec.structs.replace(self, blocks=blocks, keys=keys)

    # What events hold of it.

    def cause_fields(self) -> CauseFields:
        """Return the fields of an event that has no stage."""
        return {"code": str(self.code), "raw": self.raw, "exception": self.exception}

    def fields(self) -> FailureFields:
        """Return the fields of an event that has a stage."""
        return {"code": str(self.code), "raw": self.raw, "stage": str(self.stage), "exception": self.exception}

    def block_failures(self) -> BlockFailures:
        """Return what `rank_loaded` holds of blocks that failed in this way."""
        return BlockFailures(str(self.code), self.raw, str(self.stage), self.blocks, self.keys, self.exception)


NO_FAILURE = Failure("", "", "")
"""Nothing failed."""
