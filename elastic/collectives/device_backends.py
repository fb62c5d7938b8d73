"""Which device a worker trains on, and which backend carries its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from elastic.collectives.backend_protocol import Backend, Meeting
from elastic.collectives.gloo import GlooBackend
from elastic.collectives.nccl import NcclBackend

CPU: Final = torch.device("cpu")
_makers: dict[str, Callable[[Meeting], Backend]] = {"cpu": GlooBackend, "cuda": NcclBackend}


def register(kind: str, make: Callable[[Meeting], Backend]) -> None:
    """From now on, workers of this process train on devices of this kind where there are some.

    Args:
        make: gives the backend that carries gradients on such a device; not connected yet.
    """
    _makers[kind] = make


def slot_device() -> torch.device:
    """The device of this worker's slot: index 0 of what it may see, or the CPU.

    The index is always said: `cuda` and `cuda:0` are not equal, so a tensor's device would not be
    known as the worker's own.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type not in _makers:
        return CPU
    return torch.device(found.type, 0)


def use_device(device: torch.device) -> None:
    """Make `device` the current one of the calling thread; each thread has its own."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def finish_device_work(device: torch.device) -> None:
    """Wait until `device` is through with all that it was given, on every stream."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def backend_for(meeting: Meeting) -> Backend:
    """What carries collectives of tensors on the meeting's device; not connected yet."""
    return _makers[meeting.device.type](meeting)
