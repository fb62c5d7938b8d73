"""A job's workers as real processes; the test replaces agent and controller.

Workers run a real script through `ScalingAgent`: assignment file, report file, ZeroMQ socket, gloo.
The crew forks them, reads their reports and gives the orders that a controller would give.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import signal
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
import torch
from torch import nn

from elastic.sample_stream import SampleStream
from schemas.codec import encode
from schemas.ids import JobId, NodeId, Rank, Version, WorkerId, slot_id, worker_id
from schemas.jobs import JobSpec, StopRule
from schemas.nodes import Group, Member, ResumePoint
from schemas.wire.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    SETTLED,
    START,
    SUSPEND,
    SWITCH,
    EpochReported,
    GroupBroken,
    GroupFormed,
    JoinFailed,
    Quiesced,
    ScriptFailed,
    StoreOpened,
    Suspended,
    WorkerReady,
)
from schemas.wire.worker import Assignment, GroupOrder
from tests.support.sample_steps import steps_of
from tests.training.sweep_crew import ForkedWorker, ForkedWorkers, fork

JOB: Final = JobId("toy-1")
SEED: Final = 11
SIZE: Final = 61  # the last step of an epoch has one sample, so some workers have none
ENOUGH: Final = StopRule(metric="enough", at_least=1.0)

HEAD: Final = """
import hashlib, json, os, pathlib, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent

HOME = pathlib.Path(os.environ["CREW_HOME"])
ME = pathlib.Path(os.environ["ONES_WORKER"]).name
torch.set_default_dtype(torch.float64)
agent = ScalingAgent.from_env()
DEVICE = agent.device.type
generator = torch.Generator().manual_seed(5)
inputs = torch.randn(SIZE, 6, generator=generator)
targets = inputs.sum(dim=1, keepdim=True).sin()
data = TensorDataset(inputs, targets)

def digest(model):
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]

def say(**words):
    with open(HOME / "said", "a") as said:
        said.write(json.dumps({"worker": ME, **words}) + "\\n")

def enough():
    return float((HOME / "enough").exists())
"""

PLAIN: Final = """
SCALING = "none"

def build_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""

LOOP: Final = """
model, optimizer, loader = agent.load(
    build_model, build_optimizer, data, batch_size=1, lr_scaling=SCALING
)
for epoch in agent.epochs(1000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if agent._membership.has_full_state:
        say(epoch=epoch + 1, step=agent.step, digest=digest(model))
    agent.report(enough=enough())
if agent.rank == 0:
    torch.save(model.state_dict(), HOME / "final.pt")
"""


SCHEDULED: Final = (
    PLAIN[: PLAIN.index("def build_optimizer")]
    + """
def build_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.01)

class Both(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, *parts):  # a script's own, without its base's
        self.parts = list(parts)

    def step(self):
        self.parts[0].step()
        self.parts[1].step(1.0)

def schedules(optimizer):
    every = torch.optim.lr_scheduler
    warm = every.LinearLR(optimizer, 0.3, total_iters=11)
    falling = every.MultiStepLR(optimizer, (7, 19, 31), 0.9)
    per_batch = every.SequentialLR(optimizer, [warm, falling], [11])
    slowly = every.LambdaLR(optimizer, lambda epoch: 0.98**epoch)
    plateau = every.ReduceLROnPlateau(optimizer, factor=0.8, patience=3)
    chained = every.ChainedScheduler([slowly], optimizer)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=9)
    return per_batch, Both(chained, plateau), scaler
"""
)

SCHEDULED_LOOP: Final = """
model, optimizer, loader = agent.load(
    build_model, build_optimizer, data, batch_size=1, lr_scaling=SCALING
)
per_batch, per_epoch, scaler = schedules(optimizer)
for epoch in agent.epochs(1000):
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        per_batch.step()
    say(epoch=epoch + 1, step=agent.step, digest=digest(model) + str(per_batch.get_last_lr()) + str(scaler.get_scale()))
    per_epoch.step()
    agent.report(enough=enough())
if agent.rank == 0:
    torch.save(model.state_dict(), HOME / "final.pt")
"""

NOISY: Final = """
SCALING = "linear"

def build_model():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Tanh(), nn.Linear(7, 1)
    )

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)
"""

WIDE: Final = """
SCALING = "none"

def build_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 1))

def build_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.001, amsgrad=True)
"""


class Alone:
    """One plain process, without this library, that trains on the same batches."""

    def __init__(self, source: str, batch: int, size: int) -> None:
        names: dict[str, Any] = {"torch": torch, "nn": nn, "DEVICE": "cpu"}
        exec(source, names)  # noqa: S102 - the part of the script that builds
        self.batch = batch
        self.inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(5))
        self.targets = self.inputs.sum(dim=1, keepdim=True).sin()
        self.model = names["build_model"]()
        self.optimizer = names["build_optimizer"](self.model.parameters())
        schedules = names.get("schedules")
        self.schedules = schedules(self.optimizer) if schedules else None
        self.stream = SampleStream(SEED, size)
        self.after: list[dict[str, torch.Tensor]] = []  # parameters, by epoch

    def train(self) -> None:
        for _, ids in steps_of(self.stream, len(self.after) + 1, 0, [self.batch], 0):
            self.step(ids)
        if self.schedules is not None:
            self.schedules[1].step()
        self.after.append({name: kept.clone() for name, kept in self.model.state_dict().items()})

    def step(self, ids: Sequence[int]) -> None:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.inputs[ids]), self.targets[ids])
        if self.schedules is None:
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            return
        per_batch, _, scaler = self.schedules
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        scaler.step(self.optimizer)
        scaler.update()
        per_batch.step()


_known = functools.cache(lambda kind, *words: kind(*words))  # many tests ask for the same training


def alone(
    source: str, epochs: int, batch: int, size: int = SIZE, kind: type[Alone] = Alone
) -> dict[str, torch.Tensor]:
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        process = _known(kind, source, batch, size)
        while len(process.after) < epochs:
            process.train()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    return process.after[epochs - 1]


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def script(*parts: str, size: int = SIZE) -> str:
    return HEAD.replace("SIZE", str(size)) + "".join(textwrap.dedent(part) for part in parts)


class Slots:
    prelude = ""  # of their script
    environment: ClassVar[dict[str, str]] = {}


@dataclass(kw_only=True)
class Worker(ForkedWorker):
    assignment: Assignment


class NobodyIsFullError(AssertionError):
    """All members that had the full state are lost."""


class Crew(ForkedWorkers[Worker]):
    """Workers of one job; gives the orders that an agent and a controller would give."""

    def __init__(
        self,
        home: Path,
        source: str,
        *,
        faults: str = "",
        bound: int = 1000,
        seed: int | msgspec.UnsetType = SEED,
        stop: StopRule | None = ENOUGH,
    ) -> None:
        super().__init__(home)
        self._seed = seed
        self._stop = stop
        (home / "train.py").write_text(Slots.prelude + source)
        (home / "checkpoints").mkdir()
        self.faults = faults
        self._bound = bound
        self.version = 0
        self.group = Group(version=Version(0), members=(), lr=None)
        self.recoveries = 0
        self._batch = 0
        self._tolerant = False  # of members that could not build a group
        self._sent: dict[WorkerId, GroupOrder] = {}

    # --- orders

    def start(self, *batches: int, resume: ResumePoint | None = None) -> None:
        self.begin_start(*batches, resume=resume)
        self.until(lambda: self._formed(self.group), "the group has started")
        self._order([m.worker for m in self.group.members], SETTLED, START, self.group)

    def through(self, *events: tuple[int, ...] | int | str) -> list[EpochReported]:
        """Train through changes to local batches, numbers of epochs, a loss or a pause; finish."""
        point = None
        for event in events:
            if isinstance(event, int):
                self.trains_on(event)
            elif event == "loss":
                self.until(self.broken, "a member is lost")
                self.recover()
            elif event == "pause":
                point = self.suspend()
            elif self.group.members:
                self.change(*event)
            else:
                self.start(*event, resume=point)
        return self.finish()

    def refusal(self, *batches: int) -> str:
        """Return the error that ends the script in `load`, or soon after such a start."""
        with contextlib.suppress(AssertionError):
            self.begin_start(*batches)
        self.until(lambda: bool(self.reported(ScriptFailed)), "the script is told")
        return self.reported(ScriptFailed)[0].error

    def begin_start(self, *batches: int, resume: ResumePoint | None = None) -> None:
        self._batch = self._batch or sum(batches)
        self.version += 1
        names = [self._named(rank) for rank in range(len(batches))]
        self.group = self._group(names, batches, resume)
        for name in names:
            self._fork(name, self.group, START)
        self.until(lambda: all(self.last(name, WorkerReady) for name in names), "all are ready")
        port = self.last(names[0], WorkerReady).store_port  # type: ignore[union-attr]
        self._order(names, SWITCH, START, self.group, store=f"127.0.0.1:{port}")

    def change(self, *batches: int) -> None:
        """Resize the group to these local batches: newcomers join, the last ranks leave."""
        self.begin_change(*batches)
        self.finish_change()

    def begin_change(self, *batches: int) -> None:
        old = self.group
        self.version += 1
        stay = [member.worker for member in old.members[: len(batches)]]
        new = [self._named(rank) for rank in range(len(stay), len(batches))]
        self._coming = coming = self._group([*stay, *new], batches)
        for name in new:
            self._fork(name, coming, JOIN)
        store = ""
        if len(stay) != len(old.members) or new:
            first = coming.members[0].worker
            if len(batches) > 1:
                self._order([first, *new], PREPARE, JOIN, coming)
                self.until(
                    lambda: (
                        (self._tolerant and self._hurt())
                        or (
                            self._opened(first) is not None
                            and all(self.last(name, WorkerReady) for name in new)
                        )
                    ),
                    "the newcomers are ready",
                )
                if self._tolerant and self._hurt():
                    return
                store = f"127.0.0.1:{self._opened(first)}"
        everybody = dict.fromkeys([*(m.worker for m in old.members), *new])
        self._order(list(everybody), SWITCH, JOIN, coming, store=store)

    def finish_change(self) -> None:
        old, coming = self.group, self._coming
        self.until(lambda: self._formed(coming), f"group {coming.version} trains")
        self.group = coming
        kept = [member.worker for member in coming.members]
        self._order(kept, SETTLED, JOIN, coming)
        self._await_exits([m.worker for m in old.members if m.worker not in kept])

    def _await_exits(self, names: Sequence[WorkerId]) -> None:
        self.until(lambda: not any(self.workers[n].alive for n in names), "the workers left")
        codes = {self.workers[name].process.exitcode for name in names}
        assert codes <= ({0, -signal.SIGKILL} if self._tolerant else {0})

    def change_if_it_can(self, *batches: int) -> None:
        """Change the group, and handle failures as a controller does."""
        old = self.group
        self._tolerant = True
        self.begin_change(*batches)
        coming = self._coming
        self.until(lambda: self._formed(coming) or self._hurt(), "it trains or is hurt")
        if self._formed(coming) and not self._hurt():
            self.finish_change()
            return
        newcomers = [m.worker for m in coming.members if old.member(m.worker) is None]
        if not self.broken():
            self._order([m.worker for m in old.members], SETTLED, JOIN, self._renumbered(old))
            for name in newcomers:
                self.workers[name].process.kill()
            epochs = len(self.epochs())
            self.until(
                lambda: self._lost(coming) or len(self.epochs()) > epochs + 1,
                "the old group goes on",
            )
        if self._lost(coming):
            self.recover()

    def _lost(self, abandoned: Group) -> bool:
        """Return whether a member is lost: one that switched alone waits for the others."""
        return self.broken() or any(
            isinstance(report, GroupFormed) and report.group == abandoned.version
            for worker in self._members()
            for report in worker.reports
        )

    def _hurt(self) -> bool:
        everybody = {m.worker for m in (*self.group.members, *self._coming.members)}
        died = any(
            not self.workers[n].alive and self.workers[n].process.exitcode for n in everybody
        )
        failed = any(r.group == self.version for r in self.reported(JoinFailed))
        return died or failed or self.broken()

    def _renumbered(self, group: Group) -> Group:
        return msgspec.structs.replace(group, version=Version(self.version))

    def suspend(self) -> ResumePoint:
        self.begin_suspend()
        self.until(self.suspended, "the job is suspended")
        return self.finish_suspend()

    def begin_suspend(self) -> None:
        self.version += 1
        names = [member.worker for member in self.group.members]
        nobody = Group(version=Version(self.version), members=(), lr=None)
        self._order(names, SWITCH, SUSPEND, nobody)

    def suspended(self) -> bool:
        last = self.last(self.group.members[0].worker, Suspended)
        return last is not None and last.group == self.version

    def finish_suspend(self) -> ResumePoint:
        names = [member.worker for member in self.group.members]
        self._await_exits(names)
        last = self.last(names[0], Suspended)
        self.group = Group(version=Version(self.version), members=(), lr=None)
        return ResumePoint(epoch=last.epoch, version=last.group)

    def recover(self) -> None:
        """Quiesce the survivors, take the state that is furthest ahead, and continue."""
        coming = getattr(self, "_coming", self.group)
        candidates = dict.fromkeys(m.worker for m in (*self.group.members, *coming.members))
        for attempt in itertools.count(1):
            self.recoveries += 1
            assert attempt < 6, "recovered again and again\n" + self.said()
            self.version += 1
            version = Version(self.version)
            here = [name for name in candidates if self.workers[name].alive]
            if not here:
                self.nobody_has_the_state()
                return
            asked = self._group(here, self._dealt(len(here)))
            self._order(here, PREPARE, RECOVER, asked)
            self.until(
                lambda here=here, version=version: all(  # type: ignore[misc]
                    not self.workers[n].alive or self._rest(n, version) for n in here
                ),
                "all are at rest",
            )
            rests = {name: self._rest(name, version) for name in here}
            full = [
                n
                for n, rest in rests.items()
                if rest and rest.has_full_state and self.workers[n].alive
            ]
            if not full:
                self.nobody_has_the_state()
                return
            for name in here:
                if name not in full:
                    self.workers[name].process.kill()
            places = [(rests[n].step, rests[n].epoch) for n in full]  # type: ignore[union-attr]
            source = None if len(set(places)) == 1 else Rank(places.index(max(places)))
            recovered = self._group(full, self._dealt(len(full)))
            store = f"127.0.0.1:{rests[full[0]].port}"  # type: ignore[union-attr]
            self._order(full, SWITCH, RECOVER, recovered, store=store, source=source)
            self.until(
                lambda full=full, recovered=recovered: (
                    self._formed(recovered)  # type: ignore[misc]
                    or not all(self.workers[n].alive for n in full)
                ),
                "the recovered group trains",
            )
            if self._formed(recovered):
                self.group = self._coming = recovered
                self._order(full, SETTLED, RECOVER, recovered)
                return

    def nobody_has_the_state(self) -> None:
        raise NobodyIsFullError("nobody has the whole state\n" + self.said())

    def finish(self) -> list[EpochReported]:
        (self.home / "enough").touch()
        return self.ended()

    def ended(self) -> list[EpochReported]:
        while True:
            self.until(
                lambda: self.broken() or not any(w.alive for w in self._members()), "the job ended"
            )
            if self.broken():
                self.recover()
                continue
            codes = [worker.process.exitcode for worker in self._members()]
            assert codes == [0] * len(codes), self.said()
            return self.epochs()

    # --- what happened

    def broken(self) -> bool:
        members = self._members()
        died = any(not w.alive and w.process.exitcode != 0 for w in members)
        said = any(
            isinstance(r, GroupBroken) and r.group >= self.group.version
            for w in members
            for r in w.reports
        )
        return died or said

    def epochs(self) -> list[EpochReported]:
        found: dict[int, EpochReported] = {}
        for worker in self.workers.values():
            for report in worker.reports:
                if isinstance(report, EpochReported):
                    found.setdefault(report.epoch, report)
        return [found[epoch] for epoch in sorted(found)]

    def samples(self) -> dict[int, list[int]]:
        """Return the ids that committed steps took, sorted, by epoch; repeated records count once."""
        taken = {(e["epoch"], e["step"], e["rank"], tuple(e["ids"])) for e in self.records()}
        found: dict[int, list[int]] = {}
        for epoch, _, _, ids in taken:
            found.setdefault(epoch, []).extend(ids)
        return {epoch: sorted(ids) for epoch, ids in sorted(found.items())}

    def records(self) -> Iterator[dict[str, Any]]:
        for worker in self.workers.values():
            path = worker.folder / "samples"
            for line in path.read_text().splitlines() if path.exists() else ():
                yield json.loads(line)

    def words(self) -> list[dict[str, Any]]:
        path = self.home / "said"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def digests(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for word in self.words():
            found.setdefault(word["epoch"], set()).add(word["digest"])
        return found

    def final(self) -> dict[str, torch.Tensor]:
        return torch.load(self.home / "final.pt", map_location="cpu", weights_only=True)

    def step(self) -> int:
        path = self.home / "said"
        return max((word["step"] for word in self.words()), default=0) if path.exists() else 0

    def trains_on(self, epochs: int = 1) -> None:
        wanted = len(self.epochs()) + epochs
        self.until(lambda: len(self.epochs()) >= wanted, f"{wanted} epochs are over")

    # --- helpers

    def _members(self) -> list[Worker]:
        return [self.workers[member.worker] for member in self.group.members]

    def _named(self, rank: int) -> WorkerId:
        return worker_id(JOB, Version(self.version), Rank(rank))

    def _dealt(self, count: int) -> list[int]:
        each, rest = divmod(self.group.global_batch, count)
        return [each + (rank < rest) for rank in range(count)]

    def _group(
        self, names: Sequence[WorkerId], batches: Sequence[int], resume: ResumePoint | None = None
    ) -> Group:
        members = tuple(
            Member(rank=Rank(i), slot=slot_id(NodeId("n"), i), local_batch=batch, worker=name)
            for i, (name, batch) in enumerate(zip(names, batches, strict=True))
        )
        return Group(
            version=Version(self.version), members=members, lr=None, base_batch=self._batch,
            resume=resume,
        )  # fmt: skip

    def _fork(self, name: WorkerId, group: Group, kind: str) -> None:
        folder = self.home / name
        folder.mkdir()
        rank = Rank(int(name.rpartition(".r")[2]))
        spec = JobSpec(
            name="toy", script="train.py", batch_size=self._batch, max_batch_size="keep",
            max_local_batch=self._bound,
            record_samples=True, stop=self._stop, seed=self._seed,
        )  # fmt: skip
        env = {
            "OMP_NUM_THREADS": "1",
            "CREW_HOME": str(self.home),
            "ELASTIC_FAULTS": self.faults,
            **Slots.environment,
        }
        assignment = Assignment(
            job=JOB, version=Version(self.version), rank=rank, slot=rank, group=group, spec=spec,
            workdir=str(self.home), checkpoints=str(self.home / "checkpoints"),
            socket=f"ipc://{self._socket_path}", env=env, kind=kind,
        )  # fmt: skip
        process = fork(folder, assignment, _work)
        self.workers[name] = Worker(
            name=name, folder=folder, process=process, assignment=assignment
        )

    def _order(
        self, names: Sequence[WorkerId], stage: int, kind: str, group: Group, *,
        store: str = "", source: Rank | None = None,
    ) -> None:  # fmt: skip
        order = GroupOrder(
            version=group.version, stage=stage, kind=kind, group=group, store=store, source=source
        )
        for name in names:
            self._sent[name] = order
            if self.workers[name].route:
                self._router.send_multipart([self.workers[name].route, encode(order)])

    def _greeted(self, name: WorkerId) -> None:
        if name in self._sent:
            self._router.send_multipart([self.workers[name].route, encode(self._sent[name])])

    def _failures(self) -> list[str]:
        joins = [] if self._tolerant else self.reported(JoinFailed)
        return [*super()._failures(), *(report.error for report in joins)]

    def _formed(self, group: Group) -> bool:
        return all(
            any(
                isinstance(report, GroupFormed) and report.group == group.version
                for report in self.workers[member.worker].reports
            )
            for member in group.members
        )

    def _opened(self, name: WorkerId) -> int | None:
        opened = self.last(name, StoreOpened)
        return opened.port if opened is not None and opened.group == self.version else None

    def _rest(self, name: WorkerId, version: Version) -> Quiesced | None:
        rest = self.last(name, Quiesced)
        return rest if rest is not None and rest.group == version else None


@contextlib.contextmanager
def crew(home: Path, source: str, **options: Any) -> Iterator[Crew]:
    made = Crew(home, source, **options)
    try:
        yield made
    finally:
        made.close()


def _work(folder: Path) -> None:
    """Run the worker of `folder`, and exit as the zygote's children do."""
    from elastic.worker import run_script as launch  # noqa: PLC0415 - in the process that was forked
    from elastic.worker import zygote  # noqa: PLC0415

    zygote._exit_worker(launch.prepare_worker(folder)(), folder)
