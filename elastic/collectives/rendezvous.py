"""Rendezvous of the members of one version: they meet at a store and then connect every backend."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import PrefixStore

from elastic.collectives.backend_protocol import Backend, RendezvousInfo, first_line
from elastic.collectives.backends import CPU, GlooBackend, backend_for, use_device
from elastic.collectives.background import Background
from elastic.collectives.process_group import GroupBackends, ProcessGroup
from elastic.collectives.rendezvous_store import GroupStore, connect_store
from elastic.training_errors import BrokenGroupError


def build_process_group(
    *,
    version: int,
    store: str,
    rank: int,
    size: int,
    address: str,
    device: torch.device,
    prefetched_steps: int = 0,
    publish: Callable[[ProcessGroup], None] = lambda _: None,
) -> ProcessGroup:
    """Return a process group that is connected to all members, or raise BrokenGroupError.

    Blocks up to `BUILD_TIMEOUT_S` for each backend. Before the group connects, it is passed to
    `publish`, so that another thread can abort it.
    """
    if size == 1:
        return ProcessGroup(version, rank, size, device, prefetched_steps=prefetched_steps)

    def rendezvous_info(name: str, backend_device: torch.device) -> RendezvousInfo:
        client = PrefixStore(name, connect_store(store, version))
        return RendezvousInfo(client, rank, size, address, backend_device)

    training: Backend = backend_for(rendezvous_info("train", device))
    transfers = GlooBackend(rendezvous_info("state", CPU))
    control = training if device == CPU else GlooBackend(rendezvous_info("words", CPU))
    backends = GroupBackends(training, transfers, control, GroupStore(store, version))
    group = ProcessGroup(version, rank, size, device, backends)
    publish(group)
    try:
        use_device(device)
        for backend in backends.distinct():
            backend.connect()
        group.prefetched_steps = _max_over_ranks(control, rank, size, prefetched_steps)
    except (RuntimeError, ValueError) as error:
        group.abort()
        raise BrokenGroupError(first_line(error)) from None
    return group


def _max_over_ranks(control: Backend, rank: int, size: int, own: int) -> int:
    values = torch.zeros(size, dtype=torch.int64)
    values[rank] = own
    operation = control.all_reduce(values)
    while not operation.is_over():
        pass
    return int(values.max())


class BackgroundBuild:
    """Construction of a process group in a separate thread, while training continues.

    `make` builds the group. Before the group connects, `make` has to pass it to the given callback,
    so that the group can be aborted. A failure is passed to `failed`, unless the group was dropped.
    """

    def __init__(
        self,
        make: Callable[[Callable[[ProcessGroup], None]], ProcessGroup],
        failed: Callable[[str], None],
    ) -> None:
        self._make = make
        self._failed = failed
        self.group: ProcessGroup | None = None
        self._connecting: ProcessGroup | None = None
        self._dropped = False
        self._lock = threading.Lock()
        self._building = Background(self._run, "build")
        self.over = self._building.over  # set when it is built or has failed

    @property
    def seconds(self) -> float:
        """Duration of the construction."""
        return self._building.seconds

    def drop(self) -> None:
        """Drop the group; abort its rendezvous if the group is not connected yet."""
        with self._lock:
            self._dropped = True
            built, connecting = self.group, self._connecting
            self.group = None
        if connecting is not None:
            connecting.abort(limit_s=0)  # no wait: the device does no work for this group
        if built is not None:
            built.retire()

    def _publish(self, group: ProcessGroup) -> None:
        with self._lock:
            self._connecting = group
            if not self._dropped:
                return
        raise BrokenGroupError("the group was dropped")

    def _run(self) -> None:
        try:
            group = self._make(self._publish)
        except Exception as error:  # noqa: BLE001 - any error is reported, not lost with the thread
            if not self._dropped:
                self._failed(str(error) or type(error).__name__)
            return
        with self._lock:
            if self._dropped:
                group.retire()
            else:
                self.group = group
