"""What is submitted when: the input of a simulation."""

from __future__ import annotations

import msgspec

from schemas.ids import Seconds
from schemas.jobs import Utility


class TraceJob(msgspec.Struct, frozen=True, kw_only=True):
    """One submission."""

    name: str  # unique in its trace; a job's name in results
    at: Seconds  # when it is submitted
    workload: str  # what it trains: an application of the profiles, a row of Table 2, a family
    slots: int  # that its user asks for
    batch: int = 0  # global batch that its user tuned for them, samples; 0: the workload's own
    user: str = "trace"
    cancelled_after_s: float | None = None  # its user gives up so long after the submission
    crashes_at: float | None = None  # share of its work, in (0, 1), where its script fails once
    samples: int | None = None  # a recorded job's work; None: what the workload takes
    utility: Utility | None = None  # what its end is worth, if its user says so


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Submissions in order of time."""

    name: str
    jobs: tuple[TraceJob, ...]
