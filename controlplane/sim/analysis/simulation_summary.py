"""What a result amounts to: averages, tails, costs, and what they leave out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from controlplane.sim.analysis.fairness import fairness_figures
from controlplane.sim.analysis.forecast_calibration import forecast_figures
from controlplane.sim.analysis.loss_series import loss_figures
from controlplane.sim.simulation_result import JobResult, SimulationResult


def summary(result: SimulationResult) -> dict[str, Any]:
    """The figures of one simulation, as JSON can hold them; what there is not is None.

    Averages are over the finished jobs among the counted ones: those that came to an end which
    their user did not ask for. `unfinished`, `failed`, `cancelled` and `rejected` say how many of
    the counted jobs those averages lack, or (`failed`) hold although they came to nothing.

    Returns:
        Times in seconds, `decision_ms_*` in milliseconds. `jct_s` has an entry for each counted
        job, None where there is no completion time. `makespan_s`, from the first submission to
        the last end of all jobs, is None while a job is unfinished. `utilisation` is the share of
        the cluster's slot seconds that jobs held up to the last end. `vs_bound` is the average
        completion time over its lower bound, which has to be one of the counted jobs alone.
        `extrapolated_share` is the share of their training time, in [0, 1], in which a group was
        as fast as its model extrapolates it, because nothing like it was ever measured. `utility`
        is what the ends of the counted jobs were worth to their users, and `utility_share` that
        over what they could have been worth; None where nobody states a utility. `lateness_s` is
        the mean over all promised ends that came, of which those in time count as 0.
        What `ftf_*` and `start_*` say is in `fairness` and `forecast_calibration`.
        Where jobs have true losses, what `loss_series.loss_figures` says comes on top.
    """
    counted = [job for job in result.jobs if job.counted]
    average = _mean(_completions(counted))
    bound = result.bound_s
    return {
        "policy": result.policy,
        "options": result.options,
        "setting": result.setting,
        "seed": result.seed,
        "slots": result.slots,
        "jobs": len(counted),
        **_averages(counted),
        "p50_jct_s": _quantile(_completions(counted), 0.50),
        "p90_jct_s": _quantile(_completions(counted), 0.90),
        "p99_jct_s": _quantile(_completions(counted), 0.99),
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
        "failed": sum(job.state == "failed" for job in counted),
        "cancelled": sum(job.state == "cancelled" for job in counted),
        "rejected": sum(job.state == "rejected" for job in counted),
        **_ends(counted),
        "events": result.events,
        "wall_s": result.wall_s,
        "jct_s": {job.job: job.jct_s for job in counted},
        "per_application": {
            name: _of_application([job for job in counted if job.application == name])
            for name in sorted({job.application for job in counted})
        },
    }


def _ends(jobs: Sequence[JobResult]) -> dict[str, float | int | None]:
    """What ends were worth, and what became of those that were promised."""
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
    """The counted jobs that have a completion time."""
    return [job for job in result.jobs if job.counted and job.jct_s is not None]


def _averages(jobs: Sequence[JobResult]) -> dict[str, float | None]:
    done = [job for job in jobs if job.jct_s is not None]
    return {
        "avg_jct_s": _mean(_completions(jobs)),
        "geo_jct_s": _geometric_mean(_completions(jobs)),
        "avg_exec_s": _mean([job.exec_s for job in done]),
        "avg_queue_s": _mean([job.queued_s for job in done]),
        "rescales_per_job": _mean([job.rescales for job in done]),
        "extrapolated_share": _extrapolated_share(jobs),
    }


def _extrapolated_share(jobs: Sequence[JobResult]) -> float | None:
    trained_s = sum(job.trained_s for job in jobs)
    return sum(job.extrapolated_s for job in jobs) / trained_s if trained_s > 0.0 else None


def _of_application(jobs: Sequence[JobResult]) -> dict[str, float | None]:
    return {
        "jobs": len(jobs),
        "unfinished": sum(job.ended_at is None for job in jobs),
        **_averages(jobs),
    }


def _completions(jobs: Sequence[JobResult]) -> list[float]:
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
    """None too if one is 0, which has no logarithm."""
    if not values or min(values) <= 0.0:
        return None
    return float(np.exp(np.mean(np.log(values))))


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None
