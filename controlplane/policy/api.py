"""Interface of scheduling policies: views, policy events, plans and the protocol itself.

`ImmediatePolicy` is the base of policies that do not search.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from schemas.epochs import StepTimes
from schemas.ids import JobId, NodeId, Seconds, SlotId
from schemas.jobs import StopRule, Utility
from schemas.wire.client import NodeCrowd

if TYPE_CHECKING:
    from numpy.random import Generator


# --- views


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """Slot of a node that is not lost.

    A slot that is neither usable nor leaving is occupied by a job of the view, or by a process that
    no policy can move.
    """

    slot: SlotId
    node: NodeId
    kind: str  # "gpu" or "cpu"
    model: str = ""  # GPU model, as named by the driver
    usable: bool  # its node is up and no process runs on the slot
    up: bool = True  # its node is up; if False, the job on the slot cannot hand the slot over
    leaving: bool = False  # its process is exiting, and the slot is not reserved for a job
    cores: int = 0  # cores of the node, shared by all its CPU slots; 0: a GPU slot
    host_cores: int = 0  # cores of the node, for GPU and CPU slots; 0: unknown


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """Active job as its reports describe it; contains no ground truth of a simulator."""

    job: JobId
    submitted_at: Seconds
    batch_size: int  # global, as submitted, samples per step
    batch_limit: int  # R: largest global batch that the user, or data and noise, allow; samples
    local_limit: int  # largest batch of one slot, samples per step
    least: int  # minimum slots
    most: int
    wanted: int
    priority: float = 1.0  # weight relative to other jobs
    family: str = ""  # jobs of the same script and model
    account: str = ""  # PROJECT/USER of the job, for the division of slots
    running_on: Mapping[SlotId, int] = {}  # slot -> local batch, of the current or pending group
    movable: bool = True  # False: it is starting, changing or ending; a plan keeps it unchanged
    ready_at: Seconds = Seconds(0.0)  # earliest time of a start
    retry_at: Seconds = Seconds(0.0)  # earliest time of the next change after a failed change
    moved_at: Seconds = Seconds(0.0)  # when the job began to train in the current group, or to wait
    placed_at: Seconds = Seconds(0.0)  # since when the job has had the same slots, or no slots
    epoch: int = 0  # number of finished epochs
    epoch_at: Seconds = Seconds(0.0)  # time of the last epoch's report
    epoch_samples: int = 0  # ||D||, minus the samples that the last epoch left out
    samples_done: int = 0  # Y_processed
    samples_per_s: float = 0.0  # X_j
    stop_samples: int | None = None  # total work, as stated by the user; None: not fixed
    stop: StopRule | None = None  # stop rule of the job file; None: the script decides
    noise_scale: float | None = None  # of the gradients, samples; None: not reported
    last_batch: int = 0  # global, of the current or last group; 0: never trained
    ran_s: float = 0.0  # time with slots, up to `moved_at`
    slot_s: float = 0.0  # attained service: slots times seconds, up to `moved_at`
    waited_s: float = 0.0  # time without slots, up to `moved_at`
    start_s: float | None = None  # duration of the last start; None: never started
    utility: Utility | None = None  # value of the job by completion time, as stated
    promised_at: Seconds | None = None  # first completion time that a policy promised
    expected_at: Seconds | None = None  # latest forecast of the completion time

    @property
    def undecided(self) -> bool:
        """True if the job states its utility, never started, and has no promised end yet."""
        begun = self.running_on or self.last_batch or self.samples_done
        return self.utility is not None and self.promised_at is None and not begun

    def served(self, now: Seconds) -> float:
        """Return the slot seconds that the job has attained up to `now`."""
        return self.slot_s + max(0.0, now - self.moved_at) * len(self.running_on)


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable snapshot of the cluster."""

    version: int  # version of the core's state
    slots: tuple[SlotView, ...]
    jobs: Mapping[JobId, JobView]


# --- policy events


class EpochSeen(msgspec.Struct, frozen=True, kw_only=True, tag="epoch"):
    """A job finished an epoch; the journal replays this event when the search process restarts."""

    job: JobId
    family: str
    slots: int  # slots of the group when it reported
    nodes: int
    global_batch: int  # samples per step
    samples_per_s: float  # X_j, mean over the epoch
    whole: bool  # one group trained the whole epoch
    epoch: int = 0  # the finished epoch, 1-based
    samples_done: int = 0  # samples since the job started; 0: unknown
    train_loss: float | None = None
    stop_metric: float | None = None  # value for the stop rule; None: the rule has no metric
    noise_scale: float | None = None  # of the gradients, samples; as reported, not smoothed
    beside: tuple[NodeCrowd, ...] | None = None  # jobs on each of its nodes; None: not constant
    step_times: StepTimes | None = None  # mean over the epoch; None: not reported


class StepsSeen(msgspec.Struct, frozen=True, kw_only=True, tag="steps"):
    """Telemetry of a job, sent about once per second; some reports may be missing."""

    job: JobId
    family: str
    group: int  # version of the group
    slots: int
    nodes: int
    global_batch: int
    step: int
    samples_done: int
    samples_per_s: float = 0.0  # by the worker's clock, within this group; 0: not measured yet
    noise_scale: float | None = None  # of the gradients, samples; latest; None: not measured yet
    train_loss: float | None = None  # mean over the running epoch so far; None: not reported
    cpu_cores: float | None = None  # used by the first worker, recent mean; None: not reported
    sent_bytes_per_s: float | None = None  # gradients sent by this worker, recent mean
    # Steps of this group with this batch. The figures are means of the latest of these steps, so
    # even the first report is valid.
    group_steps: int = 0
    step_times: StepTimes | None = None  # recent mean; None: not reported


class JobEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """End of a job; its work and service improve the predictions for its family."""

    job: JobId
    family: str
    samples_done: int
    succeeded: bool
    slot_s: float = 0.0  # attained service, slots times seconds


class PlanTaken(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """A plan of this policy was accepted."""

    waiting: tuple[JobId, ...]  # jobs that the plan left without slots
    slots: Mapping[JobId, tuple[SlotId, ...]] = {}  # target slots of the jobs that the plan changes


PolicyEvent = EpochSeen | StepsSeen | JobEnded | PlanTaken


# --- plans and policies


class Reason(msgspec.Struct, frozen=True):
    """Reason for a decision about a job: a stable code, a text, and the numbers behind it."""

    code: str
    text: str
    numbers: dict[str, float] = {}


class StartForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Expected start of a waiting job, with an 80% prediction interval."""

    at: Seconds
    earliest: Seconds
    latest: Seconds


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Local batch sizes b_j^i of every job that should run (ONES eq. 1).

    A job that is absent or has no slots should wait. `reasons` has an entry for every job that
    changes or waits. The reason for a rejection is in `rejected`.
    """

    based_on: int
    local_batch: Mapping[JobId, Mapping[SlotId, int]] = {}
    reasons: dict[JobId, Reason] = {}
    restart: tuple[JobId, ...] = ()  # jobs to stop and start again if their slots change
    wake_at: Seconds | None = None  # when to request the next plan, even without events
    rejected: Mapping[JobId, Reason] = {}  # jobs that never start: they end with this reason
    promised: Mapping[JobId, Seconds] = {}  # completion times promised to admitted jobs
    predicted_loss: Mapping[JobId, float] = {}  # loss that is soon expected; for display
    starts: Mapping[JobId, StartForecast] = {}  # expected starts of waiting jobs; for display

    @property
    def empty(self) -> bool:
        """True if the plan decides about no job; an empty difference of plans needs no action."""
        return not (self.local_batch or self.rejected or self.promised)


class SearchStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a search; zeros for a policy that does not search."""

    generations: int = 0  # since the search started
    best_fitness: float = 0.0
    mean_fitness: float = 0.0
    spread: tuple[float, ...] = ()  # fitness at 0, 25, 50, 75 and 100% of the population
    incumbent_fitness: float = 0.0  # fitness of the schedule in force, on the same scale
    diversity: float = 0.0  # mean share of jobs in which two candidates differ, 0 to 1
    decision_ms: float = 0.0  # duration of the last decision
    view_ms: float = 0.0  # time to make the view that its request sent; 0: no request
    improve_ms: float = 0.0  # time of the search since the plan before; 0: the plan was requested
    check_ms: float = 0.0  # time to compare the plan with the current state
    length_predictions: int = 0  # number of predictions of remaining work that could be checked
    length_error: float | None = None  # their median error, as a share of the remaining work
    length_coverage_80: float | None = None  # share of results within the 80% interval
    length_coverage_90: float | None = None  # the same for the 90% interval

    def in_ms(self, took_s: float, improve_s: float = 0.0) -> SearchStats:
        """Return a copy in which the last decision took `took_s` seconds, after a search."""
        return msgspec.structs.replace(
            self, decision_ms=took_s * 1000.0, improve_ms=improve_s * 1000.0, view_ms=0.0
        )


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Limit of a search, as an amount of work, so that the limit is the same on every machine."""

    generations: int = 0
    steps: int = 0  # steps, i.e. parts of a generation, for responsive callers


class Oracle(Protocol):
    """Ground truth that no cluster knows; a simulator offers it to policies for comparison."""

    def remaining_s(self, job: JobView, slots: int) -> float:
        """Return the remaining training seconds with the first batch on slots close together."""
        ...

    def remaining_steps(self, job: JobView) -> float:
        """Return the remaining steps at the first batch, computed as in published simulators."""
        ...

    def step_s(self, job: JobView, slots: int) -> float:
        """Return the seconds of one step at the first batch, on slots close together."""
        ...

    def speed_share(
        self,
        job: JobId,
        layouts: Mapping[JobId, Mapping[NodeId, int]],
        on: Mapping[NodeId, Mapping[JobId, int]],
    ) -> float:
        """Return a job's speed in these layouts over its speed alone on close slots, in (0, 1].

        Args:
            layouts: assumed workers of every job on each of its nodes.
            on: for each node of the job, the assumed workers of every job there, this job too.
        """
        ...


class Policy(Protocol):
    """Decides which jobs run, on which slots, and with which batch sizes.

    `now` is in seconds on the controller's clock in all methods.
    """

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Record an event."""
        ...

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Search within `budget`; return True if more search could help. Only `rng` is random."""
        ...

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the best complete plan so far for `view`, without changing the policy's state.

        The plan names every job that should run and is `based_on` the version of `view`.
        """
        ...

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        """Return a plan with new batch sizes on the slots that jobs already have.

        Planners that request complete plans rarely or in rounds use this method, because a new
        batch alone does not stall a job. The method must not change state, except for the record of
        what was already learnt. Jobs that the plan does not name continue unchanged.
        """
        return Plan(based_on=view.version)

    def stats(self) -> SearchStats:
        """Return the statistics of the search."""
        ...


class ImmediatePolicy(Policy):
    """Base of policies that decide in `plan` without a search; a subclass can learn from events."""

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Ignore the event; a subclass that learns from events overrides this."""

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Return False, because there is nothing to search for."""
        return False

    def stats(self) -> SearchStats:
        """Return zeros, because there is no search."""
        return SearchStats()
