"""What the workers of the P/D connector report to the scheduler, and how long each wait may take.

The reports travel with vLLM's own worker metadata, which adds them up over the ranks of a step. Each has what the
scheduler needs for the event that it records, with vLLM's own request id. This file knows vLLM's metadata class
and settings, and nothing of how either side uses them.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from connector.runtime.failures import NO_FAILURE, Failure


class PeersReport(NamedTuple):
    """A rank knows who will write into its blocks, and asks them. See `peers_named`."""

    request: str
    transfer: str
    rank: int
    peers: tuple[str, ...]
    address: str


class LostReport(NamedTuple):
    """A rank will get no answer from a peer, which may write all the same. See `recv_failed`."""

    request: str
    transfer: str
    rank: int
    peer: str
    failure: Failure


class PeerReport(NamedTuple):
    """A peer writes into a rank's blocks no more. See `peer_settled`."""

    request: str
    transfer: str
    rank: int
    peer: str
    failure: Failure = NO_FAILURE


class PushReport(NamedTuple):
    """A rank begins to push. See `send_started`."""

    request: str
    transfer: str
    rank: int
    peer: str
    address: str


class SentReport(NamedTuple):
    """A rank reads a transfer's blocks no more. See `rank_sent`."""

    request: str
    transfer: str
    rank: int
    outcome: str
    pushes: int
    failure: Failure = NO_FAILURE


class LateReport(NamedTuple):
    """A result came late or twice; the rank has done nothing about it. See `report_ignored`."""

    what: str
    request: str
    transfer: str
    rank: int
    why: str
    code: str = ""


Report: TypeAlias = PeersReport | LostReport | PeerReport | PushReport | SentReport | LateReport


@dataclass
class PDWorkerMetadata(KVConnectorWorkerMetadata):
    """The reports of one or more ranks for one step, each rank's in the order in which they were made.

    Attributes:
        recved, sent: the requests that the ranks counted as finished receiving or sending, towards vLLM, in this step.
    """

    reports: list[Report] = field(default_factory=list[Report])
    recved: set[str] = field(default_factory=set[str])
    sent: set[str] = field(default_factory=set[str])

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "PDWorkerMetadata":
        """Add the reports of another rank to these, and return these.

        Raises:
            TypeError: `other` is not of this class, so a rank does not run the same plugin.
        """
        if not isinstance(other, PDWorkerMetadata):
            raise TypeError(f"a rank reports {type(other).__name__}; do all ranks run the same kvledger?")
        self.reports.extend(other.reports)
        self.recved |= other.recved
        self.sent |= other.sent
        return self


def bootstrap_timeout_s() -> float:
    """Return how long the search for a prefill's workers may take, in seconds: four requests, as many as are made."""
    return 4 * envs.VLLM_MOONCAKE_CONNECTOR_TIMEOUT + 5.0


def answer_timeout_s() -> float:
    """Return how long a peer may take to answer, in seconds.

    The prefill begins no push after its own timeout, upstream's socket gives up a minute later, so that a push that
    began in the last moment is over by then. The watchdog comes last. It counts from when the peer can have the
    question, as the prefill does, and no other time means that a peer writes no more.
    """
    return envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT + 60.0 + 5.0


def connect_timeout_s() -> float:
    """Return how long a connection to a peer may take to be made, in seconds, with the last look for the peer."""
    return envs.VLLM_MOONCAKE_CONNECTOR_TIMEOUT + 5.0


def hold_timeout_s() -> float:
    """Return how long a prefill's workers hold blocks for a decode engine that does not ask, in seconds.

    As long may a question wait there for its blocks.
    """
    return float(envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)


def attach_step(metadata: object, step: int) -> None:
    """Let upstream's connector metadata carry the engine step to the workers. It is pickled with its attributes."""
    metadata.kvledger_step = step  # type: ignore[attr-defined]


def attached_step(metadata: object) -> int:
    """Return the engine step that `metadata` carries, 0 if it carries none."""
    return int(getattr(metadata, "kvledger_step", 0))
