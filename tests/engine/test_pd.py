"""The P/D connector on real engines over TCP: how every case ends, and what the two logs of it say."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ledger import events as ev
from ledger.blocks import numbers
from ledger.file.read import open_log
from ledger.replay.case import replay_files
from ledger.report.wording import say
from ledger.verdicts.base import Finding
from tests.engine.conftest import Fold, RunOnce, fold
from tests.engine.pd_engines import HOLD_TIMEOUT_S

SCENARIO_TIMEOUT_S = 750
"""Four engines have to start: about a minute on two cores of their own, many times that on a machine that is busy."""

pytestmark = pytest.mark.timeout(SCENARIO_TIMEOUT_S + 60)

POLICIES = ("fail", "recompute")


class Run(NamedTuple):
    """What a scenario left."""

    result: dict[str, Any]
    events: dict[str, list[ev.AnyEvent]]
    """The events of each engine's log."""

    def path(self, engine: str) -> Path:
        """The engine's log."""
        return Path(self.result["logs"][engine])

    def of(self, engine: str, transfer: str) -> list[Any]:
        """The events of a transfer in an engine's log."""
        return [event for event in self.events[engine] if getattr(event, "transfer", "") == transfer]

    def fold(self, engine: str) -> Fold:
        """The engine's log, folded."""
        return fold(self.events[engine])

    def findings(self, *engines: str) -> list[Finding]:
        """What a replay of some engines' logs together finds."""
        return [finding for _, finding in replay_files([self.path(engine) for engine in engines]).findings]

    def finding_of(self, engine: str, transfer: str, *engines: str) -> Finding:
        """The finding that is about a transfer's request in an engine's log, of a replay of both sides' logs."""
        request = self.of(engine, transfer)[0].request
        (found,) = [finding for finding in self.findings(*engines) if request in finding.requests]
        return found


def run_of(scenario: str, run_once: RunOnce) -> Run:
    """Run a scenario and read what it left."""
    result = run_once("pd_scenarios", scenario, SCENARIO_TIMEOUT_S).result
    events = {}
    for engine, path in result["logs"].items():
        with open_log(Path(path)) as log:
            events[engine] = list(log.events())
    return Run(result, events)


@pytest.fixture(scope="module")
def run(run_once: RunOnce) -> Run:
    return run_of("failures", run_once)


@pytest.fixture(scope="module")
def ranks(run_once: RunOnce) -> Run:
    return run_of("ranks", run_once)


def failure(run: Run, case: str, policy: str) -> tuple[str, str]:
    """Return code and stage with which a decode's transfer failed."""
    (failed,) = [event for event in run.of(f"D-{policy}", f"{case}-{policy}") if isinstance(event, ev.RecvFailed)]
    return failed.code, failed.stage


# --- how requests end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("case", "seed"), [("good", 0), ("decode_first", 1)])
def test_a_transfer_gives_the_tokens_of_a_single_engine(run: Run, case: str, seed: int, policy: str) -> None:
    ended = run.result["cases"][case][policy]
    assert ended["reason"] == "length"
    assert ended["cached"] == 300
    assert ended["tokens"] == run.result["reference"][seed]


@pytest.mark.parametrize("policy", POLICIES)
def test_another_prefill_takes_over_from_one_that_was_killed(run: Run, policy: str) -> None:
    ended = run.result["cases"]["heir"][policy]
    assert (ended["reason"], ended["cached"]) == ("length", 300)
    assert ended["tokens"] == run.result["reference"][0]


FAILURES = [
    ("never", 2, "PEER_NOT_READY", "SEND"),
    ("wrong_address", 3, "PEER_UNREACHABLE", "BOOTSTRAP"),
    ("unknown_engine", 4, "PEER_NOT_READY", "REGISTRATION"),
    ("killed", 6, "PEER_UNREACHABLE", "RECV"),
]


@pytest.mark.parametrize(("case", "seed", "code", "stage"), FAILURES)
def test_under_the_fail_policy_a_failed_transfer_ends_its_request(
    run: Run, case: str, seed: int, code: str, stage: str
) -> None:
    del seed
    assert run.result["cases"][case]["fail"]["reason"] == "error"
    assert failure(run, case, "fail") == (code, stage)
    recovered = [event for event in run.of("D-fail", f"{case}-fail") if isinstance(event, ev.RecvRecovered)]
    assert [event.action for event in recovered] == ["failed"]


@pytest.mark.parametrize(("case", "seed", "code", "stage"), FAILURES)
def test_under_the_recompute_policy_a_failed_transfer_changes_no_token(
    run: Run, case: str, seed: int, code: str, stage: str
) -> None:
    ended = run.result["cases"][case]["recompute"]
    assert (ended["reason"], ended["cached"]) == ("length", 0)
    assert ended["tokens"] == run.result["reference"][seed]
    assert failure(run, case, "recompute") == (code, stage)
    recovered = [event for event in run.of("D-recompute", f"{case}-recompute") if isinstance(event, ev.RecvRecovered)]
    assert [event.action for event in recovered] == ["recomputed"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_client_that_goes_away_while_waiting_leaves_a_transfer_that_ends(run: Run, policy: str) -> None:
    told = run.of(f"D-{policy}", f"aborted-{policy}")
    assert isinstance(told[-1], ev.RecvSettled)
    assert [event.action for event in told if isinstance(event, ev.RecvRecovered)] == ["gone"]


# --- what is left -----------------------------------------------------------------------------------------------------


def test_every_block_came_back_on_both_sides_after_every_case(run: Run) -> None:
    # The scenario ends with an error when a pool does not fill up again; here it says that it has looked everywhere.
    looked = {case: set(engines) for case, engines in run.result["settled_s"].items()}
    everyone = {"P1", "D-fail", "D-recompute"}
    before = ("good", "decode_first", "never", "wrong_address", "unknown_engine", "aborted")
    assert all(looked[case] == everyone for case in before)
    assert looked["killed"] == {"D-fail", "D-recompute"}
    assert looked["gone-fail"] == {"D-recompute", "P2"}
    assert looked["gone-recompute"] == {"P2"}


def test_no_request_waits_after_any_case(run: Run) -> None:
    assert {count for engines in run.result["unfinished"].values() for count in engines.values()} == {0}
    assert run.result["unfinished"].keys() == run.result["settled_s"].keys()


def test_the_book_of_an_engine_that_lived_is_empty_at_the_end(run: Run) -> None:
    book = run.fold("P2").state.book
    assert not book.requests
    assert not book.recvs
    assert not book.sends


@pytest.mark.parametrize("policy", POLICIES)
def test_the_book_of_a_decode_that_was_killed_has_open_what_it_had_asked_for(run: Run, policy: str) -> None:
    book = run.fold(f"D-{policy}").state.book
    assert [recv.transfer for recv in book.recvs.values()] == [f"gone-{policy}"]


@pytest.mark.parametrize("engine", ["P1", "P2", "D-fail", "D-recompute"])
def test_the_fold_gives_the_digests_that_the_engine_recorded(run: Run, engine: str) -> None:
    digests = run.fold(engine).digests
    assert digests
    assert [recorded for recorded, _ in digests] == [folded for _, folded in digests]


def test_engines_that_were_ended_in_order_close_their_logs_and_killed_ones_do_not(run: Run) -> None:
    ends = {engine: isinstance(events[-1], ev.LogClosed) for engine, events in run.events.items()}
    assert ends == {"P1": False, "D-fail": False, "D-recompute": False, "P2": True}


def test_one_waiting_request_does_not_fill_the_log(run: Run) -> None:
    # It waits for five seconds, in which the engine makes thousands of steps.
    told = run.of("D-fail", "never-fail")
    assert len(told) < 12
    assert len(run.events["D-fail"]) < 200


# --- what the logs say ------------------------------------------------------------------------------------------------


def test_a_good_transfer_is_told_from_both_sides(run: Run) -> None:
    prefill = [ev.kind_of(event) for event in run.of("P1", "good-fail") if not event.evidence]
    decode = [ev.kind_of(event) for event in run.of("D-fail", "good-fail") if not event.evidence]
    assert prefill == ["send_registered", "send_ready", "send_started", "rank_sent", "send_settled"]
    assert decode == ["recv_registered", "peers_named", "peer_settled", "recv_settled"]
    (started,) = [event for event in run.of("P1", "good-fail") if isinstance(event, ev.SendStarted)]
    (named,) = [event for event in run.of("D-fail", "good-fail") if isinstance(event, ev.PeersNamed)]
    assert started.address == named.address


def test_the_failure_stands_in_the_log_before_what_follows_from_it(run: Run) -> None:
    request = run.of("D-fail", "never-fail")[0].request
    told = [event for event in run.events["D-fail"] if getattr(event, "request", "") == request and not event.evidence]
    assert [ev.kind_of(event) for event in told] == [
        "request_queued",
        "recv_registered",
        "peers_named",
        "peer_settled",
        "recv_failed",
        "request_finished",
        "recv_recovered",
        "recv_settled",
    ]


CAUSES = [
    ("never", "PEER_NOT_READY", "at SEND", "the prefill engine P1 knows nothing of transfer never-{}"),
    ("aborted", "PEER_NOT_READY", "at SEND", "the prefill engine P1 knows nothing of transfer"),
    ("wrong_address", "PEER_UNREACHABLE", "at BOOTSTRAP", "went to prefill engine elsewhere, whose log is not here"),
    ("unknown_engine", "PEER_NOT_READY", "does not know this engine", "went to prefill engine nobody"),
    ("killed", "PEER_UNREACHABLE", "at RECV", "the prefill engine P1 began to push and did not end"),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("case", "code", "cause", "side"), CAUSES)
def test_replay_of_both_logs_names_cause_and_side(
    run: Run, case: str, code: str, cause: str, side: str, policy: str
) -> None:
    finding = run.finding_of(f"D-{policy}", f"{case}-{policy}", "P1", f"D-{policy}")
    assert (finding.kind, finding.code, finding.certainty) == ("load_failed", code, "proven")
    assert cause in say(finding).culprit
    assert side.format(policy) in say(finding).culprit


@pytest.mark.parametrize("policy", POLICIES)
def test_good_transfers_are_in_no_finding(run: Run, policy: str) -> None:
    good = {run.of(f"D-{policy}", f"{case}-{policy}")[0].request for case in ("good", "decode_first", "heir")}
    named = {request for finding in run.findings("P1", "P2", f"D-{policy}") for request in finding.requests}
    assert not good & named


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decode_that_never_asks_is_a_bounded_leak_of_the_prefill(run: Run, policy: str) -> None:
    finding = run.finding_of("P1", "never_asked", "P1", f"D-{policy}")
    assert (finding.kind, finding.certainty) == ("leak", "proven")
    assert f"the decode engine D-{policy} knows nothing of transfer never_asked" in say(finding).culprit


def test_what_a_prefill_holds_for_a_decode_that_never_asks_stands_in_its_book_until_it_expires(run: Run) -> None:
    told = [ev.kind_of(event) for event in run.of("P1", "never_asked")]
    assert told == ["send_registered", "send_ready", "rank_sent", "send_expired"]
    (ready,) = [event for event in run.of("P1", "never_asked") if isinstance(event, ev.SendReady)]
    assert len(numbers(ready.blocks)) == 10
    assert ready.timeout_ns == HOLD_TIMEOUT_S * 10**9


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decode_that_is_gone_is_a_bounded_leak_of_the_prefill(run: Run, policy: str) -> None:
    findings = [each for each in run.findings("P2", f"D-{policy}") if each.kind == "leak"]
    (finding,) = [each for each in findings if run.of("P2", f"gone-{policy}")[0].request in each.requests]
    assert finding.code == "TRANSFER_FAILED"
    assert f"the decode engine D-{policy} still waits for it" in say(finding).culprit


# --- several ranks ----------------------------------------------------------------------------------------------------


def peers_of(run: Run, engine: str, transfer: str) -> set[tuple[int, str]]:
    """Return rank and peer of every peer that a decode's ranks have named."""
    named = [event for event in run.of(engine, transfer) if isinstance(event, ev.PeersNamed)]
    return {(event.rank, peer) for event in named for peer in event.peers}


@pytest.mark.parametrize(
    ("engine", "peers"),
    [("D1", {(0, "tp0 pp0"), (0, "tp1 pp0")}), ("D2", {(0, "tp0 pp0"), (1, "tp1 pp0")})],
)
@pytest.mark.parametrize(("case", "outcome"), [("good", "ok"), ("never", "failed")])
def test_every_peer_of_every_rank_is_named_and_settles(
    ranks: Run, engine: str, peers: set[tuple[int, str]], case: str, outcome: str
) -> None:
    transfer = f"{case}-{engine}"
    assert peers_of(ranks, engine, transfer) == peers
    told = ranks.of(engine, transfer)
    settled = [event for event in told if isinstance(event, ev.PeerSettled)]
    assert {(event.rank, event.peer) for event in settled} == peers
    assert {event.outcome for event in settled} == {outcome}
    assert isinstance([event for event in told if not event.evidence][-1], ev.RecvSettled)
    assert sum(isinstance(event, ev.RecvFailed) for event in told) == (case == "never")


def test_two_ranks_of_a_prefill_send_to_two_of_a_decode(ranks: Run) -> None:
    assert ranks.result["cases"]["good-D2"]["tokens"] == ranks.result["reference"]
    sent = [event for event in ranks.of("P", "good-D2") if isinstance(event, ev.RankSent)]
    assert {(event.rank, event.outcome) for event in sent} == {(0, "sent"), (1, "sent")}


def test_two_ranks_of_a_prefill_send_to_one_of_a_decode(ranks: Run) -> None:
    ended = ranks.result["cases"]["good-D1"]
    assert (ended["reason"], ended["cached"]) == ("length", 300)
    assert isinstance(ranks.of("P", "good-D1")[-1], ev.SendSettled)


@pytest.mark.parametrize("engine", ["P", "D1", "D2"])
def test_with_several_ranks_the_fold_gives_the_digests_that_the_engine_recorded(ranks: Run, engine: str) -> None:
    folded = ranks.fold(engine)
    assert [recorded for recorded, _ in folded.digests] == [digest for _, digest in folded.digests]
    assert not folded.state.book.recvs
    assert not folded.state.book.sends
