"""What can be read of a damaged file, made whole with gaps."""

import os

import pytest

from ledger import events as ev
from ledger.errors import FileCorrupt
from ledger.file.read import open_log
from ledger.file.seal import seal
from ledger.file.verify import verify
from tests.support.log_files import changed, closed_log


def test_salvage_makes_an_incident_file_of_what_can_be_read_of_a_cut_log(tmp_path):
    closed_log(tmp_path / "a.db", 5_000)
    whole = (tmp_path / "a.db").stat().st_size
    os.truncate(tmp_path / "a.db", whole // 2)
    with pytest.raises(FileCorrupt, match="seal --salvage"):
        seal(tmp_path / "a.db", tmp_path / "b.db")
    report = seal(tmp_path / "a.db", tmp_path / "b.db", salvage=True)
    assert report.events > 4_000
    assert report.lost == 0
    assert report.end == "torn"
    assert verify(tmp_path / "b.db").ok
    with open_log(tmp_path / "b.db") as log:
        assert [event.seq for event in log.events()] == list(range(1, report.events + 1))
        assert log.meta["engine"] == "test-engine"
    assert (tmp_path / "a.db").stat().st_size == whole // 2


def test_salvage_puts_a_gap_in_the_place_of_each_lost_event(tmp_path):
    closed_log(tmp_path / "a.db", 5_000)
    size = (tmp_path / "a.db").stat().st_size
    with (tmp_path / "a.db").open("r+b") as file:
        file.seek(size // 2 // 4096 * 4096)
        file.write(bytes(4096))
    report = seal(tmp_path / "a.db", tmp_path / "b.db", salvage=True)
    assert report.lost > 0
    with open_log(tmp_path / "b.db") as log:
        events = list(log.events())
    assert sum(isinstance(event, ev.Gap) for event in events) == report.lost
    assert [event.seq for event in events] == list(range(1, events[-1].seq + 1))
    assert isinstance(events[-1], ev.LogClosed)


def test_salvage_of_a_sealed_file_makes_a_new_one(tmp_path, sealed):
    changed(sealed.target, "UPDATE events SET data = 'nothing' WHERE seq = 6")
    report = seal(sealed.target, tmp_path / "again.db", salvage=True)
    assert report.lost == 1
    assert verify(tmp_path / "again.db").ok


def test_salvage_of_a_file_without_any_event_says_so(tmp_path):
    closed_log(tmp_path / "a.db", 10)
    os.truncate(tmp_path / "a.db", 4096)
    with pytest.raises(FileCorrupt):
        seal(tmp_path / "a.db", tmp_path / "b.db", salvage=True)
    assert not (tmp_path / "b.db").exists()
