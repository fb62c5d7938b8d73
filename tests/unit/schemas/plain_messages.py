"""Messages as plain maps, and what spoils them, for tests of hostile bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, get_args

import msgspec
from hypothesis import strategies as st

from schemas.wire import Message

Path = tuple[str | int, ...]
OPEN: Final = "[...]"  # how an error names a value of a map whose keys are free
UINT64: Final = 2**64
ANY_SCALAR: Final = re.compile(r"(detail|values)\[\.\.\.\]$|choice\[\d+\]$|when\[\.\.\.\]\[\d+\]$")


def plain(message: Message) -> Any:
    """What an independent MessagePack reader is to find."""
    return msgspec.to_builtins(message, builtin_types=(bytes,))


def leaves(value: Any, path: Path = (), name: str = "") -> Iterator[tuple[Path, str, Any]]:
    """Every field in `value`: its place in the plain map, its name in errors, its value."""
    if path:
        yield path, name, value
    if isinstance(value, msgspec.Struct):
        for field, key in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
            yield from leaves(getattr(value, field), (*path, key), f"{name}.{key}".strip("."))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key), name + OPEN)
    elif isinstance(value, tuple):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index), f"{name}[{index}]")


def of_another_type(value: Any, name: str) -> Any:
    """Something that cannot stand where `value` stands."""
    if ANY_SCALAR.search(name):
        return [1]
    return "wrong" if isinstance(value, bool | int | float | tuple) else 7


def spoiled(message: Message, path: Path, wrong: Any) -> Any:
    """The plain map of `message` with `wrong` at `path`."""
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    inner = whole
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = wrong
    return whole


def instances(annotation: Any) -> st.SearchStrategy[Any]:
    """Any value of a message's class, or of a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        fields = msgspec.structs.fields(annotation)
        return st.builds(annotation, **{field.name: instances(field.type) for field in fields})
    if hasattr(annotation, "__supertype__"):
        return instances(annotation.__supertype__)
    inside = get_args(annotation)
    if (bounds := getattr(annotation, "__metadata__", None)) is not None:
        return _bounded(annotation.__origin__, bounds[0])
    origin = getattr(annotation, "__origin__", None)
    if origin is Literal:
        return st.sampled_from(inside)
    if origin is tuple and inside[-1] is Ellipsis:
        return st.lists(instances(inside[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(instances, inside))
    if origin in {dict, Mapping}:
        return st.dictionaries(*map(instances, inside), max_size=2)
    if inside:
        return st.one_of(*map(instances, inside))
    return SCALARS[annotation]


def _bounded(kind: Any, bounds: msgspec.Meta) -> st.SearchStrategy[Any]:
    if kind is str and bounds.pattern:
        return st.from_regex(bounds.pattern, fullmatch=True)
    if kind is bytes:
        return st.binary(max_size=bounds.max_length)
    if kind is not str and bounds.max_length:
        return instances(kind)
    if kind is str:
        return st.text(min_size=bounds.min_length or 0, max_size=bounds.max_length)
    if kind is float:
        least = bounds.ge if bounds.gt is None else bounds.gt
        open_below = bounds.gt is not None
        return st.floats(least, bounds.le, exclude_min=open_below, allow_nan=False)
    return st.integers(bounds.ge, UINT64 - 1 if bounds.le is None else bounds.le)


SCALARS: Final[dict[Any, st.SearchStrategy[Any]]] = {
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    int: st.integers(-UINT64 // 2, UINT64 - 1),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
    msgspec.UnsetType: st.just(msgspec.UNSET),
}
