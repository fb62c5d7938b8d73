"""Input and output of a simulation: the submitted jobs, and the result of each job."""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.ids import Seconds
from schemas.jobs import Utility


class SlotAllocation(msgspec.Struct, frozen=True, array_like=True):
    """Interval in which a job used a slot."""

    slot: str
    since: Seconds
    until: Seconds


class LossLeft(msgspec.Struct, frozen=True, array_like=True):
    """The share of a job's total loss reduction that remains at a moment."""

    at: Seconds
    share: float  # 1 before the first epoch, 0 at the smallest loss


class SizeChange(msgspec.Struct, frozen=True, array_like=True):
    """Number of slots that a job uses from a moment on."""

    at: Seconds
    slots: int


class StartForecast(msgspec.Struct, frozen=True, array_like=True):
    """First forecast that a policy made of a waiting job's start."""

    told_at: Seconds
    at: Seconds
    earliest: Seconds  # 80% of starts should lie between this time and `latest`
    latest: Seconds


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one job."""

    job: str  # name in the trace
    application: str
    submitted_at: Seconds
    started_at: Seconds | None  # when it first got slots; None: never
    ended_at: Seconds | None  # None: not ended when the simulation stopped
    state: str  # succeeded, failed, cancelled or rejected; the last phase if not ended
    queued_s: float  # time without slots
    exec_s: float  # time with slots
    slot_s: float  # number of slots times seconds, summed over time
    rescales: int
    batch_changes: int
    trained_s: float = 0.0  # time of training, without waits, starts and stalls
    extrapolated_s: float = 0.0  # part of `trained_s` at extrapolated speeds
    worth: float | None = None  # value of the completed job to its user; None: not stated
    most_worth: float = 0.0  # largest possible value of `worth`
    promised_at: Seconds | None = None  # first promised completion time; None: no promise
    counted: bool = True  # True if averages include the job; False for warm-up jobs
    kind: str = "elastic"  # elastic or torchrun
    project: str = ""  # of the user who submitted it
    wanted: int = 1  # slots requested by the user
    alone_s: float | None = None  # start and training alone on `wanted` slots; None: unknown
    forecast: StartForecast | None = None  # None: the policy made none
    allocations: tuple[SlotAllocation, ...] = ()  # empty if not recorded
    losses: tuple[LossLeft, ...] = ()  # from submission on, if the model has true losses
    sizes: tuple[SizeChange, ...] = ()  # from submission on, if the model has true losses

    @property
    def jct_s(self) -> float | None:
        """Seconds from submission to end, or None for cancelled, rejected and unfinished jobs."""
        if self.ended_at is None or self.state in {"cancelled", "rejected"}:
            return None
        return self.ended_at - self.submitted_at


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one simulation, which runs one policy on one trace and one cluster."""

    policy: str
    options: dict[str, object]  # options given to the policy
    setting: dict[str, object]  # model, trace, cluster, costs, knowledge
    seed: int
    slots: int  # number of slots of the cluster
    jobs: tuple[JobResult, ...]
    ended_at: Seconds  # end of the last job
    busy_slot_s: float  # slot seconds that all jobs used
    decisions_ms: tuple[float, ...]  # real time that each plan took
    events: int  # number of events that the core handled
    wall_s: float  # real time of the whole simulation
    bound_s: float | None = None  # lower bound of the average completion time (fluid SRPT)
    cell: str = ""  # key of the experiment's cell: `experiment.cell_key`


class TraceJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job of a trace, as a user submits it."""

    name: str  # unique in the trace; name of the job in results
    at: Seconds  # time of the submission
    workload: str  # application of the profiles, row of Table 2, or family
    slots: int  # requested by the user
    batch: int = 0  # global batch tuned by the user for `slots`, samples; 0: the workload's own
    user: str = "trace"
    project: str = ""  # empty: the user's own project
    kind: Literal["elastic", "torchrun"] = "elastic"  # torchrun: a program on exactly `slots`
    max_run_s: float | None = None  # time limit of a program; None: none
    cancelled_after_s: float | None = None  # time from submission to cancellation by the user
    crashes_at: float | None = None  # share of the work, in (0, 1), at which the script fails once
    samples: int | None = None  # work of a recorded job; None: the workload's own
    utility: Utility | None = None  # value of the job by completion time, if stated by the user


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs in order of their submission."""

    name: str
    jobs: tuple[TraceJob, ...]
