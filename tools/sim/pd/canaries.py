"""Known mistakes of P/D, switched on in the simulator and nowhere else: the checks must find each of them.

The first are public incidents, the next two are what this simulator found, the others break one rule each, so that
every check is seen to fail. The objects of one run are altered from outside before its first step. Broken books do not
stop the engines in these runs (`on_invariant_violation=quarantine`), because a stopped engine could not show the
damage.

This file knows the plugin's inner methods, and is the only part of the P/D simulator that touches them.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.pd import failures as pd_failures
from connector.pd.metadata import LostReport, PDWorkerMetadata, PeerReport
from connector.pd.peers import PEER_REQUEST
from connector.runtime.failures import NO_FAILURE
from ledger.codes import Stage
from tools.sim.canary import Canary as CommonCanary
from tools.sim.canary import not_stopped
from tools.sim.pd import plan as pl
from tools.sim.pd.engine import Engine
from tools.sim.pd.run import World


class Canary(CommonCanary, frozen=True):
    """A mistake. `faults`: kinds of fault that bring it out."""

    faults: tuple[str, ...] = pl.FAULTS

    def plan(self, seed: int, steps: int) -> pl.Plan:
        """Return the plan of a seed, with engines that a broken rule does not stop."""
        return not_stopped(pl.draw(seed, steps, faults=self.faults))


def _prefills(world: World) -> list[Engine]:
    return [engine for engine in world.engines.values() if engine.role == "kv_producer"]


# --- incidents --------------------------------------------------------------------------------------------------------


def _released_on_first_failure(world: World) -> None:
    """Tell vLLM that a request has received with the first failure of a peer, whatever the others still do."""
    decode = world.engines["D"]
    half, requests = decode.half, decode.scheduler.requests
    update = decode.connector.update_connector_output
    due: dict[str, None] = {}
    told: dict[str, None] = {}

    def update_connector_output(output: KVConnectorOutput) -> None:
        metadata = output.kv_connector_worker_meta
        failed = [
            report.request
            for report in (metadata.reports if isinstance(metadata, PDWorkerMetadata) else ())
            if isinstance(report, PeerReport | LostReport) and report.failure.code
        ]
        update(output)
        finished = (output.finished_recving or set[str]()) - told.keys()
        for request in sorted(due):
            # As upstream does: with the very step that names the failed blocks.
            if _waits(requests.get(request)):
                told[request] = None
                finished.add(request)
                output.failed_recving = {*output.failed_recving, request}
        due.clear()
        due.update((request, None) for request in failed if request in half._book.recvs and request not in told)
        output.finished_recving = finished

    decode.connector.update_connector_output = update_connector_output


def _waits(request: Any) -> bool:
    return request is not None and (request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.is_finished())


def _waits_for_its_first_peer(world: World) -> None:
    for worker in world.engines["D"].workers:
        name = worker._name_peers
        worker._name_peers = lambda pull, peers, name=name: name(pull, peers[:1])  # type: ignore[method-assign]


def _sent_by_first_stage(world: World) -> None:
    """Tell vLLM that a request was sent when its first rank says so."""
    for prefill in _prefills(world):
        prefill.connector.update_connector_output = _with_first_rank(prefill)


def _with_first_rank(prefill: Engine) -> Callable[[KVConnectorOutput], None]:
    update = prefill.connector.update_connector_output
    requests = prefill.scheduler.requests
    told: dict[str, None] = {}

    def update_connector_output(output: KVConnectorOutput) -> None:
        metadata = output.kv_connector_worker_meta
        first = metadata.sent if isinstance(metadata, PDWorkerMetadata) else set[str]()
        update(output)
        finished = (output.finished_sending or set[str]()) - told.keys()
        for request in sorted(first):
            if request in requests and request not in told:
                told[request] = None
                finished.add(request)
        output.finished_sending = finished

    return update_connector_output


# --- found by the simulator -------------------------------------------------------------------------------------------


def _settled_by_exceptions(world: World) -> None:
    for worker in world.engines["D"].workers:
        worker._raised = MethodType(  # type: ignore[method-assign]
            lambda self, peer_request, error: self._settle_rest(
                peer_request, pd_failures.of_exception(error, Stage.RECV)
            ),
            worker,
        )


def _sent_under_a_push(world: World) -> None:
    for prefill in _prefills(world):
        for worker in prefill.workers:
            report = worker.fetch_finished_sending_reqs

            async def fetch(worker: Any = worker, report: Any = report) -> set[str]:
                for push in worker._pushes.values():
                    push.meta = None
                return await report()

            worker.fetch_finished_sending_reqs = fetch  # type: ignore[method-assign]


# --- one for each check that is left ----------------------------------------------------------------------------------


def _takes_every_answer_for_a_good_one(world: World) -> None:
    for worker in world.engines["D"].workers:
        settle = worker._settle
        worker._settle = lambda pull, peer, failure, settle=settle: settle(pull, peer, NO_FAILURE)  # type: ignore[method-assign]


def _waits_for_ever(world: World) -> None:
    for worker in world.engines["D"].workers:
        worker._restart_timer = lambda peer_request: None  # type: ignore[method-assign]


def _waits_for_whoever_talks(world: World) -> None:
    """Give a peer its time again with every answer, also with one that settles nothing."""
    for worker in world.engines["D"].workers:

        def process(
            response: Any, metas: Any, worker: Any = worker, process: Any = worker.process_pulling_result
        ) -> None:
            process(response, metas)
            worker._restart_timer(PEER_REQUEST.get())

        worker.process_pulling_result = process  # type: ignore[method-assign]


def _finishes_early(world: World) -> None:
    """Let each rank count a pull as over when it fails; the book must refuse it."""
    for worker in world.engines["D"].workers:
        fail = worker._fail

        def failed(pull: Any, peer: str, failure: Any, worker: Any = worker, fail: Any = fail) -> None:
            again = pull.failed
            fail(pull, peer, failure)
            if pull.waited_for and not again:
                worker.outbox.finish_failed(pull.request)

        worker._fail = failed  # type: ignore[method-assign]


def _forgets_the_abandoned(world: World) -> None:
    """Let upstream keep what it keeps of transfers that nobody prefills."""
    for prefill in _prefills(world):
        for worker in prefill.workers:
            worker._forget_unknown = lambda transfer: None  # type: ignore[method-assign]


def _names_its_sibling(world: World) -> None:
    for worker in world.engines["D"].workers:
        names = worker._peer_names
        worker._peer_names = lambda engine, names=names: {  # type: ignore[method-assign]
            address: name.replace("pp0", "pp7") for address, name in names(engine).items()
        }


def _lets_the_engine_sleep(world: World) -> None:
    for engine in world.engines.values():
        engine.connector.has_pending_push_work = lambda: False


def _changes_beside_the_log(world: World) -> None:
    half = world.engines["D"].half
    take = half._take

    def taken(report: Any) -> None:
        take(report)
        half._book.next_load += 1

    half._take = taken


def _acts_against_the_policy(world: World) -> None:
    half = world.engines["D"].half
    book_it = half._recovered
    other = {"failed": "recomputed", "recomputed": "failed"}
    half._recovered = lambda name, recv, action: book_it(name, recv, other.get(action, action))


def _forgets_a_recv(world: World) -> None:
    """Drop a recv from the book with the failure, as if the request had never waited."""
    half = world.engines["D"].half
    fail = half._recv_failed

    def failed(recv: Any, report: Any) -> None:
        fail(recv, report)
        half._book.recvs.pop(half._name(report.request), None)

    half._recv_failed = failed


_WRITES = frozenset({"ownership", "wrong_kv"})

CANARIES: tuple[Canary, ...] = (
    Canary(
        "first-failure",
        "S6",
        "a recv's blocks are released on the first failure, while another peer still writes",
        _WRITES,
        _released_on_first_failure,
    ),
    Canary(
        "first-peer",
        "S12, on the decode's side",
        "a rank waits for the first of its peers, while other stages still push",
        _WRITES,
        _waits_for_its_first_peer,
    ),
    Canary(
        "first-stage",
        "S12",
        "a send is called finished after its first stage, while others still read",
        frozenset({"ownership"}),
        _sent_by_first_stage,
    ),
    Canary(
        "unreadable",
        "found here",
        "an exception while a peer is heard out settles it, although it goes on to write",
        _WRITES,
        _settled_by_exceptions,
        faults=("unreadable", "late", "hang"),
    ),
    Canary(
        "second-push",
        "found here, in vLLM",
        "a send is over with the push that completes the count, while a second request's push still reads",
        frozenset({"ownership"}),
        _sent_under_a_push,
    ),
    Canary("optimist", "S4", "a failed answer counts as a good one", _WRITES, _takes_every_answer_for_a_good_one),
    Canary(
        "no-watchdog",
        "S4",
        "no watchdog settles what no origin reports",
        frozenset({"unsettled"}),
        _waits_for_ever,
        faults=("chatter",),
    ),
    Canary(
        "talker",
        "S4",
        "a peer that says nothing of use has its time again",
        frozenset({"late"}),
        _waits_for_whoever_talks,
        faults=("chatter",),
    ),
    Canary(
        "early",
        "design, section 5",
        "the ranks count a failed recv as over while peers may still write: the book must refuse it",
        frozenset({"violation"}),
        _finishes_early,
    ),
    Canary(
        "hoarder",
        "vLLM",
        "what a decode asked for in vain stays in the prefill's workers for ever",
        frozenset({"unsettled"}),
        _forgets_the_abandoned,
    ),
    Canary("misnamed", "design, section 4", "a peer is given another's name", frozenset({"peers"}), _names_its_sibling),
    Canary(
        "asleep",
        "design, section 5",
        "the engine may stop stepping while transfers are open",
        frozenset({"stopped"}),
        _lets_the_engine_sleep,
        faults=("no prefill", "refuse"),
    ),
    Canary(
        "beside-the-log",
        "design, section 3",
        "the state is changed without an event",
        frozenset({"fold"}),
        _changes_beside_the_log,
    ),
    Canary(
        "forgetful",
        "design, section 3",
        "the book forgets a recv that a request waits for",
        frozenset({"book"}),
        _forgets_a_recv,
    ),
    Canary(
        "against-policy",
        "kv_load_failure_policy",
        "a failed request is said to have ended otherwise than the policy says",
        frozenset({"rule"}),
        _acts_against_the_policy,
    ),
)

BY_NAME = {canary.name: canary for canary in CANARIES}
