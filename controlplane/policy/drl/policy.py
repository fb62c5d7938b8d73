"""Sizes by a policy network, one job at a time (ONES section 4.1, after Gong et al., IWQoS '19)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.policy.api import ClusterView, JobView, Plan, PolicyEvent
from controlplane.policy.drl.actor import ACTIONS, Actor, read_actor_model
from controlplane.policy.drl.decision_round import MORE, DecisionRound, Moment
from controlplane.policy.drl.inputs import JobTable
from controlplane.policy.drl.observed_jobs import ObservedJobs
from controlplane.policy.drl.options import DrlOptions
from controlplane.policy.immediate_policy import ImmediatePolicy
from controlplane.policy.learned.dense_net import softmax
from controlplane.policy.learned.model_file import LearnedModel
from controlplane.policy.planning.placers import placer_of
from controlplane.policy.planning.scheduling_rounds import Rounds, fit_targets
from controlplane.policy.planning.slot_partition import (
    Partition,
    compose_plan,
    partition_of,
    slots_in_words,
    useful_slots,
)
from controlplane.policy.planning.slot_placer import with_user_batches
from controlplane.prediction.array_types import FloatArray
from schemas.ids import JobId, Seconds


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
