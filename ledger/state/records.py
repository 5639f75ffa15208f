"""The records of the book: requests, store jobs, loads, sends and recvs, as the scheduler knows them.

They are data: `ledger.state.apply` says how events change them. The JSON of the book is what digests are taken of. This
file knows block lists and nothing else.
"""

from typing import Literal, TypeAlias

import msgspec

from ledger.blocks import Blocks

RequestState: TypeAlias = Literal["queued", "loading", "running", "preempted"]
"""Where a request is, as far as the connector knows. `loading` is vLLM's WAITING_FOR_REMOTE_KVS."""


class RequestRecord(msgspec.Struct):
    """A request that vLLM has not ended yet."""

    generation: int
    state: RequestState = "queued"
    since_seq: int = 0
    looked_up: tuple[int, int] | None = None
    """The last answer of the store: hit tokens and local tokens."""
    failed_loads: dict[int, int] = {}
    """How many loads of this request failed, by the token up to which they would have brought it."""
    skipping: bool = False
    """Its last save was skipped, so further skips are not news."""
    after_failure: Literal["deferred", "answered"] | msgspec.UnsetType = msgspec.UNSET
    """What its lookups with a hit were told since its last load failed. A planned load, or a run, begins anew."""


class Job(msgspec.Struct):
    """A store job from its registration until its blocks are freed."""

    request: str
    generation: int
    since_seq: int
    since_mono_ns: int
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    """Ranks that have not reported, lowest first."""
    outcomes: dict[int, str] = {}
    blocks: Blocks = ()
    tokens: int = 0
    settled: bool = False
    quarantined: bool = False
    """A report contradicted the book: the blocks stay pinned for good."""
    suspected: bool = False


class Load(msgspec.Struct):
    """A load from its plan until it settles."""

    request: str
    generation: int
    since_seq: int
    since_mono_ns: int
    blocks: Blocks
    tokens: int = 0
    end_token: int = 0
    """The token up to which the load brings the request."""
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    outcomes: dict[int, str] = {}
    failed: bool = False
    suspected: bool = False
    ended: str | msgspec.UnsetType = msgspec.UNSET
    """How its request ended while the load was open."""


SendPhase: TypeAlias = Literal["registered", "ready", "sending"]


class Send(msgspec.Struct):
    """A transfer to a decode engine, from its registration until it is settled or has expired."""

    transfer: str
    generation: int
    since_seq: int
    since_mono_ns: int
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    """Ranks that have not reported, lowest first."""
    phase: SendPhase = "registered"
    outcomes: dict[int, str] = {}
    blocks: Blocks = ()
    """What is held for the transfer; empty until it is ready."""
    timeout_ns: int = 0
    pushes: int = 0
    quarantined: bool = False
    suspected: bool = False


class Recv(msgspec.Struct):
    """A transfer from a prefill engine, from its registration until it is settled."""

    transfer: str
    generation: int
    since_seq: int
    since_mono_ns: int
    blocks: Blocks
    ranks: tuple[int, ...]
    unnamed: tuple[int, ...]
    """Ranks that have not said yet which peers will write into their blocks, lowest first."""
    waiting: tuple[tuple[int, str], ...] = ()
    """Rank and peer of those that may still write."""
    outcomes: tuple[tuple[int, str, str], ...] = ()
    """Rank, peer and outcome of those that have settled, in that order."""
    prefill: str = ""
    timeout_ns: int = 0
    failed: bool = False
    recovered: str = ""
    """What became of the request of a failed recv, once that is known."""
    quarantined: bool = False
    suspected: bool = False

    def missing_ranks(self) -> tuple[int, ...]:
        """Return the ranks for which somebody may still write, lowest first."""
        return tuple(sorted({*self.unnamed, *(rank for rank, _ in self.waiting)}))


class Book(msgspec.Struct):
    """All that is in the projection.

    Its JSON is what the digest is taken of, so it holds nothing without a fixed order.
    """

    requests: dict[str, RequestRecord] = {}
    jobs: dict[int, Job] = {}
    loads: dict[int, Load] = {}
    loading: dict[str, int] = {}
    """The open load of a request."""
    next_job: int = 0
    next_load: int = 0
    violations: int = 0
    sends: dict[str, Send] = {}
    """The open send of a request: its blocks go to a decode engine."""
    recvs: dict[str, Recv] = {}
    """The open recv of a request: its blocks come from a prefill engine."""
    prefills: dict[str, dict[int, tuple[str, ...]]] = {}
    """The workers of a prefill engine that wrote to each rank at last, for the engines used last."""
