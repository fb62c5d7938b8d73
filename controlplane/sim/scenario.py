"""Scenario of a simulation as a value: workload, cluster and costs.

Functions that load files of a scenario raise `TraceError` if a file is missing or invalid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from controlplane.policy.api import Policy
from controlplane.policy.registry import name_of, option_names
from controlplane.sim.cluster import RELATIVE_SPEEDS, NodeGroup, TraceError
from controlplane.sim.models.curves import (
    WORK_CORE_S,
    CurvesModel,
    RecordedCurves,
    read_curves,
    shipped_curves,
)
from controlplane.sim.models.demands import DEMANDS, Demand, demand_of
from controlplane.sim.models.harmony import BATCHES, JOB_S, HarmonyModel
from controlplane.sim.models.interference import parse_interference
from controlplane.sim.models.job_model import ChangeCosts, EarlyStops, TrainingModel
from controlplane.sim.models.profiles import ProfilesModel
from controlplane.sim.models.recorded import RecordedModel
from controlplane.sim.models.recording import Recording, read_recording
from controlplane.sim.models.table2 import Table2Model, duration_s
from controlplane.sim.models.table2_constants import ROWS
from controlplane.sim.results import Trace
from controlplane.sim.traces.generators import (
    generate,
    generate_curves,
    generate_harmony,
    with_users,
    with_utilities,
)
from controlplane.sim.traces.trace_csv import read_trace

HONEST_NOISE: Final = 0.05  # relative error of a speed measured over two seconds; chosen
# Field -> smallest and largest value, and the remedy.
BOUNDS: Final[Mapping[str, tuple[float, float, str]]] = {
    **dict.fromkeys(
        ("round_s", "latency_s", "node_loss_s", "node_back_s", "generations", "think_s"),
        (0.0, math.inf, "correct it"),
    ),
    **dict.fromkeys(("interval_s", "work_core_s"), (1e-6, math.inf, "correct it")),
    "jobs": (1, math.inf, "correct it"),
    **dict.fromkeys(("users", "projects"), (0, 10_000, "give fewer")),
    "job_s": (1e-3, math.inf, "correct it"),
    **dict.fromkeys(
        ("stall_s", "first_stall_s", "prepare_s"),  # shorter than any deadline in the core
        (0.0, 500.0, "give less: a cluster cancels longer changes"),
    ),
    **dict.fromkeys(
        ("crash_share", "cancel_share", "early_share", "rigid"),
        (0.0, 1.0, "give a share of the jobs"),
    ),
    "warm_up": (0.0, 1.0 - 1e-9, "give a share of the jobs below 1"),
    "noise": (0.0, 2.0, "give 0.05 for a relative error of 5%"),
    "noise_scale_error": (1.0, 1000.0, "give a factor; 4: up to 4 times too large or small"),
    "scaling": (1e-9, 1.0, "give 1 for speeds as many times as there are slots"),
}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Workload, cluster and costs; with a policy and a seed they determine a simulation."""

    physics: Literal["table2", "profiles", "recorded", "curves", "harmony"] = "table2"
    profiles: str = ""  # folder of the measured tables
    workload: str = ""  # file with a trace or a recording; empty: the trace is generated
    curves: str = ""  # file with loss curves; empty: the curves that ship with the simulator
    content: str = ""  # fingerprint of these files, so that results of different files differ
    jobs: int = 400
    interval_s: float = 30.0  # mean time between submissions
    arrivals: Literal["poisson", "uniform", "bursts", "philly", "google"] = "poisson"
    mix: Literal["philly", "heavy", "uniform"] = "philly"
    warm_up: float = 0.05  # share of the jobs that averages exclude; these are the first jobs
    nodes: tuple[NodeGroup, ...] = (NodeGroup(count=16, slots=4),)
    round_s: float = 0.0  # time between plans; 0: plan after every event
    stall_s: float | None = None  # stall of a change; None: the model's value
    first_stall_s: float | None = None  # stall of a start; None: the model's value
    # Time in which a new worker prepares while the group trains; None: the model's value.
    prepare_s: float | None = None
    latency_s: float = 0.05  # time from a request to the plan
    knowledge: Literal["L0", "L2", "L3"] = "L2"
    information: Literal["honest", "perfect"] = "honest"  # quality of the workers' measurements
    noise: float | None = None  # error of reported speeds and noise scales; None: by `information`
    noise_scale_error: float = 1.0  # largest factor by which a job's noise scales can be wrong
    interference: str = "none"
    erratic: bool = False  # True: loss curves have plateaus and spikes
    work_core_s: float = WORK_CORE_S  # physics curves: mean work of a job on one slot
    scaling: float = 1.0  # physics curves: speed is slots ** scaling
    job_s: float = JOB_S  # physics harmony: mean duration of a job alone
    # Physics harmony: how workers exchange gradients.
    exchange: Literal["servers", "all-reduce", "mixed"] = "servers"
    crash_share: float = 0.0  # share of jobs with a script that fails once
    cancel_share: float = 0.0  # share of jobs that their users cancel
    early_share: float = 0.0  # share of jobs that end after a part of their epochs
    node_loss_s: float = 0.0  # mean time between two node losses in the cluster; 0: none
    node_back_s: float = 600.0  # time until a lost node returns
    utilities: bool = False  # True: jobs state utilities and their number of samples
    users: int = 0  # users to whom the jobs are dealt; 0: as many as there are `projects`
    projects: int = 0  # projects of these users; 0: each user has its own
    fair_share: bool = True  # False: policies do not see accounts
    rigid: float = 0.0  # share of jobs that are programs on a fixed number of slots
    generations: int = 3  # generations that a searching policy evolves per request
    think_s: float = 5.0  # searching policies: minimum time between requests after epochs
    record_allocations: bool = False  # True: results list which job used which slot when

    def __post_init__(self) -> None:
        """Check all values."""
        for name, (least, most, remedy) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and least <= value <= most):
                limits = f"from {least:g} to {most:g}"
                wanted = limits if most < math.inf else f"of at least {least:g}"
                raise TraceError(f"{name}: {value} is not a number {wanted}", remedy, name)
        if self.early_share and self.physics not in {"table2", "profiles"}:
            problem = f"early_share: physics {self.physics} has no scripts that leave early"
            raise TraceError(problem, "choose physics table2 or profiles, or give 0", "early_share")
        if self.utilities and (self.workload or self.physics != "table2"):
            problem = "utilities are given to the jobs of a generated trace"
            hint = "write columns value, deadline_s and decay into the file"
            raise TraceError(problem, hint, "utilities")
        if not self.nodes or any(group.count < 1 or group.slots < 1 for group in self.nodes):
            hint = "give nodes with at least one GPU"
            raise TraceError("the cluster has no slots", hint, "nodes")
        for group in self.nodes:
            if group.model not in RELATIVE_SPEEDS:
                known = ", ".join(name for name in RELATIVE_SPEEDS if name)
                problem = f"GPU type {group.model!r} is unknown"
                raise TraceError(problem, f"choose from {known}", "nodes")
        parse_interference(self.interference)

    @property
    def slots(self) -> int:
        """Number of slots of the cluster."""
        return sum(group.count * group.slots for group in self.nodes)

    @property
    def widest(self) -> int:
        """Number of slots of the largest node."""
        return max(group.slots for group in self.nodes)

    @property
    def report_noise(self) -> float:
        """Standard deviation of the logarithm of a reported speed or noise scale."""
        if self.noise is not None:
            return self.noise
        return HONEST_NOISE if self.information == "honest" else 0.0

    @property
    def share_families(self) -> bool:
        """True if policies know which jobs belong to the same application."""
        return self.knowledge != "L0"

    @property
    def instant_changes(self) -> bool:
        """True if plans in rounds take effect at once, as in the published simulators."""
        return self.round_s > 0.0


# SLAQ section 3: 160 jobs, 15 s apart, on 20 nodes of 32 cores; averages include all jobs.
SLAQ: Final = Scenario(
    physics="curves",
    jobs=160,
    interval_s=15.0,
    warm_up=0.0,
    nodes=(NodeGroup(count=20, slots=32, kind="cpu"),),
)

# Harmony, evaluation: six servers of two GPUs. The paper specifies no job lengths and no interval.
# With this interval, jobs without interference would keep five of eight GPUs busy.
HARMONY: Final = Scenario(
    physics="harmony",
    jobs=60,
    interval_s=240.0,
    warm_up=0.0,
    nodes=(NodeGroup(count=6, slots=2, cores=8),),
    interference="resources:0.3",  # case study 1: 30% on average
)


USUAL_STALL_S: Final = 30.0  # stall of a change without a value in the scenario or the model
PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = {
    # The same options as in the simulator that was published with the profiles.
    "tiresias": {"limits": [57_600.0], "placer": "emptiest"},
    "optimus": {"remaining": "oracle", "interval_s": 0.0},
    "pollux": {"batch_margin": 0.0},
}


def model_of(scenario: Scenario) -> TrainingModel:
    """Return the training model of the scenario's jobs."""
    costs, stated = default_costs(scenario), scenario.knowledge == "L3"
    model: TrainingModel
    match scenario.physics:
        case "profiles":
            folder, rounds = Path(scenario.profiles), scenario.instant_changes
            model = ProfilesModel(folder, costs, stated=stated, whole_seconds=rounds)
        case "recorded":
            model = RecordedModel(recording_of(scenario), costs, stated=stated)
        case "curves":
            model = CurvesModel(
                curves_of(scenario).by_name(), stated=stated,
                work_core_s=scenario.work_core_s, scaling=scenario.scaling,
            )  # fmt: skip
        case "harmony":
            model = HarmonyModel(
                slots_per_node=scenario.widest, job_s=scenario.job_s, stated=stated
            )
        case "table2":
            model = Table2Model(stated=stated, erratic=scenario.erratic)
    return EarlyStops(model, scenario.early_share) if scenario.early_share else model


def usual_demands(scenario: Scenario) -> tuple[Demand, ...]:
    """Return the demands of all workloads; an interference rule's SHARE is a mean over them."""
    if scenario.physics == "harmony":
        servers = 0 if scenario.exchange == "all-reduce" else 2  # mean of 1 to 3
        return tuple(replace(demand_of(name), servers=servers) for name in BATCHES)
    names = ROWS if scenario.physics == "table2" else DEMANDS
    return tuple(demand_of(name) for name in names)


def curves_of(scenario: Scenario) -> RecordedCurves:
    """Return the loss curves that the scenario's jobs replay."""
    return read_curves(Path(scenario.curves)) if scenario.curves else shipped_curves()


def recording_of(scenario: Scenario) -> Recording:
    """Return the cluster recording in the file `scenario.workload`."""
    if not scenario.workload:
        problem = "physics recorded needs a recording of a cluster"
        raise TraceError(problem, "give --workload FILE, from `ones sim import`", "workload")
    return read_recording(Path(scenario.workload))


def trace_of(scenario: Scenario, seed: int) -> Trace:
    """Return the trace in the scenario's workload file, or generate a trace from `seed`.

    If the scenario has users or projects, the jobs belong to these instead of the trace's own.
    """
    trace = _trace_of(scenario, seed)
    if not (scenario.users or scenario.projects):
        return trace
    return with_users(trace, seed, scenario.users or scenario.projects, scenario.projects)


def _trace_of(scenario: Scenario, seed: int) -> Trace:
    if scenario.physics == "recorded":
        return recording_of(scenario).as_trace()
    if scenario.workload:
        return read_trace(Path(scenario.workload))
    if scenario.physics == "profiles":
        raise TraceError("the profiles have no generator", "give --workload FILE.csv", "workload")
    drawn: dict[str, Any] = {
        "jobs": scenario.jobs, "seed": seed, "arrivals": scenario.arrivals,
        "mean_interval_s": scenario.interval_s, "crash_share": scenario.crash_share,
        "cancel_share": scenario.cancel_share, "most_slots": scenario.slots,
    }  # fmt: skip
    if scenario.physics == "curves":
        curves = curves_of(scenario).curves
        return generate_curves(curves, work_core_s=scenario.work_core_s, **drawn)
    if scenario.physics == "harmony":
        return generate_harmony(exchange=scenario.exchange, job_s=scenario.job_s, **drawn)
    trace = generate(mix=scenario.mix, **drawn)
    if not scenario.utilities:
        return trace
    return with_utilities(trace, seed, lambda job: duration_s(job.workload, job.slots))


def default_costs(scenario: Scenario) -> ChangeCosts:
    """Return the costs of changes for a model that has none, or that misses measurements."""
    stall_s = USUAL_STALL_S if scenario.stall_s is None else scenario.stall_s
    start_s = stall_s if scenario.first_stall_s is None else scenario.first_stall_s
    prepare_s = start_s if scenario.prepare_s is None else scenario.prepare_s
    return ChangeCosts(start_s=start_s, restart_s=start_s, prepare_s=prepare_s, switch_s=stall_s)


def options_of(
    policy: str | type[Policy], scenario: Scenario, model: TrainingModel, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the given options, and those that an operator would set for the model's costs."""
    costs = model.costs.overridden(scenario.stall_s, scenario.first_stall_s)
    usual = {
        "rescale_stall_s": costs.switch_s,
        "start_stall_s": costs.restart_s,
        "share_family": scenario.share_families,
    }
    names = option_names(policy)
    chosen = {name: value for name, value in usual.items() if name in names}
    if scenario.physics == "profiles" and scenario.round_s > 0.0:
        chosen |= PUBLISHED.get(name_of(policy), {})
    return chosen | dict(options)
