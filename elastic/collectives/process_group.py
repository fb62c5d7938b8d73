"""One version of a job's process group, beside others, never torch's default group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from elastic.collectives.cancellable_waits import LOOK_S, first_line
from elastic.collectives.tensor_bytes import as_bytes
from elastic.training_errors import BrokenGroupError, CancelledError

LONG: Final = timedelta(seconds=1800)  # that something the training thread may hold up takes


class ProcessGroup:
    """The members of one version. A group of one needs no sockets.

    Two backends: the first carries the collectives of the training thread, the second the
    transfers beside it, so that a transfer that fails leaves the gradients alone.
    """

    def __init__(
        self, version: int, rank: int, size: int, device: torch.device, backends: list[Any]
    ) -> None:
        """Wrap what was connected.

        Args:
            version: of the job's group.
            rank: of this worker.
            size: ranks.
            device: where gradients live.
            backends: torch's, two of them; none for a group of one.
        """
        self.version = version
        self.rank = rank
        self.size = size
        self.device = device
        self.store: Any = None  # for a few words beside the collectives
        self._backends = backends

    def all_reduce(self, tensor: torch.Tensor, cancel: threading.Event) -> None:
        """Sum `tensor` over all ranks, in place.

        Args:
            tensor: of the same shape and type on every rank.
            cancel: set when the wait is to end.

        Raises:
            CancelledError: `cancel` was set meanwhile; the operation still owns `tensor`.
            BrokenGroupError: a peer is gone; the same.
        """
        if self.size > 1:
            self._finish(lambda: self._backends[0].allreduce([tensor]), cancel)

    def broadcast(self, tensor: torch.Tensor, source: int, cancel: threading.Event) -> None:
        """Give all ranks the `tensor` of rank `source`; errors as `all_reduce`.

        Args:
            tensor: of the same shape and type on every rank; written in place on all but
                `source`.
            source: rank whose values count.
            cancel: set when the wait is to end.

        Raises:
            CancelledError: `cancel` was set meanwhile; the operation still owns `tensor`.
            BrokenGroupError: a peer is gone; the same.
        """
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = source
            options.rootTensor = 0
            self._finish(lambda: self._backends[0].broadcast([tensor], options), cancel)

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Begin to send `tensor`; returns torch's work, to be waited for in a helper thread.

        Args:
            tensor: contiguous; not to be changed until the work is over.
            to: rank that receives it.
        """
        return self._backends[1].send([tensor], to, 0)

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        """Begin to receive into `tensor`; the same.

        Args:
            tensor: contiguous, of the shape and type that is sent; not to be read until the work
                is over.
            source: rank that sends it.
        """
        return self._backends[1].recv([tensor], source, 0)

    def _finish(self, begin: Callable[[], Any], cancel: threading.Event) -> None:
        if cancel.is_set():
            raise CancelledError
        try:
            work = begin()
            while not _waited(work):
                if cancel.is_set():
                    raise CancelledError
        except RuntimeError as error:
            raise BrokenGroupError(first_line(error)) from None

    def retire(self) -> None:
        """Take it apart, off the training thread: that waits for the backend's own threads."""
        doomed, self._backends = self._backends, []
        if doomed:
            threading.Thread(target=doomed.clear, name="retire", daemon=True).start()


def _waited(work: Any) -> bool:
    """Wait a little; whether the operation is over."""
    try:
        work.wait(timedelta(seconds=LOOK_S))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # completed between the two: its own outcome counts
    return True


def broadcast_bytes(
    group: ProcessGroup, data: bytes, cancel: threading.Event, source: int = 0
) -> bytes:
    """The `data` of rank `source`, on every rank.

    Args:
        group: of which all ranks call this.
        data: of this rank; only that of `source` counts, and may have any length.
        cancel: set when the wait is to end.
        source: whose data it is.

    Raises:
        CancelledError: `cancel` was set meanwhile.
        BrokenGroupError: a peer is gone.
    """
    if group.size == 1:
        return data
    length = torch.tensor([len(data)], dtype=torch.int64, device=group.device)
    group.broadcast(length, source, cancel)
    if not int(length):
        return b""
    if group.rank == source:
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(group.device)
    else:
        row = torch.empty(int(length), dtype=torch.uint8, device=group.device)
    group.broadcast(row, source, cancel)
    return as_bytes(row)


def post_in_background(group: ProcessGroup, key: str, make: Callable[[], bytes]) -> None:
    """Put what `make` returns into the group's store, off the training thread.

    Args:
        group: of more than one member, so that it has a store.
        key: name in that store, and of the thread.
        make: gives the value, in a thread of its own.
    """

    def put() -> None:
        # who should read it may be gone, which the next reduction finds out
        with contextlib.suppress(RuntimeError):
            group.store.set(key, make())

    threading.Thread(target=put, name=key, daemon=True).start()
