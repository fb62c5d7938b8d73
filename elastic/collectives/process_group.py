"""One version of a job's process group, beside others, never torch's default group."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from elastic.training_errors import BrokenGroupError, CancelledError

BUILD_LIMIT_S: Final = 30.0
LONG: Final = timedelta(seconds=1800)  # that something the training thread may hold up takes
OPERATION_LIMIT_S: Final = 1800.0  # a rank may evaluate for long while the others wait
GLOO: Final[Any] = dist.ProcessGroupGloo  # its options have no types
LOOK_S: Final = 0.02  # how often a wait looks whether it was called off


class StoreServer:
    """The TCPStore that the members of one version meet at, on this worker's address only."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            address, self.port, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=BUILD_LIMIT_S), master_listen_fd=listener.detach(),
        )  # fmt: skip


def connect(address: str, version: int, limit_s: float = BUILD_LIMIT_S) -> PrefixStore:
    """One client of the store at HOST:PORT; each thread needs its own.

    Raises:
        BrokenGroupError: if nobody serves it.
    """
    host, _, port = address.rpartition(":")
    try:
        store = TCPStore(
            host.strip("[]"), int(port), is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise BrokenGroupError(f"cannot reach the group's store: {_first_line(error)}") from None
    return PrefixStore(f"v{version}", store)


class Group:
    """The members of one version. A group of one needs no sockets.

    Two process groups: `_train` carries the collectives of the training thread, `_state` the
    transfers beside it, so that a transfer that fails leaves the gradients alone.
    """

    def __init__(
        self, version: int, rank: int, size: int, device: torch.device, backends: list[Any]
    ) -> None:
        self.version = version
        self.rank = rank
        self.size = size
        self.device = device
        self.store: Any = None  # for a few words beside the collectives
        self._backends = backends

    def all_reduce(self, tensor: torch.Tensor, cancel: threading.Event) -> None:
        """Sum `tensor` over all ranks, in place.

        Raises:
            CancelledError: `cancel` was set meanwhile; the operation still owns `tensor`.
            BrokenGroupError: a peer is gone; the same.
        """
        if self.size > 1:
            self._finish(lambda: self._backends[0].allreduce([tensor]), cancel)

    def broadcast(self, tensor: torch.Tensor, source: int, cancel: threading.Event) -> None:
        """Give all ranks the `tensor` of rank `source`; errors as `all_reduce`."""
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = source
            options.rootTensor = 0
            self._finish(lambda: self._backends[0].broadcast([tensor], options), cancel)

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Begin to send `tensor`; returns torch's work, to be waited for in a helper thread."""
        return self._backends[1].send([tensor], to, 0)

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        """Begin to receive into `tensor`; the same."""
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
            raise BrokenGroupError(_first_line(error)) from None

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


def build(
    *, version: int, store: str, rank: int, size: int, address: str, device: torch.device
) -> Group:
    """Meet the other members; blocks up to `BUILD_LIMIT_S`.

    Args:
        version: of the group; names its keys in the store.
        store: HOST:PORT.
        rank: of this worker.
        size: members.
        address: of this host, where the others reach it; binds the sockets.
        device: where gradients live, which chooses gloo or NCCL.

    Raises:
        BrokenGroupError: if they did not all come.
    """
    if size == 1:
        return Group(version, rank, size, device, [])
    client = connect(store, version)
    try:
        backends = [
            _backend(PrefixStore(name, client), rank, size, address, device)
            for name in ("train", "state")
        ]
    except RuntimeError as error:
        raise BrokenGroupError(_first_line(error)) from None
    group = Group(version, rank, size, device, backends)
    group.store = client
    return group


def _backend(store: PrefixStore, rank: int, size: int, address: str, device: torch.device) -> Any:
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_of(address))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=OPERATION_LIMIT_S)  # noqa: SLF001 - no public name
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo = GLOO._Options()  # noqa: SLF001 - no public name
    gloo._timeout = timedelta(seconds=BUILD_LIMIT_S)  # noqa: SLF001 - of connecting, at first
    gloo._threads = 2  # noqa: SLF001
    gloo._devices = [GLOO.create_device(hostname=address)]  # noqa: SLF001
    backend = GLOO(store, rank, size, gloo)
    with contextlib.suppress(RuntimeError, AttributeError):
        backend._set_default_timeout(timedelta(seconds=OPERATION_LIMIT_S))  # noqa: SLF001
    return backend


def interface_of(address: str) -> str:
    """The network interface that has `address`; NCCL wants it by name."""
    import psutil  # noqa: PLC0415 - only where NCCL is used

    for name, found in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in found):
            return str(name)
    return "lo" if address.startswith("127.") else ""


class Building:
    """A group that is built in a thread of its own, while training goes on."""

    def __init__(self, make: Callable[[], Group], failed: Callable[[str], None]) -> None:
        self._make = make
        self._failed = failed
        self.group: Group | None = None
        self.over = threading.Event()  # it is there, or has failed
        self._dropped = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="build", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether the group can be used."""
        return self.group is not None

    def drop(self) -> None:
        """The group is not wanted any more."""
        with self._lock:
            self._dropped = True
            if self.group is not None:
                self.group.retire()
                self.group = None

    def _run(self) -> None:
        try:
            group = self._make()
        except Exception as error:  # noqa: BLE001 - a thread's end that nobody hears of is worse
            if not self._dropped:
                self._failed(str(error) or type(error).__name__)
            self.over.set()
            return
        with self._lock:
            if self._dropped:
                group.retire()
            else:
                self.group = group
        self.over.set()


def wait_for(ready: threading.Event, cancel: threading.Event, limit_s: float | None = None) -> None:
    """Wait for `ready`.

    Raises:
        CancelledError: if `cancel` was set first, or `limit_s` is over.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while not ready.wait(LOOK_S):
        if cancel.is_set() or (deadline is not None and time.monotonic() > deadline):
            raise CancelledError


def agree(group: Group, said: bytes, cancel: threading.Event, source: int = 0) -> bytes:
    """What rank `source` said, on every rank; errors as `Group.all_reduce`."""
    if group.size == 1:
        return said
    length = torch.tensor([len(said)], dtype=torch.int64, device=group.device)
    group.broadcast(length, source, cancel)
    if not int(length):
        return b""
    if group.rank == source:
        data = torch.frombuffer(bytearray(said), dtype=torch.uint8).to(group.device)
    else:
        data = torch.empty(int(length), dtype=torch.uint8, device=group.device)
    group.broadcast(data, source, cancel)
    return as_bytes(data)


def as_bytes(data: torch.Tensor) -> bytes:
    """The content of a tensor of bytes, without numpy."""
    host = data.cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel())


def _first_line(error: BaseException) -> str:
    line = next((part for part in str(error).splitlines() if part.strip()), type(error).__name__)
    return line.rpartition("] ")[2].partition(". This is")[0][:300]
