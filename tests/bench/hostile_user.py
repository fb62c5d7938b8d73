"""Attacks of one hostile user; each runs in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
import sys
import time
import tomllib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import zmq

from controlplane.client.connection import find_home
from schemas.codec import encode
from schemas.ids import JobId
from schemas.transport.keys import load_keys, load_public
from schemas.wire import Message
from schemas.wire.client import ListJobs, PutSnapshot, SubmitJob, WaitJob
from tests.support.builders import job_spec

MIB: Final = 1 << 20
CONNECTIONS: Final = 4
IDLE: Final = 300
SHAKING: Final = 20  # connections of which the oldest is closed for the next one
PAUSE_S: Final = 0.002  # in which libzmq gives up a descriptor
RETRY_MS: Final = 300  # after which a handshake that got no answer is tried again


class Hostile:
    def __init__(self, home: Path, until: float) -> None:
        self.until = until
        self._home = find_home(home)
        self._keys, self._server = load_keys(self._home.key), load_public(self._home.server_key)
        self._context = zmq.Context()
        self._number = itertools.count()

    def dealer(self) -> zmq.Socket[bytes]:
        return self._connected(zmq.DEALER, self._home.endpoint)

    def subscriber(self, port: int) -> zmq.Socket[bytes]:
        return self._connected(zmq.SUB, f"{self._home.endpoint.rpartition(':')[0]}:{port}")

    def _connected(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger, made.sndhwm, made.handshake_ivl = 0, 100, RETRY_MS
        made.curve_serverkey, made.curve_publickey = self._server, self._keys.public
        made.curve_secretkey = self._keys.secret
        made.connect(endpoint)
        return made

    def dealers(self) -> Iterator[zmq.Socket[bytes]]:
        made = [self.dealer() for _ in range(CONNECTIONS)]
        for each in itertools.cycle(made):
            if time.monotonic() > self.until:
                return
            with contextlib.suppress(zmq.Again):
                while True:
                    each.recv_multipart(zmq.NOBLOCK)
            yield each

    def ask(self, dealer: zmq.Socket[bytes], request: Message) -> None:
        with contextlib.suppress(zmq.Again):
            frames = [str(next(self._number)).encode(), encode(request)]
            dealer.send_multipart(frames, zmq.NOBLOCK)

    def hold(self, opened: list[socket.socket]) -> None:
        while time.monotonic() < self.until:
            for place, wire in enumerate(opened):
                with contextlib.suppress(BlockingIOError, OSError):
                    if not wire.recv(1):
                        opened[place] = idle(*wire.getpeername()[:2])
            time.sleep(0.1)


def idle(host: str, port: int) -> socket.socket:
    wire = socket.create_connection((host, port))
    wire.settimeout(0.0)
    return wire


def processor(bob: Hostile, _: Path) -> None:
    while time.monotonic() < bob.until:
        pass


def multiparts(bob: Hostile, _: Path) -> None:
    """Send messages of 1,000 frames of 1 MiB, the largest that are accepted."""
    piece = bytes(MIB)
    for dealer in bob.dealers():
        with contextlib.suppress(zmq.Again):
            dealer.send_multipart([piece] * 1000, zmq.NOBLOCK, copy=False)
        time.sleep(0.05)


def uploads(bob: Hostile, _: Path) -> None:
    piece = os.urandom(MIB)
    for number, dealer in enumerate(bob.dealers()):
        digest = hashlib.sha256(str(number // 50).encode()).hexdigest()
        offset = number % 50 * MIB
        bob.ask(dealer, PutSnapshot(digest=digest, offset=offset, data=piece, total=400 * MIB))
        time.sleep(0.002)


def polls(bob: Hostile, home: Path) -> None:
    job = JobId((home / "job").read_text())
    for number, dealer in enumerate(bob.dealers()):
        bob.ask(dealer, WaitJob(job=job, wait_s=30.0))
        if number > 1000:
            time.sleep(0.002)


def requests(bob: Hostile, _: Path) -> None:
    for dealer in bob.dealers():
        for each in [ListJobs()] * 50:
            bob.ask(dealer, each)


def submissions(bob: Hostile, home: Path) -> None:
    snapshot = (home / "snapshot").read_text()
    for number, dealer in enumerate(bob.dealers()):
        if number < 1000:
            bob.ask(dealer, SubmitJob(spec=job_spec("more"), snapshot=snapshot))
        else:
            time.sleep(0.01)


def connections(bob: Hostile, home: Path) -> None:
    listen = ports_of(home)
    ports = [listen["clients"], listen["metrics"]]
    bob.hold([idle("127.0.0.1", port) for port in ports for _ in range(IDLE)])


def handshakes(bob: Hostile, _: Path) -> None:
    opened: deque[zmq.Socket[bytes]] = deque()
    while time.monotonic() < bob.until:
        opened.append(bob.dealer())
        if len(opened) > SHAKING:
            opened.popleft().close()
            time.sleep(PAUSE_S)


def subscriptions(bob: Hostile, home: Path) -> None:
    feed = ports_of(home)["feed"]
    speakers = [bob.subscriber(feed) for _ in range(CONNECTIONS)]
    for number in itertools.count():
        if time.monotonic() > bob.until:
            return
        speakers[number % CONNECTIONS].subscribe(f"job/{number:0200}")


def ports_of(home: Path) -> dict[str, int]:
    settings = tomllib.loads((home.parent / "cluster" / "controller.toml").read_text())
    return dict(settings["listen"])


ATTACKS: Final = {
    each.__name__: each
    for each in (
        processor, multiparts, uploads, polls, requests, submissions, connections, handshakes,
        subscriptions,
    )
}  # fmt: skip


def attack() -> None:
    name, home, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    os.nice(19)  # it has no processor of its own here, as it would elsewhere
    ATTACKS[name](Hostile(home, time.monotonic() + seconds), home)
    os._exit(0)


if __name__ == "__main__":
    attack()
