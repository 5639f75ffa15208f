"""P/D transfers: sends of a prefill engine and recvs of a decode engine. Emitted by the scheduler halves.

This file knows the envelope, the shape of a block list and words.
"""

# ruff: noqa: D102 - `sentence` is what the base says, of each kind

from ledger import words
from ledger.blocks import Blocks, Ranges
from ledger.events.base import About, Event

# --- P/D transfers ----------------------------------------------------------------------------------------------------
#
# A prefill engine and a decode engine write a log each; both name the transfer. The prefill's side of it is a *send*,
# the decode's a *recv*. A *peer* is one worker of the other engine: `tp<rank> pp<stage>`.
#
# What orders the events of two logs, whose clocks are not to be trusted: a send starts after the decode has registered
# its recv (it had to ask), and a peer settles as `ok` after that peer's push has finished.


class SendRegistered(Event, frozen=True, gc=False, omit_defaults=True, tag="send_registered"):
    """Prefill side: a request runs whose blocks a decode engine will ask for. Nothing is held for the transfer yet.

    Attributes:
        ranks: the ranks that must report before the blocks may be freed.
    """

    about = About("send", "begins")

    transfer: str
    request: str
    generation: int
    ranks: Ranges

    def sentence(self) -> str:
        request = words.request(self.request, self.generation)
        return f"{request} will be sent as {self.transfer}; {words.rank_runs(self.ranks)} must report"


class SendReady(Event, frozen=True, gc=False, omit_defaults=True, tag="send_ready"):
    """Prefill side: the prompt is computed, the request has ended, and its blocks are held until they were sent.

    Attributes:
        blocks: what is held, as far as it can be sent. vLLM holds every block of the request.
        timeout_ns: how long the workers hold it for a decode engine that does not ask, in nanoseconds.
    """

    about = About("send", uses="pinned")

    transfer: str
    request: str
    generation: int
    blocks: Blocks
    timeout_ns: int = 0

    def sentence(self) -> str:
        request = words.request(self.request, self.generation)
        return (
            f"send {self.transfer} ready: {words.these_blocks(self.blocks)} of {request} are held"
            f"{f', for {words.span(self.timeout_ns)} at most' if self.timeout_ns else ''}"
        )


class SendStarted(Event, frozen=True, gc=False, omit_defaults=True, tag="send_started"):
    """Prefill side: a decode worker has asked, and the rank begins to push. Recorded when it reaches the scheduler.

    A push may fail and be asked for again, so this comes once for each push and not once for each transfer.

    Attributes:
        peer: the decode worker that asked.
        address: where it listens; the decode's own log has the same in `peers_named`.
    """

    about = About("send")

    transfer: str
    request: str
    rank: int
    peer: str
    address: str = ""

    def sentence(self) -> str:
        return f"rank {self.rank} was asked for {self.transfer} by {self.peer} and begins to push"


class RankSent(Event, frozen=True, gc=False, omit_defaults=True, tag="rank_sent"):
    """Prefill side: a rank has finished with a transfer and reads its blocks no more.

    Attributes:
        outcome: `sent` (every decode worker that pairs with this rank was served), `released` (each of them only asked
            to free the blocks), or `expired` (they did not all ask, or their pushes failed, for the whole of the send's
            `timeout_ns`).
        pushes: how many pushes this rank began.
        code, raw, stage, exception: of the last push that failed, if one did.
    """

    about = About("send")

    transfer: str
    request: str
    rank: int
    outcome: str = "sent"
    pushes: int = 0
    code: str = ""
    raw: str = ""
    stage: str = ""
    exception: str = ""

    def sentence(self) -> str:
        why = words.because(self.code, self.raw, self.exception, self.stage)
        pushes = words.plural(self.pushes, "push", "pushes")
        return f"rank {self.rank} is done with send {self.transfer}: {self.outcome}, {pushes}{why}"


class SendSettled(Event, frozen=True, gc=False, omit_defaults=True, tag="send_settled"):
    """Prefill side: the transfer is over, and vLLM may free the request's blocks.

    Attributes:
        outcome: `sent`, `released` (the decode engine needed nothing and only asked to free the blocks), or `withdrawn`
            (the request ended with nothing to send: it was aborted, or did not end as a prefill does). No block was
            held for one that was withdrawn.
    """

    about = About("send", "ends")

    transfer: str
    request: str
    outcome: str = "sent"

    def sentence(self) -> str:
        return f"send {self.transfer} of request {self.request} settled: {self.outcome}"


class SendExpired(Event, frozen=True, gc=False, omit_defaults=True, tag="send_expired"):
    """Prefill side: the transfer is over without having been served: at least one rank gave up waiting.

    vLLM may free the request's blocks. It says nothing of why the decode engine did not ask.

    Attributes:
        expired_ranks: the ranks that gave up waiting.
    """

    about = About("send", "ends", turns="always")

    transfer: str
    request: str
    expired_ranks: Ranges = ()

    def sentence(self) -> str:
        ranks = words.rank_runs(self.expired_ranks)
        return f"send {self.transfer} of request {self.request} expired: {ranks} gave up waiting"


class RecvRegistered(Event, frozen=True, gc=False, omit_defaults=True, tag="recv_registered"):
    """Decode side: the scheduler told its workers to ask for a transfer. The request waits for remote KVs.

    With no `blocks`, nobody waits: the request ended before it ran, or its whole prompt was in the prefix cache, and
    the workers only ask the prefill engine to free what it holds.

    Attributes:
        blocks: the blocks that the prefill's workers will write into.
        ranks: the ranks of this engine that ask.
        prefill: the id of the prefill engine.
        bootstrap: the address at which that engine's workers can be found.
        peers: the prefill's workers that are expected to write, as an earlier transfer from there has shown. Empty when
            this is the first one: `peers_named` follows for each rank, and holds in either case.
        timeout_ns: after this time, in nanoseconds, the watchdog settles what no peer has settled: the search for the
            peers, the connection and the answer together. A peer that was asked for several requests has its time again
            with each that it answers for, because the prefill gives it to itself.
    """

    about = About("recv", "begins", uses="written")

    transfer: str
    request: str
    generation: int
    blocks: Blocks
    ranks: Ranges
    prefill: str = ""
    bootstrap: str = ""
    peers: tuple[str, ...] = ()
    timeout_ns: int = 0

    def sentence(self) -> str:
        request = words.request(self.request, self.generation)
        return (
            f"{request} waits for {self.transfer} from prefill engine {self.prefill or '(unknown)'}: "
            f"{words.these_blocks(self.blocks)}, {words.rank_runs(self.ranks)}"
        )


class PeersNamed(Event, frozen=True, gc=False, omit_defaults=True, tag="peers_named"):
    """Decode side: a rank has found the prefill's workers that will write into its blocks, and asks each of them.

    Attributes:
        peers: one name for each prefill rank and pipeline stage that this rank asks.
        address: where this rank listens; the prefill's own log has the same in `send_started`.
    """

    about = About("recv")

    transfer: str
    request: str
    rank: int
    peers: tuple[str, ...]
    address: str = ""

    def sentence(self) -> str:
        workers = "worker" if len(self.peers) == 1 else "workers"
        return f"rank {self.rank} asks {workers} {', '.join(self.peers)} of the prefill for {self.transfer}"


class PeerSettled(Event, frozen=True, gc=False, omit_defaults=True, tag="peer_settled"):
    """Decode side: a prefill worker writes into a rank's blocks no more. Recorded when the rank's report is here.

    Attributes:
        rank: the rank of this engine that had asked.
        peer: the prefill's worker. Empty: the rank could not even name its peers, so none of them writes.
        outcome: `ok` or `failed`.
        stage: where it failed: `BOOTSTRAP`, `REGISTRATION`, `SEND` (on the prefill's side), `RECV`, or `WATCHDOG`.
    """

    about = About("recv", turns="when_failed")

    transfer: str
    request: str
    rank: int
    peer: str = ""
    outcome: str = "ok"
    code: str = ""
    raw: str = ""
    stage: str = ""
    exception: str = ""

    def sentence(self) -> str:
        why = words.because(self.code, self.raw, self.exception, self.stage)
        peer = self.peer or "the search for peers"
        return f"{peer} settled {self.transfer} for rank {self.rank}: {self.outcome}{why}"


class RecvFailed(Event, frozen=True, gc=False, omit_defaults=True, tag="recv_failed"):
    """Decode side: a transfer failed: the first failure of any peer. Once for each, and never taken back.

    Other peers, and even the one that failed, may still be writing: the blocks stay held until `recv_settled`.

    Attributes:
        blocks: the blocks that may not be trusted: all that the transfer was to write.
    """

    about = About("recv", turns="always")

    transfer: str
    request: str
    rank: int
    peer: str = ""
    code: str = ""
    raw: str = ""
    stage: str = ""
    exception: str = ""
    blocks: Blocks = ()

    def sentence(self) -> str:
        why = words.because(self.code, self.raw, self.exception, self.stage)
        return f"recv {self.transfer} of request {self.request} failed on rank {self.rank}{why}"


class RecvSettled(Event, frozen=True, gc=False, omit_defaults=True, tag="recv_settled"):
    """Decode side: nobody writes into the transfer's blocks any more, and vLLM has the result.

    Attributes:
        outcome: `loaded`, `failed`, or `released` (no blocks: the prefill engine was only asked to free its own).
    """

    about = About("recv", "ends")

    transfer: str
    request: str
    outcome: str = "loaded"

    def sentence(self) -> str:
        return f"recv {self.transfer} of request {self.request} settled: {self.outcome}"


class RecvRecovered(Event, frozen=True, gc=False, omit_defaults=True, tag="recv_recovered"):
    """Decode side: what became of the request of a failed transfer. Recorded before the transfer settles.

    Attributes:
        action: `recomputed` (the engine computes the prompt itself), `failed` (`kv_load_failure_policy=fail`), or
            `gone` (the request had ended before the transfer did).
    """

    about = About("recv", turns="always")

    transfer: str
    request: str
    generation: int
    action: str

    def sentence(self) -> str:
        return f"after recv {self.transfer}, {words.request(self.request, self.generation)}: {self.action}"
