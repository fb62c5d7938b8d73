"""The reward model learns from history, by supervised learning."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from controlplane.policy.harmony_drl.reward_model import LARGEST
from controlplane.sim.learning.harmony_drl.history import History


class RewardFit:
    """Least squares on logarithms of speeds, in small batches."""

    def __init__(self, beside: nn.Module, spread: nn.Module, history: History, rate: float) -> None:
        """Take what there is to learn from.

        Args:
            spread: network for jobs on several nodes.
        """
        self._nets = nn.ModuleList([beside, spread])
        self._beside = torch.tensor(history.beside, dtype=torch.float32)
        self._occupied = torch.tensor(history.occupied)
        self._spread = torch.tensor(history.spread, dtype=torch.float32)
        self._several = torch.tensor(history.on_several)
        self._target = torch.tensor(history.log_speed, dtype=torch.float32)
        self.optimiser = torch.optim.Adam(self._nets.parameters(), lr=rate)

    def epoch(self, generator: torch.Generator, batch: int = 256) -> float:
        """Once through the history.

        Returns:
            Root mean square error of logarithms of speeds, over the steps.
        """
        order, total = torch.randperm(len(self._target), generator=generator), 0.0
        for rows in torch.split(order, batch):
            loss = ((self._predicted(rows) - self._target[rows]) ** 2).mean()
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            total += loss.item() * len(rows)
        return float((total / len(self._target)) ** 0.5)

    def _predicted(self, rows: Tensor) -> Tensor:
        """As `RewardModel` does it."""
        beside, spread = self._nets
        logs = nn.functional.softplus(beside(self._beside[rows])[..., 0]).clamp(max=LARGEST)
        worst = torch.where(self._occupied[rows], logs, 0.0).amax(dim=1)
        alone = spread(self._spread[rows])[:, 0].clamp(-LARGEST, LARGEST)
        return -(worst + torch.where(self._several[rows], alone, 0.0))
