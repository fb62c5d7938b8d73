"""Copies of a state on the host, so that training may go on while they are written."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch


def copy_to_host(state: Any) -> Any:
    """`state` with every tensor copied to the host, so that training may go on meanwhile.

    Args:
        state: mappings, lists and tuples of tensors, numpy's arrays and scalars, and anything
            else.

    Returns:
        The same containers, named tuples too, with mappings as dicts; arrays become tensors,
        numpy's scalars Python's. What is neither is not copied.
    """
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(state, numpy.generic):
        return state.item()  # a checkpoint is read back without executing anything, numpy included
    if numpy is not None and isinstance(state, numpy.ndarray):
        return torch.from_numpy(state.copy())
    if isinstance(state, Mapping):
        return {key: copy_to_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        copies = (copy_to_host(value) for value in state)
        make = getattr(state, "_make", type(state))  # a named tuple's class wants one by one
        return make(copies)
    return state


def plain_containers(state: Any) -> Any:
    """`state` with named tuples as tuples, since what reads it back knows no class of a script.

    Args:
        state: a copy of `copy_to_host`, or containers of such.

    Returns:
        Dicts, lists and tuples of the same values; nothing is copied.
    """
    if isinstance(state, Mapping):
        return {key: plain_containers(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain_containers(value) for value in state]
    if isinstance(state, tuple) and not isinstance(state, torch.Size):
        return tuple(plain_containers(value) for value in state)
    return state
