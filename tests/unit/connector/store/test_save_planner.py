"""Planning a save with upstream, without carrying it out."""

import queue
from types import SimpleNamespace

from connector.store.save_planner import SavePlanner


def test_planning_a_save_leaves_nothing_behind():
    planner = SavePlanner.__new__(SavePlanner)
    planner._noting, planner.request_queue = SimpleNamespace(planned=[]), queue.Queue()  # type: ignore[assignment]
    planner._thread = SimpleNamespace(_saved_offset={})  # type: ignore[assignment]
    planner._handle_request = lambda _: planner.request_queue.task_done()  # type: ignore[method-assign]
    planner.plan(SimpleNamespace(current_event=None))  # type: ignore[arg-type]
    assert (planner.request_queue.qsize(), planner.request_queue.unfinished_tasks) == (0, 0)
