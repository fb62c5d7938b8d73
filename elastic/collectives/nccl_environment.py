"""The variables that NCCL and torch's process group of it read, as a group that changes needs them.

They have to be set before the first process group of the process is made, and while the process has
one thread: C libraries read the environment without a lock.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

RELIED_ON: Final[Mapping[str, str]] = MappingProxyType(
    {
        # torch's watchdog thread would end the process after another's death, also after abort().
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DESYNC_DEBUG": "0",  # would turn the line above on again
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the script meets the error, and says where
        "TORCH_NCCL_BLOCKING_WAIT": "0",  # would make wait() hold the thread, and end with an abort
        # Its monitor thread ends the process if the watchdog is slow, or if another rank asks.
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",  # through the group's store, which may be gone
        # After an error the watchdog sleeps four times as long, under the lock that an abort needs.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        # Seconds that torch waits for a communicator to be connected: as long as gloo is given.
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
        "NCCL_COMM_BLOCKING": "0",  # wins over the group's own configuration
    }
)
DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Connect all peers while the group is built: else its first all-reduce does, in training.
        "NCCL_RUNTIME_CONNECT": "0",
    }
)
INTERFACE: Final = "NCCL_SOCKET_IFNAME"


def interface_of(address: str) -> str:
    """The network interface that has `address`; NCCL wants it by name.

    Args:
        address: an IPv4 or IPv6 address or a name of this host, as text.

    Returns:
        Its name; `lo` for all of 127.0.0.0/8; empty where no interface has the address.
    """
    import psutil  # noqa: PLC0415 - only where NCCL is used

    wanted = _addresses(address)
    for name, found in psutil.net_if_addrs().items():
        for entry in found:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and (
                _addresses(entry.address) & wanted
            ):
                return str(name)
    return "lo" if any(one.is_loopback for one in wanted) else ""


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
    """What has to be set before the first NCCL process group is made.

    Args:
        address: of this host, where the other members reach it; NCCL's sockets go over its
            interface, as gloo's do.
        interface: finds the interface of an address.

    Returns:
        Only what differs: empty where all is set already. What a group relies on replaces what is
        there, the rest gives way to it.
    """
    wanted = {name: value for name, value in RELIED_ON.items() if present.get(name) != value}
    wanted |= {name: value for name, value in DEFAULTS.items() if name not in present}
    if not present.get(INTERFACE) and (name := interface(address)):
        wanted[INTERFACE] = f"={name}"  # without `=` it would fit eth0 and eth01
    return wanted
