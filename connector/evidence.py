"""The way of evidence: from the workers straight to the engine process, over ZeroMQ, beside vLLM's own channels.

A worker's transfer threads hand events to `EvidenceSender.emit`, which never blocks: a full queue costs the event, and the loss is
counted and sent along, so that it becomes a `gap`. One thread of the sender owns the socket. In the engine process one thread
of the receiver owns the other end and appends to the log. This file knows ZeroMQ, events and the log, and of vLLM only its
configuration.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from ledger import events as ev
from ledger.log import Log
from ledger.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("kvledger")

BATCH_EVENTS = 256
"""Events in one message: keeps a message below about 100 kB, so that decoding one holds the GIL for less than a millisecond."""

SEND_TIMEOUT_MS = 200
"""How long a batch may wait for an engine process that does not read, before it is counted as lost."""

POLL_MS = 100


class EvidenceBatch(msgspec.Struct, frozen=True, array_like=True):
    """One message: who sends, how many events were lost since the last one, and the events."""

    origin: str
    lost: int
    events: tuple[ev.AnyEvent, ...]


def evidence_address(vllm_config: "VllmConfig", connector: str, settings: Settings) -> str:
    """Return the ZeroMQ address that the engine process binds and its workers connect to.

    Both sides derive it from the configuration they share, so nothing has to be handed over. Socket files have short
    names, because their paths are limited to 107 bytes.
    """
    if settings.evidence_address:
        return settings.evidence_address
    import vllm.envs as envs  # noqa: PLC0415 - vLLM reads the environment on import, so as late as possible

    transfer = vllm_config.kv_transfer_config
    engine = transfer.engine_id if transfer is not None else ""
    name = f"{connector} {engine} {vllm_config.parallel_config.data_parallel_index}"
    return f"ipc://{Path(envs.VLLM_RPC_BASE_PATH) / ('kvledger-' + hashlib.sha256(name.encode()).hexdigest()[:16])}"


class EvidenceSender:
    """A worker's end. `emit` may be called from any thread.

    Args:
        address: the engine process's address.
        origin: this worker, as it stands in events: `rank <n>`.
        limit_events: events that may wait to be sent.
    """

    def __init__(self, address: str, origin: str, limit_events: int) -> None:
        self.origin = origin
        self.step = 0
        """The engine step that events are stamped with."""
        self._address = address
        self._limit_events = limit_events
        self._queue: deque[ev.AnyEvent] = deque()
        self._wake = threading.Event()
        self._lost = 0
        self._lost_lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvledger-evidence", daemon=True)
        self._thread.start()

    def emit(self, event: ev.AnyEvent) -> None:
        """Send an event when possible. Never blocks and never raises; a full queue is counted as a loss."""
        if len(self._queue) >= self._limit_events:
            with self._lost_lock:
                self._lost += 1
            return
        self._queue.append(event)
        self._wake.set()

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what waits and stop, within `timeout_s` seconds."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 500)
            socket.setsockopt(zmq.SNDHWM, 64)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # without a peer, sending must fail instead of filling memory
            socket.connect(self._address)
            while True:
                self._wake.wait()
                self._wake.clear()
                while self._queue or self._lost:
                    self._send_batch(socket)
                if self._stopping:
                    return

    def _send_batch(self, socket: "zmq.Socket[bytes]") -> None:
        queue = self._queue
        events = tuple([queue.popleft() for _ in range(min(BATCH_EVENTS, len(queue)))])
        with self._lost_lock:
            lost, self._lost = self._lost, 0
        message = msgspec.msgpack.encode(EvidenceBatch(self.origin, lost, events))
        if socket.poll(SEND_TIMEOUT_MS, zmq.POLLOUT):
            socket.send(message)
            return
        with self._lost_lock:
            self._lost += lost + len(events)
        if not self._stopping:
            self._wake.wait(SEND_TIMEOUT_MS / 1000)
        else:
            with self._lost_lock:
                self._lost = 0
            queue.clear()


class EvidenceReceiver:
    """The engine process's end: binds the address and appends what comes to the log.

    Args:
        log: the log that evidence is appended to.
        address: what to bind.
    """

    def __init__(self, log: Log, address: str) -> None:
        self._log = log
        self._address = address
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._thread = threading.Thread(target=self._run, name="kvledger-evidence", daemon=True)

    def start(self) -> None:
        """Bind the address and begin to receive.

        An address that cannot be bound costs the evidence, not the engine: it is said once and recorded as a gap.
        """
        try:
            self._socket.bind(self._address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._log.lose("workers", 0, f"evidence cannot be received at {self._address}: {error}")
            logger.error(
                "kvledger: evidence cannot be received at %s (%s). The books are kept, but calls to the store are not "
                "recorded. Set evidence_address to an address that is free.", self._address, error,
            )
            return
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Take what has been sent, and stop within `timeout_s` seconds."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._address.startswith("ipc://"):
            Path(self._address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(EvidenceBatch)
        deadline: float | None = None
        with self._context, self._socket as socket:
            while True:
                if socket.poll(POLL_MS):
                    self._take(decoder, socket.recv())
                elif self._stopping.is_set():
                    return
                if self._stopping.is_set():
                    deadline = deadline or time.monotonic() + 2.0
                    if time.monotonic() > deadline:
                        return

    def _take(self, decoder: "msgspec.msgpack.Decoder[EvidenceBatch]", message: bytes) -> None:
        try:
            batch = decoder.decode(message)
        except msgspec.DecodeError as error:
            self._log.lose("workers", 1, f"a message of a worker could not be read: {error}")
            return
        if batch.lost:
            self._log.lose(batch.origin, batch.lost, "the engine process did not take the evidence in time")
        for event in batch.events:
            self._log.append_evidence(event)
