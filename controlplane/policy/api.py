"""What a scheduling policy sees and learns, and what it answers.

What policies that do not search have in common: they learn nothing, and never think.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from schemas.ids import JobId, NodeId, Seconds, SlotId
from schemas.jobs import StopRule, Utility
from schemas.wire.client import NodeCrowd

if TYPE_CHECKING:
    from numpy.random import Generator


# --- what it sees


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of a node that is not lost.

    A slot that is neither usable nor leaving belongs to a job in the view, or to nobody that a
    policy may move.
    """

    slot: SlotId
    node: NodeId
    kind: str  # "gpu" or "cpu"
    model: str = ""  # of the GPU, as its driver names it
    usable: bool  # its node is up and no process is on it
    up: bool = True  # its node is; else whoever is on it cannot hand it on
    leaving: bool = False  # its process is on its way out, and the slot is reserved for nobody
    cores: int = 0  # of its node, which all its CPU slots share; 0: it computes elsewhere (a GPU)
    host_cores: int = 0  # of its node, whatever computes; 0: not known


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One active job as a policy may see it: reports so far, never a simulator's truth."""

    job: JobId
    submitted_at: Seconds
    batch_size: int  # global, as submitted, samples per step
    batch_limit: int  # largest global batch that the user, or data and noise, allow; samples
    local_limit: int  # largest batch of one slot, samples per step
    least: int  # slots
    most: int
    wanted: int
    priority: float = 1.0  # weight beside other jobs
    family: str = ""  # jobs of the same script and model
    running_on: Mapping[SlotId, int] = {}  # slot -> local batch, of the group it has or is getting
    movable: bool = True  # False: it starts, changes or ends just now; a plan keeps it as it is
    ready_at: Seconds = Seconds(0.0)  # not to be started before
    retry_at: Seconds = Seconds(0.0)  # not to be changed before: the last try came to nothing
    moved_at: Seconds = Seconds(0.0)  # since when it trains in its group, or waits
    placed_at: Seconds = Seconds(0.0)  # since when it has these slots, or none, whatever its batch
    epoch: int = 0  # finished
    epoch_at: Seconds = Seconds(0.0)  # when the last one was reported
    epoch_samples: int = 0  # ||D||, less what the last epoch left out of it
    samples_done: int = 0  # Y_processed
    samples_per_s: float = 0.0  # X_j
    stop_samples: int | None = None  # stated work since the job began; None: it depends
    stop: StopRule | None = None  # the job file's; None: the script's own
    noise_scale: float | None = None  # of its gradients, samples; None: it reports none
    noise_epochs: int = 0  # that measured it
    last_batch: int = 0  # global, of its present or last group; 0: never trained
    ran_s: float = 0.0  # with slots, up to `moved_at`
    slot_s: float = 0.0  # attained service: slots times seconds, up to `moved_at`
    waited_s: float = 0.0  # without, up to `moved_at`
    start_s: float | None = None  # what its last start took; None: never started
    utility: Utility | None = None  # of its end, as its user stated it
    promised_at: Seconds | None = None  # by when a policy first promised that it will be done
    expected_at: Seconds | None = None  # what a policy said of that last

    @property
    def undecided(self) -> bool:
        """Whether it states its utility, never started, and was not promised an end yet."""
        begun = self.running_on or self.last_batch or self.samples_done
        return self.utility is not None and self.promised_at is None and not begun

    def served(self, now: Seconds) -> float:
        """Slot seconds that it has attained up to `now`.

        Args:
            now: seconds on the controller's clock.
        """
        return self.slot_s + max(0.0, now - self.moved_at) * len(self.running_on)


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable picture of the cluster at one moment."""

    version: int  # of the core's state
    slots: tuple[SlotView, ...]
    jobs: Mapping[JobId, JobView]


# --- what it learns


class EpochSeen(msgspec.Struct, frozen=True, kw_only=True, tag="epoch"):
    """A job finished an epoch; replayed from the journal when a search begins anew."""

    job: JobId
    family: str
    slots: int  # in its group when it was reported
    nodes: int
    global_batch: int  # samples per step
    samples_per_s: float  # X_j, mean over the epoch
    whole: bool  # the group was the same through all of it
    epoch: int = 0  # that it finished, 1-based
    samples_done: int = 0  # since the job began; 0: not known
    train_loss: float | None = None
    stop_metric: float | None = None  # of its stop rule; None: that is on none
    noise_scale: float | None = None  # of its gradients, samples; as reported, not smoothed
    beside: tuple[NodeCrowd, ...] | None = None  # of each of its nodes; None: it was not the same
    pass_s: float | None = None  # mean over its steps, as in `StepsSeen`: all four, or none
    sync_s: float | None = None
    local_batch: int = 0
    passes: int = 0


class StepsSeen(msgspec.Struct, frozen=True, kw_only=True, tag="steps"):
    """Telemetry of a job, about once a second; some may be missing."""

    job: JobId
    family: str
    group: int  # version
    slots: int
    nodes: int
    global_batch: int
    step: int
    samples_done: int
    samples_per_s: float = 0.0  # by the worker's clock, within this group; 0: not yet
    noise_scale: float | None = None  # of its gradients, samples, as measured last; None: not yet
    train_loss: float | None = None  # mean over the running epoch so far; None: not seen
    cpu_cores: float | None = None  # that its first worker uses, mean of late; None: not reported
    sent_bytes_per_s: float | None = None  # gradients that this worker sends, mean of late
    # Steps that just this group did with this batch, of the latest of which its figures are means:
    # so its first report counts. 0: an older worker does not say; its figures may be of others.
    group_steps: int = 0
    # A step takes pass_s + (passes - 1) * (pass_s - sync_s); all four are told, or none.
    pass_s: float | None = None  # of a step's last pass, with its reduction
    sync_s: float | None = None  # of these seconds, in the reduction; 0 on one slot
    local_batch: int = 0  # samples of one pass of one worker; 0: not told
    passes: int = 0  # of one worker in a step; more than 1: gradients are accumulated


class JobEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A job is over: what its relatives may expect."""

    job: JobId
    family: str
    samples_done: int
    succeeded: bool
    slot_s: float = 0.0  # attained service, slots times seconds


class GainSeen(msgspec.Struct, frozen=True, kw_only=True, tag="gain"):
    """The first whole epoch of a group is over: what became of the speed that was promised."""

    job: JobId
    family: str
    predicted: float  # speed-up over the group before, as the plan said
    realised: float  # as it was measured
    correction: float | None = None  # in what the plan said; None: that size had been measured


class PlanTaken(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """A plan of this policy is in force."""

    waiting: tuple[JobId, ...]  # that it left without slots
    slots: Mapping[JobId, tuple[SlotId, ...]] = {}  # that jobs shall have whom it changes


PolicyEvent = EpochSeen | StepsSeen | JobEnded | GainSeen | PlanTaken


# --- what it answers


class Reason(msgspec.Struct, frozen=True):
    """Why a plan treats a job as it does: a stable code, words, and the numbers behind them."""

    code: str
    text: str
    numbers: dict[str, float] = {}


class StartForecast(msgspec.Struct, frozen=True, kw_only=True):
    """When a waiting job is expected to start; its start should lie in the interval in 80%."""

    at: Seconds
    earliest: Seconds
    latest: Seconds


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Local batch sizes b_j^i for every job that should run (ONES eq. 1).

    A job that is absent, or has no slots, should wait. `reasons` has an entry for every job that
    changes or waits; one that is rejected has its reason in `rejected`.
    """

    based_on: int
    local_batch: Mapping[JobId, Mapping[SlotId, int]] = {}
    reasons: dict[JobId, Reason] = {}
    restart: tuple[JobId, ...] = ()  # stopped and started anew, if their slots change
    wake_at: Seconds | None = None  # ask again then, even if nothing happens
    rejected: Mapping[JobId, Reason] = {}  # never to be started: they end, and their users read why
    promised: Mapping[JobId, Seconds] = {}  # by when jobs that were admitted will be done
    predicted_loss: Mapping[JobId, float] = {}  # that jobs are expected to reach soon; for people
    starts: Mapping[JobId, StartForecast] = {}  # of jobs that wait; for people

    @property
    def empty(self) -> bool:
        """Whether it says nothing about any job: of a difference, whether nothing is to be done."""
        return not (self.local_batch or self.rejected or self.promised)


class SearchStats(msgspec.Struct, frozen=True, kw_only=True):
    """How a search stands; zeros for a policy that does not search."""

    generations: int = 0  # since it began
    best_fitness: float = 0.0
    mean_fitness: float = 0.0
    incumbent_fitness: float = 0.0  # of the schedule in force, on the same scale
    diversity: float = 0.0  # mean share of jobs in which two candidates differ, 0 to 1
    decision_ms: float = 0.0  # that the last answer took
    length_predictions: int = 0  # of work left, that were held against what came
    length_error: float | None = None  # median of theirs, as a share of what was left
    length_coverage_80: float | None = None  # share of them whose 80% interval had it
    length_coverage_90: float | None = None  # and 90%

    def in_ms(self, took_s: float) -> SearchStats:
        """The same, with the time that the last answer took.

        Args:
            took_s: seconds.
        """
        return msgspec.structs.replace(self, decision_ms=took_s * 1000.0)


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How long to think; counted in work, so that it means the same on every machine."""

    generations: int = 0
    steps: int = 0  # parts of a generation, a fraction of its time: for who must answer meanwhile


class Oracle(Protocol):
    """What no cluster can know; a simulator may tell a policy that is there to be compared with."""

    def remaining_s(self, job: JobView, slots: int) -> float:
        """Seconds that a job still trains on so many slots close together, with its first batch.

        Args:
            slots: that it would have, close together.
        """
        ...

    def remaining_steps(self, job: JobView) -> float:
        """Steps that it has left at its first batch, as the published simulators count them."""
        ...

    def step_s(self, job: JobView, slots: int) -> float:
        """Seconds of one of these steps on so many slots close together.

        Args:
            slots: that it would have, close together.
        """
        ...

    def speed_share(
        self,
        job: JobId,
        layouts: Mapping[JobId, Mapping[NodeId, int]],
        on: Mapping[NodeId, Mapping[JobId, int]],
    ) -> float:
        """The share that a job would keep of its speed alone and close together, in (0, 1].

        Args:
            job: active.
            layouts: workers of every job on each of its nodes, as they would be.
            on: each node that it would be on, and the workers there of every job, itself too.
        """
        ...


class Policy(Protocol):
    """Chooses who runs where, and with which batch size."""

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Take in what happened.

        Args:
            now: seconds on the controller's clock.
        """
        ...

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Think; returns whether thinking on could still find something better.

        Args:
            budget: how long to think, counted in work.
            rng: the only source of chance: the same draws give the same plan.
            now: seconds on the controller's clock.
        """
        ...

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Read out a complete plan for `view`, the best so far; changes nothing.

        Args:
            now: seconds on the controller's clock.

        Returns:
            A plan that names every job which should run, `based_on` the version of `view`.
        """
        ...

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        """Other batches on the slots that jobs have, as soon as something was learnt of them.

        For planners that ask for whole plans in rounds or seldom; a change of the batch alone
        stalls nobody. Changes nothing but what the policy remembers to have learnt.

        Args:
            now: seconds on the controller's clock.

        Returns:
            A plan of these jobs alone: whom it does not name goes on as it is.
        """
        return Plan(based_on=view.version)

    def stats(self) -> SearchStats:
        """How the search stands."""
        ...


class ImmediatePolicy(Policy):
    """Decides the moment it is asked: a subclass says how in `plan`, and may learn from events."""

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Views tell all that it needs; a subclass that needs more takes it here.

        Args:
            now: seconds on the controller's clock.
        """

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """There is nothing to search for.

        Args:
            budget: not used.
            rng: not used.
            now: seconds on the controller's clock.

        Returns:
            False: to think on would find nothing better.
        """
        return False

    def stats(self) -> SearchStats:
        """Zeros: there is no search."""
        return SearchStats()
