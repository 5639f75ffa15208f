"""The prefill side of a worker: pushes blocks as upstream does, and reports how each send ended on this rank.

    hook (upstream calls it)     when                                       what it adds
    ---------------------------  -----------------------------------------  -----------------------------------------
    _mooncake_sender_listener    the worker starts                          nothing; it is ended after the last push
    record_send_reqs             requests run, are ready, or are withdrawn  remembers which request is which send
    send_kv_to_decode            a decode worker's question has its turn    refuses one that is too old; drops what
                                                                            nobody will ever prefill
    _build_transfer_params       blocks of ready requests are to be pushed  PushReport; undoes upstream's count when
                                                                            this raises
    _send_blocks                 the transfer engine is called              transfer_started, transfer_finished
    fetch_finished_sending_reqs  every step                                 SentReport, with the last failure, and not
                                                                            before the last push has ended

A push that fails leaves the blocks held: the decode may ask again, until the send expires. The ledger shows what is
held, for how long, and how often it was tried. All of this runs on upstream's sender loop, but for `_send_blocks`,
which runs on its threads. This file may know vLLM's worker.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorMetadata,
    MooncakeConnectorWorker,
    MooncakeXferMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    SendBlockMeta,
    TransferRegion,
)

from connector.pd import failures
from connector.pd.metadata import PushReport, SentReport, hold_timeout_s
from connector.pd.outbox import Evidence, PDOutbox
from connector.pd.peers import peer_name
from connector.runtime.failure_log import FailureLog
from connector.runtime.failures import NO_FAILURE, Failure
from connector.runtime.requests import blocks_of_groups
from ledger import events as ev
from ledger.blocks import Blocks
from ledger.codes import KVCacheErrorCode, Stage

logger = logging.getLogger("kvledger")

LAST_PUSHES_S = 1.5
"""How long a worker's end waits for pushes that run. vLLM gives all of its end 5 s, and Mooncake's takes some of them.

A push that takes longer is left alone, with the socket: the end of the process ends both.
"""

ENDING = "The prefill worker ends."
"""The answer to a decode that asks, or waits for its turn, while the worker shuts down."""

TOO_LATE = "Timeout waiting for P side ready."
"""The answer to a decode whose time is over, in upstream's words. It has freed its blocks, or will in a minute."""

SENT_BEFORE = "The transfer was over before this request could be served."
"""The answer to a decode that asks for a transfer along with another request, and comes too late."""

NOT_BEGUN = -1
"""The result, for upstream, of a push that is not begun."""

RAISED = -1
"""The result, for upstream, of a call to the transfer engine that raised: it answers the decode for codes only."""


class Push:
    """A send on this rank: whose it is, how often it was pushed, and why the last push failed."""

    def __init__(self, request: str, transfer: str) -> None:
        self.request = request
        self.transfer = transfer
        self.count = 0
        self.failure = NO_FAILURE
        self.meta: SendBlockMeta | None = None
        """Upstream's count of the pushes that are under way."""

    @property
    def under_way(self) -> bool:
        """Whether blocks are being read for it now."""
        return self.meta is not None and self.meta.sending > 0


class _Question:
    """What a decode worker asks.

    Attributes:
        since_s: when its time began, on the loop's clock: when it came, and again whenever a part of it is answered.
    """

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s

    def is_over(self, now_s: float) -> bool:
        """Return whether the decode may give its blocks away, and so no push may begin."""
        return now_s - self.since_s > hold_timeout_s()


_QUESTION: ContextVar[_Question | None] = ContextVar("kvledger_question", default=None)
"""Which question the running task serves. Upstream's functions do not pass it on."""


class _Questions(asyncio.Queue[tuple[bytes, bytes]]):
    """Upstream's queue of questions, which notes when each came: upstream counts from when it has its turn."""

    def __init__(self) -> None:
        super().__init__()
        self._questions: deque[_Question] = deque()

    def _put(self, item: tuple[bytes, bytes]) -> None:
        self._questions.append(_Question(asyncio.get_running_loop().time()))
        super()._put(item)

    def _get(self) -> tuple[bytes, bytes]:
        _QUESTION.set(self._questions.popleft())
        return super()._get()


class _Batch(list[int]):
    """Source addresses of one call to the transfer engine, with the sends that they are of."""

    question: _Question | None
    sends: list[tuple[Push, SendBlockMeta]]
    peer: str


class PushingWorker(MooncakeConnectorWorker):
    """The prefill side of `LedgerMooncakeWorker`."""

    outbox: PDOutbox
    evidence: Evidence
    failures: FailureLog
    rank: int
    logged: Callable[[str], str]
    private: bool
    group_ids: tuple[int, ...]

    def open_pushing(self) -> None:
        """Begin to track sends."""
        self._pushes: dict[str, Push] = {}
        self._asked: Counter[str] = Counter()
        self._over: set[str] = set()
        """Requests that upstream counts as sent, and whose blocks are still being pushed once more."""
        self._listener: asyncio.Task[Any] | None = None
        if not self.is_kv_consumer:
            self.sender_worker_queue = _Questions()
        self._ending = False
        """No push is begun any more."""
        self._pushed: list[SendBlockMeta] = []
        """Upstream's counts of pushes of all questions, those that are under way among them."""

    def stop_pushing(self) -> bool:
        """Begin no push any more, wait for those that run, end the listener, and return whether it has ended.

        A decode takes an address at which nobody listens for a process that is gone and writes no more, so the socket
        stays open while a push runs. Upstream closes its context only when no socket is open: it would wait for ever.
        """
        if self.is_kv_consumer or self._listener is None or not self.sender_loop.is_running():
            return True
        ended = asyncio.run_coroutine_threadsafe(self._end_listener(self._listener), self.sender_loop)
        try:
            return ended.result(timeout=LAST_PUSHES_S + 0.5)
        except TimeoutError:
            ended.cancel()
            return False

    async def _end_listener(self, listener: asyncio.Task[Any]) -> bool:
        self._ending = True
        deadline = self.sender_loop.time() + LAST_PUSHES_S
        # Upstream counts a push down and answers its decode in one go, so what is counted down is answered.
        while any(send_meta.sending > 0 for send_meta in self._pushed):
            if self.sender_loop.time() > deadline:
                return False
            await asyncio.sleep(0.01)
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
        return True

    async def _mooncake_sender_listener(self, ready_event: threading.Event) -> None:
        self._listener = asyncio.current_task()
        await super()._mooncake_sender_listener(ready_event)

    async def record_send_reqs(self, metadata: MooncakeConnectorMetadata) -> None:
        """Note which request each send is of, then let upstream note it.

        What is withdrawn goes first: in the same step its id may be that of another request's send.
        """
        for transfer in metadata.reqs_not_processed:
            self.reqs_need_send.pop(transfer, None)
            self._pushes.pop(transfer, None)
        metadata.reqs_not_processed = set()
        for request_id, (transfer, block_ids) in metadata.reqs_to_send.items():
            self._pushes.setdefault(transfer, Push(request_id, transfer))
            if block_ids and transfer not in self.reqs_need_send:
                # Upstream would raise here, and the step's other sends would be lost with this one.
                self.reqs_need_send[transfer] = SendBlockMeta(request_id, transfer, [], asyncio.Event())
        await super().record_send_reqs(metadata)

    async def send_kv_to_decode(self, identity: bytes, sock: Any, meta: MooncakeXferMetadata) -> None:
        """Serve a decode worker with upstream, unless its time is over."""
        question = _QUESTION.get()
        if question is not None and question.is_over(self.sender_loop.time()):
            response = MooncakeXferResponse(
                status=MooncakeXferResponseStatus.FINISH, err_reqs=list(meta.req_blocks), err_msg=TOO_LATE
            )
            await sock.send_multipart((identity, self._encoder.encode(response)))
            return
        transfers = [transfer for transfer, _ in meta.req_blocks.values()]
        self._asked.update(transfers)
        try:
            await super().send_kv_to_decode(identity, sock, meta)
        finally:
            self._asked.subtract(transfers)
            for transfer in transfers:
                self._forget_unknown(transfer)

    def _forget_unknown(self, transfer: str) -> None:
        """Drop what upstream keeps of a transfer that nobody here prefills, once nobody waits for it any more."""
        if self._asked[transfer] > 0:
            return
        del self._asked[transfer]
        if transfer not in self._pushes:
            self.reqs_need_send.pop(transfer, None)

    async def _build_transfer_params(
        self,
        ready_reqs: list[tuple[str, SendBlockMeta]],
        agent_meta: MooncakeXferMetadata,
        local_regions: list[TransferRegion],
        remote_regions: list[TransferRegion],
    ) -> tuple[list[int], list[int], list[int], list[str], str | None]:
        """Plan with upstream, for the sends that are still this rank's.

        Upstream asks whether a transfer is still to be sent by its id. When it has been sent while another push held
        this question up, and a further request asks for it since, the id is there again, and what it finds under the
        question is the old send, whose blocks vLLM has given away.
        """
        self._pushed = [meta for meta in self._pushed if meta.sending > 0] + [meta for _, meta in ready_reqs]
        question = _QUESTION.get()
        refusal = self._refusal(question)
        why = refusal or SENT_BEFORE
        over = [
            d_req_id
            for d_req_id, send in ready_reqs
            if refusal or self.reqs_need_send.get(send.transfer_id) is not send
        ]
        if question is not None and ready_reqs and not refusal:
            # The decode begins anew with each answer, too; but if its time was over it may have given up, and does not.
            question.since_s = self.sender_loop.time()
        asked, ready_reqs = ready_reqs, [each for each in ready_reqs if each[0] not in over]
        peer = peer_name(agent_meta.remote_tp_rank, 0 if agent_meta.remote_pp_size == 1 else "?")
        address = f"{agent_meta.remote_hostname}:{agent_meta.remote_port}"
        sends: dict[str, tuple[Push, SendBlockMeta]] = {}
        for d_req_id, send_meta in ready_reqs:
            push = self._pushes.get(send_meta.transfer_id)
            if push is not None and any(agent_meta.req_blocks[d_req_id][1]):
                push.count += 1
                push.meta = send_meta
                sends[d_req_id] = push, send_meta
                self.outbox.add(PushReport(push.request, push.transfer, self.rank, peer, address))
        try:
            src_ptrs, dst_ptrs, lengths, err_reqs, err_msg = await super()._build_transfer_params(
                ready_reqs, agent_meta, local_regions, remote_regions
            )
        except Exception as error:
            for _, send_meta in asked:
                send_meta.sending -= 1  # upstream counted it up, and a count that stays up never expires
            self._failed(list(sends.values()), failures.of_exception(error, Stage.SEND), peer)
            raise
        for request_id in err_reqs:
            if request_id in sends:
                self._failed([sends.pop(request_id)], failures.of_line(err_msg, private=self.private), peer)
        batch = _Batch(src_ptrs)
        batch.sends = list(sends.values())
        batch.peer = peer
        batch.question = question
        return batch, dst_ptrs, lengths, [*err_reqs, *over], err_msg or (why if over else None)

    def _send_blocks(self, remote_session: str, src_ptrs: list[int], dst_ptrs: list[int], lengths: list[int]) -> int:
        sends = src_ptrs.sends if isinstance(src_ptrs, _Batch) else []
        peer = src_ptrs.peer if isinstance(src_ptrs, _Batch) else ""
        question = src_ptrs.question if isinstance(src_ptrs, _Batch) else None
        refusal = self._refusal(question)
        if refusal:  # it has waited for a thread
            self._failed(sends, failures.of_line(refusal), peer)
            return NOT_BEGUN
        # One call moves the blocks of several sends; how many bytes are whose, it does not say.
        total_bytes = sum(lengths) if len(sends) == 1 else 0
        for push, send_meta in sends:
            self._emit(ev.TransferStarted, push, peer, blocks=self._push_blocks(send_meta), bytes=total_bytes)
        started_ns = time.monotonic_ns()
        outcome, failure = "ok", NO_FAILURE
        try:
            result = super()._send_blocks(remote_session, src_ptrs, dst_ptrs, lengths)
        except Exception as error:
            logger.exception("kvledger: the transfer engine raised while pushing to %s", peer)
            result, outcome, failure = RAISED, "raised", failures.of_exception(error, Stage.SEND)
        else:
            if result != 0:
                outcome, failure = "failed", Failure(KVCacheErrorCode.TRANSFER_FAILED, str(result), Stage.SEND)
        duration_ns = time.monotonic_ns() - started_ns
        for push, _ in sends:
            self._emit(
                ev.TransferFinished,
                push,
                peer,
                outcome=outcome,
                bytes=total_bytes if outcome == "ok" else 0,
                duration_ns=duration_ns,
                **failure.cause_fields(),
            )
        if failure:
            self._failed(sends, failure, peer)
        if question is not None:
            question.since_s = self.sender_loop.time()
        return result

    def _refusal(self, question: _Question | None) -> str:
        """Return why no push may begin for a question, in words for the decode; nothing if one may."""
        if self._ending:
            return ENDING
        return TOO_LATE if question is not None and question.is_over(self.sender_loop.time()) else ""

    def _emit(self, kind: type[ev.TransferStarted | ev.TransferFinished], push: Push, peer: str, **fields: Any) -> None:
        self.evidence.emit(kind, op="push", peer=peer, **self._ids(push), **fields)

    def _failed(self, sends: list[tuple[Push, SendBlockMeta]], failure: Failure, peer: str) -> None:
        """Note a failed push, and say it in a line. The blocks stay held."""
        for push, send_meta in sends:
            push.failure = failure
            failed = failure.of_blocks(self._push_blocks(send_meta))
            self.failures.report(failed, **self._ids(push), rank=self.rank, peer=peer)

    def _ids(self, push: Push) -> dict[str, str]:
        """Return the names in the log of a push's request and transfer."""
        return {"request": self.logged(push.request), "transfer": self.logged(push.transfer)}

    def _push_blocks(self, send_meta: SendBlockMeta) -> Blocks:
        groups = send_meta.local_block_ids
        return blocks_of_groups(zip(self.group_ids, groups, strict=True)) if groups else ()

    async def fetch_finished_sending_reqs(self) -> set[str]:
        """Return what upstream counts as over on this rank, and report how each send ended.

        Upstream counts pushes up to the number of decode workers that pair with this one. When a second request asks
        for the same transfer, its push may be under way when the count is reached: the blocks are held until it ends.
        """
        waiting = {meta.p_req_id for meta in self.reqs_need_send.values() if meta.p_req_id}
        over = self._over | await super().fetch_finished_sending_reqs()
        self._over = over & {push.request for push in self._pushes.values() if push.under_way}
        finished = over - self._over
        if finished:
            for push in [push for push in self._pushes.values() if push.request in finished]:
                del self._pushes[push.transfer]
                outcome = "expired" if push.request in waiting else "sent" if push.count else "released"
                self.outbox.add(SentReport(push.request, push.transfer, self.rank, outcome, push.count, push.failure))
        return finished
