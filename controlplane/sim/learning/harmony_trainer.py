"""Trainer of `harmony-drl`: the reward model from history, then actor and critic with it."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.random import default_rng

from controlplane.policy.learned.gang_model import FEATURES, Actor, Choose, best, place_gang
from controlplane.policy.learned.shared_nodes import RewardModel, SharedNodes
from controlplane.sim.learning.harmony_actor_critic import (
    ActorCritic,
    Networks,
    Rollout,
    TensorBatch,
    arrays_of,
    as_batch,
    joined,
)
from controlplane.sim.learning.harmony_history import History, Recorder, RewardFit, record_history
from controlplane.sim.learning.harmony_testbed import (
    TRAINED_FAMILIES,
    Arrival,
    Episode,
    HarmonyTestbed,
    draw_testbed,
    pattern,
)
from controlplane.sim.learning.training_run import Trained
from controlplane.sim.traces.generators import MAX_WORKERS

FIRST_TRACE: Final = 1_000_000  # of training traces; smaller seeds are for comparisons
REPORT_NOISE: Final = 0.05  # standard deviation of a report's logarithm
MEAN_DECAY: Final = 0.9  # decay per round of the mean of actors
BUFFERED_ROUNDS: Final = 12  # rounds whose placements are replayed, first in, first out


@dataclass(frozen=True, slots=True)
class Schedule:
    """Hyperparameters of a training."""

    jobs: int = 60  # per trace
    histories: int = 25  # traces for the reward model
    reward_epochs: int = 12
    rounds: int = 200  # of actor and critic
    twins: int = 6  # rollouts of one trace
    updates: int = 6  # optimiser steps per round
    batch: int = 256
    explore: float = 0.15  # share of the jobs placed by a pattern
    horizon_s: float = 3000.0
    validate_every: int = 20
    validations: int = 12  # traces


class HarmonyDrlTrainer:
    """Implementation of `Trainer`."""

    def __init__(self, seed: int, schedule: Schedule | None = None) -> None:
        torch.set_num_threads(1)  # equal sums on every host; the networks are small
        self._seed = seed
        self._schedule = schedule or Schedule()
        self._nets = Networks(seed)
        self._learner = ActorCritic(self._nets.actor, self._nets.sharpness, self._nets.critic)
        self._fit: RewardFit | None = None
        self._fit_state: dict[str, Any] | None = None
        self._buffer: deque[TensorBatch] = deque(maxlen=BUFFERED_ROUNDS)
        self._mean: dict[str, torch.Tensor] = {}  # of actors
        self._best: dict[str, torch.Tensor] | None = None  # best mean in validation
        self._best_jct = math.inf  # relative to placement on the least loaded nodes
        self._figures: dict[str, float] = {}
        self._baselines: tuple[float, float] | None = None  # JCTs: least loaded, greedy

    @property
    def settings(self) -> Mapping[str, float | str]:
        """Schedule as numbers."""
        names = self._schedule.__slots__
        return {name: float(getattr(self._schedule, name)) for name in names}

    @property
    def iterations(self) -> int:
        """Epochs of the reward model plus rounds of actor and critic."""
        return self._schedule.reward_epochs + self._schedule.rounds

    def iterate(self, iteration: int) -> dict[str, float | str]:
        """Run an epoch of the reward model, or a round of actor and critic."""
        generator = torch.Generator().manual_seed(self._seed * 100_003 + iteration)
        row: dict[str, float | str] = {
            "phase": "reward model",
            "reward_rmse": math.nan,
            "jct_vs_least_loaded": math.nan,
            "jct_vs_greedy": math.nan,
            "critic_loss": math.nan,
            "entropy": math.nan,
        }
        if iteration < self._schedule.reward_epochs:
            fit = self._reward_fit()
            row["reward_rmse"] = self._figures["reward_rmse"] = fit.epoch(generator)
            self._fit_state = fit.optimiser.state_dict()
            return row
        number = iteration - self._schedule.reward_epochs
        row["phase"] = "actor and critic"
        row["critic_loss"], row["entropy"] = self._round(number, generator)
        last = number + 1 == self._schedule.rounds
        if number % self._schedule.validate_every == 0 or last:
            least_loaded, greedy = self._validate()
            row["jct_vs_least_loaded"], row["jct_vs_greedy"] = least_loaded, greedy
        return row

    def state(self) -> dict[str, Any]:
        """Return networks, optimisers, the buffer and the best actor."""
        return copy.deepcopy(
            {
                "networks": self._nets.all.state_dict(),
                "sharpness": self._nets.sharpness.detach(),
                "learner": self._learner.optimiser.state_dict(),
                "fit": self._fit_state,
                "buffer": list(self._buffer),
                "mean": self._mean,
                "best": self._best,
                "best_jct": self._best_jct,
                "figures": self._figures,
            }
        )

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self._nets.all.load_state_dict(state["networks"])
        with torch.no_grad():
            self._nets.sharpness.copy_(state["sharpness"])
        self._learner.optimiser.load_state_dict(state["learner"])
        self._fit_state, self._mean, self._best = state["fit"], state["mean"], state["best"]
        self._buffer = deque(state["buffer"], maxlen=BUFFERED_ROUNDS)
        self._best_jct, self._figures = state["best_jct"], dict(state["figures"])

    def trained(self) -> Trained:
        """Return the reward model, and the best actor on the validation traces."""
        nets = self._averaged(self._best)
        slots = sum(self._bed(0).sizes)
        return Trained(
            features=FEATURES,
            slots=(slots, slots),
            cluster="Harmony's testbed, 6 servers of 2 GPUs, jobs of its six models",
            figures=dict(self._figures),
            arrays=arrays_of(self._nets.reward_model(), nets.placing(), len(TRAINED_FAMILIES)),
            families=TRAINED_FAMILIES,
        )

    # --- the reward model

    def _reward_fit(self) -> RewardFit:
        if self._fit is None:
            self._fit = RewardFit(self._nets.beside, self._nets.spread, self._history(), 3e-3)
            if self._fit_state is not None:
                self._fit.optimiser.load_state_dict(self._fit_state)
        return self._fit

    def _history(self) -> History:
        rng = default_rng((self._seed, FIRST_TRACE))
        beds = [self._bed(number) for number in range(self._schedule.histories)]
        nothing, untrained = Networks(0).reward_model(), Networks(0).placing()
        record = Recorder(nothing.classes, REPORT_NOISE, rng)
        for bed in beds:
            record_history(bed, nothing, untrained, record, rng)
        return record.history()

    # --- actor and critic

    def _round(self, number: int, generator: torch.Generator) -> tuple[float, float]:
        """Run several rollouts of one trace, and learn from their differences.

        The work that happens to arrive is common to all rollouts and removed from the advantages: a
        job is compared with the same job in the other rollouts.
        """
        schedule, rng = self._schedule, default_rng((self._seed, number))
        bed = self._bed(schedule.histories + schedule.validations + number)
        reward, actor = self._nets.reward_model(), self._nets.placing()
        rolled = []
        for _ in range(schedule.twins):
            rollout = Rollout(actor, rng, schedule.explore, schedule.horizon_s)
            rollout.run(bed, reward)
            rolled.append((rollout.placements, *self._learner.advantages(rollout.placements)))
        common = np.mean([advantages for _, advantages, _ in rolled], axis=0)
        self._buffer.append(
            joined(
                [
                    as_batch(placements, advantages - common, values, MAX_WORKERS, len(bed.sizes))
                    for placements, advantages, values in rolled
                ]
            )
        )
        replayed = joined(list(self._buffer))
        self._learner.slow_down(1.0 - 0.8 * number / schedule.rounds)
        losses = []
        for _ in range(schedule.updates):
            rows = torch.randint(len(replayed["state"]), (schedule.batch,), generator=generator)
            losses.append(self._learner.learn({k: v[rows] for k, v in replayed.items()}))
        self._update_mean()
        critic, entropy = np.mean(losses, axis=0).tolist()
        return critic, entropy

    def _validate(self) -> tuple[float, float]:
        """Return validation JCTs over those of least loaded and greedy; keep the best actor."""
        if self._baselines is None:
            untrained = Networks(0).placing()
            self._baselines = (
                self._mean_jct(untrained, pattern("least loaded")),
                self._mean_jct(untrained, best),
            )
        mine = self._mean_jct(self._averaged().placing(), best)
        least_loaded, greedy = mine / self._baselines[0], mine / self._baselines[1]
        if least_loaded < self._best_jct:
            self._best, self._best_jct = copy.deepcopy(self._mean), least_loaded
            self._figures |= {"jct_vs_least_loaded": least_loaded, "jct_vs_greedy": greedy}
        return least_loaded, greedy

    def _mean_jct(self, actor: Actor, choose: Choose) -> float:
        reward = self._nets.reward_model()
        beds = [
            self._bed(self._schedule.histories + number)
            for number in range(self._schedule.validations)
        ]
        return float(np.mean([mean_jct_s(bed, reward, actor, choose) for bed in beds]))

    def _update_mean(self) -> None:
        """Update the running mean of the actors: single rounds are noisy."""
        now = {**self._nets.actor.state_dict(), "sharpness": self._nets.sharpness.detach()}
        for name, value in now.items():
            before = self._mean.get(name, value)
            self._mean[name] = (before + (1.0 - MEAN_DECAY) * (value - before)).clone()

    def _averaged(self, mean: Mapping[str, torch.Tensor] | None = None) -> Networks:
        """Return networks with a mean actor, by default the current mean; the rest is untrained."""
        nets, chosen = Networks(self._seed), dict(mean or self._mean)
        if chosen:
            with torch.no_grad():
                nets.sharpness.copy_(chosen.pop("sharpness"))
            nets.actor.load_state_dict(chosen)
        return nets

    def _bed(self, number: int) -> HarmonyTestbed:
        return draw_testbed(FIRST_TRACE + 10_000 * self._seed + number, self._schedule.jobs)


def mean_jct_s(bed: HarmonyTestbed, reward: RewardModel, actor: Actor, choose: Choose) -> float:
    """Return the mean completion time of a trace in the environment, with true speeds."""
    ends = placed_by(bed, reward, actor, choose)
    return math.fsum(ends[job.name] - job.at for job in bed.arrivals) / len(ends)


def placed_by(
    bed: HarmonyTestbed, reward: RewardModel, actor: Actor, choose: Choose
) -> dict[str, float]:
    """Return the end of each job of a trace in the environment, in seconds; see `mean_jct_s`."""

    def place(shared: SharedNodes, job: Arrival, _line: object) -> None:
        place_gang(shared, actor, job.name, choose)

    episode = Episode(bed.arrivals, SharedNodes(reward, bed.sizes), bed.speeds, bed.start_s)
    episode.run(place)
    return episode.ends
