"""The P/D part of the book: what a prefill engine sends, what a decode engine receives, and the rules of both.

A *send* holds a finished request's blocks until every rank has pushed them or has given up waiting. A *recv* holds the
blocks that the workers of a prefill engine write into, until none of them may write any more. A failure of a recv is
sticky, and it frees nothing: blocks go back when the last peer has settled, and not before. Freed on the first failure,
they are given to another request while a sibling still writes into them.

Sends and recvs are found by request: vLLM has at most one of each open for a request. This file knows
events and the book.
"""

from typing import TypeAlias

from ledger import events as ev
from ledger.blocks import NULL_BLOCK, expand, from_ranges, spoken, to_ranges
from ledger.errors import Refused
from ledger.state import invariants as inv
from ledger.state.counts import count_down, count_up
from ledger.state.handlers import Handlers
from ledger.state.projection import Projection
from ledger.state.records import Recv, Send

HANDLERS = Handlers()

KNOWN_PREFILLS = 64
"""Prefill engines whose workers are remembered. A decode engine talks to a few at a time; each restart is a new one."""

# --- sends ----------------------------------------------------------------------------------------------------------


@HANDLERS.on(ev.SendRegistered)
def _send_registered(state: Projection, event: ev.SendRegistered) -> None:
    sends = state.book.sends
    if event.request in sends:
        other = sends[event.request].transfer
        raise Refused(inv.SEND_STILL_OPEN, f"request {event.request} registers {event.transfer} while {other} is open")
    ranks = tuple(from_ranges(event.ranks))
    if not ranks:
        raise Refused(inv.SEND_WITHOUT_RANKS, f"transfer {event.transfer} names no rank that could ever report")
    sends[event.request] = Send(event.transfer, event.generation, event.seq, event.mono_ns, ranks, ranks)


@HANDLERS.on(ev.SendReady)
def _send_ready(state: Projection, event: ev.SendReady) -> None:
    send = _send(state, event)
    if send.phase != "registered":
        raise Refused(inv.SEND_READY_TWICE, f"transfer {event.transfer} of request {event.request} was ready before")
    _no_null_block(event)
    count_up(state.held, event.blocks)
    send.phase = "ready"
    send.generation = event.generation
    send.blocks = event.blocks
    send.timeout_ns = event.timeout_ns
    send.since_seq = event.seq
    send.since_mono_ns = event.mono_ns


@HANDLERS.on(ev.SendStarted)
def _send_started(state: Projection, event: ev.SendStarted) -> None:
    send = _send(state, event)
    if send.phase == "registered":
        raise Refused(inv.SENT_BEFORE_READY, f"rank {event.rank} pushes transfer {event.transfer} before it is ready")
    _expects(send, event)
    send.phase = "sending"
    send.pushes += 1


@HANDLERS.on(ev.RankSent)
def _rank_sent(state: Projection, event: ev.RankSent) -> None:
    send = _send(state, event)
    if send.phase == "registered":
        raise Refused(inv.SENT_BEFORE_READY, f"rank {event.rank} reports transfer {event.transfer} before it is ready")
    _expects(send, event)
    send.waiting = tuple([rank for rank in send.waiting if rank != event.rank])
    send.outcomes[event.rank] = event.outcome


@HANDLERS.on(ev.SendSettled)
def _send_settled(state: Projection, event: ev.SendSettled) -> None:
    send = _send(state, event)
    _not_quarantined(send, event)
    if event.outcome == "withdrawn":
        if send.phase != "registered":
            raise Refused(inv.WITHDRAWN_LATE, f"transfer {event.transfer} is ready, so ranks may read its blocks")
    else:
        _all_reported(send, event)
        if "expired" in send.outcomes.values():
            raise Refused(
                inv.SEND_NOT_SERVED, f"transfer {event.transfer} cannot settle as sent: a rank gave up waiting"
            )
    count_down(state.held, send.blocks)
    del state.book.sends[event.request]


@HANDLERS.on(ev.SendExpired)
def _send_expired(state: Projection, event: ev.SendExpired) -> None:
    send = _send(state, event)
    _not_quarantined(send, event)
    _all_reported(send, event)
    expired = to_ranges([rank for rank in send.ranks if send.outcomes[rank] == "expired"])
    if not expired or event.expired_ranks != expired:
        raise Refused(inv.SEND_NOT_EXPIRED, f"transfer {event.transfer} expired on ranks {expired}, not as it is said")
    count_down(state.held, send.blocks)
    del state.book.sends[event.request]


def _all_reported(send: Send, event: ev.SendSettled | ev.SendExpired) -> None:
    if send.phase == "registered":
        raise Refused(inv.SENT_BEFORE_READY, f"transfer {event.transfer} cannot be over before it is ready")
    if send.waiting:
        missing = spoken(send.waiting)
        raise Refused(
            inv.SEND_OVER_EARLY, f"transfer {event.transfer} is not over while ranks {missing} may read its blocks"
        )


def _expects(send: Send, event: ev.SendStarted | ev.RankSent) -> None:
    if event.rank in send.waiting:
        return
    if event.rank in send.outcomes:
        raise Refused(inv.RANK_SENT_TWICE, f"rank {event.rank} had finished with transfer {event.transfer} before")
    raise Refused(inv.UNEXPECTED_RANK, f"rank {event.rank} is not one of those of transfer {event.transfer}")


# --- recvs ----------------------------------------------------------------------------------------------------------


@HANDLERS.on(ev.RecvRegistered)
def _recv_registered(state: Projection, event: ev.RecvRegistered) -> None:
    book = state.book
    if event.request in book.recvs:
        other = book.recvs[event.request].transfer
        raise Refused(inv.RECV_STILL_OPEN, f"request {event.request} registers {event.transfer} while {other} is open")
    ranks = tuple(from_ranges(event.ranks))
    if not ranks:
        raise Refused(inv.RECV_WITHOUT_RANKS, f"transfer {event.transfer} names no rank that could ever ask")
    _no_null_block(event)
    book.recvs[event.request] = Recv(
        event.transfer,
        event.generation,
        event.seq,
        event.mono_ns,
        event.blocks,
        ranks,
        ranks,
        prefill=event.prefill,
        timeout_ns=event.timeout_ns,
    )
    count_up(state.held, event.blocks)
    record = book.requests.get(event.request)
    if event.blocks and record is not None and record.generation == event.generation:
        record.state = "loading"
        record.since_seq = event.seq


@HANDLERS.on(ev.PeersNamed)
def _peers_named(state: Projection, event: ev.PeersNamed) -> None:
    recv = _recv(state, event)
    if event.rank not in recv.unnamed:
        raise Refused(
            inv.PEERS_NAMED_TWICE, f"rank {event.rank} had named the peers of transfer {event.transfer} before"
        )
    if not event.peers or len(set(event.peers)) != len(event.peers):
        raise Refused(
            inv.PEERS_NOT_NAMED, f"rank {event.rank} names no peer of transfer {event.transfer}, or one twice"
        )
    recv.unnamed = tuple([rank for rank in recv.unnamed if rank != event.rank])
    recv.waiting = (*recv.waiting, *((event.rank, peer) for peer in event.peers))
    prefills = state.book.prefills
    if recv.prefill:
        prefills.setdefault(recv.prefill, {})[event.rank] = event.peers
        while len(prefills) > KNOWN_PREFILLS:
            del prefills[next(iter(prefills))]


@HANDLERS.on(ev.PeerSettled)
def _peer_settled(state: Projection, event: ev.PeerSettled) -> None:
    recv = _recv(state, event)
    if not event.peer:
        if event.rank not in recv.unnamed:
            raise Refused(
                inv.PEER_NOT_NAMED, f"rank {event.rank} settles transfer {event.transfer} without naming a peer"
            )
        if event.outcome == "ok":
            raise Refused(inv.LOADED_FROM_NOBODY, f"rank {event.rank} loaded {event.transfer} without naming a peer")
        recv.unnamed = tuple([rank for rank in recv.unnamed if rank != event.rank])
    else:
        pair = (event.rank, event.peer)
        if pair not in recv.waiting:
            if any((rank, peer) == pair for rank, peer, _ in recv.outcomes):
                raise Refused(
                    inv.PEER_SETTLED_TWICE, f"{event.peer} had settled {event.transfer} for rank {event.rank}"
                )
            raise Refused(inv.UNEXPECTED_PEER, f"rank {event.rank} does not expect {event.peer} in {event.transfer}")
        recv.waiting = tuple([other for other in recv.waiting if other != pair])
    recv.outcomes = (*recv.outcomes, (event.rank, event.peer, event.outcome))


@HANDLERS.on(ev.RecvFailed)
def _recv_failed(state: Projection, event: ev.RecvFailed) -> None:
    recv = _recv(state, event)
    if recv.failed:
        raise Refused(inv.RECV_FAILED_TWICE, f"transfer {event.transfer} had failed before; a transfer fails once")
    recv.failed = True


@HANDLERS.on(ev.RecvRecovered)
def _recv_recovered(state: Projection, event: ev.RecvRecovered) -> None:
    recv = _recv(state, event)
    if not recv.failed:
        raise Refused(inv.RECOVERED_FROM_NOTHING, f"transfer {event.transfer} did not fail, so nothing was recovered")
    if recv.recovered:
        raise Refused(inv.RECOVERED_TWICE, f"request {event.request} was {recv.recovered} before")
    recv.recovered = event.action


@HANDLERS.on(ev.RecvSettled)
def _recv_settled(state: Projection, event: ev.RecvSettled) -> None:
    recv = _recv(state, event)
    _not_quarantined(recv, event)
    if recv.unnamed or recv.waiting:
        peers = ", ".join(f"{peer} for rank {rank}" for rank, peer in recv.waiting)
        who = peers or f"the peers of ranks {spoken(recv.unnamed)}"
        raise Refused(inv.RECV_SETTLED_EARLY, f"transfer {event.transfer} cannot settle while {who} may still write")
    if (event.outcome == "failed") != recv.failed:
        said = "failed" if recv.failed else "did not fail"
        raise Refused(inv.FAILURE_IS_STICKY, f"transfer {event.transfer} {said}; it cannot settle as {event.outcome}")
    if not recv.failed and any(outcome != "ok" for _, _, outcome in recv.outcomes):
        raise Refused(inv.UNREPORTED_FAILURE, f"a peer failed transfer {event.transfer}, and no recv_failed says so")
    count_down(state.held, recv.blocks)
    book = state.book
    del book.recvs[event.request]
    record = book.requests.get(event.request)
    if record is not None and record.state == "loading" and record.generation == recv.generation:
        record.state = "queued"
        record.since_seq = event.seq


# --- common ---------------------------------------------------------------------------------------------------------

_OfSend: TypeAlias = ev.SendReady | ev.SendStarted | ev.RankSent | ev.SendSettled | ev.SendExpired
_OfRecv: TypeAlias = ev.PeersNamed | ev.PeerSettled | ev.RecvFailed | ev.RecvRecovered | ev.RecvSettled


def _send(state: Projection, event: _OfSend) -> Send:
    send = state.book.sends.get(event.request)
    if send is None or send.transfer != event.transfer:
        raise Refused(inv.UNKNOWN_SEND, f"request {event.request} has no open send {event.transfer}")
    return send


def _recv(state: Projection, event: _OfRecv) -> Recv:
    recv = state.book.recvs.get(event.request)
    if recv is None or recv.transfer != event.transfer:
        raise Refused(inv.UNKNOWN_RECV, f"request {event.request} has no open recv {event.transfer}")
    return recv


def _no_null_block(event: ev.SendReady | ev.RecvRegistered) -> None:
    if any(block == NULL_BLOCK for _, block in expand(event.blocks)):
        raise Refused(inv.NULL_BLOCK_MOVED, f"transfer {event.transfer} names the null block, which backs no KV")


def _not_quarantined(opened: Send | Recv, event: ev.SendSettled | ev.SendExpired | ev.RecvSettled) -> None:
    if opened.quarantined:
        raise Refused(inv.TRANSFER_QUARANTINED, f"transfer {event.transfer} is quarantined: its blocks stay held")
