"""Effect of a hostile user on another user's training job.

Ann's job takes a step every 20 ms and prints the time, and she submits a job five times a second. Bob runs one
attack after the other, with a key of his own, from this host. Each figure compares the seconds of an attack with
those just before. Bob's processes are niced: elsewhere they would have processors of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from controlplane.client import BlockingClient, Client, JobSpec
from schemas.errors import OnesError
from schemas.transport.keys import write_keys
from tests.bench import report
from tests.bench.hostile_user import ATTACKS
from tests.support.cluster import Cluster
from tests.support.documented import ROOT

SETTLE_S: Final = 1.0
START_S: Final = 120.0  # of the first steps, at most
SUBMIT_S: Final = 0.2
STEP_S: Final = 0.02
OUTPUT: Final = "output"
RESIZES: Final = "resizes"  # that wait for slots
WAITING: Final = 3000
TRAINING: Final = """
    import os
    import time

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from elastic import ScalingAgent

    torch.set_num_threads(1)
    agent = ScalingAgent.from_env()
    data = TensorDataset(torch.randn(4000, 8), torch.randn(4000, 1))
    model, optimizer, loader = agent.load(
        lambda: nn.Linear(8, 1), lambda p: torch.optim.SGD(p, lr=0.01), data, batch_size=20, lr=0.01
    )
    for epoch in agent.epochs(100000):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep({step})
            print(f"at {{time.time():.6f}}", flush=True)
        agent.report()
"""
PRINTING: Final = """
    import os
    import time

    line = "x" * 99
    flag = os.environ["FLAG"]
    while True:
        if os.path.exists(flag):
            for _ in range(1000):
                print(line)
        else:
            time.sleep(0.02)
"""


class Watched:
    def __init__(self, home: Path, spec: JobSpec) -> None:
        self._home, self._spec = home, spec
        self.lines: list[tuple[float, float]] = []  # written, heard
        self.submissions: list[tuple[float, float]] = []  # begun, seconds
        with BlockingClient(home) as client:
            self.job = client.submit(spec)
        for work in (self._follow, self._submit):
            threading.Thread(target=work, daemon=True).start()

    def _follow(self) -> None:
        with BlockingClient(self._home) as client:
            for line in client.tail(self.job):
                if line.startswith("at "):
                    self.lines.append((float(line.split()[1]), time.time()))

    def _submit(self) -> None:
        with BlockingClient(self._home) as client:
            while True:
                began = time.time()
                with contextlib.suppress(OnesError):
                    client.submit(self._spec)
                self.submissions.append((began, time.time() - began))
                time.sleep(max(0.0, began + SUBMIT_S - time.time()))

    def figures(self, begin: float, end: float) -> dict[str, float]:
        """Return figures of the seconds between, in milliseconds."""
        written = [at for at, _ in self.lines if begin <= at < end]
        late = [heard - at for at, heard in self.lines if begin <= at < end]
        took = [seconds for began, seconds in self.submissions if begin <= began < end]
        found = {}
        for name, values in (("step", np.diff(written)), ("submit", took), ("line_late", late)):
            for share in (50, 99):
                found[f"{name}_p{share}_ms"] = 1000.0 * float(np.percentile(values, share))
        return found


def user_of(cluster: Cluster, base: Path, name: str) -> Path:
    keys = cluster.home / "keys"
    public = write_keys(keys, name).public.decode()
    with (keys / "authorised.toml").open("a") as file:
        file.write(f'\n[[key]]\npublic = "{public}"\nname = "{name}"\nrole = "user"\n')
    home = base / name
    home.mkdir()
    endpoint = tomllib.loads((cluster.home / "client.toml").read_text())["endpoint"]
    (home / "client.toml").write_text(
        f'endpoint = "{endpoint}"\nserver_key = "{keys}/server.key"\n'
        f'key = "{keys}/{name}.key_secret"\n'
    )
    return home


def spec_of(base: Path, name: str, script: str, **env: str) -> JobSpec:
    work = base / f"work-{name}"
    work.mkdir()
    (work / "train.py").write_text(textwrap.dedent(script))
    env = {"OMP_NUM_THREADS": "1", **env}
    return JobSpec(name=name, script="train.py", workdir=str(work), batch_size=20, env=env)


async def order_resizes(home: Path) -> None:
    """Let so many queued jobs wait for more slots than the cluster has free."""
    snapshot = (home / "snapshot").read_text()
    spec = JobSpec(name="waits", script="train.py", batch_size=20, slots=(1, 2))
    turns = asyncio.Semaphore(50)
    async with Client(home) as client:

        async def one() -> None:
            async with turns:
                accepted = await client.submit_stored(spec, snapshot)
                await client.resize(accepted.job, slots=2)

        await asyncio.gather(*(one() for _ in range(WAITING)))


def most_bytes(process: psutil.Process, until: float) -> float:
    most = 0
    while time.time() < until:
        most = max(most, process.memory_info().rss)
        time.sleep(0.05)
    return most / 2**20


def measure(base: Path, attacks: Sequence[str], seconds: float) -> dict[str, float]:
    cluster = Cluster(base / "cluster", base, slots=2)
    figures: dict[str, float] = {}
    with report.running(cluster, f"\n[limits]\nordered_slots = {2 * WAITING}\n") as pids:
        controller = psutil.Process(pids["controller"])
        ann, bob = (user_of(cluster, base, name) for name in ("ann", "bob"))
        controller.send_signal(signal.SIGHUP)
        time.sleep(SETTLE_S)
        flag = base / "flag"
        with BlockingClient(bob) as client:
            job = client.submit(spec_of(base, "printing", PRINTING, FLAG=str(flag)))
            (bob / "job").write_text(job)
            (bob / "snapshot").write_text(client.job(job).snapshot)
        watched = Watched(ann, spec_of(base, "training", TRAINING.format(step=STEP_S)))
        report.until(lambda: len(watched.lines) >= 50 and len(watched.submissions) >= 5, START_S)
        try:
            for attack in attacks:
                figures |= _one(
                    watched, attack, bob, flag=flag, controller=controller, seconds=seconds
                )
        except psutil.Error:
            sys.stderr.write(cluster.said())
            raise
    return figures


def _one(
    watched: Watched,
    attack: str,
    bob: Path,
    *,
    flag: Path,
    controller: psutil.Process,
    seconds: float,
) -> dict[str, float]:
    report.now(f"{attack}: before and meanwhile")
    begin = time.time()
    time.sleep(seconds)
    middle = time.time()
    hostile = None
    if attack == OUTPUT:
        flag.touch()
    elif attack == RESIZES:
        asyncio.run(order_resizes(bob))
        time.sleep(SETTLE_S)
        middle = time.time()
    else:
        command = [sys.executable, "-m", "tests.bench.hostile_user", attack, str(bob)]
        hostile = subprocess.Popen([*command, str(seconds + SETTLE_S)], cwd=ROOT)
        time.sleep(SETTLE_S)
    memory = most_bytes(controller, time.time() + seconds)
    end = time.time()
    flag.unlink(missing_ok=True)
    if hostile is not None:
        hostile.wait()
    time.sleep(2 * SETTLE_S)
    before, during = watched.figures(begin, middle), watched.figures(middle, end)
    found = {f"{attack}_controller_mib": memory}
    for name, value in during.items():
        found[f"{attack}_{name}"] = value
        found[f"{attack}_{name.removesuffix('_ms')}_vs_before"] = value / before[name]
    return found


def main() -> None:
    known = [*ATTACKS, OUTPUT, RESIZES]
    attacks = (report.some_of(known), known, "which of them")
    chosen = report.arguments(__doc__, "2 s of each", attacks=attacks)
    with report.folder() as base:
        figures = measure(base, chosen.attacks, 2.0 if chosen.quick else 10.0)
    names = [f"{name}_p{share}" for name in ("step", "submit", "line_late") for share in (50, 99)]
    rows: list[list[object]] = []
    for attack in chosen.attacks:
        keys = [f"{attack}_{name}" for name in names]
        cells = [f"{figures[f'{k}_ms']:.4g} ({figures[f'{k}_vs_before']:.2f})" for k in keys]
        rows.append([attack, *cells, figures[f"{attack}_controller_mib"]])
    title = "ms (over those before)"
    report.table(title, ["bob's", *(name.replace("_", " ") for name in names), "MiB"], rows)
    report.write(figures, chosen.json)
    os._exit(0)  # threads of Ann wait for what does not come any more


if __name__ == "__main__":
    main()
