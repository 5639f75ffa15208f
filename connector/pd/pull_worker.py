"""The decode side of a worker: asks a prefill's workers as upstream does, and ends every pull, whatever happens.

    hook (upstream calls it)         when                                     what it adds
    -------------------------------  ---------------------------------------  ----------------------------------------
    _start_load_kv                   a step has transfers to ask for          opens each pull
    handle_new_engine_id             the prefill's workers are not known yet  one search for each bootstrap address, and
                                                                              an end for whatever raises
    _connect_to_prefiller_bootstrap  the bootstrap server is asked            keeps why it failed
    receive_kv                       the workers are known                    names the peers: PeersReport
    receive_kv_from_single_worker    a peer is asked                          watches the socket; settles what the peer
                                                                              leaves out
    process_pulling_result           a peer answers                           settles, for that peer: PeerReport
    _handle_failed_recv              upstream knows that something failed     settles, for that peer: PeerReport

A pull is one request's transfer on this rank. Each peer of a pull settles once; the pull is over when all have, and
only then does vLLM hear that the request has received. The first failure fails the pull, whatever other peers say
later.

When is it certain that a peer writes no more? When it has answered; when its process is gone, so that nobody listens
at its address any more; or when its own time limit and that of the transfer engine are over. That time begins when the
peer gets the question, so here it begins when the connection is made: ZeroMQ keeps a question until then. A connection
that merely broke fails the pull at once and frees nothing: the peer may not have noticed, and will push when it is
ready. The same holds for a connection that is never made, for an answer that cannot be read, and for any other
exception after the peer was asked. The socket is closed then, and takes back a question that it still holds.

All of this runs on upstream's receiver loop; only the outbox is shared with the worker's thread. This file may know
vLLM's worker, ZeroMQ and asyncio.
"""

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Callable, Collection, Generator
from types import CoroutineType
from typing import Any

import zmq
import zmq.asyncio
from huggingface_hub.utils import httpx  # upstream's own choice of client
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorWorker,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    PullReqMeta,
)
from vllm.utils.network_utils import split_zmq_path
from zmq.utils.monitor import recv_monitor_message

from connector.pd import failures
from connector.pd.metadata import (
    LateReport,
    LostReport,
    PeerReport,
    PeersReport,
    answer_timeout_s,
    bootstrap_timeout_s,
)
from connector.pd.outbox import Evidence, PDOutbox
from connector.pd.peers import PEER_REQUEST, PeerRequest, Pull, ReplyDecoder, WatchedContext, peer_name, unwatch
from connector.runtime.failure_log import FailureLog
from connector.runtime.failures import NO_FAILURE, Failure
from connector.runtime.requests import blocks_of_groups
from ledger import events as ev
from ledger.blocks import Blocks
from ledger.codes import Stage

logger = logging.getLogger("kvledger")

HEARTBEAT_INTERVAL_MS = 5_000
"""A peer whose host has vanished says nothing, not even goodbye; ZeroMQ asks it this often, outside of Python."""

HEARTBEAT_TIMEOUT_MS = 20_000

ANSWER_GRACE_S = 0.2
"""A peer may answer and end: an answer that came before the connection broke is taken first."""

PROBE_INTERVAL_S = 1.0
"""How often a peer whose answer is lost is looked for: as long as it is there, it may still write."""

PROBE_TIMEOUT_S = 2.0

MAX_LATE_RESULTS = 16
"""Results of one peer that came late or twice and are recorded, for each time that it is asked: a peer that repeats
itself for ever must not fill the log, nor the memory while the engine makes no step."""

MAX_BOOTSTRAP_ERRORS = 64
"""Addresses of which the last error is kept: they come from clients, so there may be any number of wrong ones."""


class PullingWorker(MooncakeConnectorWorker):
    """The decode side of `LedgerMooncakeWorker`."""

    outbox: PDOutbox
    evidence: Evidence
    failures: FailureLog
    rank: int
    logged: Callable[[str], str]
    private: bool
    group_ids: tuple[int, ...]

    def open_pulling(self) -> None:
        """Begin to track pulls. Called before the KV caches are registered, so before any socket is made."""
        self._pulls: dict[str, Pull] = {}
        self._peer_requests: list[PeerRequest] = []
        self._bootstrap_errors: dict[str, Exception] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._monitor_numbers = itertools.count()
        self._closing = False
        self.watch_sockets()
        self._xfer_resp_decoder: Any = ReplyDecoder(self._xfer_resp_decoder)

    def watch_sockets(self) -> None:
        """Replace upstream's ZeroMQ context, of which no socket was made yet, by one whose sockets are watched."""
        unused = self.async_zmq_ctx
        watched = WatchedContext()
        watched.watch = self.watch_socket
        # ZeroMQ starts its threads with a context's first socket, inside a call that holds the GIL: on a host whose
        # cores are all busy that takes long, and in the first transfer the whole worker would stand still.
        zmq.Context.shadow(watched.underlying).socket(zmq.PAIR).close(linger=0)
        self.async_zmq_ctx = watched
        unused.term()

    def stop_pulling(self) -> None:
        """End what is being asked, so that no socket is open when upstream closes its context."""
        self._closing = True
        if self.is_kv_producer or not self.receiver_loop.is_running():
            return
        ended = asyncio.run_coroutine_threadsafe(self._cancel_all(), self.receiver_loop)
        with contextlib.suppress(TimeoutError):
            ended.result(timeout=2.0)

    async def _cancel_all(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    # --- from the step to the peers ---------------------------------------------------------------------------------

    async def _start_load_kv(self, reqs_to_recv: dict[str, dict[str, PullReqMeta]]) -> None:
        for pull_metas in reqs_to_recv.values():
            for meta in pull_metas.values():
                self._open_pull(Pull(meta))
        try:
            await super()._start_load_kv(reqs_to_recv)
        except Exception as error:
            logger.exception("kvledger: a step's transfers could not be begun")
            for pull_metas in reqs_to_recv.values():
                self._settle_unnamed(pull_metas, failures.of_exception(error, Stage.REGISTRATION))

    def _open_pull(self, pull: Pull) -> None:
        self._pulls[pull.request] = pull
        pull.timer = self.receiver_loop.call_later(bootstrap_timeout_s(), self._search_overdue, pull)

    async def handle_new_engine_id(self, remote_engine_id: str, pull_metas: dict[str, PullReqMeta]) -> None:
        """Find the workers of a prefill engine and ask them. Upstream takes the first request's address for all."""
        by_address: dict[str, dict[str, PullReqMeta]] = {}
        for request_id, meta in pull_metas.items():
            by_address.setdefault(meta.remote_bootstrap_addr, {})[request_id] = meta
        await asyncio.gather(*(self._search(remote_engine_id, part) for part in by_address.values()))

    async def _search(self, remote_engine_id: str, pull_metas: dict[str, PullReqMeta]) -> None:
        with self._counted():
            try:
                await super().handle_new_engine_id(remote_engine_id, pull_metas)
            except Exception as error:
                logger.exception("kvledger: the search for prefill engine %s raised", remote_engine_id)
                self._settle_unnamed(pull_metas, failures.of_exception(error, Stage.BOOTSTRAP))

    async def _connect_to_prefiller_bootstrap(self, remote_bootstrap_addr: str) -> None:
        """Ask a bootstrap server with upstream, which logs why it failed and keeps nothing; so ask it first here."""
        self._bootstrap_errors.pop(remote_bootstrap_addr, None)
        try:
            async with httpx.AsyncClient(timeout=envs.VLLM_MOONCAKE_CONNECTOR_TIMEOUT) as client:
                response = await client.get(remote_bootstrap_addr + "/query")
                response.raise_for_status()
                response.json()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is why the server cannot be used
            self._bootstrap_errors[remote_bootstrap_addr] = error
            while len(self._bootstrap_errors) > MAX_BOOTSTRAP_ERRORS:
                del self._bootstrap_errors[next(iter(self._bootstrap_errors))]
        await super()._connect_to_prefiller_bootstrap(remote_bootstrap_addr)

    def receive_kv(self, remote_engine_id: str, pull_metas: dict[str, PullReqMeta]) -> None:
        """Ask every worker of the prefill engine that holds KV for this rank, and say who they are."""
        wanted = {request_id: meta for request_id, meta in pull_metas.items() if self._unnamed(meta) is not None}
        if not wanted:
            return
        self._peer_requests = []
        try:
            super().receive_kv(remote_engine_id, wanted)
        except Exception as error:
            # The engine has registered, but not all of its workers, or its shape does not fit this one's.
            logger.exception("kvledger: the workers of prefill engine %s cannot be asked", remote_engine_id)
            self._remote_agents.pop(remote_engine_id, None)
            self._settle_unnamed(wanted, failures.of_exception(error, Stage.REGISTRATION))
            return
        peer_requests, self._peer_requests = self._peer_requests, []
        if not peer_requests:
            self._settle_unnamed(wanted, failures.NO_PEERS)
            return
        names = self._peer_names(remote_engine_id)
        for peer_request in peer_requests:
            peer_request.engine = remote_engine_id
            peer_request.name = names.get(peer_request.address, peer_request.address)
        peers = tuple(peer_request.name for peer_request in peer_requests)
        if len(set(peers)) < len(peers):
            # Nobody could say whose answer is whose, and the ledger ends an engine over such reports.
            for peer_request in peer_requests:
                peer_request.void = True
            self._remote_agents.pop(remote_engine_id, None)
            self._settle_unnamed(wanted, failures.ONE_ADDRESS)
            return
        for pull in peer_requests[0].pulls.values():
            self._name_peers(pull, peers)

    def _peer_names(self, engine: str) -> dict[str, str]:
        """Return the name of each worker of a prefill engine, by its address."""
        stages = self._remote_agents[engine]
        return {
            address: peer_name(tp_rank, pp_rank)
            for tp_rank, by_stage in stages.items()
            for pp_rank, address in by_stage.items()
        }

    def _name_peers(self, pull: Pull, peers: tuple[str, ...]) -> None:
        pull.peers = set(peers)
        if pull.timer is not None:
            pull.timer.cancel()
        address = f"{self.hostname}:{self.rpc_port}"
        self.outbox.add(PeersReport(pull.request, pull.transfer, self.rank, peers, address))
        self.evidence.emit(
            ev.TransferStarted,
            transfer=self.logged(pull.transfer),
            op="pull",
            request=self.logged(pull.request),
            blocks=self._pull_blocks(pull),
        )

    def receive_kv_from_single_worker(
        self, worker_addr: str, pull_metas: dict[str, PullReqMeta]
    ) -> "CoroutineType[Any, Any, None]":
        """Return the coroutine that asks one peer.

        Not a coroutine function, so that `receive_kv` knows all peers before one is asked.
        """
        pulls = {request_id: self._pulls[request_id] for request_id in pull_metas}
        peer_request = PeerRequest("", worker_addr, worker_addr, pulls)
        self._peer_requests.append(peer_request)
        return self._ask(peer_request, pull_metas)

    async def _ask(self, peer_request: PeerRequest, pull_metas: dict[str, PullReqMeta]) -> None:
        if peer_request.void:
            return
        PEER_REQUEST.set(peer_request)
        with self._counted() as peer_request.task:
            self._restart_timer(peer_request)
            peer_request.on_asked = lambda: self._restart_timer(peer_request)
            try:
                await self._ask_upstream(peer_request, pull_metas)
                if self._closing:
                    return
                if peer_request.lost is not None:
                    await self._without_answer(peer_request, peer_request.lost)
                self._settle_rest(peer_request, failures.OMITTED)
            finally:
                if peer_request.timer is not None:
                    peer_request.timer.cancel()

    async def _ask_upstream(self, peer_request: PeerRequest, pull_metas: dict[str, PullReqMeta]) -> None:
        try:
            # A copy: upstream 0.33 takes out what is settled, and other peers are asked for the same pulls.
            await super().receive_kv_from_single_worker(peer_request.address, dict(pull_metas))
        except asyncio.CancelledError:
            if peer_request.lost is None:
                raise  # and else it is the socket that was closed, not this task that is to end
        except Exception as error:
            logger.exception("kvledger: asking %s of %s raised", peer_request.name, peer_request.engine)
            self._raised(peer_request, error)
        finally:
            if peer_request.socket is not None:
                peer_request.socket.close(linger=0)  # upstream leaves one open that it could not connect
            if peer_request.watch is not None:
                peer_request.watch.cancel()

    def _raised(self, peer_request: PeerRequest, error: BaseException) -> None:
        """Settle a peer after an exception if it cannot write any more; otherwise note that its answer is lost."""
        failure = failures.of_exception(error, Stage.RECV)
        if peer_request.asked:
            # We failed to read its answer, which does not keep it from writing.
            peer_request.lost = peer_request.lost or failure
        else:
            self._settle_rest(peer_request, failure)

    @contextlib.contextmanager
    def _counted(self) -> Generator[asyncio.Task[Any] | None]:
        """Hold on to the running task: the event loop does not, and a task that nobody holds may vanish."""
        task = asyncio.current_task()
        if task is not None:
            self._running.add(task)
        try:
            yield task
        finally:
            if task is not None:
                self._running.discard(task)

    # --- how a pull ends ----------------------------------------------------------------------------------------------

    def process_pulling_result(self, response: MooncakeXferResponse, pull_metas: dict[str, PullReqMeta]) -> None:
        """Settle what a peer answers for. Takes the place of upstream's bookkeeping."""
        peer_request = PEER_REQUEST.get()
        if peer_request is None:
            raise RuntimeError("an answer was processed that no peer was asked for")
        before = len(peer_request.open_pulls())
        failure = failures.of_line(response.err_msg, private=self.private)
        for request_id in response.err_reqs or ():
            self._answered(peer_request, request_id, failure)
            pull_metas.pop(request_id, None)
        for request_id in response.ok_reqs or ():
            self._answered(peer_request, request_id, NO_FAILURE)
            pull_metas.pop(request_id, None)
        if len(peer_request.open_pulls()) < before:
            self._restart_timer(peer_request)  # the prefill gives itself the same time again for what is left

    def _answered(self, peer_request: PeerRequest, request_id: str, failure: Failure) -> None:
        pull = peer_request.pulls.get(request_id)
        if pull is not None and pull.peers and peer_request.name in pull.peers:
            self._settle(pull, peer_request.name, failure)
            return
        peer_request.late += 1
        if peer_request.late > MAX_LATE_RESULTS:
            return
        why = (
            f"{peer_request.name} had already settled"
            if pull is not None
            else f"{peer_request.name} was not asked for it"
        )
        if peer_request.late == MAX_LATE_RESULTS:
            why += "; further ones of this peer are not recorded"
        transfer = pull.transfer if pull is not None else ""
        self.outbox.add(LateReport("recv", request_id, transfer, self.rank, why, str(failure.code)))

    def _handle_failed_recv(self, pull_metas: dict[str, PullReqMeta], req_ids: Collection[str], reason: str) -> None:
        """Settle what upstream knows to have failed. Takes the place of upstream's bookkeeping."""
        peer_request = PEER_REQUEST.get()
        if peer_request is None:
            address = next((meta.remote_bootstrap_addr for meta in pull_metas.values()), "")
            error = self._bootstrap_errors.get(address)
            found = failures.of_exception(error, Stage.BOOTSTRAP) if error is not None else failures.NOT_REGISTERED
            self._settle_unnamed({request_id: pull_metas[request_id] for request_id in req_ids}, found)
            return
        raised = sys.exception()  # upstream calls from within its `except`
        if raised is not None:
            self._raised(peer_request, raised)
            return
        finished = peer_request.status == MooncakeXferResponseStatus.FINISH
        failure = failures.OMITTED if finished else failures.of_line(reason, private=self.private)
        for pull in peer_request.open_pulls():
            if pull.request in req_ids:
                self._settle(pull, peer_request.name, failure)

    def _settle_unnamed(self, pull_metas: dict[str, PullReqMeta], failure: Failure) -> None:
        """Settle pulls whose peers are not known, so that nobody writes."""
        for meta in pull_metas.values():
            pull = self._unnamed(meta)
            if pull is not None:
                pull.peers = {""}
                self._settle(pull, "", failure)

    def _unnamed(self, meta: PullReqMeta) -> Pull | None:
        """Return the pull that upstream calls `meta` if its peers are still looked for.

        The watchdog may have ended it, and a request may have come back under its id since.
        """
        pull = self._pulls.get(meta.d_req_id)
        return pull if pull is not None and pull.meta is meta and pull.peers is None else None

    def _settle_rest(self, peer_request: PeerRequest, failure: Failure) -> None:
        for pull in peer_request.open_pulls():
            self._settle(pull, peer_request.name, failure)

    def _settle(self, pull: Pull, peer: str, failure: Failure) -> None:
        """Note that a peer writes no more. The last one ends the pull."""
        if pull.peers is None:
            raise RuntimeError(f"{peer} settles a pull whose peers are not known")
        pull.peers.discard(peer)
        self.outbox.add(PeerReport(pull.request, pull.transfer, self.rank, peer, failure))
        if failure:
            self._fail(pull, peer, failure)
        if pull.peers:
            return
        if pull.timer is not None:
            pull.timer.cancel()
        if self._pulls.get(pull.request) is pull:
            del self._pulls[pull.request]
        self.evidence.emit(
            ev.TransferFinished,
            transfer=self.logged(pull.transfer),
            op="pull",
            request=self.logged(pull.request),
            outcome="failed" if pull.failed else "ok",
            duration_ns=time.monotonic_ns() - pull.started_ns,
            **failure.cause_fields(),
        )
        if pull.waited_for:
            (self.outbox.finish_failed if pull.failed else self.outbox.finish)(pull.request)

    def _fail(self, pull: Pull, peer: str, failure: Failure) -> None:
        """Fail a pull, once: count it, say it in a line, and let vLLM know which blocks may not be trusted."""
        if pull.failed:
            return
        pull.failed = True
        self.xfer_stats.record_failed_recv()
        self.failures.report(
            failure.of_blocks(self._pull_blocks(pull)),
            request=self.logged(pull.request),
            transfer=self.logged(pull.transfer),
            rank=self.rank,
            peer=peer,
        )
        if pull.waited_for and not self._is_hma_required:
            # With several groups block numbers are ambiguous; there the request is named when the pull is over.
            self.outbox.invalidate(frozenset(block for group in pull.blocks for block in group))

    def _pull_blocks(self, pull: Pull) -> Blocks:
        return blocks_of_groups(zip(self.group_ids, pull.blocks, strict=True)) if pull.blocks else ()

    # --- the watchdog -----------------------------------------------------------------------------------------------

    def _search_overdue(self, pull: Pull) -> None:
        if pull.peers is None:
            pull.peers = {""}
            self._settle(pull, "", failures.NEVER_ASKED)

    def _restart_timer(self, peer_request: PeerRequest) -> None:
        if peer_request.timer is not None:
            peer_request.timer.cancel()
        peer_request.timer = self.receiver_loop.call_later(answer_timeout_s(), self._overdue, peer_request)

    def _overdue(self, peer_request: PeerRequest) -> None:
        self._remote_agents.pop(peer_request.engine, None)  # as for one that is lost
        self._settle_rest(peer_request, failures.OVERDUE)
        if peer_request.task is not None:
            peer_request.task.cancel()

    # --- the socket to a peer ---------------------------------------------------------------------------------------

    def watch_socket(self, peer_request: PeerRequest, socket: "zmq.asyncio.Socket") -> None:
        """Watch a socket to a peer from before it connects. ZeroMQ itself only ever tries to connect again."""
        if peer_request.watch is not None:
            peer_request.watch.cancel()
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED
        # ZeroMQ would name the monitor by the socket's file descriptor, which a socket that is closing still holds.
        name = f"inproc://kvledger-monitor-{next(self._monitor_numbers)}"
        # Without MONITOR_STOPPED: to stop a monitor that nobody reads would be to wait for ever.
        monitor = socket.get_monitor_socket(events, name)
        peer_request.socket = socket
        peer_request.connected = False
        peer_request.watch = self.receiver_loop.create_task(self._watch(peer_request, socket, monitor))
        self._running.add(peer_request.watch)
        peer_request.watch.add_done_callback(self._running.discard)
        # Not in the task alone: one that is cancelled before it has begun runs no line of it.
        peer_request.watch.add_done_callback(lambda _: unwatch(socket, monitor))

    async def _watch(
        self, peer_request: PeerRequest, socket: "zmq.asyncio.Socket", monitor: "zmq.asyncio.Socket"
    ) -> None:
        """Wait until the connection to a peer breaks, or none is made in time; then close it for good."""
        try:
            failure = await self._connection_lost(peer_request, monitor)
        except zmq.ZMQError:
            return  # the worker ends
        peer_request.lost = peer_request.lost or failure
        unwatch(socket, monitor)
        # Left open, it would connect again and deliver the question then. It also ends upstream's wait for an answer,
        # which no peer could give any more: it answers a connection. From here on it is looked for at its address.
        socket.close(linger=0)
        if not peer_request.connected:
            self._restart_timer(peer_request)  # it may have been delivered in this very moment

    async def _connection_lost(self, peer_request: PeerRequest, monitor: "zmq.asyncio.Socket") -> Failure:
        deadline = self.receiver_loop.time() + envs.VLLM_MOONCAKE_CONNECTOR_TIMEOUT
        while True:
            try:
                # Not `wait_for`: up to Python 3.11 it goes on when it is cancelled while its result is ready.
                async with asyncio.timeout_at(None if peer_request.connected else deadline):
                    message = await recv_monitor_message(monitor)
            except TimeoutError:
                return failures.NO_CONNECTION
            if message["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                peer_request.connected = True
                self._restart_timer(peer_request)
            elif peer_request.connected or await self._is_gone(peer_request):
                await asyncio.sleep(ANSWER_GRACE_S)
                return failures.BROKEN
            elif self.receiver_loop.time() >= deadline:
                return failures.NO_CONNECTION  # events may keep coming

    async def _without_answer(self, peer_request: PeerRequest, failure: Failure) -> None:
        """Fail the pulls of a peer that will not answer now, and settle them when it is certain that it is gone."""
        # It, or its successor, may have another address by now, so the next transfer asks the bootstrap server again.
        self._remote_agents.pop(peer_request.engine, None)
        while peer_request.open_pulls():
            if await self._is_gone(peer_request):
                self._settle_rest(peer_request, failures.GONE)
                return
            for pull in peer_request.open_pulls():
                if not pull.failed:
                    self.outbox.add(LostReport(pull.request, pull.transfer, self.rank, peer_request.name, failure))
                    self._fail(pull, peer_request.name, failure)
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _is_gone(self, peer_request: PeerRequest) -> bool:
        """Return whether nobody listens at a peer's address: its host answers, and refuses, twice in a row."""
        _, host, port = split_zmq_path(peer_request.address)
        for _ in range(2):
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                await asyncio.sleep(ANSWER_GRACE_S / 2)
            except OSError:  # unreachable or silent: it may be there and not be seen
                return False
            else:
                writer.close()
                return False
        return True
