"""Every public incident reaches its verdict and names its culprit; its twin is silent; a log that is cut never lies."""

import pytest
from msgspec.structs import replace

from ledger import events as ev
from ledger.replay.fold import Replay
from ledger.report.wording import say
from ledger.verdicts.base import Finding
from tests.incidents.corpus import INCIDENTS, LOGS, Incident
from tools.scoring.common import replay_together
from tools.scoring.corpus import PAGE, page, score

BY_ID = {incident.id: incident for incident in INCIDENTS}
every_incident = pytest.mark.parametrize("incident", INCIDENTS, ids=list(BY_ID))

LESS_CERTAIN = {"missing_ranks": {"leak", "stall"}, "stale_completion": {"leak"}}
"""What a finding may be called while the log has not yet shown that it is more than that."""


def cuts(events: list[ev.AnyEvent]) -> list[tuple[int, list[Finding]]]:
    """The findings of a log that ends torn after its first event, after its second, and so on."""
    return [(length, Replay().feed(events[:length]).result("torn").findings) for length in range(1, len(events) + 1)]


@every_incident
def test_an_incident_reaches_its_verdict_and_names_its_culprit(incident: Incident):
    row = score(incident)
    assert not row.problems, "\n".join(row.problems)
    assert row.verdict == row.culprit == len(incident.expected)


@every_incident
def test_the_healthy_twin_is_silent(incident: Incident):
    assert replay_together(incident.logs(healthy=True)) == []


@every_incident
def test_an_incident_lies_there_as_files(incident: Incident):
    assert incident.logs()
    assert incident.logs(healthy=True)


@every_incident
@pytest.mark.parametrize("healthy", [False, True], ids=["story", "twin"])
def test_the_script_still_tells_the_log_that_lies_there(incident: Incident, healthy: bool):
    told = (incident.twin if healthy else incident.story)()
    assert {name: script.events for name, script in told.items()} == incident.logs(healthy=healthy)


@every_incident
@pytest.mark.parametrize("healthy", [False, True], ids=["story", "twin"])
def test_a_salvaged_log_with_a_hole_anywhere_proves_nothing_that_the_whole_one_does_not(
    incident: Incident, healthy: bool
):
    for name, events in incident.logs(healthy=healthy).items():
        proven = {
            finding.kind for finding in Replay().feed(events).result("torn").findings if finding.certainty == "proven"
        }
        for hole, lost in enumerate(events[:-1]):
            gap = ev.Gap(
                lost.seq, lost.ts_ns, lost.mono_ns, ev.SCHEDULER, lost.step, origin=ev.WHOLE_FILE, dropped=1, reason=""
            )
            result = Replay().feed([*events[:hole], gap, *events[hole + 1 :]]).result("torn")
            assert result.mismatch is None
            for finding in result.findings:
                if finding.certainty == "proven":
                    assert finding.kind in proven | {"torn_log"}, f"{name} without {hole + 1}: {say(finding).title}"


@every_incident
def test_a_log_that_is_cut_anywhere_becomes_less_certain_and_never_wrong(incident: Incident):
    for name, events in incident.logs().items():
        whole = Replay().feed(events).result("torn").findings
        kinds = {finding.kind for finding in whole}
        allowed = kinds | {"torn_log"} | {less for kind in kinds for less in LESS_CERTAIN.get(kind, ())}
        proven = {finding.kind for finding in whole if finding.certainty == "proven"} | {"torn_log"}
        for length, findings in cuts(events):
            for finding in findings:
                assert finding.kind in allowed, f"{name} cut after {length}: {finding.kind}: {say(finding).title}"
                if finding.certainty == "proven":
                    assert finding.kind in proven, f"{name} cut after {length}: {say(finding).title}"


@every_incident
def test_a_healthy_log_that_is_cut_anywhere_is_torn_and_nothing_else(incident: Incident):
    for name, events in incident.logs(healthy=True).items():
        for length, findings in cuts(events):
            kinds = [finding.kind for finding in findings]
            assert kinds == ([] if length == len(events) else ["torn_log"]), f"{name} cut after {length}: {kinds}"


@every_incident
def test_a_log_that_is_still_written_is_no_incident_by_itself(incident: Incident):
    for events in incident.logs(healthy=True).values():
        for length in range(1, len(events)):
            assert Replay().feed(events[:length]).result("live").findings == []


@every_incident
def test_every_finding_points_to_events_that_are_there(incident: Incident):
    logs = incident.logs()
    for name, finding in replay_together(logs):
        places = {event.seq for event in logs[name]}
        assert finding.evidence
        assert set(finding.evidence) <= places
        assert list(finding.evidence) == sorted(set(finding.evidence))
        assert {finding.since_seq, finding.lead_seq} <= places
        assert say(finding).advice
        assert say(finding).culprit
        assert (finding.certainty == "proven") == (not say(finding).doubt)


def test_a_late_error_does_not_bring_a_request_back():
    events = BY_ID["S4"].logs()["decode"]
    result = Replay().feed(events).result()
    assert "R" not in result.state.book.requests


def test_findings_of_one_cause_lead_with_the_cause():
    leads = {incident.id: replay_together(incident.logs())[0][1].kind for incident in INCIDENTS if incident.expected}
    assert leads["S2"] == "stale_completion"
    assert leads["S4"] == "unreported_failure"
    assert leads["K3"] == "over_report"


def test_logs_given_in_any_order_say_the_same():
    for incident in INCIDENTS:
        logs = incident.logs()
        forth = replay_together(logs)
        back = replay_together(dict(reversed(logs.items())))
        # A job of another log is named by the place of that log among those that were given.
        forth, back = ([(log, replace(each, elsewhere=())) for log, each in found] for found in (forth, back))
        assert sorted(repr(each) for each in forth) == sorted(repr(each) for each in back)


def test_every_kind_of_finding_has_an_incident():
    told = {expected.kind for incident in INCIDENTS for expected in incident.expected}
    assert told >= {
        "stall",
        "leak",
        "poison",
        "early_free",
        "double_free",
        "stale_completion",
        "over_report",
        "missing_ranks",
        "unreported_failure",
        "retry_loop",
        "late_event",
        "lost_store",
        "evicted_before_load",
        "torn_log",
    }


def test_no_file_lies_in_the_corpus_that_no_incident_names():
    named = {f"{incident.id}.{kind}" for incident in INCIDENTS for kind in ("story", "twin")}
    assert {".".join(path.name.split(".")[:2]) for path in LOGS.glob("*")} == named


def test_the_page_with_the_score_says_what_is_true():
    rows = [score(incident) for incident in INCIDENTS]
    table = page(rows)
    print(table)
    assert PAGE.read_text() == table, "run python tools/score.py corpus --write"
