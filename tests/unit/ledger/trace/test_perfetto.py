"""A trace of logs for the viewer Perfetto: decoded with Perfetto's own classes, and held to what the viewer needs."""

import errno
import itertools
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackDescriptor, TrackEvent

from ledger import events as ev
from ledger.cli import commands as cli
from ledger.demo import incidents
from ledger.replay.fold import replay
from ledger.report.wording import public, say
from ledger.state.apply import State
from ledger.trace.builder import TraceBuilder
from ledger.trace.clock import axis
from ledger.trace.perfetto import write_trace
from ledger.trace.tracks import Entry, Track
from tests.incidents.corpus import INCIDENTS, Incident
from tests.incidents.script import Script, save
from tests.support.log_files import read_only, small_disk

BEGIN, END, INSTANT = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END, TrackEvent.TYPE_INSTANT
COUNTER = TrackEvent.TYPE_COUNTER

WITHOUT_PHASES = {"job", "peer", "call"}
"""Slices of these categories hold no other, and may overlap with their like: each has a track of its own."""

every_incident = pytest.mark.parametrize("incident", INCIDENTS, ids=[incident.id for incident in INCIDENTS])


class Slice(msgspec.Struct):
    """A slice as the viewer has it: from begin to end, with the arguments of both."""

    process: str
    track: str
    name: str
    category: str
    begin_ns: int
    args: dict[str, str | int | list[str]]
    flows: set[int]
    end_ns: int = -1
    depth: int = 0


class Seen:
    """A trace file, decoded. Checks on the way what the viewer takes for granted."""

    def __init__(self, data: bytes) -> None:
        self.tracks: dict[int, TrackDescriptor] = {}
        self.slices: list[Slice] = []
        self.instants: list[Slice] = []
        self.counters: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.times_of_day: list[dict[int, int]] = []
        last_ns: dict[int, int] = {}
        opened: dict[int, list[Slice]] = defaultdict(list)
        trace = Trace()
        trace.ParseFromString(data)
        for packet in trace.packet:
            if packet.HasField("clock_snapshot"):
                self.times_of_day.append({each.clock_id: each.timestamp for each in packet.clock_snapshot.clocks})
                continue
            if packet.HasField("track_descriptor"):
                self._describe(packet.track_descriptor)
                continue
            event = packet.track_event
            assert packet.trusted_packet_sequence_id
            assert event.track_uuid in self.tracks, "an entry on a track that was not described before"
            assert packet.timestamp >= last_ns.get(event.track_uuid, 0), "a track goes back in time"
            last_ns[event.track_uuid] = packet.timestamp
            self._enter(event, packet.timestamp, opened[event.track_uuid])
        assert not any(opened.values()), "a begin without an end"

    def _describe(self, track: TrackDescriptor) -> None:
        assert track.uuid
        assert track.uuid not in self.tracks
        assert track.HasField("process") or track.parent_uuid in self.tracks
        self.tracks[track.uuid] = track

    def _enter(self, event: TrackEvent, ts_ns: int, stack: list[Slice]) -> None:
        if event.type == COUNTER:
            self.counters[self.tracks[event.track_uuid].name].append((ts_ns, event.counter_value))
            return
        args = {
            each.name: [one.string_value for one in each.array_values]
            or (each.string_value if each.HasField("string_value") else each.int_value)
            for each in event.debug_annotations
        }
        if event.type == END:
            assert stack, "an end without a begin"
            ended = stack.pop()
            assert not ended.args.keys() & args.keys(), "one argument at begin and end: the viewer would show a list"
            ended.args |= args
            ended.end_ns = ts_ns
            return
        entry = Slice(
            self._process(event.track_uuid),
            self.tracks[event.track_uuid].name,
            event.name,
            *event.categories,
            begin_ns=ts_ns,
            args=args,
            flows={*event.flow_ids, *event.terminating_flow_ids},
            depth=len(stack),
        )
        assert entry.name
        if event.type == INSTANT:
            self.instants.append(entry)
        else:
            assert event.type == BEGIN
            stack.append(entry)
            self.slices.append(entry)

    def _process(self, track: int) -> str:
        while not self.tracks[track].HasField("process"):
            track = self.tracks[track].parent_uuid
        return self.tracks[track].process.process_name

    def named(self, name: str) -> Slice:
        """The one slice or instant of that name."""
        (found,) = [each for each in (*self.slices, *self.instants) if each.name == name]
        return found

    def of(self, category: str) -> list[Slice]:
        """The slices of a category that are not phases of another."""
        return [each for each in self.slices if each.category == category and not each.depth]

    def marked(self, track: str) -> list[Slice]:
        """The instants on the tracks of that name."""
        return [each for each in self.instants if each.track == track]


def written(folder: Path, logs: dict[str, Sequence[ev.AnyEvent]]) -> list[Path]:
    """The logs as files."""
    return [save(list(events), folder / f"{name}.db") for name, events in logs.items()]


def seen(folder: Path, *logs: Sequence[ev.AnyEvent]) -> Seen:
    """What the viewer gets of these logs."""
    paths = written(folder, {str(number): events for number, events in enumerate(logs)})
    target = folder / "out.pftrace"
    write_trace(paths, target)
    return Seen(target.read_bytes())


def check_nothing_is_lost(trace: Seen, logs: Sequence[Sequence[ev.AnyEvent]]) -> None:
    """As many slices as the logs have of each kind of work that the book accepts, none of them within another."""
    begun: Counter[str] = Counter()
    kinds = {
        ev.JobRegistered: "job",
        ev.LoadPlanned: "load",
        ev.SendRegistered: "send",
        ev.RecvRegistered: "recv",
        ev.TransferStarted: "call",
    }
    for events in logs:
        refused = {refusal.event.seq for refusal in replay(events).refusals}
        begun.update(kinds[type(event)] for event in events if type(event) in kinds and event.seq not in refused)
    assert {kind: len(trace.of(kind)) for kind in kinds.values()} == {kind: begun[kind] for kind in kinds.values()}


@every_incident
@pytest.mark.parametrize("healthy", [False, True], ids=["story", "twin"])
def test_every_incident_of_the_corpus_becomes_a_sound_trace(incident: Incident, healthy: bool, tmp_path: Path):
    logs = incident.logs(healthy=healthy)
    trace = seen(tmp_path, *logs.values())
    check_nothing_is_lost(trace, list(logs.values()))
    processes = [track for track in trace.tracks.values() if track.HasField("process")]
    assert len(processes) == len({track.process.pid for track in processes}) == len(logs)
    assert len(trace.marked("findings")) >= len(incident.expected) * (not healthy)


@pytest.mark.parametrize("file", incidents(), ids=[file.stem for file in incidents()])
def test_the_incidents_that_ship_become_sound_traces(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "demo.pftrace"
    assert cli.run(["trace", str(file), "-o", str(target)]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: ")
    trace = Seen(target.read_bytes())
    assert trace.of("call")
    assert trace.marked("findings")
    assert trace.times_of_day


@given(st.sampled_from(INCIDENTS), st.booleans(), st.data())
def test_a_log_with_holes_still_becomes_a_sound_trace(incident: Incident, healthy: bool, data: st.DataObject):
    for events in incident.logs(healthy=healthy).values():
        kept = data.draw(st.lists(st.booleans(), min_size=len(events), max_size=len(events)))
        builder = TraceBuilder(0, "engine")
        for event in itertools.compress(events, kept):
            builder.draw(event)
        builder.end()
        check_entries(builder)


def check_entries(builder: TraceBuilder) -> None:
    depth: Counter[int] = Counter()
    last_ns: dict[int, int] = {}
    known = {item.id for item in builder.items if isinstance(item, Track)}
    for entry in builder.items:
        if isinstance(entry, Entry):
            assert entry.track in known
            assert entry.ts_ns >= last_ns.get(entry.track, 0)
            last_ns[entry.track] = entry.ts_ns
            depth[entry.track] += {"begin": 1, "end": -1}.get(entry.what, 0)
            assert depth[entry.track] >= 0
            if entry.what == "begin" and entry.category in WITHOUT_PHASES:
                assert depth[entry.track] == 1, "two that overlap stand on one track"
    assert not any(depth.values())


# --- what it shows ----------------------------------------------------------------------------------------------------


def hanging() -> Script:
    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 8))
    log.puts(0, 0, keys="abcd")
    log.reports(0, 0)
    log.put_begins(0, 1, keys="abcd")
    log.preempts("R")
    log.passes(90, steps=500)
    log.stall_suspected(waited_ns=90_000_000_000, missing=((1, 1),), job=0, request="R")
    return log


def test_what_is_open_at_the_end_ends_with_the_log_and_says_so(tmp_path: Path):
    log = hanging()
    trace = seen(tmp_path, log.events)
    last_ns = log.events[-1].ts_ns
    for name in ("job 0", "put #2 of rank 1", "R"):
        found = trace.named("put #2 for job 0" if name.startswith("put") else name)
        assert (found.end_ns, found.args["end"]) == (last_ns, "open at the end")
    assert trace.named("put #1 for job 0").args["outcome"] == "ok"
    assert [each.name for each in trace.marked("log")][-1] == "torn: no log_closed"


def test_a_job_says_what_it_pins_and_who_must_report(tmp_path: Path):
    job = seen(tmp_path, hanging().events).named("job 0")
    assert job.args["request"] == "R"
    assert job.args["blocks"] == "5-8"
    assert job.args["ranks"] == "0-1"
    assert job.args["generation"] == 1


def test_a_call_says_its_keys_bytes_and_how_it_ended(tmp_path: Path):
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 8))
    call = log.put_begins(0, 0, keys="abcd")
    log.ends(call, "failed", code="TRANSFER_FAILED", raw="-800")
    call = seen(tmp_path, log.events).named("put #1 for job 0")
    assert call.args["hashes of keys"] == ["a", "b", "c", "d"]
    assert (call.args["keys"], call.args["outcome"]) == (4, "failed")
    assert "TRANSFER_FAILED" in str(call.args)
    assert int(call.args["bytes"]) > 0


def test_a_request_goes_through_its_phases_with_its_generations(tmp_path: Path):
    log = Script()
    log.runs("R")
    log.preempts("R")
    log.resumes("R")
    log.finishes("R", 2)
    trace = seen(tmp_path, log.closes().events)
    phases = [each.name for each in trace.slices if each.category == "request"]
    assert phases == ["R", "queued", "running", "preempted, generation 2", "running, generation 2"]
    assert trace.named("R").args["end"] == "request R (generation 2) finished: stopped"


def test_arrows_lead_from_a_job_to_the_call_of_each_rank_and_on_to_its_report(tmp_path: Path):
    trace = seen(tmp_path, hanging().events)
    registered = trace.named("registered")
    first, second = trace.named("put #1 for job 0"), trace.named("put #2 for job 0")
    assert registered.flows == first.flows | second.flows
    assert first.flows.isdisjoint(second.flows)
    assert trace.named("rank 0: stored").flows == first.flows


def transfer() -> tuple[Script, Script]:
    prefill, decode = Script("prefill"), Script("decode")
    prefill.runs("P-R")
    prefill.sends("x1", "P-R")
    prefill.holds("x1", "P-R", blocks=(5, 12))
    decode.arrives("R")
    decode.receives("x1", "R", blocks=(30, 37))
    prefill.passes(0.1)
    prefill.pushes("x1", "P-R")
    prefill.send_settled(transfer="x1", request="P-R")
    decode.passes(0.5)
    decode.pull_ends("x1", "R")
    decode.peer_answers("x1", "R")
    decode.received("x1", "R")
    return prefill.closes(), decode.closes()


def test_arrows_lead_from_engine_to_engine(tmp_path: Path):
    prefill, decode = transfer()
    trace = seen(tmp_path, prefill.events, decode.events)
    push, asked, settled = (trace.named(name) for name in ("push of x1", "asks tp0 pp0", "tp0 pp0: ok"))
    assert asked.track == "recvs by peer"
    assert push.process.startswith("engine prefill")
    assert asked.process == settled.process
    assert asked.process.startswith("engine decode")
    assert push.flows == asked.flows == settled.flows != set()
    registered = [each for each in trace.instants if each.name == "registered"]
    assert [each.track for each in registered] == ["sends", "recvs"]
    assert registered[0].flows < registered[1].flows
    assert registered[1].flows - registered[0].flows == trace.named("asks").flows


def test_where_the_peers_are_known_before_the_arrow_leaves_the_call_that_asks(tmp_path: Path):
    prefill, decode = transfer()
    known = [
        msgspec.structs.replace(event, peers=("tp0 pp0",)) if isinstance(event, ev.RecvRegistered) else event
        for event in decode.events
    ]
    trace = seen(tmp_path, prefill.events, known)
    assert trace.named("asks").flows > trace.named("push of x1").flows == trace.named("tp0 pp0: ok").flows != set()
    assert not [each for each in trace.instants if each.name == "asks tp0 pp0"]


def test_findings_stand_at_their_first_event_with_culprit_and_advice(tmp_path: Path):
    log = hanging()
    finding, torn = replay(log.events).findings
    trace = seen(tmp_path, log.events)
    found = next(each for each in trace.marked("findings") if each.args["kind"] == finding.kind)
    since = next(event for event in log.events if event.seq == finding.since_seq)
    assert found.begin_ns == since.ts_ns
    assert (found.args["title"], found.args["certainty"]) == (say(finding).title, finding.certainty)
    assert (found.args["culprit"], found.args["advice"]) == (public(finding)["culprit"], public(finding)["advice"])
    assert torn.kind == "torn_log"


def test_alarms_are_marked(tmp_path: Path):
    log = hanging()
    log.gap(origin="rank 1", dropped=3, reason="the queue was full")
    log.invariant_violated(rule="rank_reported_twice", detail="rank 0 again", job=0)
    log.rank_completed(job=7, rank=0)
    with log.rank(1):
        log.poison_caught(rank=1, key="a", group=0, block=5, before="00", after="01", removed=True, job=0)
    categories = [each.category for each in seen(tmp_path, log.events).marked("alarms")]
    assert Counter(categories) == Counter(
        ["stall_suspected", "gap", "invariant_violated", "rank_completed", "poison_caught"]
    )


def test_counters_are_what_the_book_says(tmp_path: Path):
    log = hanging()
    trace = seen(tmp_path, log.events)
    state, most = State(), 0
    for event in log.events:
        state.apply(event)
        most = max(most, state.pinned_blocks())
    assert max(value for _, value in trace.counters["pinned blocks"]) == most == 4
    assert trace.counters["open jobs"][-1] == (log.events[-1].ts_ns, len(state.book.jobs))
    assert [value for _, value in trace.counters["waiting requests"]] == [1, 0, 1, 1]
    assert [value for _, value in trace.counters["running requests"]] == [1, 0, 0]


def test_after_a_gap_the_book_of_the_checkpoint_is_taken_over(tmp_path: Path):
    log, later = Script(), Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 8))
    later.runs("S")
    later.saves(1, "S", blocks=(9, 9))
    log.gap(origin="scheduler", dropped=20, reason="the queue was full")
    log.checkpoint(digest=later.state.digest(), book=msgspec.Raw(later.state.encode()))
    trace = seen(tmp_path, log.events)
    assert "in a gap" in str(trace.named("job 0").args["end"])
    assert "in a gap" in str(trace.named("R").args["end"])
    assert "in a gap" in str(trace.named("job 1").args["begin"])
    assert "in a gap" in str(trace.named("S").args["begin"])
    assert trace.named("job 1").args["end"] == "open at the end"
    assert trace.counters["pinned blocks"][-1][1] == 1


@pytest.mark.parametrize("origin", ["rank 1", "workers"])
def test_a_call_whose_return_may_have_been_lost_says_so(origin: str, tmp_path: Path):
    log = hanging()
    log.gap(origin=origin, dropped=3, reason="the queue was full")
    trace = seen(tmp_path, log.events)
    assert "may hide its end" in str(trace.named("put #2 for job 0").args["doubt"])
    assert "doubt" not in trace.named("job 0").args


def test_memory_grows_with_what_is_open_and_not_with_the_log():
    log = Script()
    builder = TraceBuilder(0, "engine")
    tracks = 0
    for number in range(300):
        log.runs(f"R{number}")
        log.stores(number, f"R{number}", blocks=(1, 8), keys="abcdefgh")
        log.finishes(f"R{number}")
        for event in log.events:
            builder.draw(event)
        log.events.clear()
        tracks += sum(isinstance(item, Track) for item in builder.items)
        builder.items.clear()
    assert tracks < 20
    assert not builder._open


# --- the time axis ----------------------------------------------------------------------------------------------------


def shifted(events: list[ev.AnyEvent], seconds: float, after_seq: int = 0) -> list[ev.AnyEvent]:
    """The same log from a host whose clock is off, or was set after some event."""
    by_ns = int(seconds * 1e9)
    return [
        msgspec.structs.replace(event, ts_ns=event.ts_ns + by_ns) if event.seq > after_seq else event
        for event in events
    ]


@pytest.mark.parametrize("seconds", [0.0, 3600.0, -3600.0])
def test_what_had_to_come_first_stands_first_whatever_the_clocks_say(seconds: float, tmp_path: Path):
    prefill, decode = transfer()
    trace = seen(tmp_path, prefill.events, shifted(decode.events, seconds))
    for name in ("recv x1", "asks"):
        assert trace.named(name).begin_ns <= trace.named("push of x1").begin_ns
    assert trace.named("push of x1").end_ns <= trace.named("tp0 pp0: ok").begin_ns
    opened = [each for each in trace.instants if each.name.startswith("log opened")]
    assert opened[0].begin_ns == prefill.events[0].ts_ns
    assert ["clock" in each.args for each in opened] == [False, bool(seconds)]


def test_clocks_that_contradict_the_transfers_are_left_alone_and_it_is_said():
    prefill, decode = transfer()
    pushed = next(event for event in prefill.events if isinstance(event, ev.TransferFinished))
    late = [
        msgspec.structs.replace(event, mono_ns=event.mono_ns + 10**12) if event.seq >= pushed.seq else event
        for event in prefill.events
    ]
    placed = axis([late, decode.events])
    assert placed.shifts_ns == [0, 0]
    assert placed.contradicts
    assert all(placed.told())


def test_a_clock_that_is_set_while_the_engine_runs_does_not_bend_the_picture(tmp_path: Path):
    log = hanging()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = seen(tmp_path / "a", log.events)
    bent = seen(tmp_path / "b", shifted(log.events, -3600, after_seq=6))
    assert [each.begin_ns for each in bent.slices] == [each.begin_ns for each in plain.slices]


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> str:
    return str(save(hanging().events, tmp_path / "log.db"))


def test_a_file_that_exists_is_never_overwritten(log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "out.pftrace"
    target.write_text("mine")
    assert cli.run(["trace", log, "-o", str(target)]) == 2
    assert target.read_text() == "mine"
    assert capsys.readouterr().err.count("\n") == 1


def test_a_disk_that_fills_up_leaves_nothing_behind(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # A fake at the last step, when all is written: a small disk of its own takes the rights of root, as below.
    monkeypatch.setattr("ledger.file.publish.publish", full)
    folder = tmp_path / "full"
    folder.mkdir()
    assert cli.run(["trace", log, "-o", str(folder / "new")]) == 2
    assert list(folder.iterdir()) == []
    err = capsys.readouterr().err
    assert "the disk is full" in err
    assert err.count("\n") == 1


def test_a_disk_that_is_too_small_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = next(file for file in incidents() if file.stem == "poisoned-keys")
    with small_disk(tmp_path / "disk", 16) as disk:
        assert cli.run(["trace", str(file), "-o", str(disk / "new")]) == 2
        assert list(disk.iterdir()) == []
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_takes_no_file_is_named_in_one_line(log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "closed"
    folder.mkdir()
    with read_only(folder):
        assert cli.run(["trace", log, "-o", str(folder / "new")]) == 2
    err = capsys.readouterr().err
    assert f"cannot be written in the folder {folder}" in err
    assert err.count("\n") == 1


def test_a_log_that_cannot_be_read_leaves_nothing_behind(tmp_path: Path):
    assert cli.run(["trace", str(tmp_path / "missing.db"), "-o", str(tmp_path / "new")]) == 3
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_one_line_says_what_to_install(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in [name for name in sys.modules if name.partition(".")[0] == "perfetto"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    assert cli.run(["trace", log, "-o", str(tmp_path / "new")]) == 2
    err = capsys.readouterr().err
    assert "pip install 'kvledger[trace]'" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_nothing_else_imports_the_package():
    modules = "ledger.cli.commands, ledger.trace.perfetto, ledger.replay.case"
    code = f"import sys, {modules}; sys.exit('perfetto' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_log_is_drawn_once_when_it_is_named_twice(log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = str(incidents()[0])
    assert cli.run(["trace", file, file, "-o", str(tmp_path / "new")]) == 0
    assert "is named more than once, and used once" in capsys.readouterr().err
    trace = Seen((tmp_path / "new").read_bytes())
    assert sum(track.HasField("process") for track in trace.tracks.values()) == 1
