"""A controller's commit loop and its answers to clients, on a real journal and without sockets."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from controlplane.core.commands import Announce, Command
from controlplane.core.history import Record
from controlplane.core.inputs import Input, NodeReported
from controlplane.policy.api import PolicyEvent
from controlplane.service.api.server import LoopUsage, RequestServer
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.event_feed import EventFeed
from controlplane.service.keys import KeyFile, KeyTable
from controlplane.service.planner.plan_coordinator import PlanCoordinator, PolicyObserver
from controlplane.service.rights import JobOwners
from controlplane.service.settings import Limits
from controlplane.service.uploads import SnapshotStore
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.codec import REPLY, REQUEST, encode
from schemas.host.logging import Audit
from schemas.ids import JobId, NodeId, SlotId
from schemas.transport import Identity
from schemas.wire import Message
from schemas.wire.agent import AgentEvent
from tests.support import builders
from tests.support.builders import BATCH, N1, S0, A

LIMIT_S: Final = 60.0
MAX_PAGES: Final = (1 << 32) - 2  # of SQLite
LOOK_S: Final = 0.005  # the writer is a thread, and needs the interpreter, too
ANN: Final = Identity("user", "ann")
NONE: Final = cast("Any", None)


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
            commit_loop=self.loop,
            plans=plans,
            socket=NONE,
            feed=self.feed,
            snapshots=SnapshotStore(folder / "snapshots", 1 << 20),
            telemetry=telemetry,
            audit=Audit(),
            policy="fifo",
            cluster_info=lambda _: NONE,
            search_info=lambda: NONE,
            owners=owners,
            limits=Limits(),
            keys=KeyTable(KeyFile(folder / "keys.json"), {}),
        )

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
            async with asyncio.timeout(LIMIT_S):
                while not self.loop.stalled:
                    await asyncio.sleep(LOOK_S)
            yield
        async with asyncio.timeout(LIMIT_S):
            while self.loop._pending:
                await asyncio.sleep(LOOK_S)


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
