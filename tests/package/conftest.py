"""The wheel, built as a release is, and an environment that holds it and nothing of the serving stack."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools import lock, uv_tool

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class LightEnvironment:
    """An environment with the wheel alone; commands run outside of the checkout, so that nothing is found there."""

    folder: Path
    elsewhere: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment; return its status and output."""
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.elsewhere,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    @property
    def packages(self) -> Path:
        """The folder that the wheel was installed into."""
        found = self.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        return Path(found.stdout.strip())


def checked(*command: str | Path) -> None:
    """Run a command that must succeed; its output is shown when it does not."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **uv_tool.environment()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made from the source archive, so that what the archive lacks shows too."""
    folder = tmp_path_factory.mktemp("dist")
    build = ("--build-constraint", lock.BUILD.path)
    checked(uv_tool.uv(), "build", *build, "--python", sys.executable, "--out-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def wheel_files(wheel: Path) -> set[str]:
    """The names of the files in the wheel."""
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="session")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> LightEnvironment:
    """The light environment, shared by all tests of this room; they only read it."""
    folder = tmp_path_factory.mktemp("light") / "venv"
    checked(uv_tool.uv(), "venv", "--no-project", "--python", sys.executable, folder)
    # What it needs is found by what the wheel says, in the versions that the lock names.
    checked(uv_tool.uv(), "pip", "install", "--python", folder, "--constraint", lock.LIGHT.path, wheel)
    return LightEnvironment(folder, tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture
def incident(light: LightEnvironment) -> Path:
    """The incident that ships in the wheel in which one rank's put never returned."""
    return light.packages / "ledger" / "demo" / "hanging-put.db"
