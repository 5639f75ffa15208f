"""The scheduler half of the P/D connector: plans with upstream, keeps the ledger itself.

Each hook decides which events happen and records them; what vLLM hears about blocks follows from what was recorded.
All that is known of sends and recvs is in `ledger.state`; there is no second copy here.

    hook (vLLM calls it)      side  when                                events it records
    ------------------------  ----  ----------------------------------  ---------------------------------------------
    on_new_request            both  a request enters the waiting queue  request_queued
    update_state_after_alloc  P     a request to be sent got blocks     request_preempted, send_registered,
                                                                        report_ignored
    build_connector_meta      both  the end of every schedule()         request_preempted, request_scheduled,
                                                                        request_resumed, blocks_allocated,
                                                                        checkpoint, stall_suspected
                              D     ... with transfers to ask for       recv_registered, report_ignored
    request_finished          both  a request ended or was aborted      request_finished | request_aborted,
                                                                        blocks_released
                              P     ... and its blocks are to be sent   send_ready, or send_settled (withdrawn)
                              D     ... because its transfer failed     recv_recovered (failed)
    update_connector_output   P     the workers' reports of a step      send_started, rank_sent, send_settled,
                                                                        send_expired, report_ignored
                              D     the workers' reports of a step      peers_named, peer_settled, recv_failed,
                                                                        recv_recovered, recv_settled,
                                                                        report_ignored
    has_pending_push_work     both  may the engine stop stepping?       none

vLLM frees a request's blocks when a connector says that the request has finished sending or receiving. If that is said
twice, or of a request that vLLM does not know, vLLM ends. So the ledger decides what is passed on: a request is taken
out of the workers' results when the ledger does not have it open, or still holds its blocks for another transfer.

This file may know vLLM's scheduler-side classes. It does no I/O and starts no thread.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorScheduler,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connector.pd.metadata import (
    LateReport,
    LostReport,
    PDWorkerMetadata,
    PeerReport,
    PeersReport,
    PushReport,
    Report,
    SentReport,
    answer_timeout_s,
    attach_step,
    bootstrap_timeout_s,
    connect_timeout_s,
    hold_timeout_s,
)
from connector.runtime.failures import NO_FAILURE, Failure
from connector.runtime.requests import GroupIds, RequestObserver, blocks_of_groups, generation_of
from connector.runtime.runtime import LedgerRuntime
from ledger import events as ev
from ledger.blocks import Blocks, from_ranges, to_ranges
from ledger.state.records import Recv, Send

logger = logging.getLogger("kvledger")

T = TypeVar("T", Send, Recv)

OfTransfer: TypeAlias = PeersReport | LostReport | PeerReport | PushReport | SentReport
"""A report of a transfer that should be open."""


class ReportSubject(TypedDict):
    """What the events of a rank's report begin with."""

    transfer: str
    request: str
    rank: int


RECV_PARAMS = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")
"""What `kv_transfer_params` must hold for a remote prefill."""


class LedgerMooncakeScheduler(MooncakeConnectorScheduler):
    """Upstream's scheduler half with a ledger. Made by `rebase_class`, then given its ledger by `open`."""

    ledger: LedgerRuntime

    def open(self, ledger: LedgerRuntime) -> None:
        """Begin to record in `ledger`."""
        self.ledger = ledger
        self._book = ledger.state.book
        self._name = ledger.name
        self._ranks = to_ranges(range(self.vllm_config.parallel_config.world_size))
        self._groups: tuple[int, ...] = tuple(self.kv_cache_config.transfer_group_ids)
        """The KV-cache group of each group that is transferred."""
        sizes = [group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups]
        self._requests = RequestObserver(ledger, sizes)

    # --- requests ---------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Record that a request waits. What it asks of this engine and cannot have is taken out of it."""
        self._correct(request)
        super().on_new_request(request)
        self._requests.queued(request)

    def _correct(self, request: Request) -> None:
        """Turn off what a client or router asks for by mistake.

        Upstream ends the engine for a request that was sent to the wrong side, and lets one wait for ever whose
        transfer is not named in full. The names are any JSON that a client sends, and what is no text would end the
        engine later, when the workers' reports do not fit it. Nor is a second transfer asked for under an id whose
        first one is still open. Without its transfer the request is computed here, as any other.
        """
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_prefill"):
            why = "this engine only prefills" if self.is_kv_producer else _unusable(params, RECV_PARAMS)
            if not why and self._name(request.request_id) in self._book.recvs:
                why = "an earlier transfer of the same request id is still open"
            if why:
                params["do_remote_prefill"] = False
                logger.warning("kvledger: request %s asks for a remote prefill, but %s", request.request_id, why)
        if params.get("do_remote_decode"):
            why = "this engine only decodes" if self.is_kv_consumer else _unusable(params, ("transfer_id",))
            if why:
                params["do_remote_decode"] = False
                logger.warning("kvledger: request %s asks for a remote decode, but %s", request.request_id, why)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Register the send of a request that was given blocks to be prefilled."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._requests.seen(request)
        if request.request_id in self._reqs_need_send and not self._register_send(request):
            del self._reqs_need_send[request.request_id]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the workers are to do after this step, with every transfer in it recorded."""
        log = self.ledger.log
        log.step += 1
        if log.step >= self.ledger.next_watch_step:
            self.ledger.watch()
        self._requests.step(scheduler_output)
        for request_id, (request, groups) in list(self._reqs_need_recv.items()):
            if not self._register_recv(request, self._by_group(groups)):
                del self._reqs_need_recv[request_id]
        metadata = super().build_connector_meta(scheduler_output)
        attach_step(metadata, log.step)
        return metadata

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Record that a request ended; see vLLM's base class for what is returned."""
        name = self._name(request.request_id)
        self._requests.ended(request)
        withdrawn = set(self._reqs_not_processed)
        delays, params = super().request_finished(request, block_ids)
        delays = self._end_send(request, delays)
        self._reqs_not_processed |= withdrawn  # another request's of the same transfer, which ended in this step, too
        recv = self._book.recvs.get(name)
        if recv is None and not delays:
            self._requests.released(request, enumerate(block_ids))
        if recv is not None and recv.failed and not recv.recovered and recv.blocks:
            # vLLM ends a request with an error when its load failed and the policy is `fail`.
            failed = request.status.name == "FINISHED_ERROR"
            self._recovered(name, recv, "failed" if failed else "gone")
        return delays, params

    # --- sends: this engine is the prefill --------------------------------------------------------------------------

    def _register_send(self, request: Request) -> bool:
        """Register the send of a request. Return False if there can be none: another request has the transfer."""
        name, transfer = self._name(request.request_id), self._transfer(_transfer_of(request))
        send = self._book.sends.get(name)
        if send is not None:
            return send.transfer == transfer  # it runs again after a preemption
        if any(other.transfer == transfer for other in self._book.sends.values()):
            why = "another request is being sent as this transfer; this one's blocks are not kept"
            self.ledger.record(ev.ReportIgnored, what="send", why=why, transfer=transfer, request=name)
            return False
        registered = self.ledger.record(
            ev.SendRegistered, transfer=transfer, request=name, generation=generation_of(request), ranks=self._ranks
        )
        return registered is not None

    def _end_send(self, request: Request, delays: bool) -> bool:
        """Record that a request to be sent has ended. Return whether vLLM is to keep its blocks."""
        name = self._name(request.request_id)
        if delays and self._register_send(request):
            planned = self._reqs_need_send[request.request_id][1]
            ready = self.ledger.record(
                ev.SendReady,
                transfer=self._transfer(_transfer_of(request)),
                request=name,
                generation=generation_of(request),
                blocks=self._by_group(planned),
                timeout_ns=int(hold_timeout_s() * 1e9),
            )
            if ready is not None:
                return True
        unknown = self._reqs_need_send.pop(request.request_id, None) is not None
        send = self._book.sends.get(name)
        if send is None or unknown:
            # Upstream would have the workers drop a transfer that they do not know, or that is another request's.
            self._reqs_not_processed.discard(_transfer_of(request))
        if send is None:
            return False
        if send.phase == "registered":
            self.ledger.record(ev.SendSettled, transfer=send.transfer, request=name, outcome="withdrawn")
        return False

    def _push_started(self, report: PushReport) -> None:
        if self._open(self._book.sends, report, "send") is not None:
            self.ledger.record(ev.SendStarted, **self._subject(report), peer=report.peer, address=report.address)

    def _rank_sent(self, report: SentReport) -> None:
        if self._open(self._book.sends, report, "send") is not None:
            self.ledger.record(
                ev.RankSent,
                **self._subject(report),
                outcome=report.outcome,
                pushes=report.pushes,
                **report.failure.fields(),
            )

    def _finished_sending(self, request_id: str) -> bool:
        """Record that vLLM counts a send as finished on all ranks. Return whether it may free the blocks."""
        name = self._name(request_id)
        send = self._book.sends.get(name)
        if send is None:
            self._ignore("send", "vLLM had already been told that this request's KV was sent", request=name)
            return False
        about = {"transfer": send.transfer, "request": name}
        expired = [rank for rank, outcome in sorted(send.outcomes.items()) if outcome == "expired"]
        if expired:
            over = self.ledger.record(ev.SendExpired, **about, expired_ranks=to_ranges(expired))
        else:
            outcome = "sent" if "sent" in send.outcomes.values() else "released"
            over = self.ledger.record(ev.SendSettled, **about, outcome=outcome)
        return over is not None and not self._still_received(name)

    def _still_received(self, name: str) -> bool:
        recv = self._book.recvs.get(name)
        return recv is not None and bool(recv.blocks)

    # --- recvs: this engine is the decode ---------------------------------------------------------------------------

    def _register_recv(self, request: Request, blocks: Blocks) -> bool:
        """Register a transfer that the workers will ask for. Return False if an open one has the same name."""
        name, params = self._name(request.request_id), request.kv_transfer_params or {}
        transfer = self._transfer(_transfer_of(request))
        if name in self._book.recvs:
            why = "this request has a transfer open already; the prefill's blocks stay held until they expire there"
            self._ignore("recv", why, transfer=transfer, request=name)
            return False
        prefill = str(params.get("remote_engine_id", ""))
        known = self._book.prefills.get(prefill, {})
        self._requests.allocated(
            name, generation_of(request), [(group, from_ranges(ranges)) for group, ranges in blocks]
        )
        registered = self.ledger.record(
            ev.RecvRegistered,
            transfer=transfer,
            request=name,
            generation=generation_of(request),
            blocks=blocks,
            ranks=self._ranks,
            prefill=prefill,
            bootstrap=str(params.get("remote_bootstrap_addr", "")),
            peers=tuple(sorted({peer for peers in known.values() for peer in peers})),
            timeout_ns=int((bootstrap_timeout_s() + connect_timeout_s() + answer_timeout_s()) * 1e9),
        )
        return registered is not None

    def _peers_named(self, report: PeersReport) -> None:
        recv = self._open(self._book.recvs, report, "recv")
        if recv is not None:
            self.ledger.record(ev.PeersNamed, **self._subject(report), peers=report.peers, address=report.address)

    def _peer_lost(self, report: LostReport) -> None:
        recv = self._open(self._book.recvs, report, "recv")
        if recv is not None and not recv.failed:
            self._recv_failed(recv, report)

    def _peer_settled(self, report: PeerReport) -> None:
        recv = self._open(self._book.recvs, report, "recv")
        if recv is None:
            return
        name = self._name(report.request)
        failure = report.failure
        known = (report.rank, report.peer) in recv.waiting or (not report.peer and report.rank in recv.unnamed)
        if not known and any((rank, peer) == (report.rank, report.peer) for rank, peer, _ in recv.outcomes):
            why = f"{report.peer or 'peer discovery'} had already settled for this rank"
            self._ignore("recv", why, transfer=recv.transfer, request=name, rank=report.rank, code=str(failure.code))
            return
        outcome = "failed" if failure else "ok"
        self.ledger.record(
            ev.PeerSettled, **self._subject(report), peer=report.peer, outcome=outcome, **failure.fields()
        )
        if failure and not recv.failed:
            self._recv_failed(recv, report)
        if not recv.blocks and not recv.unnamed and not recv.waiting:
            # Nobody waits for this one, so vLLM neither asks for it nor hears of it.
            self._settle_recv(name, recv)

    def _recv_failed(self, recv: Recv, report: LostReport | PeerReport) -> None:
        self.ledger.record(
            ev.RecvFailed, **self._subject(report), peer=report.peer, **report.failure.fields(), blocks=recv.blocks
        )
        name = self._name(report.request)
        if recv.blocks and name not in self._book.requests:
            self._recovered(name, recv, "gone")

    def _finished_recving(self, request_id: str) -> bool:
        """Record that vLLM counts a recv as finished on all ranks. Return whether it may use or free the blocks."""
        name = self._name(request_id)
        recv = self._book.recvs.get(name)
        if recv is None:
            self._ignore("recv", "vLLM had already been told that this request's KV had arrived", request=name)
            return False
        if recv.failed and not recv.recovered:
            self._recovered(name, recv, "recomputed" if name in self._book.requests else "gone")
        settled = self._settle_recv(name, recv)
        send = self._book.sends.get(name)
        # A request that has ended and is still being sent keeps its blocks until that is over, too.
        return settled and not (send is not None and send.phase != "registered")

    def _settle_recv(self, name: str, recv: Recv) -> bool:
        outcome = "failed" if recv.failed else "loaded" if recv.blocks else "released"
        return self.ledger.record(ev.RecvSettled, transfer=recv.transfer, request=name, outcome=outcome) is not None

    def _recovered(self, name: str, recv: Recv, action: str) -> None:
        self.ledger.record(
            ev.RecvRecovered, transfer=recv.transfer, request=name, generation=recv.generation, action=action
        )

    # --- what the workers report ------------------------------------------------------------------------------------

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the reports of a step, and leave in vLLM's results only what agrees with the ledger."""
        metadata = connector_output.kv_connector_worker_meta
        if not isinstance(metadata, PDWorkerMetadata):
            return
        for report in metadata.reports:
            self._take(report)
        # Under vLLM's MultiConnector the results hold other connectors' requests too; those are not ours.
        recved = metadata.recved.intersection(connector_output.finished_recving or ())
        sent = metadata.sent.intersection(connector_output.finished_sending or ())
        withheld = {request_id for request_id in sorted(recved) if not self._finished_recving(request_id)}
        if withheld:
            connector_output.finished_recving = set(connector_output.finished_recving or ()) - withheld
        withheld = {request_id for request_id in sorted(sent) if not self._finished_sending(request_id)}
        if withheld:
            connector_output.finished_sending = set(connector_output.finished_sending or ()) - withheld

    def _take(self, report: Report) -> None:
        match report:
            case PeersReport():
                self._peers_named(report)
            case PeerReport():
                self._peer_settled(report)
            case LostReport():
                self._peer_lost(report)
            case PushReport():
                self._push_started(report)
            case SentReport():
                self._rank_sent(report)
            case LateReport():
                self._ignore(report.what, report.why, **self._subject(report), code=report.code)

    def _open(self, opened: Mapping[str, T], report: OfTransfer, what: str) -> T | None:
        """Return the open transfer that a report is of; None, and a record of it, if it is over."""
        name = self._name(report.request)
        transfer = self._transfer(report.transfer)
        found = opened.get(name)
        if found is not None and found.transfer == transfer:
            return found
        failure: Failure = getattr(report, "failure", NO_FAILURE)
        why = "the transfer had already ended"
        self._ignore(what, why, transfer=transfer, request=name, rank=report.rank, code=str(failure.code))
        return None

    def _ignore(self, what: str, why: str, *, transfer: str = "", request: str, rank: int = -1, code: str = "") -> None:
        self.ledger.record(
            ev.ReportIgnored, what=what, why=why, transfer=transfer, request=request, rank=rank, code=code
        )

    def _subject(self, report: Report) -> ReportSubject:
        """Return the fields that say whose report it is, with the names in the log for vLLM's ids."""
        return {
            "transfer": self._transfer(report.transfer),
            "request": self._name(report.request),
            "rank": report.rank,
        }

    def _transfer(self, transfer: str) -> str:
        """Return the name in the log of a transfer id: routers derive it from the request's own id."""
        return self._name(transfer) if transfer else ""

    def _by_group(self, groups: Sequence[list[int]]) -> Blocks:
        named: Iterable[GroupIds] = zip(self._groups, groups, strict=True) if groups else ()
        return blocks_of_groups(named)

    def has_pending_push_work(self) -> bool:
        """Return True while a transfer is open: its reports need engine steps."""
        book = self._book
        return any(not opened.quarantined for opened in (*book.sends.values(), *book.recvs.values()))


def _unusable(params: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return which of these parameters name nothing; empty if all are texts."""
    lacking = [name for name in names if not (isinstance(params.get(name), str) and params[name])]
    return f"{', '.join(lacking)} of its kv_transfer_params must be texts that are not empty" if lacking else ""


def _transfer_of(request: Request) -> str:
    return str((request.kv_transfer_params or {}).get("transfer_id", ""))
