"""The words of `leak`."""

from ledger import events as ev
from ledger import words
from ledger.blocks import count
from ledger.report.wording.clauses import DOWN, likewise
from ledger.report.wording.open_work import open_since, seen_of_ranks, waiting_to_run, whose
from ledger.report.wording.words import Words, of, of_doubt
from ledger.verdicts.base import Finding, Miscounted
from ledger.verdicts.leak import Expired, QuestionLost, StillHeld
from ledger.verdicts.shared.doubts import BLIND
from ledger.verdicts.shared.ends import goes_on, is_down

OTHER_LOG = (
    "Replay the decode engine's log together with this one: it shows whether the request arrived there, and asked."
)

RESTART = "Restart the engine when it can be spared: only that gives the held blocks back."


@of(StillHeld)
def _still_held(finding: Finding, facts: StillHeld) -> Words:
    first = facts.first
    held = words.plural(facts.held_blocks, "block")
    title = f"{whose(first)} {_why(finding, facts)}{likewise(facts.waits - 1, first.what)}; {held} held"
    if finding.miscounted is not None:
        title = _with_report_counted(finding, finding.miscounted)
    return Words(
        title=title,
        culprit=_culprit(finding, facts),
        advice=_advice(finding, facts),
        other_log=OTHER_LOG if first.what == "send" else "",
        shown=open_since(finding, first) if finding.doubt is not None else "",
        impact=waiting_to_run(finding, facts.longest_wait_ns),
        also="" if goes_on(finding.end) or is_down(finding.end) else RESTART,
    )


def _with_report_counted(finding: Finding, counted: Miscounted) -> str:
    """Return the title of a leak of one job of which it is known that a report was counted for the wrong job."""
    job = finding.jobs[0]
    if job == counted.report_of:
        known = f"its report from rank {counted.rank} was counted for job {counted.counted_for} (event {counted.seq})"
    else:
        known = (
            f"the report of job {counted.report_of} was counted for it (event {counted.seq}), and its blocks were not "
            "freed"
        )
    held = f"{len(finding.blocks):,} {'block is' if len(finding.blocks) == 1 else 'blocks are'} held"
    return f"store job {job} of request {finding.requests[0]} holds its blocks: {known}; {held}"


def _why(finding: Finding, facts: StillHeld) -> str:
    """Return what holds the blocks of the oldest."""
    first, on = facts.first, goes_on(finding.end)
    open_for = words.span(first.open_ns)
    if first.quarantined:
        until = "were held until the engine shut down" if is_down(finding.end) else "stay held until a restart"
        return f"is quarantined after a broken rule: its blocks {until}"
    if first.what == "send":
        return f"has held its blocks for {open_for}, and the decode engine has not fetched them"
    if first.missing:
        settled = "had not settled by then" if on else "did not settle in this log"
        return f"{settled}: no report from {words.ranks(finding.ranks)} in {open_for}"
    freed = "had not freed its blocks by then" if on else "did not free its blocks in this log"
    if facts.settled is None:
        return f"{freed}, although every rank has reported; open for {open_for}"
    return f"settled at event {facts.settled.seq} and {freed}; open for {open_for}"


def _culprit(finding: Finding, facts: StillHeld) -> str:
    first = facts.first
    if first.quarantined:
        return "; ".join(f"broken rule {event.rule}: {event.detail}" for event in facts.violated) or "a broken rule"
    if facts.unasked:
        so_far = ", as far as this log goes" if isinstance(finding.doubt, BLIND) else ""
        return f"the decode engine, or the router before it: nobody has asked for this transfer{so_far}"
    if not first.missing:
        return "the scheduler: it settled the job and stopped before freeing"
    return seen_of_ranks(finding, first, first.missing)


def _advice(finding: Finding, facts: StillHeld) -> str:
    first, end = facts.first, finding.end
    if first.quarantined:
        return f"{DOWN} Report the broken rule with this file." if is_down(end) else RESTART
    if first.what == "send":
        return "Check whether the request reached a decode engine, and is still running there."
    if not first.missing:
        return "Look at the engine's log at its last step: it stopped between settling the job and freeing its blocks."
    where = f"the worker log of {words.ranks(finding.ranks)}"
    if end is not None and goes_on(end):
        later = "Replay the log without --until" if end.how == "as_of" else "Replay the log again in a minute"
        return f"{later}: the job may have settled since. If it has not, look at {where}."
    seen = next((view.last for view in first.missing if view.last is not None), None)
    at = f" at {words.clock(seen.ts_ns)} UTC" if seen is not None else ""
    error = " for the error" if any(view.failed for view in first.missing) else ""
    if is_down(end):
        return f"Look at {where}{at}{error}. {DOWN}"
    return f"Look at {where}{at}{error}; only a restart of the engine gives the blocks back."


@of(Expired)
def _expired(finding: Finding, facts: Expired) -> Words:
    return Words(
        title=f"{_expired_title(facts)}{likewise(facts.sends - 1, 'send')}",
        culprit=_who_did_not_fetch(facts),
        advice="Let the router tell the prefill engine when it gives a request up. Nothing is held any more.",
        other_log=OTHER_LOG,
        inferred="why: the request was rejected there, lost its client, or failed before asking"
        if _nobody_asked(facts)
        else "",
        impact=(_expired_impact(facts),),
    )


def _nobody_asked(facts: Expired) -> bool:
    return facts.failed is None and not facts.asked and not facts.hidden


def _held_for(facts: Expired) -> tuple[str, str] | None:
    """Return how many blocks a send held, and for how long; None if its beginning is lost."""
    if facts.ready is None:
        return None
    held_ns = facts.event.mono_ns - facts.ready.mono_ns
    return words.plural(count(facts.ready.blocks), "block"), words.span(held_ns)


def _expired_title(facts: Expired) -> str:
    send = f"send {facts.event.transfer} of request {facts.event.request}"
    held = _held_for(facts)
    if held is None:
        return f"{send} was freed only because it expired"
    blocks, held_for = held
    fetched = "nobody fetched them" if _nobody_asked(facts) else "they were not fetched in time"
    return f"{send} held {blocks} for {held_for} until it expired; {fetched}"


def _expired_impact(facts: Expired) -> str:
    if facts.sends > 1:
        return f"the blocks of {facts.sends:,} sends were held until they expired, and are free again"
    held = _held_for(facts)
    if held is None:
        return f"the blocks of send {facts.event.transfer} were held until it expired, and are free again"
    return f"{held[0]} could not be used for {held[1]}, and {'is' if held[0] == '1 block' else 'are'} free again"


def _who_did_not_fetch(facts: Expired) -> str:
    if facts.failed is not None:
        failed = facts.failed
        why = words.failure(failed.code, failed.raw, failed.exception, failed.stage)
        return f"the pushes of rank {failed.rank} failed: {why}"
    if facts.asked:
        return "some decode workers asked and others did not: check that all ranks of the decode engine were up"
    if facts.hidden:
        return "the decode engine, or the router before it, if nobody asked for this transfer"
    return "the decode engine, or the router before it: nobody asked for this transfer"


@of_doubt(QuestionLost)
def _question_lost(doubt: QuestionLost) -> str:
    return f"{ev.lost_at(doubt.gap)}, and that somebody asked for this transfer may be among them"
