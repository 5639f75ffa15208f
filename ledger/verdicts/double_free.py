"""`double_free`: blocks of a job were to be given back a second time, or blocks that it never pinned.

The second time takes the reference of somebody else: the block goes back to the pool while a request still uses it.
"""

from typing import ClassVar

from ledger.verdicts.base import Kind, Role
from ledger.verdicts.shared.rules import Broken, RuleVerdict

DOUBLE_FREE = Kind("double_free", Role.CAUSE | Role.FREES_EARLY | Role.MISCOUNTS | Role.WRONG_KV)


class DoubleFree(RuleVerdict):
    """Frees beyond what was pinned."""

    kinds: ClassVar[tuple[Kind, ...]] = (DOUBLE_FREE,)
    lead: ClassVar[str] = "a wrong free: "
    advice: ClassVar[str] = (
        "Treat KV of these blocks as wrong from that event on: reset the prefix cache. `kvledger blame FILE G:B` says "
        "who uses a block."
    )

    def impact(self, first: Broken) -> tuple[str, ...]:
        """Return who may suffer: whoever holds the blocks, since another may be given them as well."""
        return (f"whoever uses these blocks after event {first.event.seq} may share them with another request",)
