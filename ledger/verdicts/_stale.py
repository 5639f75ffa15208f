"""Whose report it was: the older job of the same request that is owed a report which was given to a younger one."""

import msgspec

from ledger import events as ev
from ledger.trail import Trail


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


def owed_by_an_older_job(trail: Trail, event: ev.RankCompleted) -> Owed | None:
    """Return the oldest open job of the request that waits for this rank although the rank's call for it has ended."""
    jobs = trail.state.book.jobs
    for number in trail.jobs_of.get(_request_of(trail, event), ()):
        if number >= event.job:
            break
        job = jobs[number]
        if event.rank not in job.waiting:
            continue
        chain = trail.jobs[number]
        calls = [each for each in chain if isinstance(each, ev.TransferStarted) and each.rank == event.rank]
        ends = [each for each in chain if isinstance(each, ev.TransferFinished) and each.rank == event.rank]
        if chain and ends and len(ends) >= len(calls):
            return Owed(number, job.request, job.generation, chain[0], ends[-1])
    return None


def _request_of(trail: Trail, event: ev.RankCompleted) -> str:
    job = trail.state.book.jobs.get(event.job)
    return job.request if job is not None else trail.request_of_ended_job(event.job)
