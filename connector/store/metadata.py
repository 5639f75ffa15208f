"""What a worker reports to the scheduler through vLLM's own worker metadata: which rank finished what, and how.

vLLM adds such metadata up over the ranks of a step. Upstream's counts lose who answered; here every report keeps its
rank. This file knows vLLM's metadata class and nothing of how either side uses it.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreWorkerMetadata

from connector.runtime.failures import NO_FAILURE, Failure
from ledger.blocks import Blocks


class JobReport(NamedTuple):
    """A rank reads a job's blocks no more. See `rank_completed`."""

    job: int
    rank: int
    outcome: str
    failure: Failure = NO_FAILURE


class LoadReport(NamedTuple):
    """A rank writes into a load's blocks no more. See `rank_loaded`.

    Attributes:
        failure: all that failed, by the cause of the first block in the request.
        failures: the same by cause.
        invalid: the blocks that vLLM was given as not loaded.
        retries: passes after the first.
    """

    load: int
    rank: int
    outcome: str
    failure: Failure = NO_FAILURE
    failures: tuple[Failure, ...] = ()
    invalid: Blocks = ()
    retries: int = 0


@dataclass
class LedgerWorkerMetadata(MooncakeStoreWorkerMetadata):
    """The reports of one or more ranks for one step, in the order in which they were made.

    Attributes:
        answered: the requests whose loads these ranks count as finished in vLLM's own output of the step.
    """

    jobs: list[JobReport] = field(default_factory=list[JobReport])
    loads: list[LoadReport] = field(default_factory=list[LoadReport])
    answered: list[str] = field(default_factory=list[str])

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LedgerWorkerMetadata":
        """Add the reports of another rank to these, and return these.

        Raises:
            TypeError: `other` is not of this class, so a rank does not run the same plugin.
        """
        if not isinstance(other, LedgerWorkerMetadata):
            raise TypeError(f"a rank reports {type(other).__name__}; do all ranks run the same kvledger?")
        self.jobs.extend(other.jobs)
        self.loads.extend(other.loads)
        self.answered.extend(other.answered)
        return self


class StepBook(NamedTuple):
    """What the scheduler's ledger gives to the workers in a step.

    Attributes:
        step: the engine step.
        loads: the load's id by request id, for the loads that this step gives to the workers.
    """

    step: int
    loads: dict[str, int]


def attach(metadata: Any, step: int, loads: dict[str, int]) -> None:
    """Let upstream's connector metadata carry a `StepBook` to the workers. It is pickled with its attributes."""
    metadata.kvledger = (step, loads)


def attached(metadata: Any) -> StepBook | None:
    """Return the book that `metadata` carries, None if it carries none."""
    book = getattr(metadata, "kvledger", None)
    return None if book is None else StepBook(*book)
