"""Seconds of a step: passes over local batches, and a ring all-reduce beside the last one."""

from __future__ import annotations

import math

from controlplane.sim.models.job_model import Placement, StepParts
from controlplane.sim.models.table2.constants import (
    NETWORK_BYTES_PER_S,
    NETWORK_HOP_S,
    NODE_BYTES_PER_S,
    NODE_HOP_S,
    Row,
)


def model_bytes(row: Row) -> float:
    """Of its gradients in fp32, as all of them go through a ring.

    Args:
        row: of Table 2, with its parameters in millions.
    """
    return row.parameters * 1e6 * 4


def sync_s(row: Row, placement: Placement) -> float:
    """Seconds of a ring all-reduce: 2 (c - 1) steps of 1/c of the gradients each.

    Args:
        placement: slots on each node; c in all.
    """
    workers = sum(placement)
    apart = sum(slots > 0 for slots in placement) > 1
    hop_s = NETWORK_HOP_S if apart else NODE_HOP_S
    bytes_per_s = NETWORK_BYTES_PER_S if apart else NODE_BYTES_PER_S
    return 2 * (workers - 1) * (model_bytes(row) / workers / bytes_per_s + hop_s)


def step_parts(row: Row, placement: Placement, batch: int) -> StepParts:
    """The passes of a step with `batch` samples, dealt out evenly.

    A local batch beyond memory takes several passes. Only the last one overlaps with the
    synchronisation: T = sqrt(T_grad^2 + T_sync^2), as in Pollux section 3.2 with gamma 2. What is
    left of it beside the gradients counts as synchronisation.

    Args:
        placement: slots on each node.
        batch: global, samples.
    """
    local = math.ceil(batch / sum(placement))
    passes = math.ceil(local / row.memory)
    compute_s = row.fixed_ms / 1000 + local / passes / row.peak
    pass_s = math.hypot(compute_s, sync_s(row, placement))
    return StepParts(pass_s, pass_s - compute_s, math.ceil(local / passes), passes)


def step_s(row: Row, placement: Placement, batch: int) -> float:
    """Seconds of a step with `batch` samples, dealt out evenly.

    Args:
        placement: slots on each node.
        batch: global, samples.
    """
    return step_parts(row, placement, batch).step_s
