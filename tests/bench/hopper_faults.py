"""Cost of kill -9 for a sweep: of a worker, an agent, the controller, and a whole node.

Two nodes with two slots each train digits. `finished_lost` counts units that were in the ledger before a kill
and are missing afterwards, and units that are in it twice. `redispatch_s` is the longest time until the next
unit starts instead: since the kill of a worker, the start of the next agent or controller (systemd starts them
at once), or the time at which a node counts as lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from msgspec.structs import replace

from controlplane.client import BlockingClient
from schemas.ids import JobId
from schemas.wire.client import LedgerUnit, SweepDetail
from tests.bench import report
from tests.bench.hopper_trainings import (
    LIMIT_S,
    Training,
    equal_alone,
    spec_of,
    trainings,
    wait_for,
    workdir_of,
)
from tests.support.cluster import Cluster, kill

LOOK_S: Final = 0.02
SILENCE: Final = "\n[silence]\nsuspect_s = 1.0\nlost_s = 3.0\n"
Running = tuple[int, int, int, int | None]  # trial, epochs, partitions left, partition


@dataclass
class Faults:
    made: Cluster
    job: JobId
    redispatch: dict[str, list[float]] = field(default_factory=dict)
    lost: int = 0
    before: list[LedgerUnit] = field(default_factory=list)

    def client(self) -> BlockingClient:
        """Return a new client, which need not notice that a controller was killed."""
        return BlockingClient(self.made.home, timeout=60.0)

    def look(self) -> SweepDetail:
        with self.client() as client:
            return client.sweep(self.job)

    def trained(self, more: int) -> None:
        begun = self.look().units_done
        self.until(lambda shown: shown.units_done >= begun + more)
        self.held()

    def held(self) -> None:
        with self.client() as client:
            now = list(client.ledger(self.job).units)
        known = [(unit.trial, unit.version, unit.digest) for unit in now]
        self.lost += sum(
            (unit.trial, unit.version, unit.digest) not in known for unit in self.before
        )
        self.lost += len(known) - len(set(known))
        self.before = now

    def dispatched(self, kind: str, since: float, node: str, was: set[Running]) -> None:
        """Wait until a new unit runs on a node; empty: on any."""
        self.until(lambda shown: bool(running(shown, node) - was))
        self.redispatch.setdefault(kind, []).append(time.time() - since)

    def until(self, holds: Callable[[SweepDetail], bool]) -> None:
        with self.client() as client:
            report.until(lambda: holds(client.sweep(self.job)), LIMIT_S, LOOK_S, self.made.said)


def running(shown: SweepDetail, node: str = "") -> set[Running]:
    return {
        (one.number, one.epochs, one.partitions_left, one.partition)
        for one in shown.trials
        if one.slot is not None and one.slot.startswith(node)
    }


def fault_figures(*, quick: bool) -> dict[str, float]:
    repeats = 1 if quick else 3
    one = dataclasses.replace(
        trainings(quick=quick)[0], configurations=6 if quick else 12, epochs=3
    )
    with report.folder() as base:
        made = Cluster(base / "home", base, slots=2, agents=2)
        with report.running(made, SILENCE):
            faults, equal = _with_faults(made, one, repeats, base)
    shown = faults.redispatch
    rows: list[list[object]] = [
        [kind, len(times), median(times), max(times)] for kind, times in shown.items()
    ]
    report.table(
        f"a unit begins again after kill -9; {faults.lost} finished units lost, "
        f"configurations equal to those trained alone: {'yes' if equal else 'NO'}",
        ["of", "times", "s", "s, worst"],
        rows,
    )
    figures = {f"redispatch_{kind}_s": median(times) for kind, times in shown.items()}
    return figures | {
        "finished_lost": float(faults.lost),
        "redispatch_s": max(max(times) for times in shown.values()),
        "bit_equal_with_kills": float(equal),
    }


def _with_faults(made: Cluster, one: Training, repeats: int, base: Path) -> tuple[Faults, bool]:
    workdir = workdir_of(one, base)
    spec = replace(spec_of(one, 4, 2, "greedy", workdir), slots=(1, 4), slots_wanted=4)
    with BlockingClient(made.home, timeout=60.0) as client:
        faults = Faults(made, client.submit(spec))
    faults.trained(4)
    for _ in report.counted(
        "kill -9 of a worker, an agent and the controller, round", range(repeats), repeats
    ):
        for fault in (_worker, _agent, _controller):
            fault(faults)
            faults.trained(3)
    report.now("kill -9 of a node")
    _node(faults)
    with faults.client() as client:
        wait_for(client, [faults.job], made)
    faults.held()
    return faults, equal_alone(made, faults.job, min(3, one.configurations // 4), workdir)


def _worker(faults: Faults) -> None:
    shown = faults.look()
    with faults.client() as client:
        slots = {worker.slot: worker.pid for worker in client.job(faults.job).workers}
    victim = next(one for one in shown.trials if one.slot is not None and slots.get(one.slot))
    pid = slots[victim.slot or ""]
    unit = next(iter(running(replace(shown, trials=(victim,)))))
    assert pid is not None
    kill(pid)
    since = time.time()
    faults.until(lambda now: unit not in running(now))
    faults.dispatched("worker", since, "", running(faults.look()) - {unit})


def _agent(faults: Faults) -> None:
    kill(faults.made.up()["agents"][0])
    was = running(faults.look())
    pids = faults.made.up()
    faults.dispatched("agent", started(pids["agents"][0]), "node-1", was)


def _controller(faults: Faults) -> None:
    was = running(faults.look())
    kill(faults.made.up()["controller"])
    pids = faults.made.up()
    faults.dispatched("controller", started(pids["controller"]), "", was)


def _node(faults: Faults) -> None:
    with faults.client() as client:
        workers = [one for one in client.job(faults.job).workers if one.node == "node-2"]
    lost = {trial for trial, *_ in running(faults.look(), "node-2")}
    kill(faults.made.up()["agents"][1])
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid or 0, signal.SIGKILL)
    since = _lost_at(faults)
    faults.until(
        lambda now: not lost or bool(lost & {trial for trial, *_ in running(now, "node-1")})
    )
    faults.redispatch.setdefault("node", []).append(max(0.0, time.time() - since))


def _lost_at(faults: Faults) -> float:
    while True:
        with faults.client() as client:
            for event in client.events():
                if event.event == "node.lost" and event.node == "node-2":
                    return float(event.time)
        time.sleep(LOOK_S)


def started(pid: int) -> float:
    """Return when a process started, seconds since the epoch."""
    return Path(f"/proc/{pid}").stat().st_ctime
