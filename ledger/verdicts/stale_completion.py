"""`stale_completion`: a rank's report was counted for another job than the one that the rank had finished.

It happens when reports are kept by request: a request is preempted with a job open, comes back and saves again, and the
late report of the old job is taken for the new one. Proven in two ways, and silent otherwise:

*   the rank reports the younger job twice, and an older job of the same request, whose call has ended, gets no report;
*   the younger job was counted as done on that rank before its own call began or ended there.
"""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from ledger import events as ev
from ledger import words
from ledger.errors import Refused
from ledger.trail import End, Trail
from ledger.verdicts import Finding
from ledger.verdicts._rules import RuleVerdict
from ledger.verdicts._stale import Owed, owed_by_an_older_job
from ledger.verdicts._waits import with_events

KEPT_CHAIN = 12

KEPT_CANDIDATES = 1000
"""Reports that may turn out to be stale. Each goes away as soon as the older job gets its own."""


class StaleCompletion(RuleVerdict):
    """Reports that belong to another job."""

    kinds: ClassVar[tuple[str, ...]] = ("stale_completion",)
    advice: ClassVar[str] = (
        "The report names a job that this log does not know. See whether a worker outlived a restart of the engine, "
        "and whether all ranks run the same connector."
    )

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._candidates: dict[tuple[int, int], tuple[ev.RankCompleted, Owed]] = {}
        self._proven: dict[tuple[int, int], Finding] = {}

    def on_rank_completed(self, event: ev.RankCompleted) -> None:
        """Note a report that may be that of an older job; forget it when the older job gets its own."""
        if len(self.state.book.jobs) < 2:
            return
        for key in [
            key for key, (_, owed) in self._candidates.items() if owed.job == event.job and key[1] == event.rank
        ]:
            del self._candidates[key]
        if event.outcome != "stored" or len(self._candidates) >= KEPT_CANDIDATES:
            return
        owed = owed_by_an_older_job(self.trail, event)
        if owed is not None and not _has_ended(self.trail, event):
            self._candidates[event.job, event.rank] = (event, owed)

    def on_transfer_started(self, event: ev.TransferStarted) -> None:
        """A call that begins after its job was counted as done proves the mistake."""
        if self._candidates:
            self._compare(event)

    def on_transfer_finished(self, event: ev.TransferFinished) -> None:
        """And so does one that ends after it; one that ended before clears the report."""
        if self._proven:
            self._show((event.job, event.rank), event)
        if self._candidates:
            self._compare(event)

    def refused(self, event: ev.Event, refusal: Refused) -> None:
        """Take a second report that an older job is owed."""
        super().refused(event, refusal)
        if isinstance(event, ev.RankCompleted):
            if self._show((event.job, event.rank), event):  # the job's own report, for which no answer is open any more
                return
            owed = owed_by_an_older_job(self.trail, event)
            if owed is not None:
                first = self._candidates.pop((event.job, event.rank), (None, owed))[0]
                self._prove(
                    event.job, event.rank, owed, first, event, f"rank {event.rank} reported job {event.job} twice"
                )

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each report that was given to the wrong job, and for jobs that nobody knows."""
        yield from super().findings(end)
        yield from self._proven.values()

    def _show(self, work: tuple[int, int], event: ev.Event) -> bool:
        """Add what came later of a job and rank to the finding about them; return whether there is one."""
        known = self._proven.get(work)
        if known is not None:
            self._proven[work] = msgspec.structs.replace(known, chain=with_events(known.chain, [event])[:KEPT_CHAIN])
        return known is not None

    def _compare(self, event: ev.TransferStarted | ev.TransferFinished) -> None:
        candidate = self._candidates.get((event.job, event.rank))
        if candidate is None:
            return
        completed, owed = candidate
        if event.ts_ns > completed.ts_ns and event.step > completed.step:
            del self._candidates[event.job, event.rank]
            verb = "began" if isinstance(event, ev.TransferStarted) else "ended"
            self._prove(
                event.job,
                event.rank,
                owed,
                completed,
                event,
                f"job {event.job} was counted as done on rank {event.rank} before its own {event.op} {verb}",
            )
        elif isinstance(event, ev.TransferFinished):
            del self._candidates[event.job, event.rank]

    def _prove(
        self, job: int, rank: int, owed: Owed, first: ev.RankCompleted | None, shown_by: ev.Event, how: str
    ) -> None:
        life = self.trail.requests.get(owed.request, [])
        preempted = [each for each in life if isinstance(each, ev.RequestPreempted) and each.seq > owed.registered.seq]
        younger = self.trail.jobs.get(job, [])[:1]
        settled = [each for each in self.trail.jobs.get(job, []) if isinstance(each, ev.JobSettled)]
        events = [owed.registered, *preempted[:1], *younger, owed.ended, first, *settled, shown_by]
        shown = {event.seq: event for event in events if event is not None}
        since = first if first is not None else shown_by
        request = words.request(owed.request, owed.generation)
        self._proven.setdefault(
            (job, rank),
            Finding(
                kind="stale_completion",
                certainty="proven",
                title=f"the report of store job {owed.job} of {request} was counted for job {job}: {how}",
                since_seq=since.seq,
                requests=(owed.request,),
                jobs=(owed.job, job),
                ranks=(rank,),
                culprit=(
                    f"concluded: reports are not kept by job: that of job {owed.job} came late and was given to job "
                    f"{job}"
                ),
                advice="Use a connector that keeps reports by job id, not by request: vLLM 0.32 does (store_job_id).",
                facts={"miscounted": {"rank": rank, "report_of": owed.job, "counted_for": job, "seq": since.seq}},
                lead_seq=since.seq,
                chain=tuple(shown[seq] for seq in sorted(shown)),
            ),
        )


def _has_ended(trail: Trail, event: ev.RankCompleted) -> bool:
    chain = trail.jobs.get(event.job, [])
    return any(isinstance(each, ev.TransferFinished) and each.rank == event.rank for each in chain)
