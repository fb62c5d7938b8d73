"""Value of admission: `oasis`, FIFO and DRF on the same jobs, at three loads.

Simulations in virtual time on the model of the ONES paper's Table 2, with utilities drawn as OASiS does. Load is
the GPU time that jobs request over that of the cluster while they come. DRF is `fair`: with one resource, equal
dominant shares are equal shares of slots. The first fifth of the jobs is not counted: it measures families for
the first time. `utility_vs_NAME` is at load 2, summed over the seeds, with U and L estimated online;
`_hindsight` is the same with U and L of all jobs, as the paper knows them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import Any, Final

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before the workers import numpy

import msgspec
from numpy.random import default_rng

from controlplane.policy.api import Budget, ClusterView, EpochSeen, JobView
from controlplane.policy.oasis.job_plans import LOW_SHARE
from controlplane.policy.oasis.policy import Oasis
from controlplane.policy.options import OasisOptions
from controlplane.sim.analysis.summary import summary
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.experiment import Cell, run
from controlplane.sim.models.table2 import duration_s
from controlplane.sim.scenario import Scenario, trace_of
from schemas.ids import JobId, NodeId, Seconds, slot_id
from schemas.jobs import Utility
from tests.bench import report
from tests.bench.simulations import simulate_cell
from tests.support.builders import cluster_view, job_view, slot_view

SEEDS: Final = (20, 21, 22)  # none of them was used to choose a constant
LOADS: Final = (1, 2, 3)
MAIN: Final = 2  # the load of the keys without one
BASELINES: Final = {"fifo": "fifo", "drf": "fair"}
CLUSTER: Final = NodeGroup(count=4, slots=4)
WARM_UP: Final = 0.2
START_S: Final = 20.0  # of a job, in the density that the policy would count
DECIDED: Final = 60  # jobs whose decisions are timed, one after the other


def scenario(load: float, jobs: int, seed: int) -> Scenario:
    base = Scenario(jobs=jobs, nodes=(CLUSTER,), utilities=True, knowledge="L3", warm_up=WARM_UP)
    asked = [job.slots * duration_s(job.workload, job.slots) for job in trace_of(base, seed).jobs]
    return msgspec.structs.replace(base, interval_s=mean(asked) / (base.slots * load))


def hindsight(jobs: int, seed: int) -> dict[str, Any]:
    dense = [
        job.utility.value / (duration_s(job.workload, 1) + START_S)
        for job in trace_of(scenario(1, jobs, seed), seed).jobs
        if job.utility is not None
    ]
    return {"u": max(dense), "l": LOW_SHARE * min(dense)}


def row(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    jobs = sum(each["jobs"] for each in found)
    came = sum(each["promises_kept"] + each["promises_broken"] for each in found)
    late = sum((each["lateness_s"] or 0.0) * (each["promises_kept"] + each["promises_broken"])
               for each in found)  # fmt: skip
    return {
        "utility": sum(each["utility"] for each in found),
        "utility_share": mean(each["utility_share"] for each in found),
        "rejected_share": sum(each["rejected"] for each in found) / jobs,
        "promises_kept": sum(each["promises_kept"] for each in found) / came if came else 0.0,
        "lateness_s": late / came if came else 0.0,
        "avg_jct_s": mean(each["avg_jct_s"] for each in found),
        "decision_ms": mean(each["decision_ms_mean"] for each in found),
    }


def ms_per_job() -> float:
    policy, now = Oasis(OasisOptions()), Seconds(0.0)
    for slots in (1, 2, 4):
        seen = EpochSeen(
            job=JobId("f-0"), family="f", slots=slots, nodes=1, global_batch=64,
            samples_per_s=100.0 * slots**0.9, whole=True,
        )  # fmt: skip
        policy.observe(seen, now)
    slots_ = [
        slot_view(slot_id(NodeId(f"n{node}"), index)) for node in range(16) for index in range(4)
    ]
    rng, took, jobs = default_rng(0), list[float](), list[JobView]()
    for number in range(DECIDED):
        before = _improve_ms(policy, cluster_view(*slots_, *jobs), now)
        work_s = float(rng.lognormal(6.0, 1.0))
        utility = Utility(
            value=float(rng.uniform(1, 100)), deadline_s=3.0 * work_s, decay=8.0 / work_s
        )
        job = job_view(
            JobId(f"j-{number}"), slots=(1, 16), batch_size=64, family="f", utility=utility,
            stop_samples=int(100 * work_s),
        )  # fmt: skip
        jobs.append(job)
        took.append(max(0.0, _improve_ms(policy, cluster_view(*slots_, *jobs), now) - before))
    return median(took)


def _improve_ms(policy: Oasis, view: ClusterView, now: Seconds) -> float:
    began = time.process_time()
    policy.improve(view, Budget(generations=1), default_rng(0), now)
    return (time.process_time() - began) * 1000.0


def main() -> None:
    options = report.arguments(__doc__, "one seed and load, 60 jobs")
    seeds, loads, jobs = (SEEDS[:1], (MAIN,), 60) if options.quick else (SEEDS, LOADS, 150)

    def cells(policy: str, load: int, known: Callable[[int], dict[str, Any]]) -> list[Cell]:
        return [
            Cell(policy=policy, options=known(s), scenario=scenario(load, jobs, s), seed=s)
            for s in seeds
        ]

    runs = {
        (name, load): cells(policy, load, lambda _: {})
        for load in loads
        for name, policy in (("oasis", "oasis"), *BASELINES.items())
    }
    runs["hindsight", MAIN] = cells("oasis", MAIN, lambda seed: hindsight(jobs, seed))
    todo = [cell for many in runs.values() for cell in many]
    done = run(todo, simulate_cell, None, os.cpu_count() or 1, report.simulated)
    every = iter([summary(result) for result in done])
    rows = {key: row([next(every) for _ in many]) for key, many in runs.items()}
    figures = {"ms_per_job": ms_per_job(), **_keys(rows)}
    columns = [
        "utility_share", "rejected_share", "promises_kept", "lateness_s", "avg_jct_s",
        "decision_ms",
    ]  # fmt: skip
    report.table(
        f"{jobs} jobs on {CLUSTER.count * CLUSTER.slots} slots, seeds {seeds}",
        ["policy, load", "utility", *columns],
        [[f"{name}, {load}", each["utility"], *(each[c] for c in columns)]
         for (name, load), each in rows.items()],
    )  # fmt: skip
    report.finish(figures, options.json, "oasis")


def _keys(rows: Mapping[tuple[str, int], Mapping[str, float]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, load in rows:
        end = "" if load == MAIN else f"_load{load}"
        if name in BASELINES:
            ours = rows["oasis", load]["utility"]
            figures[f"utility_vs_{name}{end}"] = ours / rows[name, load]["utility"]
        if name == "oasis":
            for what in ("utility_share", "rejected_share", "promises_kept", "lateness_s"):
                figures[f"{what}{end}"] = rows[name, load][what]
    best = rows["hindsight", MAIN]["utility"]
    for name in BASELINES:
        figures[f"utility_vs_{name}_hindsight"] = best / rows[name, MAIN]["utility"]
    return figures


if __name__ == "__main__":
    main()
