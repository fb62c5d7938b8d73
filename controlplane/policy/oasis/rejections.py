"""Why a job is not admitted, and what would be: in words and numbers."""

from __future__ import annotations

import datetime as dt
import math
from typing import Final

import numpy as np

from controlplane.policy.api import JobView, Reason
from controlplane.policy.oasis.job_plans import JobPlans, in_time
from schemas.jobs import MAX_UTILITY, Utility

GONE: Final = 0.05  # share of its value below which it is said to be gone


def rejection(job: JobView, utility: Utility, plans: JobPlans, now: float) -> Reason:
    """The reason that its user reads.

    Args:
        job: as the view shows it; it is rejected.
        plans: that are all worth less than they cost.
        now: seconds on the controller's clock.
    """
    possible = np.isfinite(plans.cost)
    if not possible.any():
        horizon_s = float(plans.ends[-1]) - now
        words = f"no slots are left for it in the {_span(horizon_s)} that are planned ahead"
        return Reason("rejected", words, {"horizon_s": horizon_s})
    gone_at = job.submitted_at + gone_after_s(utility)
    last = in_time(plans, plans.worth(utility, job.submitted_at), gone_at)
    end, cost = float(plans.ends[last or 0]), float(plans.cost[last or 0])
    numbers = {"end": end, "cost": cost, "worth": utility.at(end - job.submitted_at)}
    if gone_at <= end:
        words = f"it would be done at {_clock(end, now)}, its value is gone by "
        words += _clock(gone_at, now)
        numbers["value_gone"] = gone_at
    else:
        words = f"it would be done at {_clock(end, now)}, which is worth {numbers['worth']:.3g}, "
        words += f"and others would pay {cost:.3g} for its slots"
    window_s = accepted_deadline_s(utility, plans, now)
    if window_s is not None:
        numbers["accepted_deadline_s"] = window_s
        words += f"; a window that would be accepted: deadline_s >= {window_s:.0f}"
    elif (value := accepted_value(utility, plans, now)) <= MAX_UTILITY:
        numbers["accepted_value"] = value
        words += f"; a value that would be accepted: value >= {value:.3g}"
    return Reason("rejected", words, numbers)


def gone_after_s(utility: Utility) -> float:
    """Seconds after its submission when nearly nothing of its value is left; may be infinite."""
    if utility.decay == 0.0 or not math.isfinite(utility.deadline_s):
        return math.inf
    return max(0.0, utility.deadline_s + math.log(1.0 / GONE - 1.0) / utility.decay)


def accepted_deadline_s(utility: Utility, plans: JobPlans, now: float) -> float | None:
    """The least deadline with which it would be admitted if it were submitted now.

    value / (1 + exp(decay (t - deadline))) > cost, solved for the deadline at each t.

    Args:
        utility: of the job, whose value and decay stay.
        now: seconds on the controller's clock.

    Returns:
        Whole seconds; None if no deadline would do.
    """
    pays = (plans.cost < utility.value) & np.isfinite(plans.cost)
    if not pays.any() or utility.decay == 0.0:
        return None
    cost = np.maximum(plans.cost[pays], 1e-12)
    needed = plans.ends[pays] - now - np.log((utility.value - cost) / cost) / utility.decay
    return float(max(1.0, math.floor(float(needed.min())) + 1.0))


def accepted_value(utility: Utility, plans: JobPlans, now: float) -> float:
    """The least value with which it would be admitted, with its deadline, if submitted now.

    Args:
        utility: of the job, whose deadline and decay stay.
        plans: of the job, of which at least one has a cost.
        now: seconds on the controller's clock.
    """
    shares = np.array(
        [
            Utility(value=1.0, deadline_s=utility.deadline_s, decay=utility.decay).at(
                float(end) - now
            )
            for end in plans.ends
        ]
    )
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        needed = np.where(np.isfinite(plans.cost), plans.cost / shares, np.inf)
    return float(np.nanmin(needed)) * 1.001


def _clock(at: float, now: float) -> str:
    """A moment of the day, UTC, with its date where that is not today's."""
    if not math.isfinite(at) or abs(at) > 1e11:  # noqa: PLR2004 - beyond the calendar
        return "never"
    moment, today = (dt.datetime.fromtimestamp(each, dt.UTC) for each in (at, now))
    days = "" if moment.date() == today.date() else f"{moment:%Y-%m-%d} "
    return f"{days}{moment:%H:%M:%S} UTC"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"  # noqa: PLR2004
