"""NCCL backend for gradients on GPUs, and the environment variables that NCCL needs.

Observed behaviour (PyTorch 2.13, NCCL 2.29):

- The limit of a `wait` runs from the operation's start. When the limit expires, `wait` aborts the
  communicator. So an operation is polled, and `wait` is called only when it is complete.
- After an abort, an operation is complete without an error, but its tensor is invalid. So the
  backend's own flag is checked before the result is used.
- By default a communicator connects in its first operation, and blocks. Here it connects at once
  without blocking, and its object exists earlier, so that another thread can abort it.

The environment variables have to be set before the first process group of the process is created,
and while the process has one thread: C libraries read the environment without a lock.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist

from elastic.collectives.backend_protocol import (
    BUILD_TIMEOUT_S,
    OPERATION_TIMEOUT_S,
    POLL_S,
    RendezvousInfo,
)

REQUIRED_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        # torch's watchdog thread would kill the process after a peer's death, even after abort().
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DESYNC_DEBUG": "0",  # would enable the option above again
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the script raises the error, with its location
        "TORCH_NCCL_BLOCKING_WAIT": "0",  # would let wait() block and abort at its limit
        # torch's monitor thread kills the process if the watchdog is slow or if a peer asks for it.
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",  # would use the group's store, which might be gone
        # After an error the watchdog sleeps four times this long, with the lock that abort needs.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        # Seconds that torch waits for a communicator to connect; equals BUILD_TIMEOUT_S.
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
        "NCCL_COMM_BLOCKING": "0",  # overrides the group's configuration
    }
)
DEFAULT_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Connect all peers while the group is built, not during training in the first all-reduce.
        "NCCL_RUNTIME_CONNECT": "0",
    }
)
INTERFACE_VARIABLE: Final = "NCCL_SOCKET_IFNAME"


def interface_of(address: str) -> str:
    """Return the network interface that has `address` (an address or name), or "" if none has it.

    For all of 127.0.0.0/8 it is `lo`.
    """
    import psutil  # noqa: PLC0415 - only where NCCL is used

    wanted = _addresses(address)
    for name, found in psutil.net_if_addrs().items():
        for entry in found:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and (
                _addresses(entry.address) & wanted
            ):
                return str(name)
    return "lo" if any(entry.is_loopback for entry in wanted) else ""


def _addresses(text: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return {ipaddress.ip_address(text.partition("%")[0])}
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}


def nccl_environment(
    address: str, present: Mapping[str, str], interface: Callable[[str], str] = interface_of
) -> dict[str, str]:
    """Return the variables to set before the first NCCL process group is created.

    NCCL's sockets then use the interface of `address`, like gloo's. Required values replace other
    values in `present`. Default values apply only where `present` has none.
    """
    wanted = {
        name: value for name, value in REQUIRED_VARIABLES.items() if present.get(name) != value
    }
    wanted |= {name: value for name, value in DEFAULT_VARIABLES.items() if name not in present}
    if not present.get(INTERFACE_VARIABLE) and (name := interface(address)):
        wanted[INTERFACE_VARIABLE] = f"={name}"  # without `=`, "eth0" would also match "eth01"
    return wanted


SPIN_S: Final = 0.0001  # first poll interval
MAX_SPIN_S: Final = 0.001
IDLE_TIMEOUT_S: Final = 30.0  # limit of the wait for the operations of a retired communicator
ABORTED: Final = "the group was aborted"


class NcclOperation:
    """A collective on the device. The event `aborted` is set when the communicator is aborted."""

    def __init__(self, work: Any, aborted: threading.Event) -> None:
        self._work = work
        self._aborted = aborted

    def is_complete(self) -> bool:
        """Return True if the device has ended the operation, successfully or not."""
        return bool(self._work.is_completed())

    def is_over(self) -> bool:
        """Poll for up to `POLL_S`; return True if later work on this stream can use the result."""
        end, pause = time.monotonic() + POLL_S, SPIN_S
        while not self.is_complete():
            if self._aborted.is_set():
                raise RuntimeError(ABORTED)
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, MAX_SPIN_S)
        if self._aborted.is_set():
            raise RuntimeError(ABORTED)
        if (error := self._work.exception()) is not None:
            raise RuntimeError(str(error))
        self._work.wait()
        return True


COMMUNICATOR_BYTES: Final = 1 << 30  # free memory with which NCCL connects


def _make_room(device: torch.device) -> None:
    """Release memory that torch keeps, if the batch fills the device: NCCL allocates its own."""
    free, _ = torch.cuda.mem_get_info(device) if device.type == "cuda" else (COMMUNICATOR_BYTES, 0)
    if free < COMMUNICATOR_BYTES:
        torch.cuda.empty_cache()


class NcclBackend:
    """Backend that connects the ranks' GPUs and runs one operation at a time.

    `make` creates the communicator: torch's class for NCCL, or a substitute.
    """

    def __init__(self, info: RendezvousInfo, make: Any = None) -> None:
        self._info = info
        self._make = make if make is not None else dist.ProcessGroupNCCL
        self._group: Any = None
        self._aborted = threading.Event()
        self._last: NcclOperation | None = None
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Connect to the other ranks within `BUILD_TIMEOUT_S`."""
        info = self._info
        os.environ.update(nccl_environment(info.address, os.environ))
        torch.accelerator.set_device_index(info.device.index)
        options = self._make.Options()
        options._timeout = timedelta(seconds=OPERATION_TIMEOUT_S)  # noqa: SLF001 - no public name
        options.config.blocking = 0
        _make_room(info.device)
        group = self._make(info.store, info.rank, info.size, options)
        with self._lock:
            self._group = group  # from here on, another thread can abort the group
        self._check_wanted()
        group.eager_connect_single_device(info.device)
        end = time.monotonic() + BUILD_TIMEOUT_S
        while not group._is_initialized():  # noqa: SLF001 - no public name
            self._check_wanted()
            if time.monotonic() > end:
                self.abort()
                raise RuntimeError(f"not all ranks connected within {BUILD_TIMEOUT_S:.0f} s")
            time.sleep(MAX_SPIN_S)
        self._check_wanted()

    def _check_wanted(self) -> None:
        if self._aborted.is_set():
            self.abort()  # the first abort might have run before the group existed
            raise RuntimeError(ABORTED)

    def all_reduce(self, tensor: torch.Tensor) -> NcclOperation:
        """Start to sum a dense, contiguous tensor in place, after the current stream's work."""
        return self._begun(self._connected().allreduce([tensor]))

    def broadcast(self, tensor: torch.Tensor, source: int) -> NcclOperation:
        """Start to broadcast a dense, contiguous tensor, after the current stream's work."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return self._begun(self._connected().broadcast([tensor], options))

    def _connected(self) -> Any:
        group = self._group
        if group is None or self._aborted.is_set():
            raise RuntimeError(ABORTED)
        return group

    def _begun(self, work: Any) -> NcclOperation:
        self._last = NcclOperation(work, self._aborted)
        return self._last

    def abort(self) -> None:
        """End the running operations, which do not end by themselves after the loss of a peer."""
        self._aborted.set()
        with self._lock:
            if self._group is not None:
                self._group.abort()

    def retire(self) -> None:
        """Wait up to `IDLE_TIMEOUT_S` for the last operation, then abort the communicator."""
        last, end = self._last, time.monotonic() + IDLE_TIMEOUT_S
        while last is not None and not last.is_complete() and time.monotonic() < end:
            time.sleep(POLL_S)
        self.abort()
        with self._lock:
            self._group = None
