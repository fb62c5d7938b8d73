"""Predictions of remaining work: their calibration, and completion times with them.

Every model of option `length_model` in the same simulations, paired: measured workloads in a shuffled order
(with `--profiles DIR`), and Table 2, as they are and where scripts leave early, users give jobs up, scripts fail
and losses are erratic. A prediction is kept whenever a job has done a quarter more than at the last one, and
compared with the actual length: median relative error, and coverage of the 80% and 90% intervals.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Final

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before the workers import numpy

import msgspec
from numpy.random import default_rng

from controlplane.policy.api import SearchStats
from controlplane.policy.registry import make
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import Trace
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario, model_of, options_of, trace_of
from schemas.ids import Seconds
from tests.bench import report
from tests.bench.simulations import workloads

MODELS: Final = ("residual", "beta", "mixture")
PREDICTED: Final = ("length_error", "length_coverage_80", "length_coverage_90")
STREAM: Final = 19  # of a seed, by which a workload is shuffled
HARD: Final = {"early_share": 0.4}


@dataclass(frozen=True)
class Case:
    setting: str
    scenario: Scenario
    seed: int
    model: str
    shuffled: bool = False
    cancels: float = 0.0  # share of a measured workload's jobs that are given up


@dataclass(frozen=True)
class Found:
    average_s: float
    stats: SearchStats


def main() -> None:
    chosen = report.arguments(
        __doc__,
        "one seed, one size, one workload",
        seeds=(report.seeds, "50-52", "of workloads, as in 50-52"),
        jobs=(int, 60, "of Table 2 in each simulation"),
        models=(report.some_of(MODELS), list(MODELS), "the first is the baseline"),
        only=(str, "", "settings with this in their names"),
        workers=(int, 2, "simulations at a time"),
        profiles=(Path, None, "folder of measured tables, workloads beside"),
    )
    seeds, models = chosen.seeds[: 1 if chosen.quick else None], chosen.models
    cases = [
        replace(case, model=model)
        for case in _cases(chosen.profiles, seeds, chosen.jobs, quick=chosen.quick)
        if not chosen.only or chosen.only in case.setting
        for model in models
    ]
    with ProcessPoolExecutor(chosen.workers, get_context("spawn")) as pool:
        coming = report.counted("simulation", pool.map(_simulated, cases), len(cases))
        found = dict(zip(cases, coming, strict=True))
    rows: list[list[object]] = []
    figures: dict[str, float] = {}
    for setting in dict.fromkeys(case.setting for case in cases):
        for model in models:
            here = {case: one for case, one in found.items()
                    if (case.setting, case.model) == (setting, model)}  # fmt: skip
            ratio = statistics.geometric_mean(
                one.average_s / found[replace(case, model=models[0])].average_s
                for case, one in here.items()
            )
            key = f"{setting.replace(' ', '_')}_{model}"
            figures[f"{key}_vs_{models[0]}"] = ratio
            row = [setting, model, statistics.fmean(o.average_s for o in here.values()), ratio]
            stats = [one.stats for one in here.values() if one.stats.length_predictions]
            for name in PREDICTED if stats else ():
                mean = statistics.fmean(float(getattr(s, name)) for s in stats)
                figures[f"{key}_{name}"] = mean
                row.append(mean)
            rows.append([*row, *[""] * (len(PREDICTED) + 4 - len(row))])
    heads = [
        "setting", "model", "average, s", f"over {models[0]}", "median error", "in 80%", "in 90%",
    ]  # fmt: skip
    report.table(f"lengths, {len(seeds)} seeds", heads, rows)
    report.write(figures, chosen.json)


def _cases(
    profiles: Path | None, seeds: Sequence[int], jobs: int, *, quick: bool
) -> Iterator[Case]:
    table2 = Scenario(jobs=jobs, generations=0, think_s=10.0)
    for seed in seeds:
        for gpus in (64,) if quick else (64, 16):
            sized = msgspec.structs.replace(table2, nodes=(NodeGroup(count=gpus // 4, slots=4),))
            for name, changes in (
                ("", {}),
                (" early", HARD),
                (" hard", HARD | {"erratic": True, "cancel_share": 0.2, "crash_share": 0.1}),
            ):
                here = msgspec.structs.replace(sized, **changes)
                yield Case(f"table2 {gpus}{name}", here, seed, "")
        if profiles is None:
            continue
        for file in workloads(profiles)[: 1 if quick else None]:
            measured = Scenario(
                physics="profiles", profiles=str(profiles), workload=str(file), warm_up=0.0,
                round_s=60.0, stall_s=30.0, generations=0,
            )  # fmt: skip
            for name, changes, cancels in (
                ("", {}, 0.0), (" early", HARD, 0.0), (" hard", HARD, 0.2),
            ):  # fmt: skip
                here = msgspec.structs.replace(measured, **changes)
                yield Case(f"measured{name}", here, seed, "", shuffled=True, cancels=cancels)


def _simulated(case: Case) -> Found:
    scenario = case.scenario
    options = options_of("ones", scenario, model_of(scenario), {"length_model": case.model})
    policy = make("ones", options)
    trace = trace_of(scenario, case.seed)
    if case.shuffled:
        trace = shuffled(trace, case.seed, case.cancels)
    result = simulate(policy, scenario, case.seed, trace=trace)
    lasted = [job.jct_s for job in result.jobs if job.counted and job.jct_s is not None]
    return Found(statistics.fmean(lasted), policy.stats())


def shuffled(trace: Trace, seed: int, cancels: float = 0.0) -> Trace:
    rng = default_rng((seed, STREAM))
    order = rng.permutation(len(trace.jobs)).tolist()
    jobs = []
    for place, at in zip(order, [job.at for job in trace.jobs], strict=True):
        job = msgspec.structs.replace(trace.jobs[place], at=at)
        if rng.random() < cancels:
            patience_s = Seconds(float(rng.uniform(300.0, 5400.0)))
            job = msgspec.structs.replace(job, cancelled_after_s=patience_s)
        jobs.append(job)
    return Trace(name=f"{trace.name} shuffled by {seed}", jobs=tuple(jobs))


if __name__ == "__main__":
    main()
