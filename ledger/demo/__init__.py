"""The recorded incidents that ship with kvledger, for `kvledger demo`.

Each is a sealed log of a real run, made by a recorder in `tools/`. This file knows where they are and nothing of what
they hold.
"""

from pathlib import Path


def incidents() -> list[Path]:
    """Return the incident files of this folder, by name; empty when none was recorded yet."""
    return sorted(Path(__file__).parent.glob("*.db"))
