"""The pulls of a decode worker, the requests it makes to peers for them, and hooks that see what upstream does.

Upstream asks a peer in one task, in functions that do not pass on whom they ask. So the task carries it
(`PEER_REQUEST`), and the objects that upstream uses in the task (its ZeroMQ context, the sockets, the decoder of
answers) note there what happens: that the peer was asked, and with which status it answered. They decide nothing;
`connector.pd.pull_worker` does.

This file may know upstream's messages, ZeroMQ and asyncio.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import zmq
import zmq.asyncio
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeXferResponse, PullReqMeta

from connector.runtime.failures import Failure


def peer_name(tp_rank: int, pp_rank: int | str) -> str:
    """Return the name in events of a worker of the other engine: `tp<rank> pp<stage>`."""
    return f"tp{tp_rank} pp{pp_rank}"


class Pull:
    """One request's transfer on this rank.

    Attributes:
        peers: those that may still write; None until they are known.
        failed: it has failed, whatever else happens.
    """

    def __init__(self, meta: PullReqMeta) -> None:
        self.meta = meta
        self.request = meta.d_req_id
        self.transfer = meta.transfer_id
        self.blocks = meta.local_block_ids
        self.peers: set[str] | None = None
        self.failed = False
        self.started_ns = time.monotonic_ns()
        self.timer: asyncio.TimerHandle | None = None

    @property
    def waited_for(self) -> bool:
        """Whether a request waits for it. One without blocks only asks the prefill to free its own."""
        return any(self.blocks)


class PeerRequest:
    """One peer that is asked for one or more pulls, over one socket."""

    def __init__(self, engine: str, name: str, address: str, pulls: dict[str, Pull]) -> None:
        self.engine = engine
        self.name = name
        self.address = address
        self.pulls = pulls
        self.status: int | None = None
        """The status of the peer's last answer."""
        self.asked = False
        """The question was given to the socket, so the peer may have it."""
        self.lost: Failure | None = None
        """Why no more answers are taken from a peer that may go on to write."""
        self.void = False
        """Nobody is asked after all."""
        self.late = 0
        """Results that came late or twice."""
        self.connected = False
        self.task: asyncio.Task[Any] | None = None
        self.socket: Any = None
        self.watch: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.on_asked: Callable[[], None] = lambda: None
        """Called when a question is given to the socket: upstream may ask a peer once more."""

    def open_pulls(self) -> list[Pull]:
        """Return the pulls that this peer has not settled."""
        return [pull for pull in self.pulls.values() if pull.peers and self.name in pull.peers]


PEER_REQUEST: ContextVar[PeerRequest | None] = ContextVar("kvledger_peer_request", default=None)
"""Whom the running task asks. Upstream's functions do not pass it on, and run in the task that does."""


class ReplyDecoder:
    """Upstream's decoder of answers, which also notes the status for the peer that is being asked."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def decode(self, message: bytes) -> MooncakeXferResponse:
        """Decode, as the decoder does."""
        response: MooncakeXferResponse = self._decoder.decode(message)
        peer_request = PEER_REQUEST.get()
        if peer_request is not None:
            peer_request.status = response.status
        return response


class _PeerSocket(zmq.asyncio.Socket):
    """A socket that notes when a peer is asked."""

    def send(self, *args: Any, **kwargs: Any) -> Any:
        """Send, as the base class does."""
        note_asked()
        return super().send(*args, **kwargs)

    def close(self, linger: int | None = None) -> None:
        """Close, as the base class does, and stop the monitor first, while it has a reader."""
        _stop_monitor(self)
        super().close(linger)


def unwatch(socket: Any, monitor: Any) -> None:
    """Stop a socket's monitor, then close its reader. A second call does nothing.

    In this order: ZeroMQ waits until it can write an event, and what nobody reads can never be written. It is the
    context's only I/O thread that would wait, or the thread that closes sockets, and no peer be heard any more.
    """
    _stop_monitor(socket)
    monitor.close(linger=0)


def _stop_monitor(socket: Any) -> None:
    if not socket.closed:
        with contextlib.suppress(zmq.ContextTerminated):
            socket.disable_monitor()


def note_asked() -> None:
    """Note that the running task has asked its peer."""
    peer_request = PEER_REQUEST.get()
    if peer_request is not None:
        peer_request.asked = True
        peer_request.on_asked()


class WatchedContext(zmq.asyncio.Context):
    """A ZeroMQ context that hands each socket to a peer to `watch`, before it connects."""

    _socket_class = _PeerSocket
    watch: Callable[[PeerRequest, Any], None] | None = None
    """Told of each new socket to a peer, by whom it was made for and the socket."""

    def socket(self, socket_type: int, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return a new socket, as the base class does."""
        made: Any = super().socket(socket_type, *args, **kwargs)
        peer_request = PEER_REQUEST.get()
        if socket_type == zmq.PAIR:
            made.setsockopt(zmq.RCVHWM, 0)  # it reads a monitor, which must never have to wait until it is read
        elif peer_request is not None and socket_type == zmq.DEALER and self.watch is not None:
            try:
                self.watch(peer_request, made)
            except BaseException:
                made.close(linger=0)
                raise
        return made
