"""The policy network of `drl` in torch, with the names and shapes that its model's file has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from controlplane.policy.drl.actor import END_NET, JOB_NET
from controlplane.prediction.array_types import FloatArray
from controlplane.sim.learning.drl.episodes import Decision

NEVER = -1e9  # logit of what is not legal


class ActorNet(nn.Module):
    """Scores the actions of many moments at once; see `policy.drl.actor`."""

    def __init__(self) -> None:
        """Draw its weights, as torch does."""
        super().__init__()
        self.job = _layers(JOB_NET)
        self.end = _layers(END_NET)

    def forward(self, jobs: Tensor, cluster: Tensor, legal: Tensor) -> Tensor:
        """Logarithms of the probabilities of all actions.

        Args:
            jobs: shape (B, N, JOB_INPUTS), filled up with zeros.
            cluster: shape (B, CLUSTER_INPUTS).
            legal: shape (B, 3 N + 1).

        Returns:
            Shape (B, 3 N + 1); far below 0 where an action is not legal.
        """
        spread = cluster[:, None, :].expand(-1, jobs.shape[1], -1)
        per_job = _through(self.job, torch.cat((jobs, spread), dim=2)).flatten(1)
        logits = torch.cat((per_job, _through(self.end, cluster)), dim=1)
        return torch.log_softmax(logits.masked_fill(~legal, NEVER), dim=1)

    def arrays(self) -> dict[str, FloatArray]:
        """Its parameters as a model's file has them."""
        return {
            name: np.asarray(value.detach().numpy(), dtype=np.float64)
            for name, value in self.state_dict().items()
        }


class Batch:
    """Decisions as tensors, filled up to the most jobs among them."""

    def __init__(self, decisions: Sequence[Decision]) -> None:
        """Pack them."""
        most = max(len(decision.jobs) for decision in decisions)
        width = decisions[0].jobs.shape[1]
        jobs = np.zeros((len(decisions), most, width), dtype=np.float32)
        legal = np.zeros((len(decisions), 3 * most + 1), dtype=np.bool_)
        for place, decision in enumerate(decisions):
            many = len(decision.jobs)
            jobs[place, :many] = decision.jobs
            legal[place, : 3 * many] = decision.legal[:-1]
            legal[place, -1] = decision.legal[-1]
        self._most = most
        self._many = [len(decision.jobs) for decision in decisions]
        self.jobs = torch.from_numpy(jobs)
        self.cluster = torch.from_numpy(
            np.array([decision.cluster for decision in decisions], dtype=np.float32)
        )
        self.legal = torch.from_numpy(legal)

    def index(self, actions: Sequence[int]) -> Tensor:
        """Where these actions are among those of `ActorNet`: the end comes last there."""
        return torch.tensor(
            [
                3 * self._most if action == 3 * many else action
                for action, many in zip(actions, self._many, strict=True)
            ]
        )


def _layers(widths: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))


def _through(layers: nn.ModuleList, values: Tensor) -> Tensor:
    for place, layer in enumerate(layers):
        values = layer(values)
        if place + 1 < len(layers):
            values = torch.tanh(values)
    return values
