"""A whole controller that anybody with some key says anything to, on any of its sockets.

It is the controller of the service, on a real journal; in place of its five sockets stand lines
that hold what came over one. Nothing that is said may end one of its tasks, be a fault of its own,
leave a request without an answer, or make what is durable another than what was decided.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator, Coroutine, Iterator, MutableMapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import structlog

from controlplane.journal.snapshots import image_of
from controlplane.service.app import Controller
from controlplane.service.settings import ControllerSettings, Keys, Listen, PolicyChoice
from schemas.codec import (
    FROM_AGENT,
    FROM_SHIPPER,
    LOG_REPLY,
    MAX_BYTES,
    PUBLISHED,
    READ_LOG,
    REPLY,
    REQUEST,
    TO_STREAM_CLIENT,
    encode,
)
from schemas.ids import BootId, JobId, NodeId
from schemas.transport.keys import Identity, write_keys
from schemas.transport.sockets import Incoming, Link, Socket
from schemas.wire import Message
from schemas.wire.agent import Hello, Numbered
from tests.fuzz.choices import Choices
from tests.fuzz.hostile_messages import Known, hostile_bytes
from tests.fuzz.targets.folders import base
from tests.support import builders
from tests.support.service import RelayHere

LISTEN: Final = Listen(metrics=0)
N1, N2 = NodeId("n1"), NodeId("n2")
WHO: Final = (
    Identity("user", "ann"), Identity("node", "n1"), Identity("admin", "root"), Identity("node", "n2"),
    Identity("user", "bob"), Identity("viewer", "vic"), Identity("operator", "otto"),
)  # fmt: skip
FAULTS: Final = frozenset(
    {"request failed", "message dropped", "input skipped", "command failed", "task failed, starting it again",
     "log relay ended, restarting", "journal cannot be followed, ending"}
)  # fmt: skip
STEPS: Final = 24
TURNS: Final = 20  # of the loop, in which an answer has to come
KNOWN: Final[Known] = {
    "job": ["a-1", "b-2", "s-3", "c-4"], "node": ["n1", "n2"], "boot": ["b1", "b2"], "version": [1, 2, 3],
    "group": [1, 2, 3], "rank": [0, 1, 0, 2], "slot": ["n1/0", "n1/1", "n2/0"],
    "on": [["n1/0"], ["n1/0", "n1/1"], []], "seq": [1, 2, 3, 4, 5, 6, 7, 8, 9], "index": [1, 2, 3, 4, 5, 6],
    "snapshot": ["0" * 64], "cursor": ["", "", "history.1", "epochs.0", "jobs.1", "decisions.1", "nodes.1", "versions.2", 0, 1, 40],
    "wait_s": [0.0, 0.0, 0.01], "stream": ["log", "samples"], "offset": [0, 1, 10], "user": ["", "ann", "bob"],
    "states": [[], ["running"], ["queued", "failed"]], "name": ["a", "b", "*", "?-*"], "trial": [0, 1, 2],
    "from_trial": [0, 1], "from_unit": [0, 1], "from_seq": [0, 1, 5, 20], "epoch": [1, 2, 3], "within_s": [0.0, 1.0],
    "session": ["1.1", "1.2", "1.3"], "attempt": [1, 2, 3], "code": [0, 1], "slots": [0, 1, 2], "batch": [32, 64],
}  # fmt: skip


class Line:
    """What came over one socket, and what is sent back."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[Incoming] = asyncio.Queue()
        self.sent: list[tuple[bytes, ...]] = []

    async def __aiter__(self) -> AsyncIterator[Incoming]:
        while True:
            yield await self._waiting.get()

    def bring(self, who: Identity | None, *frames: bytes) -> None:
        self._waiting.put_nowait(Incoming(frames, who))

    def send(self, *frames: bytes) -> bool:
        self.sent.append(frames)
        return True

    def grant_topic(self, topic: bytes) -> None:
        assert len(topic) <= 4 << 20

    revoke_topic = grant_topic

    def close(self) -> None:
        """Nothing is open."""


class LineLink:
    """The relay's link, whose sockets are lines."""

    def __init__(self, lines: dict[int, Line]) -> None:
        self._lines = lines

    def authority(self, *_: Any) -> LineLink:
        return self

    async def run(self) -> None:
        """Wait; nobody shows a key. The relay ends when this returns."""
        await asyncio.Event().wait()

    async def guard_connections(self, _: Any) -> None:
        """Wait; nobody is connected."""
        await asyncio.Event().wait()

    def bind(self, _: str, address: str, **__: int) -> Line:
        line = self._lines[int(address.rpartition(":")[2])] = Line()
        return line

    def close(self) -> None:
        """Nothing is open."""


class Fuzzed(Controller):
    """A controller whose sockets are lines, with its relay in this process."""

    def __init__(self, settings: ControllerSettings, home: Path) -> None:
        self.lines: dict[int, Line] = {}
        super().__init__(settings, home)
        here = RelayHere(lambda _: cast("Link", LineLink(self.lines)))
        self._launch_relay = here.launch  # type: ignore[method-assign]

    async def _listen(self, port: int) -> Any:
        address, none = ("127.0.0.1", port), lambda: None
        return SimpleNamespace(getsockname=lambda: address, fileno=lambda: -1, close=none)

    async def _bind(self, kind: str, port: int, **_: Any) -> Socket:
        self.lines[port] = Line()
        return cast("Socket", self.lines[port])


class _Log:
    """Lines of faults, which the service survives and we do not."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def __call__(
        self, logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if event["event"] in FAULTS:
            self.faults.append(repr(dict(event)))
        raise structlog.DropEvent


@cache
def _home() -> Path:
    """A folder with keys."""
    home = base() / "controller"
    write_keys(home / "keys", "server")
    (home / "keys" / "authorised.toml").write_text("")
    (home / "keys" / "authorised.toml").chmod(0o600)
    return home


_numbers = itertools.count()


@contextlib.contextmanager
def _settings() -> Iterator[ControllerSettings]:
    state = f"state-{next(_numbers)}"
    yield ControllerSettings(
        state=state, listen=LISTEN, keys=Keys(), policy=PolicyChoice(name="fifo")
    )
    shutil.rmtree(_home() / state, ignore_errors=True)


class Conversation:
    """One controller, and those who speak to it."""

    def __init__(self, controller: Fuzzed, log: _Log) -> None:
        self.controller = controller
        self._log = log
        self._tasks: list[asyncio.Task[None]] = []
        self._strays: list[str] = []
        self._said = dict.fromkeys((N1, N2), 0)
        self._asked: list[tuple[Line, bytes, Any]] = []

    async def begin(self) -> None:
        await self.controller.open()
        parts: tuple[Coroutine[Any, Any, None], ...] = (
            self.controller._node_sessions.receive_messages(),
            self.controller._node_sessions.receive_events(),
            self.controller._feed.admit_subscribers(),
            self.controller._relay.run(),
            self.controller._request_server.serve(),
        )
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self._strays.append(repr(context)))
        self._tasks = [asyncio.create_task(part) for part in parts]
        await self.controller._relay.first_ready

    async def prepare(self) -> None:
        """Two nodes, two jobs of which one trains, and a sweep."""
        loop = self.controller._commit_loop
        for node in (N1, N2):
            spec = builders.greeting(node, slots=2).spec
            hello = Hello(
                node=node, boot=BootId("b1"), spec=spec, workers=(), events_sent=0, echo=""
            )
            self.orders.bring(Identity("node", node), node.encode(), encode(hello))
        await self.settle()
        for name, more in (("a", {}), ("b", {"slots": (1, 2)})):
            loop.handle(builders.submission(name, user="ann", **more))
        await self.settle()
        place = {JobId("a-1"): {builders.S0: builders.BATCH}}
        loop.handle(builders.proposal(place, based_on=loop.reactor.state.version))
        await self.settle()
        for event in (
            builders.started(JobId("a-1")), builders.ready(JobId("a-1")), builders.formed(JobId("a-1")),
        ):  # fmt: skip
            self.report(N1, event)
        await self.settle()

    @property
    def orders(self) -> Line:
        return self.controller.lines[LISTEN.agents]

    def report(self, node: NodeId, event: Any) -> None:
        self._said[node] += 1
        numbered = Numbered(node=node, boot=BootId("b1"), seq=self._said[node], event=event)
        line = self.controller.lines[LISTEN.events]
        line.bring(Identity("node", node), encode(numbered))

    async def settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await self.controller._commit_loop.caught_up()
        for _ in range(TURNS // 4):
            await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()
                raise AssertionError("a task of the controller ended")
        assert not self._log.faults, self._log.faults[0]
        assert not self._strays, self._strays[0]

    async def say(self, choices: Choices) -> None:
        """One message of anybody on one of the sockets."""
        port = choices.pick(
            (LISTEN.clients, LISTEN.events, LISTEN.clients, LISTEN.agents, LISTEN.followers,
             LISTEN.shippers, LISTEN.events, LISTEN.feed)
        )  # fmt: skip
        line = self.controller.lines[port]
        if port == LISTEN.feed:
            line.bring(choices.pick(WHO), choices.take(1 + choices.below(24)))
        elif port == LISTEN.clients:
            self._ask(line, choices, REQUEST.tags)
        elif port == LISTEN.followers:
            self._ask(line, choices, READ_LOG.tags)
        else:
            codec = {LISTEN.events: PUBLISHED, LISTEN.agents: FROM_AGENT}.get(port, FROM_SHIPPER)
            who = choices.pick((WHO[1], WHO[3], WHO[1], WHO[3], WHO[0]))
            known = {**KNOWN, "seq": [self._said[N1] + 1, self._said[N1] + 2]}
            data = hostile_bytes(choices, codec.tags, known)
            self._note(data)
            line.bring(who, *([] if port == LISTEN.events else [who.name.encode()]), data)
        await self.settle()

    def _note(self, data: bytes) -> None:
        """How far the first node's stream of events is."""
        with contextlib.suppress(Exception):
            message = PUBLISHED.decode(data)
            if isinstance(message, Numbered) and message.node == N1:
                self._said[N1] = max(self._said[N1], message.seq)

    def _ask(self, line: Line, choices: Choices, tags: tuple[str, ...]) -> None:
        data = hostile_bytes(choices, tags, KNOWN)
        number = str(len(self._asked)).encode()
        frames = [b"route", number, data] if choices.often() else [b"route", data]
        self._asked.append((line, number, data))
        line.bring(choices.pick(WHO), *frames)

    def answered(self) -> None:
        """Every answer can be read by a client."""
        for port, codec in ((LISTEN.clients, REPLY), (LISTEN.followers, LOG_REPLY)):
            for frames in self.controller.lines[port].sent:
                assert len(frames[-1]) <= MAX_BYTES
                of_stream = b"streams." in frames[-1][:40]
                reply: Message = (TO_STREAM_CLIENT if of_stream else codec).decode(frames[-1])
                assert reply is not None

    async def consistent(self) -> None:
        """What is durable is what was decided."""
        loop = self.controller._commit_loop
        while loop._pending:
            await loop.caught_up()
        assert image_of(loop.committed) == image_of(loop.reactor)

    async def end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.controller.close()


async def _converse(data: bytes) -> None:
    choices, log = Choices(data), _Log()
    structlog.configure(processors=[log], wrapper_class=structlog.BoundLogger)
    with _settings() as settings:
        conversation = Conversation(Fuzzed(settings, _home()), log)
        try:
            await conversation.begin()
            await conversation.prepare()
            for _ in range(STEPS):
                if not choices.left:
                    break
                await conversation.say(choices)
            conversation.answered()
            await conversation.consistent()
        finally:
            await conversation.end()


@cache
def _runner() -> asyncio.Runner:
    """One loop for all inputs."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


def controller(data: bytes) -> None:
    """Anybody says anything to a controller that runs a job."""
    _runner().run(_converse(data))
