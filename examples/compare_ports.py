"""Trains each port in three ways and compares what they end with, over several seeds.

The plain script; its port on one slot of a local cluster; and the port through 1, 2, 4 and 1 slots,
a pause and its end. `python examples/compare_ports.py`; twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from controlplane.client import BlockingClient
from controlplane.client.job_file import load_job
from schemas.jobs import ENDED

HERE: Final = Path(__file__).parent / "ports"
METRICS: Final = {"classifier": "accuracy", "recurrent": "perplexity", "finetune": "test_loss"}
CHANGES: Final = (2, 4, 1, 0)  # slots, an epoch or more apart; 0: pause, then resume
LIMIT_S: Final = 600.0


@dataclass
class Port:
    """Results of a port and its plain script, by seed."""

    name: str
    plain: list[float] = field(default_factory=list)
    one_slot: list[float] = field(default_factory=list)
    rescaled: list[float] = field(default_factory=list)
    changes: int = 0  # of the group, over all seeds

    @property
    def apart(self) -> float:
        """Return the difference of the means of the port's and the plain script's runs."""
        centre = statistics.mean(self.plain)
        return max(abs(statistics.mean(runs) - centre) for runs in (self.one_slot, self.rescaled))

    @property
    def spread(self) -> float:
        """Return the range of the plain runs over the seeds."""
        return max(self.plain) - min(self.plain)


def main() -> int:
    """Print the table; 1 if some port is further from its plain script than seeds are apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="ports; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    names = chosen.names or list(METRICS)
    if unknown := [name for name in names if name not in METRICS]:
        parser.error(f"no port {unknown[0]}; there are {', '.join(METRICS)}")
    home = Path(tempfile.mkdtemp(prefix="ports-"))
    ones("local", "up", "--dir", str(home), "--slots", "4", "--policy", "fifo")
    try:
        with BlockingClient(home) as client:
            ports = [compared(client, name, range(chosen.seeds)) for name in names]
    finally:
        ones("local", "down", "--dir", str(home))
        shutil.rmtree(home)
    Console(width=100 if not sys.stdout.isatty() else None).print(table_of(ports))
    return int(any(port.apart > port.spread for port in ports))


def compared(client: BlockingClient, name: str, seeds: Sequence[int]) -> Port:
    """Train `name` in all ways."""
    port = Port(name)
    for seed in seeds:
        port.plain.append(plain(name, seed))
        port.one_slot.append(trained(client, name, seed)[0])
        metric, changes = trained(client, name, seed, CHANGES)
        port.rescaled.append(metric)
        port.changes += changes
        runs = f"{port.plain[-1]:.4f}, {port.one_slot[-1]:.4f}, {metric:.4f}"
        print(f"{name} seed {seed}: plain, one slot, re-scaled: {runs}", flush=True)
    return port


def plain(name: str, seed: int) -> float:
    """Return the numbers that the plain script prints at its end."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    shutil.copytree(HERE / name, folder, dirs_exist_ok=True)
    done = subprocess.run(  # noqa: S603
        [sys.executable, "plain.py", "--seed", str(seed)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    shutil.rmtree(folder)
    metric = METRICS[name].replace("_", " ")
    return float(re.findall(rf"{metric} ([\d.]+)", done.stdout)[-1])


def trained(
    client: BlockingClient, name: str, seed: int, changes: Sequence[int] = ()
) -> tuple[float, int]:
    """Return the port's final numbers on the cluster, and how often its group changed."""
    spec = load_job(HERE / name / "job.toml")
    job = client.submit(msgspec.structs.replace(spec, seed=seed))
    epochs = spec.stop.epochs if spec.stop is not None else None
    every = max(1, (epochs or 1) // (len(changes) + 2))
    for number, slots in enumerate(changes, start=1):
        until(client, job, epoch=every * number)
        if slots:
            client.resize(job, slots=slots)
            until(client, job, slots=slots, state="running")
        else:
            client.pause(job)
            until(client, job, state="paused")
            client.resume(job)
    ended = client.wait(job, timeout=LIMIT_S).summary
    if ended.state != "succeeded":
        sys.exit(f"{job} {ended.state}: {ended.reason}; look at `ones logs {job}`")
    return ended.metrics[METRICS[name]], ended.rescales


def until(
    client: BlockingClient, job: str, *, epoch: int = 0, slots: int | None = None, state: str = ""
) -> None:
    """Look until so many epochs are finished, and slots and state are as wanted."""
    while True:
        now = client.job(job).summary
        as_wanted = slots in {None, now.slots} and state in {"", now.state}
        if now.epoch >= epoch and as_wanted:
            return
        if now.state in ENDED:
            sys.exit(f"{job} {now.state} before all changes were made: give it more epochs")
        time.sleep(0.1)


def table_of(ports: Sequence[Port]) -> Table:
    """Means over the seeds, and from where to where they reach."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("port", "metric", "plain", "one slot", "re-scaled", "changes", "apart", "spread"):
        justify = "left" if name in {"port", "metric"} else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for port in ports:
        runs = (described(values) for values in (port.plain, port.one_slot, port.rescaled))
        apart, spread = f"{port.apart:.4f}", f"{port.spread:.4f}"
        table.add_row(port.name, METRICS[port.name], *runs, str(port.changes), apart, spread)
    return table


def described(values: Sequence[float]) -> str:
    """The mean, and the least and the largest below it."""
    return f"{statistics.mean(values):.4f}\n{min(values):.4f}-{max(values):.4f}"


def ones(*arguments: str) -> None:
    """Run the command line of this environment."""
    program = Path(sys.executable).with_name("ones")
    subprocess.run([program, *arguments], check=True, stdout=subprocess.DEVNULL)  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
