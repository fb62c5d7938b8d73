"""What a simulation leaves: what became of every job, and what the cluster did.

What is submitted when: the input of a simulation.
"""

from __future__ import annotations

import msgspec

from schemas.ids import Seconds
from schemas.jobs import Utility


class SlotAllocation(msgspec.Struct, frozen=True, array_like=True):
    """A job held a slot for a while."""

    slot: str
    since: Seconds
    until: Seconds


class LossLeft(msgspec.Struct, frozen=True, array_like=True):
    """How far a job's loss was from its end."""

    at: Seconds
    share: float  # of all that it falls: 1 at first, 0 at its smallest


class SizeChange(msgspec.Struct, frozen=True, array_like=True):
    """A job held so many slots from now on."""

    at: Seconds
    slots: int


class StartForecast(msgspec.Struct, frozen=True, array_like=True):
    """When a policy first expected a waiting job to start."""

    told_at: Seconds
    at: Seconds
    earliest: Seconds  # with `latest`: four of five starts shall lie between them
    latest: Seconds


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """One job from submission to end."""

    job: str  # as the trace calls it
    application: str
    submitted_at: Seconds
    started_at: Seconds | None  # first slots; None: never
    ended_at: Seconds | None  # None: still there when the simulation stopped
    state: str  # succeeded, failed, cancelled, rejected; else where it stood
    queued_s: float  # without slots
    exec_s: float  # with slots
    slot_s: float  # slots held times seconds
    rescales: int
    batch_changes: int
    trained_s: float = 0.0  # without waits, starts and stalls
    extrapolated_s: float = 0.0  # of that, at speeds that nobody measured
    worth: float | None = None  # that its end was, to its user; None: nothing was stated
    most_worth: float = 0.0  # that it could have been
    promised_at: Seconds | None = None  # by when its policy first promised its end; None: never
    counted: bool = True  # in averages; warm-up jobs are not
    wanted: int = 1  # slots that its user asked for
    alone_s: float | None = None  # start and training alone on these; None: not known
    forecast: StartForecast | None = None  # None: its policy never said when it will start
    allocations: tuple[SlotAllocation, ...] = ()  # if they were recorded
    losses: tuple[LossLeft, ...] = ()  # from its submission on, if its model has true losses
    sizes: tuple[SizeChange, ...] = ()  # the same

    @property
    def jct_s(self) -> float | None:
        """Completion time; None if it was cancelled or rejected, or never came to an end."""
        if self.ended_at is None or self.state in {"cancelled", "rejected"}:
            return None
        return self.ended_at - self.submitted_at


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation: a policy on a trace on a cluster."""

    policy: str
    options: dict[str, object]  # of the policy, that were given
    setting: dict[str, object]  # model, trace, cluster, costs, knowledge: everything else
    seed: int
    slots: int  # of the cluster
    jobs: tuple[JobResult, ...]
    ended_at: Seconds  # of the last job
    busy_slot_s: float  # slots held times seconds
    decisions_ms: tuple[float, ...]  # real time that each answer of the policy took
    events: int  # that the core handled
    wall_s: float  # real time of the whole simulation
    bound_s: float | None = None  # no schedule has a smaller average completion time (fluid SRPT)
    cell: str = ""  # of the experiment that it is a result of: `experiment.cell_key`


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
