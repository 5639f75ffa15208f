"""The rules of the P/D part of the book: what is accepted, what is refused, and that refusing changes nothing."""

from typing import Any

import msgspec
import pytest

from ledger import events as ev
from ledger.blocks import Blocks
from ledger.errors import Refused
from ledger.state.apply import State
from ledger.state.pd import KNOWN_PREFILLS
from ledger.state.records import Book

BLOCKS: Blocks = ((0, ((1, 3),)),)
OTHER_BLOCKS: Blocks = ((0, ((3, 5),)),)


class Story:
    """Events as they are told, each with its place and time."""

    def __init__(self) -> None:
        self.state = State()
        self._seq = 0

    def tell(self, kind: type[ev.Event], **fields: Any) -> None:
        """Apply an event."""
        self._seq += 1
        self.state.apply(kind(self._seq, self._seq, self._seq, ev.SCHEDULER, 0, **fields))

    def refuses(self, rule: str, kind: type[ev.Event], **fields: Any) -> None:
        """Expect the next event to be refused, and to have changed nothing."""
        before, held = self.state.digest(), msgspec.json.encode(self.state.held)
        with pytest.raises(Refused) as refused:
            self.tell(kind, **fields)
        assert refused.value.rule == rule
        assert self.state.digest() == before
        assert msgspec.json.encode(self.state.held) == held

    def held(self) -> set[int]:
        """The blocks that open transfers name."""
        return {block for counts in self.state.held.values() for block in counts}


T: dict[str, Any] = {"transfer": "t", "request": "r"}
RECV: dict[str, Any] = {**T, "generation": 1, "blocks": BLOCKS, "ranks": ((0, 1),), "prefill": "P"}
SEND: dict[str, Any] = {**T, "generation": 1, "ranks": ((0, 1),)}
READY: dict[str, Any] = {**T, "generation": 1, "blocks": BLOCKS}


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.fixture
def recv(story: Story) -> Story:
    """A recv of two ranks: rank 0 has named two peers, rank 1 none yet."""
    story.tell(ev.RequestQueued, request="r", generation=1)
    story.tell(ev.RecvRegistered, **RECV)
    story.tell(ev.PeersNamed, **T, rank=0, peers=("tp0 pp0", "tp0 pp1"))
    return story


@pytest.fixture
def send(story: Story) -> Story:
    """A send of two ranks that is ready."""
    story.tell(ev.SendRegistered, **SEND)
    story.tell(ev.SendReady, **READY)
    return story


# --- recvs ----------------------------------------------------------------------------------------------------------


def test_a_recv_settles_when_every_peer_of_every_rank_has(recv: Story) -> None:
    assert recv.state.book.requests["r"].state == "loading"
    for peer in ("tp0 pp0", "tp0 pp1"):
        recv.refuses("recv_settled_early", ev.RecvSettled, **T)
        recv.tell(ev.PeerSettled, **T, rank=0, peer=peer)
    recv.refuses("recv_settled_early", ev.RecvSettled, **T)
    recv.tell(ev.PeersNamed, **T, rank=1, peers=("tp1 pp0",))
    recv.refuses("recv_settled_early", ev.RecvSettled, **T)
    recv.tell(ev.PeerSettled, **T, rank=1, peer="tp1 pp0")
    recv.tell(ev.RecvSettled, **T)
    assert recv.state.book.recvs == {}
    assert recv.state.book.requests["r"].state == "queued"
    assert recv.held() == set()


def test_a_failure_holds_the_blocks_until_the_other_peers_have_settled(recv: Story) -> None:
    recv.tell(ev.PeerSettled, **T, rank=0, peer="tp0 pp0", outcome="failed", code="TRANSFER_FAILED")
    recv.tell(ev.RecvFailed, **T, rank=0, peer="tp0 pp0", code="TRANSFER_FAILED")
    recv.refuses("recv_settled_early", ev.RecvSettled, **T, outcome="failed")
    assert recv.held() == {1, 2, 3}


def all_settled(story: Story) -> None:
    story.tell(ev.PeerSettled, **T, rank=0, peer="tp0 pp0", outcome="failed")
    story.tell(ev.PeerSettled, **T, rank=0, peer="tp0 pp1")
    story.tell(ev.PeerSettled, **T, rank=1, outcome="failed")


def test_a_failure_is_sticky(recv: Story) -> None:
    all_settled(recv)
    recv.refuses("unreported_failure", ev.RecvSettled, **T)
    recv.tell(ev.RecvFailed, **T, rank=0)
    recv.refuses("recv_failed_twice", ev.RecvFailed, **T, rank=0)
    recv.refuses("failure_is_sticky", ev.RecvSettled, **T, outcome="loaded")
    recv.tell(ev.RecvSettled, **T, outcome="failed")


def test_a_recv_that_did_not_fail_cannot_settle_as_failed(story: Story) -> None:
    story.tell(ev.RecvRegistered, **{**RECV, "ranks": ((0, 0),)})
    story.tell(ev.PeersNamed, **T, rank=0, peers=("tp0 pp0",))
    story.tell(ev.PeerSettled, **T, rank=0, peer="tp0 pp0")
    story.refuses("failure_is_sticky", ev.RecvSettled, **T, outcome="failed")


def test_a_failure_may_be_known_before_its_peer_has_settled(recv: Story) -> None:
    recv.tell(ev.RecvFailed, **T, rank=0, peer="tp0 pp0", code="PEER_UNREACHABLE")
    assert recv.state.book.recvs["r"].failed
    recv.refuses("recv_settled_early", ev.RecvSettled, **T, outcome="failed")


@pytest.mark.parametrize(
    ("rule", "kind", "fields"),
    [
        ("recv_still_open", ev.RecvRegistered, RECV | {"transfer": "u"}),
        ("peers_named_twice", ev.PeersNamed, T | {"rank": 0, "peers": ("tp0 pp0",)}),
        ("peers_named_twice", ev.PeersNamed, T | {"rank": 7, "peers": ("tp0 pp0",)}),
        ("peers_not_named", ev.PeersNamed, T | {"rank": 1, "peers": ()}),
        ("peers_not_named", ev.PeersNamed, T | {"rank": 1, "peers": ("tp0 pp0", "tp0 pp0")}),
        ("unexpected_peer", ev.PeerSettled, T | {"rank": 0, "peer": "tp9 pp9"}),
        ("unexpected_peer", ev.PeerSettled, T | {"rank": 1, "peer": "tp0 pp0"}),
        ("peer_not_named", ev.PeerSettled, T | {"rank": 0, "outcome": "failed"}),
        ("loaded_from_nobody", ev.PeerSettled, T | {"rank": 1}),
        ("recovered_from_nothing", ev.RecvRecovered, T | {"generation": 1, "action": "failed"}),
        ("unknown_recv", ev.RecvFailed, T | {"transfer": "u", "rank": 0}),
        ("unknown_recv", ev.RecvSettled, T | {"request": "s"}),
        ("unknown_recv", ev.PeersNamed, T | {"transfer": "u", "rank": 1, "peers": ("tp0 pp0",)}),
    ],
)
def test_what_makes_no_sense_for_an_open_recv_is_refused(
    recv: Story, rule: str, kind: type[ev.Event], fields: dict[str, Any]
) -> None:
    recv.refuses(rule, kind, **fields)


def test_a_peer_settles_once(recv: Story) -> None:
    recv.tell(ev.PeerSettled, **T, rank=0, peer="tp0 pp0")
    recv.refuses("peer_settled_twice", ev.PeerSettled, **T, rank=0, peer="tp0 pp0", outcome="failed")


def test_what_became_of_the_request_is_said_once(recv: Story) -> None:
    recv.tell(ev.RecvFailed, **T, rank=0)
    recv.tell(ev.RecvRecovered, **T, generation=1, action="failed")
    recv.refuses("recovered_twice", ev.RecvRecovered, **T, generation=1, action="gone")


def test_a_recv_needs_ranks_and_real_blocks(story: Story) -> None:
    story.refuses("recv_without_ranks", ev.RecvRegistered, **{**RECV, "ranks": ()})
    story.refuses("null_block_moved", ev.RecvRegistered, **{**RECV, "blocks": ((0, ((0, 3),)),)})


def test_a_recv_without_blocks_makes_nobody_wait(story: Story) -> None:
    story.tell(ev.RequestQueued, request="r", generation=1)
    story.tell(ev.RecvRegistered, **{**RECV, "blocks": ()})
    assert story.state.book.requests["r"].state == "queued"


def test_the_peers_of_a_prefill_are_remembered_for_the_last_engines(story: Story) -> None:
    for number in range(KNOWN_PREFILLS + 3):
        name = {"transfer": f"t{number}", "request": f"r{number}"}
        story.tell(ev.RecvRegistered, **{**RECV, **name, "prefill": f"P{number}", "ranks": ((0, 0),)})
        story.tell(ev.PeersNamed, **name, rank=0, peers=("tp0 pp0",))
    prefills = story.state.book.prefills
    assert len(prefills) == KNOWN_PREFILLS
    assert next(iter(prefills)) == "P3"
    assert prefills["P4"] == {0: ("tp0 pp0",)}


# --- sends ----------------------------------------------------------------------------------------------------------


def test_a_send_holds_its_blocks_until_every_rank_has_sent(send: Story) -> None:
    send.tell(ev.SendStarted, **T, rank=0, peer="tp0 pp0")
    assert send.state.book.sends["r"].phase == "sending"
    send.tell(ev.RankSent, **T, rank=0)
    send.refuses("send_over_early", ev.SendSettled, **T)
    assert send.held() == {1, 2, 3}
    send.tell(ev.RankSent, **T, rank=1)
    send.tell(ev.SendSettled, **T)
    assert send.held() == set()
    assert send.state.book.sends == {}


def test_a_send_that_one_rank_waited_for_in_vain_has_expired(send: Story) -> None:
    send.tell(ev.RankSent, **T, rank=0)
    send.refuses("send_over_early", ev.SendExpired, **T, expired_ranks=((1, 1),))
    send.tell(ev.RankSent, **T, rank=1, outcome="expired")
    send.refuses("send_not_served", ev.SendSettled, **T)
    send.refuses("send_not_expired", ev.SendExpired, **T, expired_ranks=((0, 1),))
    send.tell(ev.SendExpired, **T, expired_ranks=((1, 1),))
    assert send.held() == set()


@pytest.mark.parametrize(
    ("rule", "kind", "fields"),
    [
        ("send_still_open", ev.SendRegistered, SEND | {"transfer": "u"}),
        ("send_ready_twice", ev.SendReady, READY),
        ("withdrawn_late", ev.SendSettled, T | {"outcome": "withdrawn"}),
        ("unexpected_rank", ev.SendStarted, T | {"rank": 5, "peer": "tp0 pp0"}),
        ("unexpected_rank", ev.RankSent, T | {"rank": 5}),
        ("unknown_send", ev.RankSent, T | {"transfer": "u", "rank": 0}),
        ("unknown_send", ev.SendExpired, T | {"request": "s"}),
        ("send_over_early", ev.SendSettled, T),
    ],
)
def test_what_makes_no_sense_for_a_ready_send_is_refused(
    send: Story, rule: str, kind: type[ev.Event], fields: dict[str, Any]
) -> None:
    send.refuses(rule, kind, **fields)


def test_a_rank_finishes_with_a_send_once(send: Story) -> None:
    send.tell(ev.RankSent, **T, rank=0)
    send.refuses("rank_sent_twice", ev.RankSent, **T, rank=0, outcome="expired")
    send.refuses("rank_sent_twice", ev.SendStarted, **T, rank=0, peer="tp0 pp0")


def test_nothing_is_sent_before_it_is_ready(story: Story) -> None:
    story.refuses("send_without_ranks", ev.SendRegistered, **{**SEND, "ranks": ()})
    story.tell(ev.SendRegistered, **SEND)
    for kind, fields in (
        (ev.SendStarted, {"rank": 0, "peer": "tp0 pp0"}),
        (ev.RankSent, {"rank": 0}),
        (ev.SendSettled, {}),
        (ev.SendExpired, {}),
    ):
        story.refuses("sent_before_ready", kind, **T, **fields)
    story.refuses("null_block_moved", ev.SendReady, **{**READY, "blocks": ((0, ((0, 0),)),)})
    story.tell(ev.SendSettled, **T, outcome="withdrawn")
    assert story.state.book.sends == {}


# --- both -----------------------------------------------------------------------------------------------------------


def test_a_block_that_two_transfers_name_stays_named_until_both_are_over(send: Story) -> None:
    other = {"transfer": "u", "request": "s"}
    send.tell(ev.SendRegistered, **{**SEND, **other, "ranks": ((0, 0),)})
    send.tell(ev.SendReady, **{**READY, **other, "blocks": OTHER_BLOCKS})
    assert send.state.named(0, [1, 3, 5, 9]) == [1, 3, 5]
    for rank in (0, 1):
        send.tell(ev.RankSent, **T, rank=rank)
    send.tell(ev.SendSettled, **T)
    assert send.state.named(0, [1, 3, 5, 9]) == [3, 5]


def test_a_quarantined_transfer_keeps_its_blocks(recv: Story, send: Story) -> None:
    assert recv.state is send.state
    send.tell(ev.InvariantViolated, rule="a_rule", detail="broken", transfer="t", request="r")
    assert send.state.book.sends["r"].quarantined
    assert send.state.book.recvs["r"].quarantined
    send.tell(ev.RankSent, **T, rank=0)
    send.tell(ev.RankSent, **T, rank=1)
    send.refuses("transfer_quarantined", ev.SendSettled, **T)
    all_settled(recv)
    recv.tell(ev.RecvFailed, **T, rank=1)
    recv.refuses("transfer_quarantined", ev.RecvSettled, **T, outcome="failed")


def test_a_violation_of_another_transfer_quarantines_nothing(send: Story) -> None:
    send.tell(ev.InvariantViolated, rule="a_rule", detail="broken", transfer="u", request="r")
    assert not send.state.book.sends["r"].quarantined


def test_a_suspected_stall_is_noted_once(recv: Story) -> None:
    recv.tell(ev.StallSuspected, waited_ns=1, transfer="t", request="r")
    assert recv.state.book.recvs["r"].suspected


def test_a_book_with_open_transfers_is_taken_over_whole(recv: Story) -> None:
    other = {"transfer": "u", "request": "s"}
    recv.tell(ev.SendRegistered, **{**SEND, **other})
    recv.tell(ev.SendReady, **{**READY, **other, "blocks": OTHER_BLOCKS})
    restored = State(msgspec.json.decode(recv.state.encode(), type=Book))
    assert restored.digest() == recv.state.digest()
    assert restored.held == recv.state.held
