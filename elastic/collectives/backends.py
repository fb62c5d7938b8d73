"""The choice of a worker's device and of its gradients' backend, and gloo for host tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from elastic.collectives.backend_protocol import (
    BUILD_TIMEOUT_S,
    OPERATION_TIMEOUT_S,
    POLL_S,
    Backend,
    RendezvousInfo,
)
from elastic.collectives.nccl import NcclBackend

GLOO: Final[Any] = dist.ProcessGroupGloo  # has no type hints
NOT_CONNECTED: Final = "the group is closed"


class GlooOperation:
    """A gloo collective. It is polled with short waits; gloo tolerates a wait that times out."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_over(self) -> bool:
        """Wait up to `POLL_S`; return True if the operation is over."""
        try:
            self._work.wait(timedelta(seconds=POLL_S))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # the operation has completed meanwhile; raise its own error
        return True


class GlooBackend:
    """Backend that connects the ranks by sockets.

    The sockets are bound to the address of this host, because gloo would advertise 127.0.0.1.
    """

    def __init__(self, info: RendezvousInfo) -> None:
        self._info = info
        self._group: Any = None

    def connect(self) -> None:
        """Connect to the other ranks within `BUILD_TIMEOUT_S`."""
        info = self._info
        options = GLOO._Options()  # noqa: SLF001 - no public name
        options._timeout = timedelta(seconds=BUILD_TIMEOUT_S)  # noqa: SLF001 - while connecting
        options._threads = 2  # noqa: SLF001
        options._devices = [GLOO.create_device(hostname=info.address)]  # noqa: SLF001
        group = GLOO(info.store, info.rank, info.size, options)
        with contextlib.suppress(RuntimeError, AttributeError):
            group._set_default_timeout(timedelta(seconds=OPERATION_TIMEOUT_S))  # noqa: SLF001
        self._group = group

    def _connected(self) -> Any:
        group = self._group
        if group is None:
            raise RuntimeError(NOT_CONNECTED)
        return group

    def all_reduce(self, tensor: torch.Tensor) -> GlooOperation:
        """Start to sum a host tensor over all ranks, in place."""
        return GlooOperation(self._connected().allreduce([tensor]))

    def broadcast(self, tensor: torch.Tensor, source: int) -> GlooOperation:
        """Start to broadcast a host tensor of rank `source`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return GlooOperation(self._connected().broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Start to send a contiguous host tensor; return torch's work, for a helper thread."""
        return self._connected().send([tensor], to, 0)

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        """Start to receive into a contiguous host tensor; return torch's work, as `send` does."""
        return self._connected().recv([tensor], source, 0)

    def abort(self) -> None:
        """Do nothing: gloo uses no device, and its own threads end the abandoned operations."""

    def retire(self) -> None:
        """Close the group after gloo's own threads have ended."""
        self._group = None


CPU: Final = torch.device("cpu")
_makers: dict[str, Callable[[RendezvousInfo], Backend]] = {"cpu": GlooBackend, "cuda": NcclBackend}


def register(kind: str, make: Callable[[RendezvousInfo], Backend]) -> None:
    """Register devices of type `kind` for training; `make` returns an unconnected backend."""
    _makers[kind] = make


_local_rank = [0]  # index of the device among those that are visible


def use_local_rank(rank: int) -> None:
    """Choose the device of a process that sees the devices of all processes on its host."""
    _local_rank[:] = [rank % max(1, torch.accelerator.device_count())]


def slot_device() -> torch.device:
    """Return the device of this worker's slot, or the CPU. A cluster shows it only this device.

    The index is always set, because `cuda` and `cuda:0` are not equal.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type not in _makers:
        return CPU
    return torch.device(found.type, *_local_rank)


def use_device(device: torch.device) -> None:
    """Make `device` the calling thread's current device. Each thread has its own current device."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def finish_device_work(device: torch.device) -> None:
    """Wait until `device` has finished its work on every stream."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of `device` records a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def backend_for(info: RendezvousInfo) -> Backend:
    """Return a new, unconnected backend for tensors on the device of `info`."""
    return _makers[info.device.type](info)
