"""Everything that one simulation is made of, as a value; and the simulation itself."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.random import default_rng

from controlplane.policy.registry import entry, make
from controlplane.sim.analysis.fluid_bound import fluid_srpt
from controlplane.sim.analysis.min_cost import Ease, easiest
from controlplane.sim.engine.kernel import Kernel
from controlplane.sim.engine.simulation import Habits, Record, World
from controlplane.sim.engine.simulator_oracle import Truth
from controlplane.sim.models.interference import Distributed, Interference, Pairwise, parse
from controlplane.sim.models.job_model import Costs, Physics
from controlplane.sim.models.profiles import Profiles
from controlplane.sim.models.recorded.recorded_model import Recorded
from controlplane.sim.models.recorded.recording import Recording
from controlplane.sim.models.table2.table2_model import TYPICAL_COSTS, Table2
from controlplane.sim.node_groups import SPEEDS, Nodes, specs
from controlplane.sim.simulation_result import Outcome
from controlplane.sim.simulator_errors import TraceError
from controlplane.sim.trace_jobs import Trace, TraceJob
from controlplane.sim.traces.recording_file import read as read_recording
from controlplane.sim.traces.table2_generator import generate
from controlplane.sim.traces.trace_csv import read
from schemas.ids import JobId, Seconds

LONGEST_STALL_S: Final = 500.0  # below every deadline of the core
PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = {
    # As in the simulator that was published with the profiles.
    "tiresias": {"limits": [57_600.0], "placement": "emptiest"},
    "optimus": {"remaining": "oracle", "interval_s": 0.0},
}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Workload, cluster and costs; with a policy and a seed it says all there is to know."""

    physics: Literal["table2", "profiles", "recorded"] = "table2"
    profiles: str = ""  # folder of the measured tables
    workload: str = ""  # file of a trace or a recording; else one is generated
    content: str = ""  # fingerprint of these files: results of others are not theirs
    jobs: int = 400
    interval_s: float = 30.0  # mean time between submissions
    arrivals: Literal["poisson", "uniform", "bursts", "philly"] = "poisson"
    mix: Literal["philly", "uniform"] = "philly"
    warm_up: float = 0.05  # share of the jobs, from the first on, that are not counted
    nodes: tuple[Nodes, ...] = (Nodes(count=16, slots=4),)
    round_s: float = 0.0  # between plans; 0: whenever something happens
    stall_s: float | None = None  # of a change; None: as the physics say
    first_stall_s: float | None = None  # of a start
    latency_s: float = 0.05  # from a question to the policy's answer
    knowledge: Literal["L0", "L2", "L3"] = "L2"
    interference: str = "none"
    erratic: bool = False  # loss curves
    crash_share: float = 0.0  # of the jobs, whose scripts fail once
    cancel_share: float = 0.0  # of the jobs, that their users give up
    node_loss_s: float = 0.0  # mean time between losses of a node; 0: never
    node_back_s: float = 600.0
    generations: int = 3  # that a searching policy evolves at each question
    think_s: float = 5.0  # at least, between questions to it that only an epoch's end raised
    stays: bool = False  # write down who had which slot when

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        _check(self)

    @property
    def slots(self) -> int:
        """Of the whole cluster."""
        return sum(group.count * group.slots for group in self.nodes)

    @property
    def at_once(self) -> bool:
        """Whether slots change hands in no time: in rounds, as the published simulators do it."""
        return self.round_s > 0.0


def simulate(
    policy: str,
    scenario: Scenario,
    seed: int,
    options: Mapping[str, Any] | None = None,
    *,
    trace: Trace | None = None,
    record: Record | None = None,
) -> Outcome:
    """Live through a scenario under one policy.

    Args:
        policy: as the registry calls it.
        scenario: workload, cluster and costs.
        seed: of the workload and the search.
        options: of the policy.
        trace: what is submitted, if it was read or generated before.
        record: told of every input and its commands.

    Raises:
        TraceError: if the trace or the profiles cannot be simulated.
        SettingsError: if the policy or its options are unknown.
    """
    began = time.perf_counter()
    found = entry(policy)
    physics, trace = physics_of(scenario), trace or trace_of(scenario, seed)
    _check_trace(trace, scenario)
    kernel = Kernel()
    habits = Habits(
        at_once=scenario.at_once,
        whole_seconds=physics.whole_seconds,
        telemetry_s=30.0 if found.searches else 0.0,
        round_s=scenario.round_s,
        stall_s=scenario.stall_s,
        first_stall_s=scenario.first_stall_s,
        relatives=scenario.knowledge != "L0",
    )
    nodes = specs(scenario.nodes)
    world = World(kernel, nodes, habits, record=record, stays=scenario.stays)
    widest = max(group.slots for group in scenario.nodes)
    chosen = options_of(policy, scenario, options or {})
    decider = make(policy, chosen, Truth(kernel, world.crews, widest))
    planner = world.plan_with(
        decider,
        latency_s=0.0 if scenario.at_once else scenario.latency_s,
        generations=scenario.generations if found.searches else 0,
        think_s=scenario.think_s if found.searches else 0.0,
        epochs=found.epochs,
        seed=seed,
    )
    world.interference = _interference(scenario, world, seed)
    world.begin()
    warm_up = int(scenario.warm_up * len(trace.jobs))
    for place, job in enumerate(trace.jobs):
        make_work = partial(physics.work, job, found.batch, seed=seed)
        world.submit(job, make_work, counted=place >= warm_up)
    for at, node in _losses(scenario, seed):
        world.lose(nodes[node].node, at, scenario.node_back_s)
    kernel.run()
    jobs = world.stories()
    return Outcome(
        policy=policy,
        options=dict(chosen),
        setting=msgspec.to_builtins(scenario) | {"trace": trace.name},
        seed=seed,
        slots=scenario.slots,
        jobs=jobs,
        ended_at=max((job.ended_at or kernel.now for job in jobs), default=Seconds(0.0)),
        busy_slot_s=sum(job.slot_s for job in jobs),
        decisions_ms=tuple(planner.took_ms),
        events=world.events,
        wall_s=time.perf_counter() - began,
        bound_s=_bound(trace.jobs[warm_up:], physics, scenario, seed),
    )


def options_of(policy: str, scenario: Scenario, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, and what an operator would tell a policy of this scenario's costs."""
    chosen: dict[str, Any] = {}
    if scenario.physics == "profiles" and scenario.round_s > 0.0:
        chosen |= PUBLISHED.get(policy, {})
    costs = costs_of(scenario)
    if policy in {"ones", "ones-paper"}:
        chosen |= {"rescale_stall_s": costs.switch_s, "start_stall_s": costs.restart_s}
    relatives = scenario.knowledge != "L0"
    if policy == "ones" and not relatives:
        chosen["share_lengths"] = False
    if policy == "goodput":
        chosen |= {"share_family": relatives, "reallocation_s": costs.switch_s}
    return chosen | dict(options)


def physics_of(scenario: Scenario) -> Physics:
    """The nature of the scenario's jobs.

    Raises:
        TraceError: if its tables cannot be used.
    """
    stated = scenario.knowledge == "L3"
    if scenario.physics == "profiles":
        return Profiles(
            Path(scenario.profiles),
            costs_of(scenario),
            stated=stated,
            whole_seconds=scenario.at_once,
        )
    if scenario.physics == "recorded":
        return Recorded(recording_of(scenario), costs_of(scenario), stated=stated)
    return Table2(stated=stated, erratic=scenario.erratic)


def recording_of(scenario: Scenario) -> Recording:
    """What a cluster went through.

    Raises:
        TraceError: if there is no such file, or it is none.
    """
    if not scenario.workload:
        what = "physics recorded needs what a cluster recorded"
        raise TraceError(what, "give --workload FILE, from `ones sim import`", "workload")
    return read_recording(Path(scenario.workload))


def costs_of(scenario: Scenario) -> Costs:
    """What changes take, as far as it does not depend on the job.

    With the profiles 30 s for everything, unless it was said; of Table 2's models the middle.
    """
    if scenario.physics == "table2":
        return TYPICAL_COSTS.told(scenario.stall_s, scenario.first_stall_s)
    stall_s = 30.0 if scenario.stall_s is None else scenario.stall_s
    start_s = stall_s if scenario.first_stall_s is None else scenario.first_stall_s
    return Costs(start_s=start_s, restart_s=start_s, prepare_s=start_s, switch_s=stall_s)


def trace_of(scenario: Scenario, seed: int) -> Trace:
    """What is submitted.

    Raises:
        TraceError: if the file cannot be read, or nothing can be generated for these physics.
    """
    if scenario.physics == "recorded":
        return recording_of(scenario).as_trace()
    if scenario.workload:
        return read(Path(scenario.workload))
    if scenario.physics == "profiles":
        raise TraceError("the profiles have no generator", "give --workload FILE.csv", "workload")
    return generate(
        jobs=scenario.jobs,
        seed=seed,
        mix=scenario.mix,
        arrivals=scenario.arrivals,
        mean_interval_s=scenario.interval_s,
        crash_share=scenario.crash_share,
        cancel_share=scenario.cancel_share,
        most_slots=scenario.slots,
    )


def _interference(scenario: Scenario, world: World, seed: int) -> Interference | None:
    kind, share = parse(scenario.interference)
    crews = world.crews

    def spread(job: JobId) -> bool:
        return job in crews and len(crews[job].placement()) > 1

    def family(job: JobId) -> str:
        return crews[job].training.work.application if job in crews else ""

    if kind == "pollux":
        return Distributed(share, spread)
    return Pairwise(share, seed, family) if kind == "pairwise" else None


def _losses(scenario: Scenario, seed: int) -> list[tuple[float, int]]:
    """When which node is lost: a Poisson process over the first 1000 losses."""
    if scenario.node_loss_s <= 0.0:
        return []
    rng = default_rng((seed, 77))
    many = sum(group.count for group in scenario.nodes)
    times = np.cumsum(rng.exponential(scenario.node_loss_s, 1000)).tolist()
    return list(zip(times, rng.integers(many, size=1000).tolist(), strict=True))


def _bound(
    jobs: Sequence[TraceJob], physics: Physics, scenario: Scenario, seed: int
) -> float | None:
    """No schedule of these jobs on these slots has a smaller average completion time.

    Only the counted jobs enter, as if the others needed nothing.
    """
    known: dict[tuple[str, int, int, int], Ease] = {}
    speed = max(SPEEDS.get(group.model, 1.0) for group in scenario.nodes)
    widest = max(group.slots for group in scenario.nodes)
    batches: dict[tuple[str, int, int], int] = {}
    eases = []
    for job in jobs:
        if job.crashes_at is not None or job.cancelled_after_s is not None:
            return None
        work = physics.work(job, "elastic", seed=seed)
        tuned = (job.workload, job.slots, job.batch)
        if tuned not in batches:
            batches[tuned] = physics.work(job, "fixed", seed=seed).spec.batch_size
        beyond = batches[tuned] > work.spec.batch_limit  # else it lies between those that are tried
        fixed = batches[tuned] if beyond else 0
        key = (job.workload, work.epochs, work.epoch_samples, fixed)
        if key not in known:
            known[key] = easiest(work, fixed, scenario.slots, widest)
        eases.append(known[key])
    if not eases:
        return None
    return fluid_srpt(
        np.array([float(job.at) for job in jobs]),
        np.array([ease.slot_s for ease in eases]) / speed,
        np.array([ease.slot_s / ease.least_s for ease in eases]),
        float(scenario.slots),
    )


def _check_trace(trace: Trace, scenario: Scenario) -> None:
    if not trace.jobs:
        raise TraceError(f"trace {trace.name} has no jobs", "give one with at least one job")
    for job in trace.jobs:
        if job.slots > scenario.slots:
            what = f"job {job.name} asks for {job.slots} slots, the cluster has {scenario.slots}"
            raise TraceError(what, "give more nodes, or lower its num_replicas", "num_replicas")


def _check(scenario: Scenario) -> None:
    least = {
        "jobs": 1, "interval_s": 1e-6, "warm_up": 0.0, "round_s": 0.0, "latency_s": 0.0,
        "crash_share": 0.0, "cancel_share": 0.0, "node_loss_s": 0.0, "node_back_s": 0.0,
        "generations": 0, "think_s": 0.0,
    }  # fmt: skip
    for name, low in least.items():
        _bounded(name, getattr(scenario, name), low)
    for name in ("stall_s", "first_stall_s"):
        value = getattr(scenario, name)
        if value is not None:
            _bounded(name, value, 0.0)
            if value > LONGEST_STALL_S:
                what = f"{name}: a cluster calls changes off that take {value:g} s"
                raise TraceError(what, f"give at most {LONGEST_STALL_S:g}", name)
    for name in ("warm_up", "crash_share", "cancel_share"):
        if getattr(scenario, name) > 1.0 - (name == "warm_up") * 1e-9:
            raise TraceError(f"{name} {getattr(scenario, name)} is no share", "give 0 to 1", name)
    if scenario.slots < 1 or any(g.count < 1 or g.slots < 1 for g in scenario.nodes):
        raise TraceError("the cluster has no slots", "give nodes with at least one GPU", "nodes")
    unknown = [group.model for group in scenario.nodes if group.model not in SPEEDS]
    if unknown:
        known = ", ".join(name for name in SPEEDS if name)
        raise TraceError(f"GPU type {unknown[0]!r} is unknown", f"choose from {known}", "nodes")
    parse(scenario.interference)


def _bounded(name: str, value: float, least: float) -> None:
    if not math.isfinite(value) or value < least:
        raise TraceError(f"{name}: {value} is not a number from {least:g} on", "correct it", name)
