"""Writes the locks: the exact version and the hashes of every package that an environment of this project holds.

    python3 tools/lock.py              # follow pyproject.toml; what it still allows stays as it is
    python3 tools/lock.py --upgrade    # the newest of everything that it allows

A lock is a requirements file for every system and every Python that is supported. It names no index and no folder:
those are the machine's. Its first lines hold a digest of what it was made from, so that `tools/make_env.py` sees
without a network that it is older than pyproject.toml. Knows the standard library only.
"""

from __future__ import annotations  # so that a Python that is too old still gets as far as the line that says so

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import uv_tool
from tools.uv_tool import ROOT, CannotMake

FOLDER = ROOT / "tools" / "locks"
MADE_FROM = "# Made from pyproject.toml as of sha256:"


@dataclass(frozen=True)
class Lock:
    """One lock file.

    Attributes:
        arguments: what is locked, as arguments of `uv pip compile`.
        sources_only: whether only the Python sources of it are wanted, and nothing that is compiled.
    """

    name: str
    arguments: tuple[str, ...]
    sources_only: bool = False

    @property
    def path(self) -> Path:
        """Where it lies."""
        return FOLDER / f"{self.name}.txt"


FULL = Lock("full", ("pyproject.toml", "--extra", "cpu", "--extra", "dev"))
AS_IN_FULL = ("--constraint", str(FULL.path.relative_to(ROOT)))
LIGHT = Lock("light", ("pyproject.toml", *AS_IN_FULL))
# What builds kvledger itself: a wheel, and the editable install in each environment.
BUILD = Lock("build", ("--group", "build", *AS_IN_FULL))
DATASETTE_ALPHA = Lock("datasette-alpha", ("--group", "datasette-alpha"))
# Its Python sources run beside what vLLM's CPU build has installed; what is compiled in it is for an accelerator.
VLLM_NEXT = Lock("vllm-next", ("--group", "vllm-next", "--no-deps"), sources_only=True)

LOCKS = (FULL, LIGHT, BUILD, DATASETTE_ALPHA, VLLM_NEXT)


def inputs_digest() -> str:
    """A digest of all that pyproject.toml says about which packages are wanted."""
    project = uv_tool.project()
    wanted = [
        project["build-system"]["requires"],
        *(project["project"][name] for name in ("requires-python", "dependencies", "optional-dependencies")),
        project["dependency-groups"],
        project["tool"]["uv"],
    ]
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()


def require_in_step(lock: Lock) -> None:
    """Raises CannotMake when `lock` is missing or was made from another pyproject.toml."""
    text = lock.path.read_text() if lock.path.is_file() else ""
    if MADE_FROM + inputs_digest() not in text.splitlines():
        raise CannotMake(f"{lock.path.relative_to(ROOT)} was made from another pyproject.toml. Renew it: make lock")


def without_hashes_of_local_versions(text: str) -> str:
    """The lock without the hashes of versions such as 2.13.0+cpu, of which each place has a build of its own."""
    kept: list[str] = []
    is_local = False
    for line in text.splitlines():
        if not line.startswith(" "):
            is_local = "+" in line.partition(" ")[0]
        if not (is_local and line.lstrip().startswith("--hash")):
            kept.append(line.removesuffix(" \\") if is_local else line)
    return "\n".join(kept) + "\n"


def write(lock: Lock, *, upgrade: bool) -> None:
    """Resolves one lock and writes it; raises CannotMake when there is no solution."""
    uv_tool.run(
        uv_tool.uv(),
        *("pip", "compile", "--quiet", *lock.arguments, *(["--upgrade"] if upgrade else [])),
        # One version for every Python, where one serves.
        *("--universal", "--fork-strategy", "fewest", "--generate-hashes"),
        *("--no-header", "--no-emit-index-url", "--no-emit-find-links"),
        *("--output-file", lock.path.relative_to(ROOT)),
        environment=uv_tool.environment(),
    )
    body = without_hashes_of_local_versions(lock.path.read_text())
    lock.path.write_text(f"# Written by `make lock`, not by hand.\n{MADE_FROM}{inputs_digest()}\n{body}")


def main() -> int:
    """Exit status: 0 the locks are written, 1 they cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions, not those that are locked")
    upgrade = parser.parse_args().upgrade
    try:
        for lock in LOCKS:
            write(lock, upgrade=upgrade)
    except CannotMake as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
