"""One failure, from the call that failed to the fields of its events."""

import pickle

import msgspec
import pytest

from connector.runtime.failures import NO_FAILURE, Failure
from ledger import events as ev
from ledger.codes import KVCacheErrorCode, Stage

BLOCKS = ((0, ((5, 6),)),)


def test_a_code_of_the_store_and_an_exception_become_a_failure_with_the_stage_of_the_call():
    assert Failure.of(-704, Stage.STORE_GET) == Failure("BLOCK_NOT_FOUND", "-704", "STORE_GET")
    raised = Failure.of(ConnectionResetError(104, "reset"), Stage.RECV)
    assert (raised.code, raised.exception, raised.stage) == ("PEER_UNREACHABLE", "ConnectionResetError", "RECV")


@pytest.mark.parametrize(("failure", "failed"), [(NO_FAILURE, False), (Failure.of(-704, Stage.STORE_GET), True)])
def test_only_no_failure_is_none(failure: Failure, failed: bool):
    assert bool(failure) is failed


def test_the_fields_of_events_are_plain_text_so_that_a_log_holds_nothing_else():
    failure = Failure(KVCacheErrorCode.CRC_MISMATCH, "1 is not 2", Stage.VERIFY)
    assert {type(value) for value in failure.fields().values()} == {str}
    assert failure.fields().keys() - failure.cause_fields().keys() == {"stage"}


@pytest.mark.parametrize("kind", [ev.RankLoaded, ev.LoadFailed, ev.PeerSettled, ev.RecvFailed, ev.RankSent])
def test_an_event_with_a_stage_takes_all_fields_of_a_failure(kind: type[ev.Event]):
    assert Failure.of(-704, Stage.STORE_GET).fields().keys() <= {each.name for each in msgspec.structs.fields(kind)}


@pytest.mark.parametrize("kind", [ev.RankCompleted, ev.TransferFinished])
def test_an_event_without_a_stage_takes_the_cause(kind: type[ev.Event]):
    names = {each.name for each in msgspec.structs.fields(kind)}
    assert NO_FAILURE.cause_fields().keys() <= names
    assert "stage" not in names


def test_a_report_with_a_failure_reaches_the_engine_process_as_it_left_the_worker():
    failure = Failure.of(TimeoutError(), Stage.STORE_GET).of_blocks(BLOCKS, 3)
    assert pickle.loads(pickle.dumps(failure)) == failure  # noqa: S301 - vLLM pickles what its workers return


def test_other_blocks_leave_the_cause_as_it_is():
    failure = Failure.of(-900, Stage.STORE_GET)
    assert failure.of_blocks(BLOCKS, 2).cause == failure.cause
    assert failure.of_blocks(BLOCKS, 2).block_failures() == ev.BlockFailures(
        "PEER_UNREACHABLE", "-900", "STORE_GET", BLOCKS, 2
    )
