"""Where workers go: close together, and moved as little as possible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from controlplane.policy.api import SlotView
from schemas.ids import NodeId, SlotId


def consolidate(free: Sequence[SlotView], size: int) -> list[SlotView]:
    """`size` of the free slots on as few nodes as possible, best fit first.

    Requires `size <= len(free)`.

    Args:
        free: slots in the order of the view.
        size: how many, at most as many as are free.
    """
    by_node: dict[NodeId, list[SlotView]] = defaultdict(list)
    for slot in free:
        by_node[slot.node].append(slot)
    fitting = [slots for slots in by_node.values() if len(slots) >= size]
    if fitting:
        return min(fitting, key=len)[:size]
    largest_first = sorted(by_node.values(), key=len, reverse=True)
    return [slot for slots in largest_first for slot in slots][:size]


def split(batch: int, slots: Sequence[SlotId]) -> dict[SlotId, int]:
    """`batch` dealt out over `slots` with differences of at most one sample.

    Args:
        batch: global, samples per step.
        slots: in order of rank; the first ones get the rest.

    Returns:
        Samples of each slot in a step.
    """
    share, rest = divmod(batch, len(slots))
    return {slot: share + (place < rest) for place, slot in enumerate(slots)}
