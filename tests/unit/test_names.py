"""One name, one thing: no public type of `ledger/` and `connector/` has the name of another."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def defined_types(source: str) -> set[str]:
    """The public classes and type aliases that a source file defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if "TypeAlias" in ast.unparse(
                annotation
            ):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp()) if not name.isupper():
                names.add(name)  # an alias without a word that says so
            case _:
                pass
    return {name for name in names if not name.startswith("_")}


def doubled() -> dict[str, list[str]]:
    """Each name that several files define, and the files."""
    places: dict[str, list[str]] = {}
    for package in ("ledger", "connector"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for name in defined_types(file.read_text()):
                places.setdefault(name, []).append(str(file.relative_to(ROOT)))
    return {name: files for name, files in places.items() if len(files) > 1}


def test_no_type_has_the_name_of_another():
    assert doubled() == {}


@pytest.mark.parametrize(
    "source",
    ["class Page: ...", "Page: TypeAlias = list[int]", "Page = list[int]", "Page = int | None"],
)
def test_the_check_sees_every_form_of_a_type(source):
    assert defined_types(f"{source}\n_Private = list[int]\nLIMITS = table[int]\n") == {"Page"}
