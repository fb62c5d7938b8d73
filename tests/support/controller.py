"""A core with a clock, a history and nodes that number what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

import msgspec
import pytest
from msgspec.structs import replace

from controlplane.core import invariants
from controlplane.core.commands import Announce, Command, RequestPlan
from controlplane.core.history import (
    JobHistories,
    JobHistory,
    JobLeft,
    SweepHistory,
    SweepLeft,
)
from controlplane.core.inputs import ControllerStarted, Input, NodeLost, NodeReported
from controlplane.core.ledgers import Ledgers
from controlplane.core.model.job import Job
from controlplane.core.model.usage import usage_now
from controlplane.core.policy_view import ViewBuilder
from controlplane.core.reactor import Reactor
from controlplane.core.slot_index import JobSlots, SlotIndex, slots_of_job
from controlplane.core.state import State
from controlplane.journal.database import input_from
from controlplane.journal.replay import replay
from controlplane.policy.api import ClusterView
from controlplane.policy.sharing.caps import Ledger
from controlplane.policy.sharing.rigid_view import RigidView
from schemas.codec import encode
from schemas.ids import BootId, JobId, NodeId, Seconds, SlotId, Term, node_of
from schemas.sharing import Sharing
from schemas.wire.agent import AgentEvent
from tests.support import builders
from tests.support.builders import N1, S0, A


class WatchedSlotIndex(SlotIndex):
    """Holds itself against a look at every worker at each question, in the midst of inputs, too."""

    def _sync(self) -> None:
        super()._sync()
        now = {name: slots_of_job(self._jobs[name]) for name in self._jobs_with_processes}
        assert self._parts == {name: part for name, part in now.items() if part != JobSlots()}


class Controller:
    """Takes inputs as the service does; the invariants hold after each one, or it raises."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.histories = JobHistories()
        self.left: list[JobLeft] = []
        self._left_sweeps: dict[JobId, SweepHistory] = {}
        self.state.slot_index.__class__ = WatchedSlotIndex
        self.now = 1000.0
        self.history: list[tuple[Seconds, bytes]] = []
        self.asked = False  # a plan was asked for and none was made since
        self._said: Counter[tuple[NodeId, BootId]] = Counter()
        self._refreshing: Iterable[None] = ()

    @property
    def state(self) -> State:
        return self.reactor.state

    def view(self) -> ClusterView:
        """What policies see: the view that is kept up to date, which is as good as a new one."""
        view = ViewBuilder(self.state).view()
        assert self.reactor.view() == view
        self.ledger(), self.rigid_views()
        return view

    def rigid_views(self) -> list[RigidView]:
        """The views of rigid jobs, which are equal to newly built ones."""
        views = ViewBuilder(self.state).rigid_views()
        assert self.reactor.rigid_views() == views
        return views

    def ledger(self) -> Ledger:
        """The ledger of accounts, which is equal to a newly built one."""
        now, kept = Seconds(self.now), self.reactor.ledger(Seconds(self.now))
        again = Ledgers(self.state).ledger(now)
        holding = [self.state.jobs[name] for name in self.state.jobs_with_processes]
        half_life_s = (self.state.sharing or Sharing()).half_life_s
        used = usage_now(self.state.usage, holding, now, half_life_s)
        assert kept.usage == pytest.approx(used, rel=1e-6, abs=1e-6)
        assert replace(kept, usage={}) == replace(again, usage={})
        return kept

    @property
    def names(self) -> list[JobId]:
        """Jobs that the next input can still name."""
        return [name for name in self.state.jobs if name not in self.state.leaving_jobs]

    def job(self, job: JobId) -> Job:
        """Return a job of the state, or the last version of a job that left it."""
        left = {record.job: record.last for record in self.left}
        return left[job] if job in left else self.state.job(job)

    def sweep_history(self, job: JobId) -> SweepHistory:
        return self._left_sweeps.get(job) or self.reactor.totals.sweep(job)

    def history_of(self, job: JobId) -> JobHistory:
        return self.histories.of(job)

    def take(self, event: Input) -> list[Command]:
        """Handle `event`; its announcements come back without number and time, once checked."""
        before = self.state.feed_seq
        self.history.append((Seconds(self.now), encode(event)))
        commands = self.reactor.handle(event, Seconds(self.now))
        self._refresh_some()
        self.histories.add(self.reactor.records)
        for record in self.reactor.records:
            if isinstance(record, JobLeft):
                self.left.append(record)
            elif isinstance(record, SweepLeft):
                self._left_sweeps[record.job] = record.history
        invariants.check(self.state)
        self.asked = self.asked or RequestPlan() in commands
        told = [command.event for command in commands if isinstance(command, Announce)]
        assert [(event.seq, event.time) for event in told] == [
            (before + place + 1, self.now) for place in range(len(told))
        ]
        return [_unnumbered(command) for command in commands]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has."""
        return self.__dict__ | {"_refreshing": ()}

    def _refresh_some(self) -> None:
        """Update some of what is kept, as the service does between inputs."""
        if len([*islice(self._refreshing, 3)]) < 3:
            self._refreshing = self.reactor.refresh_views()

    def start(self) -> list[Command]:
        """Begin the next incarnation."""
        return self.take(ControllerStarted(term=Term(self.state.term + 1), release=""))

    def submit(self, name: str = "a", **changes: Any) -> list[Command]:
        return self.take(builders.submission(name, **changes))

    def place(self, placed: Mapping[JobId, Mapping[SlotId, int] | SlotId]) -> list[Command]:
        """Propose a plan that is based on the present state."""
        batches = {
            job: {slots: builders.BATCH} if isinstance(slots, str) else slots
            for job, slots in placed.items()
        }
        return self.take(builders.proposal(batches, based_on=self.state.version))

    def due(self, later_s: float = 0.0) -> list[Input]:
        """The deadlines that have passed by then."""
        return self.reactor.due(Seconds(self.now + later_s))

    def tell(self, node: NodeId, event: AgentEvent) -> list[Command]:
        """Let `node` say this next in its numbered stream."""
        boot = self.state.nodes[node].boot
        self._said[node, boot] += 1
        return self.take(
            NodeReported(node=node, boot=boot, seq=self._said[node, boot], event=event)
        )

    def lose(self, node: NodeId, silent_s: float = 30.0) -> list[Command]:
        return self.take(NodeLost(node=node, silent_s=silent_s))

    def replayed(self) -> State:
        """The state that the history leads to, read back from its bytes; so are the job histories."""
        histories = JobHistories()
        inputs = ((at, input_from(body)) for at, body in self.history)
        again = replay(inputs, histories.add)
        assert (histories, again.totals) == (self.histories, self.reactor.totals)
        return again.state


def _unnumbered(command: Command) -> Command:
    if isinstance(command, Announce):
        return Announce(msgspec.structs.replace(command.event, seq=0, time=Seconds(0.0)))
    return command


def cluster_of(**slots: int) -> Controller:
    """A controller in its first term, with these nodes up."""
    controller = Controller()
    controller.start()
    for node, count in slots.items():
        controller.take(builders.greeting(NodeId(node), slots=count))
    return controller


def starting(controller: Controller | None = None, **spec: Any) -> Controller:
    """Job a, ordered on the first slot of the first node."""
    controller = controller or cluster_of(n1=1)
    controller.submit("a", **spec)
    controller.place({A: S0})
    return controller


def running(controller: Controller | None = None, *, epochs: int = 0, **spec: Any) -> Controller:
    """Job a, training on the first slot of the first node, some epochs into it."""
    controller = starting(controller, **spec)
    controller.tell(N1, builders.started(A))
    controller.tell(N1, builders.ready(A))
    controller.tell(N1, builders.formed(A))
    for epoch in range(1, epochs + 1):
        controller.tell(N1, builders.epoch_end(A, epoch))
    return controller


def begin(controller: Controller, job: JobId, version: int, *, on: SlotId = S0) -> None:
    """Start `job` again and bring its worker into its group."""
    node = NodeId(on.rpartition("/")[0])
    controller.place({job: on})
    epoch = controller.job(job).progress.epoch
    controller.tell(node, builders.started(job, version, pid=100 + version))
    controller.tell(node, builders.ready(job, version, resumed=epoch))
    controller.tell(node, builders.formed(job, version, epoch=epoch))


ELASTIC: Final[Mapping[str, Any]] = {"slots": (1, 4), "max_batch_size": 256}


def training(
    controller: Controller, *slots: SlotId, name: str = "a", epochs: int = 0, **spec: Any
) -> Controller:
    """One more job of `controller`, whose group trains on `slots`."""
    job = JobId(f"{name}-{controller.state.jobs_accepted + 1}")
    controller.submit(name, **{**ELASTIC, **spec})
    share, rest = divmod(builders.BATCH, len(slots))
    controller.place({job: {slot: share + (at < rest) for at, slot in enumerate(slots)}})
    nodes = [(rank, node_of(slot)) for rank, slot in enumerate(slots)]
    for rank, node in nodes:
        controller.tell(node, builders.started(job, rank=rank, pid=100 + rank))
        controller.tell(node, builders.ready(job, rank=rank, port=29000 + rank))
    for rank, node in nodes:
        controller.tell(node, builders.formed(job, rank=rank))
    for epoch in range(1, epochs + 1):
        controller.tell(nodes[0][1], builders.epoch_end(job, epoch))
    return controller
