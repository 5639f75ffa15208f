"""The report leads with what happened and what to do, claims no more than the log shows, and can be followed."""

import re
from collections import Counter
from pathlib import Path

import pytest

from ledger.codes import CODES
from ledger.replay.case import Case, replay_files
from ledger.replay.incidents import gravest
from ledger.replay.select import Moment
from ledger.replay.stats import Durations
from ledger.report import data as report_data
from ledger.report import page as report
from ledger.report.layout import Page
from tests.incidents.corpus import INCIDENTS
from tests.incidents.script import Script, save

EVERY_ID = [incident.id for incident in INCIDENTS]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """The incidents of the corpus, replayed from files."""
    folder = tmp_path_factory.mktemp("corpus")
    told: dict[str, Case] = {}
    for incident in INCIDENTS:
        paths = [save(events, folder / f"{incident.id}.{name}.db") for name, events in incident.logs().items()]
        told[incident.id] = replay_files(paths)
    return told


def lines(case: Case, width: int = 80) -> list[str]:
    return list(report.text(case, width=width))


def one_line(case: Case) -> str:
    """The report with its lines put together again."""
    return " ".join(" ".join(lines(case)).split())


def case_of(log: Script, tmp_path: Path, moment: str = "") -> Case:
    return replay_files([log.save(tmp_path / "log.db")], moment=Moment(moment) if moment else None)


# --- the first lines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_ID)
def test_the_first_lines_say_what_happened_and_what_to_do(cases: dict[str, Case], name: str):
    case = cases[name]
    top = " ".join(lines(case)[: lines(case).index("")])
    if not case.findings:
        assert top == "Nothing wrong was found."
        return
    head = case.findings[gravest(case.incidents, case.findings).head][1]
    assert "What happened" in top
    assert "Do next: " in top
    assert "Impact: " in top
    assert bool(re.search(rf"What happened( on engine \w+)? \({head.certainty}\): ", top)) == (
        head.certainty != "proven"
    )
    assert len(lines(case)[: lines(case).index("")]) <= 12


def test_findings_are_counted_the_most_certain_first(cases: dict[str, Case]):
    assert lines(cases["S2"])[0] == "3 findings in 1 incident: stale_completion (proven), 2 leak (proven)"
    said = report.headline(cases["S13"])
    assert said == "3 findings in 1 incident: load_failed (proven), torn_log (proven), stall (suspected)"
    assert lines(cases["K1"])[0] == "1 finding: stall (proven)"


def test_a_moment_before_the_first_event_is_not_called_sound(tmp_path: Path):
    log = Script()
    log.runs("R")
    case = case_of(log.closes(), tmp_path, "2020-01-01")
    first = lines(case)[0]
    assert "there is no event before that moment" in one_line(case)
    assert "the log begins at 2026-05-28T20:26:40.001Z" in one_line(case)
    assert "Nothing wrong" not in first


# --- one story --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_ID)
def test_each_incident_has_one_culprit_and_one_thing_to_do(cases: dict[str, Case], name: str):
    case = cases[name]
    said = lines(case)
    assert sum(line.startswith("  Culprit ") for line in said) == len(case.incidents)
    # The only incident has its advice in the first lines, and nowhere else.
    advices = sum(line.lstrip().startswith("Do next") for line in said)
    assert advices == len(case.incidents) + (len(case.incidents) > 1)
    shown = one_line(case)
    for _, finding in case.findings:
        assert f"{finding.kind.upper()} ({finding.certainty}): " in shown


def test_what_came_of_a_cause_is_told_with_it_in_short(cases: dict[str, Case]):
    said = one_line(cases["S2"])
    assert said.count("Also LEAK (proven)") == 2  # both jobs had begun before
    assert "store job 2 of request R holds its blocks: its report from rank 0 was counted for job 3 (event 33)" in said
    assert "store job 3 of request R holds its blocks: the report of job 2 was counted for it (event 33)" in said
    said = one_line(cases["S6"])
    assert (
        said.index("EARLY_FREE")
        < said.index("Preceded by LOAD_FAILED (proven)")
        < said.index("Led to POISON (suspected)")
    )


def poisoned(jobs: int) -> Script:
    log = Script()
    for job in range(jobs):
        log.runs(f"R{job}")
        log.saves(job, f"R{job}", blocks=(5, 6), pins=False)
        log.preempts(f"R{job}")
        log.arrives(f"N{job}")
        log.gives(f"N{job}", (5, 6))
        log.steps(2)
        log.puts(job, keys=[f"{job}a", f"{job}b"])
        log.reports(job)
        log.finishes(f"N{job}")
        log.request_aborted(request=f"R{job}", generation=2)
    return log


def test_many_findings_of_one_incident_are_told_as_a_few_and_a_count(tmp_path: Path):
    log = poisoned(60)
    log.runs("L")
    log.saves(60, "L", blocks=(20, 27))
    log.passes(100)
    case = case_of(log.closes(), tmp_path)
    assert len(case.findings) == 61
    said = one_line(case)
    assert said.count("Also POISON (proven): ") == 8
    assert "Also 51 poison (proven), which are not shown one by one here; --json names all" in said
    assert "The same for the keys of the 59 jobs 1-59: add `--job 1 --job 2 " in said
    assert "LEAK (proven): store job 60" in said
    assert len(lines(case)) < 200
    assert len(report_data.data(case)["findings"]) == 61


def test_incidents_are_data_too_and_the_findings_stay_as_they_are(cases: dict[str, Case]):
    data = report_data.data(cases["S4"])
    assert [finding["kind"] for finding in data["findings"]] == ["unreported_failure", "stall", "leak", "late_event"]
    (incident,) = data["story"]["incidents"]
    assert (incident["findings"], incident["cause"], incident["after"]) == ([0, 1, 2, 3], 0, [1, 2, 3])
    assert incident["do_next"].startswith("On engine decode: Check that prefill engine prefill is up")
    assert incident["impact"].startswith("request R was aborted after 5 min 02 s without its KV")


def test_the_other_log_is_not_asked_for_when_it_is_there(cases: dict[str, Case], tmp_path: Path):
    assert "Replay the decode engine's log" not in one_line(cases["S11"])
    (prefill,) = [log.path for log in cases["S11"].logs if "prefill" in log.path.name]
    assert "Do next: Replay the decode engine's log together with this one" in one_line(replay_files([prefill]))


# --- what is claimed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_ID)
def test_nothing_is_said_to_be_for_ever_of_which_the_log_only_shows_the_beginning(cases: dict[str, Case], name: str):
    assert not re.search(r"\bnever\b|for ever|for good|not returned", one_line(cases[name]))


def test_what_is_shown_and_what_is_concluded_are_told_apart(cases: dict[str, Case]):
    said = one_line(cases["S13"])
    assert "Proven store job 2 is open since event 24, and still was at event 28" in said
    assert "Not proven the log ends torn" in said
    assert "Not proven LOAD_FAILED: that what the other log has of these keys is why they cannot be loaded" in said


def test_blocks_that_were_given_away_are_not_said_to_be_held(cases: dict[str, Case]):
    said = one_line(cases["S6"])
    told = "holds 8 blocks in the ledger only: they were given away too early, see incident 1"
    assert told in said
    opened = [item for log in report_data.data(cases["S6"])["story"]["logs"] for item in log["open"]]
    assert any(item.endswith(told) for item in opened)


def test_a_call_that_failed_is_not_told_as_if_its_bytes_had_moved(cases: dict[str, Case]):
    assert "0 B moved, 1 failed" in one_line(cases["S15"])
    assert "201.0 ms: put #6 of rank 1 for job 2, raised, 32.0 KiB asked for, event 36" in one_line(cases["S3"])


def test_durations_of_scripted_calls_are_those_between_their_events():
    for incident in INCIDENTS:
        for healthy in (False, True):
            for events in incident.logs(healthy=healthy).values():
                began = {(e.transfer, e.rank): e.ts_ns for e in events if e.__class__.__name__ == "TransferStarted"}
                for event in events:
                    if event.__class__.__name__ == "TransferFinished":
                        assert event.duration_ns == event.ts_ns - began[event.transfer, event.rank]


# --- how it is proven -------------------------------------------------------------------------------------------------


def test_a_poisoned_key_can_be_followed_from_the_events_alone(cases: dict[str, Case]):
    evidence = one_line(cases["S1"]).split(" Evidence ")[1]
    steps = [
        "store job 0 registered for request R; rank 0 must report; it pins no block",
        "request R preempted",
        "blocks 5-12 were given up by request R",
        "blocks 5-12 were given to request R2",
        "request R2 scheduled",
        "put #1 for job 0 began",
        "put #1 for job 0 ended ok",
        "get #2 for load 0 of request R3 began",
        "get #2 for load 0 of request R3 ended ok",
    ]
    places = [evidence.index(step) for step in steps]
    assert places == sorted(places)
    assert "Keys of job 0 (proven): r00, r01" in one_line(cases["S1"])


def test_a_peer_that_went_on_writing_is_among_the_events(cases: dict[str, Case]):
    evidence = one_line(cases["S6"]).split(" Evidence ")[1]
    assert evidence.index("given to request R2") < evidence.index("tp1 pp0 settled x1 for rank 0: ok")


def test_ranks_that_went_on_after_a_send_was_over_are_among_the_events(cases: dict[str, Case]):
    evidence = one_line(cases["S12"]).split(" Evidence ")[1]
    settled = evidence.index("send x1 of request R settled: sent")
    assert settled < evidence.index("rank 1: push of x1 with tp0 pp0 ended ok")


def test_both_frees_of_a_double_free_are_among_the_events(cases: dict[str, Case]):
    evidence = one_line(cases["K4"]).split(" Evidence ")[1].split(" Open at the end")[0]
    assert evidence.count("job 0 freed blocks 5-12") == 2


def test_what_a_late_result_came_after_is_among_the_events(cases: dict[str, Case]):
    evidence = one_line(cases["S16"]).split(" Evidence ")[1]
    assert "request R aborted" in evidence
    assert "recv x1 of request R settled" in evidence


def test_of_many_blocks_an_event_shows_those_that_the_incident_is_about(tmp_path: Path):
    log = Script()
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12), pins=False)
    log.preempts("R")
    log.takes_back("R", (5, 12))
    log.arrives("R2")
    log.gives("R2", [7, *range(20, 60, 2)])
    log.request_scheduled(request="R2", generation=1, scheduled_tokens=128)
    log.steps(3)
    log.puts(0, keys="abcdefgh")
    log.reports(0)
    said = one_line(case_of(log.closes(), tmp_path))
    assert "block 7 was given to request R2 (and 20 more)" in said


# --- who suffers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("S1", "the answer of request R3, which loaded these keys, is unreliable"),
        (
            "S2",
            "is sound, as far as this log goes; 16 of 99 blocks were still held when the engine shut down",
        ),
        ("S4", "request R was aborted after 5 min 02 s without its KV"),
        ("S4", "8 of 99 blocks of engine decode were still held when the engine shut down"),
        ("S9", "no request failed: all 3 were recomputed, which costs time only"),
        ("S11", "are free again; it is over: nothing is left open at the end"),
        ("S13", "8 of 99 blocks of engine writer were held when the log ends"),
        ("S10", "request R was sent back to be recomputed, and had not ended when the log did"),
        ("S12", "what is sent as x1 after event 11 may be KV of another request"),
        ("S14", "no request failed: request Q was recomputed"),
        ("K4", "whoever uses these blocks after event 11 may share them with another request"),
        ("K5", "3 requests hang, for 3 min 20 s by then"),
        ("K7", "the answer of request R is unreliable: it went on with KV that did not arrive"),
    ],
)
def test_the_impact_says_who_suffers_and_whether_it_goes_on(cases: dict[str, Case], name: str, says: str):
    assert says in one_line(cases[name]).split(" Do next: ")[0]


def test_what_to_do_names_the_engine_and_stops_the_leak_before_the_cause_is_mended(
    cases: dict[str, Case], tmp_path: Path
):
    assert "Do next: On engine decode: " in one_line(cases["S4"])
    (events,) = next(incident for incident in INCIDENTS if incident.id == "S2").logs().values()
    said = one_line(replay_files([save(events[:-1], tmp_path / "torn.db")])).split(" Do next: ")[1]
    assert said.index("Restart the engine") < said.index("Use a connector that keeps reports by job id")
    assert "Restart the engine" not in one_line(cases["S2"])  # it has shut down


@pytest.mark.parametrize("name", ["S2", "S3", "K3"])
def test_of_an_engine_that_has_shut_down_no_block_is_said_to_be_held_still(cases: dict[str, Case], name: str):
    said = one_line(cases[name])
    assert "still held when the engine shut down" in said
    for claim in ("are still held", "stay held", "stay pinned", "by hand"):
        assert claim not in said


def test_a_request_that_has_only_just_come_is_not_affected(cases: dict[str, Case]):
    assert "R-next" not in one_line(cases["S13"]).split(" Affected ")[1].split(" Culprit ")[0]
    assert "request Q queued" in one_line(cases["S2"]).split(" Evidence ")[1]


def test_requests_of_the_other_log_are_named_with_their_engine(cases: dict[str, Case]):
    assert "Affected Q0, Q1 of engine reader" in one_line(cases["S13"])
    assert "Concerns request R; request P-R of engine prefill; rank 0" in one_line(cases["S4"])


def test_the_logs_of_two_boots_of_one_engine_are_told_apart_by_their_boots(tmp_path: Path):
    paths: list[Path] = []
    for boot, start_s in (("b1", 0), ("b2", 500)):
        log = Script(opens=False, start_s=start_s)
        log.log_opened(engine="vllm", boot=boot, num_blocks=100, block_sizes=(16,))
        log.runs("R")
        log.saves(0, "R", blocks=(5, 12))
        log.put_begins(0, keys=["k"])
        log.passes(100, steps=200)
        log.runs("S")
        paths.append(log.closes().save(tmp_path / f"{boot}.db"))
    told = one_line(replay_files(paths))
    for says in (
        "What happened on engine vllm, boot b1 (incident 1): ",
        "8 of 99 blocks of engine vllm, boot b1 were still held",
        "8 of 99 blocks of engine vllm, boot b2 were still held",
        "On engine vllm, boot b1: The engine has shut down",
        "On engine vllm, boot b2: The engine has shut down",
    ):
        assert says in told
    assert "On engine vllm: " not in told


# --- it agrees with itself --------------------------------------------------------------------------------------------


def test_an_answer_that_was_ignored_is_not_said_to_be_missing(cases: dict[str, Case]):
    said = one_line(cases["S4"])
    assert "no answer from rank 0" not in said
    assert "the answer from rank 0 came late, at event 8, and was ignored" in said
    assert "a failed result from rank 0 for x1, LOAD_TIMEOUT" in said
    assert "failed before asking" not in said  # the decode's log shows that it asked


def test_one_time_line_has_what_ended_the_request_in_its_place(cases: dict[str, Case]):
    evidence = one_line(cases["S4"]).split(" Evidence: ")[1]
    places = [
        evidence.index(step) for step in ("pull of x1 ended failed", "request R aborted", "send x1 of request P-R")
    ]
    assert places == sorted(places)
    assert "Transfer x1" not in one_line(cases["S4"])


def test_the_refused_report_of_the_job_itself_is_among_the_events(cases: dict[str, Case]):
    said = one_line(cases["S2"])
    assert "Refused event 37, which the state does not accept: rank_reported_twice" in said
    evidence = said.split(" Evidence ")[1]
    assert evidence.count("rank 0 reported job 3: stored") == 2
    assert "rank 0 reported job 3: stored; the state refused this" in evidence
    assert "waits for rank 0, whose report was counted for job 3" in said


def test_nothing_is_said_to_follow_that_is_only_known_to_be_beside(cases: dict[str, Case]):
    said = one_line(cases["S13"])
    assert "Also LOAD_FAILED (proven)" in said
    assert "Led to" not in said.split(" Incidents,")[1].split(" Concerns ")[0]
    assert "8 of these 8 keys" in said


def test_each_failed_load_is_told_rank_by_rank(cases: dict[str, Case]):
    said = one_line(cases["S9"])
    for load, events in enumerate(
        ("14, 15; ranks 2-3 failed, events 16, 18", "35, 36; ranks 2-3 failed, events 37, 39")
    ):
        assert f"load {load} of request R{load}: ranks 0-1 loaded, events {events}" in said


def test_a_silence_before_the_last_event_is_told(cases: dict[str, Case]):
    assert "no event in the 1 min 10 s before it" in one_line(cases["S13"])


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_two_durations_have_no_median_and_equal_ones_no_maximum(cases: dict[str, Case]):
    for name in EVERY_ID:
        assert not re.search(r"\b([\d.]+ m?s) at the median, \1 at most", one_line(cases[name]))
    assert "1 more still open when the log ends" in one_line(cases["S13"])


def test_the_median_of_an_even_number_of_durations_lies_between_the_two_in_the_middle():
    durations = Durations()
    for each in (10, 20, 40, 400):
        durations.add(each)
    assert durations.percentile_ns(50) == 30
    assert durations.percentile_ns(99) == 400
    assert durations.shortest_ns == 10


# --- how it reads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("name", EVERY_ID)
def test_no_line_is_wider_than_the_reader_has_room(cases: dict[str, Case], name: str, width: int):
    for line in lines(cases[name], width):
        assert line.isascii()
        assert line == line.rstrip()
        assert len(line) <= width or " " not in line.strip(), line  # a path is not broken


def test_a_narrow_page_says_the_same_words(cases: dict[str, Case]):
    wide, narrow = (Counter(re.findall(r"[\w.-]+", " ".join(lines(cases["S1"], width)))) for width in (80, 40))
    del wide["event"], narrow["event"]  # without columns, the number of an event says what it is
    assert wide == narrow


@pytest.mark.parametrize("name", EVERY_ID)
def test_one_is_told_as_one(cases: dict[str, Case], name: str):
    said = one_line(cases[name])
    assert not re.search(r"ranks \d+(?![-,\d])", said)
    assert not re.search(r"blocks \d+(?![-,\d])", said)
    assert "(group 0)" not in said


@pytest.mark.parametrize("name", EVERY_ID)
def test_calls_are_not_told_as_two_numbers(cases: dict[str, Case], name: str):
    assert not re.search(r"\b(put|get)s? \d+-\d+", one_line(cases[name]))


@pytest.mark.parametrize("name", EVERY_ID)
def test_the_first_use_of_a_code_says_what_it_means(cases: dict[str, Case], name: str):
    said = one_line(cases[name])
    for row in CODES.values():
        uses = said.count(str(row.code))
        assert said.count(f"{row.code} ({row.short}") == min(uses, 1)


def test_a_raw_number_stands_beside_the_meaning_of_its_code():
    page = Page()
    said = page.explain("failed with BLOCK_NOT_FOUND (raw -704), and again with BLOCK_NOT_FOUND (raw -704)")
    assert said == (
        "failed with BLOCK_NOT_FOUND (no readable copy of the block; raw -704 OBJECT_NOT_FOUND), and again with "
        "BLOCK_NOT_FOUND (raw -704)"
    )
