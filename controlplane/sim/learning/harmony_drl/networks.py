"""The networks under training, and what they are in a model's file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import nn

from controlplane.policy.harmony_drl.gang_placement import STRUCTURE, Actor
from controlplane.policy.harmony_drl.model import CLASSES, SHAPES
from controlplane.policy.harmony_drl.reward_model import RewardModel
from controlplane.policy.learned.dense_net import DenseNet
from controlplane.prediction.array_types import FloatArray
from controlplane.sim.learning.harmony_drl.rollouts import critic_width

SHARPNESS: Final = 15.0  # of expected losses in the score, to begin with
CRITIC_HIDDEN: Final = 64


class Networks:
    """Reward model, actor and critic."""

    def __init__(self, seed: int) -> None:
        """Draw them; the actor begins as the greedy choice by the reward model."""
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
        """Those that are modules, by name."""
        return nn.ModuleDict(
            {
                "beside": self.beside,
                "spread": self.spread,
                "actor": self.actor,
                "critic": self.critic,
            }
        )

    def reward_model(self) -> RewardModel:
        """As it is now, without torch."""
        return RewardModel(plain(self.beside), plain(self.spread), CLASSES)

    def placing(self) -> Actor:
        """The actor as it is now, without torch."""
        return Actor(plain(self.actor), float(self.sharpness.item()))


def plain(network: nn.Sequential) -> DenseNet:
    """A network without torch; a copy."""
    return DenseNet(
        tuple(
            (_array(layer.weight).T.copy(), _array(layer.bias))
            for layer in network
            if isinstance(layer, nn.Linear)
        )
    )


def arrays_of(reward: RewardModel, actor: Actor, families: int) -> dict[str, FloatArray]:
    """What a model's file holds.

    Classes that were never met are given the mean of those that were: of a family that nobody
    knows the mean is expected.

    Args:
        families: how many classes were met, the first ones.
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
