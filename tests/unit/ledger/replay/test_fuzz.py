"""Logs that no engine would write: whatever comes, the fold and the verdicts end, and the report can be printed."""

from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ledger import events as ev
from ledger.queries.blame import blame
from ledger.queries.why import why
from ledger.replay.case import Case, LogResult
from ledger.replay.fold import Replay
from ledger.replay.join import join
from ledger.replay.select import Interest, Watch
from ledger.report import data as report_data
from ledger.report import page as report
from ledger.report.wording import public
from tests.incidents.corpus import INCIDENTS

LOGS = [events for incident in INCIDENTS for events in incident.logs().values()]


@st.composite
def mangled(draw: st.DrawFn) -> list[ev.AnyEvent]:
    """Parts of one or two logs, with events left out, doubled, swapped, and a gap with or without the book."""
    events = list(draw(st.sampled_from(LOGS)))
    if draw(st.booleans()):
        events += draw(st.sampled_from(LOGS))
    kept = [event for event in events if draw(st.integers(0, 9)) > 1]
    for _ in range(draw(st.integers(0, 4))):
        if len(kept) > 1:
            first, second = draw(st.integers(0, len(kept) - 1)), draw(st.integers(0, len(kept) - 1))
            kept[first], kept[second] = kept[second], kept[first]
            kept.insert(first, kept[second])
    if kept and draw(st.booleans()):
        place = draw(st.integers(0, len(kept)))
        state = Replay(()).feed(draw(st.sampled_from(LOGS))).state
        last = kept[min(place, len(kept) - 1)]
        envelope = (last.seq, last.ts_ns, last.mono_ns, ev.SCHEDULER, last.step)
        gap = ev.Gap(*envelope, origin=draw(st.sampled_from(["scheduler", "rank 0", "workers"])), dropped=3, reason="")
        book = ev.Checkpoint(*envelope, digest=state.digest(), book=msgspec.Raw(state.encode()))
        kept[place:place] = [gap, book] if draw(st.booleans()) else [gap]
    return [msgspec.structs.replace(event, seq=place) for place, event in enumerate(kept, 1)]


@given(mangled(), st.sampled_from(["torn", "live", "as_of"]))
def test_no_log_makes_the_fold_or_a_verdict_fail(events: list[ev.AnyEvent], ending: str):
    result = Replay().feed(events).result(ending)
    places = {event.seq for event in events}
    for finding in result.findings:
        assert set(finding.evidence) <= places
        assert finding.certainty in {"proven", "suspected", "undecidable"}
        assert msgspec.json.encode(public(finding))


@given(mangled(), mangled())
def test_whatever_was_found_can_be_joined_and_printed(one: list[ev.AnyEvent], two: list[ev.AnyEvent]):
    results = [Replay().feed(events).result("torn") for events in (one, two)]
    joined = join(results, ["one.db", "two.db"], [one.__iter__, two.__iter__])
    logs = [LogResult(Path(f"{n}.db"), False, {}, result) for n, result in zip(("one", "two"), results, strict=True)]
    case = Case(logs, Interest(), joined.findings, joined.transfers)
    assert list(report.text(case, check=True))
    assert msgspec.json.encode(report_data.data(case))


@given(mangled())
def test_the_backward_questions_have_an_answer_for_every_log(events: list[ev.AnyEvent]):
    result = Replay().feed(events).result("torn")
    for interest in (Interest(request="R"), Interest(job=0), Interest(block=(0, 7))):
        watch = Watch(interest)
        watch.look(events)
        assert len(watch.events) <= len(events)
        blame(watch.events, (0, 7))
        if interest.request is not None:
            answer = why(interest.request, watch.events, result)
            assert answer is None or answer.answer
