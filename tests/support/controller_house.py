"""A whole controller on ports of its own in this process, and people who have keys for it."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from controlplane.service import settings
from controlplane.service.app import Controller
from schemas.codec import FEED, LOG_REPLY, REPLY, encode
from schemas.ids import JobId
from schemas.transport.keys import KeyPair, write_keys
from schemas.transport.sockets import Socket
from schemas.wire import Message
from schemas.wire.client import Failed
from schemas.wire.feed import ReadLog
from tests.support import builders
from tests.support.builders import N1
from tests.support.schemas_links import HeldLink, soon

ROLES: Final = ("events", "agents", "clients", "feed", "shippers", "followers")
ROLE_OF: Final = {N1: "node", "root": "admin"}
DENIED: Final = Failed(
    code="denied",
    message="this key is no longer authorised",
    hint="ask an admin for a new key",
    field="",
)


class House:
    """A controller on ports of its own, and the keys of two people."""

    def __init__(self, base: Path) -> None:
        self.keys = {
            name: write_keys(base / "keys", name) for name in ("server", "root", "ann", "bob", "n1")
        }
        self._authorised = base / "keys" / "authorised.toml"
        self._authorised.touch(mode=0o600)
        self.file = base / "controller.toml"
        self.ports = _free_ports()
        self.settings = "[listen]\nmetrics = 0\n" + "".join(
            f"{role} = {port}\n" for role, port in self.ports.items()
        )
        self.file.write_text(f'{self.settings}[policy]\nname = "fifo"\n')
        self.authorise("root", "ann", "bob", "n1")
        (base / "client.toml").write_text(
            f'endpoint = "tcp://127.0.0.1:{self.ports["clients"]}"\nkey = "keys/root.key_secret"\n'
        )
        self.controller = Controller(settings.load(self.file), base)

    def authorise(self, *names: str) -> None:
        """From the next reload on these may connect, and no others."""
        self._authorised.write_text(
            "".join(
                f'[[key]]\npublic = "{self.keys[name].public.decode()}"\n'
                f'name = "{name}"\nrole = "{ROLE_OF.get(name, "user")}"\n'
                'project = "shared"\n'
                for name in names
            )
        )

    def reload(self) -> None:
        self.controller.settings_of(self.file).reload()


class Person:
    """Connections of one person to the ports of requests, pages and the feed."""

    def __init__(self, house: House, keys: KeyPair) -> None:
        self._link = HeldLink(keys)
        self._house = house
        self._ids = itertools.count()
        self._answers: dict[bytes, Any] = {}
        self.heard: list[tuple[bytes, int]] = []  # of the feed: topics and numbers
        self.requests = self._connect("DEALER", "clients")
        self.pages = self._connect("DEALER", "followers")
        self.feed = self._connect("SUB", "feed")
        self.feed.subscribe(b"")

    def _connect(self, kind: str, role: str) -> Socket:
        address = f"tcp://127.0.0.1:{self._house.ports[role]}"
        return self._link.connect(kind, address, self._house.keys["server"].public)

    def begin(self, request: Message) -> bytes:
        """Ask, and hear of it by `answer`."""
        key = b"%d" % next(self._ids)
        self.requests.send(key, encode(request))
        return key

    async def answer(self, key: bytes) -> Any:
        while key not in self._answers:
            name, data = (await soon(self.requests.receive())).frames
            self._answers[name] = REPLY.decode(data)
        return self._answers.pop(key)

    async def ask(self, request: Message) -> Any:
        return await self.answer(self.begin(request))

    async def read_log(self, request: ReadLog) -> Any:
        self.pages.send(b"id", encode(request))
        return LOG_REPLY.decode((await soon(self.pages.receive())).frames[-1])

    async def hears(self, job: JobId) -> None:
        """Until the feed tells of a job."""
        while True:
            topic, data = (await soon(self.feed.receive())).frames
            event = FEED.decode(data)
            self.heard.append((topic, event.seq))
            if event.job == job:
                return

    def close(self) -> None:
        self._link.close()


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[House]:
    """A house whose controller serves, in a folder of its own."""
    made = House(folder)
    await made.controller.open()
    stop = asyncio.Event()
    serving = asyncio.create_task(made.controller.serve(stop))
    yield made
    stop.set()
    await serving
    made.controller.close()


def _free_ports() -> dict[str, int]:
    with ExitStack() as stack:
        probes = {role: stack.enter_context(socket.socket()) for role in ROLES}
        for probe in probes.values():
            probe.bind(("127.0.0.1", 0))
        return {role: probe.getsockname()[1] for role, probe in probes.items()}


async def heard_by(house: House, *people: Person) -> JobId:
    """Submits jobs until all of these hear of the same one (a feed may be late)."""
    async with asyncio.timeout(60.0):
        while True:
            number = house.controller._state().jobs_accepted + 1
            job = JobId(f"a-{number}")
            house.controller._commit_loop.handle(
                builders.submission("a", key=str(number), project="shared")
            )
            hearing = [asyncio.create_task(person.hears(job)) for person in people]
            _, late = await asyncio.wait(hearing, timeout=0.2)
            for task in late:
                task.cancel()
            if not late:
                return job
