"""The words of `stale_completion`."""

from ledger import events as ev
from ledger import words
from ledger.report.wording.rules import broken
from ledger.report.wording.words import Words, of
from ledger.verdicts.base import Finding
from ledger.verdicts.stale_completion import CountedForOther, UnknownJob


@of(CountedForOther)
def _counted_for_other(finding: Finding, facts: CountedForOther) -> Words:
    request = words.request(facts.request, facts.generation)
    return Words(
        title=(
            f"the report of store job {facts.report_of} of {request} was counted for job {facts.counted_for}: "
            f"{_how(facts)}"
        ),
        culprit=(
            f"concluded: the connector does not keep reports by job; that of job {facts.report_of} came late and was "
            f"counted for job {facts.counted_for}"
        ),
        advice="Use a connector that keeps reports by job id, not by request: vLLM 0.32 does (store_job_id).",
    )


def _how(facts: CountedForOther) -> str:
    """Return what shows that the report was not that of the younger job."""
    reported = f"rank {facts.rank} reported job {facts.counted_for}"
    if facts.shown_by == "twice":
        return f"{reported} twice"
    if facts.shown_by == "again":
        return f"{reported} again when it was over"
    if facts.shown_by == "not_owed" or facts.call is None:
        return f"{reported}, which does not wait for that rank"
    verb = "began" if isinstance(facts.call, ev.TransferStarted) else "ended"
    return (
        f"job {facts.counted_for} was counted as done on rank {facts.rank} before its own {facts.call.op} {verb} there"
    )


@of(UnknownJob)
def _unknown_job(finding: Finding, facts: UnknownJob) -> Words:
    return broken(
        facts,
        facts.detail,
        advice=(
            "The report names a job that this log does not know. Check that no worker outlived a restart of the "
            "engine, and that all ranks run the same connector."
        ),
    )
