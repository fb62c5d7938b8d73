"""Messages that somebody meant harm with: golden ones whose fields were exchanged."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import msgspec

from schemas.codec import encode
from tests.fuzz.choices import Choices
from tests.support.schemas_examples import EXAMPLES

TAGS: Final = tuple(sorted(EXAMPLES))
Known = Mapping[str, Sequence[Any]]  # values that mean something where it is sent, by field
Path = tuple[str | int, ...]


@cache
def _golden(tag: str) -> bytes:
    return encode(EXAMPLES[tag])


def hostile_map(
    choices: Choices, tags: Sequence[str], known: Known, *, most: int = 4
) -> dict[str, Any]:
    """A message as a plain map: known values in their fields, and some anything in others."""
    whole: dict[str, Any] = msgspec.msgpack.decode(_golden(choices.pick(tags)))
    for path in list(_places(whole)):
        name = next((step for step in reversed(path) if isinstance(step, str)), "")
        if name in known and choices.often():
            _put(whole, path, copy.deepcopy(choices.pick(known[name])))
    for _ in range(choices.below(most)):
        if places := list(_places(whole)):
            _spoil(choices, whole, choices.pick(places))
    return whole


def hostile_bytes(
    choices: Choices, tags: Sequence[str] = TAGS, known: Known | None = None
) -> bytes:
    """The same as bytes, seldom damaged ones, or no message at all."""
    kind = choices.below(16)
    if kind == 15:
        return choices.take(choices.below(256))
    try:
        data = msgspec.msgpack.encode(hostile_map(choices, tags, known or {}))
    except (OverflowError, ValueError):  # what a text or a number of it cannot be written as
        return b"\xc1"
    if kind < 13:
        return data
    damaged = bytearray(data)
    for _ in range(1 + choices.below(3)):
        damaged[choices.below(len(damaged))] = choices.below(256)
    return bytes(damaged) if kind == 13 else bytes(damaged[: choices.below(len(damaged))])


def _spoil(choices: Choices, whole: dict[str, Any], path: Path) -> None:
    inner: Any = _inside(whole, path[:-1])
    step, how = path[-1], choices.below(8)
    if how == 0 and isinstance(inner, dict):
        del inner[step]
    elif how == 1 and isinstance(inner, dict):
        inner[choices.text()] = choices.value()
    elif how == 2 and isinstance(inner, list):
        inner.extend(copy.deepcopy(inner) * (1 + choices.below(8)))
    elif how == 3:
        inner[step] = _like(choices, inner[step])
    elif how == 4 and isinstance(inner[step], dict | list):
        inner[step] = type(inner[step])()
    else:
        inner[step] = _like(choices, inner[step]) if choices.often() else choices.value()


def _like(choices: Choices, value: Any) -> Any:
    """Another value of the same type, which a decoder lets through."""
    match value:
        case bool():
            return not value
        case int():
            return choices.whole()
        case float():
            return choices.real()
        case str():
            return choices.text()
        case bytes():
            return choices.blob()
    return value


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    if path and path != ("type",):
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _places(inner, (*path, at))


def _inside(whole: Any, path: Path) -> Any:
    for step in path:
        whole = whole[step]
    return whole


def _put(whole: Any, path: Path, value: Any) -> None:
    with contextlib.suppress(IndexError, KeyError, TypeError):  # what it was in was exchanged
        inner = _inside(whole, path[:-1])
        if type(inner[path[-1]]) is type(value):
            inner[path[-1]] = value
