"""What is in the wheel: all that an installed kvledger needs, and nothing of the checkout besides."""

from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import ledger

ROOT = Path(__file__).parents[2]


def files_under(folder: Path) -> set[str]:
    """The files of a folder of the checkout, without what Python leaves there, by their names within it."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_every_file_of_both_packages(wheel_files: set[str]):
    for package in ("ledger", "connector"):
        expected = {f"{package}/{name}" for name in files_under(ROOT / package)}
        assert expected
        assert expected <= wheel_files


def test_wheel_holds_every_revision_of_the_audit_database(wheel_files: set[str]):
    expected = {f"ledger/migrations/{name}" for name in files_under(ROOT / "migrations")}
    assert any(name.startswith("ledger/migrations/versions/") for name in expected)
    assert expected <= wheel_files


def test_wheel_holds_nothing_besides(wheel_files: set[str]):
    roots = {name.partition("/")[0] for name in wheel_files}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"ledger", "connector"}
    assert not {name for name in wheel_files if name.endswith((".pyc", ".db-wal", ".db-shm"))}


def test_light_install_asks_for_nothing_of_the_serving_stack(wheel: Path):
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    required = metadata.get_all("Requires-Dist", [])
    always = [line for line in required if "extra ==" not in line]
    assert any(line.startswith("msgspec") for line in always)
    assert not [line for line in always if line.startswith(("vllm", "torch", "mooncake", "pyzmq"))]
    assert metadata["Version"] == ledger.__version__
