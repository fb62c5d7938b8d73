"""Which device a worker trains on, and which backend carries its gradients.

Gloo, for tensors on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from elastic.collectives.backend_protocol import (
    BUILD_LIMIT_S,
    LOOK_S,
    OPERATION_LIMIT_S,
    Backend,
    Meeting,
)
from elastic.collectives.nccl import NcclBackend

GLOO: Final[Any] = dist.ProcessGroupGloo  # its options have no types
NOT_CONNECTED: Final = "the group is not connected any more"


class GlooOperation:
    """A collective of gloo: a look is a wait with a short limit, which does no harm."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_over(self) -> bool:
        """Wait a little; whether it is over.

        Raises:
            RuntimeError: if a peer is gone.
        """
        try:
            self._work.wait(timedelta(seconds=LOOK_S))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # completed between the two: its own outcome counts
        return True


class GlooBackend:
    """Ranks that are connected by sockets.

    Args:
        meeting: where and whom to meet; its address binds the sockets, because gloo would
            advertise 127.0.0.1 without it.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._group: Any = None

    def connect(self) -> None:
        """Meet the other ranks, within `BUILD_LIMIT_S`.

        Raises:
            RuntimeError: if they did not all come.
        """
        meeting = self._meeting
        options = GLOO._Options()  # noqa: SLF001 - no public name
        options._timeout = timedelta(seconds=BUILD_LIMIT_S)  # noqa: SLF001 - of connecting, at first
        options._threads = 2  # noqa: SLF001
        options._devices = [GLOO.create_device(hostname=meeting.address)]  # noqa: SLF001
        group = GLOO(meeting.store, meeting.rank, meeting.size, options)
        with contextlib.suppress(RuntimeError, AttributeError):
            group._set_default_timeout(timedelta(seconds=OPERATION_LIMIT_S))  # noqa: SLF001
        self._group = group

    def _connected(self) -> Any:
        group = self._group
        if group is None:
            raise RuntimeError(NOT_CONNECTED)
        return group

    def all_reduce(self, tensor: torch.Tensor) -> GlooOperation:
        """Begin to sum `tensor` over all ranks, in place.

        Args:
            tensor: on the host, the same shape and type on every rank.
        """
        return GlooOperation(self._connected().allreduce([tensor]))

    def broadcast(self, tensor: torch.Tensor, source: int) -> GlooOperation:
        """Begin to give all ranks the `tensor` of rank `source`.

        Args:
            tensor: on the host, the same shape and type on every rank.
            source: rank whose values count.
        """
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return GlooOperation(self._connected().broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Begin to send `tensor`; returns torch's work, to be waited for in a helper thread.

        Args:
            tensor: on the host, contiguous; not to be changed until the work is over.
            to: rank that receives it.
        """
        return self._connected().send([tensor], to, 0)

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        """Begin to receive into `tensor`; the same.

        Args:
            tensor: on the host, contiguous; not to be read until the work is over.
            source: rank that sends it.
        """
        return self._connected().recv([tensor], source, 0)

    def abort(self) -> None:
        """Nothing holds a device; operations that were given up end in gloo's own threads."""

    def retire(self) -> None:
        """Take it apart; waits for gloo's own threads."""
        self._group = None


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
