"""Cells of controllers: what it costs to divide one cluster among several.

The same jobs and slots under one controller, and divided among cells of equal size. Every job goes to
one cell when it is submitted and stays there: to the cells in turn, or to the cell with the least work,
by estimates of each job's work that are wrong by a factor of about `ERROR`. The figures are
ratios of the average completion time to that under one controller.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import fmean
from typing import Final

import msgspec
from numpy.random import default_rng

from controlplane.sim.analysis.bounds import times_alone
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import Trace
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario, model_of, trace_of
from tests.bench import report
from tests.bench.simulations import Ratio

IN_TURN, LEAST_WORK = "in turn", "least work"
CELLS: Final = (2, 4, 8)
SLOTS_PER_NODE: Final = 4
ERROR: Final = 2.0
POLICY: Final = "optimus"  # elastic, and fast enough to simulate large clusters


@dataclass(frozen=True)
class Run:
    """One cluster: as many cells as `parts`, with jobs dealt by `rule`."""

    scenario: Scenario
    seed: int
    parts: int = 1
    rule: str = IN_TURN


def deal(trace: Trace, run: Run, work_s: Mapping[str, float]) -> list[Trace]:
    """Divide a trace among the cells.

    Args:
        trace: jobs of the whole cluster.
        run: number of cells, and the rule.
        work_s: estimated work of each job, slot seconds.
    """
    dealt: list[list[int]] = [[] for _ in range(run.parts)]
    left_s = [0.0] * run.parts  # estimated work in each cell
    slots, before = run.scenario.slots / run.parts, 0.0
    for number, job in enumerate(trace.jobs):
        left_s = [max(0.0, left - slots * (job.at - before)) for left in left_s]
        before = job.at
        cell = number % run.parts
        if run.rule == LEAST_WORK:
            cell = min(range(run.parts), key=left_s.__getitem__)
        left_s[cell] += work_s.get(job.name, 0.0)
        dealt[cell].append(number)
    return [
        Trace(name=f"{trace.name}-{number}", jobs=tuple(trace.jobs[at] for at in chosen))
        for number, chosen in enumerate(dealt)
    ]


def completion_s(run: Run) -> list[float]:
    """Return the completion times of all jobs but the warm-up, in seconds."""
    scenario = run.scenario
    model, trace = model_of(scenario), trace_of(scenario, run.seed)
    alone = times_alone(
        trace.jobs, model, widest=scenario.widest, speed=1.0,
        first_stall_s=scenario.first_stall_s, seed=run.seed,
    )  # fmt: skip
    rng = default_rng(run.seed)
    work_s = {
        name: slots * took_s * ERROR ** float(rng.normal())
        for name, (slots, took_s) in alone.items()
    }
    counted = {job.name for job in trace.jobs[int(scenario.warm_up * len(trace.jobs)) :]}
    nodes = tuple(
        msgspec.structs.replace(group, count=group.count // run.parts) for group in scenario.nodes
    )
    cell = msgspec.structs.replace(scenario, nodes=nodes, warm_up=0.0)
    return [
        job.ended_at - job.submitted_at
        for part in deal(trace, run, work_s)
        if part.jobs
        for job in simulate(POLICY, cell, run.seed, trace=part, model=model).jobs
        if job.job in counted and job.ended_at is not None
    ]


def runs(scenario: Scenario, seeds: Sequence[int], cells: Sequence[int]) -> Iterator[Run]:
    for seed in seeds:
        yield Run(scenario, seed)
        for parts, rule in itertools.product(cells, (IN_TURN, LEAST_WORK)):
            yield Run(scenario, seed, parts, rule)


def main() -> None:
    chosen = report.arguments(
        __doc__, "16 nodes, 60 jobs, one seed", seeds=(report.seeds, range(1, 4), "as in 1-3")
    )
    nodes, jobs = (16, 60) if chosen.quick else (32, 200)
    cells = CELLS[:2] if chosen.quick else CELLS
    seeds = chosen.seeds[:1] if chosen.quick else chosen.seeds
    scenario = Scenario(
        jobs=jobs, interval_s=480.0 / nodes, nodes=(NodeGroup(count=nodes, slots=SLOTS_PER_NODE),)
    )
    every = list(runs(scenario, seeds, cells))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        times = pool.map(completion_s, every)
        averages = {
            run: fmean(found)
            for run, found in zip(
                every, report.counted("simulation", times, len(every)), strict=True
            )
        }
    figures = {"one_s": fmean(averages[Run(scenario, seed)] for seed in seeds)}
    for parts, rule in itertools.product(cells, (IN_TURN, LEAST_WORK)):
        divided = [averages[Run(scenario, seed, parts, rule)] for seed in seeds]
        ratio = Ratio.of(divided, [averages[Run(scenario, seed)] for seed in seeds])
        figures |= ratio.keys(f"{parts}_cells_{rule.replace(' ', '_')}")
    title = f"{jobs} jobs on {nodes} nodes of {SLOTS_PER_NODE} slots, policy {POLICY}"
    report.finish(figures, chosen.json, title)


if __name__ == "__main__":
    main()
