"""Simulations that benchmarks compare; each is run once and kept."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from scipy.stats import t as student_t

from controlplane.sim import experiment
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.experiment import Cell, ExperimentProgress, cell_key
from controlplane.sim.results import JobResult, SimulationResult
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from tests.bench import report

TOLD: Final = 60  # characters of a cell


@dataclass(frozen=True, slots=True)
class Way:
    scenario: Scenario
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "ones"

    def but(self, **options: object) -> Way:
        return Way(self.scenario, {**self.options, **options}, self.policy)

    def knowing(self, **changes: object) -> Way:
        return Way(msgspec.structs.replace(self.scenario, **changes), self.options, self.policy)

    def cell(self, seed: int) -> Cell:
        return Cell(
            policy=self.policy, options=dict(self.options), scenario=self.scenario, seed=seed
        )


@dataclass(frozen=True, slots=True)
class Pair:
    key: str  # of the figure
    first: Way
    second: Way


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of average completion times; below 1 the first is faster."""

    mean: float  # geometric, over the seeds
    low: float  # the least of the seeds
    high: float
    sure_low: float  # with the next, the 95% interval of the mean, by Student's t of the logarithms
    sure_high: float
    first_s: float  # mean over the seeds, seconds
    second_s: float
    first_moves: float  # re-scales per job
    second_moves: float
    unfinished: int  # counted jobs of the first that never end, over all seeds
    jobs: int  # counted jobs, over all seeds


def settings(jobs: int, think_s: float) -> dict[str, Way]:
    plain = Scenario(jobs=jobs, think_s=think_s)
    eights = (NodeGroup(count=8, slots=8),)  # on which many sizes fit beside each other
    types = (
        NodeGroup(count=6, slots=4, model="v100"),
        NodeGroup(count=5, slots=4, model="p100"),
        NodeGroup(count=5, slots=4, model="k80"),
    )
    mixed = (
        NodeGroup(count=3, slots=8, model="v100"),
        NodeGroup(count=3, slots=8, model="p100"),
        NodeGroup(count=2, slots=8, model="k80"),
    )
    change = msgspec.structs.replace
    return {
        "": Way(plain),
        "_interference": Way(change(plain, interference="pairwise:0.25")),
        "_interference_50": Way(change(plain, interference="pairwise:0.5")),
        "_partial": Way(change(plain, nodes=eights, stall_s=0.1, first_stall_s=1.0)),
        "_types": Way(change(plain, nodes=types)),
        "_all": Way(change(plain, nodes=mixed, interference="pairwise:0.25")),
        "_busy": Way(change(plain, nodes=(NodeGroup(count=4, slots=4),))),  # jobs wait
    }


def simulate_cell(cell: Cell) -> SimulationResult:
    return simulate(cell.policy, cell.scenario, cell.seed, cell.options)


class Bench:
    def __init__(self, seeds: Sequence[int], workers: int, path: Path | None = None) -> None:
        self.seeds = seeds
        self._workers, self._path = workers, path
        self._began = time.perf_counter()
        self._known: dict[str, SimulationResult] = {}

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def do(self, ways: Iterable[Way], seeds: Sequence[int] | None = None) -> None:
        chosen = self.seeds if seeds is None else seeds
        cells = [way.cell(seed) for seed in chosen for way in ways]
        wanted = [cell for cell in cells if cell_key(cell) not in self._known]
        if wanted:
            found = experiment.run(wanted, simulate_cell, self._path, self._workers, self._tell)
            self._known |= {result.cell: result for result in found}

    def result(self, way: Way, seed: int) -> SimulationResult:
        return self._known[cell_key(way.cell(seed))]

    def ratio(self, pair: Pair, seeds: Sequence[int] | None = None) -> Ratio:
        chosen = self.seeds if seeds is None else seeds
        both = [(self.result(pair.first, s), self.result(pair.second, s)) for s in chosen]
        times = [_averages(first, second) for first, second in both]
        ratios = [first / second for first, second in times]
        jobs = [job for first, _ in both for job in _counted(first)]
        middle, spread = interval([math.log(ratio) for ratio in ratios])
        return Ratio(
            mean=math.exp(middle),
            low=min(ratios),
            high=max(ratios),
            sure_low=math.exp(middle - spread),
            sure_high=math.exp(middle + spread),
            first_s=_mean(first for first, _ in times),
            second_s=_mean(second for _, second in times),
            first_moves=_mean(job.rescales for job in jobs),
            second_moves=_mean(job.rescales for _, second in both for job in _counted(second)),
            unfinished=sum(job.ended_at is None for job in jobs),
            jobs=len(jobs),
        )

    def _tell(self, progress: ExperimentProgress) -> None:
        report.simulated(progress)
        if progress.cell is None or progress.result is None:
            return
        found, scenario = progress.result, progress.cell.scenario
        average = average_s(found, found.ended_at)
        where = f"{scenario.interference} {len(scenario.nodes)}x{scenario.nodes[0].slots}"
        print(  # noqa: T201 - a benchmark prints
            f"{self.elapsed_s:6.0f} s  {progress.done}/{progress.total}  {average:7.1f} s  {where}  "
            f"{scenario.knowledge}  {scenario.generations}  {str(progress.cell)[:TOLD]}  ({found.wall_s:.0f} s)",
            flush=True,
        )


def average_s(result: SimulationResult, horizon: float) -> float:
    """Average completion time of the counted jobs, seconds.

    A job that never ends counts as if it ended at `horizon`: the average is a lower bound then.
    """
    return _mean(
        (horizon if job.ended_at is None else job.ended_at) - job.submitted_at
        for job in _counted(result)
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and how far its 95% interval goes either way; infinite for a single value."""
    if len(values) == 1:
        return values[0], math.inf
    sure = float(student_t.ppf(0.975, len(values) - 1))
    return statistics.mean(values), sure * statistics.stdev(values) / math.sqrt(len(values))


def _averages(first: SimulationResult, second: SimulationResult) -> tuple[float, float]:
    horizon = max(first.ended_at, second.ended_at)
    return average_s(first, horizon), average_s(second, horizon)


def _counted(result: SimulationResult) -> list[JobResult]:
    return [job for job in result.jobs if job.counted]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
