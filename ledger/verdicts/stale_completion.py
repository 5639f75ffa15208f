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
from typing import ClassVar, Literal, TypeAlias

import msgspec

from ledger import events as ev
from ledger.errors import Refused
from ledger.rules import Breach
from ledger.state.invariants import JOB_ALREADY_SETTLED, RANK_REPORTED_TWICE, UNEXPECTED_RANK
from ledger.verdicts.base import Facts, Finding, Kind, Miscounted, Role
from ledger.verdicts.history import End, History
from ledger.verdicts.shared.rules import RuleBroken, RuleVerdict
from ledger.verdicts.shared.stale import RULES, Owed, Reading, any_owed, older_jobs, owed_by, whose
from ledger.verdicts.shared.waits import with_events

KEPT_CHAIN = 12

KEPT_CANDIDATES = 1000
"""Reports that may turn out to be stale. Each goes away as soon as the older job gets its own."""


JobRank: TypeAlias = tuple[int, int]
"""A job, and a rank of it."""

ShownBy: TypeAlias = Literal["twice", "again", "not_owed", "before_its_call"]
"""What shows that a report was not that of its own job: the rank reported the job twice, or again when it was over, or
without being asked; or the job was counted as done on the rank before its own call began or ended there."""

HOW: dict[str, ShownBy] = {
    RANK_REPORTED_TWICE.name: "twice",
    JOB_ALREADY_SETTLED.name: "again",
    UNEXPECTED_RANK.name: "not_owed",
}
"""What it shows that a rule was broken, by the rule's name."""

STALE_COMPLETION = Kind(Breach.STALE_COMPLETION.value, Role.CAUSE | Role.MISCOUNTS)


class CountedForOther(Facts, frozen=True, kw_only=True):
    """The report of a job was counted for a younger one of the same request.

    Attributes:
        request, generation: those of the older job.
        report_of: the older job, whose report it was.
        counted_for: the younger job.
        shown_by: what shows it.
        call: for `before_its_call`, the event of the younger job's call that came after its report.
    """

    request: str
    generation: int
    report_of: int
    counted_for: int
    rank: int
    shown_by: ShownBy
    call: ev.TransferStarted | ev.TransferFinished | None


class UnknownJob(RuleBroken, frozen=True, kw_only=True):
    """A report names a job or load that the log does not know."""


class _Suspect(msgspec.Struct):
    """A report that may be that of an older job.

    Attributes:
        report: the report that is judged: the first that the book refused, if it refused one.
        older: the older jobs of which it may be.
        how: what shows it.
        call: the call of the younger job that came after its report, if that shows it.
        shown_by: the events that show it, the earliest first.
        around: what happened to the younger job and to the request before.
        is_refused: whether the book refused that report.
    """

    report: ev.RankCompleted
    older: tuple[int, ...]
    how: ShownBy
    call: ev.TransferStarted | ev.TransferFinished | None
    shown_by: list[ev.Event]
    around: list[ev.Event]
    is_refused: bool


class StaleCompletion(RuleVerdict):
    """Reports that belong to another job."""

    kinds: ClassVar[tuple[Kind, ...]] = (STALE_COMPLETION,)
    facts: ClassVar[type[RuleBroken]] = UnknownJob

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._candidates: dict[JobRank, tuple[ev.RankCompleted, Owed]] = {}
        self._suspects: dict[JobRank, _Suspect] = {}

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
        jobs = older_jobs(self.history, event)
        owed = next((each for job in jobs if (each := owed_by(self.history, job, event)) is not None), None)
        if owed is not None and not _has_ended(self.history, event):
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
        older = older_jobs(self.history, event)
        known = self._suspects.get(work)
        if known is not None and any_owed(self.history, known.older, rank):
            self._show(work, event)
            if not known.is_refused and older:
                known.report, known.older, known.is_refused = event, older, True
        elif older:
            accepted = [
                each
                for each in self.history.jobs.get(job, [])
                if isinstance(each, ev.RankCompleted) and each.rank == rank
            ]
            first = [self._candidates.pop(work)[0]] if work in self._candidates else accepted[:1]
            self._suspect(work, older, [*first, event], event, HOW[refusal.rule])

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each report that was given to the wrong job, and for jobs that nobody knows."""
        yield from super().findings(end)
        for work, suspect in self._suspects.items():
            reading = whose(self.history, end, suspect.report, suspect.older)
            if reading.owed is not None:
                yield self._finding(work, suspect, reading.owed, reading)

    def _forget(self) -> None:
        """Forget the reports that were not those of older jobs: each of these has got its own."""
        for work, suspect in list(self._suspects.items()):
            if not any_owed(self.history, suspect.older, work[1]):
                del self._suspects[work]

    def _show(self, work: JobRank, event: ev.Event) -> None:
        """Add what came later of a job and rank to what shows a report of it."""
        known = self._suspects.get(work)
        if known is not None and len(known.shown_by) < KEPT_CHAIN:
            known.shown_by.append(event)

    def _compare(self, event: ev.TransferStarted | ev.TransferFinished) -> None:
        candidate = self._candidates.get((event.job, event.rank))
        if candidate is None:
            return
        completed, owed = candidate
        if not any_owed(self.history, (owed.job,), event.rank):
            del self._candidates[event.job, event.rank]
        elif event.ts_ns > completed.ts_ns and event.step > completed.step:
            del self._candidates[event.job, event.rank]
            work = event.job, event.rank
            self._suspect(work, (owed.job,), [completed, event], completed, "before_its_call", event)
        elif isinstance(event, ev.TransferFinished):
            del self._candidates[event.job, event.rank]

    def _suspect(
        self,
        work: JobRank,
        older: tuple[int, ...],
        shown_by: list[ev.Event],
        report: ev.RankCompleted,
        how: ShownBy,
        call: ev.TransferStarted | ev.TransferFinished | None = None,
    ) -> None:
        """Note that a report of `work` may be that of an older job, with what is known of both jobs now."""
        self._forget()
        if work in self._suspects or len(self._suspects) >= KEPT_CANDIDATES:
            return
        younger = self.history.jobs.get(work[0], [])
        registered = self.history.jobs[older[0]][:1]
        began = registered[0].seq if registered else 0
        owner = self.state.book.jobs[older[0]].request
        preempted = [
            each
            for each in self.history.requests.get(owner, [])
            if isinstance(each, ev.RequestPreempted) and each.seq > began
        ]
        settled = [each for each in younger if isinstance(each, ev.JobSettled)]
        around = [*preempted, *younger[:1], *settled]
        self._suspects[work] = _Suspect(report, older, how, call, shown_by, around, is_refused=call is None)

    def _finding(self, work: JobRank, suspect: _Suspect, owed: Owed, reading: Reading) -> Finding:
        job, rank = work
        preempted = [
            each for each in suspect.around if isinstance(each, ev.RequestPreempted) and each.seq > owed.registered.seq
        ]
        around = [each for each in suspect.around if not isinstance(each, ev.RequestPreempted)]
        events = [owed.registered, *preempted[:1], owed.ended, *around, *suspect.shown_by]
        since = suspect.shown_by[0]
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
            doubt=reading.doubt,
            facts=CountedForOther(
                request=owed.request,
                generation=owed.generation,
                report_of=owed.job,
                counted_for=job,
                rank=rank,
                shown_by=suspect.how,
                call=suspect.call,
            ),
        )


def _has_ended(history: History, event: ev.RankCompleted) -> bool:
    chain = history.jobs.get(event.job, [])
    return any(isinstance(each, ev.TransferFinished) and each.rank == event.rank for each in chain)
