"""A store connector whose loads can be held back, so that a test can change the store between lookup and load.

Nothing of the store is replaced. While the file `hold` exists in the folder that `KVLEDGER_TEST_HOLD` names, a call
that loads does not begin; it writes its keys into `held` and waits. The file `pass` lets one call through.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from connector.store.connector import KVLedgerStoreConnector

HOLD = "KVLEDGER_TEST_HOLD"


class _HeldStore:
    """The real store behind a gate."""

    def __init__(self, store: Any, folder: Path) -> None:
        self._store = store
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into_multi_buffers(self, keys: list[str], *args: Any) -> list[int]:
        hold, held = self._folder / "hold", self._folder / "held"
        if hold.exists():
            held.with_suffix(".new").write_text(json.dumps(keys))
            held.with_suffix(".new").rename(held)
            while hold.exists():
                with contextlib.suppress(FileNotFoundError):
                    (self._folder / "pass").unlink()
                    break
                time.sleep(0.002)
        return self._store.batch_get_into_multi_buffers(keys, *args)


class HeldStoreConnector(KVLedgerStoreConnector):
    """The connector under test, with the loads of its store behind a gate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector_worker is not None:
            recording = self.connector_worker.store
            recording._store = _HeldStore(recording._store, Path(os.environ[HOLD]))


class Gate:
    """A test's end of the gate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        os.environ[HOLD] = str(folder)
        self._hold, self._held, self._pass = folder / "hold", folder / "held", folder / "pass"

    def close(self) -> None:
        """Hold the next load back."""
        self._held.unlink(missing_ok=True)
        self._hold.touch()

    def wait(self, timeout_s: float = 60.0) -> list[str]:
        """Wait until a load is held, and return the keys that it is about to ask for, as the store knows them."""
        deadline_s = time.monotonic() + timeout_s
        while not self._held.exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError("no load came to the gate")
            time.sleep(0.002)
        return json.loads(self._held.read_text())

    def let_pass(self) -> None:
        """Let the load that is held go on, and hold the next one."""
        self._held.unlink()
        self._pass.touch()

    def open(self) -> None:
        """Let all loads go on."""
        self._hold.unlink(missing_ok=True)
