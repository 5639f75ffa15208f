"""Which file a process's failures go to, and what a second connector logs."""

import logging

import pytest

from connector.runtime import failure_log
from connector.runtime.failure_log import FailureLog, open_failure_log
from connector.runtime.failures import Failure
from ledger.codes import KVCacheErrorCode, Stage
from tests.support.log_files import logged

A_FAILURE = Failure(KVCacheErrorCode.UNKNOWN, "", Stage.STORE_PUT)


@pytest.fixture
def no_failure_log(monkeypatch: pytest.MonkeyPatch):
    """The failure log as in a new process, and as it was afterwards."""
    monkeypatch.setattr(failure_log, "_opened", None)
    logger = logging.getLogger("kvledger.failures")
    before, propagate = list(logger.handlers), logger.propagate
    logger.handlers.clear()
    logger.propagate = True
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.propagate = before, propagate


@pytest.mark.usefixtures("no_failure_log")
@pytest.mark.parametrize("paths", [["", "a"], ["a", ""], ["a", "a"]])
def test_a_failure_log_that_one_of_two_connectors_names_is_written(tmp_path, paths):
    with logged() as said:
        for path in paths:
            open_failure_log(str(tmp_path / path) if path else "")
    FailureLog("e").report(A_FAILURE, request="r", rank=0)
    assert len((tmp_path / "a").read_text().splitlines()) == 1
    assert not said.lines


@pytest.mark.usefixtures("no_failure_log")
def test_of_two_failure_logs_the_second_is_said_to_be_left_out(tmp_path):
    with logged() as said:
        open_failure_log(str(tmp_path / "a"))
        open_failure_log(str(tmp_path / "b"))
    (line,) = said.lines
    assert str(tmp_path / "b") in line
    FailureLog("e").report(A_FAILURE, request="r", rank=0)
    assert (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()
