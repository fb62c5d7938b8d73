"""Frozen messages with one module for each conversation. On the wire, each is a tagged map."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False, tag_field="type"
):
    """Base class of all messages between processes.

    On the wire a message is a MessagePack map with the tag in the key `type`. Decoders ignore
    unknown keys, so that fields can be added. A field with a changed meaning requires a new tag.
    """


def union_of(base: type[Message]) -> Any:
    """Return the union of the direct subclasses of a class, for a decoder or a field."""
    return reduce(or_, base.__subclasses__())
