"""`double_free`: blocks of a job were to be given back a second time, or blocks that it never pinned.

The second time takes the reference of somebody else: the block goes back to the pool while a request still uses it.
"""

from typing import ClassVar

from ledger.rules import Breach
from ledger.verdicts.base import Kind, Role
from ledger.verdicts.shared.rules import RuleBroken, RuleVerdict

DOUBLE_FREE = Kind(Breach.DOUBLE_FREE.value, Role.CAUSE | Role.FREES_EARLY | Role.MISCOUNTS | Role.WRONG_KV)


class FreedTwice(RuleBroken, frozen=True, kw_only=True):
    """Blocks of a job were to be given back a second time, or blocks that it never pinned."""


class DoubleFree(RuleVerdict):
    """Frees beyond what was pinned."""

    kinds: ClassVar[tuple[Kind, ...]] = (DOUBLE_FREE,)
    facts: ClassVar[type[RuleBroken]] = FreedTwice
