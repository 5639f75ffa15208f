"""The words of `stall`."""

from ledger import words
from ledger.report.wording.clauses import DOWN, likewise
from ledger.report.wording.open_work import ended, name, open_since, seen_of_ranks, waiting_to_run, whose
from ledger.report.wording.words import Words, of, of_doubt
from ledger.verdicts.base import Finding
from ledger.verdicts.shared.doubts import BLIND
from ledger.verdicts.shared.ends import is_down, is_hard
from ledger.verdicts.shared.waits import Waiting
from ledger.verdicts.stall import KEPT_FATES, NoAnswer, NothingRuns, Pinned, SchedulerUnseen

OTHER_LOG = (
    "Replay the prefill engine's log together with this one: it shows whether it was asked, and whether it sent."
)


@of(NoAnswer)
def _no_answer(finding: Finding, facts: NoAnswer) -> Words:
    first = facts.first
    return Words(
        title=f"{_title(finding, facts)}{likewise(facts.waits - 1, first.what)}",
        culprit=_culprit(finding, facts),
        advice=_advice(finding, first),
        other_log=OTHER_LOG if first.what == "recv" else "",
        impact=(*_fates(facts), *waiting_to_run(finding, facts.longest_wait_ns)),
        shown=open_since(finding, first) if finding.doubt is not None else "",
    )


def _title(finding: Finding, facts: NoAnswer) -> str:
    first = facts.first
    title = _open_for(finding, first)
    if not first.begun:
        return f"{title}, and this log does not show that it was given to the workers"
    if not first.missing:
        return f"{title}, although all have answered"
    if facts.late is not None:
        late = facts.late
        return f"{title}; the answer from rank {late.rank} came late, at event {late.seq}, and was ignored"
    return f"{title}; no answer from {words.ranks(finding.ranks)} is in this log"


def _open_for(finding: Finding, first: Waiting) -> str:
    open_for = f"has been open for {words.span(first.open_ns)}"
    if first.what == "job":
        doubtful = finding.doubt is not None and not isinstance(finding.doubt, BLIND)
        return f"{whose(first)} {'may hang: it ' if doubtful else ''}{open_for}"
    if first.ended is not None:
        return f"{whose(first)} {open_for}; the request {ended(first.ended)}"
    return f"{words.request(first.request, first.generation)} waits for remote KV: {name(first)} {open_for}"


def _culprit(finding: Finding, facts: NoAnswer) -> str:
    first = facts.first
    if not first.begun:
        parts = ["the scheduler planned the load and did not give it to the workers"]
    elif not first.missing:
        parts = ["the scheduler, which did not end the wait"]
    else:
        parts = [seen_of_ranks(finding, first, first.missing)]
    if facts.behind and first.doing("in_call"):
        parts.append(f"jobs that wait behind the same call: {words.listed(facts.behind)}")
    if facts.pinned is not None:
        parts.append(_pinned(facts.pinned))
    return "; ".join(parts)


def _pinned(pinned: Pinned) -> str:
    pool = f" of {pinned.pool:,}" if pinned.pool else ""
    return f"{words.plural(pinned.jobs, 'open job pins', 'open jobs pin')} {pinned.blocks:,}{pool} blocks"


def _advice(finding: Finding, first: Waiting) -> str:
    ranks = words.ranks(finding.ranks) if finding.ranks else ""
    if not first.begun:
        return f"Look at the engine's log at event {first.since_seq}: the load was planned in a step that did not run."
    if first.what == "recv":
        return "Check the bootstrap server, and the network between the two engines."
    if not first.doing("in_call"):
        return f"Look at the worker log of {ranks} at that time: its answer did not reach the scheduler."
    stack = f"a stack of the worker of {ranks} (py-spy dump)"
    store = (
        "check the store's master and the hosts of its segments: a call that hangs often waits for a peer that is gone."
    )
    if is_down(finding.end):
        return f"{DOWN} If it happens again, take {stack} while the call hangs. Now {store}"
    if is_hard(finding.end):
        return f"If the engine still runs, take {stack}. Then {store}"
    return f"Take {stack}. Then {store} The blocks come back only with the answer, or with a restart."


def _fates(facts: NoAnswer) -> tuple[str, ...]:
    """Return what became of the requests that waited for a load or recv."""
    told = [
        f"request {fate.request} {ended(fate.ended)} without its KV"
        if fate.ended is not None
        else f"request {fate.request} hangs: it has waited for {words.span(fate.open_ns)}"
        for fate in facts.fates
    ]
    more = facts.waits - KEPT_FATES
    if facts.first.what != "job" and more > 0:
        told.append(f"{words.plural(more, 'more request')} likewise")
    return tuple(told)


@of(NothingRuns)
def _nothing_runs(finding: Finding, facts: NothingRuns) -> Words:
    number, still = len(finding.requests), words.span(facts.still_ns)
    stack = "a stack of the engine process (py-spy dump)"
    when = f"If it happens again, take {stack} while it hangs" if is_down(finding.end) else f"Take {stack}"
    return Words(
        title=(
            f"{words.plural(number, 'request waits', 'requests wait')}, nothing runs, and no job, load, transfer or "
            f"pin is open: the scheduler itself has not moved for {still}"
        ),
        culprit=(
            "the engine's scheduler, or a lookup that nobody answers; the connector holds nothing else that it could "
            "wait for"
        ),
        advice=f"{when}: is it paused, asleep, or out of blocks?",
        impact=(f"{words.plural(number, 'request hangs', 'requests hang')}, for {still} by then",),
    )


@of_doubt(SchedulerUnseen)
def _scheduler_unseen(doubt: SchedulerUnseen) -> str:
    return "a log of the connector does not show what else the scheduler waits for; a stack of the engine would"
