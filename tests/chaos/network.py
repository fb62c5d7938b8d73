"""Hosts in network namespaces of their own, and a switch between them that has weather.

Every packet between two hosts goes through this process: each host has one tunnel device, whose
other end is here. So a road can be cut one way only, lose, delay or hold back packets, without
anything that the kernel might not have.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

CLONE_NEWNET: Final = 0x40000000
TUNSETIFF: Final = 0x400454CA
IFF_TUN_NO_PI: Final = 0x1001
NETWORK: Final = "10.77.0."
MTU: Final = 1500
AT_ONCE: Final = 64  # packets of one host before the others have their turn
QUEUE_BYTES: Final = 256 << 10  # that a slow road holds before it drops
NAMESPACES: Final = Path("/run/netns")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Weather:
    """What a road from one host to another does to packets."""

    blocked: bool = False
    loss: float = 0.0  # share
    delay_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: as many as come


@dataclass(slots=True)
class _Road:
    weather: list[Weather] = field(default_factory=list)  # all at once; the worst of each counts
    free_at: float = 0.0  # when the packet before is through
    last_at: float = 0.0  # nothing overtakes


class Network:
    """Hosts by name, in this order at 10.77.0.1, 10.77.0.2, ...; a context manager. Needs root."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self.names = tuple(names)
        self._prefix = f"ones-{os.getpid()}-{seed}-"
        self._draw = random.Random(seed)
        self._tunnels: dict[str, int] = {}
        self._roads: dict[tuple[str, str], _Road] = {}
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="switch", daemon=True)
        self._made: list[str] = []

    def __enter__(self) -> Self:
        try:
            for number, name in enumerate(self.names, start=1):
                self._make(name, f"{NETWORK}{number}")
        except BaseException:
            self._unmake()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._unmake()

    def address(self, name: str) -> str:
        """Of a host."""
        return f"{NETWORK}{self.names.index(name) + 1}"

    def namespace(self, name: str) -> Path:
        """Where a process enters it."""
        return NAMESPACES / f"{self._prefix}{name}"

    def change(self, source: str, target: str, weather: Weather, *, begins: bool) -> None:
        """Weather begins or ends on the road from one host to another; several may lie over it."""
        road = self._roads.setdefault((source, target), _Road())
        present = list(road.weather)
        (present.append if begins else present.remove)(weather)
        road.weather = present

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread, and what it starts, is at that host."""
        _enter(self.namespace(name))
        try:
            yield
        finally:
            _set_namespace(self._home)

    def _make(self, name: str, address: str) -> None:
        space = f"{self._prefix}{name}"
        _ip("netns", "add", space)
        self._made.append(space)
        with self.inside(name):
            tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(tunnel, TUNSETIFF, struct.pack("16sH22x", b"lab0", IFF_TUN_NO_PI))
        self._tunnels[name] = tunnel
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{address}/24", "dev", "lab0"),
            ("link", "set", "lab0", "mtu", str(MTU), "txqueuelen", "2000", "up"),
        ):
            _ip("-n", space, *words)

    def _unmake(self) -> None:
        for tunnel in self._tunnels.values():
            os.close(tunnel)
        for space in self._made:
            _ip("netns", "delete", space)
        os.close(self._home)

    # --- the switch

    def _carry(self) -> None:
        by_number = dict(enumerate(self.names, start=1))
        late: list[tuple[float, int, str, bytes]] = []
        with selectors.DefaultSelector() as hosts:
            for name, tunnel in self._tunnels.items():
                hosts.register(tunnel, selectors.EVENT_READ, name)
            count = 0
            while not self._closing.is_set():
                wait_s = late[0][0] - time.monotonic() if late else 0.1
                for key, _ in hosts.select(min(0.1, max(0.0, wait_s))):
                    for packet in _packets(key.fd):
                        target = by_number.get(packet[19]) if packet[0] >> 4 == 4 else None
                        if target is None:
                            continue
                        due = self._due(key.data, target, len(packet))
                        if due == 0.0:
                            self._deliver(target, packet)
                        elif due > 0.0:
                            count += 1
                            heapq.heappush(late, (due, count, target, packet))
                while late and late[0][0] <= time.monotonic():
                    _, _, target, packet = heapq.heappop(late)
                    self._deliver(target, packet)

    def _due(self, source: str, target: str, size: int) -> float:
        """When a packet comes out: 0 at once, below 0 never."""
        road = self._roads.get((source, target))
        if road is None or not (weather := road.weather):
            return 0.0
        if any(w.blocked or self._draw.random() < w.loss for w in weather):
            return -1.0
        now = time.monotonic()
        slowest = min((w.bytes_per_s for w in weather if w.bytes_per_s), default=0.0)
        due = now
        if slowest:
            road.free_at = max(now, road.free_at) + size / slowest
            if (road.free_at - now) * slowest > QUEUE_BYTES:
                road.free_at -= size / slowest
                return -1.0
            due = road.free_at
        road.last_at = max(road.last_at, due + sum(w.delay_s for w in weather))
        return road.last_at

    def _deliver(self, target: str, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # its queue is full: so is a wire's
            os.write(self._tunnels[target], packet)


def _packets(tunnel: int) -> Iterator[bytes]:
    for _ in range(AT_ONCE):
        try:
            yield os.read(tunnel, 65536)
        except OSError:
            return


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _enter(namespace: Path) -> None:
    handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(handle)
    finally:
        os.close(handle)


def _set_namespace(handle: int) -> None:
    setns: Any = _libc.setns
    if setns(handle, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
