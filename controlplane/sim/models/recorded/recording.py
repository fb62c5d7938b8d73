"""A recording as a value: the cluster, what its families of jobs taught, and its submissions."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from controlplane.sim.simulated_cluster import NodeGroup
from controlplane.sim.submissions import Trace, TraceJob
from schemas.ids import Seconds
from schemas.jobs import JobSpec

LEAST: Final = 1e-9  # of what has to be positive
MOST: Final = 1e12  # of any number: 30,000 years in seconds
NEAR_END: Final = 1.0 - 1e-6  # share of its work at which a job that failed fails again

Positive = Annotated[float, msgspec.Meta(ge=LEAST, le=MOST)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0, le=MOST)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Some = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Ending = Literal["succeeded", "failed", "cancelled", "unfinished"]


class ChangeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of what changes took, order to outcome, in seconds; None: there was none."""

    start_s: NotNegative | None = None  # first start
    restart_s: NotNegative | None = None  # from a checkpoint
    join_s: NotNegative | None = None  # a change with newcomers, which trains on meanwhile
    switch_s: NotNegative | None = None  # one without: a batch, fewer slots


class EpochSpeed(msgspec.Struct, frozen=True, array_like=True):
    """What one whole epoch on one group achieved."""

    nodes: Some
    slots: Some
    batch: Some  # global, samples per step
    samples_per_s: Positive
    sync_s: NotNegative | None = None  # of a step, in the reduction; None: it was not told
    passes: Some | None = None  # of one worker in a step


class Epoch(msgspec.Struct, frozen=True, array_like=True):
    """What one epoch of a job reported."""

    number: Some
    batch: Some  # global, at its end
    noise_scale: Positive | None  # of the gradients, samples
    train_loss: float | None
    speed: EpochSpeed | None = None  # if one group did all of it
    lasted_s: Positive | None = None  # then also: from the end of the epoch before to its own


class Family(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="family"):
    """Jobs of one script and model, in the window or not."""

    name: Text
    speeds: tuple[EpochSpeed, ...]
    epoch_samples: Count  # ||D||, the largest
    took: ChangeTimes = ChangeTimes()
    finished: tuple[Some, ...] = ()  # samples that succeeded jobs processed
    furthest: Count = 0  # samples that any of them processed


class Submission(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="job"):
    """One job that was submitted in the window."""

    name: Text  # as the cluster called it
    at: NotNegative  # seconds after the first submission of the window
    user: Text
    family: Text
    spec: JobSpec  # without environment, arguments, paths
    ended: Ending
    ended_after_s: NotNegative | None  # after the submission; None: it had not ended
    samples: Count  # that it had processed
    stated_samples: Some | None  # that it was to process, if that does not depend on a metric
    epoch_samples: Some  # ||D||, its own or its family's
    epochs: tuple[Epoch, ...]  # the last thousand at most


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """All that a replay needs."""

    name: str
    nodes: tuple[NodeGroup, ...]  # when there were most slots in the window
    took: ChangeTimes  # over all families
    families: tuple[Family, ...]
    jobs: tuple[Submission, ...]
    left_out: dict[str, int]  # jobs of the window that cannot be replayed, by reason

    def as_trace(self) -> Trace:
        """The submissions; a job's workload is its own name, because its work is its own.

        A job that its user cancelled is cancelled after as long; one that failed fails at the end
        of what it had processed.
        """
        return Trace(name=self.name, jobs=tuple(_trace_job(job) for job in self.jobs))


def _trace_job(job: Submission) -> TraceJob:
    return TraceJob(
        name=job.name,
        at=Seconds(job.at),
        workload=job.name,
        slots=job.spec.wanted,
        batch=job.spec.batch_size,
        user=job.user,
        cancelled_after_s=job.ended_after_s if job.ended == "cancelled" else None,
        crashes_at=NEAR_END if job.ended == "failed" else None,
        samples=job.samples or None,
    )
