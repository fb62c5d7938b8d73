"""Simulations that benchmarks compare; each is run once and kept."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec
from scipy.stats import t as student_t

from controlplane.sim import experiment
from controlplane.sim.experiment import Cell, cell_key
from controlplane.sim.results import JobResult, SimulationResult
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from tests.bench import report


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

    @classmethod
    def of(cls, first: Iterable[float], second: Iterable[float]) -> Ratio:
        """Return the ratio of paired figures above 0."""
        ratios = [one / other for one, other in zip(first, second, strict=True)]
        middle, off = interval([math.log(ratio) for ratio in ratios])
        sure = math.exp(middle - off), math.exp(middle + off)
        return cls(math.exp(middle), min(ratios), max(ratios), *sure)

    def keys(self, key: str) -> dict[str, float]:
        """Return the figures of the mean and of the extremes of the seeds."""
        return {key: self.mean, f"{key}_low": self.low, f"{key}_high": self.high}


@dataclass(frozen=True, slots=True)
class Compared:
    ratio: Ratio
    first_s: float  # mean over the seeds, seconds
    second_s: float
    first_moves: float  # re-scales per job
    second_moves: float
    unfinished: int  # counted jobs of the first that never end, over all seeds
    jobs: int  # counted jobs, over all seeds


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
            found = experiment.run(
                wanted, simulate_cell, self._path, self._workers, report.simulated
            )
            self._known |= {result.cell: result for result in found}

    def result(self, way: Way, seed: int) -> SimulationResult:
        return self._known[cell_key(way.cell(seed))]

    def compared(self, pair: Pair, seeds: Sequence[int] | None = None) -> Compared:
        chosen = self.seeds if seeds is None else seeds
        both = [(self.result(pair.first, s), self.result(pair.second, s)) for s in chosen]
        ends = [max(first.ended_at, second.ended_at) for first, second in both]
        first_s, second_s = (
            [average_s(results[at], end) for results, end in zip(both, ends, strict=True)]
            for at in (0, 1)
        )
        jobs, others = ([job for results in both for job in _counted(results[at])] for at in (0, 1))
        return Compared(
            ratio=Ratio.of(first_s, second_s),
            first_s=fmean(first_s),
            second_s=fmean(second_s),
            first_moves=fmean(job.rescales for job in jobs),
            second_moves=fmean(job.rescales for job in others),
            unfinished=sum(job.ended_at is None for job in jobs),
            jobs=len(jobs),
        )


def average_s(result: SimulationResult, horizon: float) -> float:
    """Average completion time of the counted jobs, seconds.

    A job that never ends counts as if it ended at `horizon`: the average is a lower bound then.
    """
    return fmean(
        (horizon if job.ended_at is None else job.ended_at) - job.submitted_at
        for job in _counted(result)
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and how far its 95% interval goes either way; infinite for a single value."""
    if len(values) == 1:
        return values[0], math.inf
    sure = float(student_t.ppf(0.975, len(values) - 1))
    return fmean(values), sure * stdev(values) / math.sqrt(len(values))


def _counted(result: SimulationResult) -> list[JobResult]:
    return [job for job in result.jobs if job.counted]


def workloads(folder: Path, names: Collection[str] = ()) -> list[Path]:
    """Return the measured workloads `workloads/*-NAME.csv` in the tables' folder or beside it.

    Raises:
        SystemExit: if there are none.
    """
    places = (folder / "workloads", folder.resolve().parent / "workloads")
    files = sorted(file for place in places for file in place.glob("*.csv"))
    files = [file for file in files if not names or file.stem.rpartition("-")[2] in names]
    if not files:
        sys.exit(f"no such workloads/*.csv in {folder} or beside it")
    return files
