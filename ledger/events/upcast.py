"""Old shapes of events, lifted one version at a time when they are read. Stored rows stay as they are.

This file knows the fields of an event as a dictionary and nothing else.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

Upcaster: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTERS: dict[str, Upcaster] = {}
"""By the tag of an old version: lifts the fields of an event, its tag among them, by one version.

When `load_failed` becomes `load_failed@2`, the step that lifts the old shape stands here under `load_failed`.
"""


def lift(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an event, its `kind` among them, in the shape that its kind has today."""
    while (tag := fields.get("kind")) in UPCASTERS:
        fields = UPCASTERS[tag](fields)
    return fields
