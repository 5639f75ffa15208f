"""Carries evidence from the workers straight to the engine process, over ZeroMQ, beside vLLM's own channels.

A worker's transfer threads hand events to `EvidenceSender.emit`, which never blocks: a full queue costs the event, and
the loss is counted and sent along, so that it becomes a `gap`. One thread of the sender owns the socket. In the engine
process one thread of the receiver owns the other end and appends to the log. This file knows ZeroMQ, events and the
log, and of vLLM only its configuration.
"""

import hashlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import zmq

from ledger import events as ev
from ledger.live.log import Log
from ledger.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("kvledger")

BATCH_EVENTS = 256
"""Events in one message.

Keeps a message below about 100 kB, so that decoding one holds the GIL for less than a millisecond.
"""

SEND_TIMEOUT_MS = 200
"""How long a batch may wait for an engine process that does not read, before it is counted as lost."""

POLL_MS = 100


class EvidenceBatch(msgspec.Struct, frozen=True, array_like=True):
    """One message.

    It names the engine and the sender, and carries the number of events lost since the last message, the events, and
    whether this is the last message.
    """

    engine: str
    origin: str
    lost: int
    events: tuple[ev.AnyEvent, ...]
    goodbye: bool = False


class EvidenceAddress(NamedTuple):
    """Where the evidence of an engine goes.

    Attributes:
        place: the ZeroMQ address that the engine process binds and its workers connect to.
        engine: the engine, in an operator's words. What another engine sends to this place is rejected.
    """

    place: str
    engine: str


def evidence_address(vllm_config: "VllmConfig", connector: str, settings: Settings) -> EvidenceAddress:
    """Return where the evidence of an engine goes.

    Both sides derive it from the configuration they share, so nothing has to be handed over. Engines may have the same
    settings: to a socket file's path each adds a name of its own, to a port its data-parallel index. The name is short,
    because such paths are limited to 107 bytes.
    """
    engine = _engine(vllm_config, connector)
    place = settings.evidence_address
    if not place:
        from vllm import envs  # noqa: PLC0415 - vLLM reads the environment on import, so as late as possible

        place = f"ipc://{Path(envs.VLLM_RPC_BASE_PATH) / 'kvledger'}"
    if place.startswith("ipc://"):
        return EvidenceAddress(f"{place}-{hashlib.sha256(engine.encode()).hexdigest()[:16]}", engine)
    host, _, port = place.rpartition(":")
    if port.isdecimal():
        place = f"{host}:{int(port) + vllm_config.parallel_config.data_parallel_index}"
    return EvidenceAddress(place, engine)


def _engine(vllm_config: "VllmConfig", connector: str) -> str:
    """Return what names an engine, in its own process and in all of its workers."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    name = str(transfer.engine_id) if transfer is not None else ""
    if parallel.nnodes_within_dp > 1:
        # The workers on its other nodes are started with a configuration of their own, in which vLLM draws another id.
        name = f"at {parallel.master_addr}:{parallel.master_port}"
    return f"{connector} of engine {name}, data-parallel index {parallel.data_parallel_index}"


_receivers: dict[EvidenceAddress, "EvidenceReceiver"] = {}
"""The receivers of this process by address: with one worker, vLLM runs it in the engine process itself."""


class EvidenceSender:
    """A worker's end. `emit` may be called from any thread.

    Args:
        address: where the engine process takes evidence.
        origin: this worker, as events name it: `rank <n>`.
        limit_events: events that may wait to be sent.
    """

    def __init__(self, address: EvidenceAddress, origin: str, limit_events: int) -> None:
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
        self._until_s = 0.0
        """Until when a worker that ends may wait for the engine process, by the monotonic clock."""
        self._goodbye = False
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

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits and a goodbye, and stop, within `timeout_s` seconds.

        A worker that ends because of an error says no goodbye: the engine process must not take it for an orderly end.
        A worker inside the engine process waits until its goodbye was heard and the log is closed, for as long again:
        what it does next, Mooncake's teardown, holds the GIL for seconds, in which vLLM kills the process.
        """
        failure = sys.exc_info()[1]
        self._goodbye = failure is None or isinstance(failure, SystemExit | KeyboardInterrupt)
        self._until_s = time.monotonic() + timeout_s
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        receiver = _receivers.get(self._address)
        if self._goodbye and receiver is not None:
            receiver.wait_for_goodbye(self.origin, timeout_s)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 500)
            socket.setsockopt(zmq.SNDHWM, 64)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # without a peer, sending must fail instead of filling memory
            socket.connect(self._address.place)
            while not self._stopping:
                self._wake.wait()
                self._wake.clear()
                while self._queue or self._lost:
                    if not self._send_batch(socket) and self._stopping and time.monotonic() >= self._until_s:
                        return
            if self._goodbye:
                self._send_batch(socket, goodbye=True)

    def _send_batch(self, socket: "zmq.Socket[bytes]", goodbye: bool = False) -> bool:
        """Send one message; return False, and count its events as lost, if the engine process does not take it.

        While the worker runs it has to do so soon, since further events wait. At its end nothing comes after.
        """
        queue = self._queue
        events = tuple([queue.popleft() for _ in range(min(BATCH_EVENTS, len(queue)))])
        with self._lost_lock:
            lost, self._lost = self._lost, 0
        wait_ms = max(int((self._until_s - time.monotonic()) * 1000), 0) if self._stopping else SEND_TIMEOUT_MS
        if socket.poll(wait_ms, zmq.POLLOUT):
            batch = EvidenceBatch(self._address.engine, self.origin, lost, events, goodbye)
            socket.send(msgspec.msgpack.encode(batch))
            return True
        with self._lost_lock:
            self._lost += lost + len(events)
        return False


class EvidenceReceiver:
    """The engine process's end: binds the address and appends what comes to the log.

    Args:
        log: the log that evidence is appended to.
        address: what to bind, and whose evidence to take.
        ranks: how many workers will send.
        on_goodbye: called once, on the receiver's thread, when all of them have said goodbye.
    """

    def __init__(self, log: Log, address: EvidenceAddress, ranks: int, on_goodbye: Callable[[], None]) -> None:
        self._log = log
        self._ranks = ranks
        self._on_goodbye = on_goodbye
        self._gone: set[str] = set()
        self._heard = threading.Condition()
        self._address = address
        self._refused = False
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._thread = threading.Thread(target=self._run, name="kvledger-evidence", daemon=True)

    def start(self) -> None:
        """Bind the address and begin to receive.

        If the address cannot be bound, evidence is lost and the engine runs on: one error line, and a gap in the log.
        """
        place = self._address.place
        try:
            self._socket.bind(place)
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._log.lose("workers", 0, f"evidence cannot be received at {place}: {error}")
            logger.error(  # noqa: TRY400 - one line, without a traceback
                "kvledger: evidence cannot be received at %s (%s). The ledger is kept, but calls to the store are not "
                "recorded. Set evidence_address to an address that is free.",
                place,
                error,
            )
            return
        self._thread.start()
        _receivers[self._address] = self

    def wait_for_goodbye(self, origin: str, timeout_s: float) -> None:
        """Return when a worker's goodbye was heard, and what the last one leads to is done, or after `timeout_s`."""
        with self._heard:
            self._heard.wait_for(lambda: origin in self._gone, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Take what has been sent, and stop within `timeout_s` seconds."""
        _receivers.pop(self._address, None)
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        if self._address.place.startswith("ipc://"):
            Path(self._address.place.removeprefix("ipc://")).unlink(missing_ok=True)

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
        if batch.engine != self._address.engine:
            self._refuse(batch)
            return
        if batch.lost:
            self._log.lose(batch.origin, batch.lost, "the engine process did not take the evidence in time")
        for event in batch.events:
            self._log.append_evidence(event)
        if batch.goodbye and batch.origin not in self._gone:
            if len(self._gone | {batch.origin}) == self._ranks:
                self._on_goodbye()
            with self._heard:
                self._gone.add(batch.origin)
                self._heard.notify_all()

    def _refuse(self, batch: EvidenceBatch) -> None:
        """Log once that another engine's evidence comes here. Appended to this log, it would show calls never made.

        Its goodbyes do not count either: this engine runs on.
        """
        if self._refused:
            return
        self._refused = True
        reason = f"evidence of {batch.engine} came to {self._address.place} and is not taken"
        self._log.lose("another engine", 0, reason)
        logger.error("kvledger: %s. Give each engine an evidence_address of its own.", reason)
