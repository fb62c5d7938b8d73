"""Episodes that the policy under training lives through, job by job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.random import Generator

from controlplane.policy.harmony_drl.gang_placement import Actor, Choice, place_gang, sampled
from controlplane.policy.harmony_drl.reward_model import WORKERS, RewardModel
from controlplane.policy.harmony_drl.shared_nodes import SharedNodes
from controlplane.policy.learned.dense_net import softmax
from controlplane.prediction.array_types import FloatArray
from controlplane.sim.learning.harmony_drl.environment import Arrival, Episode
from controlplane.sim.learning.harmony_drl.exploration import PATTERNS, at_random, pattern
from controlplane.sim.learning.harmony_drl.testbed import HarmonyTestbed

SUMMARY: Final = 7  # of the critic's inputs, beside those by class


@dataclass(slots=True)
class Placement:
    """One job's workers, and what came of it."""

    state: FloatArray  # what the critic sees, before it is placed
    choices: list[Choice]
    log_probability: float  # of these choices, as they were made
    reward: float = 0.0  # discounted, until the next job is placed
    discount: float = 1.0  # of all that comes after that


@dataclass(slots=True)
class Rollout:
    """Explores an episode with the policy of now."""

    actor: Actor
    rng: Generator
    explore: float  # share of the jobs that are placed by a pattern
    horizon_s: float  # a reward so much later counts e times less
    placements: list[Placement] = field(default_factory=list)

    def run(self, bed: HarmonyTestbed, model: RewardModel) -> None:
        """Live through a trace.

        Args:
            bed: the trace; its truth is not asked.
            model: says what jobs cost each other, and so how fast they are.
        """

        def speeds(shared: SharedNodes, training: Sequence[str]) -> dict[str, float]:
            losses = shared.losses()
            return {name: 1.0 - losses[name] for name in training}

        shared = SharedNodes(model, bed.sizes)
        Episode(bed.arrivals, shared, speeds, bed.start_s).run(self._place, self._pass)

    def _place(self, shared: SharedNodes, job: Arrival, line: Sequence[Arrival]) -> None:
        state = critic_inputs(shared, job, line)
        ways = len(PATTERNS) + 1
        by_pattern = self.rng.random() < self.explore
        choose = sampled(self.rng)
        if by_pattern:
            way = int(self.rng.integers(ways))
            choose = pattern([*PATTERNS][way]) if way < len(PATTERNS) else at_random(self.rng)
        choices = place_gang(shared, self.actor, job.name, choose)
        policy = math.prod(float(softmax(one.among.scores)[one.place]) for one in choices)
        chance = math.prod(1.0 / len(one.among.nodes) for one in choices)
        other = chance / ways  # at least: patterns may have chosen the same
        if by_pattern:
            other = max(other, 1.0 / ways)
        mixed = (1.0 - self.explore) * policy + self.explore * other
        self.placements.append(Placement(state, choices, math.log(mixed)))

    def _pass(self, passed_s: float, speed: float, jobs: int) -> None:
        """The sum of normalised speeds less the number of jobs, for so long.

        Paper: the sum of normalised speeds of the concurrent jobs. Here: less what it would be if
        every job that is there trained alone. Summed up over time the paper's is the work that was
        done, which no placement changes; this is minus what the jobs lose by waiting and by their
        neighbours, and it hardly depends on who happens to come.
        """
        if self.placements:
            last, decay = self.placements[-1], math.exp(-passed_s / self.horizon_s)
            last.reward += last.discount * (speed - jobs) * (1.0 - decay)  # times the horizon
            last.discount *= decay


def critic_inputs(shared: SharedNodes, job: Arrival, line: Sequence[Arrival]) -> FloatArray:
    """What the critic sees: the job set, and the placement as a whole.

    Returns:
        Shape (7 + 3 classes,).
    """
    classes, losses = shared.model.classes, shared.losses()
    found = np.zeros(SUMMARY + 3 * classes)
    found[0] = (math.fsum(1.0 - loss for loss in losses.values()) - 1.0) / WORKERS
    found[1] = (len(losses) - 1) / WORKERS  # the one that is placed now is among them
    found[2] = len(line) / WORKERS
    found[3] = float(shared.free.sum() / shared.sizes.sum())
    found[4] = float((shared.free == shared.sizes).mean())
    found[5] = float((shared.free > 0).mean())
    found[6] = job.size / WORKERS
    found[SUMMARY + job.number] = 1.0
    for one in shared.jobs.values():
        found[SUMMARY + classes + one.number] += sum(one.workers.values()) / WORKERS
    for waiting in line:
        found[SUMMARY + 2 * classes + waiting.number] += waiting.size / WORKERS
    return found


def critic_width(classes: int) -> int:
    """Inputs of the critic."""
    return SUMMARY + 3 * classes
