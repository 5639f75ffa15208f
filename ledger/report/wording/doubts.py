"""The words of doubts that several kinds share."""

from ledger import events as ev
from ledger import words
from ledger.report.wording.words import of_doubt
from ledger.verdicts.shared.doubts import (
    AnswersLost,
    CodeDisagrees,
    GivesUpByItself,
    LogGoesOn,
    LogIsLive,
    LogIsTorn,
    SchedulerLost,
    WorkersLost,
)


@of_doubt(LogIsTorn)
def _log_is_torn(doubt: LogIsTorn) -> str:
    return "the log ends torn, and does not show what the engine did next; only the logs of the workers would tell"


@of_doubt(LogIsLive)
def _log_is_live(doubt: LogIsLive) -> str:
    return "the log is still being written; replay it again later"


@of_doubt(LogGoesOn)
def _log_goes_on(doubt: LogGoesOn) -> str:
    return "the log goes on after this moment; replay it without --until"


@of_doubt(GivesUpByItself)
def _gives_up_by_itself(doubt: GivesUpByItself) -> str:
    return (
        f"the engine gives {doubt.what} {doubt.transfer} up by itself after {words.span(doubt.deadline_ns)}, and the "
        "log ends before that"
    )


@of_doubt(CodeDisagrees)
def _code_disagrees(doubt: CodeDisagrees) -> str:
    return f"this file and today's code disagree at event {doubt.seq}; `kvledger replay --check` shows where"


@of_doubt(AnswersLost)
def _answers_lost(doubt: AnswersLost) -> str:
    return f"{ev.lost_at(doubt.gap)}, and answers may be among them"


@of_doubt(SchedulerLost)
def _scheduler_lost(doubt: SchedulerLost) -> str:
    return ev.lost_at(doubt.gap)


@of_doubt(WorkersLost)
def _workers_lost(doubt: WorkersLost) -> str:
    return (
        f"{ev.lost_at(doubt.gap)}, so it is not known what {words.ranks(doubt.ranks)} did; the log of that worker "
        "would decide"
    )
