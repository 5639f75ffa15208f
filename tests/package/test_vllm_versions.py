"""The other vLLM that is supported: 0.33 has no build for the CPU, so its Python sources are laid over the environment.

Its scheduler and its Mooncake classes are plain Python and run as they are; only the engine's kernels are missing. The
contract tests of the connectors' scheduler halves are run on them, in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import lock

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def sources() -> Path:
    """Return the folder with the Python sources of that vLLM."""
    folder = Path(sys.prefix) / "beside" / lock.VLLM_NEXT.name
    assert folder.is_dir(), "these sources are missing from the environment: `make env` puts them there"
    return folder


def run(sources: Path, *arguments: str) -> str:
    """Run Python over those sources and return what it prints."""
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{ROOT}", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    return process.stdout


@pytest.mark.timeout(900)
def test_it_has_all_that_the_connectors_extend(sources: Path) -> None:
    code = (
        "import vllm, connector.runtime.compat as compat;"
        "print(vllm.__file__, [compat.missing(table) for table in compat.TABLES])"
    )
    said = run(sources, "-c", code)
    assert str(sources) in said
    assert "[]" in said
    assert ":" not in said.split("[", 1)[1]


@pytest.mark.timeout(900)
def test_the_contract_of_the_store_scheduler_holds_on_it(sources: Path) -> None:
    said = run(sources, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/connector/store/test_scheduler.py")
    assert " passed" in said
    assert " failed" not in said


def test_a_vllm_that_lacks_what_is_extended_is_refused_by_name() -> None:
    from connector.runtime import compat
    from ledger.errors import UnsupportedVersion

    members = {"vllm.v1.core.block_pool": ("BlockPool.touch", "BlockPool.embrace"), "vllm.gone": ("x",)}
    with pytest.raises(UnsupportedVersion, match=r"BlockPool\.embrace, vllm\.gone\. Install a supported vLLM"):
        compat.require(members)
