"""Finish-time fairness: how long jobs took, over what their share of the cluster would have taken.

Themis (Mahajan et al., NSDI '20, section 3): rho is the time that a job takes in the shared cluster
over the time that it would take in a cluster of its own of 1 / n of the size. Shockwave (Zheng et
al., NSDI '23, section 2): n is the mean number of jobs that are there over its life, a job above 1
is treated unfairly, and the largest rho of all jobs is how badly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controlplane.sim.simulation_result import JobResult, SimulationResult

FloatArray = NDArray[np.float64]


def finish_time_fairness(result: SimulationResult) -> dict[str, float]:
    """Rho of each counted job that succeeded and whose time alone is known.

    rho = completion time / (time alone x max(1, n w / S)), with w the slots that its user asked
    for, S those of the cluster and n the mean number of jobs from its submission to its end,
    itself and uncounted ones too. Where a share of S / n slots is less than w, the job has its w
    slots for that part of the time, as in Shockwave; where it is more, it needs no more than w.

    Returns:
        Job -> rho, above 0; at most 1: it was done no later than with its share.
    """
    there = mean_contention(result)
    return {
        job.job: job.jct_s / (job.alone_s * max(1.0, jobs * job.wanted / result.slots))
        for job, jobs in zip(result.jobs, there, strict=True)
        if job.counted and job.state == "succeeded" and job.alone_s and job.jct_s is not None
    }


def fairness_figures(result: SimulationResult) -> dict[str, float | None]:
    """Finish-time fairness in three figures; None where no job has one.

    Returns:
        `ftf_mean` and `ftf_worst` of `finish_time_fairness`, and `ftf_unfair_share`: the share of
        these jobs, in [0, 1], that are above 1.
    """
    found = np.array(list(finish_time_fairness(result).values()))
    if not len(found):
        return {"ftf_mean": None, "ftf_worst": None, "ftf_unfair_share": None}
    return {
        "ftf_mean": float(found.mean()),
        "ftf_worst": float(found.max()),
        "ftf_unfair_share": float((found > 1.0).mean()),
    }


def mean_contention(result: SimulationResult) -> FloatArray:
    """How many jobs there were, on average over the life of each, itself among them.

    Args:
        result: of one simulation; a job that did not end is there up to its last moment.

    Returns:
        Shape (J,), at least 1.
    """
    begins = np.array([float(job.submitted_at) for job in result.jobs])
    ends = np.array([_left_at(job, result) for job in result.jobs])
    if not len(begins):
        return begins
    return np.maximum(1.0, _means(begins, np.maximum(begins, ends)))


def _left_at(job: JobResult, result: SimulationResult) -> float:
    return float(result.ended_at if job.ended_at is None else job.ended_at)


def _means(begins: FloatArray, ends: FloatArray) -> FloatArray:
    """Mean number of the intervals [begin, end) over each of them."""
    times = np.unique(np.concatenate([begins, ends]))
    count = np.searchsorted(np.sort(begins), times, side="right")
    count = count - np.searchsorted(np.sort(ends), times, side="right")
    area = np.concatenate([[0.0], np.cumsum(count[:-1] * np.diff(times))])
    first, last = np.searchsorted(times, begins), np.searchsorted(times, ends)
    length = ends - begins
    means = np.divide(
        area[last] - area[first], length, out=np.ones(len(length)), where=length > 0.0
    )
    return np.asarray(means, dtype=np.float64)
