"""One name, one thing: no public type of `ledger/` and `connector/` has the name of another."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DOUBLED: dict[str, str] = {
    "Events": "the events of a log, by place in `join` and lazily in `blast_radius`",
    "Failure": "a failure of a P/D call and of a load from the store",
    "LoadFailed": "the event, and the verdict named after its kind",
    "Taken": "what was taken from a log in `report`, and a sample in `integrity`",
    "What": "what a track shows, and what is waited for",
    "Work": "what poisons, what completes late, and what a store thread does",
}
"""Names that mean two things still, and what."""


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
    assert {name: files for name, files in doubled().items() if name not in DOUBLED} == {}


def test_an_exception_that_is_not_needed_goes():
    assert [name for name in DOUBLED if name not in doubled()] == []


@pytest.mark.parametrize(
    "source",
    ["class Page: ...", "Page: TypeAlias = list[int]", "Page = list[int]", "Page = int | None"],
)
def test_the_check_sees_every_form_of_a_type(source):
    assert defined_types(f"{source}\n_Private = list[int]\nLIMITS = table[int]\n") == {"Page"}
