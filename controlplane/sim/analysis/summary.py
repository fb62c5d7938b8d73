"""Figures of one result: averages, tails, fairness, forecasts of starts, utilities, losses.

Finish-time fairness rho (Themis, Mahajan et al., NSDI '20, section 3) is the time of a job in the
shared cluster, divided by its time in a private cluster of 1 / n of the size. Shockwave (Zheng et
al., NSDI '23, section 2): n is the mean number of active jobs during the job's life. A job with rho
above 1 is treated unfairly. Loss figures follow SLAQ section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from controlplane.prediction import FloatArray, IntArray
from controlplane.sim.results import JobResult, SimulationResult

GRID_S: Final = 1.0  # time between two moments of a series
TOLERANCE: Final = 1e-9  # tolerance of a share
GROUPS: Final = ("high", "medium", "low")  # groups of jobs by normalised loss
GROUP_BOUNDS: Final = (0.25, 0.5)  # shares of the jobs at which a group ends, highest loss first
LOSS_FIGURES: Final = (
    "t90_s", "t95_s", "mean_loss", "loss_area_s", "cores_high", "cores_medium", "cores_low",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LossSeries:
    """Losses and slots in one simulation, every `GRID_S` seconds from the first submission on.

    A job's normalised loss is 1 before its first iteration and 0 at its smallest loss.
    """

    times_s: FloatArray  # since the first submission, shape (T,)
    mean_loss: FloatArray  # over active jobs, shape (T,); nan without active jobs
    cores: FloatArray  # share of the used slots, by `GROUPS`, shape (T, 3); nan: no used slot
    window_s: tuple[float, float]  # the middle third of the submissions: 800 s of the paper's 2400


def has_losses(result: SimulationResult) -> bool:
    """Return whether the result contains true losses of its jobs."""
    return any(job.losses for job in result.jobs)


def loss_series(result: SimulationResult) -> LossSeries:
    """Return the mean normalised loss (SLAQ figure 4) and the slots by group (figure 3) over time.

    At each moment jobs are grouped by normalised loss: the highest 25%, the next 25%, the rest.
    """
    jobs = [job for job in result.jobs if job.losses]
    begin = min(job.submitted_at for job in jobs)
    last = max(job.submitted_at for job in jobs)
    moments = np.arange(begin, max(float(result.ended_at), last + GRID_S), GRID_S)
    loss = np.array([_steps(moments, [(p.at, p.share) for p in job.losses]) for job in jobs])
    slots = np.array([_steps(moments, [(p.at, float(p.slots)) for p in job.sizes]) for job in jobs])
    ends = [np.inf if job.ended_at is None else job.ended_at for job in jobs]
    active = np.array([
        (job.submitted_at <= moments) & (moments < end)
        for job, end in zip(jobs, ends, strict=True)
    ])  # fmt: skip
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
    """Return the seconds until the job's loss first fell by a share of its total fall, or None."""
    left = 1.0 - reduction + TOLERANCE
    return next((at - job.submitted_at for at, share in _loss_points(job) if share <= left), None)


def mean_time_to(result: SimulationResult, reduction: float) -> float | None:
    """Return the mean of `time_to` over the counted jobs that reached the reduction, or None."""
    took = [time_to(job, reduction) for job in result.jobs if job.counted and job.losses]
    known = [seconds for seconds in took if seconds is not None]
    return float(np.mean(known)) if known else None


def loss_figures(result: SimulationResult) -> dict[str, Any]:
    """Return the figures `LOSS_FIGURES` of one simulation, or {} if it has no true losses.

    Returns:
        `t90_s`, `t95_s`: mean seconds to 90 and 95% loss reduction (SLAQ figure 5).
        `mean_loss`: mean over active jobs in the middle third of the submissions (figure 4).
        `cores_*`: for each group of jobs, its mean share of the used slots in that third (fig. 3).
        `loss_area_s`: mean integral of an ended job's normalised loss. Unlike `mean_loss`, it does
        not fall if jobs run longer at a low loss.
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
    """Return the last value at each moment, which is 0 before the first point."""
    values = np.array([0.0, *(value for _, value in points)])
    return values[np.searchsorted([at for at, _ in points], moments, side="right")]


def _by_group(loss: FloatArray, slots: FloatArray, count: IntArray) -> FloatArray:
    """Return the share of used slots that each group has, highest losses first, shape (T, 3)."""
    order = np.argsort(-loss, axis=0, kind="stable")  # inactive jobs are last
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


def finish_time_fairness(result: SimulationResult) -> dict[str, float]:
    """Return rho, above 0, of each counted job that succeeded and has a known time alone.

    rho = completion time / (time alone x max(1, n w / S)). The user requested w slots, the cluster
    has S slots, and n is the mean number of jobs from submission to end, including the job itself
    and uncounted jobs. If the share of S / n slots is less than w, the job has w slots for a part
    of the time, as in Shockwave. If the share is more than w, the job needs only w slots.
    """
    contention = mean_contention(result)
    return {
        job.job: job.jct_s / (job.alone_s * max(1.0, jobs * job.wanted / result.slots))
        for job, jobs in zip(result.jobs, contention, strict=True)
        if job.counted and job.state == "succeeded" and job.alone_s and job.jct_s is not None
    }


def fairness_figures(result: SimulationResult) -> dict[str, float | None]:
    """Return mean and largest rho and the share of jobs with rho above 1; None without a rho."""
    found = np.array(list(finish_time_fairness(result).values()))
    if not len(found):
        return {"ftf_mean": None, "ftf_worst": None, "ftf_unfair_share": None}
    return {
        "ftf_mean": float(found.mean()),
        "ftf_worst": float(found.max()),
        "ftf_unfair_share": float((found > 1.0).mean()),
    }


def mean_contention(result: SimulationResult) -> FloatArray:
    """Return the mean number of jobs during the life of each job, shape (J,), at least 1."""
    begins = np.array([float(job.submitted_at) for job in result.jobs])
    ended = (result.ended_at if job.ended_at is None else job.ended_at for job in result.jobs)
    ends = np.array([float(at) for at in ended])
    if not len(begins):
        return begins
    return np.maximum(1.0, _means(begins, np.maximum(begins, ends)))


def _means(begins: FloatArray, ends: FloatArray) -> FloatArray:
    """Return, for each interval [begin, end), the mean number of intervals open during it."""
    times = np.unique(np.concatenate([begins, ends]))
    count = np.searchsorted(np.sort(begins), times, side="right")
    count = count - np.searchsorted(np.sort(ends), times, side="right")
    area = np.concatenate([[0.0], np.cumsum(count[:-1] * np.diff(times))])
    first, last = np.searchsorted(times, begins), np.searchsorted(times, ends)
    length = ends - begins
    alone = np.ones(len(length))
    return np.asarray(np.divide(area[last] - area[first], length, out=alone, where=length > 0.0))


def forecast_figures(result: SimulationResult) -> dict[str, float | int | None]:
    """Compare the first forecast of each counted job's first start with the actual start.

    Returns:
        `start_forecasts`: number of forecasts for jobs that were still waiting and started later.
        `start_error_median`: median of |expected - real| / real of the waits from the forecast on.
        `start_coverage`: share of starts inside the forecast interval, which should contain 80%.
    """
    forecasts = [
        (job.forecast, float(job.started_at))
        for job in result.jobs
        if job.counted
        and job.forecast is not None
        and job.started_at is not None
        and job.started_at > job.forecast.told_at
    ]
    if not forecasts:
        return {"start_forecasts": 0, "start_error_median": None, "start_coverage": None}
    errors = [abs(f.at - started) / (started - f.told_at) for f, started in forecasts]
    within = [f.earliest <= started <= f.latest for f, started in forecasts]
    return {
        "start_forecasts": len(forecasts),
        "start_error_median": float(np.median(errors)),
        "start_coverage": float(np.mean(within)),
    }


def summary(result: SimulationResult) -> dict[str, Any]:
    """Return the figures of one simulation as JSON values; missing figures are None.

    Averages are over the counted jobs with a completion time: jobs that ended, also failed ones,
    except rejected and cancelled jobs. Times are in seconds, shares in [0, 1]. `jct_s` has an entry
    for each counted job. `makespan_s` is the time from the first submission to the last end of all
    jobs, or None while a job is unfinished. `utilisation` is the share of the cluster's slot
    seconds that jobs used until the last end. `vs_bound` is the average completion time divided by
    its lower bound. `extrapolated_share` is the share of training time at an extrapolated speed.
    `utility` is the value of the counted jobs' ends to their users, `utility_share` its ratio to
    the largest possible value. `lateness_s` is the mean lateness over all promised ends that jobs
    reached; a job in time counts as 0. For the others see `fairness_figures`, `forecast_figures`
    and `loss_figures`.
    """
    counted = [job for job in result.jobs if job.counted]
    average = _mean(_completion_times(counted))
    bound = result.bound_s
    return {
        "policy": result.policy,
        "options": result.options,
        "setting": result.setting,
        "seed": result.seed,
        "slots": result.slots,
        "jobs": len(counted),
        **_averages(counted),
        **{f"p{q}_jct_s": _quantile(_completion_times(counted), q / 100) for q in (50, 90, 99)},
        "makespan_s": _makespan(result),
        "utilisation": _utilisation(result),
        "decision_ms_mean": _mean(result.decisions_ms),
        "decision_ms_p99": _quantile(result.decisions_ms, 0.99),
        "bound_avg_jct_s": bound,
        "vs_bound": average / bound if average is not None and bound else None,
        **fairness_figures(result),
        **forecast_figures(result),
        **loss_figures(result),
        "unfinished": sum(job.ended_at is None for job in counted),
        **{
            state: sum(job.state == state for job in counted)
            for state in ("failed", "cancelled", "rejected")
        },
        **_utility_figures(counted),
        "events": result.events,
        "wall_s": result.wall_s,
        "jct_s": {job.job: job.jct_s for job in counted},
        "per_application": {
            name: _of_application([job for job in counted if job.application == name])
            for name in sorted({job.application for job in counted})
        },
        **_by_group_of_jobs(counted),
    }


def _by_group_of_jobs(jobs: Sequence[JobResult]) -> dict[str, Any]:
    """Return figures for each kind of job and each project, if there are several."""
    found: dict[str, Any] = {}
    for field in ("kind", "project"):
        groups = sorted({getattr(job, field) for job in jobs})
        if len(groups) > 1:
            found[f"per_{field}"] = {
                name: _of_group([job for job in jobs if getattr(job, field) == name])
                for name in groups
            }
    return found


def _of_group(jobs: Sequence[JobResult]) -> dict[str, float | None]:
    waits = [job.started_at - job.submitted_at for job in jobs if job.started_at is not None]
    times = _completion_times(jobs)
    return {
        **_of_application(jobs),
        "p99_jct_s": _quantile(times, 0.99),
        "p99_wait_s": _quantile(waits, 0.99),
        "longest_wait_s": max(waits, default=None),
    }


def _utility_figures(jobs: Sequence[JobResult]) -> dict[str, float | int | None]:
    worth = [job.worth for job in jobs if job.worth is not None]
    most = sum(job.most_worth for job in jobs)
    late = [
        max(0.0, job.ended_at - job.promised_at)
        for job in jobs
        if job.promised_at is not None and job.ended_at is not None and job.state == "succeeded"
    ]
    return {
        "utility": sum(worth) if worth else None,
        "utility_share": sum(worth) / most if most > 0.0 else None,
        "promised": sum(job.promised_at is not None for job in jobs),
        "promises_kept": sum(each == 0.0 for each in late),
        "promises_broken": sum(each > 0.0 for each in late),
        "lateness_s": _mean(late),
    }


def finished(result: SimulationResult) -> list[JobResult]:
    """Return the counted jobs that have a completion time."""
    return [job for job in result.jobs if job.counted and job.jct_s is not None]


def _averages(jobs: Sequence[JobResult]) -> dict[str, float | None]:
    done = [job for job in jobs if job.jct_s is not None]
    trained_s = sum(job.trained_s for job in jobs)
    extrapolated_s = sum(job.extrapolated_s for job in jobs)
    return {
        "avg_jct_s": _mean(_completion_times(jobs)),
        "geo_jct_s": _geometric_mean(_completion_times(jobs)),
        "avg_exec_s": _mean([job.exec_s for job in done]),
        "avg_queue_s": _mean([job.queued_s for job in done]),
        "rescales_per_job": _mean([job.rescales for job in done]),
        "extrapolated_share": extrapolated_s / trained_s if trained_s > 0.0 else None,
    }


def _of_application(jobs: Sequence[JobResult]) -> dict[str, float | None]:
    return {
        "jobs": len(jobs),
        "unfinished": sum(job.ended_at is None for job in jobs),
        **_averages(jobs),
    }


def _completion_times(jobs: Sequence[JobResult]) -> list[float]:
    return [job.jct_s for job in jobs if job.jct_s is not None]


def _makespan(result: SimulationResult) -> float | None:
    ends = [job.ended_at for job in result.jobs if job.ended_at is not None]
    if not ends or len(ends) < len(result.jobs):
        return None
    return max(ends) - min(job.submitted_at for job in result.jobs)


def _utilisation(result: SimulationResult) -> float | None:
    if not result.jobs:
        return None
    span = result.ended_at - min(job.submitted_at for job in result.jobs)
    offered = result.slots * span
    return result.busy_slot_s / offered if offered > 0.0 else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _geometric_mean(values: Sequence[float]) -> float | None:
    if not values or min(values) <= 0.0:
        return None
    return float(np.exp(np.mean(np.log(values))))


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None
