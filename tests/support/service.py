"""The service without its process: a commit loop with request handlers, or a whole controller on ports.

`LiveService` has a real journal and no sockets. A `House` is the controller of `app` on ports of its
own, and a `Person` has a key for it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest.mock import AsyncMock

import msgspec

from controlplane.core.commands import Announce, Command
from controlplane.core.history import Record
from controlplane.core.inputs import Input, NodeReported
from controlplane.policy.api import PolicyEvent
from controlplane.service import settings
from controlplane.service.api.replies import PolicyNotes
from controlplane.service.api.server import LoopUsage, RequestServer
from controlplane.service.app import Controller
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.event_feed import EventFeed
from controlplane.service.keys import KeyFile, KeyTable
from controlplane.service.planner.plan_coordinator import PlanCoordinator, PolicyObserver
from controlplane.service.relay.process import RelayProcess
from controlplane.service.rights import JobOwners
from controlplane.service.secret_store import SecretStore
from controlplane.service.settings import Limits
from controlplane.service.uploads import SnapshotStore
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.codec import FEED, LOG_REPLY, REPLY, REQUEST, encode
from schemas.host.logging import Audit
from schemas.ids import JobId, NodeId, SlotId
from schemas.transport.keys import Identity, KeyPair, write_keys
from schemas.transport.sockets import Link, Socket
from schemas.wire import Message
from schemas.wire.agent import AgentEvent, OfJournal
from schemas.wire.client import Failed
from schemas.wire.feed import ReadLog
from tests.support import builders
from tests.support.builders import BATCH, N1, S0, A
from tests.support.schemas_links import HeldLink, soon

LIMIT_S: Final = 60.0
MAX_PAGES: Final = (1 << 32) - 2  # of SQLite
LOOK_S: Final = 0.005  # the writer is a thread, and needs the interpreter, too
ANN: Final = Identity("user", "ann")
NONE: Final = cast("Any", None)


async def until(holds: Callable[[], object]) -> None:
    """Wait for something, with a limit that only ends a hanging test."""
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(LOOK_S)


class LiveService:
    """Takes inputs and requests; its effects are announcements, for the feed and for a policy."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[PolicyEvent] = []  # by the policy
        self._said: Counter[NodeId] = Counter()
        self.loop = CommitLoop(folder / "journal.sqlite", self._perform, self._record)
        telemetry = TelemetryTable()
        plans = PlanCoordinator(self.loop)
        planner = SimpleNamespace(observe=lambda event, _: self.heard.append(event))
        self._observer = PolicyObserver(self.loop, cast("Any", planner), telemetry)
        owners = JobOwners(self.loop)
        audience = SimpleNamespace(send=lambda *_: True)
        self.feed = EventFeed(
            cast("Any", audience), NONE, self.loop.committed.state.feed_seq, NONE, owners.of
        )
        self.server = RequestServer(
            commit_loop=self.loop, plans=plans, socket=NONE, feed=self.feed,
            snapshots=SnapshotStore(folder / "snapshots", 1 << 20),
            secrets=SecretStore(folder / "secrets"), telemetry=telemetry,
            audit=Audit(), notes=PolicyNotes("fifo", ()), cluster_info=lambda _: NONE,
            search_info=lambda: NONE,
            owners=owners, limits=Limits(), keys=KeyTable(KeyFile(folder / "keys.json"), {}),
            prepare_policy=NONE, files_stored=AsyncMock(),
        )  # fmt: skip

    def _perform(self, command: Command) -> None:
        if isinstance(command, Announce):
            self.feed.publish(command.event)

    def _record(self, record: Record) -> None:
        self._observer.recorded(record)

    def take(self, event: Input) -> None:
        self.loop.handle(event)

    def tell(self, event: AgentEvent, node: NodeId = N1) -> None:
        """Let `node` say this next in its numbered stream."""
        boot = self.loop.reactor.state.nodes[node].boot
        self._said[node] += 1
        if isinstance(event, OfJournal):
            event = cast(
                "AgentEvent",
                msgspec.structs.replace(event, journal=self.loop.reactor.state.journal),
            )
        self.take(NodeReported(node=node, boot=boot, seq=self._said[node], event=event))

    def place(self, placed: Mapping[JobId, SlotId]) -> None:
        batches = {job: {slot: BATCH} for job, slot in placed.items()}
        self.take(builders.proposal(batches, based_on=self.loop.reactor.state.version))

    def train(self) -> None:
        """Job a trains on the first slot of the first node."""
        self.take(builders.greeting(N1))
        self.take(builders.submission("a", key="k"))
        self.place({A: S0})
        self.tell(builders.started(A))
        self.tell(builders.ready(A))
        self.tell(builders.formed(A))

    def finish(self) -> None:
        """Job a comes to its end."""
        self.tell(builders.finished(A, index=900, reason="all epochs are done"))
        self.tell(builders.exited(A, code=0))

    async def ask(self, request: Message, who: Identity = ANN) -> Any:
        """The reply as it arrives; a refusal is raised."""
        asked = REQUEST.decode(encode(request))
        return REPLY.decode(encode(await self.server._dispatch(asked, who, LoopUsage())))

    @asynccontextmanager
    async def full_disk(self) -> AsyncIterator[None]:
        """Nothing becomes durable meanwhile, for lack of room; all is when it is over."""
        with full_disk(self.loop):
            self.take(builders.submission("large", user="x" * 200_000))
            await until(lambda: self.loop.stalled)
            yield
        await until(lambda: not self.loop._pending)


@contextmanager
def full_disk(loop: CommitLoop) -> Iterator[None]:
    """Let the journal not grow; only the writer's thread may change a setting of its connection."""
    writer, full = loop._writer, threading.Event()
    write = writer._write
    (used,) = writer._database.execute("PRAGMA page_count").fetchone()

    def bounded(batch: Any) -> None:
        most = used if full.is_set() else MAX_PAGES
        writer._database.execute(f"PRAGMA max_page_count = {most}")
        write(batch)

    full.set()
    writer._write = bounded  # type: ignore[method-assign]
    yield
    full.clear()


ROLES: Final = ("events", "agents", "clients", "feed", "shippers", "followers")
ROLE_OF: Final = {N1: "node", "root": "admin"}
DENIED: Final = Failed(
    code="denied",
    message="this key is no longer authorised",
    hint="ask an admin for a new key",
    field="",
)


class RelayHere:
    """Starts the relay in this process, with real pipes."""

    relay: RelayProcess
    _task: asyncio.Task[None]

    def __init__(self, make_link: Callable[[KeyPair], Link] = Link) -> None:
        self._make_link = make_link

    async def launch(
        self, code: Path | None, source: int, sink: int, listeners: Sequence[int]
    ) -> RelayHere:
        self.relay = RelayProcess(os.dup(source), os.dup(sink), self._make_link)
        self._task = asyncio.create_task(self.relay.run())
        return self

    def kill(self) -> None:
        self._task.cancel()

    async def wait(self) -> object:
        return await asyncio.wait({self._task})


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
        self.relay = RelayHere()
        self.controller._launch_relay = self.relay.launch  # type: ignore[method-assign]

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
    await made.controller._relay.first_ready
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
