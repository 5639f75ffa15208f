"""The fold: it uses the live rules, survives what they refuse, compares digests, and ends where it is told."""

from pathlib import Path

import msgspec
import pytest

from ledger import events as ev
from ledger.errors import Refused
from ledger.replay.case import state_at
from ledger.replay.fold import CHUNK_EVENTS, Replay, replay, until
from ledger.replay.select import Interest, Moment, Watch
from ledger.state.apply import State
from ledger.verdicts import all_verdicts
from ledger.verdicts.base import Verdict
from ledger.verdicts.history import EXACT_NS, KEPT_TIMES, History, Times
from tests.incidents.script import START_TS_NS, Script


def stored_run(ranks: int = 2) -> Script:
    log = Script(ranks=ranks)
    for number in range(3):
        log.runs(f"R{number}")
        log.stores(
            number, f"R{number}", blocks=(1 + 10 * number, 8 + 10 * number), keys=[f"{number}{k}" for k in range(8)]
        )
        log.finishes(f"R{number}")
    log.checks()
    return log


def test_the_fold_ends_in_the_state_of_the_engine_that_wrote_the_log():
    log = stored_run()
    assert replay(log.closes().events).state.digest() == log.state.digest()


def test_a_healthy_log_has_no_findings_and_every_checkpoint_agrees():
    result = replay(stored_run().closes().events)
    assert result.findings == []
    assert result.checkpoints == 2
    assert result.mismatch is None


def test_a_log_may_come_in_any_number_of_pieces():
    events = stored_run().closes().events
    whole = replay(events)
    fold = Replay()
    for event in events:
        fold.feed([event])
    pieces = fold.result()
    assert pieces.state.digest() == whole.state.digest()
    assert msgspec.to_builtins(pieces.stats.kinds) == whole.stats.kinds
    assert pieces.end == whole.end


def test_an_event_that_the_book_refuses_changes_nothing_and_is_kept():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(1, 4))
    before = log.state.digest()
    log.rank_completed(job=0, rank=7)
    result = replay(log.events)
    assert result.state.digest() == before
    assert [(each.event.seq, each.rule) for each in result.refusals] == [(log.events[-1].seq, "unexpected_rank")]
    assert result.refused == 1


def test_verdicts_see_what_was_accepted_after_the_state_and_what_was_refused_apart():
    seen: list[str] = []

    class Looker(Verdict):
        def on_rank_completed(self, event: ev.RankCompleted) -> None:
            seen.append(f"rank {event.rank} reported, waiting {self.state.book.jobs[0].waiting}")

        def on_blocks_freed(self, event: ev.BlocksFreed) -> None:
            kinds = [ev.kind_of(each) for each in self.history.jobs[event.job]]
            seen.append(f"freed {event.job}, in the book: {event.job in self.state.book.jobs}, led by {kinds[0]}")

        def refused(self, event: ev.Event, refusal: Refused) -> None:
            seen.append(f"refused {refusal.rule}")

    log = Script(ranks=2)
    log.saves(0, "R", blocks=(1, 4))
    log.reports(0, 0)
    log.rank_completed(job=0, rank=0)
    log.reports(0, 1)
    Replay(verdicts=[Looker]).feed(log.events)
    assert seen == [
        "rank 0 reported, waiting (1,)",
        "refused rank_reported_twice",
        "rank 1 reported, waiting ()",
        "freed 0, in the book: False, led by job_registered",
    ]


def test_the_first_checkpoint_that_differs_is_named_with_both_digests():
    log = stored_run()
    good = log.events[-1]
    log.checkpoint(digest="0" * 64)
    log.checkpoint(digest="1" * 64)
    result = replay(log.events)
    assert result.mismatch is not None
    assert (result.mismatch.seq, result.mismatch.agreed_until_seq) == (good.seq + 1, good.seq)
    assert result.mismatch.expected == "0" * 64
    assert result.mismatch.actual == log.state.digest()


def test_a_checkpoint_with_the_book_lets_the_fold_go_on_after_a_gap():
    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(1, 4))
    unseen = Script(ranks=2)  # the engine went on, and these events were dropped
    unseen.runs("R")
    unseen.saves(0, "R", blocks=(1, 4))
    unseen.reports(0, 0)
    unseen.saves(1, "R", blocks=(5, 8))
    log.gap(origin="scheduler", dropped=3, reason="the queue was full")
    log.checkpoint(digest=unseen.state.digest(), book=msgspec.Raw(unseen.state.encode()))
    log.rank_completed(job=0, rank=1)
    log.rank_completed(job=1, rank=0)
    result = replay(log.events, "live")
    assert result.refused == 0
    assert result.mismatch is None
    assert set(result.state.book.jobs) == {0, 1}
    assert result.findings == []


def test_memory_of_the_trail_goes_back_to_what_is_open():
    log = Script()
    for number in range(500):
        log.runs(f"R{number}")
        log.stores(number, f"R{number}", blocks=(1, 4), keys="abcd")
        log.recalls(number, f"R{number}", blocks=(1, 4), keys="abcd")
        log.finishes(f"R{number}")
    history = replay(log.closes().events).history
    assert (history.jobs, history.loads, history.requests) == ({}, {}, {})


def test_the_trail_of_a_request_that_is_preempted_for_ever_stays_small():
    log = Script()
    log.runs("R")
    for generation in range(1, 1000):
        log.preempts("R", generation)
        log.resumes("R", generation + 1)
    history = replay(log.events, "live").history
    assert len(history.requests["R"]) <= 200
    assert history.requests["R"][0] == log.events[1]
    assert history.requests["R"][-1] == log.events[-1]


def test_the_time_of_a_place_is_never_too_early_and_costs_a_fixed_memory():
    times, apart_ns = Times(), 7_000_000
    seqs = range(1, 40 * KEPT_TIMES)
    for first in range(1, seqs.stop, CHUNK_EVENTS):
        chunk = range(first, first + CHUNK_EVENTS)
        times.note([ev.LogClosed(seq, 0, apart_ns * seq, ev.SCHEDULER, 0) for seq in chunk])
    late = [at - apart_ns * seq for seq in seqs if (at := times.at(seq)) is not None]
    assert len(late) == len(seqs)
    assert min(late) >= 0
    assert max(late[-1000:]) < EXACT_NS
    assert len(times) <= 2 * KEPT_TIMES
    assert times.at(seqs.stop + CHUNK_EVENTS) is None


def test_the_time_of_the_last_place_before_a_pause_does_not_lie_behind_the_pause():
    times = Times()
    moments_ms = [0, 10, 20, 20_000, 20_010, 20_020]
    times.note([ev.LogClosed(seq, 0, at * 10**6, ev.SCHEDULER, 0) for seq, at in enumerate(moments_ms, 1)])
    assert [times.at(seq) for seq in (1, 2, 3)] == [0, 20 * 10**6, 20 * 10**6]
    assert [times.at(seq) for seq in (4, 5, 6)] == [20_000 * 10**6, 20_020 * 10**6, 20_020 * 10**6]


def test_every_kind_of_event_can_be_looked_at():
    table = Replay()._table
    assert set(table) == set(ev.KINDS.values())


def test_every_method_of_a_verdict_names_a_kind_of_event():
    for looker in (History, *all_verdicts()):
        for name in vars(looker):
            assert not name.startswith("on_") or name.removeprefix("on_") in ev.KINDS, f"{looker.__name__}.{name}"


def test_a_verdict_is_registered_by_its_file_alone():
    names = {verdict.__name__ for verdict in all_verdicts()}
    assert {"Stall", "Leak", "MissingRanks", "OverReport", "StaleCompletion", "EarlyFree", "TornLog"} <= names
    assert not any(name.startswith("_") or name == "RuleVerdict" for name in names)


def test_an_empty_log_has_nothing_to_say():
    result = replay([])
    assert (result.events, result.end, result.findings) == (0, None, [])


def test_an_event_of_the_middle_of_a_chunk_is_found_as_the_last_of_the_scheduler():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(1, 4))
    scheduler = log.events[-1]
    log.put_begins(0)
    result = replay(log.events * 1, "live")
    assert result.end is not None
    assert result.end.now_mono_ns == scheduler.mono_ns
    assert result.end.last.source == "rank 0"
    assert len(log.events) < CHUNK_EVENTS


# --- how far ----------------------------------------------------------------------------------------------------------


def test_until_a_place_includes_that_place():
    events = stored_run().events
    assert [event.seq for event in until(events, last_seq=7)] == list(range(1, 8))


def test_until_a_time_takes_all_that_stands_before_the_last_event_of_the_scheduler_within_it():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(1, 4))
    log.puts(0)
    log.reports(0)
    log.finishes("R")
    events = [
        msgspec.structs.replace(event, ts_ns=event.ts_ns + 10**10 * (event.source == "rank 0")) for event in log.events
    ]
    for last in events:
        if last.source == ev.SCHEDULER:
            assert list(until(events, last_ts_ns=last.ts_ns))[: last.seq] == events[: last.seq]


def test_until_a_time_ends_with_the_first_evidence_that_is_later_if_the_scheduler_says_nothing_more_within_it():
    log = Script(ranks=2)
    log.runs("R")
    log.saves(0, "R", blocks=(1, 4))
    calls = [log.put_begins(0, rank) for rank in (0, 1)]
    limit = log.passes(1).events[-1].ts_ns
    for call in calls:
        log.ends(call)
    log.reports(0)
    taken = list(until(log.events, last_ts_ns=limit))
    assert taken == log.events[: log.events.index(taken[-1]) + 1]
    assert isinstance(taken[-1], ev.TransferStarted)


@pytest.mark.parametrize("ahead_s", [3, -3])
def test_no_moment_of_a_healthy_log_has_a_finding_where_the_clock_of_a_worker_is_wrong(ahead_s: int):
    log = Script(ranks=2, policy="recompute")
    log.arrives("Q")
    log.loads(0, "Q", blocks=(11, 18))
    log.gets(0, 1)
    log.ends(log.get_begins(0, keys=["k"]), "failed", code="TRANSFER_FAILED", raw="-800")
    log.passes(3.2, steps=30)
    log.gets(0)
    log.answers(0, 0)
    log.answers(0, 1)
    for _ in range(12):
        log.passes(0.5, steps=10).checks()
    log.finishes("Q")
    events = [
        msgspec.structs.replace(event, ts_ns=event.ts_ns + ahead_s * 10**9 * (event.source == "rank 0"))
        for event in log.closes().events
    ]
    for moment in events:
        assert replay(until(events, last_ts_ns=moment.ts_ns), "as_of").findings == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("+90s", 90), ("+1.5", 1.5), ("+2m", 120), ("20:28:10", 90.000999999), ("2026-05-28T20:28:10Z", 90.000999999)],
)
def test_a_moment_is_a_time_in_every_form_that_is_offered(text: str, seconds: float):
    ts_ns = Moment(text).ts_ns(START_TS_NS)
    assert ts_ns is not None
    assert ts_ns - START_TS_NS == pytest.approx(seconds * 1e9, abs=1000)


def test_a_time_of_day_before_the_start_is_of_the_next_day():
    ts_ns = Moment("00:00:10").ts_ns(START_TS_NS)
    assert ts_ns is not None
    assert ts_ns > START_TS_NS


def test_a_number_is_a_place():
    assert Moment("120").seq == 120
    assert Moment("120").ts_ns(START_TS_NS) is None


def test_a_place_behind_all_that_a_log_can_have_is_its_end(tmp_path: Path):
    log = Script()
    path = log.closes().save(tmp_path / "a.db")
    assert state_at(path, Moment("9" * 18))[1] == log.events[-1]
    assert state_at(path, Moment(f"+{'9' * 18}h"))[1] == log.events[-1]


OUT_OF_REACH = ["9" * 25, "9" * 5000, f"+{'9' * 400}h", "0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00"]


@pytest.mark.parametrize("text", ["", "yesterday", "12:61:00", "-5", "+", "1e3", *OUT_OF_REACH])
def test_what_names_no_moment_is_refused_with_what_can_be_written(text: str):
    with pytest.raises(ValueError, match="write the number of an event"):
        Moment(text)


# --- what is of interest ----------------------------------------------------------------------------------------------


def collected(events: list[ev.AnyEvent], interest: Interest) -> list[str]:
    watch = Watch(interest)
    watch.look(events)
    return [ev.kind_of(event) for event in watch.events]


def test_the_time_line_of_a_request_has_its_jobs_and_loads_and_nothing_of_others():
    log = stored_run(ranks=1)
    assert collected(log.events, Interest(request="R1")) == [
        "request_queued",
        "request_scheduled",
        "job_registered",
        "pin_touched",
        "transfer_started",
        "transfer_finished",
        "rank_completed",
        "job_settled",
        "blocks_freed",
        "request_finished",
    ]


def test_the_time_line_of_a_job_has_what_happened_to_its_request_meanwhile():
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(1, 4))
    log.preempts("R")
    log.saves(1, "Q", blocks=(5, 8))
    log.reports(1)
    log.reports(0)
    assert collected(log.events, Interest(job=0)) == [
        "job_registered",
        "pin_touched",
        "request_preempted",
        "rank_completed",
        "job_settled",
        "blocks_freed",
    ]


def test_the_time_line_of_a_block_has_every_job_and_load_that_names_it():
    log = stored_run(ranks=1)
    assert collected(log.events, Interest(block=(0, 12))) == [
        "pin_touched",
        "transfer_started",
        "transfer_finished",
        "rank_completed",
        "job_settled",
        "blocks_freed",
    ]
    assert collected(log.events, Interest(block=(1, 12))) == []


def test_a_log_without_its_first_event_is_folded_all_the_same():
    log = Script(opens=False)
    log.runs("R")
    log.stores(0, "R", blocks=(1, 4))
    result = replay(log.events, "live")
    assert result.opened is None
    assert result.findings == []
    assert result.state.digest() == log.state.digest()


def test_a_state_without_events_has_the_digest_of_an_empty_book():
    assert replay([]).state.digest() == State().digest()
