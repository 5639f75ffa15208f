"""The contract of the P/D connector's scheduler half, on vLLM's real scheduler and block pool in a plain process.

The workers are played by the test: it makes the reports that theirs would make.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.pd.metadata import (
    LateReport,
    LostReport,
    PDWorkerMetadata,
    PeerReport,
    PeersReport,
    PushReport,
    Report,
    SentReport,
)
from connector.runtime.failures import NO_FAILURE, Failure
from ledger import events as ev
from ledger.blocks import numbers
from ledger.errors import InvariantViolation
from ledger.state.apply import State
from tools.plain_scheduler import BLOCK_SIZE, PlainScheduler

NAME = "KVLedgerMooncakeConnector"
PROMPT = list(range(3, 3 + 3 * BLOCK_SIZE))
FAILED = Failure("TRANSFER_FAILED", "-1", "SEND")
LOST = Failure("PEER_UNREACHABLE", "the connection broke", "RECV")


class Engine(PlainScheduler):
    """A scheduler with our connector, and the events that it has appended."""

    def __init__(self, role: str, **options: Any) -> None:
        super().__init__(NAME, kv_role=role, **options)
        self.events: list[ev.Event] = []
        log = self.connector.ledger.log
        append = log.append

        def keep(kind: type[ev.Event], **fields: Any) -> ev.Event:
            self.events.append(append(kind, **fields))
            return self.events[-1]

        log.append = keep
        self.free = self.pool.get_num_free_blocks()

    @property
    def state(self) -> State:
        return self.connector.ledger.state

    def kinds(self) -> list[str]:
        """What was recorded, in order, without digests."""
        return [ev.kind_of(event) for event in self.events if not isinstance(event, ev.Checkpoint)]

    def of(self, kind: type[ev.Event]) -> list[Any]:
        """The events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def told(
        self,
        *reports: Report,
        recved: set[str] = frozenset(),
        sent: set[str] = frozenset(),
        **answer: Any,  # type: ignore[assignment]  # pyright: ignore[reportArgumentType]
    ) -> Any:
        """Make a step that the workers end with these reports, and with these requests finished on all ranks."""
        output = self.schedule()
        self.update(
            output,
            kv_connector_worker_meta=PDWorkerMetadata(list(reports), set(recved), set(sent)),
            finished_recving=set(recved) or None,
            finished_sending=set(sent) or None,
            **answer,
        )
        return output

    def all_is_back(self) -> None:
        """See that nothing is open, and that every block is back in the pool."""
        for _ in range(3):
            self.step()
        assert not self.state.book.recvs
        assert not self.state.book.sends
        assert not self.state.book.requests
        assert not self.scheduler.requests
        assert self.pool.get_num_free_blocks() == self.free
        assert not self.scheduler.has_requests()


def pull(request: str = "r", **other: str) -> dict[str, Any]:
    """Return what a router gives a decode request along."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": f"t-{request}",
        "remote_engine_id": "P",
        "remote_bootstrap_addr": "http://127.0.0.1:1",
        **other,
    }


def push(request: str = "r") -> dict[str, Any]:
    """Return what a router gives a prefill request along."""
    return {"do_remote_decode": True, "transfer_id": f"t-{request}"}


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def build(role: str = "kv_consumer", **options: Any) -> Engine:
        made.append(Engine(role, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


Make = Callable[..., Engine]


def named(request: str = "r", rank: int = 0, peers: tuple[str, ...] = ("tp0 pp0",)) -> PeersReport:
    return PeersReport(request, f"t-{request}", rank, peers, "127.0.0.1:1")


def settled(request: str = "r", rank: int = 0, peer: str = "tp0 pp0", failure: Failure = NO_FAILURE) -> PeerReport:
    return PeerReport(request, f"t-{request}", rank, peer, failure)


def waiting(engine: Engine, request: str = "r") -> Any:
    """Queue a request whose prompt comes from elsewhere, and return it waiting for its KV."""
    made = engine.add(request, PROMPT, max_tokens=2, transfer=pull(request))
    engine.told(named(request))
    assert made.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return made


# --- the decode -----------------------------------------------------------------------------------------------------


def test_a_request_waits_until_its_peers_have_written(make: Make) -> None:
    engine = make()
    request = waiting(engine)
    (registered,) = engine.of(ev.RecvRegistered)
    assert (registered.transfer, registered.request, registered.prefill) == ("t-r", "r", "P")
    assert numbers(registered.blocks) == engine.scheduler.kv_cache_manager.get_block_ids("r")[0]
    assert registered.timeout_ns > 480 * 10**9
    engine.told(settled(), recved={"r"})
    assert engine.kinds()[-2:] == ["peer_settled", "recv_settled"]
    engine.step()
    assert request.num_computed_tokens == len(PROMPT)
    while not request.is_finished():
        engine.step()
    engine.all_is_back()


def test_blocks_that_a_peer_may_still_write_are_seen_when_another_recv_gets_them(make: Make) -> None:
    engine = make()
    waiting(engine)
    held = engine.scheduler.kv_cache_manager.get_block_ids("r")[0]
    for block in reversed(held):  # vLLM does so only by mistake
        engine.pool.free_blocks([engine.pool.blocks[block]])
    engine.add("s", PROMPT, max_tokens=2, transfer=pull("s"))
    engine.told()
    (given,) = engine.of(ev.BlocksAllocated)
    assert (given.request, sorted(numbers(given.blocks))) == ("s", sorted(held))
    assert given.seq < engine.of(ev.RecvRegistered)[-1].seq


def test_the_peers_that_are_expected_are_known_from_the_last_transfer(make: Make) -> None:
    engine = make()
    waiting(engine, "first")
    engine.add("second", PROMPT, transfer=pull("second"))
    engine.told(settled("first"), recved={"first"})
    first, second = engine.of(ev.RecvRegistered)
    assert first.peers == ()
    assert second.peers == ("tp0 pp0",)


def test_under_the_fail_policy_a_failed_request_ends_with_an_error_and_gives_its_blocks_back(make: Make) -> None:
    engine = make(kv_load_failure_policy="fail")
    request = waiting(engine)
    blocks = set(numbers(engine.state.book.recvs["r"].blocks))
    engine.told(settled(failure=FAILED))
    engine.told(recved={"r"}, invalid_block_ids=blocks)
    assert request.status == RequestStatus.FINISHED_ERROR
    assert [kind for kind in engine.kinds() if kind not in ("request_queued", "recv_registered", "peers_named")] == [
        "peer_settled",
        "recv_failed",
        "request_finished",
        "recv_recovered",
        "recv_settled",
    ]
    assert engine.of(ev.RecvRecovered)[0].action == "failed"
    assert engine.of(ev.RecvFailed)[0].code == "TRANSFER_FAILED"
    engine.all_is_back()


def test_under_the_recompute_policy_a_failed_request_is_computed_here(make: Make) -> None:
    engine = make(kv_load_failure_policy="recompute")
    request = waiting(engine)
    blocks = set(numbers(engine.state.book.recvs["r"].blocks))
    engine.told(settled(failure=FAILED))
    engine.told(recved={"r"}, invalid_block_ids=blocks)
    assert engine.of(ev.RecvRecovered)[0].action == "recomputed"
    engine.step()
    assert engine.of(ev.RequestScheduled)[0].computed_tokens == 0
    while not request.is_finished():
        engine.step()
    engine.all_is_back()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_request_that_fails_early_keeps_its_blocks_until_its_last_peer_has_settled(make: Make, policy: str) -> None:
    engine = make(kv_load_failure_policy=policy)
    request = engine.add("r", PROMPT, max_tokens=2, transfer=pull())
    engine.told(named(peers=("tp0 pp0", "tp0 pp1")))
    blocks = set(numbers(engine.state.book.recvs["r"].blocks))
    engine.told(LostReport("r", "t-r", 0, "tp0 pp0", LOST))
    engine.told(invalid_block_ids=blocks)
    free = engine.pool.get_num_free_blocks()
    for _ in range(3):
        engine.step()
    assert engine.pool.get_num_free_blocks() == free == engine.free - len(blocks)
    assert request.is_finished() == (policy == "fail")
    engine.told(settled(peer="tp0 pp1"))
    engine.told(settled(failure=LOST))
    engine.told(recved={"r"})
    assert len(engine.of(ev.RecvFailed)) == 1
    while not request.is_finished():
        engine.step()
    engine.all_is_back()


def test_a_client_that_goes_away_while_waiting_leaves_no_block_behind(make: Make) -> None:
    engine = make()
    waiting(engine)
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert engine.of(ev.RequestAborted)[0].was == "loading"
    engine.step()
    assert engine.pool.get_num_free_blocks() < engine.free
    assert engine.connector.has_pending_push_work()
    engine.told(settled(failure=FAILED))
    assert engine.of(ev.RecvRecovered)[0].action == "gone"
    engine.told(recved={"r"})
    engine.all_is_back()


def test_a_request_that_ends_before_it_ran_only_releases_the_prefill(make: Make) -> None:
    engine = make()
    engine.add("r", PROMPT, transfer=pull())
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    output = engine.told()
    assert output.kv_connector_metadata.reqs_to_recv["P"]["r"].local_block_ids == []
    (registered,) = engine.of(ev.RecvRegistered)
    assert registered.blocks == ()
    assert engine.connector.has_pending_push_work()
    engine.told(named(), settled())
    assert engine.of(ev.RecvSettled)[0].outcome == "released"
    engine.all_is_back()


def test_every_rank_must_have_received(make: Make) -> None:
    engine = make(world_size=2)
    waiting(engine)
    engine.told(settled())
    engine.told(named(rank=1), settled(rank=1))
    assert engine.of(ev.RecvSettled) == []
    engine.told(recved={"r"})
    assert len(engine.of(ev.RecvSettled)) == 1


def test_a_result_that_comes_late_or_twice_does_not_end_the_engine(make: Make) -> None:
    engine = make()
    request = waiting(engine)
    engine.told(settled(), recved={"r"})
    engine.told(settled(), recved={"r"})
    assert [event.what for event in engine.of(ev.ReportIgnored)] == ["recv", "recv"]
    while not request.is_finished():
        engine.step()
    engine.told(settled(failure=FAILED), recved={"r"})
    engine.told(LateReport("recv", "r", "t-r", 0, "tp0 pp0 had already settled", "UNKNOWN"))
    assert len(engine.of(ev.ReportIgnored)) == 5
    engine.all_is_back()


def test_a_peer_that_settles_twice_changes_nothing(make: Make) -> None:
    engine = make()
    engine.add("r", PROMPT, max_tokens=2, transfer=pull())
    engine.told(named(peers=("tp0 pp0", "tp0 pp1")))
    engine.told(settled(), settled(failure=FAILED))
    assert not engine.state.book.recvs["r"].failed
    assert engine.of(ev.ReportIgnored)[0].code == "TRANSFER_FAILED"


def test_ranks_that_count_a_request_as_received_too_early_break_the_books(make: Make) -> None:
    engine = make()
    engine.add("r", PROMPT, max_tokens=2, transfer=pull())
    engine.told(named(peers=("tp0 pp0", "tp0 pp1")))
    with pytest.raises(InvariantViolation, match="tp0 pp1 for rank 0"):
        engine.told(settled(), recved={"r"})


def test_in_quarantine_such_a_request_keeps_its_blocks_and_the_engine_serves_on(make: Make) -> None:
    engine = make(extra={"on_invariant_violation": "quarantine"})
    request = engine.add("r", PROMPT, max_tokens=2, transfer=pull())
    engine.told(named(peers=("tp0 pp0", "tp0 pp1")))
    engine.told(settled(), recved={"r"})
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert not engine.connector.has_pending_push_work()
    other = engine.add("other", PROMPT, max_tokens=1)
    while not other.is_finished():
        engine.step()


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_bootstrap_addr", "transfer_id"])
def test_a_transfer_that_is_not_named_in_full_is_computed_here(make: Make, missing: str) -> None:
    engine = make()
    params = pull()
    del params[missing]
    request = engine.add("r", PROMPT, max_tokens=2, transfer=params)
    while not request.is_finished():
        engine.step()
    assert engine.of(ev.RecvRegistered) == []
    engine.all_is_back()


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_bootstrap_addr", "transfer_id"])
@pytest.mark.parametrize("value", [5, ["t"], {}, True])
def test_a_transfer_whose_names_are_no_text_is_computed_here(make: Make, name: str, value: object) -> None:
    engine = make()
    request = engine.add("r", PROMPT, max_tokens=2, transfer=pull(**{name: value}))  # type: ignore[arg-type]
    while not request.is_finished():
        engine.step()
    assert engine.of(ev.RecvRegistered) == []
    engine.all_is_back()


def test_a_send_whose_transfer_is_no_text_is_none(make: Make) -> None:
    engine = make("kv_producer")
    request = engine.add("r", PROMPT, max_tokens=1, transfer={**push(), "transfer_id": 5})
    while not request.is_finished():
        engine.step()
    assert engine.of(ev.SendRegistered) == []
    engine.all_is_back()


def test_a_request_that_comes_back_while_its_last_transfer_is_open_is_computed_here(make: Make) -> None:
    engine = make()
    engine.add("r", PROMPT, max_tokens=2, transfer=pull())
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    engine.told()  # the prefill is asked to free its blocks
    again = engine.add("r", PROMPT, max_tokens=2, transfer=pull(transfer_id="t-again"))
    while not again.is_finished():
        engine.step()
    assert [recv.transfer for recv in engine.of(ev.RecvRegistered)] == ["t-r"]


@pytest.mark.parametrize(("role", "params"), [("kv_producer", pull()), ("kv_consumer", push())])
def test_a_request_that_was_sent_to_the_wrong_side_is_computed_there(
    make: Make, role: str, params: dict[str, Any]
) -> None:
    engine = make(role)
    request = engine.add("r", PROMPT, max_tokens=2, transfer=params)
    while not request.is_finished():
        engine.step()
    engine.all_is_back()


def test_other_connectors_results_are_left_alone(make: Make) -> None:
    engine = make()
    waiting(engine)
    output = engine.schedule()
    results = KVConnectorOutput(finished_recving={"theirs"}, finished_sending={"theirs"})
    engine.connector.update_connector_output(results)
    results.kv_connector_worker_meta = PDWorkerMetadata([], {"r-late"}, set())
    results.finished_recving = {"theirs", "r-late"}
    engine.connector.update_connector_output(results)
    assert results.finished_recving == {"theirs"}
    assert results.finished_sending == {"theirs"}
    engine.update(output)


def test_hashed_request_ids_stand_in_the_log_and_vllm_gets_its_own(make: Make) -> None:
    engine = make(extra={"hash_request_ids": True})
    request = waiting(engine)
    engine.told(settled(), recved={"r"})
    assert all(event.request != "r" for event in engine.events if hasattr(event, "request"))
    assert all(event.transfer != "t-r" for event in engine.events if hasattr(event, "transfer"))
    while not request.is_finished():
        engine.step()
    engine.all_is_back()


ORDERS = [["recved", "sent"], ["sent", "recved"], ["both"]]


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_that_is_sent_and_received_is_freed_once_and_last(make: Make, order: list[str]) -> None:
    """A request that was aborted with both open: told of both, vLLM ends at the second."""
    engine = make("kv_both")
    request = waiting(engine)
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    # vLLM's own Mooncake connector does not let both be open; other ways to them are one hook away.
    ledger, blocks = engine.connector.ledger, engine.state.book.recvs["r"].blocks
    ledger.record(ev.SendRegistered, transfer="t-out", request="r", generation=1, ranks=((0, 0),))
    ledger.record(ev.SendReady, transfer="t-out", request="r", generation=1, blocks=blocks)
    received, sent = settled(), SentReport("r", "t-out", 0, "sent", 1)
    for what in order:
        assert engine.pool.get_num_free_blocks() < engine.free
        if what == "both":
            engine.told(received, sent, recved={"r"}, sent={"r"})
        elif what == "sent":
            engine.told(sent, sent={"r"})
        else:
            engine.told(received, recved={"r"})
    assert request.is_finished()
    engine.all_is_back()


def test_a_transfer_that_is_open_for_long_is_suspected_once(make: Make) -> None:
    engine = make("kv_both", extra={"stall_suspect_s": 0.0})
    waiting(engine)
    for _ in range(200):
        engine.step()
    (suspected,) = engine.of(ev.StallSuspected)
    assert (suspected.transfer, suspected.request, suspected.missing) == ("t-r", "r", ((0, 0),))


# --- the prefill ----------------------------------------------------------------------------------------------------


def prefilled(engine: Engine, request: str = "r") -> Any:
    """Prefill a request to be sent, and return it with its blocks held."""
    made = engine.add(request, PROMPT, max_tokens=1, transfer=push(request))
    while not made.is_finished():
        engine.step()
    return made


def test_blocks_are_held_until_they_were_sent(make: Make) -> None:
    engine = make("kv_producer")
    prefilled(engine)
    (ready,) = engine.of(ev.SendReady)
    assert (ready.transfer, ready.timeout_ns) == ("t-r", 480 * 10**9)
    output = engine.told()
    assert output.kv_connector_metadata.reqs_to_send["r"] == ("t-r", [numbers(ready.blocks)])
    assert engine.pool.get_num_free_blocks() < engine.free
    assert engine.connector.has_pending_push_work()
    engine.told(PushReport("r", "t-r", 0, "tp0 pp0", "127.0.0.1:2"))
    assert engine.state.book.sends["r"].phase == "sending"
    engine.told(SentReport("r", "t-r", 0, "sent", 1), sent={"r"})
    assert engine.kinds()[-3:] == ["send_started", "rank_sent", "send_settled"]
    engine.all_is_back()


@pytest.mark.parametrize(
    ("outcome", "kind"), [("sent", ev.SendSettled), ("released", ev.SendSettled), ("expired", ev.SendExpired)]
)
def test_a_send_ends_as_its_ranks_say(make: Make, outcome: str, kind: type[ev.Event]) -> None:
    engine = make("kv_producer", world_size=2)
    prefilled(engine)
    engine.told(SentReport("r", "t-r", 0, "sent", 1))
    engine.told(SentReport("r", "t-r", 1, outcome, 0, FAILED if outcome == "expired" else NO_FAILURE))
    engine.told(sent={"r"})
    (over,) = engine.of(kind)
    if isinstance(over, ev.SendExpired):
        assert over.expired_ranks == ((1, 1),)
    engine.all_is_back()


def test_a_send_that_nobody_asks_for_is_suspected_once_with_what_it_holds_in_the_book(make: Make) -> None:
    engine = make("kv_producer", world_size=2, extra={"stall_suspect_s": 0.0})
    prefilled(engine)
    for _ in range(200):
        engine.step()
    (suspected,) = engine.of(ev.StallSuspected)
    assert (suspected.transfer, suspected.request, suspected.missing) == ("t-r", "r", ((0, 1),))
    (ready,) = engine.of(ev.SendReady)
    assert engine.state.book.sends["r"].blocks == ready.blocks
    assert engine.pool.get_num_free_blocks() == engine.free - len(numbers(ready.blocks))


def test_a_prefill_that_is_aborted_withdraws_its_send(make: Make) -> None:
    engine = make("kv_producer")
    engine.add("r", PROMPT, transfer=push())
    output = engine.schedule()
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    engine.update(output)
    assert engine.of(ev.SendSettled)[0].outcome == "withdrawn"
    output = engine.told()
    assert output.kv_connector_metadata.reqs_not_processed == {"t-r"}
    engine.all_is_back()


def test_a_send_is_withdrawn_also_when_a_refused_one_of_the_same_transfer_ends_with_it(make: Make) -> None:
    engine = make("kv_producer")
    for request in ("first", "second"):
        engine.add(request, PROMPT, max_tokens=4, transfer=push())
    engine.step()
    for request in ("first", "second"):
        engine.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)
    assert engine.schedule().kv_connector_metadata.reqs_not_processed == {"t-r"}


def test_a_prefill_that_is_aborted_before_it_ran_leaves_nothing(make: Make) -> None:
    engine = make("kv_producer")
    engine.add("r", PROMPT, transfer=push())
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    output = engine.told()
    assert output.kv_connector_metadata.reqs_not_processed == set()
    assert engine.of(ev.SendRegistered) == []
    engine.all_is_back()


def test_a_transfer_id_that_is_in_use_keeps_no_second_requests_blocks(make: Make) -> None:
    engine = make("kv_producer")
    prefilled(engine)
    again = engine.add("again", PROMPT, max_tokens=1, transfer=push())
    while not again.is_finished():
        engine.step()
    output = engine.told()
    assert "again" not in output.kv_connector_metadata.reqs_to_send
    assert output.kv_connector_metadata.reqs_not_processed == set()
    assert {event.request for event in engine.of(ev.ReportIgnored)} == {"again"}
    assert "again" not in engine.scheduler.requests
    engine.told(SentReport("r", "t-r", 0, "sent", 1), sent={"r"})
    engine.all_is_back()


def test_a_send_that_is_reported_twice_does_not_end_the_engine(make: Make) -> None:
    engine = make("kv_producer")
    prefilled(engine)
    engine.told(SentReport("r", "t-r", 0, "sent", 1), sent={"r"})
    engine.told(SentReport("r", "t-r", 0, "expired", 1), sent={"r"})
    engine.told(PushReport("r", "t-r", 0, "tp0 pp0", ""))
    assert [event.what for event in engine.of(ev.ReportIgnored)] == ["send"] * 3
    engine.all_is_back()


def test_a_prefill_that_was_preempted_is_one_send(make: Make) -> None:
    engine = make("kv_producer", num_blocks=20)
    tokens = [list(range(first, first + 8 * BLOCK_SIZE)) for first in (3, 400, 700)]
    params = {"do_remote_decode": True}
    made = [
        engine.add(f"r{index}", prompt, max_tokens=40, transfer={**params, "transfer_id": f"t-r{index}"})
        for index, prompt in enumerate(tokens)
    ]
    for _ in range(400):
        engine.step()
        done = {request.request_id for request in made if request.is_finished()}
        ready = {name for name, send in engine.state.book.sends.items() if send.phase == "ready"}
        for name in sorted(ready & done):
            engine.told(SentReport(name, f"t-{name}", 0, "sent", 1), sent={name})
        if len(done) == len(made):
            break
    assert engine.of(ev.RequestPreempted)
    assert len(engine.of(ev.SendRegistered)) == len(made)
    engine.all_is_back()


def test_the_log_folds_to_the_state_of_the_engine(make: Make) -> None:
    engine = make(kv_load_failure_policy="recompute")
    waiting(engine, "r")
    engine.told(settled(failure=FAILED))
    waiting(engine, "s")
    folded = State()
    for event in engine.events:
        folded.apply(event)
    assert folded.digest() == engine.state.digest()
