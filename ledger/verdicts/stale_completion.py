"""`stale_completion`: a rank's report was counted for another job than the one that the rank had finished.

It happens when reports are kept by request: a request is preempted with a job open, comes back and saves again, and the
late report of the old job is taken for the new one. It shows in two ways:

*   the rank reports a younger job that does not owe it a report, and an older job of the same request, whose call had
    ended, gets no report;
*   the younger job was counted as done on that rank before its own call began or ended there.

It is proven once the older job's own report would have come, and if no lost event can hide that or a further call. If
that report comes, it was another report that was too many: an `over_report`, or an `early_free`.
"""

from collections.abc import Iterable
from typing import ClassVar, TypeAlias

import msgspec

from ledger import events as ev
from ledger import words
from ledger.errors import Refused
from ledger.verdicts.base import Finding, Kind, Miscounted, Role, Told
from ledger.verdicts.history import End, Trail
from ledger.verdicts.shared.rules import RuleVerdict
from ledger.verdicts.shared.stale import RULES, Owed, Reading, any_owed, older_jobs, owed_by, whose
from ledger.verdicts.shared.waits import with_events

KEPT_CHAIN = 12

KEPT_CANDIDATES = 1000
"""Reports that may turn out to be stale. Each goes away as soon as the older job gets its own."""


Work: TypeAlias = tuple[int, int]
"""A job, and a rank of it."""

STALE_COMPLETION = Kind("stale_completion", Role.CAUSE | Role.MISCOUNTS)


class _Suspect(msgspec.Struct):
    """A report that may be that of an older job.

    Attributes:
        report: the report that is judged: the first that the book refused, if it refused one.
        older: the older jobs of which it may be.
        how: what shows it, in words.
        shown_by: the events that show it, the earliest first.
        around: what happened to the younger job and to the request before.
        is_refused: whether the book refused that report.
    """

    report: ev.RankCompleted
    older: tuple[int, ...]
    how: str
    shown_by: list[ev.Event]
    around: list[ev.Event]
    is_refused: bool


class StaleCompletion(RuleVerdict):
    """Reports that belong to another job."""

    kinds: ClassVar[tuple[Kind, ...]] = (STALE_COMPLETION,)
    advice: ClassVar[str] = (
        "The report names a job that this log does not know. See whether a worker outlived a restart of the engine, "
        "and whether all ranks run the same connector."
    )

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._candidates: dict[Work, tuple[ev.RankCompleted, Owed]] = {}
        self._suspects: dict[Work, _Suspect] = {}

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
        jobs = older_jobs(self.trail, event)
        owed = next((each for job in jobs if (each := owed_by(self.trail, job, event)) is not None), None)
        if owed is not None and not _has_ended(self.trail, event):
            self._candidates[event.job, event.rank] = (event, owed)

    def on_transfer_started(self, event: ev.TransferStarted) -> None:
        """A call that begins after its job was counted as done shows the mistake."""
        if self._candidates:
            self._compare(event)

    def on_transfer_finished(self, event: ev.TransferFinished) -> None:
        """And so does one that ends after it; one that ended before clears the report."""
        if self._suspects:
            self._show((event.job, event.rank), event)
        if self._candidates:
            self._compare(event)

    def refused(self, event: ev.Event, refusal: Refused) -> None:
        """Take a report that its job does not owe and that may be the one that an older job is owed."""
        super().refused(event, refusal)
        if not isinstance(event, ev.RankCompleted) or refusal.rule not in RULES:
            return
        job, rank = work = event.job, event.rank
        older = older_jobs(self.trail, event)
        known = self._suspects.get(work)
        if known is not None and any_owed(self.trail, known.older, rank):
            self._show(work, event)
            if not known.is_refused and older:
                known.report, known.older, known.is_refused = event, older, True
        elif older:
            accepted = [
                each
                for each in self.trail.jobs.get(job, [])
                if isinstance(each, ev.RankCompleted) and each.rank == rank
            ]
            first = [self._candidates.pop(work)[0]] if work in self._candidates else accepted[:1]
            how = {
                "rank_reported_twice": f"rank {rank} reported job {job} twice",
                "job_already_settled": f"rank {rank} reported job {job} again when it was over",
                "unexpected_rank": f"rank {rank} reported job {job}, which expects nothing of it",
            }[refusal.rule]
            self._suspect(work, older, [*first, event], event, how, is_refused=True)

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each report that was given to the wrong job, and for jobs that nobody knows."""
        yield from super().findings(end)
        for work, suspect in self._suspects.items():
            reading = whose(self.trail, end, suspect.report, suspect.older)
            if reading.owed is not None:
                yield self._finding(work, suspect, reading.owed, reading)

    def _forget(self) -> None:
        """Forget the reports that were not those of older jobs: each of these has got its own."""
        for work, suspect in list(self._suspects.items()):
            if not any_owed(self.trail, suspect.older, work[1]):
                del self._suspects[work]

    def _show(self, work: Work, event: ev.Event) -> None:
        """Add what came later of a job and rank to what shows a report of it."""
        known = self._suspects.get(work)
        if known is not None and len(known.shown_by) < KEPT_CHAIN:
            known.shown_by.append(event)

    def _compare(self, event: ev.TransferStarted | ev.TransferFinished) -> None:
        candidate = self._candidates.get((event.job, event.rank))
        if candidate is None:
            return
        completed, owed = candidate
        if not any_owed(self.trail, (owed.job,), event.rank):
            del self._candidates[event.job, event.rank]
        elif event.ts_ns > completed.ts_ns and event.step > completed.step:
            del self._candidates[event.job, event.rank]
            verb = "began" if isinstance(event, ev.TransferStarted) else "ended"
            how = f"job {event.job} was counted as done on rank {event.rank} before its own {event.op} {verb}"
            work = event.job, event.rank
            self._suspect(work, (owed.job,), [completed, event], completed, how, is_refused=False)
        elif isinstance(event, ev.TransferFinished):
            del self._candidates[event.job, event.rank]

    def _suspect(
        self,
        work: Work,
        older: tuple[int, ...],
        shown_by: list[ev.Event],
        report: ev.RankCompleted,
        how: str,
        *,
        is_refused: bool,
    ) -> None:
        """Note that a report of `work` may be that of an older job, with what is known of both jobs now."""
        self._forget()
        if work in self._suspects or len(self._suspects) >= KEPT_CANDIDATES:
            return
        younger = self.trail.jobs.get(work[0], [])
        registered = self.trail.jobs[older[0]][:1]
        began = registered[0].seq if registered else 0
        owner = self.state.book.jobs[older[0]].request
        preempted = [
            each
            for each in self.trail.requests.get(owner, [])
            if isinstance(each, ev.RequestPreempted) and each.seq > began
        ]
        settled = [each for each in younger if isinstance(each, ev.JobSettled)]
        around = [*preempted, *younger[:1], *settled]
        self._suspects[work] = _Suspect(report, older, how, shown_by, around, is_refused)

    def _finding(self, work: Work, suspect: _Suspect, owed: Owed, reading: Reading) -> Finding:
        job, rank = work
        preempted = [
            each for each in suspect.around if isinstance(each, ev.RequestPreempted) and each.seq > owed.registered.seq
        ]
        around = [each for each in suspect.around if not isinstance(each, ev.RequestPreempted)]
        events = [owed.registered, *preempted[:1], owed.ended, *around, *suspect.shown_by]
        since = suspect.shown_by[0]
        request = words.request(owed.request, owed.generation)
        proven = reading.certainty == "proven"
        return Finding(
            of=STALE_COMPLETION,
            certainty=reading.certainty,
            since_seq=since.seq,
            requests=(owed.request,),
            jobs=(owed.job, job),
            ranks=(rank,),
            lead_seq=since.seq,
            chain=with_events((), events)[:KEPT_CHAIN],
            miscounted=Miscounted(rank, owed.job, job, since.seq) if proven else None,
            facts=Told(
                title=f"the report of store job {owed.job} of {request} was counted for job {job}: {suspect.how}",
                culprit=(
                    f"concluded: reports are not kept by job: that of job {owed.job} came late and was given to job {job}"
                ),
                advice="Use a connector that keeps reports by job id, not by request: vLLM 0.32 does (store_job_id).",
                doubt=reading.doubt,
            ),
        )


def _has_ended(trail: Trail, event: ev.RankCompleted) -> bool:
    chain = trail.jobs.get(event.job, [])
    return any(isinstance(each, ev.TransferFinished) and each.rank == event.rank for each in chain)
