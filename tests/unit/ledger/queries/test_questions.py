"""Questions asked backwards: why, blame, diff, blast radius, and the smallest log that still has a finding."""

import json
from pathlib import Path

import msgspec
import pytest

from ledger import events as ev
from ledger import words
from ledger.cli import commands as cli
from ledger.file.database import Database
from ledger.file.read import open_log
from ledger.file.seal import seal
from ledger.queries.blame import blame
from ledger.queries.blast_radius import BlastRadius, blast_radius
from ledger.queries.diff import diff
from ledger.queries.minimize import minimize
from ledger.queries.why import why
from ledger.replay.case import replay_files
from ledger.replay.fold import replay
from ledger.replay.select import Interest, Watch
from ledger.state.apply import State
from tests.incidents.corpus import INCIDENTS, keys
from tests.incidents.script import Script, save
from tests.support.log_files import changed

BY_ID = {incident.id: incident for incident in INCIDENTS}


def about(log: Script, interest: Interest) -> list:
    watch = Watch(interest)
    watch.look(log.events)
    return watch.events


def one_line(text: str) -> str:
    return " ".join(text.split())


# --- why --------------------------------------------------------------------------------------------------------------


def test_why_leads_from_the_end_of_a_request_to_the_error_behind_it():
    log = Script(policy="fail")
    log.arrives("R")
    log.loads(0, "R", blocks=(5, 12))
    call = log.get_begins(0, keys=keys("r"))
    log.ends(call, "failed", code="BLOCK_NOT_FOUND", raw="-704")
    log.rank_loaded(load=0, rank=0, outcome="failed", code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
    log.load_failed(load=0, rank=0, code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
    log.load_settled(load=0, outcome="failed")
    log.load_recovered(load=0, request="R", generation=1, action="failed")
    log.finishes("R", reason="error")
    answer = why("R", about(log, Interest(request="R")), replay(log.closes().events))
    assert answer is not None
    assert answer.answer.startswith("request R finished: error at event 12")
    assert answer.because[0].endswith("after load 0, request R: failed")
    assert "BLOCK_NOT_FOUND (raw -704)" in answer.because[-1]
    assert [finding.kind for finding in answer.findings] == ["load_failed"]


def test_why_of_a_request_that_waits_names_what_it_waits_for():
    log = Script(ranks=2)
    log.arrives("R")
    log.loads(0, "R", blocks=(5, 12))
    log.rank_loaded(load=0, rank=0)
    answer = why("R", about(log, Interest(request="R")), replay(log.events, "live"))
    assert answer is not None
    assert "request R is loading at the end of the log" in answer.answer
    assert answer.because == ("its load 0 is open since event 4 and waits for rank 1",)


def test_why_of_a_request_that_went_well_says_so():
    log = Script()
    log.runs("R")
    log.finishes("R")
    answer = why("R", about(log, Interest(request="R")), replay(log.closes().events))
    assert answer is not None
    assert answer.because == ("nothing went wrong with it that this log shows",)
    assert why("Q", [], replay(log.events)) is None


def test_why_of_a_request_that_ended_does_not_take_its_open_job_for_the_cause():
    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.finishes("R")
    log.passes(61, steps=100)
    answer = why("R", about(log, Interest(request="R")), replay(log.closes().events))
    assert answer is not None
    assert answer.findings
    assert "nothing went wrong" not in " ".join(answer.because)
    assert answer.because[-1].startswith("still open because of it, and not why it ended: store job 0 is open")


# --- blame ------------------------------------------------------------------------------------------------------------


def test_blame_tells_who_owned_pinned_read_and_wrote_a_block():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    log.takes_back("R", (5, 12))
    log.gives("R2", (5, 12))
    log.puts(0, keys=keys("r"))
    log.recalls(0, "R3", blocks=(7, 14), keys=keys("r"))
    log.saves(1, "R3", blocks=(7, 14))
    uses = blame(about(log, Interest(block=(0, 7))), (0, 7))
    assert [(use.what, use.by, use.last is not None) for use in uses] == [
        ("owned", "request R", True),
        ("owned", "request R2", False),
        ("read", "put 0-1 of job 0 on rank 0", True),
        ("written", "load 0 of request R3", True),
        ("written", "get 0-2 of load 0 on rank 0", True),
        ("pinned", "store job 1", False),
    ]


def test_blame_tells_when_each_use_by_a_transfer_between_engines_ended():
    prefill = Script("prefill", role="kv_producer")
    prefill.runs("R")
    prefill.sends("x1", "R")
    prefill.holds("x1", "R", blocks=(1, 8))
    prefill.pushes("x1", "R")
    prefill.send_settled(transfer="x1", request="R")
    decode = Script("decode", role="kv_consumer")
    decode.arrives("R")
    decode.receives("x1", "R", blocks=(11, 18))
    decode.pull_ends("x1", "R")
    decode.peer_answers("x1", "R")
    decode.received("x1", "R")
    for log, block, ends in (
        (prefill, (0, 1), {"send x1 of request R": "send_settled", "push x1 on rank 0": "transfer_finished"}),
        (decode, (0, 11), {"recv x1 of request R": "recv_settled", "pull x1 on rank 0": "transfer_finished"}),
    ):
        uses = blame(about(log, Interest(block=block)), block)
        assert {use.by: use.last is not None and ev.kind_of(use.last) for use in uses} == ends


def test_blame_does_not_name_a_call_for_other_blocks_of_the_same_job():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    for blocks in ((5, 8), (9, 12)):
        log.ends(log.put_begins(0, keys=keys("r", 4), blocks=blocks))
    uses = blame(about(log, Interest(block=(0, 5))), (0, 5))
    assert [use.by for use in uses] == ["store job 0", "put 0-1 of job 0 on rank 0"]


# --- clocks -----------------------------------------------------------------------------------------------------------


def with_clocks_set(log: Script, after_seq: int, seconds: int) -> list[ev.AnyEvent]:
    return [
        msgspec.structs.replace(event, ts_ns=event.ts_ns + seconds * 10**9) if event.seq > after_seq else event
        for event in log.events
    ]


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_why_and_blame_tell_durations_that_a_wall_clock_that_was_set_does_not_change(
    seconds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.puts(0, keys=keys("r"))
    set_after_seq = len(log.events)
    log.passes(2)
    log.reports(0)
    log.finishes("R")
    log.runs("Q")
    log.passes(5)
    events = with_clocks_set(log.closes(), set_after_seq, seconds)
    path = save(events, tmp_path / "a.db")
    cli.run(["why", str(path), "R"])
    assert "request R finished: stopped at event 11, 2.02 s after it was first seen." in capsys.readouterr().out
    cli.run(["why", str(path), "Q"])
    assert "its last event is 5.00 s before that." in one_line(capsys.readouterr().out)
    cli.run(["blame", str(path), "0:5"])
    assert "by store job 0, from event 5 to 10 (20:26:40.005, 2.02 s)" in one_line(capsys.readouterr().out)


def test_a_duration_that_only_wall_clocks_tell_is_left_out_where_they_tell_it_backwards():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.put_begins(0, keys=keys("r"))
    log.closes()
    for seconds, told in ((0, "; its last event is 2.0 ms before that"), (-3600, "")):
        events = with_clocks_set(log, len(log.events) - 2, seconds)
        watch = Watch(Interest(request="R"))
        watch.look(events)
        answer = why("R", watch.events, replay(events))
        assert answer is not None
        assert answer.answer == f"request R is running at the end of the log{told}"


def test_a_span_below_zero_is_not_told_as_one_above():
    assert [words.span(sign * 3_000_000_000) for sign in (1, 0, -1)] == ["3.00 s", "0 us", "-3.00 s"]


# --- diff -------------------------------------------------------------------------------------------------------------


def test_diff_tells_what_began_what_ended_and_what_moved():
    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    earlier = State(msgspec.json.decode(log.state.encode(), type=type(log.state.book)))
    first = len(log.events)
    log.reports(0, 0)
    log.finishes("R")
    log.saves(1, "Q", blocks=(20, 23))
    changes = diff(earlier, log.state, log.events[first:])
    assert changes.begun == ("store job 1",)
    assert changes.ended == ("request R",)
    assert len(changes.moved) == 1
    assert "store job 0: waiting (0, 1) became (1,)" in changes.moved[0]
    assert changes.pinned_blocks == (8, 12)
    assert changes.kinds == {"rank_completed": 1, "request_finished": 1, "job_registered": 1, "pin_touched": 1}


# --- blast radius -----------------------------------------------------------------------------------------------------


def spread(*logs: Script, job: int = 0) -> BlastRadius:
    (radius,) = blast_radius([log.events.__iter__ for log in logs], job)
    return radius


def poisoned(engine: str = "one", lead: str = "r") -> Script:
    log = Script(engine)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    log.gives("R2", (5, 8))
    log.steps(2)
    log.puts(0, keys=keys(lead))
    log.reports(0)
    log.finishes("R")
    return log


def test_the_radius_begins_with_exactly_the_keys_of_the_blocks_that_were_given_away():
    radius = spread(poisoned())
    assert radius.judged
    assert radius.keys == keys("r")[:4]
    assert radius.reached == []


def test_the_radius_begins_with_the_keys_of_every_finding_about_the_job():
    log = Script("one", ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    log.takes_back("R", (5, 6))
    log.gives("N", (5, 6))
    log.request_scheduled(request="N", generation=1)
    log.steps(2)
    for rank in (0, 1):
        call = log.put_begins(0, rank, keys=keys(f"{rank}-"), blocks=(5, 12))
        with log.rank(rank):
            caught = {"request": "R", "group": 0, "block": 12, "before": "aa", "after": "bb", "removed": False}
            log.poison_caught(job=0, rank=rank, key=keys(f"{rank}-")[7], **caught)
        log.ends(call)
    log.runs("Q")
    log.recalls(0, "Q", blocks=(20, 20), keys=[keys("0-")[7]])
    findings = [finding for finding in replay(log.events).findings if finding.kind == "poison"]
    assert len(findings) > 1
    radius = spread(log)
    assert radius.keys == [keys(f"{rank}-")[place] for rank in (0, 1) for place in (0, 1)] + [
        keys(f"{rank}-")[7] for rank in (0, 1)
    ]
    assert [each.request for each in radius.reached] == ["Q"]


def test_the_radius_follows_loads_and_what_was_stored_after_them_through_engines_that_share_the_store():
    one, two, three = poisoned(), Script("two", start_s=10), Script("three", start_s=20)
    two.runs("A")
    two.recalls(0, "A", blocks=(1, 2), keys=keys("r")[:2])
    two.stores(0, "A", blocks=(3, 4), keys=keys("a", 2))
    two.finishes("A")
    two.runs("clean")
    two.stores(1, "clean", blocks=(11, 12), keys=keys("c", 2))
    two.finishes("clean")
    three.runs("B")
    three.recalls(0, "B", blocks=(1, 2), keys=keys("a", 2))
    three.stores(0, "B", blocks=(3, 4), keys=keys("b", 2))
    three.finishes("B")
    for logs, order in (((one, two, three), (0, 1, 2)), ((three, two, one), (2, 1, 0))):
        radius = spread(*logs)
        assert radius.log == order[0]
        assert {(each.log, each.request, each.round) for each in radius.reached} == {
            (order[1], "A", 1),
            (order[2], "B", 2),
        }
        assert radius.derived == {
            **dict.fromkeys(keys("a", 2), (order[1], "A")),
            **dict.fromkeys(keys("b", 2), (order[2], "B")),
        }
        assert radius.complete


def test_the_radius_has_requests_that_shared_the_blocks_of_one_that_was_reached_while_it_lived():
    log = poisoned()
    log.runs("A")
    log.recalls(0, "A", blocks=(20, 21), keys=keys("r")[:2])
    log.runs("B")
    log.saves(1, "B", blocks=(20, 24))
    log.finishes("A")
    log.runs("C")
    log.saves(2, "C", blocks=(21, 25))
    radius = spread(log)
    assert [(each.request, each.how) for each in radius.reached] == [("A", "loaded"), ("B", "shared"), ("C", "shared")]


def loaded_before_it_was_tainted(*, returns: bool) -> Script:
    """R's poisoned job stores keys that Q, of the same engine, had asked for before; and Q saves what it computed."""
    log = Script("one")
    log.runs("Q")
    log.loads(0, "Q", blocks=(31, 38))
    call = log.get_begins(0, keys=keys("r"))
    if returns:
        log.ends(call)
        log.answers(0)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    log.gives("R2", (5, 8))
    log.steps(2)
    log.puts(0, keys=keys("r"))
    log.reports(0)
    if not returns:
        log.ends(call)
        log.answers(0)
    log.stores(1, "Q", blocks=(39, 40), keys=keys("q", 2))
    log.finishes("Q")
    return log


def test_who_loaded_a_key_before_wrong_kv_was_stored_under_it_in_the_same_log_is_not_reached():
    radius = spread(loaded_before_it_was_tainted(returns=True))
    assert radius.judged
    assert radius.reached == []
    assert radius.derived == {}


def test_a_load_that_was_going_on_when_wrong_kv_was_stored_may_have_got_it():
    for log in (loaded_before_it_was_tainted(returns=False), without_returns_of_gets(returns=True)):
        radius = spread(log)
        assert [(each.request, each.how) for each in radius.reached] == [("Q", "loaded")]
        assert list(radius.derived) == keys("q", 2)


def without_returns_of_gets(*, returns: bool) -> Script:
    log = loaded_before_it_was_tainted(returns=returns)
    log.events = [event for event in log.events if getattr(event, "op", "") != "get" or hasattr(event, "blocks")]
    return log


def test_the_order_of_a_load_and_of_what_was_derived_is_known_within_one_log_only():
    early, two, three = loaded_before_it_was_tainted(returns=True), Script("two"), Script("three")
    two.runs("B")
    two.recalls(0, "B", blocks=(1, 2), keys=keys("a", 2))
    two.finishes("B")
    for log in (two, three):
        log.runs("A")
        log.recalls(1, "A", blocks=(1, 2), keys=keys("r")[:2])
        log.stores(0, "A", blocks=(3, 6), keys=[*keys("a", 2), *keys("r")[2:4]])
        log.finishes("A")
    assert [(each.log, each.request) for each in spread(early, two).reached] == [(1, "A")]
    assert {(each.log, each.request) for each in spread(early, two, three).reached} == {(1, "A"), (2, "A"), (1, "B")}


def test_blocks_that_are_used_again_after_everybody_left_are_not_shared():
    log = poisoned()
    log.runs("A")
    log.recalls(0, "A", blocks=(20, 21), keys=keys("r")[:2])
    log.finishes("A")
    log.runs("B")
    log.saves(1, "B", blocks=(20, 24))
    assert [each.request for each in spread(log).reached] == ["A"]


def test_without_a_verdict_the_radius_takes_all_that_the_job_stored_and_says_so():
    log = Script()
    log.runs("R")
    log.stores(0, "R", blocks=(5, 8), keys=keys("r", 4))
    radius = spread(log)
    assert not radius.judged
    assert radius.keys == keys("r", 4)
    assert blast_radius([log.events.__iter__], 99) == []


def test_each_log_in_which_the_job_is_poisoned_has_a_radius_because_every_engine_numbers_its_jobs_from_0():
    one, two, healthy = poisoned("one", "r"), poisoned("two", "s"), Script("three")
    healthy.runs("R")
    healthy.stores(0, "R", blocks=(5, 8), keys=keys("t", 4))
    readers = [log.events.__iter__ for log in (one, healthy, two)]
    assert [(radius.log, radius.judged, radius.keys) for radius in blast_radius(readers, 0)] == [
        (0, True, keys("r")[:4]),
        (2, True, keys("s")[:4]),
    ]
    assert [(radius.log, radius.judged, radius.keys) for radius in blast_radius(readers, 0, 1)] == [
        (1, False, keys("t", 4))
    ]


# --- minimize ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("incident", [each for each in INCIDENTS if each.expected], ids=lambda each: each.id)
def test_the_smallest_log_has_the_same_finding_and_no_part_that_could_be_left_out(incident):
    expected = incident.expected[0]
    events = incident.logs()[expected.log]
    smaller = minimize(events, expected.kind)
    assert smaller is not None
    assert len(smaller.events) <= len(events)
    assert [event.seq for event in smaller.events] == list(range(1, len(smaller.events) + 1))
    again = replay(smaller.events).findings
    found = next(finding for finding in again if finding.kind == expected.kind)
    assert found == smaller.finding
    assert (found.certainty, found.ranks) == (expected.certainty, expected.ranks or found.ranks)
    for left_out in range(len(smaller.events)):
        rest = smaller.events[:left_out] + smaller.events[left_out + 1 :]
        worse = minimize(rest, expected.kind) if rest else None
        assert worse is None or worse.finding != smaller.finding or len(worse.events) >= len(rest) - 1


def test_minimize_throws_out_the_bystanders():
    log = Script(ranks=2)
    for number in range(50):
        log.runs(f"B{number}")
        log.stores(number, f"B{number}", blocks=(1, 8), keys=keys("b"))
        log.finishes(f"B{number}")
    log.runs("R")
    log.saves(50, "R", blocks=(40, 47))
    log.reports(50, 0)
    log.put_begins(50, 1, keys=keys("r"))
    log.passes(100)
    smaller = minimize(log.closes().events, "stall")
    assert smaller is not None
    assert len(smaller.events) <= 6
    assert smaller.finding.jobs == (50,)


def test_minimize_of_a_log_without_such_a_finding_is_nothing():
    log = Script()
    log.runs("R")
    log.finishes("R")
    assert minimize(log.closes().events, "leak") is None


# --- on the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {
        name: story()["engine"].save(tmp_path / f"{name}.db")
        for name, story in (("s1", BY_ID["S1"].story), ("s3", BY_ID["S3"].story), ("twin", BY_ID["S3"].twin))
    }


def test_why_ends_with_1_when_there_are_findings(files: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    assert cli.run(["why", str(files["s3"]), "R"]) == 1
    assert "store job 2 is open" in capsys.readouterr().out
    assert cli.run(["why", str(files["twin"]), "R"]) == 0
    assert cli.run(["why", str(files["twin"]), "nobody"]) == 2


def test_blame_prints_the_uses_of_a_block(files: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    assert cli.run(["blame", str(files["s1"]), "0:7"]) == 0
    out = capsys.readouterr().out
    assert "owned    by request R, until event 6" in out
    assert "owned    by request R2, from event 8 on" in out


def test_diff_prints_what_changed_in_either_order(files: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    assert cli.run(["diff", str(files["s3"]), "10", "36"]) == 0
    forth = capsys.readouterr().out
    assert cli.run(["diff", str(files["s3"]), "36", "10"]) == 0
    assert capsys.readouterr().out == forth
    assert "From event 10 to event 36" in forth


def test_blast_radius_prints_keys_and_requests(files: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    assert cli.run(["blast-radius", str(files["s1"]), "--job", "0"]) == 1
    assert "request R3 in" in capsys.readouterr().out
    assert cli.run(["blast-radius", str(files["s1"]), "--job", "0", "--json"]) == 1
    assert '"request": "R3"' in capsys.readouterr().out
    assert cli.run(["blast-radius", str(files["s1"]), "--job", "77"]) == 2


def test_blast_radius_follows_the_job_of_each_log_in_which_it_is_poisoned_or_of_the_one_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    a, b = poisoned("a", "r").save(tmp_path / "a.db"), poisoned("b", "s").save(tmp_path / "b.db")
    command = ["blast-radius", str(a), str(b)]
    assert cli.run([*command, "--job", "0"]) == 1
    out = one_line(capsys.readouterr().out)
    assert f"Store job 0 in {a}: 4 keys" in out
    assert f"Store job 0 in {b}: 4 keys" in out
    assert cli.run([*command, "--job", "0", "--keys"]) == 1
    assert capsys.readouterr().out.split() == [*keys("r")[:4], *keys("s")[:4]]
    assert cli.run([*command, "--job", "0", "--json"]) == 1
    assert [each["file"] for each in json.loads(capsys.readouterr().out)] == [str(a), str(b)]
    for name in ("b.db", str(b)):
        assert cli.run([*command, "--job", f"{name}:0", "--keys"]) == 1
        assert capsys.readouterr().out.split() == keys("s")[:4]
    assert cli.run([*command, "--job", "0", "--job", "b.db:0", "--keys"]) == 1
    assert capsys.readouterr().out.split() == [*keys("r")[:4], *keys("s")[:4]]


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("0", "several files have a store job 0 ({a}, {b}), and in none of them is it poisoned. Say which is meant: "),
        ("7", "none of the files has a store job 7"),
        ("b.db:7", "{b} has no store job 7"),
        ("c.db:0", "'--job': none of the files is called c.db"),
        ("b.db:-1", "'b.db:-1' is no store job: write its number, or with its file as FILE:NUMBER"),
        ("b.db:", "'b.db:' is no store job"),
        ("b.db", "'b.db' is no store job"),
        ("9" * 5000, "is no store job"),
    ],
)
def test_blast_radius_refuses_a_job_that_is_none_or_may_be_one_of_several(
    job: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    logs = {}
    for engine in ("a", "b"):
        log = Script(engine)
        log.runs("R")
        log.stores(0, "R", blocks=(5, 8), keys=keys(engine, 4))
        logs[engine] = log.save(tmp_path / f"{engine}.db")
    assert cli.run(["blast-radius", str(logs["a"]), str(logs["b"]), "--job", job]) == 2
    assert told.format(**logs) in capsys.readouterr().err
    assert cli.run(["blast-radius", str(logs["a"]), str(logs["b"]), "--job", "b.db:0", "--keys"]) == 0
    assert capsys.readouterr().out.split() == keys("b", 4)


def test_minimize_writes_a_log_that_can_be_replayed(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = tmp_path / "small.db"
    assert cli.run(["minimize", str(files["s3"]), "--finding", "leak", "-o", str(target)]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: 6 events left")
    case = replay_files([target])
    assert [finding.kind for _, finding in case.findings] == ["leak"]
    with open_log(target) as log:
        assert log.meta["minimized_from"] == "s3.db"
    capsys.readouterr()
    assert cli.run(["replay", str(target)]) == 1
    assert "Minimized   from s3.db" in capsys.readouterr().out
    assert cli.run(["minimize", str(files["s3"]), "--finding", "leak", "-o", str(target)]) == 2
    assert cli.run(["minimize", str(files["s3"]), "--finding", "poison", "-o", str(tmp_path / "other.db")]) == 2
    assert not (tmp_path / "other.db").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["replay", "--job", "999"], "knows no job 999 (it has 0-2)."),
        (["replay", "--request", "nobody"], "knows no request 'nobody'; ids may be hashed"),
        (["replay", "--request", "R", "--job", "999"], "knows no job 999"),
        (["replay", "--block", "0:99"], "knows no block 0:99 (of group 0 it has "),
        (["replay", "--block", "7:1"], "knows no block 7:1 (of group 7 it has none)."),
        (["replay", "--job", "-1"], "'--job': -1 is not in the range x>=0"),
        (["why", "nobody"], "knows no request 'nobody'"),
        (["blame", "0:99"], "knows no block 0:99"),
    ],
)
def test_what_is_nowhere_in_the_log_is_wrong_usage_and_not_good_news(
    arguments: list[str], told: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    command, *rest = arguments
    assert cli.run([command, str(files["s3"]), *rest]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert captured.err.count("\n") == 1


def test_a_sealed_file_that_was_changed_is_not_called_sealed(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = seal(files["twin"], tmp_path / "sealed.db").target
    assert cli.run(["replay", str(path)]) == 0
    assert "(sealed)" in " ".join(capsys.readouterr().out.split())
    changed(path, 'UPDATE events SET data = replace(data, \'"request":"R"\', \'"request":"Z"\')')
    cli.run(["replay", str(path)])
    assert "is not the one that was sealed: see kvledger verify)" in " ".join(capsys.readouterr().out.split())


def test_a_log_that_is_given_twice_is_used_once(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    twin, link = files["twin"], tmp_path / "link.db"
    link.symlink_to(twin)
    copy = seal(twin, tmp_path / "sealed.db").target
    for again, told in (
        (twin, f"{twin} is named more than once, and used once"),
        (link, f"{link} is left out: it is the same file as {twin}"),
        (copy, f"{copy} is left out: it is the same log as {twin}, of the same engine and boot"),
    ):
        cli.run(["replay", str(twin), str(again), str(again)])
        captured = capsys.readouterr()
        assert captured.err == f"kvledger: {told}\n"
        assert "Log 2" not in captured.out


# --- what there is to judge -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["replay", "state", "tail", "export", "why", "blame"])
def test_a_log_without_its_wal_is_not_called_healthy(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "copy.db"
    database = Database(path)
    database.create({})
    database.close()
    assert cli.run([command, str(path), *{"why": ["R"], "blame": ["0:1"]}.get(command, [])]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "holds no event; most likely its -wal file was not copied" in captured.err


@pytest.mark.parametrize(
    ("dropped", "told"),
    [((2637,), "2,637 events"), ((0,), "an unknown number of events"), ((3, 0), "at least 3 events")],
)
def test_a_log_with_gaps_is_not_called_healthy_as_a_whole(
    dropped: tuple[int, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = Script()
    log.runs("R")
    for number in dropped:
        log.gap(origin="scheduler", dropped=number, reason="the disk was full")
    log.finishes("R")
    assert cli.run(["replay", str(log.closes().save(tmp_path / "a.db"))]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Nothing wrong was found in what is left; lost: {told}.\n")
    assert "The run in numbers, each of them at least\n" in out


def test_a_moment_before_the_first_event_is_not_an_empty_log(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    assert cli.run(["replay", str(files["twin"]), "--until", "0"]) == 0
    assert "none up to this moment" in capsys.readouterr().out
