"""Real worker processes that a test forks, of a job or of a sweep, in place of agents and controller."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec
import torch
import zmq

from elastic.sweep_worker.unit import Unit, UserFunctions, digest
from elastic.sweep_worker.unit_runner import UnitRunner
from elastic.worker.run_script import prepare_worker
from schemas.codec import FROM_WORKER, REPORT, encode
from schemas.ids import JobId, NodeId, Rank, Version, WorkerId, slot_id, worker_id
from schemas.jobs import JobSpec
from schemas.nodes import Group, Member
from schemas.sweeps import Asha, SearchSpec, SweepSpec, log_uniform
from schemas.wire.agent import (
    JOIN,
    START,
    SWITCH,
    GroupFormed,
    ScriptFailed,
    ScriptReport,
    SlotAwaited,
    StepsReported,
    SweepWorkerReady,
    UnitEnded,
    UnitFailed,
    WorkerReady,
)
from schemas.wire.sweeps import StateRef, StateSource, UnitOrder, UnitTask
from schemas.wire.worker import Assignment, GroupOrder, SlotGranted, WorkerHello
from tests.training.peers import FORKS

LOOK_MS: Final = 5
FRAME: Final = struct.Struct(">I")
R = TypeVar("R", bound=ScriptReport)


@dataclass(kw_only=True)
class ForkedWorker:
    """One process and what it reported."""

    name: WorkerId
    folder: Path
    process: ForkServerProcess
    route: bytes = b""
    reports: list[ScriptReport] = field(default_factory=list)
    read: int = 0

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def hear(self) -> None:
        """Take in what its report file has more than before."""
        path = self.folder / "reports"
        data = path.read_bytes()[self.read :] if path.exists() else b""
        start = 0
        while start + FRAME.size <= len(data):
            (length,) = FRAME.unpack_from(data, start)
            end = start + FRAME.size + length
            if end > len(data):
                break
            self.reports.append(REPORT.decode(data[start + FRAME.size : end]))
            start = end
        self.read += start


W = TypeVar("W", bound=ForkedWorker)


class ForkedWorkers(Generic[W]):
    """A socket that workers greet, and their reports."""

    limit_s: ClassVar[float] = 120.0

    def __init__(self, home: Path) -> None:
        self.home = home
        self._socket_path = home / "s"
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"ipc://{self._socket_path}")
        self.workers: dict[WorkerId, W] = {}
        self.told: list[StepsReported] = []  # telemetry

    def reported(self, kind: type[R]) -> list[R]:
        """All reports of one kind."""
        return [r for w in self.workers.values() for r in w.reports if isinstance(r, kind)]

    def last(self, name: WorkerId, kind: type[R]) -> R | None:
        """The last one of a worker."""
        found = [r for r in self.workers[name].reports if isinstance(r, kind)]
        return found[-1] if found else None

    def until(self, there: Callable[[], bool], what: str) -> None:
        """Hear the workers until something is `there`, with all that they reported before it."""
        deadline = time.monotonic() + self.limit_s
        while True:
            self._hear()
            if there():
                self._hear()  # a worker may have reported and ended since the first call
                return
            if failed := self._failures():
                raise AssertionError(f"{failed[0]}\n{self.said()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {self.limit_s} s: {what}\n{self.said()}")
            self._router.poll(LOOK_MS)

    def said(self) -> str:
        """Reports and logs of all workers, for a test that fails."""
        parts = []
        for worker in self.workers.values():
            log = worker.folder / "log"
            parts.append(f"--- {worker.name}: {worker.process.exitcode}")
            parts += [repr(report)[:240] for report in worker.reports[-6:]]
            parts.append(log.read_text()[-1500:] if log.exists() else "")
        return "\n".join(parts)

    def close(self) -> None:
        """Leave no process behind."""
        for worker in self.workers.values():
            kill_session(worker.process)
        for worker in self.workers.values():
            worker.process.join(5)
            worker.process.close()
        self._router.close(linger=0)
        self._context.term()

    def _failures(self) -> list[str]:
        """Why waiting is in vain."""
        return [report.error for report in self.reported(ScriptFailed)]

    def _greeted(self, name: WorkerId) -> None:
        """A worker can be reached now, perhaps once more."""

    def _hear(self) -> None:
        while self._router.poll(0):
            route, data = self._router.recv_multipart()
            message = FROM_WORKER.decode(data)
            if isinstance(message, StepsReported):
                self.told.append(message)
            elif isinstance(message, WorkerHello):
                name = worker_id(message.job, message.version, message.rank)
                self.workers[name].route = route
                self._greeted(name)
        for worker in self.workers.values():
            worker.hear()


def fork(folder: Path, assignment: Assignment, work: Callable[[Path], None]) -> ForkServerProcess:
    """A process that does `work` in `folder`, where its assignment is."""
    (folder / "assignment").write_bytes(encode(assignment))
    process = FORKS.Process(target=_logged, args=(folder, work))
    process.start()
    return process


def kill_session(process: ForkServerProcess) -> None:
    """Kill a worker with its children: loader processes of a killed worker may wait for ever."""
    process.kill()
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _logged(folder: Path, work: Callable[[Path], None]) -> None:
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tempfile.tempdir = str(folder)  # a worker that is killed leaves its files to the test
    work(folder)


JOB: Final = JobId("search-1")
SEED: Final = 7
PARTITIONS: Final = 4
VALUES: Final = {"lr": 0.01}

FUNCTIONS: Final = """
import os, pathlib, time
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

HOME = pathlib.Path(__file__).parent

def note(text):
    with open(HOME / "noted", "a") as noted:
        noted.write(text + "\\n")

def input_fn(partition, partitions):
    note(f"input_fn {partition}")
    generator = torch.Generator().manual_seed(99 if partition is None else partition)
    x = torch.randn(24, 5, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))

def model_fn(values):
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=values["lr"])
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)

def train_fn(trained, data, unit):
    note(f"train_fn {unit.config} {unit.epoch} {unit.partition}")
    while (HOME / f"hold-{unit.config}-{unit.epoch}-{unit.partition}").exists():
        time.sleep(0.005)
    total = 0.0
    for x, y in unit.loader(data, batch_size=8):
        trained.optimizer.zero_grad()
        loss = functional.mse_loss(trained.model(x + 0.1 * torch.randn_like(x)), y)
        loss.backward()
        trained.optimizer.step()
        trained.scheduler.step()
        total += loss.item()
    return {"loss": total / 3}

def eval_fn(trained, data, unit):
    x, y = data.tensors
    return {"error": functional.mse_loss(trained.model(x), y).item()}
"""


def sweep_spec(**changes: Any) -> SweepSpec:
    spec = SweepSpec(
        search=SearchSpec(
            space={"lr": log_uniform(1e-4, 1e-1)}, searcher=Asha(4), epochs=2, metric="error",
            mode="min", seed=SEED,
        ),
        input_fn="units:input_fn", model_fn="units:model_fn", train_fn="units:train_fn",
        eval_fn="units:eval_fn", partitions=PARTITIONS,
    )  # fmt: skip
    return msgspec.structs.replace(spec, **changes)


def job_spec(sweep: SweepSpec, slots: int = 8) -> JobSpec:
    return JobSpec(
        name="search", script="sweep", batch_size=slots, max_batch_size="keep", slots=(1, slots),
        sweep=sweep, env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def alone(home: Path, visits: Sequence[tuple[int, int]], trial: int = 0) -> list[str]:
    spec = importlib.util.spec_from_file_location("units_alone", home / "units.py")
    units = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(units)
    functions = UserFunctions(units.input_fn, units.model_fn, units.train_fn, units.eval_fn)
    runner = UnitRunner(functions, PARTITIONS, torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers have
    state: Sequence[Any] = runner.begin(str(trial), VALUES, SEED)
    found = []
    for epoch, partition in visits:
        unit = Unit(str(trial), VALUES, epoch, partition, PARTITIONS, SEED, runner.device)
        state = runner.run(unit, state).frames
        found.append(digest(state))
    torch.set_num_threads(threads)
    return found


@dataclass(kw_only=True)
class SweepProcess(ForkedWorker):
    states: Path
    slot: int
    address: str = ""


class SweepCrew(ForkedWorkers[SweepProcess]):
    def __init__(self, home: Path, source: str = FUNCTIONS, **changes: Any) -> None:
        super().__init__(home)
        (home / "units.py").write_text(source)
        self._spec = job_spec(sweep_spec(**changes))
        self.group = Group(version=Version(0), members=(), lr=None)
        self.attempts = 0
        self._version = 0

    # --- groups

    def begin(self, *nodes: str, kind: str = START, granted: bool = True) -> list[SweepProcess]:
        self._version += 1
        stay = [m for m in self.group.members if self.workers[m.worker].alive]
        born = [self._named(len(stay) + at) for at in range(len(nodes))]
        members = [(m.worker, m.slot) for m in stay]
        taken = len(self.workers)
        members += [
            (name, slot_id(NodeId(node), taken + at))
            for at, (name, node) in enumerate(zip(born, nodes, strict=True))
        ]
        self.group = self.group_of(members)
        for name, node in zip(born, nodes, strict=True):
            self._fork(name, node, kind, granted=granted)
        if not granted:
            self.until(lambda: all(self.last(name, SlotAwaited) for name in born), "all wait")
            for name in born:
                self.until(lambda name=name: bool(self.workers[name].route), "it greets")  # type: ignore[misc]
                assert self.last(name, WorkerReady) is None
                self._router.send_multipart([self.workers[name].route, encode(SlotGranted())])
        self.until(
            lambda: all(
                self.last(name, SweepWorkerReady) and self.workers[name].route for name in born
            ),
            "all are ready",
        )
        for name in born:
            opened = self.last(name, SweepWorkerReady)
            self.workers[name].address = opened.address
        return [self.workers[name] for name in born]

    def start(self, *nodes: str, kind: str = START) -> list[SweepProcess]:
        """Start workers and wait until all are members of the group."""
        born = self.begin(*nodes, kind=kind)
        self.order(SWITCH, kind)
        self.until(self.formed, "the group is formed")
        return born

    def join(self, *nodes: str) -> list[SweepProcess]:
        return self.start(*nodes, kind=JOIN)

    def kill(self, worker: SweepProcess) -> None:
        worker.process.kill()
        self.until(lambda: not worker.alive, "it is dead")

    def leave(self, *workers: SweepProcess, kind: str = JOIN) -> None:
        """Order a group without these workers."""
        self._version += 1
        out = {worker.name for worker in workers}
        stay = [(m.worker, m.slot) for m in self.group.members if m.worker not in out]
        heard = list(self.workers.values())
        self.group = self.group_of(stay)
        self.order(SWITCH, kind, heard)

    def group_of(self, members: Sequence[tuple[WorkerId, Any]]) -> Group:
        return Group(
            version=Version(self._version),
            members=tuple(
                Member(rank=Rank(rank), slot=slot, local_batch=8, worker=name)
                for rank, (name, slot) in enumerate(members)
            ),
            lr=None,
        )

    def order(self, stage: int, kind: str, to: Sequence[SweepProcess] | None = None) -> None:
        order = GroupOrder(version=self.group.version, stage=stage, kind=kind, group=self.group)
        members = [self.workers[m.worker] for m in self.group.members]
        for worker in members if to is None else to:
            if worker.alive:
                self._router.send_multipart([worker.route, encode(order)])

    def formed(self) -> bool:
        names = [member.worker for member in self.group.members]
        found = [self.last(name, GroupFormed) for name in names]
        return all(one is not None and one.group == self.group.version for one in found)

    # --- units

    def unit(
        self,
        worker: SweepProcess,
        version: int,
        visit: tuple[int, int],
        state: UnitEnded | StateRef | None = None,
        sources: Sequence[SweepProcess | str] = (),
        *,
        trial: int = 0,
        evaluate: bool = False,
    ) -> UnitOrder:
        """Order a unit that leads to `version`, without waiting for its end."""
        self.attempts += 1
        if isinstance(state, UnitEnded):
            state = StateRef(trial=trial, version=version - 1, digest=state.digest)
        addresses = [one if isinstance(one, str) else one.address for one in sources]
        order = UnitOrder(
            attempt=self.attempts, worker=worker.name, trial=trial, values=VALUES, state=state,
            sources=tuple(StateSource(node=NodeId("n"), address=one) for one in addresses),
            result=StateRef(trial=trial, version=version), epoch=visit[0], partition=visit[1],
            evaluate=evaluate,
        )  # fmt: skip
        self.send(worker, order)
        return order

    def send(self, worker: SweepProcess, order: UnitOrder) -> None:
        """Send a unit again, as the agent does at each greeting."""
        self._router.send_multipart(
            [worker.route, encode(UnitTask(unit=order, states_key="a key"))]
        )

    def ended(self, order: UnitOrder) -> UnitEnded:
        report = self.outcome(order)
        assert isinstance(report, UnitEnded), f"{report}\n{self.said()}"
        return report

    def failed(self, order: UnitOrder) -> UnitFailed:
        report = self.outcome(order)
        assert isinstance(report, UnitFailed), report
        return report

    def outcome(self, order: UnitOrder) -> UnitEnded | UnitFailed:
        found: list[UnitEnded | UnitFailed] = []

        def there() -> bool:
            found[:] = [
                report
                for report in self.workers[order.worker].reports
                if isinstance(report, UnitEnded | UnitFailed) and report.attempt == order.attempt
            ]
            return bool(found)

        self.until(there, f"attempt {order.attempt} is over")
        return found[0]

    # --- what users' functions do

    def hold(self, visit: tuple[int, int], trial: int = 0) -> Path:
        path = self.home / f"hold-{trial}-{visit[0]}-{visit[1]}"
        path.touch()
        return path

    def noted(self) -> list[str]:
        path = self.home / "noted"
        return path.read_text().splitlines() if path.exists() else []

    # --- how

    def _named(self, rank: int) -> WorkerId:
        return worker_id(JOB, Version(self._version), Rank(rank))

    def _fork(self, name: WorkerId, node: str, kind: str, *, granted: bool) -> None:
        folder = self.home / name
        folder.mkdir()
        states = self.home / node
        rank = Rank(int(name.rpartition(".r")[2]))
        slot = len(self.workers)
        assignment = Assignment(
            job=JOB, version=Version(self._version), rank=rank, slot=slot, group=self.group,
            spec=self._spec, workdir=str(self.home), checkpoints=str(self.home / "checkpoints"),
            socket=f"ipc://{self._socket_path}", env={"OMP_NUM_THREADS": "1"}, kind=kind,
            states=str(states), granted=granted,
        )  # fmt: skip
        process = fork(folder, assignment, _work)
        self.workers[name] = SweepProcess(
            name=name, folder=folder, process=process, states=states, slot=slot
        )


def _work(folder: Path) -> None:
    os._exit(prepare_worker(folder)())
