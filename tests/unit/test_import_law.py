"""The import law, read off the source: an incident opens on a laptop, so `ledger/` stays free of the serving stack.

tests/package shows the same on an installed wheel. This one is quick, and sees imports that no run reaches.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVING_STACK = {"vllm", "torch", "mooncake", "zmq", "connector"}


def imported_packages(source: str) -> set[str]:
    """The top-level packages that a source file imports, anywhere in it."""
    packages: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages.add(node.module.partition(".")[0])
    return packages


@pytest.mark.parametrize("folder", ["ledger", "migrations"])
def test_no_file_imports_the_serving_stack(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder}/ holds no Python file: the check would pass on nothing"
    guilty = {
        str(file.relative_to(ROOT)): sorted(found)
        for file in files
        if (found := imported_packages(file.read_text()) & SERVING_STACK)
    }
    assert guilty == {}


@pytest.mark.parametrize(
    "line",
    [
        "import torch.nn",
        "from vllm.config import VllmConfig",
        "def late():\n    import zmq",
        "from connector import plugin",
    ],
)
def test_the_check_sees_every_form_of_import(line):
    assert imported_packages(line) & SERVING_STACK
