"""Sizes by a policy network, one job at a time (ONES section 4.1, after Gong et al., IWQoS '19).

What can be chosen about `drl`.

What a cluster can know of jobs beforehand: how fast they would be, and how long they last.
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
    DecisionRound,
    JobTable,
    Moment,
    read_actor_model,
)
from controlplane.policy.learned.model_file import LearnedModel, softmax
from controlplane.policy.options import LEAST_ROUND_S, refuse_above, refuse_below
from controlplane.policy.placement.free_slots import Moves, with_user_batches
from controlplane.policy.placement.placers import PlacerName, placer_of
from controlplane.policy.placement.rounds import Rounds, fit_targets
from controlplane.policy.placement.slot_partition import (
    Partition,
    compose_plan,
    partition_of,
    slots_in_words,
    useful_slots,
)
from controlplane.policy.search.observed_jobs import RingSpeeds
from controlplane.prediction import FloatArray
from controlplane.prediction.lengths import remaining_samples
from schemas.ids import JobId, Seconds


class DrlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `drl`, table `[policy.options]` of the controller's settings."""

    model: str | None = None  # path of a model's file; none: the one that ships
    interval_s: float = 5.0  # a round: sizes are chosen at most so often
    one_job: bool = True  # re-scheduled in each round, as the paper says of DRL; else any number
    preempt: bool = False  # whether a running job may be stopped; the paper: no
    most: int | None = None  # slots of one job
    placer: PlacerName = "consolidate"
    moves: Moves = "elastic"

    def __post_init__(self) -> None:
        """Refuse what makes no sense, and a model that cannot be used."""
        refuse_below(self, {"interval_s": LEAST_ROUND_S})
        refuse_above(self, {"interval_s": 3600.0})
        if self.most is not None:
            refuse_below(self, {"most": 1})
        if self.model is not None:
            read_actor_model(self.model)


KEPT_RELATIVES: Final = 200  # the latest: a bound on memory
FIRST_STEPS: Final = 1000  # that a job is thought to have, if nothing at all is known
DRIFT: Final = 0.05  # of a measured time, that makes its family's speeds be fitted again


@dataclass(slots=True)
class _Family:
    """Jobs of one script and model."""

    finished: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_RELATIVES))
    reached: int = 0  # samples, by the job that came furthest
    left: dict[int, float] = field(default_factory=dict)  # samples done -> to come, until news


class ObservedJobs:
    """Speeds and lengths by family; a job without one is a family of its own."""

    def __init__(self) -> None:
        """Begin with nothing learnt."""
        self._speeds = RingSpeeds(DRIFT)
        self._families: dict[str, _Family] = {}

    def observe(self, event: PolicyEvent) -> None:
        """Learn from `event`.

        Args:
            event: epochs and telemetry teach speeds, a job's end how long relatives last.
        """
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
                if not event.family:  # nobody is related to it
                    self._families.pop(f"job {event.job}", None)
                    self._speeds.forget(event.job)

    def coefficients(self, job: JobView) -> tuple[float, float, float, float]:
        """Of the model of its step times at its user's batch (`prediction.ring_step_time`)."""
        return self._speeds.model(job).coefficients

    def remaining_steps(self, job: JobView) -> float:
        """Steps of its user's batch that it has left.

        By what its user stated; else as long as its relatives lasted; else as many again as it
        has made, or an epoch.
        """
        family = self._family(job.family, job.job)
        if job.stop_samples is not None:
            stated = float(job.stop_samples)
            left = remaining_samples(job.samples_done, stated, family.finished, family.reached)
            return left / job.batch_size
        done = job.samples_done
        if done not in family.left:
            family.left[done] = remaining_samples(done, None, family.finished, family.reached)
        left = family.left[done] or float(job.epoch_samples or FIRST_STEPS * job.batch_size)
        return left / job.batch_size

    def length_known(self, job: JobView) -> bool:
        """Whether its length was stated, or a relative has finished."""
        return job.stop_samples is not None or bool(self._family(job.family, job.job).finished)

    def _family(self, name: str, job: JobId) -> _Family:
        return self._families.setdefault(name or f"job {job}", _Family())


@dataclass(frozen=True, slots=True)
class Said:
    """What the last round had to do with a job."""

    probability: float  # of the action taken on it; of one that waits: of its start
    remaining_s: float  # on the slots that it gets, or would start with
    known: bool  # whether that is more than a guess


class Drl(ImmediatePolicy):
    """A network gives slots job by job, in rounds; sizes hold in between.

    The batch stays the user's, and a running job is never stopped (the paper's Table 3), unless
    `preempt` says so. It is evaluated by its most probable action: nothing is drawn.
    """

    def __init__(
        self, options: DrlOptions | None = None, model: LearnedModel | None = None
    ) -> None:
        """Load the model; the first plan begins a slot.

        Args:
            options: of its settings; None for the defaults.
            model: to decide by; None: the one that the options name.

        Raises:
            SettingsError: if the model cannot be used.
        """
        self.options = options or DrlOptions()
        model = model or read_actor_model(self.options.model)
        self._trained_on = model.card.slots
        self._actor = Actor(model.arrays)
        self._observed = ObservedJobs()
        self._placer = placer_of(self.options.placer, self.options.moves)
        self._rounds = Rounds(self.options.interval_s)
        self._targets: dict[JobId, int] = {}  # slots of each job of the last round
        self._said: dict[JobId, Said] = {}
        self._decided_for: frozenset[JobId] = frozenset()  # all jobs of the view then
        self._changed = False  # whether it changed anything
        self._beyond = ""  # said where the cluster is none that the model was trained on

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds and lengths, and let the placer learn."""
        self._observed.observe(event)
        self._placer.observe(event, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """The sizes of the last round, as far as there is room for them by now."""
        partition = partition_of(view, now)
        if self._rounds.is_due(partition, self._targets):
            self._beyond = beyond(self._trained_on, len(view.slots))
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

    def pick(self, moment: Moment, odds: FloatArray, now: Seconds) -> int:
        """The most probable action; of equal ones the first. A training overrides this.

        Args:
            odds: probability of every action, shape (3 N + 1,).
            now: seconds on the controller's clock.

        Returns:
            Index of a legal action.
        """
        return int(odds.argmax())

    def _decide(self, partition: Partition) -> None:
        jobs = [*partition.running, *partition.waiting]
        table = job_table(jobs, partition, self._observed, self._targets, self.options.most)
        odds: dict[JobId, float] = {}

        def choose(moment: Moment) -> int:
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
        self._said = {
            job.job: Said(odds.get(job.job, 0.0), seconds, known)
            for job, seconds, known in zip(jobs, left_s.tolist(), table.known.tolist(), strict=True)
        }
        leaving = {job.job: self._targets.get(job.job, 0) for job in partition.leaving}
        chosen = {job.job: size for job, size in zip(jobs, sizes.tolist(), strict=True)}
        self._targets = leaving | chosen

    def _why(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        target, said = self._targets.get(job.job), self._said.get(job.job)
        if target is None or said is None:
            return "sizes are chosen again in the next round", {}
        numbers = {
            "target": float(target),
            "probability": said.probability,
            "remaining_s": said.remaining_s,
        }
        if slots:
            rest = f", about {said.remaining_s:.0f} s left on them" if said.known else ""
            words = f"the network's choice{rest}"
        elif target:
            words = f"its {slots_in_words(target)} are not free yet"
        else:
            words = "the network does not start it as yet"
        return words + self._beyond, numbers


def beyond(trained_on: tuple[int, int], slots: int) -> str:
    """What to say of a cluster that is smaller or larger than those of the training; often nothing.

    Args:
        trained_on: slots of its clusters, from and to.
    """
    least, most = trained_on
    if least <= slots <= most:
        return ""
    return f" (it was trained on {least} to {most} slots, here are {slots})"


def job_table(
    jobs: Sequence[JobView],
    partition: Partition,
    observed: ObservedJobs,
    targets: Mapping[JobId, int],
    most: int | None,
) -> JobTable:
    """What a round knows of the jobs that may change.

    Args:
        jobs: running and waiting ones, N of them.
        targets: slots of jobs whose own are just being freed: these are kept for them.
        most: slots of one job; None: no more than it allows.
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
