"""How right policies were about when waiting jobs start."""

from __future__ import annotations

import numpy as np

from controlplane.sim.simulation_result import SimulationResult


def forecast_figures(result: SimulationResult) -> dict[str, float | int | None]:
    """What came of the first forecast of each counted job's first start.

    Returns:
        `start_forecasts`: how many there are of jobs that waited on after they were told and then
        started. `start_error_median`: the median of |expected - real| / real, of the waits from
        the forecast on. `start_coverage`: the share of starts, in [0, 1], within the interval
        that was told, which is meant to hold 80% of them. Both None without forecasts.
    """
    told = [
        (job.forecast, float(job.started_at))
        for job in result.jobs
        if job.counted
        and job.forecast is not None
        and job.started_at is not None
        and job.started_at > job.forecast.told_at
    ]
    if not told:
        return {"start_forecasts": 0, "start_error_median": None, "start_coverage": None}
    errors = [abs(f.at - came) / (came - f.told_at) for f, came in told]
    within = [f.earliest <= came <= f.latest for f, came in told]
    return {
        "start_forecasts": len(told),
        "start_error_median": float(np.median(errors)),
        "start_coverage": float(np.mean(within)),
    }
