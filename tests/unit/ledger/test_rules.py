"""Names of rules and of kinds of findings are declared once, and nothing else in the product spells them out."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ledger.rules import Breach, Rule
from ledger.state import invariants
from ledger.state.invariants import RULES, breach_of
from ledger.verdicts import all_kinds, all_verdicts
from ledger.verdicts.base import Kind

ROOT = Path(__file__).parents[3]

DECLARING = {Path("ledger/rules.py"), Path("ledger/state/invariants.py")}

OTHER_WORDS = {"load_failed", "stall"}
"""Kinds of findings that are also the tag of an event or of a simulator's decision."""


def literals(path: Path) -> Iterator[tuple[str, int]]:
    """The strings of a file with their lines, but for the name with which a kind is declared."""
    tree = ast.parse((ROOT / path).read_text())
    declared = {
        id(name)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == Kind.__name__
        for name in call.args[:1]
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in declared:
            yield node.value, node.lineno


def files(*folders: str) -> list[Path]:
    found = [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if path not in DECLARING]


def spelt_out(names: set[str], paths: list[Path]) -> list[str]:
    return [f"{path}:{line} {text}" for path in paths for text, line in literals(path) if text in names]


def test_no_rule_is_spelt_out_where_it_is_not_declared():
    assert spelt_out(set(RULES), files("ledger", "connector")) == []
    # One rule is called as the kind of finding that it makes, and the scores go by kinds of findings.
    assert spelt_out(set(RULES) - {each.value for each in Breach}, files("tools")) == []


def test_no_kind_of_finding_is_spelt_out_where_it_is_not_declared():
    assert spelt_out(set(all_kinds()) - OTHER_WORDS, files("ledger", "connector")) == []


def test_every_rule_is_declared_by_its_own_name_and_enforced_by_the_book():
    declared = {name: value for name, value in vars(invariants).items() if isinstance(value, Rule)}
    assert {name: rule.name.upper() for name, rule in declared.items()} == {name: name for name in declared}
    assert len(RULES) == len(declared)
    texts = [(ROOT / path).read_text() for path in files("ledger/state")]
    enforced = {name for text in texts for name in re.findall(r"Refused\(\s*inv\.(\w+)", text)}
    assert enforced == set(declared)


def test_every_breach_is_the_first_kind_of_one_verdict():
    first = [verdict.kinds[0].name for verdict in all_verdicts() if verdict.kinds]
    assert {each.value: first.count(each.value) for each in Breach} == {each.value: 1 for each in Breach}


@pytest.mark.parametrize(
    ("rule", "is_report", "breach"),
    [
        ("job_already_settled", True, Breach.OVER_REPORT),
        ("job_already_settled", False, Breach.DOUBLE_FREE),
        ("freed_early", True, Breach.EARLY_FREE),
        ("a_rule_of_a_later_version", False, Breach.OTHER),
    ],
)
def test_what_it_means_to_break_a_rule(rule: str, is_report: bool, breach: Breach):
    assert breach_of(rule, is_report=is_report) is breach
