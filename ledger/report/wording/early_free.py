"""The words of `early_free`, but for those of broken rules."""

from ledger import events as ev
from ledger import words
from ledger.report.wording.clauses import likewise
from ledger.report.wording.words import Words, of, of_doubt
from ledger.verdicts.base import Finding
from ledger.verdicts.early_free import EndLost, Released

ADVICE = (
    "Do not trust the output of any request that got the blocks since (`kvledger blame FILE G:B` names them), and "
    "reset the prefix cache. The fault is in the connector that freed them: report it with this file."
)


@of(Released)
def _released(finding: Finding, facts: Released) -> Words:
    noun = "store job" if facts.sort == "job" else facts.sort
    what, event = f"{noun} {facts.id}", facts.event
    blocks, ranks = words.plural(facts.blocks, "block"), words.ranks(facts.waiting)
    if isinstance(event, ev.BlocksAllocated):
        to = "another life of request" if event.request == facts.request else "request"
        title = (
            f"{blocks} of {what} of request {facts.request} were given to {to} {event.request} while {ranks} may still "
            "write into them"
        )
        culprit = f"the scheduler freed the blocks of {what} before every rank had settled"
    elif isinstance(event, ev.TransferStarted | ev.TransferFinished):
        verb = "began" if isinstance(event, ev.TransferStarted) else "ended"
        call = words.call_of_its_rank(event.op, event.transfer, event.rank)
        title = f"rank {event.rank}'s {call} {verb} after {what} of request {facts.request} was over"
        culprit = f"the scheduler counted {what} as done on rank {event.rank} before it was"
    else:
        went = "may have gone on" if finding.doubt is not None else "went on"
        title = f"request {facts.request} {went} while {ranks} may still write into its {blocks} ({what})"
        culprit = f"the scheduler counted {what} as finished before every rank had answered"
    return Words(
        title=f"{title}{likewise(facts.number - 1, noun)}",
        culprit=culprit,
        advice=ADVICE,
        impact=(_impact(facts),),
    )


def _impact(facts: Released) -> str:
    """Return whose KV may be wrong: of who runs on the blocks, or of whoever gets them."""
    if isinstance(facts.event, ev.TransferStarted | ev.TransferFinished):
        return "the answer of whoever got these blocks, or loads what was stored from them, may be wrong"
    if facts.number == 1 or len(facts.reached) == 1:
        return f"the answer of request {facts.reached[0]} may be wrong"
    least = "" if facts.all_reached else "at least "
    return f"the answers of {least}{len(facts.reached)} requests ({words.listed(facts.reached)}) may be wrong"


@of_doubt(EndLost)
def _end_lost(doubt: EndLost) -> str:
    lost = ev.lost_at(doubt.gap)
    if doubt.again:
        return f"{lost}, and the request may have ended there and come again, on other blocks"
    return f"{lost}, and it may have ended there"
