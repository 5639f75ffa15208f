"""Every way in which a transfer can fail on the decode side: the real worker, and peers that misbehave on purpose."""

import asyncio
import contextlib
import errno
import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from connector.pd import pull_worker as pd_pulling
from connector.pd.metadata import LateReport, LostReport, PeerReport, PeersReport
from connector.pd.peers import PEER_REQUEST, PeerRequest
from connector.pd.stats import FAILURES
from connector.runtime.failure_log import FailureLog
from tests.engine.machine import free_port
from tests.unit.connector.pd.world import Bootstrap, Decode, Peer, Status, pulls

BLOCKS = [[3, 4, 5]]
"""What request `r` loads; it has one group."""


@pytest.fixture
def world() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def decode(world: contextlib.ExitStack) -> Decode:
    made = Decode()
    world.callback(made.close)
    return made


@pytest.fixture
def peer(world: contextlib.ExitStack) -> Peer:
    made = Peer()
    world.callback(made.vanish)
    return made


@pytest.fixture
def bootstrap(world: contextlib.ExitStack, peer: Peer) -> Bootstrap:
    made = Bootstrap(tp0_pp0=peer.address)
    world.callback(made.close)
    return made


@pytest.fixture
def two_peers(world: contextlib.ExitStack) -> tuple[Bootstrap, Peer, Peer]:
    first, second = Peer(), Peer()
    bootstrap = Bootstrap(tp0_pp0=first.address, tp0_pp1=second.address)
    for close in (first.vanish, second.vanish, bootstrap.close):
        world.callback(close)
    return bootstrap, first, second


def failure_of(decode: Decode) -> tuple[str, str, str]:
    """Return code, stage and peer of the only settled peer."""
    (report,) = decode.of(PeerReport)
    return str(report.failure.code), str(report.failure.stage), report.peer


def fails(decode: Decode) -> None:
    """Step until request `r` has failed, and see that vLLM is told of it once, and of the blocks no later."""
    decode.until(lambda: decode.finished, "the end of the pull")
    decode.settled_steps()
    assert decode.finished == ["r"]
    assert decode.invalid == {3, 4, 5}
    assert decode.failed == []
    assert not decode.worker._pulls


def fails_and_is_held(decode: Decode, blocks: set[int], peer: Peer, exception: str) -> None:
    """See that pulls have failed over an exception, and end only when their peer's process does."""
    lost = decode.until_report(LostReport, len(decode.worker._pulls))
    assert {report.failure.exception for report in lost} == {exception}
    assert {str(report.failure.stage) for report in lost} == {"RECV"}
    decode.until(lambda: decode.invalid >= blocks, "the failed blocks")
    decode.settled_steps()
    assert decode.invalid == blocks
    assert decode.finished == []
    peer.vanish()
    decode.until(lambda: not decode.worker._pulls, "the end of the pulls")
    decode.settled_steps()
    assert sorted(decode.finished) == sorted(report.request for report in lost)
    assert {str(report.failure.code) for report in decode.of(PeerReport)} == {"PEER_UNREACHABLE"}


# --- every origin -----------------------------------------------------------------------------------------------------


def test_a_good_answer_finishes_the_pull(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    asked = peer.take()
    assert asked.req_blocks == {"r": ("t-r", BLOCKS)}
    peer.answer(Status.FINISH, ok=["r"])
    decode.until(lambda: decode.finished)
    (named,) = decode.of(PeersReport)
    assert (named.peers, named.transfer) == (("tp0 pp0",), "t-r")
    assert failure_of(decode) == ("", "", "tp0 pp0")
    assert decode.invalid == set()


def test_a_bootstrap_server_that_is_not_there_fails_the_pull(decode: Decode) -> None:
    decode.pull(f"http://127.0.0.1:{free_port()}", {"r": BLOCKS})
    fails(decode)
    assert failure_of(decode) == ("PEER_UNREACHABLE", "BOOTSTRAP", "")
    assert decode.of(PeerReport)[0].failure.exception == "ConnectError"


@pytest.mark.parametrize("address", ["", "127.0.0.1:1", "no such host", "http://"])
def test_an_address_that_is_none_fails_the_pull(decode: Decode, address: str) -> None:
    decode.pull(address, {"r": BLOCKS})
    fails(decode)
    code, stage, _ = failure_of(decode)
    assert (code, stage) == ("PEER_UNREACHABLE", "BOOTSTRAP")


@pytest.mark.parametrize(("status", "body"), [(404, None), (500, None), (200, b"not JSON")])
def test_a_server_that_is_no_bootstrap_server_fails_the_pull(
    decode: Decode, bootstrap: Bootstrap, status: int, body: bytes | None
) -> None:
    bootstrap.status, bootstrap.body = status, body
    decode.pull(bootstrap.address, {"r": BLOCKS})
    fails(decode)
    assert failure_of(decode) == ("PEER_UNREACHABLE", "BOOTSTRAP", "")


def test_a_bootstrap_server_that_does_not_answer_fails_the_pull(
    decode: Decode, bootstrap: Bootstrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "0.1")
    bootstrap.hang.clear()
    decode.pull(bootstrap.address, {"r": BLOCKS})
    fails(decode)
    assert failure_of(decode) == ("LOAD_TIMEOUT", "BOOTSTRAP", "")


def test_an_engine_that_the_bootstrap_server_does_not_know_fails_the_pull(decode: Decode, bootstrap: Bootstrap) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS}, engine="another")
    fails(decode)
    assert failure_of(decode) == ("PEER_NOT_READY", "REGISTRATION", "")


def test_a_prefill_of_which_a_rank_is_missing_fails_the_pull(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    bootstrap.workers = {"1": {"0": peer.address}}
    decode.pull(bootstrap.address, {"r": BLOCKS})
    fails(decode)
    code, stage, _ = failure_of(decode)
    assert (code, stage) == ("UNKNOWN", "REGISTRATION")
    assert decode.of(PeerReport)[0].failure.exception == "KeyError"


def test_an_error_reply_fails_the_pull(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.answer(Status.ERROR, line="Mooncake KV region length mismatch for homogeneous TP at region 0: ...")
    fails(decode)
    assert failure_of(decode) == ("VERSION_MISMATCH", "REGISTRATION", "tp0 pp0")


def test_an_error_reply_without_a_reason_is_unknown(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.answer(Status.ERROR)
    fails(decode)
    assert failure_of(decode) == ("UNKNOWN", "SEND", "tp0 pp0")


@pytest.mark.parametrize(
    ("line", "code", "stage"),
    [
        ("Timeout waiting for P side ready.", "PEER_NOT_READY", "SEND"),
        ("Mooncake transfer engine returned -1", "TRANSFER_FAILED", "SEND"),
        ("P num blocks less than D", "BLOCK_NOT_FOUND", "SEND"),
        ("KV group count mismatch", "VERSION_MISMATCH", "REGISTRATION"),
        ("KV group count mismatch; Mooncake transfer engine returned -1", "UNKNOWN", "SEND"),
        ("something new", "UNKNOWN", "SEND"),
    ],
)
def test_a_request_that_the_peer_could_not_serve_fails(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, line: str, code: str, stage: str
) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.answer(Status.FINISH, err=["r"], line=line)
    fails(decode)
    assert failure_of(decode) == (code, stage, "tp0 pp0")
    assert decode.of(PeerReport)[0].failure.raw == line


def test_a_request_that_the_peer_leaves_out_fails(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS, "other": [[7]]})
    peer.take()
    peer.answer(Status.FINISH, ok=["other"])
    decode.until(lambda: len(decode.finished) == 2)
    codes = {report.request: str(report.failure.code) for report in decode.of(PeerReport)}
    assert codes == {"r": "PEER_OMITTED", "other": ""}
    assert decode.invalid == {3, 4, 5}


def test_an_answer_that_cannot_be_read_fails_the_pull_and_frees_nothing_while_the_peer_lives(
    decode: Decode, bootstrap: Bootstrap, peer: Peer
) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS, "other": [[7]]})
    peer.take()
    peer.say(b"\xc1 no message")
    fails_and_is_held(decode, {3, 4, 5, 7}, peer, "DecodeError")


def test_an_exception_after_the_question_fails_the_pull_and_frees_nothing_while_the_peer_lives(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(decode.worker, "process_pulling_result", broken)
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.answer(Status.FINISH, ok=["r"])
    fails_and_is_held(decode, {3, 4, 5}, peer, "LookupError")


def test_an_exception_before_the_question_settles_at_once(
    decode: Decode, bootstrap: Bootstrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap.add("tp0_pp0", "tcp://not an address")
    decode.pull(bootstrap.address, {"r": BLOCKS})
    fails(decode)
    assert failure_of(decode)[1:] == ("RECV", "tp0 pp0")


def test_the_watchdog_ends_the_wait_for_a_peer_whose_answer_could_not_be_read(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_pulling, "answer_timeout_s", lambda: 0.5)
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.say(b"\xc1 no message")
    fails(decode)
    assert failure_of(decode) == ("LOAD_TIMEOUT", "WATCHDOG", "tp0 pp0")
    (lost,) = decode.of(LostReport)
    assert lost.failure.exception == "DecodeError"


def test_a_layout_that_the_peer_has_lost_twice_fails_the_pull(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    if not hasattr(Status, "LAYOUT_MISS"):
        # vLLM 0.32 has no such status, so it is an answer that cannot be read.
        peer.say(b"\x81\xa6status\x03")
        fails_and_is_held(decode, {3, 4, 5}, peer, "ValidationError")
        return
    peer.answer(Status.LAYOUT_MISS, line="Mooncake KV layout 0x1 from 127.0.0.1:1 is not cached.")
    fails(decode)
    assert failure_of(decode) == ("PEER_NOT_READY", "REGISTRATION", "tp0 pp0")


def test_a_socket_that_times_out_fails_the_pull(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Upstream's socket gives the peer a minute more than the prefill gives itself.
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "-59")
    monkeypatch.setattr(pd_pulling, "answer_timeout_s", lambda: 2.0)
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    fails(decode)
    (lost,) = decode.of(LostReport)
    assert (str(lost.failure.code), str(lost.failure.stage), lost.failure.exception) == (
        "LOAD_TIMEOUT",
        "RECV",
        "Again",
    )
    # Its time began when the connection was there, which upstream's socket does not count from.
    assert failure_of(decode) == ("LOAD_TIMEOUT", "WATCHDOG", "tp0 pp0")


def test_a_question_that_found_no_connection_in_time_is_never_delivered(
    decode: Decode, bootstrap: Bootstrap, world: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "0.3")
    started: list[None] = []
    monkeypatch.setattr(pd_pulling, "answer_timeout_s", lambda: started.append(None) or 3.0)
    silent = world.enter_context(socket.create_server(("127.0.0.1", 0)))  # the network is slow to come up
    bootstrap.add("tp0_pp0", f"tcp://127.0.0.1:{silent.getsockname()[1]}")
    decode.pull(bootstrap.address, {"r": BLOCKS})
    (lost,) = decode.until_report(LostReport)
    assert str(lost.failure.code) == "PEER_UNREACHABLE"
    assert len(started) == 3  # from the question, and again from when it was taken back
    connection, _ = silent.accept()
    with connection, connection.makefile("rb") as said:
        assert b"t-r" not in said.read()  # to its end: the socket is closed
    decode.settled_steps()
    assert decode.finished == []
    fails(decode)
    assert failure_of(decode) == ("LOAD_TIMEOUT", "WATCHDOG", "tp0 pp0")


def test_a_peer_whose_process_is_gone_settles_at_once(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.vanish()
    fails(decode)
    assert failure_of(decode) == ("PEER_UNREACHABLE", "RECV", "tp0 pp0")


def test_a_peer_that_was_never_there_settles_at_once(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    peer.vanish()
    decode.pull(bootstrap.address, {"r": BLOCKS})
    fails(decode)
    assert failure_of(decode) == ("PEER_UNREACHABLE", "RECV", "tp0 pp0")


def test_a_new_prefill_is_looked_for_once_the_old_one_is_gone(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, world: contextlib.ExitStack
) -> None:
    peer.vanish()
    decode.pull(bootstrap.address, {"r": BLOCKS})
    fails(decode)
    successor = Peer()
    world.callback(successor.vanish)
    bootstrap.add("tp0_pp0", successor.address)
    decode.pull(bootstrap.address, {"again": BLOCKS})
    successor.take()
    successor.answer(Status.FINISH, ok=["again"])
    decode.until(lambda: "again" in decode.finished)


# --- blocks are given back only when nobody may write into them -------------------------------------------------------


def test_a_connection_that_breaks_fails_the_pull_and_frees_nothing_while_the_peer_lives(
    decode: Decode, bootstrap: Bootstrap, peer: Peer
) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.break_connection()
    (lost,) = decode.until_report(LostReport)
    assert (str(lost.failure.code), str(lost.failure.stage), lost.peer) == ("PEER_UNREACHABLE", "RECV", "tp0 pp0")
    decode.until(lambda: decode.invalid)
    decode.settled_steps()
    assert decode.invalid == {3, 4, 5}
    assert decode.finished == []
    peer.vanish()
    decode.until(lambda: decode.finished)
    assert failure_of(decode) == ("PEER_UNREACHABLE", "RECV", "tp0 pp0")


def test_an_answer_that_came_before_the_connection_broke_counts(
    decode: Decode, bootstrap: Bootstrap, peer: Peer
) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.answer(Status.FINISH, ok=["r"])
    decode.until(lambda: decode.finished)
    peer.vanish()
    decode.settled_steps()
    assert failure_of(decode) == ("", "", "tp0 pp0")


def test_a_failed_pull_is_held_until_its_other_peer_has_settled(
    decode: Decode, two_peers: tuple[Bootstrap, Peer, Peer]
) -> None:
    bootstrap, first, second = two_peers
    decode.pull(bootstrap.address, {"r": BLOCKS})
    first.take()
    second.take()
    assert decode.until_report(PeersReport)[0].peers == ("tp0 pp0", "tp0 pp1")
    first.answer(Status.FINISH, err=["r"], line="Mooncake transfer engine returned -1")
    decode.until(lambda: decode.invalid, "the failed blocks")
    decode.settled_steps()
    assert decode.finished == []
    second.answer(Status.FINISH, ok=["r"])
    decode.until(lambda: decode.finished)
    decode.settled_steps()
    assert decode.finished == ["r"]
    assert [(report.peer, str(report.failure.code)) for report in decode.of(PeerReport)] == [
        ("tp0 pp0", "TRANSFER_FAILED"),
        ("tp0 pp1", ""),
    ]


def test_a_pull_that_both_peers_fail_is_counted_once(decode: Decode, two_peers: tuple[Bootstrap, Peer, Peer]) -> None:
    bootstrap, first, second = two_peers
    decode.pull(bootstrap.address, {"r": BLOCKS})
    for peer in (first, second):
        peer.take()
        peer.answer(Status.ERROR, line="no")
    fails(decode)
    assert len(decode.of(PeerReport)) == 2
    assert len(decode.worker.xfer_stats.data["num_failed_recvs"]) == 1


def test_a_pull_is_finished_when_both_peers_have_sent(decode: Decode, two_peers: tuple[Bootstrap, Peer, Peer]) -> None:
    bootstrap, first, second = two_peers
    decode.pull(bootstrap.address, {"r": BLOCKS})
    first.take()
    second.take()
    first.answer(Status.FINISH, ok=["r"])
    decode.until_report(PeerReport)
    decode.settled_steps()
    assert decode.finished == []
    second.answer(Status.FINISH, ok=["r"])
    decode.until(lambda: decode.finished)
    assert decode.invalid == set()


# --- one peer keeps no other from being heard -------------------------------------------------------------------------


def others_are_heard(decode: Decode, world: contextlib.ExitStack) -> None:
    """See that a pull from another prefill ends well."""
    other = Peer()
    bootstrap = Bootstrap("other-engine", tp0_pp0=other.address)
    for close in (other.vanish, bootstrap.close):
        world.callback(close)
    decode.pull(bootstrap.address, {"healthy": [[7, 8]]}, engine="other-engine")
    other.take()
    other.answer(Status.FINISH, ok=["healthy"])
    decode.until(lambda: "healthy" in decode.finished)
    assert decode.invalid.isdisjoint({7, 8})


def test_others_are_heard_beside_an_address_that_takes_every_connection_and_closes_it(
    decode: Decode, bootstrap: Bootstrap, world: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a proxy does whose prefill is gone. ZeroMQ tries again ten times a second; here as often as it can.
    monkeypatch.setenv("VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "3")
    watch = decode.worker.watch_socket

    def watch_hurried(peer_request: PeerRequest, dealer: "zmq.asyncio.Socket") -> None:
        dealer.setsockopt(zmq.RECONNECT_IVL, 1)
        watch(peer_request, dealer)

    monkeypatch.setattr(decode.worker.async_zmq_ctx, "watch", watch_hurried)
    taken: list[None] = []

    class Closing(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            taken.append(None)

    proxy = world.enter_context(socketserver.TCPServer(("127.0.0.1", 0), Closing))
    threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
    world.callback(proxy.shutdown)
    bootstrap.add("tp0_pp0", f"tcp://127.0.0.1:{proxy.server_address[1]}")
    decode.pull(bootstrap.address, {"r": BLOCKS})
    decode.until(lambda: len(taken) > 100, "100 connections")
    others_are_heard(decode, world)
    (lost,) = decode.until_report(LostReport)
    assert str(lost.failure.code) == "PEER_UNREACHABLE"
    decode.settled_steps()
    before = len(taken)
    time.sleep(1.0)
    assert len(taken) <= before + 5  # those that look whether anybody is there
    assert decode.finished == ["healthy"]


def test_others_are_heard_when_a_connection_breaks_whose_peer_has_answered_for_all_and_is_not_done(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, world: contextlib.ExitStack
) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.answer(Status.CONTINUE, ok=["r"])
    decode.until(lambda: decode.finished)
    for _ in range(2):  # the socket is still open, and connects again
        peer.break_connection()
        time.sleep(pd_pulling.ANSWER_GRACE_S + 0.2)
    others_are_heard(decode, world)


def test_sockets_are_given_back_however_soon_their_watch_ends(decode: Decode, peer: Peer) -> None:
    # ZeroMQ closes a socket in a thread of its own; on a busy machine that is long after its owner has closed it.
    async def ask(number: int) -> None:
        peer_request = PeerRequest("engine", f"peer {number}", peer.address, {})
        PEER_REQUEST.set(peer_request)
        with decode.worker.async_zmq_ctx.socket(zmq.DEALER) as socket:
            socket.connect(peer.address)
            if number % 10:
                time.sleep(0.002)  # there is a connection when the loop goes on
            for _ in range(number % 10):
                await asyncio.sleep(0)
        assert peer_request.watch is not None
        peer_request.watch.cancel()

    def open_files() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = open_files()
    for number in range(200):
        asyncio.run_coroutine_threadsafe(ask(number), decode.worker.receiver_loop).result(20)
    deadline = time.monotonic() + 5
    while open_files() > before + 20:
        assert time.monotonic() < deadline, f"{open_files() - before} files stay open"
        time.sleep(0.05)


def test_a_socket_that_cannot_be_watched_fails_the_pull_and_is_closed(
    decode: Decode, bootstrap: Bootstrap, world: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets: list[zmq.asyncio.Socket] = []
    watch = decode.worker.watch_socket

    def watch_without_files(peer_request: PeerRequest, socket: "zmq.asyncio.Socket") -> None:
        sockets.append(socket)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zmq.asyncio.Context, "socket", too_many)
            watch(peer_request, socket)

    def too_many(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(decode.worker.async_zmq_ctx, "watch", watch_without_files)
    decode.pull(bootstrap.address, {"r": BLOCKS})
    fails(decode)
    assert failure_of(decode) == ("UNKNOWN", "RECV", "tp0 pp0")
    assert [socket.closed for socket in sockets] == [True]
    monkeypatch.undo()
    others_are_heard(decode, world)


# --- late and twice ---------------------------------------------------------------------------------------------------


def test_a_result_that_comes_twice_changes_nothing(decode: Decode, two_peers: tuple[Bootstrap, Peer, Peer]) -> None:
    bootstrap, first, second = two_peers
    decode.pull(bootstrap.address, {"r": BLOCKS, "other": [[7]]})
    first.take()
    second.take()
    first.answer(Status.CONTINUE, ok=["r"])
    first.answer(Status.CONTINUE, ok=["r"])
    first.answer(Status.CONTINUE, err=["r"], line="no")
    late = decode.until_report(LateReport, 2)
    assert {(report.request, report.transfer, report.why) for report in late} == {
        ("r", "t-r", "tp0 pp0 had already settled")
    }
    second.answer(Status.FINISH, ok=["r", "other"])
    first.answer(Status.FINISH, ok=["other"])
    decode.until(lambda: len(decode.finished) == 2)
    assert decode.invalid == set()
    assert not any(report.failure.code for report in decode.of(PeerReport))


def test_a_success_after_a_failure_does_not_revive_the_pull(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS, "other": [[7]]})
    peer.take()
    peer.answer(Status.CONTINUE, err=["r"], line="no")
    peer.answer(Status.CONTINUE, ok=["r"])
    decode.until_report(LateReport)
    peer.answer(Status.FINISH, ok=["other"])
    decode.until(lambda: len(decode.finished) == 2)
    assert decode.invalid == {3, 4, 5}


def test_an_answer_for_a_request_that_was_not_asked_for_is_noted(
    decode: Decode, bootstrap: Bootstrap, peer: Peer
) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.answer(Status.CONTINUE, ok=["stranger"])
    (late,) = decode.until_report(LateReport)
    assert (late.request, late.why) == ("stranger", "tp0 pp0 was not asked for it")
    peer.answer(Status.FINISH, ok=["r"])
    decode.until(lambda: decode.finished)
    assert decode.finished == ["r"]


def test_a_peer_that_repeats_itself_does_not_fill_the_log(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    for number in range(pd_pulling.MAX_LATE_RESULTS + 10):
        peer.answer(Status.CONTINUE, ok=[f"stranger {number}"])
    peer.answer(Status.FINISH, ok=["r"])
    decode.until(lambda: decode.finished)
    late = decode.of(LateReport)
    assert len(late) == pd_pulling.MAX_LATE_RESULTS
    assert [report for report in late if report.why.endswith("further ones of this peer are not recorded")] == late[-1:]


# --- the watchdog -----------------------------------------------------------------------------------------------------


def test_the_watchdog_settles_what_no_origin_reports(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_pulling, "answer_timeout_s", lambda: 0.2)
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    fails(decode)
    assert failure_of(decode) == ("LOAD_TIMEOUT", "WATCHDOG", "tp0 pp0")


def test_the_watchdog_needs_no_engine_steps(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_pulling, "answer_timeout_s", lambda: 0.2)
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    deadline = time.monotonic() + 20
    while decode.worker._pulls:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert decode.finished == []
    fails(decode)


def test_the_watchdog_ends_a_search_that_does_not_end(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_pulling, "bootstrap_timeout_s", lambda: 0.2)
    bootstrap.hang.clear()
    decode.pull(bootstrap.address, {"r": BLOCKS})
    fails(decode)
    assert failure_of(decode) == ("LOAD_TIMEOUT", "WATCHDOG", "")
    # What is found afterwards is not asked: the blocks are another's by now.
    monkeypatch.undo()
    bootstrap.hang.set()
    decode.pull(bootstrap.address, {"next": [[8]]})
    assert set(peer.take().req_blocks) == {"next"}


def test_a_search_that_ends_after_the_watchdog_asks_nothing_for_a_request_that_came_back_under_its_id(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_pulling, "bootstrap_timeout_s", lambda: 0.2)
    bootstrap.hang.clear()
    decode.pull(bootstrap.address, {"r": BLOCKS})
    fails(decode)
    monkeypatch.undo()
    decode.pull(bootstrap.address, {"r": [[8, 9]]})
    bootstrap.hang.set()
    assert peer.take().req_blocks == {"r": ("t-r", [[8, 9]])}
    peer.answer(Status.FINISH, ok=["r"])
    decode.until(lambda: decode.finished == ["r", "r"])
    assert len(decode.of(PeersReport)) == 1
    assert decode.invalid == {3, 4, 5}


def test_the_peers_time_begins_when_it_is_connected_and_again_with_each_answer_that_settles_something(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[None] = []
    monkeypatch.setattr(pd_pulling, "answer_timeout_s", lambda: started.append(None) or 60.0)
    decode.pull(bootstrap.address, {"r": BLOCKS, "other": [[7]]})
    peer.take()
    decode.until(lambda: len(started) == 3, "the peer's time to begin")  # the search, the question, the connection
    peer.answer(Status.CONTINUE, ok=["other"])
    peer.answer(Status.CONTINUE, ok=["other"])
    decode.until_report(LateReport)
    assert len(started) == 4
    peer.answer(Status.FINISH, ok=["r"])
    decode.until(lambda: len(decode.finished) == 2)


def test_an_answer_after_the_watchdog_changes_nothing(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_pulling, "answer_timeout_s", lambda: 0.2)
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    fails(decode)
    peer.answer(Status.FINISH, ok=["r"])
    decode.settled_steps()
    assert decode.finished == ["r"]
    assert decode.invalid == {3, 4, 5}


# --- what vLLM is told, and when --------------------------------------------------------------------------------------


def test_a_pull_without_blocks_only_releases_and_is_never_reported(
    decode: Decode, bootstrap: Bootstrap, peer: Peer
) -> None:
    decode.pull(bootstrap.address, {"gone": []})
    peer.take()
    peer.answer(Status.FINISH, ok=["gone"])
    decode.until_report(PeerReport)
    decode.settled_steps()
    assert decode.finished == []
    assert decode.invalid == set()


def test_a_pull_without_blocks_that_fails_is_never_reported(decode: Decode) -> None:
    decode.pull(f"http://127.0.0.1:{free_port()}", {"gone": []})
    decode.until_report(PeerReport)
    decode.settled_steps()
    assert decode.finished == []
    assert decode.invalid == set()


def test_workers_that_are_named_at_one_address_are_not_asked(
    decode: Decode, peer: Peer, world: contextlib.ExitStack
) -> None:
    bootstrap = Bootstrap(tp0_pp0=peer.address, tp1_pp0=peer.address)
    world.callback(bootstrap.close)
    decode.pull(bootstrap.address, {"r": BLOCKS})
    fails(decode)
    assert failure_of(decode) == ("PEER_NOT_READY", "REGISTRATION", "")
    assert not decode.of(PeersReport)


def test_a_prefill_that_moved_is_looked_for_again(
    decode: Decode, bootstrap: Bootstrap, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        bootstrap.workers = {"0": {"0": f"tcp://127.0.0.1:{silent.getsockname()[1]}"}}
        decode.pull(bootstrap.address, {"q": BLOCKS})
        decode.until_report(LostReport)
        bootstrap.workers = {"0": {"0": peer.address}}
        decode.pull(bootstrap.address, {"r": [[6, 7]]})
        peer.take()
        peer.answer(Status.FINISH, ok=["r"])
        decode.until(lambda: "r" in decode.finished, "the second pull")


def test_the_books_hear_of_a_failure_a_step_before_vllm_does(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.answer(Status.ERROR, line="no")
    fails(decode)
    reported = max(step for step, what in decode.order if what == "report")
    (invalid,) = [step for step, what in decode.order if what == "invalid"]
    (finished,) = [step for step, what in decode.order if what == "finished"]
    assert reported < invalid <= finished


def test_the_books_hear_of_a_success_no_later_than_vllm_does(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.answer(Status.FINISH, ok=["r"])
    decode.until(lambda: decode.finished)
    reported = max(step for step, what in decode.order if what == "report")
    (finished,) = [step for step, what in decode.order if what == "finished"]
    assert reported <= finished


def test_with_several_groups_the_request_is_reported_and_no_blocks(
    world: contextlib.ExitStack, bootstrap: Bootstrap, peer: Peer
) -> None:
    decode = Decode(groups=2)
    world.callback(decode.close)
    decode.pull(bootstrap.address, {"r": [[3, 4], [3]]})
    peer.take()
    peer.answer(Status.ERROR, line="no")
    decode.until(lambda: decode.finished)
    decode.settled_steps()
    assert decode.finished == ["r"]
    assert decode.failed == ["r"]
    assert decode.invalid == set()


def test_one_wrong_address_does_not_fail_the_requests_beside_it(
    decode: Decode, bootstrap: Bootstrap, peer: Peer
) -> None:
    both = pulls(f"http://127.0.0.1:{free_port()}", {"r": BLOCKS})
    both = pulls(bootstrap.address, {"right": [[7]]}, metadata=both)
    decode.step(both)
    for _ in range(2):  # the engine is known by then, so the other request is served, too
        (request,) = peer.take().req_blocks
        peer.answer(Status.FINISH, ok=[request])
    decode.until(lambda: len(decode.finished) == 2)
    assert not any(report.failure.code for report in decode.of(PeerReport))


def test_a_peer_line_with_a_request_id_is_not_kept_when_ids_are_hashed(
    world: contextlib.ExitStack, bootstrap: Bootstrap, peer: Peer
) -> None:
    decode = Decode(hash_request_ids=True)
    world.callback(decode.close)
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    peer.answer(Status.ERROR, line="'secret-request-id'")
    fails(decode)
    assert "secret" not in decode.of(PeerReport)[0].failure.raw


def test_the_worker_ends_while_peers_are_asked(decode: Decode, bootstrap: Bootstrap, peer: Peer) -> None:
    decode.pull(bootstrap.address, {"r": BLOCKS})
    peer.take()
    decode.close()
    assert decode.of(PeerReport) == []


def test_a_failure_is_one_line_of_json_and_one_count_by_code_and_stage(
    decode: Decode, two_peers: tuple[Bootstrap, Peer, Peer]
) -> None:
    lines: list[str] = []
    decode.worker.failures = FailureLog("decode-engine", lines.append)
    bootstrap, first, second = two_peers
    decode.pull(bootstrap.address, {"r": BLOCKS})
    for peer in (first, second):
        peer.take()
        peer.answer(Status.FINISH, err=["r"], line="Mooncake transfer engine returned -1")
    fails(decode)
    (line,) = [json.loads(line) for line in lines]
    assert (line["code"], line["stage"], line["transfer"]) == ("TRANSFER_FAILED", "SEND", "t-r")
    assert (line["request"], line["failed_blocks"], line["engine"]) == ("r", 3, "decode-engine")
    assert line["peer"] in ("tp0 pp0", "tp0 pp1")
    stats = decode.connector.get_kv_connector_stats()
    assert stats.data[FAILURES] == [{"code": "TRANSFER_FAILED", "stage": "SEND", "blocks": 3}]
    assert stats.reduce()["Num failed TRANSFER_FAILED"] == 1
    assert decode.connector.get_kv_connector_stats() is None
