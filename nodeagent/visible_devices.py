"""Which devices CUDA_VISIBLE_DEVICES names, as CUDA reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LEADING_NUMBER: Final = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True, slots=True)
class Device:
    """What one worker can be given: a GPU, or one MIG instance of it."""

    uuid: str  # "GPU-..." or "MIG-...", as the driver gives it
    model: str  # as the driver names it
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this host; where it stands in a list is its index."""

    uuid: str  # empty if it does not answer
    model: str
    devices: tuple[Device, ...]  # itself, or its MIG instances; none if it does not answer


@dataclass(frozen=True, slots=True)
class Selection:
    """The devices that are visible, and what ended the list."""

    devices: tuple[Device, ...]
    by_index: bool  # an index was used, so the order of GPUs matters
    ended_by: str | None = None  # the first entry that names nothing; those behind it do not count
    repeated: str | None = None  # an entry that names something again: then nothing is visible


def select_visible(value: str, gpus: Sequence[Gpu]) -> Selection:
    """The devices that a CUDA_VISIBLE_DEVICES names, read as CUDA does.

    The list ends at the first entry that names nothing or is of another kind than the first
    (`-1` is customary); a device that is named twice makes all of them invisible. Abbreviated
    UUIDs count if they fit one device only. An index takes what follows its digits with it. One
    reading differs: a GPU that is split by MIG stands for all of its instances, where CUDA takes
    the first; an agent has a worker for each.

    Args:
        value: what the variable holds; empty hides everything.
        gpus: of this host, in the driver's order.

    Returns:
        What is visible, in the order of the value.
    """
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    kind = _kind(entries[0]) if entries else ""
    found: list[Device] = []
    seen: set[tuple[str, ...]] = set()
    for entry in entries:
        named = _named(entry, kind, gpus)
        if named is None:
            return Selection(tuple(found), kind == "", ended_by=entry)
        which, devices = named
        if which in seen:
            return Selection((), kind == "", repeated=entry)
        seen.add(which)
        found += devices
    return Selection(tuple(found), kind == "" and bool(entries))


def _kind(entry: str) -> str:
    return next((kind for kind in ("GPU-", "MIG-") if entry.startswith(kind)), "")


def _named(
    entry: str, kind: str, gpus: Sequence[Gpu]
) -> tuple[tuple[str, ...], tuple[Device, ...]] | None:
    """What tells the named one from others, and its devices; None if there is no such one."""
    if _kind(entry) != kind:
        return None
    if kind == "MIG-":
        fitting = [d for gpu in gpus for d in gpu.devices if d.uuid.startswith(entry)]
        return ((fitting[0].uuid,), (fitting[0],)) if len(fitting) == 1 else None
    if kind == "GPU-":
        indices = [i for i, gpu in enumerate(gpus) if gpu.uuid.startswith(entry)]
        index = indices[0] if len(indices) == 1 else -1
    else:
        digits = LEADING_NUMBER.match(entry)
        index = int(digits.group()) if digits else -1
    if not 0 <= index < len(gpus):
        return None
    return (str(index),), gpus[index].devices
