"""Actor and critic, and how they learn from a buffer of what they did (experience replay)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from controlplane.prediction.array_types import FloatArray
from controlplane.sim.learning.harmony_drl.rollouts import Placement

LAMBDA: Final = 0.95  # of advantages
MOST_RATIO: Final = 2.0  # weight of what is more probable now than when it was done
RATES: Final = (3e-3, 3e-3)  # of learning; of the actor and of the critic
ENTROPY: Final = 0.003
Batch = dict[str, Tensor]


class ActorCritic:
    """Learns from placements."""

    def __init__(self, actor: nn.Module, sharpness: nn.Parameter, critic: nn.Module) -> None:
        """Begin with an empty buffer.

        Args:
            sharpness: weight of expected losses of speed in the score.
            critic: V(s).
        """
        self.actor, self.sharpness, self.critic = actor, sharpness, critic
        self.optimiser = torch.optim.Adam(
            [
                {"params": [*actor.parameters(), sharpness], "lr": RATES[0]},
                {"params": critic.parameters(), "lr": RATES[1]},
            ]
        )

    def slow_down(self, share: float) -> None:
        """Learn at a share of the usual rates from now on.

        Args:
            share: above 0.
        """
        for group, rate in zip(self.optimiser.param_groups, RATES, strict=True):
            group["lr"] = rate * share

    def values(self, placements: Sequence[Placement]) -> FloatArray:
        """V(s) before each placement, shape (len(placements),)."""
        states = torch.tensor(np.array([one.state for one in placements]), dtype=torch.float32)
        with torch.no_grad():
            values: FloatArray = self.critic(states)[:, 0].double().numpy()
        return values

    def advantages(self, placements: Sequence[Placement]) -> tuple[FloatArray, FloatArray]:
        """How much better each was than expected, and what the critic should have said.

        Args:
            placements: of one whole episode, in order.

        Returns:
            Two arrays of shape (len(placements),).
        """
        values = np.append(self.values(placements), 0.0)
        found, later = np.zeros(len(placements)), 0.0
        for at in reversed(range(len(placements))):
            one = placements[at]
            error = one.reward + one.discount * values[at + 1] - values[at]
            found[at] = later = error + one.discount * LAMBDA * later
        return found, found + values[:-1]

    def learn(self, batch: Batch) -> tuple[float, float]:
        """One step on some placements of the buffer.

        Returns:
            The loss of the critic, and the entropy of the choices.
        """
        scores = self.actor(batch["features"])[..., 0] - self.sharpness * batch["costs"]
        scores = scores.masked_fill(~batch["allowed"], -1e9)
        logs = torch.log_softmax(scores, dim=-1)
        chosen = logs.gather(-1, batch["chosen"][..., None])[..., 0]
        placed = batch["placed"]
        log_probability = (chosen * placed).sum(dim=1)
        entropy = -((logs.exp() * logs).sum(dim=-1) * placed).sum() / placed.sum()
        ratio = (log_probability.detach() - batch["log_probability"]).exp().clamp(max=MOST_RATIO)
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
) -> Batch:
    """Placements as tensors, padded.

    Args:
        advantages: shape (B,).
        values: for the critic, shape (B,).
    """
    inputs = placements[0].choices[0].among.features.shape[1]
    shape = (len(placements), most_workers, most_nodes)
    features, costs = np.zeros((*shape, inputs), np.float32), np.zeros(shape, np.float32)
    allowed = np.zeros(shape, np.bool_)
    allowed[..., 0] = True  # also of workers that are not there
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


def joined(batches: Sequence[Batch]) -> Batch:
    """One after the other."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
