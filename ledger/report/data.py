"""What a replay says, for a program: the shape that `kvledger replay --json` promises.

Pure: from results to plain data; this file prints nothing.
"""

from collections.abc import Sequence
from typing import Any

from ledger import events as ev
from ledger import words
from ledger.queries.blast_radius import BlastRadius
from ledger.replay.case import Case
from ledger.replay.fold import Result
from ledger.replay.incidents import Incident
from ledger.replay.stats import Calls, Durations
from ledger.report import incidents as report_incidents
from ledger.report import logs as report_logs
from ledger.report.impact import impact
from ledger.report.wording import public, say
from ledger.verdicts.base import Finding, as_data


def data(case: Case) -> dict[str, Any]:
    """Return the report in the shape that `kvledger replay --json` promises. What is beyond it is in `story`."""
    results = [log.result for log in case.logs]
    firsts = [result.first.ts_ns for result in results if result.first is not None]
    lasts = [result.last.ts_ns for result in results if result.last is not None]
    return {
        "log": {
            "files": [words.file(log.path) for log in case.logs],
            "engine": ", ".join(dict.fromkeys(result.opened.engine for result in results if result.opened is not None)),
            "events": sum(result.events for result in results),
            "first": words.timestamp(min(firsts)) if firsts else None,
            "last": words.timestamp(max(lasts)) if lasts else None,
            "clean_end": all(_clean(result) for result in results),
            "gaps": [
                {
                    "file": words.file(log.path),
                    "seq": gap.seq,
                    "origin": gap.origin,
                    "dropped": gap.dropped,
                    "reason": gap.reason,
                    "first": words.timestamp(gap.first_ts_ns),
                    "last": words.timestamp(gap.last_ts_ns),
                }
                for log in case.logs
                for gap in log.result.history.gaps
            ],
        },
        "state": {
            "digest": " ".join(result.state.digest() for result in results),
            "open_jobs": sum(len(result.state.book.jobs) for result in results),
            "pinned_blocks": sum(result.state.pinned_blocks() for result in results),
            "waiting_loads": sum(len(result.state.book.loads) + len(result.state.book.recvs) for result in results),
        },
        "findings": [public(finding) for _, finding in case.findings],
        "story": {
            "incidents": [_incident_data(incident, case) for incident in case.incidents],
            "facts": [
                {"finding": number, **facts}
                for number, (_, finding) in enumerate(case.findings)
                if (facts := _facts_data(finding))
            ],
            "transfers": {
                transfer: [
                    {"log": step.log, "seq": step.event.seq, "by_clock": step.by_clock, "what": ev.line(step.event)}
                    for step in steps
                ]
                for transfer, steps in case.transfers.items()
            },
            "logs": [_log_data(index, case) for index in range(len(case.logs))],
        },
    }


def _facts_data(finding: Finding) -> dict[str, Any]:
    """Return what a finding holds beside its public shape, as data; a place stands for each event."""
    facts: dict[str, Any] = as_data(finding.facts)
    known = {
        "transfers": finding.transfers,
        "tainted": finding.tainted,
        "keys": [key for key, _ in finding.missing_keys],
        "missed_ts_ns": [ts_ns for _, ts_ns in finding.missing_keys],
        "unpinned": finding.unpinned_jobs,
        "miscounted": finding.miscounted,
    }
    return {**facts, **{name: as_data(value) for name, value in known.items() if value}}


def _incident_data(incident: Incident, case: Case) -> dict[str, Any]:
    """Return an incident as data; its findings are places in the list of findings."""
    _, head = case.findings[incident.head]
    said = say(head)
    return {
        "findings": list(incident.members),
        "cause": incident.head,
        "before": list(incident.before),
        "after": list(incident.after),
        "kind": head.kind,
        "certainty": head.certainty,
        "title": said.title,
        "since_seq": head.since_seq,
        "culprit": said.culprit,
        "proven": said.shown,
        "not_proven": said.not_proven,
        "impact": impact(incident, case),
        "do_next": report_incidents.do_next(incident, case),
    }


def radius_data(radius: BlastRadius, names: Sequence[str]) -> dict[str, Any]:
    """Return a blast radius as data."""
    return {
        "job": radius.job,
        "file": names[radius.log],
        "judged": radius.judged,
        "complete": radius.complete,
        "keys": radius.keys,
        "reached": [
            {
                "file": names[spread.log],
                "request": spread.request,
                "generation": spread.generation,
                "seq": spread.seq,
                "how": spread.how,
                "key": spread.key,
                "round": spread.round,
            }
            for spread in radius.reached
        ],
        "derived": [
            {"key": key, "file": names[log], "request": request} for key, (log, request) in radius.derived.items()
        ],
    }


def _log_data(index: int, case: Case) -> dict[str, Any]:
    """Return a log as data; its findings are places in the list of findings."""
    log = case.logs[index]
    result, stats = log.result, log.result.stats
    opened = result.opened
    return {
        "file": words.file(log.path),
        "sealed": log.sealed,
        "broken_seal": log.broken_seal or None,
        "minimized_from": log.meta.get("minimized_from"),
        "findings": [place for place, (of_log, _) in enumerate(case.findings) if of_log == index],
        "engine": opened.engine if opened else None,
        "boot": opened.boot if opened else None,
        "versions": opened.versions if opened else {},
        "end": result.end.how if result.end else "empty",
        "events": result.events,
        "kinds": stats.kinds,
        "checkpoints": result.checkpoints,
        "mismatch": None
        if result.mismatch is None
        else {
            "seq": result.mismatch.seq,
            "agreed_until_seq": result.mismatch.agreed_until_seq,
            "expected": result.mismatch.expected,
            "actual": result.mismatch.actual,
        },
        "refused": [
            {"seq": refusal.event.seq, "rule": refusal.rule, "detail": refusal.detail}
            for refusal in result.refusals[:20]
        ],
        "requests": {
            "queued": stats.requests,
            "finished": stats.finished,
            "aborted": stats.aborted,
            "preemptions": stats.preemptions,
            "end_reasons": stats.end_reasons,
        },
        "jobs": {
            "registered": stats.jobs,
            "settled": stats.jobs_settled,
            "failed": stats.jobs_failed,
            "skipped": stats.jobs_skipped,
            "most_pinned_blocks": stats.most_pinned_blocks,
            "held": _durations_data(stats.job_held),
        },
        "loads": {
            "planned": stats.loads,
            "settled": stats.loads_settled,
            "failed": stats.loads_failed,
            "tokens_loaded": stats.tokens_loaded,
            "waited": _durations_data(stats.load_waited),
        },
        "calls": {op: _calls_data(calls) for op, calls in stats.calls.items()},
        "failures": [{"code": code, "rank": rank, "number": number} for (code, rank), number in stats.failures.items()],
        "open": list(report_logs.open_items(result, report_logs.taken_blocks(case, index))),
        "time_line": [ev.line(event) for event in log.events_of_interest],
    }


def _calls_data(calls: Calls) -> dict[str, Any]:
    return {
        "calls": calls.calls,
        "keys": calls.keys,
        "bytes": calls.bytes,
        "failed_calls": calls.failed_calls,
        "failed_keys": calls.failed_keys,
        "took": _durations_data(calls.durations),
        "slowest": [
            {
                "duration_ns": slow.duration_ns,
                "seq": slow.seq,
                "transfer": slow.what,
                "request": slow.request,
                "job": slow.job,
                "load": slow.load,
                "rank": slow.rank,
                "bytes": slow.bytes,
                "outcome": slow.outcome,
            }
            for slow in calls.slowest
        ],
    }


def _durations_data(durations: Durations) -> dict[str, int]:
    return {
        "number": durations.number,
        "p50_ns": durations.percentile_ns(50),
        "p99_ns": durations.percentile_ns(99),
        "longest_ns": durations.longest_ns,
    }


def _clean(result: Result) -> bool:
    return result.end is not None and result.end.closed is not None and result.end.closed.reason != "exception"
