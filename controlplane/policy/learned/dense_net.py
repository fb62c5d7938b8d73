"""A small dense network in plain numpy: what is trained with torch is evaluated without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from controlplane.prediction.array_types import FloatArray

Layer = tuple[FloatArray, FloatArray]  # weights, shape (in, out), and biases, shape (out,)


@dataclass(frozen=True, slots=True)
class DenseNet:
    """Layers of weights and biases; tanh between them, nothing behind the last."""

    layers: tuple[Layer, ...]

    def __call__(self, inputs: FloatArray) -> FloatArray:
        """Its outputs.

        Args:
            inputs: shape (N, in).

        Returns:
            Shape (N, out).
        """
        values = inputs
        for place, (weight, bias) in enumerate(self.layers):
            values = values @ weight + bias
            if place + 1 < len(self.layers):
                values = np.tanh(values)
        return values


def dense_net(name: str, arrays: Mapping[str, FloatArray]) -> DenseNet:
    """A network of a model.

    Args:
        name: of the network; layer k has arrays `name.k.weight`, shape (out, in), and
            `name.k.bias`, shape (out,), from k = 0 on, as torch has them.
    """
    layers: list[Layer] = []
    while f"{name}.{len(layers)}.weight" in arrays:
        at = f"{name}.{len(layers)}"
        layers.append((arrays[f"{at}.weight"].T.copy(), arrays[f"{at}.bias"]))
    return DenseNet(tuple(layers))


def dense_shapes(name: str, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of such a network.

    Args:
        widths: of its input, of every layer between, and of its output.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for place, (before, after) in enumerate(pairwise(widths)):
        shapes[f"{name}.{place}.weight"] = (after, before)
        shapes[f"{name}.{place}.bias"] = (after,)
    return shapes


def softmax(logits: FloatArray) -> FloatArray:
    """Probabilities, also where some logits are minus infinity.

    Args:
        logits: shape (A,), at least one of them finite.
    """
    odds: FloatArray = np.exp(logits - logits.max())
    odds /= odds.sum()
    return odds
