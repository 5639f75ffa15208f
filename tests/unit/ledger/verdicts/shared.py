"""Logs, and ways to look at what is found in them, that tests of several verdicts use."""

import msgspec

from ledger.replay.fold import Result
from ledger.verdicts.base import Finding
from tests.incidents.script import Script


def only(result: Result) -> Finding:
    assert [finding.kind for finding in result.findings] == [result.findings[0].kind]
    return result.findings[0]


def kinds(result: Result) -> list[str]:
    return [f"{finding.kind} {finding.certainty}" for finding in result.findings]


def waiting_job(*, seconds: float, steps: int = 1000, ranks: int = 2) -> Script:
    log = Script(ranks=ranks)
    log.runs("R")
    log.saves(0, "R", blocks=(5, 12))
    log.reports(0, 0)
    log.put_begins(0, 1, keys="abcdefgh")
    log.passes(seconds, steps=steps)
    log.arrives("Q")
    return log


def loses_events_of_the_scheduler(log: Script) -> None:
    """Events are lost, and then the book comes again."""
    log.gap(origin="scheduler", dropped=50_000, reason="the queue was full")
    log.checkpoint(digest=log.state.digest(), book=msgspec.Raw(log.state.encode()))


def comes_again_while_its_load_is_open(*, steps: int = 10) -> Script:
    """A client gives up while its request loads, and asks again with the same id; the load goes on."""
    log = Script()
    log.arrives("R")
    log.loads(0, "R", blocks=(5, 12))
    log.get_begins(0, keys="abcdefgh")
    log.passes(1, steps=1)
    log.request_aborted(request="R", generation=1, was="loading")
    log.passes(60, steps=steps)
    log.arrives("R")
    return log
