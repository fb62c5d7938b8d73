"""An agent with the real reconciler, whose processes are imaginary workers that train."""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq.asyncio

from nodeagent.reconciler import (
    Action,
    Connected,
    Desired,
    Event,
    FetchWorkspace,
    ForgetJob,
    GrantSlot,
    Kill,
    OrderGroup,
    PublishEvent,
    Reconciler,
    RemoveWorker,
    Started,
    StartWorker,
    Terminate,
    WorkspaceReady,
)
from schemas.wire.agent import GroupDelta
from tests.support.simulated_agent import Seen, SimulatedAgent
from tests.support.simulated_training import Training, Worker


@dataclass
class TrainingAgent(SimulatedAgent):
    """The real agent core, around imaginary processes."""

    training: Training = field(default_factory=Training)
    pids: int = 0

    def open(self, context: zmq.asyncio.Context) -> None:
        super().open(context)
        self.reconciler = Reconciler(self.node)
        self.shipper = self._connect("DEALER", "shippers")  # it has nothing to ship

    def seen(self) -> Seen:
        return self.reconciler.seen()

    def apply(self, delta: GroupDelta) -> None:
        self.tell(Desired(delta))

    def tell(self, event: Event) -> None:
        for action in self.reconciler.handle(event):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        workers, training = self.training.workers, self.training
        match action:
            case FetchWorkspace(job=job, digest=digest):
                training.later(0.0, 0.005, self.tell, WorkspaceReady(job, digest))
            case StartWorker():
                training.later(0.005, 0.02, self._start, action)
            case OrderGroup(worker=worker, delta=delta) if worker in workers:
                workers[worker].order(delta)
            case GrantSlot(worker=worker) if worker in workers:
                workers[worker].granted()
            case Terminate(worker=worker) if worker in workers:
                training.later(0.005, 0.02, workers[worker].end, None, 15)
            case Kill(worker=worker) if worker in workers:
                workers[worker].end(None, 9)
            case PublishEvent(event=event):
                self.happen(event)
            case ForgetJob(job=job):
                self.session.forget_job(job)
            case RemoveWorker():
                pass

    def _start(self, action: StartWorker) -> None:
        self.pids += 1
        state = self.reconciler.workers[action.worker]
        self.training.workers[action.worker] = Worker(
            agent=self,
            name=action.worker,
            job=state.job,
            version=state.version,
            rank=state.rank,
            slot=state.slot,
            training=self.training,
        )
        self.tell(Started(action.worker, self.pids, 7))
        self.tell(Connected(action.worker))
        if not action.granted:
            self.training.later(0.01, 0.05, self.training.workers[action.worker].waits)
