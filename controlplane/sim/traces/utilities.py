"""What jobs of a generated trace are worth to their users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from numpy.random import default_rng

from controlplane.sim.submissions import Trace, TraceJob
from schemas.jobs import Utility

VALUES: Final = (1.0, 100.0)  # theta_1
WINDOWS: Final = (1.5, 6.0)  # theta_3 over the time that a job takes by itself; a judgement
KINDS: Final = (0.10, 0.55, 0.35)  # shares of jobs: insensitive, sensitive, critical in time
DECAYS: Final = ((0.0, 0.0), (0.01, 1.0), (4.0, 6.0))  # theta_2, per time slot of the paper
WINDOW_SLOTS: Final = 8.0  # time slots of a deadline, the middle of the paper's 1 to 15
STREAM: Final = 5  # of a seed: those before it draw the trace itself


def with_utilities(trace: Trace, seed: int, own_s: Callable[[TraceJob], float]) -> Trace:
    """The same trace, with a utility for each job.

    OASiS (Bao et al., INFOCOM '18, section VI): values uniform in [1, 100]; a tenth of the jobs
    does not care when it is done, 55% do, with decays in [0.01, 1] for each time slot, and 35% are
    critical, with [4, 6]. Paper: deadlines are 1 to 15 time slots for all jobs. Here: 1.5 to 6
    times what the job takes by itself on the slots that its user asks for, and a time slot is an
    eighth of the deadline, because jobs last from a minute to a day.

    Args:
        own_s: seconds of a job by itself.
    """
    rng = default_rng((seed, STREAM))
    jobs = []
    for job in trace.jobs:
        value, window = rng.uniform(*VALUES), rng.uniform(*WINDOWS)
        kind, at = int(rng.choice(len(KINDS), p=KINDS)), rng.random()
        low, high = DECAYS[kind]
        deadline_s = window * own_s(job)
        decay = (low + at * (high - low)) * WINDOW_SLOTS / deadline_s
        utility = Utility(value=float(value), deadline_s=float(deadline_s), decay=float(decay))
        jobs.append(msgspec.structs.replace(job, utility=utility))
    return msgspec.structs.replace(trace, jobs=tuple(jobs))
