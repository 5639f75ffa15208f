"""The way of evidence from workers to the engine process, over real ZeroMQ sockets: order, losses, goodbyes."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connector.runtime.evidence import (
    SEND_TIMEOUT_MS,
    EvidenceAddress,
    EvidenceReceiver,
    EvidenceSender,
    evidence_address,
)
from ledger import events as ev
from ledger.live.log import Log
from ledger.settings import parse
from ledger.state.apply import State
from tests.support.log_files import logged

WAIT_S = 20.0


def transfer(number: int, rank: int = 0) -> ev.TransferStarted:
    return ev.TransferStarted(0, 1, 1, f"rank {rank}", 3, transfer=f"{rank}-{number}", rank=rank, op="put", job=number)


class Host:
    """A log with a receiver, as an engine process has them."""

    def __init__(self, address: EvidenceAddress, ranks: int = 1) -> None:
        self.log = Log(State())
        self.gone = threading.Event()
        self.receiver = EvidenceReceiver(self.log, address, ranks, self.gone.set)

    def events(self) -> list[Any]:
        """Stop receiving and return what has come."""
        self.receiver.close(WAIT_S)
        return self.log.drain(1_000_000)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> EvidenceAddress:
    if request.param == "ipc":
        return EvidenceAddress(f"ipc://{tmp_path}/evidence", "this engine")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return EvidenceAddress(f"tcp://127.0.0.1:{probe.getsockname()[1]}", "this engine")


@pytest.fixture
def sender() -> Iterator[Callable[..., EvidenceSender]]:
    made: list[EvidenceSender] = []

    def make(address: EvidenceAddress, rank: int = 0, limit_events: int = 100_000) -> EvidenceSender:
        made.append(EvidenceSender(address, f"rank {rank}", limit_events))
        return made[-1]

    yield make
    for one in made:
        one.close(0.0)


def test_evidence_arrives_in_order_and_gets_its_place_in_the_log(
    address: EvidenceAddress, sender: Callable[..., EvidenceSender]
) -> None:
    host = Host(address)
    host.receiver.start()
    worker = sender(address)
    for number in range(2_000):
        worker.emit(transfer(number))
    worker.close(WAIT_S)
    assert host.gone.wait(WAIT_S)
    events = host.events()
    assert [event.job for event in events] == list(range(2_000))
    assert [event.seq for event in events] == list(range(1, 2_001))
    assert {event.source for event in events} == {"rank 0"}


def test_a_worker_may_start_before_the_engine_process_listens(
    address: EvidenceAddress, sender: Callable[..., EvidenceSender]
) -> None:
    worker = sender(address)
    host = Host(address)
    host.receiver.start()
    worker.emit(transfer(7))
    worker.close(WAIT_S)
    assert host.gone.wait(WAIT_S)
    assert [event.job for event in host.events() if isinstance(event, ev.TransferStarted)] == [7]


def test_a_worker_that_ends_waits_for_the_engine_process_longer_than_one_that_runs(
    address: EvidenceAddress, sender: Callable[..., EvidenceSender]
) -> None:
    worker = sender(address)
    ends = threading.Thread(target=worker.close, args=(WAIT_S,))
    worker.emit(transfer(7))
    ends.start()
    ends.join(2.5 * SEND_TIMEOUT_MS / 1000)
    assert ends.is_alive()
    host = Host(address)
    host.receiver.start()
    assert host.gone.wait(WAIT_S)
    ends.join(WAIT_S)
    host.events()


def test_what_a_full_queue_loses_is_counted_and_becomes_a_gap(
    address: EvidenceAddress, sender: Callable[..., EvidenceSender]
) -> None:
    worker = sender(address, limit_events=100)  # nobody listens yet, so the queue fills
    for number in range(1_000):
        worker.emit(transfer(number))
    host = Host(address)
    host.receiver.start()
    worker.close(WAIT_S)
    assert host.gone.wait(WAIT_S)
    events = host.events()
    lost = sum(event.dropped for event in events if isinstance(event, ev.Gap))
    assert lost >= 800
    assert lost + sum(isinstance(event, ev.TransferStarted) for event in events) == 1_000
    assert {event.origin for event in events if isinstance(event, ev.Gap)} == {"rank 0"}


def test_emitting_without_an_engine_process_neither_blocks_nor_raises(
    address: EvidenceAddress, sender: Callable[..., EvidenceSender]
) -> None:
    worker = sender(address, limit_events=10)
    for number in range(10_000):
        worker.emit(transfer(number))


def test_the_log_is_closed_only_when_every_worker_has_said_goodbye(
    address: EvidenceAddress, sender: Callable[..., EvidenceSender]
) -> None:
    host = Host(address, ranks=2)
    host.receiver.start()
    first, second = sender(address, 0), sender(address, 1)
    first.emit(transfer(1, 0))
    first.close(WAIT_S)
    assert not host.gone.is_set()
    second.close(WAIT_S)
    assert host.gone.wait(WAIT_S)
    host.receiver.close(WAIT_S)


def test_a_worker_in_the_engine_process_ends_only_after_the_log_was_closed(
    address: EvidenceAddress, sender: Callable[..., EvidenceSender]
) -> None:
    closed: list[str] = []

    def close_slowly() -> None:
        threading.Event().wait(0.3)
        closed.append("log")

    receiver = EvidenceReceiver(Log(State()), address, 1, close_slowly)
    receiver.start()
    sender(address).close(WAIT_S)
    assert closed == ["log"]
    receiver.close(WAIT_S)


def test_a_worker_that_ends_by_an_error_says_no_goodbye(
    address: EvidenceAddress, sender: Callable[..., EvidenceSender]
) -> None:
    host = Host(address)
    host.receiver.start()
    worker = sender(address)
    worker.emit(transfer(1))
    try:
        worker.emit(None.no_such_thing)  # type: ignore[attr-defined]
    except AttributeError:
        worker.close(WAIT_S)
    assert [event.job for event in host.events()] == [1]
    assert not host.gone.is_set()


def test_an_address_in_use_costs_the_evidence_and_not_the_engine() -> None:
    with socket.socket() as taken, logged() as said:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        host = Host(EvidenceAddress(f"tcp://127.0.0.1:{taken.getsockname()[1]}", "this engine"))
        host.receiver.start()
        (gap,) = host.events()
    assert isinstance(gap, ev.Gap)
    assert "evidence cannot be received" in gap.reason
    assert "Set evidence_address" in said.lines[0]


def test_a_message_that_cannot_be_read_is_a_gap(address: EvidenceAddress) -> None:
    import zmq

    host = Host(address)
    host.receiver.start()
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(address.place)
        stranger.send(b"not evidence")
    (gap,) = host.events()
    assert isinstance(gap, ev.Gap)
    assert "could not be read" in gap.reason


# --- whose evidence it is ---------------------------------------------------------------------------------------------


def test_what_another_engine_sends_here_is_not_taken_and_its_goodbye_does_not_count(
    address: EvidenceAddress, sender: Callable[..., EvidenceSender]
) -> None:
    host = Host(address)
    with logged() as said:
        host.receiver.start()
        stranger = sender(EvidenceAddress(address.place, "another engine's name"))
        stranger.emit(transfer(7))
        stranger.close(WAIT_S)
        own = sender(address)
        own.emit(transfer(1))
        deadline = time.monotonic() + WAIT_S
        while host.log.last_seq < 2:  # the gap, and what is ours
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not host.gone.is_set()
        sender(EvidenceAddress(address.place, "a third engine")).close(WAIT_S)
        own.close(WAIT_S)
        assert host.gone.wait(WAIT_S)
        events = host.events()
    (gap,) = [event for event in events if isinstance(event, ev.Gap)]
    assert (gap.origin, gap.dropped) == ("another engine", 0)
    assert gap.reason == f"evidence of another engine's name came to {address.place} and is not taken"
    assert [event.job for event in events if isinstance(event, ev.TransferStarted)] == [1]
    assert [line for line in said.lines if "evidence_address of its own" in line] == said.lines


def config(index: int = 0, engine_id: str = "e", nodes: int = 1, **extra: Any) -> tuple[Any, str, Any]:
    """Return what an engine, or a worker, derives its address from."""
    parallel = {"data_parallel_index": index, "nnodes_within_dp": nodes, "master_addr": "h", "master_port": 29501}
    both = {"parallel_config": SimpleNamespace(**parallel), "kv_transfer_config": SimpleNamespace(engine_id=engine_id)}
    return SimpleNamespace(**both), "KVLedgerStoreConnector", parse(extra)


def test_data_parallel_engines_have_ports_of_their_own() -> None:
    places = [evidence_address(*config(index, evidence_address="tcp://[::1]:5600")).place for index in range(3)]
    assert places == ["tcp://[::1]:5600", "tcp://[::1]:5601", "tcp://[::1]:5602"]
    assert evidence_address(*config(2, evidence_address="tcp://10.0.0.1")).place == "tcp://10.0.0.1"


@pytest.mark.parametrize("setting", [{}, {"evidence_address": "ipc:///run/kvledger/evidence"}])
def test_engines_have_socket_files_of_their_own(setting: dict[str, str]) -> None:
    places = {
        evidence_address(*config(index, engine_id, **setting)).place for index in range(2) for engine_id in ("a", "b")
    }
    assert len(places) == 4
    assert all(place.startswith(setting.get("evidence_address", "ipc://")) for place in places)


def test_an_engine_and_its_workers_on_other_nodes_have_one_name_though_vllm_draws_an_id_for_each_node() -> None:
    there, here = (evidence_address(*config(1, drawn, 2, evidence_address="tcp://h:1")) for drawn in ("drawn", "e_dp1"))
    assert there == here
    assert evidence_address(*config(0, "e", 2)).engine != here.engine
    assert evidence_address(*config(1, "one")).engine != evidence_address(*config(1, "other")).engine
