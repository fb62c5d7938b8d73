"""Losses of a simulation's jobs over time, and the slots they held meanwhile (SLAQ section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controlplane.sim.results import JobResult, SimulationResult

FloatArray = NDArray[np.float64]

GRID_S: Final = 1.0  # distance of the moments
TOLERANCE: Final = 1e-9  # tolerance of a share
GROUPS: Final = ("high", "medium", "low")  # by normalised loss
GROUP_BOUNDS: Final = (0.25, 0.5)  # shares of the jobs where a group ends, highest loss first
LOSS_FIGURES: Final = (
    "t90_s", "t95_s", "mean_loss", "loss_area_s", "cores_high", "cores_medium", "cores_low",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LossSeries:
    """Moments of one simulation, every `GRID_S` seconds from the first submission on.

    A job's normalised loss is 1 before its first iteration and 0 at its smallest loss.
    """

    times_s: FloatArray  # since the first submission, shape (T,)
    mean_loss: FloatArray  # over active jobs, shape (T,); nan without one
    cores: (
        FloatArray  # share of the slots in use of each of `GROUPS`, shape (T, 3); nan: none in use
    )
    window_s: tuple[float, float]  # the middle third of the submissions: 800 s of the paper's 2400


def has_losses(result: SimulationResult) -> bool:
    """Return whether the result's jobs have true losses."""
    return any(job.losses for job in result.jobs)


def loss_series(result: SimulationResult) -> LossSeries:
    """Return mean normalised loss (SLAQ figure 4) and slots by group of jobs (figure 3) over time.

    At each moment jobs are sorted by normalised loss: the highest 25%, the next 25%, the rest.
    """
    jobs = [job for job in result.jobs if job.losses]
    begin = min(job.submitted_at for job in jobs)
    last = max(job.submitted_at for job in jobs)
    moments = np.arange(begin, max(float(result.ended_at), last + GRID_S), GRID_S)
    loss = np.array([_steps(moments, [(p.at, p.share) for p in job.losses]) for job in jobs])
    slots = np.array([_steps(moments, [(p.at, float(p.slots)) for p in job.sizes]) for job in jobs])
    active = np.array([_is_active(moments, job) for job in jobs])
    count = active.sum(axis=0)
    total = np.where(active, loss, 0.0).sum(axis=0)
    third = (last - begin) / 3.0
    return LossSeries(
        times_s=moments - begin,
        mean_loss=np.where(count > 0, total / np.maximum(count, 1), np.nan),
        cores=_by_group(np.where(active, loss, -np.inf), np.where(active, slots, 0.0), count),
        window_s=(third, 2.0 * third),
    )


def time_to(job: JobResult, reduction: float) -> float | None:
    """Return the seconds from submission until the loss had first fallen by `reduction`.

    `reduction` is a share of the total fall, in [0, 1]. Return None if the job never got there.
    """
    left = 1.0 - reduction + TOLERANCE
    return next((at - job.submitted_at for at, share in _loss_points(job) if share <= left), None)


def mean_time_to(result: SimulationResult, reduction: float) -> float | None:
    """Return the mean of `time_to` over the counted jobs that reached it, or None if none did."""
    took = [time_to(job, reduction) for job in result.jobs if job.counted and job.losses]
    known = [seconds for seconds in took if seconds is not None]
    return float(np.mean(known)) if known else None


def loss_figures(result: SimulationResult) -> dict[str, Any]:
    """Return the figures `LOSS_FIGURES` of one simulation; empty if its jobs have no true losses.

    Returns:
        `t90_s`, `t95_s`: mean seconds to 90 and 95% loss reduction (SLAQ figure 5).
        `mean_loss`: mean over active jobs in the middle third of the submissions (figure 4).
        `cores_*`: share of the slots in use that each group of jobs holds in that period
        (figure 3). `loss_area_s`: integral of a job's normalised loss from submission to end,
        mean over ended jobs; unlike `mean_loss` it does not fall when jobs stay longer with
        little left to learn.
    """
    if not has_losses(result):
        return {}
    series = loss_series(result)
    first, last = series.window_s
    inside = (series.times_s >= first) & (series.times_s < last)
    areas = [_loss_area(job) for job in result.jobs if job.counted and job.losses and job.ended_at]
    shares = _mean_where_known(series.cores[inside])
    return {
        "t90_s": mean_time_to(result, 0.90),
        "t95_s": mean_time_to(result, 0.95),
        "mean_loss": _mean_where_known(series.mean_loss[inside, None])[0],
        "loss_area_s": float(np.mean(areas)) if areas else None,
        **{f"cores_{name}": share for name, share in zip(GROUPS, shares, strict=True)},
    }


def _steps(moments: FloatArray, points: list[tuple[float, float]]) -> FloatArray:
    """Return the last value at each moment; 0 before the first."""
    values = np.array([0.0, *(value for _, value in points)])
    return values[np.searchsorted([at for at, _ in points], moments, side="right")]


def _is_active(moments: FloatArray, job: JobResult) -> NDArray[np.bool_]:
    end = np.inf if job.ended_at is None else job.ended_at
    return (moments >= job.submitted_at) & (moments < end)


def _by_group(loss: FloatArray, slots: FloatArray, count: NDArray[np.int64]) -> FloatArray:
    """Return the share of the slots in use of each group, highest losses first; shape (T, 3)."""
    order = np.argsort(-loss, axis=0, kind="stable")  # inactive jobs come last
    held = np.take_along_axis(slots, order, axis=0)
    place = (np.arange(len(loss))[:, None] + 0.5) / np.maximum(count, 1)
    group = np.searchsorted(GROUP_BOUNDS, place, side="right")
    sums = np.array([np.where(group == g, held, 0.0).sum(axis=0) for g in range(len(GROUPS))]).T
    total = sums.sum(axis=1, keepdims=True)
    return np.where(total > 0.0, sums / np.maximum(total, 1.0), np.nan)


def _loss_area(job: JobResult) -> float:
    points = _loss_points(job)
    ends = [at for at, _ in points[1:]] + [float(job.ended_at or points[-1][0])]
    return sum(share * (end - at) for (at, share), end in zip(points, ends, strict=True))


def _loss_points(job: JobResult) -> list[tuple[float, float]]:
    return [(float(point.at), point.share) for point in job.losses]


def _mean_where_known(values: FloatArray) -> list[float | None]:
    columns = [column[np.isfinite(column)] for column in values.T]
    return [float(column.mean()) if len(column) else None for column in columns]
