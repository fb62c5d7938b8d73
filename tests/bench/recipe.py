"""Completion times of `ones` on measured workloads.

Simulations in virtual time without a search (`generations` 0), so that decisions are the same for every seed.
`--shuffle SEED` assigns a workload's jobs to its submission times anew and moves each by up to a minute: for
choosing numbers, so that the workloads themselves remain to confirm them. `LEVEL_s` and `LEVEL_rescales` are
means over the workloads, `LEVEL_vs_pollux` the time over Pollux' published time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before the workers import numpy

import msgspec
from numpy.random import Generator, default_rng

from controlplane.sim.results import SimulationResult
from controlplane.sim.scenario import Scenario
from controlplane.sim.traces.trace_csv import read_trace, write_trace
from schemas.ids import Seconds
from tests.bench import report
from tests.bench.simulations import Bench, Way, average_s, workloads

NEAR_S: Final = 60.0  # that a shuffled submission is moved by, at most
POLLUX_S: Final = 2512.0  # mean of workloads 1, 2, 3 and 6, published setting (OSDI '21, artifact)
QUICK_JOBS: Final = 60
NATIVE: Final = {"round_s": 0.0, "stall_s": 1.0, "first_stall_s": 30.0, "prepare_s": 1.0}
LEVELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "L2": {},
    "L3": {"knowledge": "L3"},
    "L0": {"knowledge": "L0"},
    "native": NATIVE,
}


def shuffled(file: Path, rng: Generator, kept: Path) -> Path:
    trace = read_trace(file)
    times = [max(0.0, job.at + float(rng.uniform(-NEAR_S, NEAR_S))) for job in trace.jobs]
    jobs = [
        msgspec.structs.replace(trace.jobs[place], at=Seconds(round(at, 3)))
        for place, at in zip(rng.permutation(len(times)).tolist(), times, strict=True)
    ]
    jobs.sort(key=lambda job: job.at)
    to = kept / file.name
    write_trace(msgspec.structs.replace(trace, jobs=tuple(jobs)), to)
    return to


def shortened(file: Path, kept: Path) -> Path:
    trace, to = read_trace(file), kept / file.name
    write_trace(msgspec.structs.replace(trace, jobs=trace.jobs[:QUICK_JOBS]), to)
    return to


def ways(
    folder: Path, files: Iterable[Path], setting: Mapping[str, Any], options: Mapping[str, Any]
) -> list[Way]:
    published = {"round_s": 60.0, "stall_s": 30.0, "warm_up": 0.0, "generations": 0}
    return [
        Way(
            Scenario(
                physics="profiles", profiles=str(folder), workload=str(file),
                **{**published, **setting},
            ),
            options,
        )
        for file in files
    ]  # fmt: skip


class Recipe:
    def __init__(self, bench: Bench, folder: Path, files: Sequence[Path]) -> None:
        self._bench, self._folder, self._files = bench, folder, files
        self.figures: dict[str, float] = {}

    def results(
        self, setting: Mapping[str, Any], options: Mapping[str, Any]
    ) -> list[SimulationResult]:
        wanted = ways(self._folder, self._files, setting, options)
        self._bench.do(wanted)
        return [self._bench.result(way, self._bench.seeds[0]) for way in wanted]

    def levels(self, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self._bench.do(
            [
                way
                for name in names
                for way in ways(self._folder, self._files, LEVELS[name], options)
            ]
        )
        rows: list[list[object]] = []
        for name in names:
            found = self.results(LEVELS[name], options)
            times = [average_s(each, each.ended_at) for each in found]
            moves = statistics.mean(job.rescales for each in found for job in each.jobs)
            mean = statistics.mean(times)
            self.figures |= {f"{name}_s": mean, f"{name}_rescales": moves}
            if name != "native":
                self.figures[f"{name}_vs_pollux"] = mean / POLLUX_S
            rows.append([name, *(f"{time:.0f}" for time in times), f"{mean:.1f}", f"{moves:.2f}"])
        shown = ["level", *(file.stem for file in self._files), "mean, s", "re-scales a job"]
        report.table("average completion time, s", shown, rows)


def main() -> None:
    chosen = report.arguments(
        __doc__,
        f"{QUICK_JOBS} jobs of one workload",
        profiles=(Path, ..., "tables of the applications"),
        workloads=(lambda text: text.split(","), (), "numbers, as 1,3; default: all"),
        levels=(report.some_of(LEVELS), list(LEVELS), "as L2,native"),
        options=(
            lambda text: msgspec.json.decode(text, type=dict[str, Any]),
            {},
            "of the policy, as JSON",
        ),
        shuffle=(int, None, "seed: deal out jobs over times anew"),
        workers=(int, 2, "processes"),
    )
    with tempfile.TemporaryDirectory() as folder:
        files, kept = workloads(chosen.profiles, chosen.workloads), Path(folder)
        if chosen.shuffle is not None:
            seeds = [(chosen.shuffle, at) for at in range(len(files))]
            files = [
                shuffled(file, default_rng(seed), kept)
                for file, seed in zip(files, seeds, strict=True)
            ]
        if chosen.quick:
            files = [shortened(files[0], kept)]
        recipe = Recipe(Bench([0], chosen.workers), chosen.profiles, files)
        recipe.levels(chosen.levels, chosen.options)
    report.write(recipe.figures, chosen.json)


if __name__ == "__main__":
    main()
