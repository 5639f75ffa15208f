"""Whose report it was: that of an older job of the same request, given to a younger one, or one too many.

That is known only at the end of the log: evidence comes in late, and so does the older job's own report.
"""

from collections.abc import Iterable

import msgspec

from ledger import events as ev
from ledger.verdicts.base import Certainty
from ledger.verdicts.history import End, History
from ledger.verdicts.shared.waits import REPORT_NS, REPORT_STEPS

RULES = ("rank_reported_twice", "job_already_settled", "unexpected_rank")
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


class Reading(msgspec.Struct, frozen=True):
    """Whose report it was.

    Attributes:
        owed: the older job whose report it was; None if it was one too many.
        certainty: how certain that is.
        doubt: why it is not proven; empty if it is.
    """

    owed: Owed | None = None
    certainty: Certainty = "proven"
    doubt: str = ""


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
    if lost:
        return Reading(owed, "undecidable", lost)
    if end.step - report.step >= REPORT_STEPS and end.now_mono_ns - report.mono_ns >= REPORT_NS:
        return Reading(owed)
    if owed is not None:
        why = f"the own report of job {job} would have come; if it came, this one was another's"
    else:
        why = f"all is known of what rank {report.rank} did; if it had finished job {job}, this was the report of that"
    return Reading(owed, "suspected", f"the log ends before {why}")


def _lost(history: History, job: int, report: ev.RankCompleted) -> str:
    """Return why the log does not show whether a report was that of an older job that waits; empty if it does."""
    rank = report.rank
    if not history.evidence_is_on():
        return f"what rank {rank} did is not recorded; if it had finished job {job}, this was the report of that"
    since_seq = history.state.book.jobs[job].since_seq
    for gap in history.gaps:
        of_scheduler = gap.origin == ev.SCHEDULER and not history.restored_after(gap.seq)
        if gap.seq <= since_seq or not (of_scheduler or gap.origin in (f"rank {rank}", "workers")):
            continue
        lost = ev.lost_at(gap)
        if of_scheduler:
            return f"{lost}, and the own report of job {job} may be among them"
        return f"{lost}, so when rank {rank} finished job {job} is not known; the log of that worker would decide"
    return ""


def _request_of(history: History, event: ev.RankCompleted) -> str:
    job = history.state.book.jobs.get(event.job)
    return job.request if job is not None else history.request_of_ended_job(event.job)
