"""What stall, leak and missing ranks say of open work: what it is called, and what was last seen of its ranks."""

from collections.abc import Sequence

from ledger import events as ev
from ledger import words
from ledger.verdicts.base import Finding
from ledger.verdicts.shared.ends import goes_on
from ledger.verdicts.shared.waits import RankView, RequestEnded, Waiting

OUTCOMES = {"ok": "ended well", "partial": "failed for some keys", "failed": "failed"}
"""How a call ended, as a verb."""


def name(work: Waiting) -> str:
    """Return what open work is called: `store job 17`, `load 3`, `recv xfer-1`."""
    return f"store {_short(work)}" if work.what == "job" else _short(work)


def whose(work: Waiting) -> str:
    """Return what open work is called, and whose it is: `store job 17 of request R`."""
    return f"{name(work)} of {words.request(work.request, work.generation)}"


def seen_of_ranks(finding: Finding, work: Waiting, views: Sequence[RankView]) -> str:
    """Return what ranks that have not answered were last seen doing."""
    return "; ".join(_seen_of(finding, view, _short(work)) for view in views)


def open_since(finding: Finding, work: Waiting) -> str:
    """Return from when to when work is shown to be open."""
    until = f", and still was at event {finding.end.last.seq}" if finding.end is not None else ""
    return f"{name(work)} is open since event {work.since_seq}{until}"


def ended(end: RequestEnded) -> str:
    """Return how a request ended while its work was open: `was aborted after 1.00 s`."""
    verb = "was aborted" if isinstance(end.event, ev.RequestAborted) else "ended"
    return f"{verb} after {words.span(end.after_ns)}" if end.after_ns is not None else verb


def waiting_to_run(finding: Finding, longest_ns: int) -> tuple[str, ...]:
    """Return who waits to run at the end, and for how long: the impact of a finding about held blocks."""
    if not finding.suffering:
        return ()
    if len(finding.suffering) == 1:
        return (f"request {finding.suffering[0]} had waited to run for {words.span(longest_ns)}",)
    return (f"{len(finding.suffering):,} requests had waited to run, the longest for {words.span(longest_ns)}",)


def _short(work: Waiting) -> str:
    return f"{work.what} {work.transfer}" if work.what in ("send", "recv") else f"{work.what} {work.number}"


def _seen_of(finding: Finding, view: RankView, owed: str) -> str:
    """Return what a rank was last seen doing that owes an answer for `owed`."""
    last = view.last
    if isinstance(last, ev.TransferStarted):
        to = f" with {last.peer}" if last.peer else ""
        call = words.call_of_its_rank(last.op, last.transfer, last.rank)
        return f"rank {view.rank} began {call}{to} at event {last.seq}, {_no_return(finding)}"
    if isinstance(last, ev.TransferFinished):
        how = f"raised {last.exception}" if last.exception else OUTCOMES.get(last.outcome, f"ended {last.outcome}")
        call = words.call(last.op, last.transfer, view.rank)
        return f"{call} {how} at event {last.seq}, and no report of {owed} follows in this log"
    if view.doing == "unknown":
        return f"what rank {view.rank} did is not recorded"
    return f"this log has nothing from rank {view.rank} about {owed}"


def _no_return(finding: Finding) -> str:
    """Return that a call has no return, and up to where: a log never shows that there was none behind its end."""
    if finding.end is None:
        return "and this log shows no return"
    place = finding.end.last.seq
    if goes_on(finding.end):
        return f"and the log shows no return up to event {place}"
    return f"and the log ends at event {place} without a return"
