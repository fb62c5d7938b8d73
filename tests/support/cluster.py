"""A real cluster in a temporary folder, driven through the command line as a user would."""

from __future__ import annotations

import json
import os
import select
import signal
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controlplane.cli.output import plain
from controlplane.client import BlockingClient
from tests.support.commands import Finished, ones

LIMIT_S = 90.0
LOOK_S = 0.02

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

    def up(self) -> dict[str, Any]:
        """Start what is not running."""
        slots, agents = str(self.slots), str(self.agents)
        at = ("--dir", str(self.home), "--slots", slots, "--agents", agents)
        done = self.ones("local", "up", *at, "--policy", self.policy, "-o", "json")
        assert done.code == 0, done.err + self.said()
        pids: dict[str, Any] = done.json["pids"]
        return pids

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
        name: str = done.json["job"]
        return name

    def wait(self, job: str) -> Finished:
        """Wait for a job's end."""
        return self.ones("wait", job, "--timeout", str(LIMIT_S - 5))

    def show(self, job: str) -> dict[str, Any]:
        """Everything about a job."""
        shown: dict[str, Any] = self.ones("show", job, "-o", "json").json
        return shown

    def until(self, job: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The job when it is as wanted; fails when it never is.

        Looks through the client: a command for each look would cost the workers their cores.
        """
        deadline = time.monotonic() + LIMIT_S
        with BlockingClient(self.home, timeout=LIMIT_S) as client:
            while True:
                flat = plain(client.job(job))
                shown: dict[str, Any] = {**flat.pop("summary"), **flat}
                if holds(shown):
                    return shown
                brief = {k: v for k, v in shown.items() if k not in {"epochs", "spec"}}
                assert time.monotonic() < deadline, f"{brief}\n{self.said()}"
                time.sleep(LOOK_S)

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
