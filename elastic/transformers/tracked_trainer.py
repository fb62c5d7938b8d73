"""What a trainer counts beside the model: it travels to newcomers, and lies in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.trainer_callback import ExportableState

if TYPE_CHECKING:
    from elastic.transformers.trainer_mixin import ElasticMixin

COUNTS: Final = (
    "epoch", "global_step", "max_steps", "total_flos", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
TOTALS: Final = ("_total_loss_scalar", "_globalstep_last_logged")


class TrackedTrainer:
    """State, history, losses so far, and what callbacks remember, of one trainer."""

    def __init__(self, trainer: ElasticMixin) -> None:
        """Look at `trainer`.

        Args:
            trainer: whose state it is; changed by `load_state_dict`.
        """
        self._trainer: Any = trainer
        self._lines: list[str] = []  # of the history, so that each is encoded once

    def state_dict(self) -> dict[str, Any]:
        """Numbers, text and their containers."""
        trainer = self._trainer
        state, history = trainer.state, trainer.state.log_history
        del self._lines[len(history) :]
        self._lines += [json.dumps(entry, default=float) for entry in history[len(self._lines) :]]
        return {
            "counts": {name: _plain(getattr(state, name)) for name in COUNTS},
            "history": list(self._lines),
            "loss": trainer._tr_loss,  # noqa: SLF001 - so it is called there
            "totals": {name: getattr(trainer, name) for name in TOTALS},
            "evaluated": dict(trainer._evaluated),  # noqa: SLF001
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse.

        Args:
            state: what `state_dict` gave here or on another worker.
        """
        trainer = self._trainer
        for name, value in state["counts"].items():
            setattr(trainer.state, name, value)
        self._lines = list(state["history"])
        trainer.state.log_history[:] = [json.loads(line) for line in self._lines]
        trainer._tr_loss = torch.as_tensor(  # noqa: SLF001
            state["loss"], device=trainer.args.device
        ).clone()
        for name, value in state["totals"].items():
            setattr(trainer, name, value)
        trainer._evaluated = dict(state["evaluated"])  # noqa: SLF001
        for callback, attributes in zip(self._callbacks(), state["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def _callbacks(self) -> list[Any]:
        handler = self._trainer.callback_handler
        return [each for each in handler.callbacks if isinstance(each, ExportableState)]


def _plain(value: Any) -> Any:
    """A number of numpy's as Python's: what travels is read back without numpy."""
    return value.item() if hasattr(value, "item") else value
