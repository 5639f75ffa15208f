"""A kind of event that somebody adds is in every answer, by what it declares, without being named anywhere else."""

import msgspec
import pytest

from ledger import events as ev
from ledger.queries.blame import blame
from ledger.queries.why import why
from ledger.replay.fold import Replay
from ledger.replay.join import join
from ledger.state.apply import State
from ledger.state.open_work import find
from ledger.trace.builder import TraceBuilder


class LeaseRenewed(ev.Event, frozen=True, gc=False, omit_defaults=True, tag="lease_renewed"):
    """A decode asked its prefill to hold a transfer's blocks for longer."""

    about = ev.About("recv", turns="always")

    transfer: str
    request: str
    until_ns: int = 0

    def sentence(self) -> str:
        return f"the lease of {self.transfer} was renewed"


class BlocksLent(ev.Event, frozen=True, gc=False, omit_defaults=True, tag="blocks_lent"):
    """A load lends its blocks to somebody."""

    about = ev.About("load", uses="read")

    load: int
    request: str
    blocks: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    def sentence(self) -> str:
        return f"load {self.load} lent its blocks"


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (LeaseRenewed, BlocksLent):
        monkeypatch.setitem(ev.KINDS, str(kind.__struct_config__.tag), ev.declared(kind))


def log(*kinds: tuple[type[ev.Event], dict[str, object]]) -> list[ev.Event]:
    return [
        kind(seq, seq * 1_000_000, seq * 1_000_000, ev.SCHEDULER, seq, **fields)
        for seq, (kind, fields) in enumerate(kinds, 1)
    ]


R = {"request": "R", "generation": 1}
BLOCKS = ((0, ((3, 5),)),)
DECODE = log(
    (ev.LogOpened, {"engine": "decode", "boot": "b"}),
    (ev.RequestQueued, R),
    (ev.RecvRegistered, {**R, "transfer": "x1", "blocks": BLOCKS, "ranks": ((0, 0),), "prefill": "prefill"}),
    (LeaseRenewed, {"transfer": "x1", "request": "R"}),
    (ev.StallSuspected, {"waited_ns": 10**12, "transfer": "x1", "request": "R"}),
    (ev.LogClosed, {}),
)
PREFILL = log(
    (ev.LogOpened, {"engine": "prefill", "boot": "b"}),
    (ev.SendRegistered, {**R, "transfer": "x1", "ranks": ((0, 0),)}),
)


def test_a_new_kind_is_printed_as_it_says_itself():
    assert ev.line(DECODE[3]).endswith("the lease of x1 was renewed")


def test_what_a_kind_declares_is_not_written():
    assert msgspec.json.decode(msgspec.json.encode(DECODE[3])).keys() == {
        "kind", "seq", "ts_ns", "mono_ns", "source", "step", "transfer", "request",
    }  # fmt: skip


def test_the_history_of_the_work_that_it_is_about_has_a_new_kind():
    history = Replay().feed(DECODE).result().history
    assert DECODE[3] in history.recvs["R"]


def test_the_history_forgets_it_with_the_work():
    settled = log(
        (ev.PeerSettled, {"transfer": "x1", "request": "R", "rank": 0, "outcome": "failed"}),
        (ev.RecvFailed, {"transfer": "x1", "request": "R", "rank": 0}),
        (ev.RecvSettled, {"transfer": "x1", "request": "R", "outcome": "failed"}),
    )
    replay = Replay().feed([*DECODE[:4], *settled])
    assert replay.history.recvs == {}
    assert replay.history.ended_work["transfer", "x1"].event == settled[-1]


def test_why_tells_a_new_kind_that_turns_the_life_of_its_request():
    answer = why("R", DECODE[1:5], Replay().feed(DECODE).result())
    assert answer is not None
    assert DECODE[3] in answer.turns
    assert "event 4: the lease of x1 was renewed" in answer.because


def test_blame_tells_a_use_that_begins_with_a_new_kind_and_ends_with_its_work():
    events = log(
        (ev.LoadPlanned, {**R, "load": 0, "blocks": ((0, ((9, 9),)),)}),
        (BlocksLent, {"load": 0, "request": "R", "blocks": BLOCKS}),
        (ev.LoadSettled, {"load": 0, "outcome": "cancelled"}),
    )
    (use,) = blame(events, (0, 4))
    assert (use.what, use.first, use.last) == ("read", events[1], events[2])


def test_the_time_line_of_several_logs_has_a_new_kind():
    results = [Replay().feed(events).result() for events in (DECODE, PREFILL)]
    joined = join(results, ["decode.db", "prefill.db"], [lambda: DECODE, lambda: PREFILL])
    assert DECODE[3] in [step.event for step in joined.transfers["x1"]]


def test_a_trace_marks_a_new_kind_on_the_work_that_it_is_about():
    builder = TraceBuilder(0, "decode")
    for event in DECODE[:4]:
        builder.draw(event)
    (entry,) = [item for item in builder.items if item.name == "the lease of x1 was renewed"]
    begun = [item for item in builder.items if getattr(item, "what", "") == "begin" and item.name == "recv x1"]
    assert entry.track == begun[0].track


def test_what_a_new_kind_is_about_is_found_in_the_book():
    state = State()
    for event in DECODE[:4]:
        state.apply(event)
    subject = ev.subject_of(DECODE[3])
    assert subject is not None
    work = find(state.book, subject)
    assert work is not None
    assert (work.name, work.waiting, work.blocks) == ("recv x1", (0,), BLOCKS)


def test_a_kind_that_does_not_say_what_it_is_about_is_an_error():
    class Silent(ev.Event, frozen=True, gc=False, omit_defaults=True, tag="silent"):
        def sentence(self) -> str:
            return ""

    with pytest.raises(TypeError, match="Silent does not declare `about`"):
        ev.declared(Silent)


def test_a_kind_that_does_not_say_how_it_reads_is_an_error():
    class Mute(ev.Event, frozen=True, gc=False, omit_defaults=True, tag="mute"):
        about = ev.About("log")

    with pytest.raises(TypeError, match="Mute does not define `sentence`"):
        ev.declared(Mute)
