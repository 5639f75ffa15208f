"""Whose report it was: that of an older job of the same request, given to a younger one, or one too many.

That is known only at the end of the log: evidence comes in late, and so does the older job's own report.
"""

from collections.abc import Iterable

import msgspec

from ledger import events as ev
from ledger.state.invariants import JOB_ALREADY_SETTLED, RANK_REPORTED_TWICE, UNEXPECTED_RANK
from ledger.verdicts.base import Certainty, Doubt
from ledger.verdicts.history import End, History
from ledger.verdicts.shared.waits import REPORT_NS, REPORT_STEPS

RULES = tuple(rule.name for rule in (RANK_REPORTED_TWICE, JOB_ALREADY_SETTLED, UNEXPECTED_RANK))
"""Rules that a report of an older job breaks when it is given to a younger one."""


class Owed(msgspec.Struct, frozen=True):
    """An older job that a rank has finished, and whose report did not come.

    Attributes:
        ended: the rank's last call for that job.
    """

    job: int
    request: str
    generation: int
    registered: ev.Event
    ended: ev.TransferFinished


class NotRecorded(Doubt, frozen=True, kw_only=True):
    """What workers did is not recorded: the rank may have finished an older job, whose report this was then."""

    rank: int
    job: int


class OwnReportLost(Doubt, frozen=True, kw_only=True):
    """Events of the scheduler are lost, and the own report of the older job may be among them."""

    gap: ev.Gap
    job: int


class EvidenceLost(Doubt, frozen=True, kw_only=True):
    """Events of the worker are lost, so it is not known when the rank finished the older job."""

    gap: ev.Gap
    rank: int
    job: int


class OwnReportMayCome(Doubt, frozen=True, kw_only=True):
    """The log ends before the own report of the older job would have come; then this one was another's."""

    job: int


class EvidenceMayCome(Doubt, frozen=True, kw_only=True):
    """The log ends before all is known of what the rank did; it may have finished the older job."""

    rank: int
    job: int


class Reading(msgspec.Struct, frozen=True):
    """Whose report it was.

    Attributes:
        owed: the older job whose report it was; None if it was one too many.
        certainty: how certain that is.
        doubt: why it is not proven; None if it is.
    """

    owed: Owed | None = None
    certainty: Certainty = "proven"
    doubt: Doubt | None = None


def older_jobs(history: History, event: ev.RankCompleted) -> tuple[int, ...]:
    """Return the open jobs of the request that are older than the reported one and wait for this rank, oldest first."""
    older = [number for number in history.jobs_of.get(_request_of(history, event), ()) if number < event.job]
    return tuple(number for number in older if is_owed(history, number, event.rank))


def is_owed(history: History, job: int, rank: int) -> bool:
    """Return whether a job waits for the report of a rank, as far as the book says."""
    opened = history.state.book.jobs.get(job)
    return opened is not None and rank in opened.waiting


def any_owed(history: History, jobs: Iterable[int], rank: int) -> bool:
    """Return whether one of some jobs waits for the report of a rank, as far as the book says."""
    return any(is_owed(history, job, rank) for job in jobs)


def owed_by(history: History, job: int, report: ev.RankCompleted) -> Owed | None:
    """Return a job that waits for a rank which had finished it before a report; None if it had not, or did not show it.

    The steps say what was before: clocks of two hosts do not.
    """
    chain = history.jobs.get(job, [])
    calls = [each for each in chain if isinstance(each, ev.TransferStarted) and each.rank == report.rank]
    ends = [each for each in chain if isinstance(each, ev.TransferFinished) and each.rank == report.rank]
    if not ends or len(ends) < len(calls) or any(each.step > report.step for each in ends):
        return None
    opened = history.state.book.jobs[job]
    return Owed(job, opened.request, opened.generation, chain[0], ends[-1])


def whose(history: History, end: End, report: ev.RankCompleted, older: tuple[int, ...]) -> Reading:
    """Return whose report it was.

    Args:
        history: as it is at the end of the log.
        end: that end.
        report: a report that its own job did not owe.
        older: the older jobs that waited for a report of that rank when it came.
    """
    waiting = [number for number in older if is_owed(history, number, report.rank)]
    if not waiting:  # each has got its own, so this was none of theirs
        return Reading()
    owed = next((each for number in waiting if (each := owed_by(history, number, report)) is not None), None)
    job = owed.job if owed is not None else waiting[0]
    lost = _lost(history, job, report)
    if lost is not None:
        return Reading(owed, "undecidable", lost)
    if end.step - report.step >= REPORT_STEPS and end.now_mono_ns - report.mono_ns >= REPORT_NS:
        return Reading(owed)
    more = OwnReportMayCome(job=job) if owed is not None else EvidenceMayCome(rank=report.rank, job=job)
    return Reading(owed, "suspected", more)


def _lost(history: History, job: int, report: ev.RankCompleted) -> Doubt | None:
    """Return why the log does not show whether a report was that of an older job that waits; None if it does."""
    rank = report.rank
    if not history.evidence_is_on():
        return NotRecorded(rank=rank, job=job)
    since_seq = history.state.book.jobs[job].since_seq
    for gap in history.gaps:
        of_scheduler = gap.origin == ev.SCHEDULER and not history.restored_after(gap.seq)
        if gap.seq <= since_seq or not (of_scheduler or gap.origin in (f"rank {rank}", "workers")):
            continue
        return OwnReportLost(gap=gap, job=job) if of_scheduler else EvidenceLost(gap=gap, rank=rank, job=job)
    return None


def _request_of(history: History, event: ev.RankCompleted) -> str:
    job = history.state.book.jobs.get(event.job)
    return job.request if job is not None else history.request_of_ended_job(event.job)
