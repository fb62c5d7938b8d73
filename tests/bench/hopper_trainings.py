"""Sixteen configurations of a real training in five ways, on four nodes with a slot each.

Hopping, hopping in a fixed order, in the paper's random order, task-parallel (each worker trains whole
configurations and every node has all data: a sweep with one partition that all hold), and elastic data-parallel
jobs on all slots, one after the other. Costs beside time: data on the nodes' disks, states that hopped, gradients
that were reduced (a ring sends 2 (n - 1) times the model a step; Cerebro, section 4.3). Three configurations are
trained once more, alone, and compared bit by bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from controlplane.client import BlockingClient
from controlplane.sweeps.search import first_trials
from controlplane.sweeps.trials import Add
from schemas.ids import JobId
from schemas.jobs import ENDED, SWEEP_SCRIPT, JobSpec
from schemas.sweeps import Parameter, RandomSearch, SearchSpec, SweepSpec, Value, choice
from tests.bench import report
from tests.bench.live_jobs import EXAMPLES
from tests.support.cluster import Cluster, trained_alone

NODES: Final = 4
ALONE: Final = 3  # configurations that are trained once more, alone, and compared
LIMIT_S: Final = 1800.0  # of one way
LOOK_S: Final = 0.2
WAYS: Final = ("hopping", "fixed order", "random order", "task-parallel", "elastic jobs")
Up = tuple[Cluster, BlockingClient]
FUNCTIONS: Final = {
    "input_fn": "sweep:load",
    "model_fn": "sweep:build",
    "train_fn": "sweep:train",
    "eval_fn": "sweep:evaluate",
}
DATA_PARALLEL: Final = """
import json
import os

import sweep
import torch
from torch.utils.data import ConcatDataset

from elastic import ScalingAgent
from elastic.sweep_worker import Trained

values, partitions = json.loads(os.environ["VALUES"]), int(os.environ["PARTITIONS"])
data = ConcatDataset([sweep.load(one, partitions) for one in range(partitions)])
held_out = sweep.load(None, partitions)
built = []


class Whole:
    device = torch.device("cpu")

    def loader(self, data, batch):
        return loader


def build_model():
    built[:] = sweep.build(values)
    return built[0]


torch.manual_seed(0)
agent = ScalingAgent.from_env()
model, optimizer, loader = agent.load(
    build_model, lambda _: built[1], data, batch_size=sweep.BATCH, lr=values["lr"]
)
trained = Trained(model=model, optimizer=optimizer)
for epoch in agent.epochs(int(os.environ["EPOCHS"])):
    model.train()
    sweep.train(trained, data, Whole())
    model.eval()
    with torch.no_grad():
        scores = sweep.evaluate(trained, held_out, Whole())
    agent.report(parameters=sum(one.numel() for one in model.parameters()), **scores)
"""


@dataclass(frozen=True)
class Training:
    name: str  # of the example
    metric: str
    mode: str
    space: dict[str, Parameter]
    batch: int
    epochs: int
    configurations: int

    def best(self, metrics: Iterable[float]) -> float:
        return max(metrics) if self.mode == "max" else min(metrics)


@dataclass(frozen=True)
class Way:
    makespan_s: float  # submission to the last unit
    curves: list[list[float]]  # the metric of each configuration, epoch by epoch
    data_bytes: int  # partitions on all nodes' disks
    network_bytes: float  # between workers
    waited_s: float = 0.0  # all units, for states
    trained_s: float = 0.0  # all units
    units: int = 0
    bit_equal: bool = True


def trainings(*, quick: bool) -> list[Training]:
    epochs, many = (1, 2) if quick else (2, 16)
    rates = Parameter(log_uniform=(1e-3, 1e-1))
    digits, language = {"lr": rates, "width": choice(48, 96)}, {"lr": rates, "depth": choice(1, 2)}
    return [
        Training("digits", "accuracy", "max", digits, 48, epochs, many),
        Training("language", "loss", "min", language, 32, epochs, many),
    ][: 1 if quick else None]


def ways(one: Training, base: Path, chosen: Sequence[str], *, quick: bool) -> dict[str, Way]:
    """Train in each way; on a cluster of its own, or, if `quick`, all on one."""
    orders = {
        "hopping": (NODES, 1, "greedy"), "fixed order": (NODES, 1, "fixed"),
        "random order": (NODES, 1, "random"), "task-parallel": (1, NODES, "greedy"),
    }  # fmt: skip
    found: dict[str, Way] = {}
    with cluster_of_nodes(base / "all") if quick else contextlib.nullcontext() as shared:
        for name in report.counted(f"way of training {one.name}", chosen, len(chosen)):
            folder = base / name.replace(" ", "-")
            compared = min(ALONE, one.configurations // 2) if name == "hopping" else 0
            found[name] = (
                as_sweep(one, folder, *orders[name], shared=shared, compared=compared)
                if name in orders
                else one_by_one(one, folder, shared)
            )
    return found


def as_sweep(
    one: Training,
    base: Path,
    partitions: int,
    replicas: int,
    order: str,
    *,
    shared: Up | None,
    compared: int = 0,
) -> Way:
    workdir = workdir_of(one, base)
    spec = spec_of(one, partitions, replicas, order, workdir)
    with contextlib.nullcontext(shared) if shared else cluster_of_nodes(base) as (made, client):
        job = client.submit(spec)
        staged = wait_for(client, [job], made)
        detail, ledger = client.sweep(job), client.ledger(job)
        assert detail.summary.state == "succeeded", detail.summary
        if compared:
            report.now(f"{one.name}: {compared} configurations are trained alone and compared")
        bit_equal = equal_alone(made, job, compared, workdir)
    return Way(
        makespan_s=max(unit.ended for unit in ledger.units) - detail.summary.submitted_at,
        curves=[[epoch[one.metric] for epoch in info.metrics] for info in detail.trials],
        data_bytes=staged,
        network_bytes=float(detail.moved_bytes),
        waited_s=detail.waited_s,
        trained_s=detail.trained_s,
        units=len(ledger.units),
        bit_equal=bit_equal,
    )


def spec_of(one: Training, partitions: int, replicas: int, order: str, workdir: Path) -> JobSpec:
    search = SearchSpec(
        space=one.space, searcher=RandomSearch(one.configurations), epochs=one.epochs,
        metric=one.metric, mode="max" if one.mode == "max" else "min", seed=7,
    )  # fmt: skip
    sweep = SweepSpec(
        search=search, partitions=partitions, replicas=replicas, order=order, **FUNCTIONS
    )
    return JobSpec(
        name=one.name, script=SWEEP_SCRIPT, batch_size=NODES, max_batch_size="keep",
        slots=(NODES, NODES), workdir=str(workdir), env={"OMP_NUM_THREADS": "1"}, sweep=sweep,
    )  # fmt: skip


def equal_alone(made: Cluster, job: JobId, trials: int, workdir: Path) -> bool:
    """True if training alone, in the order of the visits, ends each unit in the same bytes."""
    (made.base / job).symlink_to(workdir)
    return all(trained_alone(made, job, trial)["equal"] for trial in range(trials))


def one_by_one(one: Training, base: Path, shared: Up | None) -> Way:
    workdir = workdir_of(one, base)
    (workdir / "train.py").write_text(DATA_PARALLEL, encoding="utf-8")
    search = spec_of(one, NODES, 1, "greedy", workdir).stated_sweep
    assert search is not None
    env = {"OMP_NUM_THREADS": "1", "PARTITIONS": str(NODES), "EPOCHS": str(one.epochs)}
    with contextlib.nullcontext(shared) if shared else cluster_of_nodes(base) as (made, client):
        names = [
            client.submit(
                JobSpec(
                    name=f"{one.name}-{number}",
                    script="train.py",
                    batch_size=one.batch,
                    max_batch_size="keep",
                    slots=(NODES, NODES),
                    workdir=str(workdir),
                    env={**env, "VALUES": json.dumps(values)},
                )
            )
            for number, values in enumerate(first_configurations(search.search))
        ]  # fmt: skip
        wait_for(client, names, made)
        jobs = [client.job(name) for name in names]
    assert {job.summary.state for job in jobs} == {"succeeded"}, [j.summary.reason for j in jobs]
    sent = [
        job.epochs[-1].step * 2 * (NODES - 1) * 4 * job.epochs[-1].metrics["parameters"]
        for job in jobs
    ]
    return Way(
        makespan_s=max(j.history[-1].time for j in jobs) - jobs[0].summary.submitted_at,
        curves=[
            [float(epoch.metrics.get(one.metric, epoch.train_loss or 0.0)) for epoch in job.epochs]
            for job in jobs
        ],
        data_bytes=0,
        network_bytes=float(sum(sent)),
    )


def first_configurations(search: SearchSpec) -> list[dict[str, Value]]:
    return [dict(add.values) for add in first_trials(search) if isinstance(add, Add)]


def wait_for(client: BlockingClient, jobs: list[JobId], made: Cluster) -> int:
    """Until all have ended; fails when that takes too long.

    Returns:
        Most bytes of partitions that lay on the nodes' disks meanwhile.
    """
    began, most = time.monotonic(), 0
    while any(client.job(job).summary.state not in ENDED for job in jobs):
        assert time.monotonic() - began < LIMIT_S, made.said()
        most = max(most, data_on_disk(made.home))
        time.sleep(LOOK_S)
    return most


def data_on_disk(home: Path) -> int:
    found = 0
    for path in home.glob("state/work/*/.states/*/data/*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            found += path.stat().st_size
    return found


@contextlib.contextmanager
def cluster_of_nodes(base: Path) -> Iterator[Up]:
    made = Cluster(base / "home", base, slots=1, agents=NODES)
    with report.running(made), BlockingClient(made.home, timeout=60.0) as client:
        yield made, client
    shutil.rmtree(made.home, ignore_errors=True)


def workdir_of(one: Training, base: Path) -> Path:
    folder = base / "workdir"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("dataset.py", "model.py", "sweep.py"):
        shutil.copy(EXAMPLES / one.name / name, folder / name)
    return folder


CURVE_EPOCHS: Final = 8


@dataclass(frozen=True)
class Curves:
    metric: str
    by_way: Mapping[str, Sequence[Sequence[float]]]  # of each configuration, epoch by epoch


def training_figures(
    found: dict[str, dict[str, Way]], *, quick: bool, chosen: Sequence[str]
) -> dict[str, float]:
    with report.folder() as folder:
        for one in trainings(quick=quick):
            found[one.name] = ways(one, folder / one.name, chosen, quick=quick)
            told(one, found[one.name])
    return figures_of(found)


def learning_curves(
    learnt: dict[str, Curves], trained: Mapping[str, Mapping[str, Way]], *, quick: bool
) -> dict[str, float]:
    """Train some configurations by hopping over four partitions, and each alone on all data.

    Returns:
        How far the best metrics of both ways are apart, for each training.
    """
    figures = {}
    for training in trainings(quick=quick):
        one = training if quick else replace(training, epochs=CURVE_EPOCHS, configurations=NODES)
        report.now(f"{one.name}: learning curves, hopping and alone")
        known = trained.get(one.name, {}) if quick else {}
        if not {"hopping", "task-parallel"} <= known.keys():
            with report.folder() as base:
                known = ways(one, base, ["hopping", "task-parallel"], quick=True)
        by_way = {"hopping": known["hopping"].curves}
        by_way["alone, on all data"] = known["task-parallel"].curves
        learnt[one.name] = Curves(one.metric, by_way)
        best = [one.best(value for c in each for value in c) for each in by_way.values()]
        figures[f"{one.name}_{one.metric}_hopping_less_alone"] = best[0] - best[1]
        report.table(
            f"{one.name}: best {one.metric} of {one.configurations} configurations, {one.epochs} epochs",
            list(by_way),
            [best],
        )
    return figures


def told(one: Training, mine: dict[str, Way]) -> None:
    whole = mine["hopping"]
    rows: list[list[object]] = [
        [
            name, way.makespan_s, way.makespan_s / whole.makespan_s,
            one.best(curve[-1] for curve in way.curves), way.data_bytes / 1e6,
            way.network_bytes / 1e6, way.waited_s / max(1, way.units) * 1000.0,
        ]
        for name, way in mine.items()
    ]  # fmt: skip
    heads = ["way", "makespan, s", "over hopping", f"best {one.metric}", "data on disks, MB",
             "over the network, MB", "wait for a state, ms"]  # fmt: skip
    what = (
        f"{one.name}: {one.configurations} configurations, {one.epochs} epochs, {NODES} nodes; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    report.table(what, heads, rows)


def figures_of(found: dict[str, dict[str, Way]]) -> dict[str, float]:
    hops = [mine["hopping"] for mine in found.values()]
    figures = {
        "hop_share": sum(h.waited_s for h in hops) / sum(h.waited_s + h.trained_s for h in hops),
        "hop_ms": 1000.0 * sum(h.waited_s for h in hops) / sum(h.units for h in hops),
        "bit_equal": float(all(h.bit_equal for h in hops)),
    }
    elastic = [mine["elastic jobs"] for mine in found.values() if "elastic jobs" in mine]
    if elastic:
        sent = sum(way.network_bytes for way in elastic)
        figures["bytes_vs_ddp"] = sum(h.network_bytes for h in hops) / sent
    for name, mine in found.items():
        whole = mine["hopping"].makespan_s
        for way, measured in mine.items():
            if way != "hopping":
                key = way.replace(" ", "_").replace("-", "_")
                figures[f"{name}_makespan_vs_{key}"] = whole / measured.makespan_s
    return figures
