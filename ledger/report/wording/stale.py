"""Why it is not known whose report it was that a job did not owe."""

from ledger import events as ev
from ledger.report.wording.words import of_doubt
from ledger.verdicts.shared.stale import EvidenceLost, EvidenceMayCome, NotRecorded, OwnReportLost, OwnReportMayCome


@of_doubt(NotRecorded)
def _not_recorded(doubt: NotRecorded) -> str:
    return (
        f"what rank {doubt.rank} did is not recorded; if it had finished job {doubt.job}, this was the report for that "
        "job"
    )


@of_doubt(OwnReportLost)
def _own_report_lost(doubt: OwnReportLost) -> str:
    return f"{ev.lost_at(doubt.gap)}, and job {doubt.job}'s own report may be among them"


@of_doubt(EvidenceLost)
def _evidence_lost(doubt: EvidenceLost) -> str:
    return (
        f"{ev.lost_at(doubt.gap)}, so when rank {doubt.rank} finished job {doubt.job} is not known; the log of that "
        "worker would decide"
    )


@of_doubt(OwnReportMayCome)
def _own_report_may_come(doubt: OwnReportMayCome) -> str:
    return f"the log ends before job {doubt.job}'s own report would have come; if it came, this one was for another job"


@of_doubt(EvidenceMayCome)
def _evidence_may_come(doubt: EvidenceMayCome) -> str:
    return (
        f"the log ends before all is known of what rank {doubt.rank} did; if it had finished job {doubt.job}, this was "
        "the report for that job"
    )
