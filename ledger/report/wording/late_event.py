"""The words of `late_event`."""

from ledger import events as ev
from ledger import words
from ledger.report.wording.rules import broken, of_rank
from ledger.report.wording.words import Words, of
from ledger.verdicts.base import Finding
from ledger.verdicts.late_event import CameLate, Ignored
from ledger.verdicts.shared.ends import is_hard, is_near


@of(CameLate)
def _came_late(finding: Finding, facts: CameLate) -> Words:
    what = f"a result{of_rank(facts)} came too late: {facts.detail}"
    return broken(facts, what, advice=_advice(finding, facts.event))


@of(Ignored)
def _ignored(finding: Finding, facts: Ignored) -> Words:
    first = facts.first
    times = f" ({facts.results:,} such results)" if facts.results > 1 else ""
    return Words(
        title=f"{_result(first)} came too late and was ignored: {first.why}{times}",
        culprit=words.ranks([first.rank]) if first.rank >= 0 else f"the other side of the {first.what}",
        advice=_advice(finding, first),
    )


def _result(event: ev.ReportIgnored) -> str:
    """Return what came and from whom, and that it was a failure, as far as the event says."""
    subject = event.transfer or (f"load {event.load}" if event.load >= 0 else event.what)
    who = f" from rank {event.rank}" if event.rank >= 0 else ""
    if event.code:
        return f"a failed result{who} for {subject}, {event.code},"
    return f"a result{who} for {subject}"


def _advice(finding: Finding, event: ev.Event) -> str:
    end = finding.end
    if end is not None and is_hard(end) and is_near(event, end):
        return (
            f"Look for an error about this request in the engine's own log at {words.clock(event.ts_ns)} UTC: this log "
            "ends right after the result, which makes it the first suspect."
        )
    return "Nothing, if this is all: it changed nothing. The evidence shows what had ended the work before it came."
