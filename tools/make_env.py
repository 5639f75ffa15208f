"""Makes the virtual environments that the Makefile uses: `light` for the demo, `full` for the tests.

Runs under the machine's own Python before anything is installed, so it knows only the standard library. Running it
again costs nothing: a stamp in the environment holds a digest of all that the install depends on, and only a change
installs anew. Every failure ends with one line that says what to do.
"""

from __future__ import annotations  # so that a Python that is too old still gets as far as the line that says so

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)

# vLLM's CPU build names these three, and nothing here uses them. Their builds on the package index belong to another
# build of torch: `import torchvision` fails beside the CPU build, and `from vllm import LLM` fails with it.
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Kind:
    """One environment: where it stands, what pip installs into it, and what it needs of the system."""

    folder: str
    requirement: str
    cost: str
    on_failed_install: str = ""
    uninstall: tuple[str, ...] = ()
    needs_system_packages: bool = False


KINDS = {
    "light": Kind(folder=".venv-demo", requirement=".", cost="about 90 MB and ten seconds"),
    "full": Kind(
        folder=".venv",
        requirement=".[cpu,dev]",
        cost="about 4 GB and two minutes",
        on_failed_install="vLLM's CPU build needs the CPU build of torch. Where pip did not find it, set "
        "PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, as its install page names it.",
        uninstall=BROKEN_BESIDE_CPU_TORCH,
        needs_system_packages=True,
    ),
}

# Debian package -> the shared library of it that Mooncake's wheel is linked with.
SHARED_LIBRARIES = {
    "libibverbs1": "libibverbs.so.1",
    "libnuma1": "libnuma.so.1",
    "librdmacm1": "librdmacm.so.1",
    "libcurl4": "libcurl.so.4",
}


class CannotMake(Exception):
    """The environment cannot be made; the message is one line that says what to do."""


def library_loads(soname: str) -> bool:
    """Whether the dynamic loader finds `soname`."""
    try:
        ctypes.CDLL(soname)
    except OSError:
        return False
    return True


def missing_system_packages() -> list[str]:
    """The Debian packages that the tests need and this machine lacks."""
    missing = [package for package, soname in SHARED_LIBRARIES.items() if not library_loads(soname)]
    if not any(shutil.which(name) for name in CHROMIUM_NAMES):
        missing.append("chromium")
    return missing


def run(*command: str | Path, environment: dict[str, str] | None = None, on_failure: str = "") -> None:
    """Runs one command with no standard input and shows it first; a failure raises CannotMake with `on_failure`."""
    print("+", *command, flush=True)
    try:
        subprocess.run(
            [str(part) for part in command],
            check=True,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.CalledProcessError as error:
        failed = f"`{' '.join(map(str, command))}` ended with status {error.returncode}; its own words stand above."
        raise CannotMake(f"{failed} {on_failure}".rstrip()) from error


def ensure_system_packages() -> None:
    """Installs what is missing where that is allowed, else raises CannotMake with the command that would."""
    missing = missing_system_packages()
    if not missing:
        return
    command = f"apt-get install -y {' '.join(missing)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotMake(f"the tests need these Debian packages: {' '.join(missing)}. As root: {command}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-qq", environment=quiet)
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, environment=quiet)
    still_missing = missing_system_packages()
    if still_missing:
        raise CannotMake(f"apt-get installed these, but they cannot be loaded: {' '.join(still_missing)}")


def install_digest(kind: Kind) -> str:
    """A digest of all that decides what is in the environment: the project file, this file, and the Python."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(part.read_bytes())
    digest.update(f"{kind.requirement} {sys.executable} {sys.version}".encode())
    return digest.hexdigest()


def make(kind: Kind) -> None:
    """Makes the environment of `kind`, or finds that it is up to date; raises CannotMake."""
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise CannotMake(
            f"Python {wanted} or newer is needed, this is {found}. Name one: make PYTHON=python{wanted} ..."
        )
    if kind.needs_system_packages:
        ensure_system_packages()
    folder = ROOT / kind.folder
    stamp = folder / "kvledger-stamp"
    digest = install_digest(kind)
    if stamp.is_file() and stamp.read_text() == digest:
        return
    print(f"make_env: making {kind.folder}, {kind.cost}", flush=True)
    # Made anew, not upgraded: what an older pyproject.toml asked for must not linger and hide a missing dependency.
    try:
        venv.create(folder, clear=True, with_pip=True)
    except subprocess.CalledProcessError as error:
        raise CannotMake(
            "this Python cannot make environments with pip. On Debian: apt-get install python3-venv"
        ) from error
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    # Editable, so that the command always runs the checkout it stands in.
    run(*pip, "install", "--editable", kind.requirement, on_failure=kind.on_failed_install)
    if kind.uninstall:
        run(*pip, "uninstall", "--yes", *kind.uninstall)
    stamp.write_text(digest)


def main() -> int:
    """Exit status: 0 the environment is ready, 1 it cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(KINDS))
    try:
        make(KINDS[parser.parse_args().kind])
    except CannotMake as error:
        print(f"make_env: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
