"""Gangs of fixed size by rank, pre-emptive and with backfill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from controlplane.policy.api import JobView, Plan
from controlplane.policy.planning.placers import SlotPlacer
from controlplane.policy.planning.slot_partition import (
    Partition,
    compose_plan,
    gang_size,
    slots_in_words,
)
from controlplane.policy.planning.slot_placer import with_user_batches
from schemas.ids import JobId, Seconds

Rank = Callable[[JobView], tuple[str, dict[str, float]]]  # of a job, in words and numbers


def fit_gangs(partition: Partition, ranked: Iterable[JobView]) -> dict[JobId, int]:
    """Sizes of those that run, in their order: each that fits in what those before it leave.

    Args:
        ranked: `partition.running` and `partition.waiting` jobs, the first to be served first.
    """
    left = partition.room
    sizes: dict[JobId, int] = {}
    for job in ranked:
        size = gang_size(job, partition)
        if size <= left:
            sizes[job.job] = size
            left -= size
    return sizes


def gang_plan(
    partition: Partition,
    sizes: Mapping[JobId, int],
    placer: SlotPlacer,
    rank: Rank,
    wake_at: Seconds | None = None,
) -> Plan:
    """The plan that runs gangs of these sizes and lets the others wait.

    Args:
        rank: why a job is served before others, or after them.
        wake_at: when ranks change by themselves.
    """
    room = partition.room
    left = room - sum(sizes.values())

    def why(job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        words, numbers = rank(job)
        if slots:
            return words, numbers
        needs = gang_size(job, partition)
        text = f"{words}; needs {slots_in_words(needs)}, those before it leave {left} of {room}"
        return text, {**numbers, "needs": float(needs), "left": float(left)}

    placed = with_user_batches(partition, placer.place(partition, sizes))
    return compose_plan(partition, placed, why, wake_at=wake_at)
