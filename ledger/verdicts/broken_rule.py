"""`broken_rule`: a rule of the book was broken that has no kind of its own.

An id used twice, a job without ranks, the null block pinned: each is named by its rule. It is here so that nothing that
the engine or the fold noticed is lost.
"""

from typing import ClassVar

from ledger.rules import Breach
from ledger.verdicts.base import Kind, Role
from ledger.verdicts.shared.rules import RuleVerdict

BROKEN_RULE = Kind(Breach.OTHER.value, Role.CAUSE)


class BrokenRule(RuleVerdict):
    """All broken rules that no other verdict takes."""

    kinds: ClassVar[tuple[Kind, ...]] = (BROKEN_RULE,)
