"""Comparison of nested values by type, content and strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.stride() == other.stride()
        return bool(alike and torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool(np.array_equal(one, other))
    if isinstance(one, TensorDataset):
        return isinstance(other, TensorDataset) and same(one.tensors, other.tensors)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    return type(one) is type(other) and bool(one == other)
