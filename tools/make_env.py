"""Makes the virtual environments that the Makefile uses: `light` for the demo, `full` for the tests.

Runs under the machine's own Python before anything is installed, so it knows only the standard library. What is
installed stands in the locks, in exact versions. Running it again costs nothing: a stamp in the environment holds a
digest of all that the install depends on, and only a change installs anew. Every failure ends with one line that says
what to do.
"""

from __future__ import annotations  # so that a Python that is too old still gets as far as the line that says so

import argparse
import ctypes
import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import lock, uv_tool
from tools.lock import Lock
from tools.uv_tool import ROOT, CannotMake, run

OLDEST_PYTHON = (3, 11)

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Kind:
    """One environment: where it stands, the lock of what is in it, and what it needs of the system.

    Attributes:
        beside: what tests put before the installed packages, each in its own folder under `beside/` of the environment.
        compiles: whether bytecode is made at once. Else Python makes it as it goes; where it may not write any, each
            start of an engine would compile vLLM anew, which takes 8 s.
    """

    folder: str
    lock: Lock
    cost: str
    on_failed_install: str = ""
    beside: tuple[Lock, ...] = ()
    compiles: bool = False
    needs_system_packages: bool = False

    @property
    def locks(self) -> tuple[Lock, ...]:
        """All locks that it is made from."""
        return (self.lock, lock.BUILD, *self.beside)


KINDS = {
    "light": Kind(folder=".venv-demo", lock=lock.LIGHT, cost="about 90 MB and ten seconds"),
    "full": Kind(
        folder=".venv",
        lock=lock.FULL,
        cost="about 5 GB and two minutes",
        on_failed_install="vLLM's CPU build needs the CPU build of torch. Where it was not found, set "
        "PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, as its install page names it.",
        beside=(lock.DATASETTE_ALPHA, lock.VLLM_NEXT),
        compiles=True,
        needs_system_packages=True,
    ),
}

# Debian package -> the shared library of it that Mooncake's wheel is linked with; the last, Playwright's driver.
SHARED_LIBRARIES = {
    "libibverbs1": "libibverbs.so.1",
    "libnuma1": "libnuma.so.1",
    "librdmacm1": "librdmacm.so.1",
    "libcurl4": "libcurl.so.4",
    "libatomic1": "libatomic.so.1",
}


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
    """A digest of all that decides what is in the environment: the locks, the project file, these tools, the Python."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", Path(__file__), Path(uv_tool.__file__), *(each.path for each in kind.locks)):
        digest.update(part.read_bytes())
    digest.update(f"{sys.executable} {sys.version}".encode())
    return digest.hexdigest()


def install(kind: Kind) -> None:
    """Makes the environment anew; raises CannotMake."""
    folder = ROOT / kind.folder
    uv = uv_tool.uv()
    settings = {
        **uv_tool.environment(),
        "VIRTUAL_ENV": str(folder),
        "UV_COMPILE_BYTECODE": str(int(kind.compiles)),
    }

    def run_uv(*arguments: str | Path, on_failure: str = "") -> None:
        shown = (each.relative_to(ROOT) if isinstance(each, Path) else each for each in arguments)
        run(uv, *shown, environment=settings, on_failure=on_failure)

    # Made anew, not upgraded: what an older lock asked for must not linger and hide a missing dependency.
    run_uv("venv", "--quiet", "--clear", "--no-project", "--python", sys.executable, folder)
    run_uv("pip", "sync", "--quiet", kind.lock.path, on_failure=kind.on_failed_install)
    # Editable, so that the command always runs the checkout it stands in.
    build = ("--build-constraint", lock.BUILD.path)
    run_uv("pip", "install", "--quiet", "--no-deps", *build, "--editable", ".")
    for each in kind.beside:
        place = folder / "beside" / each.name
        run_uv("pip", "install", "--quiet", "--no-deps", "--target", place, "--requirement", each.path)
        if each.sources_only:
            for compiled in place.rglob("*.so"):
                compiled.unlink()


def make(kind: Kind) -> None:
    """Makes the environment of `kind`, or finds that it is up to date; raises CannotMake."""
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise CannotMake(
            f"Python {wanted} or newer is needed, this is {found}. Name one: make PYTHON=python{wanted} ..."
        )
    for each in kind.locks:
        lock.require_in_step(each)
    if kind.needs_system_packages:
        ensure_system_packages()
    stamp = ROOT / kind.folder / "kvledger-stamp"
    digest = install_digest(kind)
    if stamp.is_file() and stamp.read_text() == digest:
        return
    print(f"make_env: making {kind.folder}, {kind.cost}", flush=True)
    install(kind)
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
