"""What is between the engines: ZeroMQ sockets, bootstrap servers and Mooncake's transfer engine, in virtual time.

Each stands where upstream's worker uses the real one, and has the methods that upstream or the plugin calls. Messages
on a connection keep their order; a connection may break, a process may be gone; and what the plan says goes wrong does.
This file knows upstream's messages, and nothing of schedulers or ledgers.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq
from huggingface_hub.utils import httpx
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

from connector.pd import peers as pd_peers
from tools.sim.clock import STEP_NS, Clock
from tools.sim.pd import plan as pl
from tools.sim.pd.loop import VirtualLoop
from tools.sim.pd.memory import Machines
from tools.sim.plans import mix

Status = upstream.MooncakeXferResponseStatus

PIECES = 4
"""A push copies its blocks in so many pieces, with time between them."""

SAYS_NOTHING = upstream.MooncakeXferResponse(status=Status.CONTINUE)
CHATTER_NS = 500_000_000
CHATTER_TIMES = 40
"""Twenty seconds of it: upstream's socket, whose time begins again with each message, then comes after the watchdog."""

RETRY_NS = 100_000_000
"""ZeroMQ's own interval between two attempts to connect."""


def client_request(name: str) -> str:
    """Return the client's request that a request of an engine, or a transfer, is of."""
    return name.removeprefix("p-").removeprefix("t-").removesuffix("-again")


class Faults:
    """The faults of a plan, taken one by one.

    Attributes:
        active: faults happen.
        hits: how often each kind did.
    """

    def __init__(self, plan: pl.Plan, clock: Clock) -> None:
        self.active = True
        self.hits: dict[str, int] = {}
        self._clock = clock
        self._seed = plan.seed
        self._messages = 0
        self._counts: dict[tuple[str, str, int], int] = {}
        self._due: dict[tuple[str, str, int, int], Any] = {}
        for decision in plan.decisions:
            if isinstance(decision, pl.PushFault | pl.ReplyFault):
                call = "push" if isinstance(decision, pl.PushFault) else "reply"
                self._due[call, decision.request, decision.rank, decision.nth] = decision
        self._servers = [decision for decision in plan.decisions if isinstance(decision, pl.ServerFault)]

    def take(self, call: str, requests: Sequence[str], rank: int) -> Any:
        """Return the fault that strikes a call for some requests, None for none."""
        struck = None
        for name in requests:
            request = client_request(name)
            nth = self._counts.get((call, request, rank), 0)
            self._counts[call, request, rank] = nth + 1
            struck = struck or self._due.get((call, request, rank, nth))
        return struck if struck is not None and self.active else None

    def count(self, fault: str) -> None:
        """Count a fault that has happened."""
        self.hits[fault] = self.hits.get(fault, 0) + 1

    def of_server(self, prefill: int) -> str:
        """Return what is wrong with a bootstrap server now."""
        step = self._clock.now_ns // STEP_NS
        for fault in self._servers if self.active else ():
            if fault.prefill == prefill and fault.step <= step < fault.step + fault.steps:
                self.count(f"server: {fault.fault}")
                return fault.fault
        return ""

    def latency_ns(self) -> int:
        """Return how long a message takes: mostly below 1 ms, now and then some steps."""
        self._messages += 1
        roll = mix(self._seed, self._messages)
        return 50_000 + roll % 900_000 if roll >> 60 else (1 + roll % 4) * STEP_NS

    def push_ns(self, rank: int) -> int:
        """Return how long a push takes: from less than a step to some steps."""
        self._messages += 1
        roll = mix(self._seed, self._messages, rank)
        return (1 if roll & 3 else 1 + (roll >> 8) % 6) * (STEP_NS // 8 + (roll >> 20) % STEP_NS)


class Process(NamedTuple):
    """A worker, as the network sees it.

    Attributes:
        engine: index of its engine; the decode's is the last.
        host: where it is.
        rank: its rank.
        loop: the loop of the side that listens.
    """

    engine: int
    host: str
    rank: int
    loop: VirtualLoop


class Network:
    """Everything between the engines.

    Attributes:
        listeners: the sockets that listen, by address.
        targets: the engines that can be pushed to, by session: the index of the engine.
        dead: hosts whose processes were killed.
    """

    def __init__(self, clock: Clock, faults: Faults, machines: Machines) -> None:
        self.clock = clock
        self.faults = faults
        self.machines = machines
        self.listeners: dict[str, Router] = {}
        self.targets: dict[str, int] = {}
        self.dead: set[str] = set()
        self._bootstraps: dict[str, dict[str, Any]] = {}
        self._identities = 0

    def new_identity(self) -> bytes:
        """Return a name for a connection."""
        self._identities += 1
        return b"%d" % self._identities

    async def connect(self, host: str, port: int) -> None:
        """Return if somebody listens at an address.

        Raises:
            ConnectionRefusedError: the host answers that nobody does.
        """
        await asyncio.sleep(self.faults.latency_ns() / 1e9)
        if f"tcp://{host}:{port}" not in self.listeners:
            raise ConnectionRefusedError(111, "refused")

    def kill(self, host: str) -> None:
        """Let all processes of a host be gone."""
        self.dead.add(host)
        for address in [address for address in self.listeners if address.startswith(f"tcp://{host}:")]:
            self.listeners.pop(address).vanish()
        for session in [session for session in self.targets if session.startswith(f"{host}:")]:
            del self.targets[session]
        self._bootstraps.pop(f"http://{host}:80", None)

    # --- bootstrap servers ------------------------------------------------------------------------------------------

    async def post(self, url: str, payload: dict[str, Any]) -> httpx.Response:
        """Take a worker's registration."""
        workers = self._bootstraps.setdefault(url.removesuffix("/register"), {"engine_id": payload["engine_id"]})
        places = workers.setdefault("worker_addr", {})
        places.setdefault(str(payload["tp_rank"]), {})[str(payload["pp_rank"])] = payload["addr"]
        return httpx.Response(200, request=httpx.Request("POST", url))

    async def get(self, url: str, timeout_s: float) -> httpx.Response:
        """Answer who the workers of a prefill are."""
        request = httpx.Request("GET", url)
        await asyncio.sleep(self.faults.latency_ns() / 1e9)
        address = url.removesuffix("/query")
        workers = self._bootstraps.get(address)
        fault = self.faults.of_server(_prefill_at(address)) if workers is not None else "refuse"
        match fault:
            case "refuse":
                raise httpx.ConnectError("All connection attempts failed", request=request)
            case "hang":
                await asyncio.sleep(timeout_s)
                raise httpx.ReadTimeout("", request=request)
            case "status":
                return httpx.Response(500, request=request)
            case "not JSON":
                return httpx.Response(200, content=b"hello", request=request)
            case _:
                return httpx.Response(200, json={"0": workers}, request=request)

    def http_client(self) -> Any:
        """Return what stands for `httpx.AsyncClient`."""
        network = self

        class Client:
            def __init__(self, timeout: float) -> None:
                self._timeout_s = float(timeout)

            async def __aenter__(self) -> "Client":
                return self

            async def __aexit__(self, *_: object) -> None:
                """Nothing to close."""

            async def get(self, url: str) -> httpx.Response:
                return await network.get(url, self._timeout_s)

            async def post(self, url: str, json: dict[str, Any]) -> httpx.Response:
                return await network.post(url, json)

        return Client


def _prefill_at(address: str) -> int:
    return int(address.removeprefix("http://P").partition(":")[0])


# --- ZeroMQ -----------------------------------------------------------------------------------------------------------


class VirtualContext:
    """Stands for a worker's `zmq.asyncio.Context`, and hands sockets to the worker that watches them, as ours does."""

    def __init__(self, network: Network, process: Process, worker: Any) -> None:
        self._network = network
        self._process = process
        self._worker = worker

    def socket(self, socket_type: int) -> Any:
        """Return a new socket."""
        if socket_type == zmq.ROUTER:
            return Router(self._network, self._process)
        made = Dealer(self._network, self._process)
        peer_request = pd_peers.PEER_REQUEST.get()
        if peer_request is not None:
            self._worker.watch_socket(peer_request, made)
        return made

    def term(self) -> None:
        """Nothing to end."""


class _Inbox:
    """Messages that wait for one reader."""

    def __init__(self, process: Process) -> None:
        self._loop = process.loop
        self._messages: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, message: Any) -> None:
        self._messages.append(message)
        reader = self._reader
        if reader is not None and not reader.done() and not self._loop.dead:
            reader.set_result(None)

    async def get(self) -> Any:
        while not self._messages:
            self._reader = self._loop.create_future()
            await self._reader
        return self._messages.popleft()

    def close(self) -> None:
        """Cancel the reader, as `zmq.asyncio` does."""
        if self._reader is not None and not self._loop.dead:
            self._reader.cancel()


class Monitor:
    """Tells what happens to a socket, as ZeroMQ's monitor does, in its own format."""

    def __init__(self, process: Process) -> None:
        self._inbox = _Inbox(process)
        self._closed = False

    def tell(self, event: int) -> None:
        """Add an event.

        Raises:
            RuntimeError: it is closed. ZeroMQ's I/O thread would wait for ever, and no other peer be heard any more.
        """
        if self._closed:
            raise RuntimeError("a socket tells a monitor that nobody reads any more")
        self._inbox.put([struct.pack("=hi", int(event), 0), b""])

    async def recv_multipart(self, flags: int = 0) -> list[bytes]:
        """Wait for an event."""
        del flags
        return await self._inbox.get()

    def close(self, linger: int = 0) -> None:
        """Read no more."""
        del linger
        self._closed = True


class Dealer:
    """A decode worker's socket to one peer."""

    def __init__(self, network: Network, process: Process) -> None:
        self.process = process
        self.identity = b""
        self.next_ns = 0
        self._network = network
        self._inbox = _Inbox(process)
        self._unsent: list[bytes] = []
        self._router: Router | None = None
        self._monitor: Monitor | None = None
        self._address = ""
        self._timeout_s: float | None = None
        self.closed = False

    def setsockopt(self, option: int, value: int) -> None:
        """Take the timeout; nothing else matters here."""
        if option == zmq.RCVTIMEO:
            self._timeout_s = value / 1000

    def get_monitor_socket(self, events: int, name: str) -> Monitor:
        """Return what tells of this socket."""
        del events, name
        self._monitor = Monitor(self.process)
        return self._monitor

    def disable_monitor(self) -> None:
        """Tell the monitor no more."""
        self._monitor = None

    def connect(self, address: str) -> None:
        """Begin to connect."""
        self._address = address
        self._later(self._network.faults.latency_ns(), self._try)

    def _later(self, delay_ns: int, what: Callable[[], None]) -> None:
        def unless_closed() -> None:
            if not self.closed and not self.process.loop.dead:
                what()

        self._network.clock.at(self._network.clock.now_ns + delay_ns, unless_closed)

    def _try(self) -> None:
        router = self._network.listeners.get(self._address)
        if router is None:
            self._tell(zmq.Event.CONNECT_RETRIED)
            self._later(RETRY_NS, self._try)
            return
        self.identity = self._network.new_identity()
        self._router = router
        router.connected(self)
        self._tell(zmq.Event.HANDSHAKE_SUCCEEDED)
        for message in self._unsent:
            router.deliver(self, message)
        self._unsent.clear()

    def _tell(self, event: int) -> None:
        if self._monitor is not None:
            self._monitor.tell(event)

    def broken(self) -> None:
        """Lose the connection, and begin to connect again, as ZeroMQ does."""
        self._router = None
        if not self.closed:
            self._tell(zmq.Event.DISCONNECTED)
            self._later(RETRY_NS, self._try)

    async def send(self, message: bytes) -> None:
        """Send a message, now or when there is a connection."""
        pd_peers.note_asked()
        if self._router is None:
            self._unsent.append(message)
        else:
            self._router.deliver(self, message)

    def receive(self, message: bytes) -> None:
        """Take a message that has arrived."""
        if not self.closed:
            self._inbox.put(message)

    async def recv(self) -> bytes:
        """Wait for a message.

        Raises:
            zmq.Again: none came in time.
        """
        try:
            return await asyncio.wait_for(self._inbox.get(), self._timeout_s)
        except TimeoutError:
            raise zmq.Again from None

    def close(self, linger: int | None = None) -> None:
        """Disconnect."""
        del linger
        if self.closed:
            return
        self.closed = True
        self._inbox.close()
        self.disable_monitor()
        if self._router is not None:
            self._router.gone(self)

    def __enter__(self) -> "Dealer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Router:
    """A prefill worker's listening socket."""

    def __init__(self, network: Network, process: Process) -> None:
        self.process = process
        self._network = network
        self._inbox = _Inbox(process)
        self._connections: dict[bytes, Dealer] = {}

    def bind_to_random_port(self, address: str) -> int:
        """Listen, and return the port."""
        port = 1_000 + self.process.rank
        self._network.listeners[f"{address}:{port}"] = self
        return port

    def connected(self, dealer: Dealer) -> None:
        """Take a new connection."""
        self._connections[dealer.identity] = dealer

    def gone(self, dealer: Dealer) -> None:
        """Forget a connection."""
        self._connections.pop(dealer.identity, None)

    def vanish(self) -> None:
        """Be gone, as the socket of a process that is killed."""
        for dealer in list(self._connections.values()):
            dealer.broken()
        self._connections.clear()

    def deliver(self, dealer: Dealer, message: bytes) -> None:
        """Bring a question here."""
        clock, identity = self._network.clock, dealer.identity
        dealer.next_ns = max(dealer.next_ns, clock.now_ns) + self._network.faults.latency_ns()
        clock.at(dealer.next_ns, lambda: self._inbox.put([identity, message]))

    async def recv_multipart(self) -> list[bytes]:
        """Wait for a question."""
        return await self._inbox.get()

    async def send_multipart(self, parts: tuple[bytes, bytes]) -> None:
        """Answer a question; ZeroMQ drops what is for nobody."""
        identity, message = parts
        dealer = self._connections.get(identity)
        if dealer is None:
            return
        clock, faults = self._network.clock, self._network.faults
        for delay_ns, arriving in self._on_its_way(message):
            dealer.next_ns = max(dealer.next_ns, clock.now_ns) + faults.latency_ns() + delay_ns
            clock.at(dealer.next_ns, lambda arriving=arriving: self._arrive(dealer, identity, arriving))  # type: ignore[misc]

    def _arrive(self, dealer: Dealer, identity: bytes, message: bytes | None) -> None:
        if self._connections.get(identity) is not dealer:
            return
        if message is None:
            del self._connections[identity]
            dealer.broken()
        else:
            dealer.receive(message)

    def _on_its_way(self, message: bytes) -> list[tuple[int, bytes | None]]:
        """Return what arrives of a reply, each with its delay; None for the end of the connection."""
        response = msgspec.msgpack.decode(message, type=upstream.MooncakeXferResponse)
        requests = [*(response.ok_reqs or ()), *(response.err_reqs or ())]
        fault = self._network.faults.take("reply", requests, self.process.rank)
        if fault is None:
            return [(0, message)]
        struck = [name for name in requests if client_request(name) == fault.request]
        kind = fault.fault
        if kind == "error" and response.status != Status.FINISH:
            return [(0, message)]  # a peer that still means to push for others does not answer so
        self._network.faults.count(f"reply: {kind}")
        rest = [name for name in response.ok_reqs or () if name not in struck]
        changed: dict[str, dict[str, Any]] = {
            "omit": {
                "ok_reqs": rest or None,
                "err_reqs": [name for name in response.err_reqs or () if name not in struck] or None,
            },
            "error": {"status": Status.ERROR, "ok_reqs": None, "err_reqs": None, "err_msg": "Mooncake says no"},
            "twice": {"status": Status.CONTINUE},
            "takes back": {"status": Status.CONTINUE, "ok_reqs": rest or None, "err_reqs": struck, "err_msg": "not so"},
            "stranger": {"ok_reqs": [*(response.ok_reqs or ()), "stranger"]},
        }
        if kind in changed:
            other = msgspec.msgpack.encode(msgspec.structs.replace(response, **changed[kind]))
            return [(0, other), (0, message)] if kind in ("twice", "takes back") else [(0, other)]
        arrivals: dict[str, list[tuple[int, bytes | None]]] = {
            "late": [(fault.value * STEP_NS, message)],
            "lost": [],
            "break": [(0, None)],
            "unreadable": [(0, b"\xc1 no message")],
            "chatter": [(CHATTER_NS, msgspec.msgpack.encode(SAYS_NOTHING))] * CHATTER_TIMES,
        }
        return arrivals[kind]


# --- the transfer engine ----------------------------------------------------------------------------------------------


class TransferEngine:
    """Stands for Mooncake's: copies bytes from this worker's memory to another's, in virtual time."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Copy, and return 0 or a negative code."""
        network, clock = self._network, self._network.clock
        pushes = [push.transfer for push, _ in getattr(sources, "sends", ())]
        fault = network.faults.take("push", pushes, self._process.rank)
        kind = fault.fault if fault is not None else ""
        duration_ns = network.faults.push_ns(self._process.rank)
        if kind:
            network.faults.count(f"push: {kind}")
        if kind == "late":
            duration_ns += fault.value * STEP_NS
        done, count = 0, len(lengths)
        for piece in range(PIECES):
            clock.wait(duration_ns // PIECES)
            if kind == "hang" and piece == 1 and network.faults.active:
                clock.park()
            while self._process.loop.dead:
                clock.park()  # a process that was killed does nothing more, whoever lets it go on
            if session not in network.targets:
                return -1
            engine = network.targets[session]
            end = count * (piece + 1) // PIECES
            for index in range(done, end):
                network.machines.copy(
                    self._process.engine, engine, pushes, sources[index], targets[index], lengths[index]
                )
            done = end
            if kind == "raise" and piece == 1:
                raise OSError(5, "simulated")
        return -1 if kind == "code" else 0
