"""The words of `unreported_failure`."""

from ledger import events as ev
from ledger import words
from ledger.codes import KVCacheErrorCode
from ledger.report.wording.clauses import likewise
from ledger.report.wording.rules import broken
from ledger.report.wording.words import Words, of, of_doubt
from ledger.verdicts.base import Finding
from ledger.verdicts.unreported_failure import (
    AnsweredWell,
    LaterGetLost,
    NotReported,
    SettledAsIfWell,
    code_of,
)

NOT_REACHED = (KVCacheErrorCode.PEER_UNREACHABLE, KVCacheErrorCode.PEER_NOT_READY)


@of(SettledAsIfWell)
def _settled_as_if_well(finding: Finding, facts: SettledAsIfWell) -> Words:
    return broken(
        facts,
        facts.detail,
        advice=(
            "Do not trust the output of the request: it went on with KV that did not arrive. Look at the worker log of "
            "that rank at that time for the error."
        ),
    )


@of(AnsweredWell)
def _answered_well(finding: Finding, facts: AnsweredWell) -> Words:
    doubtful = isinstance(finding.doubt, LaterGetLost)
    at = words.clock(facts.call.ts_ns)
    why = _why(facts.call)
    whose, they = f"the answer of request {facts.request} is", "it"
    if len(finding.requests) > 1:
        whose, they = "the answers of these requests are", "they"
    return Words(
        title=(
            f"rank {facts.rank} answered that load {facts.load} of request {facts.request} went well, although its "
            f"last get{' in this log' if doubtful else ''} ended {facts.call.outcome}{f': {why}' if why else ''}"
            f"{likewise(facts.times - 1, 'load')}"
        ),
        culprit=f"the worker of rank {facts.rank}, which said that all was loaded (event {facts.answer.seq})",
        advice=(
            f"Check in the worker log of rank {facts.rank} from {at} UTC on whether it tried again and got all. If "
            "not, do not trust the output of the request, and reset the prefix cache."
            if doubtful
            else "Do not trust the output of the request, and reset the prefix cache. Look for the error in the worker "
            f"log of rank {facts.rank} at {at} UTC."
        ),
        impact=(
            f"if KV did not arrive, {whose} unreliable"
            if doubtful
            else f"{whose} unreliable: {they} went on with KV that did not arrive",
        ),
    )


@of(NotReported)
def _not_reported(finding: Finding, facts: NotReported) -> Words:
    failure = facts.failure
    code, why = code_of(failure), _why(failure)
    peer = failure.peer if isinstance(failure, ev.PeerSettled) else ""
    who = f"rank {failure.rank}{f' and {peer}' if peer else ''}"
    work = f"load {facts.number}" if facts.what == "load" else f"recv {facts.transfer}"
    failed = f"{work} of {words.request(facts.request, facts.generation)} failed on {who}"
    in_time = " in time" if facts.until is not None else ""
    report = "no report of it reached the scheduler in this log"
    if facts.until is not None:
        report = f"no report of it reached the scheduler until the request {_ended(finding, facts.until)}"
    return Words(
        title=f"{failed}{f': {why}' if why else ''}; {report}",
        brief=f"{failed}{f': {code}' if code else ''}, and no report of it reached the scheduler{in_time}",
        culprit=(
            f"the worker of rank {failure.rank}: its failure (event {failure.seq}) did not reach the scheduler{in_time}"
        ),
        advice=(
            f"{_check_peer(facts, code)}Look for the error in the worker log of rank {failure.rank} at "
            f"{words.clock(failure.ts_ns)} UTC.{' End the request: it gets no answer.' if facts.is_open else ''}"
        ),
    )


def _check_peer(facts: NotReported, code: str) -> str:
    """Return what to check first where the prefill engine was not reached; empty where it was."""
    asked = facts.asked
    if asked is None or code not in NOT_REACHED:
        return ""
    where = f" ({asked.bootstrap})" if asked.bootstrap else ""
    return (
        f"Check that prefill engine {asked.prefill or '(unknown)'}{where} is up, and that rank {facts.failure.rank} of "
        "this engine can reach it. "
    )


def _ended(finding: Finding, ended: ev.RequestFinished | ev.RequestAborted) -> str:
    """Return how a request ended, and how long after the work had begun with which the evidence does."""
    verb = "was aborted" if isinstance(ended, ev.RequestAborted) else "ended"
    return f"{verb} after {words.span(ended.mono_ns - finding.chain[0].mono_ns)}"


def _why(event: ev.TransferFinished | ev.PeerSettled) -> str:
    """Return why something failed, by its first key if keys failed one by one."""
    if isinstance(event, ev.PeerSettled):
        return words.failure(event.code, event.raw, event.exception, event.stage)
    first = event.failures[0] if event.failures else event
    return words.failure(first.code, first.raw, event.exception)


@of_doubt(LaterGetLost)
def _later_get_lost(doubt: LaterGetLost) -> str:
    return (
        f"{ev.lost_at(doubt.gap)}, and a later get that went well may be among them; the log of that worker would "
        "decide"
    )
