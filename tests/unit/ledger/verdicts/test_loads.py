"""What the verdicts say of loads: whether a failure was swallowed, why a key is gone, how much of it is counted."""

import msgspec
import pytest

from ledger import events as ev
from ledger.replay.fold import Replay, Result, replay
from ledger.report.wording import say
from ledger.verdicts.base import Finding
from ledger.verdicts.retry_loop import RetryLoop
from tests.incidents.script import Script

KEYS = [f"k{number}" for number in range(8)]


def only(result: Result) -> Finding:
    (finding,) = result.findings
    return finding


def kinds(result: Result) -> list[str]:
    return [f"{finding.kind} {finding.certainty}" for finding in result.findings]


def moved(events: list[ev.AnyEvent], which: list[ev.AnyEvent], after: type[ev.Event]) -> list[ev.AnyEvent]:
    """The same log, into which evidence came later: right behind the first event of a kind."""
    told: list[ev.AnyEvent] = []
    for event in events:
        if event not in which:
            told.append(event)
        if isinstance(event, after):
            told += which
    return [msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(told, 1)]


# --- a failure that was swallowed, and one that was made good ---------------------------------------------------------


def answered_well(*second: str) -> Script:
    """A rank's first get fails; further ones end as they are named, and the rank says that all was loaded."""
    log = Script()
    log.arrives("Q")
    log.loads(0, "Q", blocks=(11, 18))
    for outcome in ("failed", *second):
        call = log.get_begins(0, keys=KEYS)
        log.passes(0.01)
        if outcome == "failed":
            log.ends(call, "failed", code="TRANSFER_FAILED", raw="-800")
        elif outcome == "ok":
            log.ends(call)
    log.answers(0, retries=len(second))
    log.steps()
    log.request_scheduled(request="Q", generation=1)
    log.passes(2, steps=100)
    log.finishes("Q")
    return log


def calls(log: Script) -> list[ev.AnyEvent]:
    return [event for event in log.events if isinstance(event, ev.TransferStarted | ev.TransferFinished)]


@pytest.mark.parametrize("late", [1, 2])
def test_evidence_of_a_second_get_that_comes_after_the_load_has_settled_clears_the_first(late: int):
    log = answered_well("ok").closes()
    events = moved(log.events, calls(log)[-late:], ev.LoadSettled)
    for length in range(1, len(events)):
        assert kinds(replay(events[:length])) == ["torn_log proven"]
        assert replay(events[:length], "live").findings == []
    assert replay(events).findings == []


def test_a_second_get_that_has_not_returned_in_the_log_proves_nothing_of_the_answer():
    assert replay(answered_well("open").closes().events).findings == []


def test_a_second_get_that_failed_too_is_the_one_that_is_told_even_if_its_evidence_comes_late():
    log = answered_well("failed").closes()
    events = moved(log.events, calls(log)[-1:], ev.LoadSettled)
    finding = only(replay(events))
    assert (finding.kind, finding.certainty) == ("unreported_failure", "proven")
    assert events[finding.lead_seq - 1] == msgspec.structs.replace(calls(log)[-1], seq=finding.lead_seq)


@pytest.mark.parametrize("ending", ["torn", "live", "as_of"])
def test_a_failure_that_no_later_get_made_good_is_told_once_evidence_of_one_would_have_come(ending: str):
    assert "unreported_failure proven" in kinds(replay(answered_well().events, ending))


@pytest.mark.parametrize("origin", ["rank 0", "workers"])
@pytest.mark.parametrize("after", [ev.TransferStarted, ev.LoadSettled])
def test_where_evidence_of_the_rank_is_lost_a_later_get_may_have_made_the_failure_good(
    origin: str, after: type[ev.Event]
):
    log = answered_well()
    gap = log.gap(origin=origin, dropped=2, reason="the queue was full")
    finding = only(replay(moved(log.closes().events, [gap], after)))
    assert (finding.kind, finding.certainty) == ("unreported_failure", "undecidable")
    assert "a later get that went well may be among them" in say(finding).doubt


def test_evidence_that_another_rank_lost_clears_nobody():
    log = answered_well()
    log.gap(origin="rank 1", dropped=2, reason="the queue was full")
    assert kinds(replay(log.closes().events)) == ["unreported_failure proven"]


@pytest.mark.parametrize("seconds", [0.05, 3600, -3600])
@pytest.mark.parametrize("place", [ev.RankLoaded, ev.TransferFinished])
def test_a_failure_is_not_hidden_by_a_clock_that_is_wrong_or_was_set(seconds: float, place: type[ev.Event]):
    events = answered_well().closes().events
    first = next(event.seq for event in events if isinstance(event, place))
    for changed in ({event.seq for event in calls(answered_well())}, {e.seq for e in events if e.seq >= first}):
        told = [
            msgspec.structs.replace(event, ts_ns=event.ts_ns + int(seconds * 1e9) * (event.seq in changed))
            for event in events
        ]
        assert kinds(replay(told)) == ["unreported_failure proven"]


@pytest.mark.parametrize("late", [1, 2])
def test_a_failure_is_not_hidden_by_evidence_that_comes_after_the_load_has_settled(late: int):
    log = answered_well()
    events = moved(log.events, calls(log)[-late:], ev.LoadSettled)
    assert kinds(replay(events, "live")) == ["unreported_failure proven"]


def test_failures_that_a_rank_swallows_again_and_again_are_one_finding_that_counts_all():
    log = Script(ranks=2)
    for load in range(600):
        log.arrives(f"Q{load}")
        log.loads(load, f"Q{load}", blocks=(1, 8))
        for rank in (0, 1):
            log.ends(log.get_begins(load, rank), "failed" if rank or load < 300 else "ok", exception="X")
        log.answers(load, 0)
        log.answers(load, 1)
        log.finishes(f"Q{load}")
    few, many = sorted(replay(log.closes().events).findings, key=lambda finding: finding.ranks)
    assert (few.certainty, few.ranks, many.ranks) == ("proven", (0,), (1,))
    assert say(few).title.endswith("; 299 more loads likewise")
    assert say(many).title.endswith("; 599 more loads likewise")
    assert say(many).impact == (
        "the answers of these requests are unreliable: they went on with KV that did not arrive",
    )


# --- a key that is gone -----------------------------------------------------------------------------------------------


def missed(log: Script, load: int = 0, *, after_s: float = 0.2) -> Script:
    """A lookup has a hit, and the get of its keys finds none of them."""
    log.arrives("Q")
    log.loads(load, "Q", blocks=(11, 18))
    log.passes(after_s, steps=2)
    call = log.get_begins(load, keys=KEYS)
    log.passes(0.002)
    log.ends(call, "failed", code="BLOCK_NOT_FOUND", raw="-704")
    log.answers(load, 0, "failed", code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
    log.steps()
    log.request_scheduled(request="Q", generation=1)
    log.finishes("Q")
    return log


def put(outcome: str, *failed: str, unnamed: int = 0) -> Script:
    """A put of eight keys, of which `failed` and further `unnamed` ones did not get into the store."""
    log = Script(policy="recompute")
    log.runs("R")
    log.saves(0, "R", blocks=(1, 8))
    call = log.put_begins(0, keys=KEYS)
    with log.rank(0):
        if outcome != "open":
            failures = tuple(ev.KeyFailure(key, "-200", "KV_OOM") for key in failed)
            number = len(failed) + unnamed
            log.transfer_finished(
                transfer=call, rank=0, op="put", job=0, outcome=outcome, failed_keys=number, failures=failures
            )
    log.reports(0, 0, "failed" if failed else "stored")
    log.finishes("R")
    return log.passes(30, steps=100)


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        (put("ok"), "lost_store"),
        (put("partial", *KEYS[:3]), "lost_store"),
        (put("partial", *KEYS[:3], unnamed=2), "load_failed"),
        (put("failed", *KEYS), "load_failed"),
        (put("raised", unnamed=8), "load_failed"),
        (put("open"), "load_failed"),
    ],
    ids=["ok", "some", "some unnamed", "failed", "raised", "open"],
)
def test_only_a_put_that_ended_well_for_a_key_had_put_it(log: Script, kind: str):
    finding = only(replay(missed(log).closes().events))
    assert finding.kind == kind
    assert ("had put the key" in say(finding).culprit) == (kind == "lost_store")


def test_a_key_that_failed_in_a_put_of_many_was_not_put():
    log = put("partial", *KEYS[:3])
    log.arrives("Q")
    log.loads(0, "Q", blocks=(11, 13))
    log.ends(log.get_begins(0, keys=KEYS[:3]), "failed", code="BLOCK_NOT_FOUND", raw="-704")
    log.answers(0, 0, "failed", code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
    log.finishes("Q")
    assert only(replay(log.closes().events)).kind == "load_failed"


def test_that_a_key_is_not_found_does_not_show_that_the_lookup_had_found_it():
    finding = only(replay(missed(Script(policy="recompute")).closes().events))
    assert (finding.kind, finding.certainty) == ("load_failed", "proven")
    assert say(finding).culprit == "a key was not found at most 204.0 ms after the lookup had a hit"
    assert say(finding).shown == "the lookup had a hit, and the load did not find the key"
    assert "the lookup may not have asked for this one" in say(finding).inferred


def test_a_put_after_the_lookup_is_not_how_the_key_came_to_be_there():
    log = Script(policy="recompute", ranks=2)
    log.arrives("Q")
    log.loads(0, "Q", blocks=(11, 18))
    late = log.get_begins(0, 1, keys=KEYS)
    log.ends(log.get_begins(0, keys=KEYS), "failed", code="BLOCK_NOT_FOUND", raw="-704")
    log.answers(0, 0, "failed", code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
    log.runs("P")
    log.stores(0, "P", blocks=(21, 28), keys=KEYS)
    log.ends(late)
    log.answers(0, 1)
    log.finishes("P")
    log.finishes("Q")
    finding = only(replay(log.closes().events))
    assert (finding.kind, finding.certainty) == ("load_failed", "proven")
    assert not any(isinstance(event, ev.TransferStarted) and event.op == "put" for event in finding.chain)


def test_a_miss_that_the_scheduler_heard_of_late_is_not_told_as_one_after_the_lease():
    log = put("ok")
    log.arrives("Q")
    log.loads(0, "Q", blocks=(11, 18))
    call = log.get_begins(0, keys=KEYS)
    log.passes(0.002)
    log.ends(call, "failed", code="BLOCK_NOT_FOUND", raw="-704")
    log.passes(8)  # of one step
    log.answers(0, 0, "failed", code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
    log.finishes("Q")
    finding = only(replay(log.closes().events))
    assert (finding.kind, finding.certainty) == ("lost_store", "suspected")
    assert say(finding).culprit.endswith("and it was gone at most 8.00 s after the lookup had a hit")


@pytest.mark.parametrize("lost", [False, True])
def test_ranks_that_may_have_loaded_among_lost_events_are_not_said_to_load_nothing(lost: bool):
    log = Script(policy="recompute", ranks=2)
    if lost:
        log.gap(origin=ev.SCHEDULER, dropped=50_000, reason="the queue was full")
    for load in range(3):
        fails(log, load, f"R{load}", ranks=(1,))
    assert ("always on rank 1" in say(only(replay(log.closes().events))).title) == (not lost)


def test_a_wall_clock_that_was_set_back_does_not_make_the_lease_run_out():
    log = missed(put("ok"), after_s=8).closes()
    lookup = next(event.seq for event in log.events if isinstance(event, ev.LookupAnswered))
    events = [
        msgspec.structs.replace(event, ts_ns=event.ts_ns - 8 * 10**9 * (event.seq > lookup)) for event in log.events
    ]
    finding = only(replay(events))
    assert (finding.kind, finding.certainty) == ("lost_store", "suspected")
    assert "at most 8.00 s after" in say(finding).culprit


@pytest.mark.parametrize("seconds", [8, 3600])
@pytest.mark.parametrize(("after_s", "kind"), [(0.2, "lost_store"), (8, "evicted_before_load")])
def test_a_wall_clock_that_is_set_does_not_change_how_long_after_the_lookup_a_key_was_missed(
    after_s: float, kind: str, seconds: int
):
    log = missed(put("ok"), after_s=after_s).closes()
    lookup = next(event.seq for event in log.events if isinstance(event, ev.LookupAnswered))
    events = [
        msgspec.structs.replace(event, ts_ns=event.ts_ns + seconds * 10**9 * (event.seq > lookup))
        for event in log.events
    ]
    assert only(replay(events)).kind == kind
    assert say(only(replay(events))).culprit == say(only(replay(log.events))).culprit


# --- what is counted and what is kept ---------------------------------------------------------------------------------


def fails(log: Script, load: int, request: str, action: str = "recomputed", ranks: tuple[int, ...] = (0,)) -> None:
    """A load fails on `ranks`, and something becomes of its request."""
    why = {"code": "TRANSFER_FAILED", "raw": "-800", "stage": "STORE_GET"}
    log.arrives(request)
    log.loads(load, request, blocks=(1, 8))
    for rank in range(log.ranks):
        log.rank_loaded(load=load, rank=rank, **({"outcome": "failed", **why} if rank in ranks else {}))
    log.load_failed(load=load, rank=ranks[0], **why)
    if action == "failed":
        log.finishes(request, reason="error")
    log.load_settled(load=load, outcome="failed")
    if action == "aborted":
        log.request_aborted(request=request, generation=1)
    else:
        log.load_recovered(load=load, request=request, generation=1, action=action)
    if action == "recomputed":
        log.finishes(request)


def test_what_became_of_failed_loads_is_counted_beyond_those_that_are_kept():
    log = Script(policy="recompute")
    for load in range(3000):
        fails(log, load, f"R{load}")
    finding = only(replay(log.closes().events))
    assert say(finding).impact == ("no request failed: all 3,000 were recomputed, which costs time only",)


def test_of_failed_loads_each_thing_that_became_of_their_requests_is_counted():
    log = Script(policy="recompute")
    for load in range(600):
        fails(log, load, f"R{load}", ("recomputed", "failed", "aborted")[load % 3])
    finding = only(replay(log.closes().events))
    assert say(finding).impact == (
        "of the requests of 600 failed loads: 200 recomputed, 200 ended with an error, 200 aborted",
    )


def test_loads_that_failed_on_other_ranks_than_those_that_are_kept_are_not_always_on_the_same():
    for last, said in (((1,), True), ((0, 1), False)):
        log = Script(policy="recompute", ranks=2)
        for load in range(600):
            fails(log, load, f"R{load}", ranks=last if load == 599 else (1,))
        assert ("always on rank 1" in say(only(replay(log.closes().events))).title) == said


@pytest.mark.parametrize("name", ["R", "R{}"])
def test_a_request_that_ends_with_its_failed_load_does_not_go_round(name: str):
    log = Script(policy="fail")
    for load in range(100):
        fails(log, load, name.format(load), "failed")
    fold = Replay([RetryLoop]).feed(log.closes().events)
    assert fold.result().findings == []
    assert vars(fold.verdicts[0])["_rounds"] == {}


def test_requests_that_go_round_are_counted_beyond_those_that_are_kept():
    log = Script(policy="recompute")
    load = 0
    for number in range(300):
        log.arrives(f"R{number}")
        for _ in range(4 if number == 0 else 3):
            log.loads(load, f"R{number}", blocks=(1, 8))
            log.answers(load, 0, "failed", code="TRANSFER_FAILED", raw="-800", stage="STORE_GET")
            load += 1
        log.finishes(f"R{number}")
    loop = next(each for each in replay(log.closes().events).findings if each.kind == "retry_loop")
    assert "request R0 and 299 more requests was promised the same" in say(loop).title
    assert "4 times" in say(loop).title
