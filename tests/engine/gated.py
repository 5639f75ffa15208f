"""A prefill whose pushes can be held back, so that a test can end an engine in the middle of one.

The real transfer engine moves a test's few kilobytes in no time. It is not replaced: while the gate's file exists, a
call to it does not begin.
"""

import os
import time
from pathlib import Path
from typing import Any

from connector.pd.connector import KVLedgerMooncakeConnector
from tests.engine.pd_engines import GATE


class _GatedEngine:
    """Mooncake's transfer engine behind a gate."""

    def __init__(self, engine: Any, gate: Path) -> None:
        self._engine = engine
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def batch_transfer_sync_write(self, *args: Any) -> int:
        while self._gate.exists():
            time.sleep(0.005)
        return self._engine.batch_transfer_sync_write(*args)


class GatedMooncakeConnector(KVLedgerMooncakeConnector):
    """The connector under test, with its transfer engine behind a gate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector_worker is not None:
            self.connector_worker.engine = _GatedEngine(self.connector_worker.engine, Path(os.environ[GATE]))
