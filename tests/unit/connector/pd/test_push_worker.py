"""How a send ends on the prefill's side: vLLM's real worker, with a real decode's worker or one that only asks."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

from connector.pd import push_worker as pd_pushing
from connector.pd.connector import device_zero_without_accelerator
from connector.pd.metadata import LostReport, PeerReport, PushReport, SentReport
from connector.pd.push_worker import ENDING, SENT_BEFORE, TOO_LATE
from tests.unit.connector.pd.world import ENGINE, PATIENCE_S, Decode, Prefill, Status, pulls

BLOCKS = [[3, 4, 5]]


@pytest.fixture
def world() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def prefill(world: contextlib.ExitStack) -> Prefill:
    made = Prefill()
    world.callback(made.close)
    return made


@pytest.fixture
def decode(world: contextlib.ExitStack) -> Decode:
    made = Decode()
    world.callback(made.close)
    return made


class Asker:
    """A decode's socket without a decode: asks what it is told to, about memory that may not exist."""

    def __init__(self, prefill: Prefill) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{prefill.worker.side_channel_port}")
        self._like = prefill.worker

    def ask(self, requests: dict[str, list[list[int]]], **other: Any) -> None:
        """Ask for requests, with the layout of the prefill itself unless told otherwise."""
        worker = self._like
        fields: dict[str, Any] = {
            "remote_hostname": "127.0.0.1",
            "remote_port": 1,
            "remote_tp_size": 1,
            "remote_tp_rank": 0,
            "req_blocks": {request: (f"t-{request}", blocks) for request, blocks in requests.items()},
            "kv_caches_base_addr": worker.kv_caches_base_addr,
            "block_lens": worker.block_len_per_layer,
            "kv_block_lens": worker.kv_block_len_per_layer,
            "registered_layer_names": worker.registered_layer_names,
            "registered_layer_indices": worker.registered_layer_indices,
            "registered_group_indices": worker.registered_group_indices,
            **other,
        }
        self._socket.send(msgspec.msgpack.encode(upstream.MooncakeXferMetadata(**fields)))

    def answer(self) -> Any:
        """Wait for an answer and return it."""
        if not self._socket.poll(PATIENCE_S * 1000):
            raise TimeoutError("the prefill does not answer")
        return msgspec.msgpack.decode(self._socket.recv(), type=upstream.MooncakeXferResponse)

    def close(self) -> None:
        """Go away."""
        self._socket.close()
        self._context.term()


@pytest.fixture
def asker(world: contextlib.ExitStack, prefill: Prefill) -> Asker:
    made = Asker(prefill)
    world.callback(made.close)
    return made


def the_send(prefill: Prefill) -> tuple[str, int, str]:
    """Return outcome, pushes and code of the only send that is over."""
    prefill.until(lambda: prefill.sent, "the end of the send")
    prefill.step()
    assert prefill.sent == ["p-r"]
    (report,) = prefill.of(SentReport)
    assert (report.request, report.transfer) == ("p-r", "t-r")
    return report.outcome, report.pushes, str(report.failure.code)


def nothing_is_left(prefill: Prefill) -> None:
    assert not prefill.worker.reqs_need_send
    assert not prefill.worker._pushes


def test_blocks_arrive_where_the_decode_wants_them(prefill: Prefill, decode: Decode) -> None:
    (layer,) = prefill.caches
    prefill.caches[layer][3:6] = torch.arange(3, 6, dtype=torch.bfloat16)[:, None]
    prefill.send({"p-r": []})
    decode.pull(prefill.bootstrap, {"r": [[7, 8, 9]]}, ENGINE)
    prefill.send({"p-r": BLOCKS})
    decode.until(lambda: decode.finished)
    assert torch.equal(decode.caches[layer][7:10], prefill.caches[layer][3:6])
    assert the_send(prefill) == ("sent", 1, "")
    (push,) = prefill.of(PushReport)
    assert push.peer == "tp0 pp0"
    assert push.address == f"127.0.0.1:{decode.worker.rpc_port}"
    assert not decode.of(PeerReport)[0].failure.code
    nothing_is_left(prefill)


def test_a_decode_that_never_asks_lets_the_send_expire(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "0")
    prefill.send({"p-r": []})
    prefill.send({"p-r": BLOCKS})
    assert the_send(prefill) == ("expired", 0, "")
    nothing_is_left(prefill)


def test_a_decode_that_needs_nothing_releases_the_send(prefill: Prefill, decode: Decode) -> None:
    prefill.send({"p-r": []})
    prefill.send({"p-r": BLOCKS})
    decode.pull(prefill.bootstrap, {"r": []}, ENGINE)
    assert the_send(prefill) == ("released", 0, "")
    assert prefill.of(PushReport) == []
    nothing_is_left(prefill)


def test_a_push_to_a_decode_that_is_gone_fails_and_is_held_until_it_expires(
    prefill: Prefill, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill.send({"p-r": []})
    asker.ask({"r": [[7, 8, 9]]})
    prefill.send({"p-r": BLOCKS})
    response = asker.answer()
    assert response.err_reqs == ["r"]
    prefill.settled_steps()
    assert prefill.sent == []
    prefill.worker.reqs_need_send["t-r"].expire_time = 0
    assert the_send(prefill) == ("expired", 1, "TRANSFER_FAILED")
    nothing_is_left(prefill)


def test_a_transfer_engine_that_raises_is_a_failed_push(
    prefill: Prefill, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raises:
        """The real engine raises only when it is broken."""

        def batch_transfer_sync_write(self, *args: Any) -> int:
            raise OSError(5, "broken")

    real, prefill.worker.engine = prefill.worker.engine, Raises()
    try:
        prefill.send({"p-r": []})
        asker.ask({"r": [[7, 8, 9]]})
        prefill.send({"p-r": BLOCKS})
        response = asker.answer()
    finally:
        prefill.worker.engine = real
    assert response.err_reqs == ["r"]
    assert response.status == Status.FINISH
    assert prefill.worker.reqs_need_send["t-r"].sending == 0
    prefill.worker.reqs_need_send["t-r"].expire_time = 0
    outcome, pushes, _ = the_send(prefill)
    assert (outcome, pushes) == ("expired", 1)
    (report,) = prefill.of(SentReport)
    assert report.failure.exception == "OSError"


def test_blocks_stay_held_while_a_second_decode_is_pushed_the_same_transfer(
    world: contextlib.ExitStack, prefill: Prefill, asker: Asker
) -> None:
    class Held:
        """The real engine cannot be held in the middle of a push: here the second push waits until it may end."""

        def __init__(self) -> None:
            self._first = iter([True])
            self._second_began = threading.Event()
            self.may_end = threading.Event()

        def batch_transfer_sync_write(self, *args: Any) -> int:
            if next(self._first, False):
                self._second_began.wait(PATIENCE_S)
            else:
                self._second_began.set()
                self.may_end.wait(PATIENCE_S)
            return 0

    again = Asker(prefill)
    world.callback(again.close)
    held = Held()
    world.callback(held.may_end.set)
    real, prefill.worker.engine = prefill.worker.engine, held
    try:
        prefill.send({"p-r": []})
        for each in (asker, again):
            each.ask({"r": [[7, 8, 9]]})
        prefill.until(lambda: prefill.worker._asked["t-r"] == 2, "both questions")
        prefill.send({"p-r": BLOCKS})
        prefill.until(lambda: not prefill.worker.reqs_need_send, "the end of the first push")
        prefill.settled_steps()
        assert prefill.sent == []
        assert prefill.of(SentReport) == []
        held.may_end.set()
        assert the_send(prefill) == ("sent", 2, "")
    finally:
        prefill.worker.engine = real
    nothing_is_left(prefill)
    assert not prefill.worker._over


def test_blocks_of_a_send_that_is_over_are_not_read_for_a_question_that_was_held_up(
    world: contextlib.ExitStack, prefill: Prefill, asker: Asker
) -> None:
    class Held:
        """The real engine cannot be held in the middle of a push: here the first one waits until it may end."""

        def __init__(self) -> None:
            self.pushes = 0
            self.may_end = threading.Event()

        def batch_transfer_sync_write(self, *args: Any) -> int:
            self.pushes += 1
            if self.pushes == 1:
                self.may_end.wait(PATIENCE_S)
            return 0

    others = [Asker(prefill), Asker(prefill)]
    held = Held()
    for end in (held.may_end.set, *(other.close for other in others)):
        world.callback(end)
    real, prefill.worker.engine = prefill.worker.engine, held
    try:
        prefill.send({"p-r": [], "p-s": []})
        asker.ask({"r": [[7, 8, 9]], "s": [[10, 11, 12]]})
        prefill.until(lambda: prefill.worker._asked["t-s"] == 1, "the question for both")
        prefill.send({"p-r": BLOCKS})
        prefill.until(lambda: held.pushes == 1, "the push that holds the question up")
        prefill.send({"p-s": BLOCKS})
        others[0].ask({"s": [[10, 11, 12]]})
        assert others[0].answer().ok_reqs == ["s"]
        others[1].ask({"s": [[10, 11, 12]]})  # and there is an entry for the transfer again
        prefill.until(lambda: "t-s" in prefill.worker.reqs_need_send, "the question that comes too late")
        held.may_end.set()
        assert asker.answer().ok_reqs == ["r"]
        last = asker.answer()
        assert (last.ok_reqs, last.err_reqs, last.err_msg) == (None, ["s"], SENT_BEFORE)
        assert held.pushes == 2
    finally:
        prefill.worker.engine = real


def test_a_question_that_cannot_be_planned_does_not_hold_the_blocks_for_ever(prefill: Prefill, asker: Asker) -> None:
    prefill.send({"p-r": []})
    prefill.send({"p-r": BLOCKS})
    # No block of a group that the regions name: upstream raises after it has counted the send as being pushed.
    asker.ask({"r": [[7, 8, 9]]}, registered_group_indices=[5])
    asker.answer()
    prefill.worker.reqs_need_send["t-r"].expire_time = 0
    assert the_send(prefill)[0] == "expired"
    nothing_is_left(prefill)


def test_planning_that_raises_gives_the_count_of_pushes_back(
    prefill: Prefill, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**plan: Any) -> Any:
        raise AssertionError("the layouts do not fit")

    monkeypatch.setattr(prefill.worker, "_get_sender_transfer_plan", broken)
    prefill.send({"p-r": []})
    prefill.send({"p-r": BLOCKS})
    asker.ask({"r": [[7, 8, 9]]})
    assert asker.answer().status == Status.ERROR
    assert prefill.worker.reqs_need_send["t-r"].sending == 0
    prefill.worker.reqs_need_send["t-r"].expire_time = 0
    outcome, _, _ = the_send(prefill)
    assert outcome == "expired"
    assert prefill.of(SentReport)[0].failure.exception == "AssertionError"


def test_a_question_that_does_not_fit_is_answered_and_the_blocks_stay(prefill: Prefill, asker: Asker) -> None:
    prefill.send({"p-r": []})
    prefill.send({"p-r": BLOCKS})
    asker.ask({"r": [[7], [8]]})
    assert asker.answer().err_reqs == ["r"]
    assert prefill.worker.reqs_need_send["t-r"].sending == 0
    prefill.worker.reqs_need_send["t-r"].expire_time = 0
    assert the_send(prefill) == ("expired", 1, "VERSION_MISMATCH")


def test_a_send_for_a_transfer_that_was_withdrawn_in_the_same_step_expires_as_any_other(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "0")
    metadata = upstream.MooncakeConnectorMetadata()
    metadata.add_new_req("p-before", [], {"transfer_id": "t-r"}, load_remote_cache=False)
    prefill.step(metadata)
    prefill.send({"p-r": BLOCKS}, withdraw={"t-r"})
    assert the_send(prefill) == ("expired", 0, "")
    nothing_is_left(prefill)


def test_withdrawing_a_send_that_is_not_known_does_not_lose_the_others(prefill: Prefill) -> None:
    prefill.send({"p-r": [], "p-other": []})
    prefill.send({}, withdraw={"t-unknown", "t-other"})
    prefill.until(lambda: "t-other" not in prefill.worker.reqs_need_send)
    assert set(prefill.worker.reqs_need_send) == {"t-r"}
    assert set(prefill.worker._pushes) == {"t-r"}


def test_a_send_that_is_ready_without_having_run_is_held_all_the_same(prefill: Prefill, decode: Decode) -> None:
    prefill.send({"p-r": BLOCKS})
    decode.pull(prefill.bootstrap, {"r": [[7, 8, 9]]}, ENGINE)
    assert the_send(prefill) == ("sent", 1, "")


def test_a_transfer_that_nobody_prefills_is_forgotten_once_its_decode_was_told(
    prefill: Prefill, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "0")
    asker.ask({"r": [[7, 8, 9]]})
    assert asker.answer().err_reqs == ["r"]
    prefill.until(lambda: not prefill.worker.reqs_need_send, "the transfer to be forgotten")
    assert not prefill.worker._asked


def test_the_worker_ends_while_a_decode_waits(prefill: Prefill, asker: Asker) -> None:
    asker.ask({"r": [[7, 8, 9]]})
    prefill.until(lambda: prefill.worker.reqs_need_send)
    prefill.close()
    assert not prefill.worker.sender_loop.is_running()
    assert isinstance(prefill.worker.sender_loop, asyncio.AbstractEventLoop)


def test_a_question_is_as_old_as_its_arrival_when_its_turn_comes_late(
    world: contextlib.ExitStack, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "2")
    askers = [Asker(prefill) for _ in range(5)]  # and four are served at a time
    for number, asker in enumerate(askers):
        world.callback(asker.close)
        if number == 4:
            prefill.until(lambda: len(prefill.worker.reqs_need_send) == 4, "the first questions' turn")
            time.sleep(0.5)
        asker.ask({f"{number}": [[7, 8, 9]]})
    assert askers[0].answer().err_msg == TOO_LATE
    prefill.until(lambda: "t-4" in prefill.worker.reqs_need_send, "the last question's turn")
    time.sleep(1.0)
    prefill.send({"p-4": []})
    prefill.send({"p-4": BLOCKS})
    late = askers[4].answer()
    assert (late.ok_reqs, late.err_reqs, late.err_msg) == (None, ["4"], TOO_LATE)
    assert prefill.of(PushReport) == []


def test_a_question_whose_time_is_over_before_its_turn_does_not_wait(
    prefill: Prefill, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_pushing, "hold_timeout_s", lambda: -1.0)
    asker.ask({"r": [[7, 8, 9]]})
    assert asker.answer().err_msg == TOO_LATE
    assert not prefill.worker.reqs_need_send


class Slow:
    """The real engine over a slow network: a push begins, and goes on until it may end."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.pushes = 0
        self.began = threading.Event()
        self.may_end = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def batch_transfer_sync_write(self, *args: Any) -> int:
        self.pushes += 1
        self.began.set()
        self.may_end.wait(PATIENCE_S)
        return self._real.batch_transfer_sync_write(*args)


@pytest.fixture
def slow(world: contextlib.ExitStack, prefill: Prefill) -> Slow:
    made = Slow(prefill.worker.engine)
    prefill.worker.engine = made
    world.callback(made.may_end.set)
    return made


def a_push_begins(prefill: Prefill, decode: Decode, slow: Slow) -> str:
    """Let a decode ask for a send, wait until its push is under way, and return the layer that is pushed."""
    (layer,) = prefill.caches
    prefill.caches[layer][3:6] = 1.0
    prefill.send({"p-r": []})
    decode.pull(prefill.bootstrap, {"r": [[7, 8, 9]]}, ENGINE)
    prefill.send({"p-r": BLOCKS})
    prefill.until(slow.began.is_set, "the push")
    return layer


def test_a_worker_that_ends_pushes_to_the_end_and_answers_before_it_stops_listening(
    prefill: Prefill, decode: Decode, slow: Slow
) -> None:
    layer = a_push_begins(prefill, decode, slow)
    threading.Timer(0.5, slow.may_end.set).start()
    prefill.close()
    assert not prefill.worker.sender_loop.is_running()
    decode.until(lambda: decode.finished)
    assert decode.invalid == set()
    assert (decode.caches[layer][7:10] == 1.0).all()


def test_a_worker_that_has_no_time_for_its_last_push_listens_until_its_process_ends(
    prefill: Prefill, decode: Decode, asker: Asker, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_pushing, "LAST_PUSHES_S", 0.1)
    layer = a_push_begins(prefill, decode, slow)
    prefill.close()
    asker.ask({"r": [[7, 8, 9]]})
    refused = asker.answer()
    assert (refused.ok_reqs, refused.err_reqs, refused.err_msg) == (None, ["r"], ENDING)
    deadline = time.monotonic() + 1.0  # longer than it takes to find that nobody listens
    while time.monotonic() < deadline:
        decode.step()
        time.sleep(0.01)
    assert (decode.finished, decode.of(PeerReport), decode.of(LostReport)) == ([], [], [])
    slow.may_end.set()
    decode.until(lambda: decode.finished)
    assert decode.invalid == set()
    assert (decode.caches[layer][7:10] == 1.0).all()
    asyncio.run_coroutine_threadsafe(
        prefill.worker._end_listener(prefill.worker._listener), prefill.worker.sender_loop
    ).result()


def test_a_push_that_waits_for_a_thread_when_the_worker_ends_is_not_begun(
    world: contextlib.ExitStack, prefill: Prefill, slow: Slow
) -> None:
    askers = [Asker(prefill) for _ in range(3)]  # and two threads push
    for asker in askers:
        world.callback(asker.close)
    prefill.send({"p-r": []})
    prefill.send({"p-r": BLOCKS})
    for asker in askers:
        asker.ask({"r": [[7, 8, 9]]})
    prefill.until(
        lambda: slow.pushes == 2 and sum(meta.sending for meta in prefill.worker._pushed) >= 3,
        "two pushes, and one more",
    )
    threading.Timer(0.5, slow.may_end.set).start()
    prefill.close()
    assert all(asker.answer().err_reqs for asker in askers)
    assert slow.pushes == 2


def test_a_push_that_waits_for_a_thread_longer_than_its_decode_does_is_not_begun(
    world: contextlib.ExitStack, prefill: Prefill, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    askers = [Asker(prefill) for _ in range(3)]  # and two threads push
    prefill.send({"p-r": []})
    prefill.send({"p-r": BLOCKS})
    for asker in askers:
        world.callback(asker.close)
        asker.ask({"r": [[7, 8, 9]]})
    prefill.until(
        lambda: slow.pushes == 2 and sum(meta.sending for meta in prefill.worker._pushed) >= 3,
        "two pushes, and one more",
    )
    monkeypatch.setattr(pd_pushing, "hold_timeout_s", lambda: -1.0)
    slow.may_end.set()
    assert all(asker.answer().err_reqs for asker in askers)
    assert slow.pushes == 2


def test_once_a_question_was_too_late_no_part_of_it_is_pushed(
    world: contextlib.ExitStack, prefill: Prefill, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.may_end.set()
    asker = Asker(prefill)
    world.callback(asker.close)
    prefill.send({"p-r": [], "p-s": []})
    asker.ask({"r": [[7, 8, 9]], "s": [[10, 11, 12]]})
    prefill.until(lambda: prefill.worker._asked["t-s"], "the question")
    time.sleep(0.3)
    monkeypatch.setattr(pd_pushing, "hold_timeout_s", lambda: 0.25)
    prefill.send({"p-r": BLOCKS})
    assert asker.answer().err_reqs == ["r"]
    prefill.send({"p-s": [[6, 7, 8]]})  # at once: a time that began anew would not be over
    assert asker.answer().err_reqs == ["s"]
    assert slow.pushes == 0


def test_one_worker_may_be_both_sides(world: contextlib.ExitStack) -> None:
    both = Prefill(role="kv_both")
    world.callback(both.close)
    (layer,) = both.caches
    both.caches[layer][3:6] = torch.arange(3, 6, dtype=torch.bfloat16)[:, None]
    both.send({"p-r": []})
    both.send({"p-r": BLOCKS})
    both.step(pulls(both.bootstrap, {"r": [[7, 8, 9]]}))
    both.until(lambda: both.finished and both.sent)
    assert torch.equal(both.caches[layer][7:10], both.caches[layer][3:6])


def test_without_an_accelerator_torch_is_answered_for_only_while_the_worker_is_built() -> None:
    asked = torch.accelerator.current_device_index
    with device_zero_without_accelerator():
        assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_device_index is asked
    with pytest.raises(ZeroDivisionError), device_zero_without_accelerator():
        raise ZeroDivisionError
    assert torch.accelerator.current_device_index is asked
