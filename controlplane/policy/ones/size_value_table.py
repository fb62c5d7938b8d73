"""What each size of each job is worth to all of them: the table that candidates are scored with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.policy.api import JobView
from controlplane.policy.ones.decision_scope import SlotSupply
from controlplane.policy.ones.options import OnesOptions
from controlplane.policy.ones.problem import JobRow
from controlplane.policy.ones.size_value import values, weights
from controlplane.prediction.array_types import FloatArray, IntArray
from schemas.ids import Seconds


@dataclass(frozen=True, slots=True)
class ValueTable:
    """Jobs x levels; level 0 is to wait."""

    sizes: IntArray  # shape (J, 1 + L), slots; 0 beyond what a job may have
    spans: IntArray  # shape (J, 1 + L), nodes that the value is meant for
    value: FloatArray  # shape (J, 1 + L), V; -inf where a level is not allowed
    weight: FloatArray  # shape (J,)


def value_table(job_rows: Sequence[JobRow], supply: SlotSupply, options: OnesOptions) -> ValueTable:
    """Value every size of every job.

    A gated job may grow onto idle slots, and makes room for one that waits, but is not stopped. To
    stop another one costs what it will take to start it again, and a margin.
    """
    weight = _weight(job_rows, supply.now, options)
    sizes, spans, gains = _stacked(job_rows)
    value = values(np.maximum(gains, 0.0), weight[:, None], options)
    value[gains < 0] = -np.inf
    gated = np.array([row.gated for row in job_rows], dtype=np.bool_)
    more = sizes - np.array([[len(row.now)] for row in job_rows], dtype=np.int64).reshape(-1, 1)
    if supply.contended or not supply.idle:
        value[gated[:, None] & (more > 0)] = -np.inf
    if not supply.contended:
        value[gated[:, None] & (more < 0)] = -np.inf
    restart_factor = np.array([row.restart_factor for row in job_rows], dtype=np.float64)
    stopped = weight * (np.power(restart_factor, options.speedup_exponent) - 1.0)
    running = np.array([bool(row.now) for row in job_rows], dtype=np.bool_)
    stopped -= np.where(running, options.pause_margin * weight, 0.0)
    value[:, 0] = np.where(gated, -np.inf, stopped)
    return ValueTable(sizes=sizes, spans=spans, value=value, weight=weight)


def _weight(job_rows: Sequence[JobRow], now: Seconds, options: OnesOptions) -> FloatArray:
    return weights(
        np.array([row.remaining_s for row in job_rows], dtype=np.float64),
        np.array([row.table.gains[0] for row in job_rows], dtype=np.float64),
        np.array([_waited_s(row.job, now) for row in job_rows], dtype=np.float64),
        np.array([row.job.ran_s for row in job_rows], dtype=np.float64),
        options,
    ) * np.array([row.job.priority for row in job_rows], dtype=np.float64)


def _waited_s(job: JobView, now: Seconds) -> float:
    return job.waited_s + (0.0 if job.running_on else max(0.0, now - job.moved_at))


def _stacked(job_rows: Sequence[JobRow]) -> tuple[IntArray, IntArray, FloatArray]:
    """Slots, nodes and x(n) c(n) at each level, shape (J, 1 + L) each; -1 where there is none."""
    levels = 1 + max((len(row.table.sizes) for row in job_rows), default=0)
    sizes = np.zeros((len(job_rows), levels), dtype=np.int64)
    spans = np.zeros((len(job_rows), levels), dtype=np.int64)
    gains = np.full((len(job_rows), levels), -1.0)
    if job_rows:
        many = np.array([len(row.table.sizes) for row in job_rows], dtype=np.int64)
        there = np.zeros(sizes.shape, dtype=np.bool_)
        there[:, 1:] = np.arange(levels - 1) < many[:, None]
        sizes[there] = np.concatenate([row.table.sizes for row in job_rows])
        spans[there] = np.concatenate([row.table.nodes for row in job_rows])
        change = np.concatenate([row.change_factor for row in job_rows])
        gains[there] = np.concatenate([row.table.gains for row in job_rows]) * change
    return sizes, spans, gains
