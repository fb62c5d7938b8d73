"""A real cluster in a temporary folder, driven through the command line as a user would.

Below it: jobs to resize (`training_job`), jobs of a search (`submit_searched`) and sweeps
(`submit_sweep`), each with what must hold at their end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from controlplane.cli.output import plain
from controlplane.client import BlockingClient
from schemas.wire.client import Ledger, SweepDetail
from tests.support.commands import Finished, ones

LIMIT_S = 90.0
LOOK_S = 0.02
T = TypeVar("T")

TOY = """
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic import ScalingAgent

agent = ScalingAgent.from_env()
inputs = torch.randn(400, 8)
data = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))


def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


model, optimizer, loader = agent.load(build_model, build_optimizer, data, batch_size=20, lr=0.05)
step = 0
for epoch in agent.epochs(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        print(f"epoch {epoch} step {step}")
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
    agent.report(mse=loss.item())
    while epoch == 2 and not os.path.exists(os.environ.get("HOLD", "/")):
        time.sleep(0.01)
print("done")
"""


@dataclass
class Cluster:
    """One cluster; `base` is where its jobs' folders are made."""

    home: Path
    base: Path
    slots: int = 4
    agents: int = 1
    policy: str = "fifo"  # most tests want jobs that stay as they are
    _made: int = field(default=0)

    def ones(self, *arguments: str, timeout: float = LIMIT_S, cwd: Path | None = None) -> Finished:
        """Run `ones` with this cluster's home."""
        return ones(*arguments, limit_s=timeout, cwd=cwd, ONES_HOME=str(self.home))

    def run(self, folder: Path, *line: str, options: tuple[str, ...] = ()) -> Finished:
        """Run a program on the cluster with `ones run`, from a folder."""
        return self.ones("run", *options, "--", *line, cwd=folder)

    def up(self) -> dict[str, Any]:
        """Start what is not running."""
        slots, agents = str(self.slots), str(self.agents)
        at = ("--dir", str(self.home), "--slots", slots, "--agents", agents)
        done = self.ones("local", "up", *at, "--policy", self.policy, "-o", "json")
        assert done.code == 0, done.err + self.said()
        return done.json["pids"]

    def down(self) -> None:
        """Stop everything."""
        done = self.ones("local", "down", "--dir", str(self.home))
        assert done.code == 0, done.err

    def clear(self) -> None:
        """End every job, and wait until no process of theirs is left."""
        jobs = self.ones("ps", "-o", "quiet").out.split()
        for job in jobs:
            self.ones("cancel", job)
        for job in jobs:
            self.until(job, lambda shown: not shown["workers"])

    def said(self) -> str:
        """The end of the logs of controller and agents."""
        logs = sorted((self.home / "logs").glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in logs)

    def write(self, script: str, /, files: dict[str, str] | None = None, **fields: Any) -> Path:
        """A folder with a script and a job file; returns the job file."""
        self._made += 1
        folder = self.base / f"job-{self._made}"
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(textwrap.dedent(script))
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        table: dict[str, Any] = {
            "name": "toy",
            "script": "train.py",
            "batch_size": 20,
            "env": {"OMP_NUM_THREADS": "1"},
            **fields,
        }
        (folder / "job.toml").write_text(toml(table))
        return folder / "job.toml"

    def submit(self, script: str = TOY, /, **fields: Any) -> str:
        """Submit a job that must be accepted; returns its name."""
        done = self.ones("submit", str(self.write(script, **fields)), "-o", "json")
        assert done.code == 0, done.err
        return done.json["job"]

    def wait(self, job: str) -> Finished:
        """Wait for a job's end."""
        return self.ones("wait", job, "--timeout", str(LIMIT_S - 5))

    def show(self, job: str) -> dict[str, Any]:
        """Everything about a job."""
        return self.ones("show", job, "-o", "json").json

    def until(self, job: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The job when it is as wanted; fails when it never is.

        Looks through the client: a command for each look would cost the workers their cores.
        """

        def look() -> dict[str, Any]:
            flat = plain(client.job(job))
            return {**flat.pop("summary"), **flat}

        def why() -> str:
            brief = {k: v for k, v in look().items() if k not in {"epochs", "spec"}}
            return f"{brief}\n{self.said()}"

        with BlockingClient(self.home, timeout=LIMIT_S) as client:
            return looked(look, holds, why)

    def until_epoch(self, job: str, epoch: int) -> dict[str, Any]:
        """The job when it has finished that epoch and goes on."""
        return self.until(job, lambda shown: shown["epoch"] >= epoch)

    def output(self, job: str) -> list[str]:
        """What the job's script printed; notes of the library left out."""
        lines = self.ones("logs", job, "--no-prefix").out.splitlines()
        return [line for line in lines if not line.startswith("[ones]")]

    def samples(self, job: str) -> dict[int, list[int]]:
        """The ids of committed steps by epoch, sorted."""
        taken: dict[int, list[int]] = defaultdict(list)
        for record in self.ones("samples", job, "-o", "jsonl").lines:
            taken[record["epoch"]].extend(record["ids"])
        return {epoch: sorted(ids) for epoch, ids in taken.items()}

    def events(self, job: str | None = None) -> list[dict[str, Any]]:
        """The event history, without gaps."""
        events = self.ones("events", "-o", "jsonl").lines
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        return [event for event in events if job is None or event["job"] == job]


@contextmanager
def running(base: Path, settings: str = "", **shape: Any) -> Iterator[Cluster]:
    """A cluster in a folder; `settings` are appended to those of its controller."""
    made = Cluster(base / "home", base / "jobs", **shape)
    made.up()
    try:
        if settings:
            made.down()
            with (made.home / "controller.toml").open("a") as file:
                file.write(f"{settings}\n")
            made.up()
        yield made
    finally:
        made.down()


def looked(
    look: Callable[[], T], holds: Callable[[T], object] = bool, why: Callable[[], object] = str
) -> T:
    """What a look finds when it is as wanted; fails, saying why, when it never is."""
    deadline = time.monotonic() + LIMIT_S
    while not holds(found := look()):
        assert time.monotonic() < deadline, why() or found
        time.sleep(LOOK_S)
    return found


def kill(pid: int) -> None:
    """kill -9, and wait until it is gone."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([pidfd], [], [], LIMIT_S)
    os.close(pidfd)


def await_gone(pid: int) -> None:
    """Wait until a process has ended; it may have before."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([pidfd], [], [], LIMIT_S)[0], f"{pid} lives on"
    os.close(pidfd)


def toml(table: dict[str, Any]) -> str:
    """A flat table with nested ones as TOML."""
    plain = {k: v for k, v in table.items() if not isinstance(v, dict) or k == "stop"}
    lines = [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if key not in plain:
            lines.append(f"[{key}]")
            lines.extend(f"{k} = {_value(v)}" for k, v in value.items())
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, float) and value != value:  # noqa: PLR0124 - NaN
        return "nan"
    return json.dumps(value)


RESIZED_SAMPLES = 96
RESIZED = """
import hashlib, os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent

agent = ScalingAgent.from_env()
inputs = torch.randn(96, 8)
data = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))


def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))


model, optimizer, loader = agent.load(
    build_model, lambda p: torch.optim.AdamW(p, lr=0.01), data, batch_size=12)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
for epoch in agent.epochs(1000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        time.sleep(0.035)  # what trains while a test waits leaves the cores to others
    whole = b"".join(bytes(p.detach().view(-1).view(torch.uint8).tolist())
                     for p in model.parameters())
    print("epoch", epoch, "rank", agent.rank, hashlib.sha1(whole).hexdigest())
    agent.report(size=agent.world_size)
"""


def training_job(
    cluster: Cluster, slots: int = 1, faults: str = "", script: str = RESIZED, **fields: Any
) -> str:
    """A job that trains on so many slots until it is cancelled."""
    job = cluster.submit(
        script,
        **{
            "batch_size": 12, "max_batch_size": 96, "max_local_batch": 12, "slots": [1, 4],
            "slots_wanted": slots, "record_samples": True, "stop": {"epochs": 100_000},
            "env": {"OMP_NUM_THREADS": "1", "ELASTIC_FAULTS": faults}, **fields,
        },
    )  # fmt: skip
    cluster.until(job, lambda shown: shown["state"] == "running")
    return job


def resize(cluster: Cluster, job: str, slots: int, *more: str) -> dict[str, Any]:
    """Order a size, and wait until it is there."""
    done = cluster.ones("resize", job, "--slots", str(slots), *more)
    assert done.code == 0, done.err
    state = "running" if slots else "paused"
    return cluster.until(job, lambda s: s["slots"] == slots and s["state"] == state)


def further(cluster: Cluster, job: str, epochs: int = 2) -> dict[str, Any]:
    """The job when it has finished some more epochs."""
    return cluster.until_epoch(job, cluster.show(job)["epoch"] + epochs)


def assert_nothing_lost(cluster: Cluster, job: str, *, equal_after: int = 0) -> None:
    """End the job: every sample once in every epoch, and equal parameters on all ranks.

    `equal_after`: an epoch in which a damaged state may not have been sent again yet.
    """
    shown = cluster.show(job)
    assert cluster.ones("cancel", job).code == 0
    taken = cluster.samples(job)
    whole = {epoch: ids for epoch, ids in taken.items() if epoch <= shown["epoch"]}
    assert whole == {epoch: list(range(RESIZED_SAMPLES)) for epoch in range(1, shown["epoch"] + 1)}
    digests: dict[str, set[str]] = defaultdict(set)
    for line in cluster.output(job):
        if line.startswith("epoch"):
            _, epoch, _, _, digest = line.split()
            digests[epoch].add(digest)
    apart = {int(epoch) for epoch, found in digests.items() if len(found) > 1}
    assert apart <= set(range(equal_after))


def kinds(shown: dict[str, Any]) -> list[tuple[str, str]]:
    return [(version["kind"], version["outcome"]) for version in shown["versions"]]


SEARCHED_SAMPLES = 240
SEARCHED = """
import time, torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent

agent = ScalingAgent.from_env()
inputs = torch.randn(240, 8)
data = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))
model, optimizer, loader = agent.load(
    lambda: nn.Linear(8, 1), lambda p: torch.optim.SGD(p, lr=0.01), data, batch_size=24)
for epoch in agent.epochs(1000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep(0.004 + 0.001 * len(x))  # like a device of its own
"""


def submit_searched(cluster: Cluster, epochs: int, **fields: Any) -> str:
    return cluster.submit(
        SEARCHED,
        **{
            "batch_size": 24, "max_batch_size": 96, "max_local_batch": 48, "slots": [1, 4],
            "record_samples": True, "stop": {"epochs": epochs}, **fields,
        },
    )  # fmt: skip


def explained(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    return cluster.ones("explain", job, "-o", "json").json["decisions"]


def search_process(cluster: Cluster) -> int:
    """The child that thinks for the controller."""
    return child_of(int((cluster.home / "run" / "controller.pid").read_text()), "ones: search")


def child_of(controller: int, title: str) -> int:
    """The child with such a title, as soon as there is one."""

    def titled() -> list[int]:
        found = []
        for child in psutil.Process(controller).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if child.cmdline()[:1] and child.cmdline()[0].startswith(title):
                    found.append(child.pid)
        return found

    return looked(titled)[0]


def check_all_done(cluster: Cluster, jobs: list[str], epochs: int) -> list[dict[str, Any]]:
    """All succeeded, every sample was seen once an epoch, every group was explained."""
    ids = list(range(SEARCHED_SAMPLES))
    told = []
    for job in jobs:
        assert cluster.wait(job).code == 0, cluster.show(job)["history"]
        assert cluster.samples(job) == dict.fromkeys(range(1, epochs + 1), ids)
        decisions = explained(cluster, job)
        assert all(decision["reason"] for decision in decisions)
        ordered = [version["version"] for version in cluster.show(job)["versions"]]
        assert [decision["version"] for decision in decisions] == ordered
        told += decisions
    assert slots_had_one_owner(cluster)
    return told


def slots_had_one_owner(cluster: Cluster) -> bool:
    """No two members of groups on one slot, at any event of the history."""
    members: dict[tuple[Any, ...], str] = {}
    for event in cluster.events():
        who = (event["job"], event.get("version"), event.get("rank"))
        if event["type"] == "worker.ready":
            members[who] = event["slot"]
        elif event["type"] == "worker.exited":
            members.pop(who, None)
        if max(Counter(members.values()).values(), default=0) > 1:
            return False
    return True


FUNCTIONS = """
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset


def load(partition, partitions):
    chance = torch.Generator().manual_seed(1000 if partition is None else partition)
    inputs = torch.randn(64, 8, generator=chance)
    return TensorDataset(inputs, (inputs.sum(dim=1, keepdim=True) > 0).float())


def build(values):
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=values["lr"])


def train(trained, data, unit):
    for inputs, labels in unit.loader(data, 16):
        trained.optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(trained.model(inputs), labels)
        loss.backward()
        trained.optimizer.step()
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
    return {"loss": loss.item()}


def evaluate(trained, data, unit):
    inputs, labels = data.tensors
    return {"accuracy": ((trained.model(inputs) > 0).float() == labels).float().mean().item()}
"""


def submit_sweep(
    house: Cluster,
    searcher: str,
    *,
    pause_s: float = 0.2,
    functions: str = FUNCTIONS,
    more: str = "",
    **fields: Any,
) -> str:
    """Submit a sweep that must be accepted; `searcher` and `more` are TOML."""
    folder = house.base / f"sweep-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    (folder / "functions.py").write_text(functions)
    table = {"name": "sweep", "slots": [1, 4], **fields}
    (folder / "sweep.toml").write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        + textwrap.dedent(f"""
            [env]
            OMP_NUM_THREADS = "1"
            PAUSE_S = "{pause_s}"
            [sweep]
            input_fn = "functions:load"
            model_fn = "functions:build"
            train_fn = "functions:train"
            eval_fn = "functions:evaluate"
            partitions = 4
            metric = "accuracy"
            {more}
            [sweep.space.lr]
            log_uniform = [1e-3, 1e-1]
            [sweep.searcher]
        """)
        + textwrap.dedent(searcher)
    )
    done = house.ones("sweep", "submit", str(folder / "sweep.toml"), "-o", "json")
    assert done.code == 0, done.err
    job: str = done.json["job"]
    (house.base / job).symlink_to(folder)
    return job


def until_sweep(house: Cluster, job: str, holds: Callable[[SweepDetail], bool]) -> SweepDetail:
    """The sweep when it is as wanted; fails when it never is."""
    with BlockingClient(house.home, timeout=LIMIT_S) as client:
        why = lambda: f"{client.sweep(job).summary}\n{house.said()}"  # noqa: E731
        return looked(lambda: client.sweep(job), holds, why)


def ledger(house: Cluster, job: str) -> Ledger:
    with BlockingClient(house.home, timeout=LIMIT_S) as client:
        return client.ledger(job)


def trained_alone(house: Cluster, job: str, trial: int) -> dict[str, Any]:
    """What comes of the visits of a trial, one after the other in one process."""
    with BlockingClient(house.home, timeout=LIMIT_S) as client:
        manifest = client.sweep_run(job).manifest()
        values = {one.number: dict(one.values) for one in client.sweep(job).trials}
    spec = manifest.spec.stated_sweep
    visits = [
        {
            "config": one.values_of,
            "values": values[one.values_of],
            "epoch": one.epoch,
            "partition": one.partition,
            "version": one.version,
            "digest": one.digest,
        }
        for one in manifest.visits(trial)
    ]
    task = {
        "functions": {
            name: getattr(spec, name) for name in ("input_fn", "model_fn", "train_fn", "eval_fn")
        },
        "partitions": spec.partitions,
        "seed": spec.search.seed,
        "model": None,
        "visits": visits,
    }
    file = house.base / f"{job}-{trial}.json"
    file.write_text(json.dumps(task))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "elastic.sweep_worker.alone", str(file)],
        cwd=Path(house.base / job).resolve(), env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
