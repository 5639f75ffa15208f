"""Hypothesis strategies that more than one room draws from.

They follow from the structs in `ledger.events`, so that a new kind or field is drawn as soon as it exists.
"""

import typing

import msgspec
from hypothesis import strategies as st

from ledger import events as ev

INT64 = st.integers(-(2**63), 2**63 - 1)
"""What SQLite's INTEGER and the events' JSON both hold."""

JSON = st.recursive(
    st.none() | st.booleans() | INT64 | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def values(annotation: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Any value of a field of an event, from the field's type."""
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return INT64
    if annotation is str:
        return st.text(max_size=12)
    if annotation is msgspec.Raw:
        return JSON.map(lambda value: msgspec.Raw(msgspec.json.encode(value)))
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return structs(annotation)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(values(inner[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, inner))
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
    raise TypeError(f"no strategy for a field of type {annotation}")


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[typing.Any]:
    """Any struct of a kind: required fields always, optional ones now and then."""
    required, optional = {}, {}
    hints = typing.get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        chosen = required if field.required else optional
        chosen[field.name] = values(hints[field.name])
    return st.fixed_dictionaries(required, optional=optional).map(lambda fields: kind(**fields))


events = st.one_of([structs(kind) for kind in ev.KINDS.values()])
"""Any one event, in any place of the log."""


def logs(max_size: int = 30) -> st.SearchStrategy[list[ev.Event]]:
    """Any events, numbered as a log numbers them."""
    return st.lists(events, max_size=max_size).map(
        lambda drawn: [msgspec.structs.replace(event, seq=place) for place, event in enumerate(drawn, 1)]
    )
