"""A scripted log in which every stored query of `kvledger browse` finds something."""

from pathlib import Path

from tests.incidents.script import Script

NASTY = "<script>alert('R')</script>&\"'"
"""A request id that a client chose to cause trouble."""

HANGING_JOB = 2
FAILED_LOAD = 1
PUT_JOB = 0


def eventful() -> Script:
    """A log that ends torn, with a hanging put, a failed load, a preemption, a gap, a late result, an open recv."""
    log = Script("prefill-7", ranks=2, versions={"kvledger": "0.1.0", "vllm": "0.32.0"})
    log.runs("cmpl-1")
    log.stores(PUT_JOB, "cmpl-1", blocks=(5, 15), keys="abcdefghijk")
    log.recalls(0, "cmpl-1", blocks=(20, 24), keys="abcde")
    log.runs("cmpl-2")
    log.loads(FAILED_LOAD, "cmpl-2", blocks=(30, 34))
    call = log.get_begins(FAILED_LOAD, 0, keys="abcde")
    log.passes(0.4)
    log.ends(call, "partial", code="BLOCK_NOT_FOUND", raw="-704")
    log.answers(FAILED_LOAD, 0, "failed", code="BLOCK_NOT_FOUND", raw="-704", stage="STORE_GET")
    log.gets(FAILED_LOAD, 1, keys="abcde")
    log.answers(FAILED_LOAD, 1)
    log.saves(1, "cmpl-2", blocks=(40, 44))
    log.preempts("cmpl-2")
    log.puts(1, 0, keys="klmno")
    log.reports(1, 0)
    log.puts(1, 1, keys="klmno")
    log.reports(1, 1, "failed", code="TRANSFER_FAILED", raw="-800", exception="TransferError")
    log.resumes("cmpl-2")
    log.gap(origin="rank 1", dropped=12, reason="the queue to the engine was full", first_ts_ns=1, last_ts_ns=2)
    log.report_ignored(what="load", why="the load had settled", rank=1, load=FAILED_LOAD)
    log.runs(NASTY)
    log.saves(HANGING_JOB, NASTY, blocks=(50, 57))
    log.puts(HANGING_JOB, 0, keys="pqrstuvw")
    log.reports(HANGING_JOB, 0)
    log.put_begins(HANGING_JOB, 1, keys="pqrstuvw")
    log.recv_registered(
        transfer="xfer-9", request="cmpl-3", generation=1, blocks=((0, ((60, 63),)),), ranks=((0, 0),), prefill="p"
    )
    log.peers_named(transfer="xfer-9", request="cmpl-3", rank=0, peers=("tp0 pp0", "tp1 pp0"))
    log.passes(40, steps=400)
    log.stall_suspected(waited_ns=40_000_000_000, job=HANGING_JOB, missing=((1, 1),))
    return log


def eventful_log(folder: Path) -> Path:
    """Write that log into a folder."""
    return eventful().save(folder / "eventful.db")
