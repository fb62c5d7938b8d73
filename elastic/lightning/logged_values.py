"""What a module logs in training, over all workers, whatever `sync_dist` says."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from elastic.scaling_agent import ScalingAgent


class SharedResults(_ResultCollection):
    """Means over samples are taken over those of the global batch, in every step.

    So all workers have the same numbers, and one that leaves takes nothing of the epoch with it.
    """

    def __init__(self, agent: ScalingAgent) -> None:
        """Begin with nothing.

        Args:
            agent: knows the batch that is trained on.
        """
        super().__init__(training=True)
        self._agent = agent
        self.owed: dict[str, tuple[Any, Any]] = {}  # sums of an epoch that a paused job was in

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Take in one logged value.

        Args:
            value: that this worker logs.
        """
        metric, batch = self[key], self._agent.view.batch
        if key in self.owed:
            value_owed, samples_owed = self.owed.pop(key)
            metric.value = metric.value + value_owed
            metric.cumulated_batch_size = metric.cumulated_batch_size + samples_owed
        if batch is None or not metric.is_tensor:
            super().update_metrics(key, value, batch_size)
            return
        if metric.meta.is_mean_reduction and not metric.meta.sync.rank_zero_only:
            super().update_metrics(key, *self._over_workers(value, batch.count))
        elif batch.count:
            super().update_metrics(key, value, batch_size)
        else:  # a batch that counts nothing
            super().update_metrics(key, torch.zeros_like(value), 0)

    def _over_workers(self, value: torch.Tensor, count: int) -> tuple[torch.Tensor, int]:
        own = torch.stack([value.detach().double().cpu(), torch.tensor(count).double()])
        parts = self._agent.view.gather(own.numpy().tobytes())
        if not parts:
            return torch.zeros_like(value), 0
        rows = [torch.frombuffer(bytearray(part), dtype=torch.float64) for part in parts]
        pairs = torch.stack(rows)
        total = pairs[:, 1].sum()
        mean = (pairs[:, 0] * pairs[:, 1]).sum() / total
        return mean.to(value.dtype).to(value.device), int(total)
