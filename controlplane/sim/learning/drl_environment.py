"""Environment for training `drl` in whole simulations; the warm-up imitates DRF, as in DL2."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn

from controlplane.policy.api import PolicyEvent
from controlplane.policy.learned.drl import (
    ACTIONS,
    CLUSTER_INPUTS,
    END_NET,
    FEWER,
    INPUTS_VERSION,
    JOB_NET,
    MORE,
    POLICY,
    SHAPES,
    DecisionInput,
    Drl,
)
from controlplane.policy.learned.model_file import LearnedModel, ModelCard
from controlplane.policy.min_slots import MinSlotsPolicy
from controlplane.policy.registry import make
from controlplane.prediction import BoolArray, FloatArray, IntArray
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.learning.actor_critic import (
    FIRST_TRACE,
    TRACES_PER_SEED,
    ActorCriticTrainer,
    Arrays,
    Choice,
    Dense,
    Recipe,
    Rollout,
    Step,
    Trained,
)
from controlplane.sim.results import SimulationResult
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from schemas.ids import Seconds

SLOTS_PER_NODE: Final = 4
VALIDATION_OFFSET: Final = 90_000  # offset of the seeds of validation traces
PAST_OFFSET: Final = 99_000  # offset of the seed of the trace of past events

Pick = Callable[[DecisionInput, FloatArray], int]  # picks an action, given all probabilities


def teacher_action(moment: DecisionInput) -> int:
    """Return the legal action of dominant resource fairness (DRF), which DL2 imitates first.

    Slots are the only resource. The job that has waited longest starts on its smallest number of
    slots and grows to an equal share of the cluster. If no waiting job fits, the job with the most
    slots above its share gives one back. If no job waits, the job with the fewest slots grows.
    """
    table, sizes = moment.table, moment.sizes
    legal = moment.legal[:-1].reshape(-1, ACTIONS)
    end = len(moment.legal) - 1
    share = table.room // max(1, len(sizes))
    begun = np.flatnonzero(sizes != table.have)
    if begun.size:
        row = int(begun[0])
        grows_on = legal[row, MORE] and table.have[row] < sizes[row] < share
        return row * ACTIONS + MORE if grows_on else end
    waits = sizes == 0
    starts = legal[:, MORE] & waits
    if starts.any():
        return _action_at_least(starts, -table.age_s, MORE)
    if waits.any():
        shrinks = legal[:, FEWER] & (sizes > np.maximum(table.least, share))
        return _action_at_least(shrinks, -sizes, FEWER) if shrinks.any() else end
    grows = legal[:, MORE]
    return _action_at_least(grows, sizes, MORE) if grows.any() else end


def _action_at_least(rows: BoolArray, least: FloatArray | IntArray, action: int) -> int:
    return int(np.where(rows, least, np.inf).argmin()) * ACTIONS + action


# --- episodes


class RecordingDrl(Drl):
    """Policy `drl` that records each decision as a step; an external function picks the actions."""

    def __init__(self, arrays: Arrays, pick: Pick) -> None:
        card = ModelCard(
            policy=POLICY, features=INPUTS_VERSION, shapes=dict(SHAPES), slots=(1, 1 << 20),
            cluster="", command="", seed=0, date="", figures={},
        )  # fmt: skip
        super().__init__(model=LearnedModel(card, arrays))
        self._pick = pick
        self.steps: list[Step] = []

    def pick(self, moment: DecisionInput, odds: FloatArray, now: Seconds) -> int:
        """Pick an action from `odds`, record it, and return its index in `odds`.

        In `odds` the last action ends the round. In the record action 0 ends the round, as in the
        outputs of the trained networks.
        """
        action = self._pick(moment, odds)
        inputs = {"jobs": moment.jobs, "cluster": moment.cluster}
        choice = Choice(inputs, np.roll(moment.legal, 1), (action + 1) % len(odds))
        log_probability = math.log(max(float(odds[action]), 1e-9))
        self.steps.append(Step(now, now, moment.cluster, [choice], log_probability))
        return action


def drawn(rng: Generator) -> Pick:
    """Return a picker that draws an action from the probabilities."""

    def pick(_: DecisionInput, odds: FloatArray) -> int:
        action = int(np.searchsorted(np.cumsum(odds), rng.random() * odds.sum(), side="right"))
        return min(action, int(np.flatnonzero(odds)[-1]))

    return pick


def training_scenario(slots: int, jobs: int, interval_s: float) -> Scenario:
    """Return a scenario of another size and load; `slots` is a multiple of 4."""
    nodes = (NodeGroup(count=slots // SLOTS_PER_NODE, slots=SLOTS_PER_NODE),)
    return Scenario(jobs=jobs, interval_s=interval_s, nodes=nodes, warm_up=0.0)


class _EventCollector(MinSlotsPolicy):
    """FIFO policy that collects the events that a policy observes."""

    def __init__(self) -> None:
        super().__init__(make("fifo"), gangs=True)
        self.heard: list[PolicyEvent] = []

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Record the event."""
        self.heard.append(event)


def past(jobs: int, seed: int) -> list[PolicyEvent]:
    """Return the events of a FIFO run of Table 2's jobs on 64 slots."""
    fifo = _EventCollector()
    simulate(fifo, training_scenario(64, jobs, 30.0), seed)
    return fifo.heard


def episode(
    arrays: Arrays, scenario: Scenario, seed: int, pick: Pick, heard: Sequence[PolicyEvent] = ()
) -> tuple[list[Step], SimulationResult]:
    """Simulate a scenario; return the policy's steps and the result.

    The policy observes the events `heard` before the episode, as in a long-running cluster.
    """
    policy = RecordingDrl(arrays, pick)
    for event in heard:
        policy.observe(event, Seconds(0.0))
    result = simulate(MinSlotsPolicy(policy), scenario, seed)
    return policy.steps, result


def average_jct_s(result: SimulationResult) -> float:
    """Return the mean completion time of finished jobs, in seconds."""
    return float(np.mean([job.jct_s for job in result.jobs if job.jct_s is not None]))


def rewards(result: SimulationResult) -> list[tuple[float, float, float]]:
    """Return (start, end, reward per second) of each interval between changes of the active jobs.

    The reward is minus the number of active jobs. Without discount its sum over time is minus the
    sum of all completion times (Little's law).
    """
    begun = np.array([job.submitted_at for job in result.jobs])
    over = np.array([job.ended_at or result.ended_at for job in result.jobs])
    times = np.unique(np.concatenate((begun, over))).tolist()
    return [
        (start, end, -float(((begun <= start) & (start < over)).sum()))
        for start, end in pairwise(times)
    ]


# --- the environment


class DrlNetworks(nn.Module):
    """Networks that score the actions of many moments at once; see `Actor` of the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.job, self.end = Dense(JOB_NET), Dense(END_NET)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the logits of the end of the round, then of "more, fewer, same" for each job.

        `inputs` are jobs, shape (B, W, N, JOB_INPUTS), and cluster, shape (B, W, CLUSTER_INPUTS).
        """
        jobs, cluster = inputs["jobs"], inputs["cluster"]
        spread = cluster[..., None, :].expand(*jobs.shape[:-1], -1)
        per_job = self.job(torch.cat((jobs, spread), dim=-1)).flatten(-2)
        return torch.cat((self.end(cluster), per_job), dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrlRecipe(Recipe):
    """Hyperparameters of a training of `drl`."""

    warm_iterations: int = 10
    warm_rate: float = 0.005
    warm_updates: int = 120  # optimiser steps per iteration of the warm-up
    rounds: int = 50
    rollouts: int = 3
    updates: int = 24
    replay: int = 8192
    rate: float = 1e-4
    entropy: float = 0.1
    horizon_s: float = 500.0  # discount of 0.99 per round of 5 s
    validate_every: int = 10
    looks: int = 2  # number of validation traces per size
    sizes: tuple[int, ...] = (16, 32, 64)  # slots per cluster
    jobs: int = 60  # number of jobs in an episode
    past: int = 200  # number of jobs known before every other episode
    intervals_s: tuple[float, float] = (20.0, 45.0)  # range of the mean time between submissions


class DrlEnvironment:
    """Training environment that simulates the live core with Table 2's jobs."""

    warm_phase = "imitation"
    scores = ("jct_vs_heuristic",)
    states = CLUSTER_INPUTS

    def __init__(self, seed: int, recipe: DrlRecipe | None = None) -> None:
        self.recipe = recipe or DrlRecipe()
        self._seed = seed
        self._heuristic: dict[int, float] = {}  # trace -> mean completion time of the heuristic
        self._past: list[PolicyEvent] | None = None  # simulated on first use

    def networks(self) -> DrlNetworks:
        """Return new networks with random weights."""
        return DrlNetworks()

    def warm_up(self, trainer: ActorCriticTrainer, iteration: int, rng: Generator) -> float:
        """Learn the heuristic's actions while the networks take more and more actions."""
        recipe = self.recipe
        share = iteration / max(1, recipe.warm_iterations - 1)
        for place, slots in enumerate(recipe.sizes):
            taught: list[int] = []

            def pick(moment: DecisionInput, odds: FloatArray, taught: list[int] = taught) -> int:
                taught.append(teacher_action(moment))
                return int(odds.argmax()) if rng.random() < share else taught[-1]

            at = iteration * len(recipe.sizes) + place
            scenario = self._scenario(slots, rng)
            steps, _ = episode(
                trainer.arrays(), scenario, self._trace(at), pick, self._past_events(at)
            )
            for step, action in zip(steps, taught, strict=True):
                (one,) = step.choices
                chosen = (action + 1) % len(one.allowed)
                step.choices = [Choice(one.inputs, one.allowed, chosen)]
            trainer.remember(steps)
        return float(np.mean([imitate(trainer, rng) for _ in range(recipe.warm_updates)]))

    def rollouts(self, number: int, arrays: Arrays, rng: Generator) -> list[Rollout]:
        """Simulate one trace several times, with actions drawn by their probability."""
        recipe, sizes = self.recipe, len(self.recipe.sizes)
        iteration = recipe.warm_iterations + number
        scenario = self._scenario(recipe.sizes[iteration % sizes], rng)
        seed, heard = self._trace(iteration * sizes), self._past_events(iteration // sizes)
        played = [
            episode(arrays, scenario, seed, drawn(rng), heard) for _ in range(recipe.rollouts)
        ]
        return [Rollout(steps, rewards(result)) for steps, result in played]

    def validate(self, arrays: Arrays) -> tuple[float, ...]:
        """Return the geometric mean of completion times, each divided by the heuristic's."""
        recipe, ratios = self.recipe, []
        for place, slots in enumerate(recipe.sizes * recipe.looks):
            scenario = training_scenario(slots, recipe.jobs, sum(recipe.intervals_s) / 2)
            seed, heard = self._trace(VALIDATION_OFFSET + place), self._past_events(place)
            _, own = episode(arrays, scenario, seed, lambda _, odds: int(odds.argmax()), heard)
            if seed not in self._heuristic:
                _, taught = episode(
                    arrays, scenario, seed, lambda moment, _: teacher_action(moment), heard
                )
                self._heuristic[seed] = average_jct_s(taught)
            ratios.append(average_jct_s(own) / self._heuristic[seed])
        return (float(np.exp(np.mean(np.log(ratios)))),)

    def trained(self, arrays: Arrays) -> Trained:
        """Return the model with these networks."""
        recipe = self.recipe
        cluster = (
            f"table2, {recipe.jobs} jobs, one every {recipe.intervals_s[0]:g} to"
            f" {recipe.intervals_s[1]:g} s, on {', '.join(map(str, recipe.sizes))} V100 in"
            f" nodes of 4; traces from seed {self._trace(0)} on"
        )
        slots = (min(recipe.sizes), max(recipe.sizes))
        return Trained(INPUTS_VERSION, slots, cluster, arrays)

    def _scenario(self, slots: int, rng: Generator) -> Scenario:
        interval_s = float(rng.uniform(*self.recipe.intervals_s))
        return training_scenario(slots, self.recipe.jobs, interval_s)

    def _trace(self, place: int) -> int:
        return FIRST_TRACE + TRACES_PER_SEED * self._seed + place

    def _past_events(self, place: int) -> list[PolicyEvent]:
        """Return the events that `past` returns if `place` is even, otherwise no events."""
        if place % 2:
            return []
        if self._past is None:
            self._past = past(self.recipe.past, self._trace(PAST_OFFSET))
        return self._past


def imitate(trainer: ActorCriticTrainer, rng: Generator) -> float:
    """Make the replayed choices, which are the heuristic's, more probable; return the loss."""
    batch = trainer.replayed(rng)
    logs = trainer.log_probabilities(batch)
    return trainer.step(-logs.gather(-1, batch["chosen"][..., None]).mean())
