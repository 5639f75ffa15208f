"""A sealed log for the tests of this room."""

import pytest

from ledger.file.seal import seal
from tests.support.log_files import closed_log


@pytest.fixture
def sealed(tmp_path):
    """A sealed log of about 300 events, and nothing else in its folder."""
    closed_log(tmp_path / "log" / "a.db", 150)
    folder = tmp_path / "sealed"
    folder.mkdir()
    return seal(tmp_path / "log" / "a.db", folder / "incident.db")
