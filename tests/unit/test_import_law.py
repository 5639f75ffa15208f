"""The import law, read off the source, so that imports are seen that no run reaches.

An incident opens on a laptop, so `ledger/` stays free of the serving stack; tests/package shows the same on an
installed wheel. Inside `ledger/`, a room imports only from its own floor and the floors below, and neither files nor
rooms import in a circle.
"""

import ast
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVING_STACK = {"vllm", "torch", "mooncake", "zmq", "connector"}

FLOORS = (
    ("blocks", "codes", "demo", "rules"),
    ("errors",),
    ("settings",),
    ("words", "events"),
    ("state",),
    ("live", "file"),
    ("verdicts",),
    ("replay",),
    ("queries",),
    ("report",),
    ("trace", "browse"),
    ("cli",),
    ("__main__",),
)
"""The rooms of `ledger/`, the ground floor first."""

FRONT_DOOR = "ledger"
"""`ledger/__init__.py` names files of every floor, and loads one only when a program asks for a name of it."""


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


# --- the floors of ledger/ --------------------------------------------------------------------------------------------


def imports_of_ledger() -> dict[str, set[str]]:
    """Of each file of `ledger/`, as a module: the modules of `ledger/` that it imports, anywhere in it."""
    files = sorted((ROOT / "ledger").rglob("*.py"))
    modules = {module_name(file.relative_to(ROOT)): file for file in files}
    return {
        module: imported_modules(file.read_text(), modules) for module, file in modules.items() if module != FRONT_DOOR
    }


def module_name(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def imported_modules(source: str, modules: Iterable[str]) -> set[str]:
    """Those of `modules` that a source file imports; the front door, from which all take the version, is left out."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= submodules & set(modules) or {node.module}
    return names & set(modules) - {FRONT_DOOR}


def room(module: str) -> str:
    return module.split(".")[1]


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The members of a circle in a graph; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_has_its_floor_and_every_floor_its_rooms():
    rooms = {module.split(".")[1] for module in imports_of_ledger()}
    assert sorted(rooms) == sorted(room for floor in FLOORS for room in floor)


def test_no_room_imports_a_room_above_it():
    floor_of = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    guilty = [
        f"{module} imports {other}"
        for module, others in imports_of_ledger().items()
        for other in sorted(others)
        if floor_of[room(other)] > floor_of[room(module)]
    ]
    assert guilty == []


def test_no_files_import_in_a_circle():
    assert circle(imports_of_ledger()) == []


def test_no_rooms_import_in_a_circle():
    graph: dict[str, set[str]] = {}
    for module, others in imports_of_ledger().items():
        graph.setdefault(room(module), set()).update(room(other) for other in others if room(other) != room(module))
    assert circle(graph) == []


def test_the_check_finds_a_circle_and_a_late_import():
    assert set(circle({"a": ["b"], "b": ["c"], "c": ["a"]})) == {"a", "b", "c"}
    assert circle({"a": ["b"], "b": []}) == []
    modules = ["ledger", "ledger.file", "ledger.file.read", "ledger.errors"]
    assert imported_modules("def late():\n    from ledger.file import read", modules) == {"ledger.file.read"}
    assert imported_modules("from ledger.file.read import open_log", modules) == {"ledger.file.read"}
    assert imported_modules("from ledger import __version__, errors", modules) == {"ledger.errors"}
