"""Sizes by a policy network, one job at a time (ONES section 4.1, after Gong et al., IWQoS '19).

`ObservedJobs` is what a cluster can know of jobs: their speeds and remaining steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    ImmediatePolicy,
    JobEnded,
    JobView,
    Plan,
    PolicyEvent,
    StepsSeen,
)
from controlplane.policy.learned.decision_round import (
    ACTIONS,
    MORE,
    Actor,
    DecisionInput,
    DecisionRound,
    JobTable,
    read_actor_model,
)
from controlplane.policy.learned.model_file import LearnedModel, softmax
from controlplane.policy.options import MIN_ROUND_S, refuse_above, refuse_below
from controlplane.policy.placement.free_slots import Moves, with_user_batches
from controlplane.policy.placement.placers import PlacerName, make_placer
from controlplane.policy.placement.rounds import Rounds, fit_targets
from controlplane.policy.placement.slot_partition import (
    Partition,
    compose_plan,
    partition_of,
    slots_in_words,
    useful_slots,
)
from controlplane.policy.search.observed_jobs import StepTimesByFamily
from controlplane.prediction import FloatArray
from controlplane.prediction.lengths import remaining_samples
from schemas.ids import JobId, Seconds


class DrlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `drl`, table `[policy.options]` of the controller's settings."""

    model: str | None = None  # path of a model file; None: the shipped model
    interval_s: float = 5.0  # minimum length of a round
    one_job: bool = True  # one job changes per round, as in the paper's DRL; else any number
    preempt: bool = False  # True: running jobs may be stopped; paper: no
    most: int | None = None  # maximum slots of one job
    placer: PlacerName = "consolidate"
    moves: Moves = "elastic"

    def __post_init__(self) -> None:
        """Check the ranges, and that the model can be used."""
        refuse_below(self, {"interval_s": MIN_ROUND_S})
        refuse_above(self, {"interval_s": 3600.0})
        if self.most is not None:
            refuse_below(self, {"most": 1})
        if self.model is not None:
            read_actor_model(self.model)


MAX_RELATIVES: Final = 200  # the latest; bounds memory
DEFAULT_STEPS: Final = 1000  # assumed length of a job without any information
DRIFT: Final = 0.05  # relative change of a step time that triggers another fit


@dataclass(slots=True)
class _Family:
    """Jobs of one script and model."""

    finished: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RELATIVES))
    reached: int = 0  # most samples that a job reached
    left: dict[int, float] = field(default_factory=dict)  # samples done -> left, until an event


class ObservedJobs:
    """Speeds and lengths by family; a job without a family is a family of its own."""

    def __init__(self) -> None:
        self._speeds = StepTimesByFamily(DRIFT)
        self._families: dict[str, _Family] = {}

    def observe(self, event: PolicyEvent) -> None:
        """Learn speeds from epochs and telemetry, and lengths from jobs that ended."""
        match event:
            case EpochSeen() | StepsSeen():
                self._speeds.observe(event)
                family = self._family(event.family, event.job)
                family.reached = max(family.reached, event.samples_done)
                family.left.clear()
            case JobEnded():
                family = self._family(event.family, event.job)
                family.left.clear()
                if event.succeeded and event.samples_done:
                    family.finished.append(event.samples_done)
                family.reached = max(family.reached, event.samples_done)
                if not event.family:  # its records are of no use to other jobs
                    self._families.pop(f"job {event.job}", None)
                    self._speeds.forget(event.job)

    def coefficients(self, job: JobView) -> tuple[float, float, float, float]:
        """Return the coefficients of the step time model (`StepModel`) at the user's batch."""
        return self._speeds.model(job).coefficients

    def remaining_steps(self, job: JobView) -> float:
        """Return the remaining steps of the user's batch.

        From the stated work; else from the lengths of the family; else as many again as done, or an
        epoch.
        """
        family = self._family(job.family, job.job)
        if job.stop_samples is not None:
            stated = float(job.stop_samples)
            left = remaining_samples(job.samples_done, stated, family.finished, family.reached)
            return left / job.batch_size
        done = job.samples_done
        if done not in family.left:
            family.left[done] = remaining_samples(done, None, family.finished, family.reached)
        left = family.left[done] or float(job.epoch_samples or DEFAULT_STEPS * job.batch_size)
        return left / job.batch_size

    def length_known(self, job: JobView) -> bool:
        """True if the length was stated, or a job of the family has finished."""
        return job.stop_samples is not None or bool(self._family(job.family, job.job).finished)

    def _family(self, name: str, job: JobId) -> _Family:
        return self._families.setdefault(name or f"job {job}", _Family())


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """Facts about a job in the last round, for its reason."""

    probability: float  # of the action taken; for a waiting job of its start
    remaining_s: float  # on its slots, or on those that it would start with
    known: bool  # False: `remaining_s` is a guess


class Drl(ImmediatePolicy):
    """A network gives out slots job by job, in rounds; sizes hold in between.

    Batches stay the users', and a running job is never stopped (the paper's Table 3), unless
    `preempt` is set. The most probable action is taken; nothing is random.

    Raises:
        SettingsError: if the model cannot be used.
    """

    def __init__(
        self, options: DrlOptions | None = None, model: LearnedModel | None = None
    ) -> None:
        self.options = options or DrlOptions()
        model = model or read_actor_model(self.options.model)
        self._trained_on = model.card.slots
        self._actor = Actor(model.arrays)
        self._observed = ObservedJobs()
        self._placer = make_placer(self.options.placer, self.options.moves)
        self._rounds = Rounds(self.options.interval_s)
        self._targets: dict[JobId, int] = {}  # slots of each job in the last round
        self._facts: dict[JobId, RoundFacts] = {}
        self._decided_for: frozenset[JobId] = frozenset()  # all jobs of the view in the last round
        self._changed = False  # True if the last round changed a size
        self._range_note = ""  # note for clusters outside the training range

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds and lengths."""
        self._observed.observe(event)
        self._placer.observe(event, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the sizes of the last round, as far as there is room for them now."""
        partition = partition_of(view, now)
        if self._rounds.is_due(partition, self._targets):
            self._range_note = training_range_note(self._trained_on, len(view.slots))
            self._decide(partition)
            self._rounds.begin(now)
        sizes = fit_targets(partition, self._targets, fixed_batches=True)
        placed = self._placer.place(partition, sizes)
        more_to_do = self._changed or self._decided_for != view.jobs.keys()
        return compose_plan(
            partition,
            with_user_batches(partition, placed),
            self._why,
            restart=self._placer.restarts(partition, placed),
            wake_at=self._rounds.next_at(partition) if more_to_do else None,
        )

    def pick(self, moment: DecisionInput, odds: FloatArray, now: Seconds) -> int:
        """Return the index of the most probable action, the first of equal ones.

        Trainings override this. `odds` are the probabilities of all actions, shape (3 N + 1,).
        """
        return int(odds.argmax())

    def _decide(self, partition: Partition) -> None:
        jobs = [*partition.running, *partition.waiting]
        table = job_table(jobs, partition, self._observed, self._targets, self.options.most)
        odds: dict[JobId, float] = {}

        def choose(moment: DecisionInput) -> int:
            logits = self._actor.logits(moment.jobs, moment.cluster)
            probable = softmax(np.where(moment.legal, logits, -np.inf))
            action = self.pick(moment, probable, partition.now)
            for row in np.flatnonzero(moment.sizes == 0).tolist():
                odds[jobs[row].job] = float(probable[row * ACTIONS + MORE])
            if action < len(probable) - 1:
                odds[jobs[action // ACTIONS].job] = float(probable[action])
            return action

        round_ = DecisionRound(table, one_job=self.options.one_job, preempt=self.options.preempt)
        sizes = round_.run(choose)
        left_s = table.step_s(np.maximum(sizes, table.least)) * table.steps_left
        self._changed = bool((sizes != table.have).any())
        self._decided_for = frozenset(partition.view.jobs)
        self._facts = {
            job.job: RoundFacts(odds.get(job.job, 0.0), seconds, known)
            for job, seconds, known in zip(jobs, left_s.tolist(), table.known.tolist(), strict=True)
        }
        leaving = {job.job: self._targets.get(job.job, 0) for job in partition.leaving}
        chosen = {job.job: size for job, size in zip(jobs, sizes.tolist(), strict=True)}
        self._targets = leaving | chosen

    def _why(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        target, facts = self._targets.get(job.job), self._facts.get(job.job)
        if target is None or facts is None:
            return "sizes are chosen again in the next round", {}
        numbers = {
            "target": float(target),
            "probability": facts.probability,
            "remaining_s": facts.remaining_s,
        }
        if slots:
            rest = f", about {facts.remaining_s:.0f} s left on them" if facts.known else ""
            words = f"the network's choice{rest}"
        elif target:
            words = f"its {slots_in_words(target)} are not free yet"
        else:
            words = "the network does not start it yet"
        return words + self._range_note, numbers


def training_range_note(trained_on: tuple[int, int], slots: int) -> str:
    """Return a note if the cluster is smaller or larger than those of the training, else ""."""
    least, most = trained_on
    if least <= slots <= most:
        return ""
    return f" (it was trained on {least} to {most} slots; this cluster has {slots})"


def job_table(
    jobs: Sequence[JobView],
    partition: Partition,
    observed: ObservedJobs,
    targets: Mapping[JobId, int],
    most: int | None,
) -> JobTable:
    """Return the facts about the N jobs that may change in a round.

    The last `targets` of jobs whose slots are being freed stay reserved.
    """
    now = partition.now
    caps = [max(j.least, min(useful_slots(j, partition), most or j.most)) for j in jobs]
    return JobTable(
        have=np.array([len(job.running_on) for job in jobs], dtype=np.int64),
        least=np.array([job.least for job in jobs], dtype=np.int64),
        cap=np.array(caps, dtype=np.int64),
        wanted=np.array([job.wanted for job in jobs], dtype=np.int64),
        batch=np.array([job.batch_size for job in jobs], dtype=np.int64),
        coefficients=np.array([observed.coefficients(job) for job in jobs]).reshape(-1, 4),
        steps_left=np.array([observed.remaining_steps(job) for job in jobs], dtype=np.float64),
        known=np.array([observed.length_known(job) for job in jobs], dtype=np.bool_),
        age_s=np.array([max(0.0, now - job.submitted_at) for job in jobs], dtype=np.float64),
        still_s=np.array([max(0.0, now - job.moved_at) for job in jobs], dtype=np.float64),
        room=partition.room - sum(targets.get(job.job, 0) for job in partition.leaving),
    )
