"""The rooms of the test suite: in which order they run, which marker they carry, and what they need.

A room that needs vLLM and Mooncake fails where they are missing. A skip would turn a machine without them green, and
what the tests there show can be shown in no other way. Only `gpu` skips, and says why.
"""

import atexit
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

TESTS = Path(__file__).parent

# Fast rooms first, so that a plain mistake shows in seconds and the engine is not started for nothing.
ROOMS = ("unit", "property", "incidents", "simulation", "package", "browser", "engine")
MARKED_ROOMS = {"simulation", "package", "browser", "engine"}
NEEDED_MODULES = {
    "simulation": ("vllm", "torch", "greenlet"),
    "engine": ("vllm", "torch", "mooncake", "zmq"),
    "browser": ("playwright",),
}

# What the tests, and all programs that they start, find around them on every machine. Nobody's terminal, language or
# place decides what is printed, no setting of somebody's engine reaches those of the tests, and no cache is warm.
SETTINGS_OF_OTHERS = ("KVLEDGER_", "VLLM_", "MOONCAKE_", "MC_", "DATASETTE_", "LC_")
UNSET = {
    *("LANG", "LANGUAGE", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("PYTHONPATH", "PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONIOENCODING", "PYTHONHASHSEED", "TMOUT", "PAGER"),
}
ENVIRONMENT = {
    "TZ": "UTC",
    "LC_ALL": "C.UTF-8",
    "TERM": "xterm",
    "COLUMNS": "80",
    "LINES": "25",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


def make_surroundings() -> None:
    """Gives this process, and those that it starts, the same environment on every machine; done before any import."""
    for name in list(os.environ):
        if name in UNSET or name.startswith(SETTINGS_OF_OTHERS):
            del os.environ[name]
    os.environ.update(ENVIRONMENT)
    time.tzset()
    caches = tempfile.mkdtemp(prefix="kvledger-caches-")
    atexit.register(shutil.rmtree, caches, ignore_errors=True)
    for name in ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ[name] = str(Path(caches, name.lower()))


make_surroundings()

# The speed of the machine is no property of the code, so there are no deadlines. CI draws the same examples every
# time; new ones are found where someone can look at them.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def _plain_logging(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give each test kvledger's logger as it is in a new process, and undo what the test does to it.

    The plugin's `register` moves the logger, and the simulation's room silences it.
    """
    logger, manager = logging.getLogger("kvledger"), logging.root.manager
    level, parent, disabled = logger.level, logger.parent, manager.disable
    if room_of(request.path) != "simulation":
        logger.setLevel(logging.NOTSET)
        logger.parent = logging.root
        manager.disable = logging.NOTSET
    yield
    logger.setLevel(level)
    logger.parent = parent
    manager.disable = disabled


def room_of(path: Path) -> str:
    """The folder under tests/ that holds `path`, or an empty string for a file beside this one."""
    parts = path.relative_to(TESTS).parts if path.is_relative_to(TESTS) else ()
    return parts[0] if len(parts) > 1 else ""


def missing_modules(room: str) -> list[str]:
    """The modules that `room` needs and this environment lacks."""
    return [name for name in NEEDED_MODULES.get(room, ()) if importlib.util.find_spec(name) is None]


def accelerator_is_present() -> bool:
    """Whether torch is installed and sees an accelerator."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.accelerator.is_available()


class RoomNotEquipped(pytest.File):
    """Stands in for a test file whose room lacks a module: one clear error instead of a traceback of imports."""

    def collect(self) -> list[pytest.Item]:
        """Never returns: raises the one line that says what is missing and what to do."""
        missing = ", ".join(missing_modules(room_of(self.path)))
        raise self.CollectError(f"needs {missing}, not installed here. `make test` makes the full environment.")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Answers for test files whose room is not equipped; pytest handles all others."""
    if missing_modules(room_of(module_path)):
        return RoomNotEquipped.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test with its room and puts the rooms in order; within a room the order stays."""
    for item in items:
        room = room_of(item.path)
        if room in MARKED_ROOMS:
            item.add_marker(room)
    items.sort(key=lambda item: ROOMS.index(room_of(item.path)) if room_of(item.path) in ROOMS else -1)
    if any(item.get_closest_marker("gpu") for item in items) and not accelerator_is_present():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))
