"""Gloo, for tensors on the host."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from elastic.collectives.backend_protocol import Meeting
from elastic.collectives.cancellable_waits import BUILD_LIMIT_S, LOOK_S, OPERATION_LIMIT_S

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
