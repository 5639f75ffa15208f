"""The words of `missing_ranks`."""

from ledger import words
from ledger.report.wording.open_work import seen_of_ranks
from ledger.report.wording.words import Words, of, of_doubt
from ledger.verdicts.base import Finding
from ledger.verdicts.missing_ranks import AnsweredOther, CountedWithout, NeverAnswered, OneLoadOnly


@of(NeverAnswered)
def _never_answered(finding: Finding, facts: NeverAnswered) -> Words:
    ranks = words.ranks(finding.ranks)
    jobs, loads = len(finding.jobs), len(finding.loads)
    counts = (words.plural(jobs, "store job") if jobs else "", words.plural(loads, "load") if loads else "")
    answered = f"{words.ranks(facts.answered)} answered" if facts.answered else "no rank answered anything"
    return Words(
        title=f"no answer from {ranks} is in this log: {' and '.join(filter(None, counts))} wait for the same ranks",
        culprit=f"systematic: {answered}; {seen_of_ranks(finding, facts.first, facts.first.missing[:1])}",
        advice=(
            "Compare the ranks that the scheduler expects with those that run, and check that every worker runs the "
            "same connector and sends its reports: this is no accident of one transfer."
        ),
        inferred="" if finding.doubt is not None else "why: the ranks may not run, not report, or not exist",
    )


@of(CountedWithout)
def _counted_without(finding: Finding, facts: CountedWithout) -> Words:
    ranks = words.ranks(finding.ranks)
    more = f" and {words.plural(facts.times - 1, 'more load')}" if facts.times > 1 else ""
    often = "once" if facts.times == 1 else f"{facts.times:,} times"
    seen = f"{ranks} answered other work" if facts.answered_other else f"no answer from {ranks} is in this log"
    return Words(
        title=f"load {facts.load}{more} counted as finished although {ranks} had not answered",
        culprit=f"{'systematic' if finding.certainty == 'proven' else often}: {seen}",
        advice="Its blocks may be written after they were given away; look at the worker logs of these ranks.",
    )


@of_doubt(AnsweredOther)
def _answered_other(doubt: AnsweredOther) -> str:
    return f"{words.ranks(doubt.ranks)} answered other work, so the answer may only have been late"


@of_doubt(OneLoadOnly)
def _one_load_only(doubt: OneLoadOnly) -> str:
    return "it is one load only, so the answer may only have been late"
