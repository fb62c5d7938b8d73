"""Scenario of a simulation as a value: workload, cluster, costs."""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from controlplane.sim.cluster import RELATIVE_SPEEDS, NodeGroup, TraceError
from controlplane.sim.models.curves import WORK_CORE_S
from controlplane.sim.models.harmony import JOB_S
from controlplane.sim.models.interference import parse_interference

MAX_STALL_S: Final = 500.0  # less than every deadline of the core
HONEST_NOISE: Final = 0.05  # of speeds measured over two seconds; chosen
MAX_NOISE: Final = 2.0
MAX_SCALE_ERROR: Final = 1000.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Workload, cluster and costs; with a policy and a seed it determines a simulation."""

    physics: Literal["table2", "profiles", "recorded", "curves", "harmony"] = "table2"
    profiles: str = ""  # folder of the measured tables
    workload: str = ""  # file of a trace or a recording; empty: generated
    curves: str = ""  # file of loss curves; empty: the shipped ones
    content: str = ""  # fingerprint of these files; distinguishes their results
    jobs: int = 400
    interval_s: float = 30.0  # mean time between submissions
    arrivals: Literal["poisson", "uniform", "bursts", "philly", "google"] = "poisson"
    mix: Literal["philly", "uniform"] = "philly"
    warm_up: float = 0.05  # share of the jobs, from the first on, that do not count
    nodes: tuple[NodeGroup, ...] = (NodeGroup(count=16, slots=4),)
    round_s: float = 0.0  # between plans; 0: whenever something happens
    stall_s: float | None = None  # of a change; None: the model's
    first_stall_s: float | None = None  # of a start; None: the model's
    prepare_s: float | None = None  # of a newcomer while the old group trains; None: the model's
    latency_s: float = 0.05  # from a request to the plan
    knowledge: Literal["L0", "L2", "L3"] = "L2"
    information: Literal["honest", "perfect"] = "honest"  # measurements of workers
    noise: float | None = None  # of reported speeds and noise scales; None: by `information`
    noise_scale_error: float = 1.0  # largest factor of error of a job's noise scales
    interference: str = "none"
    erratic: bool = False  # loss curves
    work_core_s: float = WORK_CORE_S  # physics curves: mean work of a job on one slot
    scaling: float = 1.0  # physics curves: exponent of a job's speed over its slots
    job_s: float = JOB_S  # physics harmony: mean duration of a job alone
    exchange: Literal["servers", "all-reduce", "mixed"] = "servers"  # physics harmony: of gradients
    crash_share: float = 0.0  # share of jobs whose scripts fail once
    cancel_share: float = 0.0  # share of jobs that their users cancel
    early_share: float = 0.0  # share of jobs whose scripts leave after a part of their epochs
    node_loss_s: float = 0.0  # mean time between losses of a node; 0: never
    node_back_s: float = 600.0
    utilities: bool = False  # jobs state utilities and their number of samples
    generations: int = 3  # evolved per request by a searching policy
    think_s: float = 5.0  # minimum interval of its requests caused by ends of epochs
    record_allocations: bool = False  # keep which job held which slot when

    def __post_init__(self) -> None:
        """Check all values."""
        _check(self)

    @property
    def slots(self) -> int:
        """Number of slots of the cluster."""
        return sum(group.count * group.slots for group in self.nodes)

    @property
    def widest(self) -> int:
        """Slots of the largest node."""
        return max(group.slots for group in self.nodes)

    @property
    def report_noise(self) -> float:
        """Standard deviation of the logarithm of reported speeds and noise scales."""
        if self.noise is not None:
            return self.noise
        return HONEST_NOISE if self.information == "honest" else 0.0

    @property
    def share_families(self) -> bool:
        """True if jobs of one application are known to be related."""
        return self.knowledge != "L0"

    @property
    def instant_changes(self) -> bool:
        """True if slots change hands in no time: in rounds, as in the published simulators."""
        return self.round_s > 0.0


def _check(scenario: Scenario) -> None:
    least = {
        "jobs": 1, "interval_s": 1e-6, "warm_up": 0.0, "round_s": 0.0, "latency_s": 0.0,
        "crash_share": 0.0, "cancel_share": 0.0, "early_share": 0.0, "node_loss_s": 0.0,
        "node_back_s": 0.0, "generations": 0, "think_s": 0.0, "work_core_s": 1e-6, "job_s": 1e-3,
    }  # fmt: skip
    for name, low in least.items():
        _bounded(name, getattr(scenario, name), low)
    for name in ("stall_s", "first_stall_s", "prepare_s"):
        value = getattr(scenario, name)
        if value is not None:
            _bounded(name, value, 0.0)
            if value > MAX_STALL_S:
                problem = f"{name}: a cluster cancels changes that take {value:g} s"
                raise TraceError(problem, f"give at most {MAX_STALL_S:g}", name)
    for name in ("warm_up", "crash_share", "cancel_share", "early_share"):
        if getattr(scenario, name) > 1.0 - (name == "warm_up") * 1e-9:
            raise TraceError(f"{name} {getattr(scenario, name)} is no share", "give 0 to 1", name)
    if scenario.early_share and scenario.physics not in {"table2", "profiles"}:
        problem = f"early_share: physics {scenario.physics} has no scripts that leave early"
        raise TraceError(problem, "choose physics table2 or profiles, or give 0", "early_share")
    _check_reports(scenario)
    if not 0.0 < scenario.scaling <= 1.0:
        problem = f"scaling: {scenario.scaling} is not above 0 and at most 1"
        raise TraceError(problem, "give 1 for speeds as many times as there are slots", "scaling")
    if scenario.slots < 1 or any(g.count < 1 or g.slots < 1 for g in scenario.nodes):
        raise TraceError("the cluster has no slots", "give nodes with at least one GPU", "nodes")
    if scenario.utilities and (scenario.workload or scenario.physics != "table2"):
        problem = "utilities are given to the jobs of a generated trace"
        hint = "write columns value, deadline_s and decay into the file"
        raise TraceError(problem, hint, "utilities")
    unknown = [group.model for group in scenario.nodes if group.model not in RELATIVE_SPEEDS]
    if unknown:
        known = ", ".join(name for name in RELATIVE_SPEEDS if name)
        raise TraceError(f"GPU type {unknown[0]!r} is unknown", f"choose from {known}", "nodes")
    parse_interference(scenario.interference)


def _check_reports(scenario: Scenario) -> None:
    if scenario.noise is not None and not 0.0 <= scenario.noise <= MAX_NOISE:
        problem = f"noise: {scenario.noise} is not a relative error from 0 to {MAX_NOISE:g}"
        raise TraceError(problem, "give 0.05 for 5%", "noise")
    if not 1.0 <= scenario.noise_scale_error <= MAX_SCALE_ERROR:
        problem = f"noise_scale_error: {scenario.noise_scale_error} is not a factor of at least 1"
        hint = f"give 1 to {MAX_SCALE_ERROR:g}; 4: up to 4 times too large or small"
        raise TraceError(problem, hint, "noise_scale_error")


def _bounded(name: str, value: float, least: float) -> None:
    if not math.isfinite(value) or value < least:
        raise TraceError(
            f"{name}: {value} is not a number of at least {least:g}", "correct it", name
        )


# SLAQ section 3: 160 jobs, 15 s apart, on 20 nodes of 32 cores; all count.
SLAQ: Final = Scenario(
    physics="curves",
    jobs=160,
    interval_s=15.0,
    warm_up=0.0,
    nodes=(NodeGroup(count=20, slots=32, kind="cpu"),),
)

# Harmony, evaluation: six servers of two GPUs. The paper states neither lengths nor an interval:
# with this interval, undisturbed jobs would keep five of eight GPUs busy.
HARMONY: Final = Scenario(
    physics="harmony",
    jobs=60,
    interval_s=240.0,
    warm_up=0.0,
    nodes=(NodeGroup(count=6, slots=2, cores=8),),
    interference="resources:0.3",  # case study 1: 30% on average
)
