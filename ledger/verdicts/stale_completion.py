"""`stale_completion`: a rank's report was counted for another job than the one that the rank had finished.

It happens when reports are kept by request: a request is preempted with a job open, comes back and saves again, and the
late report of the old job is taken for the new one. It shows in two ways:

*   the rank reports the younger job twice, and an older job of the same request, whose call has ended, gets no report;
*   the younger job was counted as done on that rank before its own call began or ended there.

It is proven once the older job's own report would have come. If that one comes, it was another report that was too
many: an `over_report`, or an `early_free`.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeAlias

import msgspec

from ledger import events as ev
from ledger import words
from ledger.errors import Refused
from ledger.trail import End, Trail
from ledger.verdicts import Finding
from ledger.verdicts._rules import RuleVerdict
from ledger.verdicts._stale import Owed, owed_by_an_older_job
from ledger.verdicts._waits import REPORT_NS, REPORT_STEPS, with_events

KEPT_CHAIN = 12

KEPT_CANDIDATES = 1000
"""Reports that may turn out to be stale. Each goes away as soon as the older job gets its own."""


Work: TypeAlias = tuple[int, int]
"""A job, and a rank of it."""


class StaleCompletion(RuleVerdict):
    """Reports that belong to another job."""

    kinds: ClassVar[tuple[str, ...]] = ("stale_completion",)
    advice: ClassVar[str] = (
        "The report names a job that this log does not know. See whether a worker outlived a restart of the engine, "
        "and whether all ranks run the same connector."
    )

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._candidates: dict[Work, tuple[ev.RankCompleted, Owed]] = {}
        self._found: dict[Work, tuple[Finding, ev.RankCompleted]] = {}
        self._owed: dict[Work, list[Work]] = {}

    def on_rank_completed(self, event: ev.RankCompleted) -> None:
        """Note a report that may be that of an older job; forget it when the older job gets its own."""
        if self._owed:
            for work in self._owed.pop((event.job, event.rank), ()):
                self._found.pop(work, None)
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
        """A call that begins after its job was counted as done shows the mistake."""
        if self._candidates:
            self._compare(event)

    def on_transfer_finished(self, event: ev.TransferFinished) -> None:
        """And so does one that ends after it; one that ended before clears the report."""
        if self._found:
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
                how = f"rank {event.rank} reported job {event.job} twice"
                self._find((event.job, event.rank), owed, [first, event], event, how)

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each report that was given to the wrong job, and for jobs that nobody knows."""
        yield from super().findings(end)
        for finding, report in self._found.values():
            yield finding if _had_its_chance(report, end) else _suspected(finding)

    def _show(self, work: Work, event: ev.Event) -> bool:
        """Add what came later of a job and rank to the finding about them; return whether there is one."""
        known = self._found.get(work)
        if known is not None:
            finding, report = known
            shown = with_events(finding.chain, [event])[:KEPT_CHAIN]
            self._found[work] = (msgspec.structs.replace(finding, chain=shown), report)
        return known is not None

    def _compare(self, event: ev.TransferStarted | ev.TransferFinished) -> None:
        candidate = self._candidates.get((event.job, event.rank))
        if candidate is None:
            return
        completed, owed = candidate
        if event.ts_ns > completed.ts_ns and event.step > completed.step:
            del self._candidates[event.job, event.rank]
            verb = "began" if isinstance(event, ev.TransferStarted) else "ended"
            how = f"job {event.job} was counted as done on rank {event.rank} before its own {event.op} {verb}"
            self._find((event.job, event.rank), owed, [completed, event], completed, how)
        elif isinstance(event, ev.TransferFinished):
            del self._candidates[event.job, event.rank]

    def _find(
        self, work: Work, owed: Owed, shown_by: Sequence[ev.Event | None], report: ev.RankCompleted, how: str
    ) -> None:
        """Note that a report of `work` was that of an older job.

        Args:
            shown_by: the events that show it, the earliest first.
            report: the last report among them.
            how: what they show.
        """
        job, rank = work
        if work in self._found:
            return
        life = self.trail.requests.get(owed.request, [])
        preempted = [each for each in life if isinstance(each, ev.RequestPreempted) and each.seq > owed.registered.seq]
        younger = self.trail.jobs.get(job, [])[:1]
        settled = [each for each in self.trail.jobs.get(job, []) if isinstance(each, ev.JobSettled)]
        events = [owed.registered, *preempted[:1], *younger, owed.ended, *settled, *shown_by]
        since = next(event for event in shown_by if event is not None)
        request = words.request(owed.request, owed.generation)
        finding = Finding(
            kind="stale_completion",
            certainty="proven",
            title=f"the report of store job {owed.job} of {request} was counted for job {job}: {how}",
            since_seq=since.seq,
            requests=(owed.request,),
            jobs=(owed.job, job),
            ranks=(rank,),
            culprit=(
                f"concluded: reports are not kept by job: that of job {owed.job} came late and was given to job {job}"
            ),
            advice="Use a connector that keeps reports by job id, not by request: vLLM 0.32 does (store_job_id).",
            facts={"miscounted": {"rank": rank, "report_of": owed.job, "counted_for": job, "seq": since.seq}},
            lead_seq=since.seq,
            chain=with_events((), (event for event in events if event is not None)),
        )
        self._found[work] = (finding, report)
        self._owed.setdefault((owed.job, rank), []).append(work)


def _had_its_chance(report: ev.RankCompleted, end: End) -> bool:
    """Return whether the older job's own report would have come when the log ends, if this was not it."""
    return end.step - report.step >= REPORT_STEPS and end.now_mono_ns - report.mono_ns >= REPORT_NS


def _suspected(finding: Finding) -> Finding:
    owed = finding.jobs[0]
    return msgspec.structs.replace(
        finding,
        certainty="suspected",
        doubt=f"the log ends before the own report of job {owed} would have come; if it came, this one was another's",
        facts={},
    )


def _has_ended(trail: Trail, event: ev.RankCompleted) -> bool:
    chain = trail.jobs.get(event.job, [])
    return any(isinstance(each, ev.TransferFinished) and each.rank == event.rank for each in chain)
