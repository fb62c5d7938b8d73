"""Actor and critic of `harmony-drl`: networks, rollouts, and learning from a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn

from controlplane.policy.learned.gang_model import (
    CLASSES,
    SHAPES,
    STRUCTURE,
    Actor,
    Choice,
    place_gang,
    sampled,
)
from controlplane.policy.learned.model_file import DenseNet, softmax
from controlplane.policy.learned.shared_nodes import WORKER_SCALE, RewardModel, SharedNodes
from controlplane.prediction import FloatArray
from controlplane.sim.learning.harmony_testbed import (
    EXPLORED_PATTERNS,
    Arrival,
    Episode,
    HarmonyTestbed,
    at_random,
    pattern,
)

SUMMARY_INPUTS: Final = 7  # inputs of the critic besides those by class


@dataclass(slots=True)
class Placement:
    """Placement of one job's workers, and its reward."""

    state: FloatArray  # critic's inputs before the placement
    choices: list[Choice]
    log_probability: float  # of these choices, as they were made
    reward: float = 0.0  # discounted, until the next job is placed
    discount: float = 1.0  # of all later rewards


@dataclass(slots=True)
class Rollout:
    """Exploration of an episode with the current policy."""

    actor: Actor
    rng: Generator
    explore: float  # share of the jobs placed by a pattern
    horizon_s: float  # time constant of the exponential discount
    placements: list[Placement] = field(default_factory=list)

    def run(self, bed: HarmonyTestbed, model: RewardModel) -> None:
        """Simulate a trace; `model` states the losses between jobs, and so their speeds.

        The true speeds of `bed` are not used.
        """

        def speeds(shared: SharedNodes, training: Sequence[str]) -> dict[str, float]:
            losses = shared.losses()
            return {name: 1.0 - losses[name] for name in training}

        shared = SharedNodes(model, bed.sizes)
        Episode(bed.arrivals, shared, speeds, bed.start_s).run(self._place, self._add_reward)

    def _place(self, shared: SharedNodes, job: Arrival, line: Sequence[Arrival]) -> None:
        state = critic_inputs(shared, job, line)
        ways = len(EXPLORED_PATTERNS) + 1
        by_pattern = self.rng.random() < self.explore
        choose = sampled(self.rng)
        if by_pattern:
            way = int(self.rng.integers(ways))
            choose = (
                pattern([*EXPLORED_PATTERNS][way])
                if way < len(EXPLORED_PATTERNS)
                else at_random(self.rng)
            )
        choices = place_gang(shared, self.actor, job.name, choose)
        policy = math.prod(float(softmax(one.among.scores)[one.place]) for one in choices)
        chance = math.prod(1.0 / len(one.among.nodes) for one in choices)
        other = chance / ways  # a lower bound: patterns may have chosen the same
        if by_pattern:
            other = max(other, 1.0 / ways)
        mixed = (1.0 - self.explore) * policy + self.explore * other
        self.placements.append(Placement(state, choices, math.log(mixed)))

    def _add_reward(self, passed_s: float, speed: float, jobs: int) -> None:
        """Add the reward of an interval: sum of normalised speeds minus the number of jobs.

        Paper: the sum of normalised speeds of the concurrent jobs. Here: minus its value if every
        active job trained alone. Summed over time the paper's reward is the work done, which no
        placement changes; this reward is minus what the jobs lose by waiting and by their
        neighbours, and it hardly depends on the arrivals.
        """
        if self.placements:
            last, decay = self.placements[-1], math.exp(-passed_s / self.horizon_s)
            last.reward += last.discount * (speed - jobs) * (1.0 - decay)  # times the horizon
            last.discount *= decay


def critic_inputs(shared: SharedNodes, job: Arrival, line: Sequence[Arrival]) -> FloatArray:
    """Return the inputs of the critic: job set and overall placement; shape (7 + 3 classes,)."""
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


def critic_width(classes: int) -> int:
    """Return the number of inputs of the critic."""
    return SUMMARY_INPUTS + 3 * classes


LAMBDA: Final = 0.95  # of generalised advantages
MAX_RATIO: Final = 2.0  # limit of the weight of placements that have become more probable
LEARNING_RATES: Final = (3e-3, 3e-3)  # learning rates of actor and critic
ENTROPY: Final = 0.003
TensorBatch = dict[str, Tensor]


class ActorCritic:
    """Optimiser of actor and critic."""

    def __init__(self, actor: nn.Module, sharpness: nn.Parameter, critic: nn.Module) -> None:
        """Set up the optimiser; `sharpness` weighs expected losses of speed, `critic` is V(s)."""
        self.actor, self.sharpness, self.critic = actor, sharpness, critic
        self.optimiser = torch.optim.Adam(
            [
                {"params": [*actor.parameters(), sharpness], "lr": LEARNING_RATES[0]},
                {"params": critic.parameters(), "lr": LEARNING_RATES[1]},
            ]
        )

    def slow_down(self, share: float) -> None:
        """Set the learning rates to a share of the usual ones."""
        for group, rate in zip(self.optimiser.param_groups, LEARNING_RATES, strict=True):
            group["lr"] = rate * share

    def values(self, placements: Sequence[Placement]) -> FloatArray:
        """Return V(s) before each placement, shape (len(placements),)."""
        states = torch.tensor(np.array([one.state for one in placements]), dtype=torch.float32)
        with torch.no_grad():
            values: FloatArray = self.critic(states)[:, 0].double().numpy()
        return values

    def advantages(self, placements: Sequence[Placement]) -> tuple[FloatArray, FloatArray]:
        """Return advantages and critic's targets of an episode's placements, shape (P,) each."""
        values = np.append(self.values(placements), 0.0)
        found, later = np.zeros(len(placements)), 0.0
        for at in reversed(range(len(placements))):
            one = placements[at]
            error = one.reward + one.discount * values[at + 1] - values[at]
            found[at] = later = error + one.discount * LAMBDA * later
        return found, found + values[:-1]

    def learn(self, batch: TensorBatch) -> tuple[float, float]:
        """Take a step on placements of the buffer; return the critic's loss and the entropy."""
        scores = self.actor(batch["features"])[..., 0] - self.sharpness * batch["costs"]
        scores = scores.masked_fill(~batch["allowed"], -1e9)
        logs = torch.log_softmax(scores, dim=-1)
        chosen = logs.gather(-1, batch["chosen"][..., None])[..., 0]
        placed = batch["placed"]
        log_probability = (chosen * placed).sum(dim=1)
        entropy = -((logs.exp() * logs).sum(dim=-1) * placed).sum() / placed.sum()
        ratio = (log_probability.detach() - batch["log_probability"]).exp().clamp(max=MAX_RATIO)
        actor_loss = -(ratio * batch["advantage"] * log_probability).mean()
        critic_loss = ((self.critic(batch["state"])[:, 0] - batch["value"]) ** 2).mean()
        loss = actor_loss + critic_loss - ENTROPY * entropy
        self.optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.actor.parameters(), 1.0)
        nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)
        self.optimiser.step()
        return critic_loss.item(), entropy.item()


def as_batch(
    placements: Sequence[Placement],
    advantages: FloatArray,
    values: FloatArray,
    most_workers: int,
    most_nodes: int,
) -> TensorBatch:
    """Return placements as padded tensors; `values` are the critic's targets, shape (B,)."""
    inputs = placements[0].choices[0].among.features.shape[1]
    shape = (len(placements), most_workers, most_nodes)
    features, costs = np.zeros((*shape, inputs), np.float32), np.zeros(shape, np.float32)
    allowed = np.zeros(shape, np.bool_)
    allowed[..., 0] = True  # also for padded workers
    chosen, placed = np.zeros(shape[:2], np.int64), np.zeros(shape[:2], np.float32)
    for row, one in enumerate(placements):
        for worker, choice in enumerate(one.choices):
            many = len(choice.among.nodes)
            features[row, worker, :many] = choice.among.features
            costs[row, worker, :many] = choice.among.costs
            allowed[row, worker, :many] = True
            chosen[row, worker] = choice.place
            placed[row, worker] = 1.0
    spread = advantages.std() + 1e-6
    return {
        "features": torch.tensor(features),
        "costs": torch.tensor(costs),
        "allowed": torch.tensor(allowed),
        "chosen": torch.tensor(chosen),
        "placed": torch.tensor(placed),
        "log_probability": torch.tensor(
            [one.log_probability for one in placements], dtype=torch.float32
        ),
        "advantage": torch.tensor((advantages - advantages.mean()) / spread, dtype=torch.float32),
        "value": torch.tensor(values, dtype=torch.float32),
        "state": torch.tensor(np.array([one.state for one in placements]), dtype=torch.float32),
    }


def joined(batches: Sequence[TensorBatch]) -> TensorBatch:
    """Concatenate batches."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


SHARPNESS: Final = 15.0  # initial weight of expected losses in the score
CRITIC_HIDDEN: Final = 64


class Networks:
    """Reward model, actor and critic."""

    def __init__(self, seed: int) -> None:
        """Draw the networks; the actor starts as the greedy choice by the reward model."""
        generator = torch.Generator().manual_seed(seed)
        self.beside = _dense(_widths("beside"), generator)
        self.spread = _dense(_widths("spread"), generator)
        self.actor = _dense(_widths("actor"), generator)
        self.critic = _dense([critic_width(CLASSES), CRITIC_HIDDEN, 1], generator)
        self.sharpness = nn.Parameter(torch.tensor([SHARPNESS]))
        with torch.no_grad():
            for network in (self.actor, self.critic):
                [*network.parameters()][-2].zero_()  # weights of the last layer

    @property
    def all(self) -> nn.ModuleDict:
        """Modules by name."""
        return nn.ModuleDict(
            {
                "beside": self.beside,
                "spread": self.spread,
                "actor": self.actor,
                "critic": self.critic,
            }
        )

    def reward_model(self) -> RewardModel:
        """Return the current reward model, without torch."""
        return RewardModel(plain(self.beside), plain(self.spread), CLASSES)

    def placing(self) -> Actor:
        """Return the current actor, without torch."""
        return Actor(plain(self.actor), float(self.sharpness.item()))


def plain(network: nn.Sequential) -> DenseNet:
    """Return a copy of a network, without torch."""
    return DenseNet(
        tuple(
            (_array(layer.weight).T.copy(), _array(layer.bias))
            for layer in network
            if isinstance(layer, nn.Linear)
        )
    )


def arrays_of(reward: RewardModel, actor: Actor, families: int) -> dict[str, FloatArray]:
    """Return the arrays of a model file, trained on the first `families` classes.

    The weights of the other classes are the mean over the trained ones: for an unknown family the
    mean is expected.
    """
    nets = {"beside": reward.beside_net, "spread": reward.spread_net, "actor": actor.net}
    found: dict[str, FloatArray] = {"sharpness": np.array([actor.sharpness])}
    for name, net in nets.items():
        for place, (weight, bias) in enumerate(net.layers):
            found[f"{name}.{place}.weight"] = weight.T.copy()
            found[f"{name}.{place}.bias"] = bias
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


def _widths(name: str) -> list[int]:
    widths, layer = [SHAPES[f"{name}.0.weight"][1]], 0
    while f"{name}.{layer}.weight" in SHAPES:
        widths.append(SHAPES[f"{name}.{layer}.weight"][0])
        layer += 1
    return widths


def _dense(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        linear = nn.Linear(before, after)
        nn.init.xavier_uniform_(linear.weight, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _array(tensor: torch.Tensor) -> FloatArray:
    return tensor.detach().double().numpy().copy()
