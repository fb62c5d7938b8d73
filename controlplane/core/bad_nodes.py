"""Where workers of a job died again and again, it is placed somewhere else, if there is room."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from controlplane.core.model.job import Job
from controlplane.core.state import State
from schemas.ids import JobId, NodeId, SlotId, node_of

ENOUGH: Final = 2  # workers that died on a node: the next ones go elsewhere

Placed = Mapping[JobId, Mapping[SlotId, int]]


def around_bad_nodes(
    placed: Placed, state: State, traded: AbstractSet[SlotId] = frozenset()
) -> dict[JobId, dict[SlotId, int]]:
    """The same, with other slots where a job would come to a node that it had better leave alone.

    Args:
        placed: slot -> local batch of each job that is to change; slots that it has already stay.
        state: of the cluster; it is only read.
        traded: slots that jobs are about to trade.

    Returns:
        A slot on a bad node is replaced by a free one of the same kind on another node, in its
        rank; it stays where there is none, because bad luck is better than none.
    """
    taken = traded | {slot for slots in placed.values() for slot in slots}
    taken |= {slot for swap in state.swaps for slot in swap.slots()}
    found = {}
    spare: list[SlotId] | None = None
    for name, slots in placed.items():
        found[name] = dict(slots)
        bad = _bad_for(state.jobs[name])
        new = [slot for slot in slots if node_of(slot) in bad and not _has(state.jobs[name], slot)]
        if not new:
            continue
        if spare is None:
            spare = [slot for slot in state.slot_index.available().free if slot not in taken]
        instead = dict[SlotId, SlotId]()
        for slot in new:
            other = next(
                (s for s in spare if node_of(s) not in bad and _alike(state, s, slot)), None
            )
            if other is not None:
                spare.remove(other)
                instead[slot] = other
        found[name] = {instead.get(slot, slot): batch for slot, batch in slots.items()}
    return found


def _bad_for(job: Job) -> set[NodeId]:
    return {node for node, died in job.attempts.died_on.items() if died >= ENOUGH}


def _has(job: Job, slot: SlotId) -> bool:
    return job.group is not None and any(member.slot == slot for member in job.group.members)


def _alike(state: State, one: SlotId, other: SlotId) -> bool:
    return _kind(state, one) == _kind(state, other)


def _kind(state: State, slot: SlotId) -> tuple[str, str]:
    """What it is, and which model."""
    node = state.slot_index.slots()[slot]
    index = int(slot.rpartition("/")[2])
    return next((one.kind, one.model) for one in node.spec.slots if one.index == index)
