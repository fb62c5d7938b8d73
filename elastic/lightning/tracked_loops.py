"""What Lightning counts beside the model: it travels to newcomers, and lies in checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call

from elastic.samples.micro_batch import MicroBatch
from elastic.scaling_agent import ScalingAgent


class TrackedLoops:
    """Counts of the loops, sums of what is logged, and what callbacks remember.

    Lightning counts in the midst of a step, the agent keeps and sends states of between two steps.
    So what was counted in the present step is told apart: it is no part of the state, and a state
    that comes in the midst of a step is added to it.
    """

    def __init__(self, trainer: Trainer, agent: ScalingAgent) -> None:
        """Look at `trainer`.

        Args:
            trainer: that fits.
            agent: knows the step under way.
        """
        self._trainer: Any = trainer
        self._agent = agent
        self._before: dict[str, Any] | None = None  # the present batch
        self._batch: MicroBatch | None = None

    def begin_batch(self) -> None:
        """The loop has got a batch, and has not counted it yet."""
        before, batch = self._present(), self._agent.view.batch
        if batch is not None and not batch.first and self._before is not None:
            before["sums"] = self._before["sums"]  # a step that is dropped loses all its passes
        self._before, self._batch = before, batch

    def state_dict(self) -> dict[str, Any]:
        """Numbers, text, tensors and their containers, as they were before the present step."""
        before = self._before if self._in_batch() else None
        return before if before is not None else self._present()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse.

        Args:
            state: what `state_dict` gave here or on another worker.
        """
        counts = state["counts"]
        sums: Mapping[str, Any] = state["sums"]
        if self._in_batch() and self._before is not None:
            now = self._present()
            counts = _moved(counts, now["counts"], self._before["counts"])
            sums = _moved_sums(sums, now["sums"], self._before["sums"])
            self._before = {**self._before, "counts": state["counts"], "sums": state["sums"]}
        for name, progress in self._progresses().items():
            progress.load_state_dict(counts[name])
        self._trainer.fit_loop.epoch_loop._batches_that_stepped = counts["stepped"]  # noqa: SLF001
        results = self._trainer.fit_loop.epoch_loop._results  # noqa: SLF001
        passes_over = not self._in_batch() and self._batch is not None and not self._batch.last
        for key, (value, samples) in sums.items():
            if key in results and not passes_over:  # behind a pass only its counts are undone
                results[key].value = torch.as_tensor(value).to(results[key].value)
                results[key].cumulated_batch_size = torch.as_tensor(samples)
            elif key not in results:
                results.owed[key] = value, samples
        call._call_callbacks_load_state_dict(  # noqa: SLF001
            self._trainer, {"callbacks": state["callbacks"]}
        )

    def _in_batch(self) -> bool:
        return self._batch is not None and self._agent.view.batch is self._batch

    def _progresses(self) -> dict[str, Any]:
        fit = self._trainer.fit_loop
        epoch = fit.epoch_loop
        return {
            "epoch": fit.epoch_progress,
            "batch": epoch.batch_progress,
            "scheduler": epoch.scheduler_progress,
            "optimizer": epoch.automatic_optimization.optim_progress,
        }

    def _present(self) -> dict[str, Any]:
        epoch = self._trainer.fit_loop.epoch_loop
        counts = {
            name: copy.deepcopy(progress.state_dict())
            for name, progress in self._progresses().items()
        }
        sums = {
            key: (metric.value, metric.cumulated_batch_size)
            for key, metric in epoch._results.items()  # noqa: SLF001
            if metric.is_tensor and metric.meta.is_mean_reduction
        } | epoch._results.owed  # noqa: SLF001
        callbacks = call._call_callbacks_state_dict(self._trainer)  # noqa: SLF001
        counts["stepped"] = epoch._batches_that_stepped  # noqa: SLF001
        return {"counts": counts, "sums": sums, "callbacks": callbacks}


def _moved(state: Any, now: Any, before: Any) -> Any:
    """`state`, moved on by what came from `before` to `now`."""
    if isinstance(state, Mapping):
        return {key: _moved(state[key], now[key], before[key]) for key in state}
    if isinstance(state, bool):
        return now
    return state + now - before


def _moved_sums(
    state: Mapping[str, Any], now: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """The same for sums, of which a newcomer has none before its first step."""
    moved = {}
    for key, (value, samples) in now.items():
        was = before.get(key, (0.0, 0))
        sent = state.get(key, (0.0, 0))
        moved[key] = (sent[0] + value - was[0], sent[1] + samples - was[1])
    return moved
