"""What `model_fn` gives: everything that is trained, and so has to hop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from elastic.training_errors import UsageError

FORMS = (
    "return the model, (model, optimizer), (model, optimizer, scheduler) or "
    "Trained(model=..., optimizer=..., scheduler=..., scaler=...)"
)


class Trained:
    """Objects by name, each with `state_dict` and `load_state_dict`.

    `train_fn` finds them as attributes: `trained.model`, `trained.optimizer`. What is not in one of
    their states does not hop.
    """

    def __init__(self, **objects: Any) -> None:
        """Keep them.

        Args:
            objects: by name; None is left out.

        Raises:
            UsageError: if one has no state, or there is no `model`.
        """
        self._objects = {name: one for name, one in objects.items() if one is not None}
        if not isinstance(self._objects.get("model"), nn.Module):
            raise UsageError("model_fn gave no model", FORMS, "model_fn")
        for name, one in self._objects.items():
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                what = f"model_fn: {name} ({type(one).__name__}) has no state_dict"
                raise UsageError(what, "what is trained has to hop: give it one", "model_fn")

    def __getattr__(self, name: str) -> Any:
        """The object of that name."""
        objects = self.__dict__.get("_objects", {})
        if name in objects:
            return objects[name]
        raise AttributeError(f"model_fn gave no {name!r}, only {', '.join(objects)}")

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(self._objects)

    def state(self) -> dict[str, Any]:
        """The state of each."""
        return {name: one.state_dict() for name, one in self._objects.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: as `state` gave it, of the same objects.

        Raises:
            UsageError: if it is of others.
        """
        if state.keys() != self._objects.keys():
            what = (
                f"model_fn gave {', '.join(self._objects)}, the state that came has "
                f"{', '.join(state)}"
            )
            hint = "model_fn has to build the same objects for the same configuration"
            raise UsageError(what, hint, "model_fn")
        for name, one in self._objects.items():
            one.load_state_dict(state[name])

    def to(self, device: torch.device) -> None:
        """Move the modules; optimizers follow, because parameters stay the same objects."""
        for one in self._objects.values():
            if isinstance(one, nn.Module):
                one.to(device)


def as_trained(built: Any) -> Trained:
    """What `model_fn` returned, in one form.

    Args:
        built: a model, a tuple of model, optimizer and scheduler, a mapping, or a `Trained`.

    Raises:
        UsageError: if it is none of these.
    """
    if isinstance(built, Trained):
        return built
    if isinstance(built, nn.Module):
        return Trained(model=built)
    if isinstance(built, Mapping):
        return Trained(**built)
    if isinstance(built, tuple) and 1 <= len(built) <= 3:  # noqa: PLR2004 - see FORMS
        return Trained(**dict(zip(("model", "optimizer", "scheduler"), built, strict=False)))
    raise UsageError(f"model_fn gave a {type(built).__name__}", FORMS, "model_fn")
