"""What a controller takes over when its settings file is read again: bounds, and who may connect."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from controlplane.service import controller_settings
from controlplane.service.controller_process import Controller
from controlplane.service.controller_settings import Store
from schemas.codec import FEED, LOG_REPLY, REPLY, TO_AGENT, encode
from schemas.ids import JobId
from schemas.link import KeyPair, Socket, write_keys
from schemas.messages import Message
from schemas.messages.agent import Hello, Refused, Welcome
from schemas.messages.client import Cluster, EventsPage, Failed, GetCluster, ReadEvents
from schemas.messages.files import AskFiles
from schemas.messages.logs import ReadLog
from schemas.workdir_archives import ArchiveBounds
from tests.support import builders
from tests.support.builders import N1
from tests.support.schemas_links import HeldLink, connected, soon

ROLES: Final = ("events", "agents", "clients", "feed", "shippers", "followers")
DENIED: Final = Failed(
    code="denied",
    message="this key is not authorised any more",
    hint="ask an admin for another one",
    field="",
)


class House:
    """A controller on ports of its own, and the keys of two people."""

    def __init__(self, base: Path) -> None:
        self.keys = {
            name: write_keys(base / "keys", name) for name in ("server", "ann", "bob", "n1")
        }
        self._authorised = base / "keys" / "authorised.toml"
        self._authorised.touch(mode=0o600)
        self.file = base / "controller.toml"
        self.ports = _free_ports()
        self.settings = "[listen]\nmetrics = 0\n" + "".join(
            f"{role} = {port}\n" for role, port in self.ports.items()
        )
        self.file.write_text(f'{self.settings}[policy]\nname = "fifo"\n')
        self.authorise("ann", "bob", "n1")
        self.controller = Controller(controller_settings.load(self.file), base)

    def authorise(self, *names: str) -> None:
        """From the next reload on these may connect, and no others."""
        self._authorised.write_text(
            "".join(
                f'[[key]]\npublic = "{self.keys[name].public.decode()}"\n'
                f'name = "{name}"\nrole = "{"node" if name == N1 else "user"}"\n'
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


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    await made.controller.open()
    stop = asyncio.Event()
    serving = asyncio.create_task(made.controller.serve(stop))
    yield made
    stop.set()
    await serving
    made.controller.close()


@pytest.fixture
async def people(house: House) -> AsyncIterator[tuple[Person, Person]]:
    with ExitStack() as stack:
        made = [Person(house, house.keys[name]) for name in ("ann", "bob")]
        for person in made:
            stack.callback(person.close)
            await connected(person.requests)
            await connected(person.pages)
        yield made[0], made[1]


def _free_ports() -> dict[str, int]:
    with ExitStack() as stack:
        probes = {role: stack.enter_context(socket.socket()) for role in ROLES}
        for probe in probes.values():
            probe.bind(("127.0.0.1", 0))
        return {role: probe.getsockname()[1] for role, probe in probes.items()}


async def heard_by(house: House, *people: Person) -> JobId:
    """Submits jobs until all of these hear of the same one (a feed may be late)."""
    async with asyncio.timeout(10.0):
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


async def test_all_that_is_kept_may_change_at_a_reload(house: House) -> None:
    kept = [name for name in Store.__struct_fields__ if name != "workdir"]
    lines = "".join(f"{name} = 7\n" for name in kept)
    lines += "workdir = { size = 7, files = 7, depth = 7 }\n"
    bounds = ArchiveBounds(size=7, files=7, depth=7)
    house.file.write_text(f'{house.settings}[policy]\nname = "fifo"\n[store]\n{lines}')

    house.reload()

    assert house.controller._file_keeper._settings == Store(
        workdir=bounds, **dict.fromkeys(kept, 7)
    )
    snapshots = house.controller._snapshots
    assert (house.controller._logs.max_bytes, snapshots.max_bytes) == (7, 7)
    assert (snapshots.bounds, snapshots.upload_bytes) == (bounds, 7)


async def test_a_key_that_is_taken_out_gets_nothing_more_over_connections_that_it_has(
    house: House, people: tuple[Person, Person]
) -> None:
    ann, bob = people
    job = await heard_by(house, ann, bob)
    assert isinstance(await bob.ask(GetCluster()), Cluster)
    far = house.controller._state().feed_seq + 1
    poll = bob.begin(ReadEvents(from_seq=far, wait_s=30.0))
    while house.controller._feed._waiter is None:
        await asyncio.sleep(0)

    house.authorise("ann")
    house.reload()

    assert await bob.ask(GetCluster()) == DENIED
    assert await bob.read_log(ReadLog(job=job)) == DENIED
    await heard_by(house, ann)
    assert await bob.answer(poll) == DENIED
    assert not await bob.feed._socket.poll(0)
    assert isinstance(await ann.ask(GetCluster()), Cluster)


async def test_the_feed_tells_each_project_of_its_own_jobs_alone(
    house: House, people: tuple[Person, Person]
) -> None:
    """`shared-2` begins as `shared` does, and is another project."""
    ann, bob = people
    await heard_by(house, ann, bob)
    house.controller._commit_loop.handle(builders.submission("a", user="eve", project="shared-2"))

    last = await heard_by(house, ann, bob)

    for person in people:
        topics = {topic.decode() for topic, _ in person.heard}
        assert {topic.rpartition("/job/")[0] for topic in topics} <= {"project/shared", ""}
        assert f"project/shared/job/{last}" in topics
        missed = 1 + max(seq for _, seq in person.heard) - len({seq for _, seq in person.heard})
        assert missed > 0


async def test_a_node_whose_key_is_taken_out_is_told_and_hears_nothing_more(house: House) -> None:
    link = HeldLink(house.keys["n1"])
    address = f"tcp://127.0.0.1:{house.ports['agents']}"
    agent = await connected(link.connect("DEALER", address, house.keys["server"].public))
    greeting = builders.greeting(N1)
    hello = Hello(node=N1, boot=greeting.boot, spec=greeting.spec, workers=(), events_sent=0)
    agent.send(encode(hello))
    assert isinstance(TO_AGENT.decode((await soon(agent.receive())).frames[-1]), Welcome)

    house.authorise("ann", "bob")
    house.reload()

    told = TO_AGENT.decode((await soon(agent.receive())).frames[-1])
    assert told == Refused(code=DENIED.code, message=DENIED.message, hint=DENIED.hint)
    assert not house.controller._ask_node(N1, AskFiles(request="1", job=JobId("a-1")))
    link.close()


async def test_a_key_that_comes_back_is_heard_on_connections_that_it_has(
    house: House, people: tuple[Person, Person]
) -> None:
    ann, bob = people
    house.authorise("ann")
    house.reload()
    assert await bob.ask(GetCluster()) == DENIED

    house.authorise("ann", "bob")
    house.reload()

    assert isinstance(await bob.ask(ReadEvents()), EventsPage)
    await heard_by(house, ann)


async def test_nobody_is_cut_off_by_a_reload_that_takes_no_key_out(
    house: House, people: tuple[Person, Person]
) -> None:
    feed = house.controller._feed._socket
    house.authorise("ann", "bob", "n1")

    house.reload()

    assert house.controller._feed._socket is feed
    await heard_by(house, *people)
