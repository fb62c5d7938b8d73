"""Environment for training `harmony-drl`: gangs on Harmony's testbed.

Rollouts use the speeds of the reward model, and validations use the true speeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch
from numpy.random import Generator, default_rng
from torch import Tensor, nn

from controlplane.policy.learned.gang_model import (
    ACTOR_NET,
    BESIDE_NET,
    CLASSES,
    FEATURES,
    SPREAD_NET,
    STRUCTURE,
    Choose,
    TrainedModel,
    best,
    model_of,
    place_gang,
    sampled,
)
from controlplane.policy.learned.model_file import softmax
from controlplane.policy.learned.shared_nodes import (
    MAX_LOG_SLOWDOWN,
    WORKER_SCALE,
    SharedNodes,
    spread_inputs,
)
from controlplane.prediction import FloatArray
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
from controlplane.sim.learning.harmony_testbed import (
    EXPLORED_PATTERNS,
    TRAINED_FAMILIES,
    Arrival,
    Episode,
    HarmonyTestbed,
    at_random,
    draw_testbed,
    pattern,
)

SHARPNESS: Final = 15.0  # initial weight of the expected loss of speed in a score
SUMMARY_INPUTS: Final = 7  # number of the critic's inputs that do not belong to a class
REPORT_NOISE: Final = 0.05  # standard deviation of the logarithm of a report


class HarmonyNetworks(nn.Module):
    """Reward model and actor; an untrained actor chooses greedily by the reward model."""

    def __init__(self) -> None:
        super().__init__()
        self.beside, self.spread = Dense(BESIDE_NET), Dense(SPREAD_NET)
        self.actor = Dense(ACTOR_NET)
        self.actor.start_at_zero()
        self.sharpness = nn.Parameter(torch.tensor([SHARPNESS]))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the scores of nodes, (B, W, M), from "features" (B, W, M, inputs) and "costs"."""
        scores: Tensor = self.actor(inputs["features"])[..., 0] - self.sharpness * inputs["costs"]
        return scores

    def log_speeds(self, history: History, rows: Tensor) -> Tensor:
        """Return the expected logarithms of reported speeds, relative to each job's speed alone."""
        costs = nn.functional.softplus(self.beside(history.beside[rows])[..., 0])
        costs = torch.where(history.occupied[rows], costs.clamp(max=MAX_LOG_SLOWDOWN), 0.0)
        alone = self.spread(history.spread[rows])[:, 0].clamp(-MAX_LOG_SLOWDOWN, MAX_LOG_SLOWDOWN)
        return -(costs.amax(dim=1) + torch.where(history.on_several[rows], alone, 0.0))


# --- the reward model


@dataclass(frozen=True, slots=True)
class History:
    """R reports of jobs that trained, each on up to K nodes."""

    beside: Tensor  # inputs of the reward model, shape (R, K, inputs)
    occupied: Tensor  # True for nodes with other jobs, shape (R, K)
    spread: Tensor  # inputs for jobs on several nodes, shape (R, inputs)
    on_several: Tensor  # True for jobs on several nodes, shape (R,)
    log_speed: Tensor  # measured, relative to the speed alone on few nodes, shape (R,)


def record_history(beds: Sequence[HarmonyTestbed], model: TrainedModel, rng: Generator) -> History:
    """Simulate traces in which random patterns place the jobs; return noisy reports of speeds."""
    ways = [*map(pattern, EXPLORED_PATTERNS), at_random(rng)]
    inputs: list[FloatArray] = []
    jobs: list[tuple[int, int, int]] = []  # class, size, nodes
    logs: list[float] = []

    def place(shared: SharedNodes, job: Arrival, _line: object) -> None:
        place_gang(shared, model.actor, job.name, ways[int(rng.integers(len(ways)))])

    for bed in beds:

        def report(
            shared: SharedNodes, training: Sequence[str], bed: HarmonyTestbed = bed
        ) -> dict[str, float]:
            speeds = bed.speeds(shared, training)
            for name, speed in speeds.items():
                job, seen = shared.jobs[name], shared.look(name)
                inputs.append(np.c_[seen.others.sum(axis=1) > 0.0, seen.inputs()])
                jobs.append((job.number, job.size, len(job.workers)))
                logs.append(math.log(speed) + REPORT_NOISE * rng.standard_normal())
            return speeds

        Episode(bed.arrivals, SharedNodes(model.reward, bed.sizes), report, bed.start_s).run(place)
    padded = np.zeros((len(inputs), max(map(len, inputs)), inputs[0].shape[1]))
    for at, rows in enumerate(inputs):
        padded[at, : len(rows)] = rows
    number, size, nodes = np.array(jobs).T
    return History(
        beside=torch.tensor(padded[:, :, 1:], dtype=torch.float32),
        occupied=torch.tensor(padded[:, :, 0] > 0.0),
        spread=torch.tensor(spread_inputs(number, size, nodes, CLASSES), dtype=torch.float32),
        on_several=torch.tensor(nodes > 1),
        log_speed=torch.tensor(logs, dtype=torch.float32),
    )


# --- rollouts


def critic_inputs(shared: SharedNodes, job: Arrival, line: Sequence[Arrival]) -> FloatArray:
    """Return the inputs of the critic: jobs and overall placement, shape (7 + 3 classes,)."""
    classes, losses = shared.model.classes, shared.losses()
    found = np.zeros(SUMMARY_INPUTS + 3 * classes)
    found[0] = (math.fsum(1.0 - loss for loss in losses.values()) - 1.0) / WORKER_SCALE
    found[1] = (len(losses) - 1) / WORKER_SCALE  # excludes the job that is placed now
    found[2] = len(line) / WORKER_SCALE
    found[3] = float(shared.free.sum() / shared.sizes.sum())
    found[4] = float((shared.free == shared.sizes).mean())
    found[5] = float((shared.free > 0).mean())
    found[6] = job.size / WORKER_SCALE
    found[SUMMARY_INPUTS + job.number] = 1.0
    for one in shared.jobs.values():
        found[SUMMARY_INPUTS + classes + one.number] += sum(one.workers.values()) / WORKER_SCALE
    for waiting in line:
        found[SUMMARY_INPUTS + 2 * classes + waiting.number] += waiting.size / WORKER_SCALE
    return found


def explored(bed: HarmonyTestbed, model: TrainedModel, explore: float, rng: Generator) -> Rollout:
    """Simulate a trace in which nodes are drawn from the policy's probabilities.

    A pattern places a share `explore` of the jobs. Jobs run at the speed that the reward model
    expects. The reward is the sum of normalised speeds minus the number of jobs. Paper: the sum
    alone, which adds up to the total work over time, and no placement changes this work. Our reward
    is minus the loss of jobs by waiting and by their neighbours, and hardly depends on the
    arrivals.
    """
    steps: list[Step] = []
    ways = [*map(pattern, EXPLORED_PATTERNS), at_random(rng)]

    def speeds(shared: SharedNodes, training: Sequence[str]) -> dict[str, float]:
        losses = shared.losses()
        return {name: 1.0 - losses[name] for name in training}

    def place(shared: SharedNodes, job: Arrival, line: Sequence[Arrival]) -> None:
        state, by_pattern = critic_inputs(shared, job, line), rng.random() < explore
        choose = ways[int(rng.integers(len(ways)))] if by_pattern else sampled(rng)
        chosen = place_gang(shared, model.actor, job.name, choose)
        policy = math.prod(float(softmax(one.among.scores)[one.place]) for one in chosen)
        other = math.prod(1.0 / len(one.among.nodes) for one in chosen) / len(ways)
        if by_pattern:  # lower bound of the probability; patterns can choose equal nodes
            other = max(other, 1.0 / len(ways))
        choices = [
            Choice(
                {"features": one.among.features, "costs": one.among.costs},
                np.ones(len(one.among.nodes), dtype=np.bool_),
                one.place,
            )
            for one in chosen
        ]
        mixed = math.log((1.0 - explore) * policy + explore * other)
        steps.append(Step(episode.now, float(len(steps)), state, choices, mixed))

    episode = Episode(bed.arrivals, SharedNodes(model.reward, bed.sizes), speeds, bed.start_s)
    episode.run(place)
    return Rollout(steps, [(a, b, speed - jobs) for a, b, speed, jobs in episode.intervals])


def placed_by(bed: HarmonyTestbed, model: TrainedModel, choose: Choose) -> dict[str, float]:
    """Simulate a trace at true speeds, and return the end of each job in seconds."""

    def place(shared: SharedNodes, job: Arrival, _line: object) -> None:
        place_gang(shared, model.actor, job.name, choose)

    episode = Episode(bed.arrivals, SharedNodes(model.reward, bed.sizes), bed.speeds, bed.start_s)
    episode.run(place)
    return episode.ends


def mean_jct_s(bed: HarmonyTestbed, model: TrainedModel, choose: Choose) -> float:
    """Simulate a trace at true speeds, and return the mean completion time in seconds."""
    ends = placed_by(bed, model, choose)
    return math.fsum(ends[job.name] - job.at for job in bed.arrivals) / len(ends)


# --- the environment


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyRecipe(Recipe):
    """Hyperparameters of a training of `harmony-drl`."""

    warm_iterations: int = 12  # epochs of the reward model
    warm_rate: float = 3e-3
    rounds: int = 200
    rollouts: int = 6
    updates: int = 6
    replay: int = 4320  # steps of 12 rounds
    rate: float = 3e-3
    entropy: float = 0.005
    horizon_s: float = 3000.0
    validate_every: int = 20
    validations: int = 12  # number of traces
    jobs: int = 60  # per trace
    histories: int = 25  # number of traces for the reward model
    explore: float = 0.15  # share of the jobs that a pattern places


class HarmonyEnvironment:
    """Training environment with Harmony's traces, models and interference rules."""

    warm_phase = "reward model"
    scores = ("jct_vs_least_loaded", "jct_vs_greedy")
    states = SUMMARY_INPUTS + 3 * CLASSES

    def __init__(self, seed: int, recipe: HarmonyRecipe | None = None) -> None:
        self.recipe = recipe or HarmonyRecipe()
        self._seed = seed
        self._history: History | None = None  # recorded on first use
        self._greedy: tuple[float, float] | None = None  # JCTs of least-loaded and greedy placement

    def networks(self) -> HarmonyNetworks:
        """Return new networks; weights are random, but the actor makes the greedy choice."""
        return HarmonyNetworks()

    def warm_up(self, trainer: ActorCriticTrainer, iteration: int, rng: Generator) -> float:
        """Fit the reward model; return the root mean square error of log speeds."""
        if self._history is None:
            draws = default_rng((self._seed, FIRST_TRACE))
            beds = [self._bed(number) for number in range(self.recipe.histories)]
            untrained = model_of(trainer.arrays(), TRAINED_FAMILIES)
            self._history = record_history(beds, untrained, draws)
        history, networks, total = self._history, cast("HarmonyNetworks", trainer.networks), 0.0
        for rows in torch.split(torch.randperm(len(history.log_speed)), self.recipe.batch):
            errors = networks.log_speeds(history, rows) - history.log_speed[rows]
            total += trainer.step((errors**2).mean()) * len(rows)
        return math.sqrt(total / len(history.log_speed))

    def rollouts(self, number: int, arrays: Arrays, rng: Generator) -> list[Rollout]:
        """Simulate one trace several times at the speeds of the reward model."""
        recipe, model = self.recipe, model_of(arrays, TRAINED_FAMILIES)
        bed = self._bed(recipe.histories + recipe.validations + number)
        return [explored(bed, model, recipe.explore, rng) for _ in range(recipe.rollouts)]

    def validate(self, arrays: Arrays) -> tuple[float, ...]:
        """Return mean completion times relative to least-loaded and to greedy placement."""
        model = model_of(arrays, TRAINED_FAMILIES)
        if self._greedy is None:
            self._greedy = (
                self._mean_jct_s(model, pattern("least loaded")),
                self._mean_jct_s(model, lambda among: int(np.argmin(among.costs))),
            )
        own = self._mean_jct_s(model, best)
        return own / self._greedy[0], own / self._greedy[1]

    def trained(self, arrays: Arrays) -> Trained:
        """Return the model with these networks."""
        slots = sum(self._bed(0).sizes)
        return Trained(
            FEATURES,
            (slots, slots),
            "Harmony's testbed, 6 servers of 2 GPUs, jobs of its six models",
            with_other_classes(arrays, len(TRAINED_FAMILIES)),
            TRAINED_FAMILIES,
        )

    def _mean_jct_s(self, model: TrainedModel, choose: Choose) -> float:
        first, many = self.recipe.histories, self.recipe.validations
        beds = map(self._bed, range(first, first + many))
        return float(np.mean([mean_jct_s(bed, model, choose) for bed in beds]))

    def _bed(self, number: int) -> HarmonyTestbed:
        return draw_testbed(FIRST_TRACE + TRACES_PER_SEED * self._seed + number, self.recipe.jobs)


def with_other_classes(arrays: Arrays, families: int) -> Arrays:
    """Return the arrays, with mean weights for the classes after the first `families`.

    The first classes were trained. An unknown family is expected to behave like their mean.
    """
    found = {name: value.copy() for name, value in arrays.items()}
    blocks = {
        "beside": (0, CLASSES + 2, 2 * CLASSES + 2, 3 * CLASSES + 2),
        "spread": (0,),
        "actor": (STRUCTURE, STRUCTURE + CLASSES),
    }
    for name, starts in blocks.items():
        first = found[f"{name}.0.weight"]
        for start in starts:
            mean = first[:, start : start + families].mean(axis=1, keepdims=True)
            first[:, start + families : start + CLASSES] = mean
    return found
