"""What trains a policy, as the loop around it sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from controlplane.prediction.array_types import FloatArray


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training has come to: all of a model's card that only the trainer knows."""

    features: int  # version of what the policy's inputs mean
    slots: tuple[int, int]  # of the clusters that it was trained on, from and to
    cluster: str  # these clusters and their jobs, in words
    figures: dict[str, float]  # what it reached
    arrays: dict[str, FloatArray]
    families: tuple[str, ...] = ()  # of jobs, in the order of the numbers that stand for them


class Trainer(Protocol):
    """Trains one policy, iteration by iteration.

    Everything that an iteration draws comes from the seed and the iteration's number, so that a
    training that goes on from a saved state ends as one that was never interrupted.
    """

    @property
    def settings(self) -> Mapping[str, float | str]:
        """What it was told: a saved training goes on only under the same."""
        ...

    @property
    def iterations(self) -> int:
        """How many it wants, in all."""
        ...

    def iterate(self, iteration: int) -> dict[str, float | str]:
        """One iteration; may take seconds.

        Returns:
            A row of the learning curve: each time the same columns, in the same order.
        """
        ...

    def state(self) -> dict[str, Any]:
        """All that the iterations so far have left behind; a copy that later ones do not change.

        Made of tensors, numbers, texts, lists and dictionaries.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Args:
            state: as `state` gave it, under the same settings.
        """
        ...

    def trained(self) -> Trained:
        """The model as it is by now."""
        ...
