"""The mark of a live log goes with the process that writes it."""

import os

from ledger.file.live_mark import is_live
from tests.support.log_files import append_requests, running_engine, writing


def test_the_sign_of_a_live_log_goes_with_its_process(tmp_path):
    with running_engine(tmp_path / "a.db") as engine:
        assert is_live(tmp_path / "a.db")
        engine.kill()
        assert not is_live(tmp_path / "a.db")


def test_a_forked_child_does_not_keep_up_the_sign(tmp_path):
    with writing(tmp_path / "a.db") as (log, writer):
        append_requests(log, 10)
        assert writer.flush(timeout_s=60)
        child_is_up, up = os.pipe()
        end, end_of_parent = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(up, b".")
            os.read(end, 1)
            os._exit(0)
        try:
            os.read(child_is_up, 1)
            assert is_live(tmp_path / "a.db")
            assert writer._database._mark is not None
            writer._database._mark.release()
            assert not is_live(tmp_path / "a.db")
        finally:
            os.write(end_of_parent, b".")
            os.waitpid(child, 0)
            for pipe in (child_is_up, up, end, end_of_parent):
                os.close(pipe)
