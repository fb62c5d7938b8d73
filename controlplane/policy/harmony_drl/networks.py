"""One step of gradient descent on a small network, without any framework."""

from __future__ import annotations

import numpy as np

from controlplane.policy.learned.dense_net import DenseNet
from controlplane.prediction.array_types import FloatArray


def taught(net: DenseNet, inputs: FloatArray, slopes: FloatArray, rate: float) -> DenseNet:
    """The same network after one step.

    Args:
        inputs: shape (rows, in).
        slopes: derivatives of what is minimised by its outputs, shape (rows, out).
    """
    taken: list[FloatArray] = [inputs]
    for weight, bias in net.layers[:-1]:
        taken.append(np.tanh(taken[-1] @ weight + bias))
    layers = []
    for (weight, bias), values in zip(reversed(net.layers), reversed(taken), strict=True):
        layers.append((weight - rate * (values.T @ slopes), bias - rate * slopes.sum(axis=0)))
        slopes = (slopes @ weight.T) * (1.0 - values**2)  # of the layer before; unused at the first
    return DenseNet(tuple(reversed(layers)))
