"""Simulation of a scenario under one policy, from the first submission until the last job ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
from numpy.random import default_rng

from controlplane.policy.api import Policy
from controlplane.policy.guard import PolicyError
from controlplane.policy.registry import Entry, entry, hears_steps, make, name_of, wrap
from controlplane.sim.analysis.bounds import lower_bound_s, times_alone
from controlplane.sim.cluster import RELATIVE_SPEEDS, TraceError, node_specs
from controlplane.sim.engine.event_queue import Kernel, PlannerOptions, SimOptions
from controlplane.sim.engine.oracle import ImaginedJobs, SimulatedTrainingJobs, SimulatorOracle
from controlplane.sim.engine.planner import SimulatedPlanner
from controlplane.sim.engine.simulation import Recorder, Simulation
from controlplane.sim.models.demands import Interference, TrainingJobs
from controlplane.sim.models.interference import make_interference
from controlplane.sim.models.job_model import TrainingModel, packed, training_s
from controlplane.sim.results import JobResult, SimulationResult, Trace, TraceJob
from controlplane.sim.scenario import Scenario, model_of, options_of, trace_of, usual_demands
from schemas.ids import NodeId, Seconds
from schemas.sharing import Sharing

TELEMETRY_S: Final = 30.0  # longest interval between step reports of a group
MAX_LOSSES: Final = 1000  # number of node losses drawn
LOSS_STREAM: Final = 77  # random stream of node losses


@dataclass(frozen=True, slots=True)
class _Run:
    policy: str | type[Policy]
    options: Mapping[str, Any]  # options of the policy
    scenario: Scenario
    seed: int
    model: TrainingModel
    trace: Trace

    @property
    def entry(self) -> Entry:
        """Registry entry of the policy."""
        return entry(self.policy)

    @property
    def uncounted(self) -> int:
        """Number of warm-up jobs; averages exclude these jobs."""
        return int(self.scenario.warm_up * len(self.trace.jobs))


def simulate(
    policy: str | type[Policy] | Policy,
    scenario: Scenario,
    seed: int,
    options: Mapping[str, Any] | None = None,
    *,
    trace: Trace | None = None,
    model: TrainingModel | None = None,
    record: Recorder | None = None,
    on_call: Callable[[Seconds | None], None] | None = None,
) -> SimulationResult:
    """Simulate a scenario under one policy.

    Args:
        policy: name (`fifo`, `module:Class`), class, or a policy that exists, such as one in
            training. A class and a policy of a class give the result the name of the class.
        seed: seed of the generated workload and of the policy's search.
        options: options of the policy; none for a policy that exists.
        trace: trace to use instead of the scenario's trace.
        model: training model to use instead of the scenario's model.
        record: called with each input of the core and the commands that the core returned.
        on_call: called with the virtual time before each call of the policy, and with None after
            the last one.

    Raises:
        TraceError: if the trace or the profiles cannot be simulated.
        SettingsError: if the policy or one of its options is unknown.
        PolicyError: if a policy from outside this package fails, or its plan is impossible.
    """
    began = time.perf_counter()
    made = None
    if not isinstance(policy, str | type):
        policy, made = wrap(policy)
    entry(policy)  # refuse an unknown policy before reading any file
    model = model or model_of(scenario)
    run = _Run(
        policy=policy,
        options=options_of(policy, scenario, model, options or {}),
        scenario=scenario,
        seed=seed,
        model=model,
        trace=with_rigid_jobs(trace or trace_of(scenario, seed), scenario, model, seed),
    )
    _check_trace(run.trace, scenario)
    simulation, planner = _build(run, record, made, on_call)
    _schedule(run, simulation)
    try:
        simulation.kernel.run()
    except PolicyError as error:
        at = f"{simulation.kernel.now:.1f} s of virtual time"
        raise PolicyError(f"{error.message}, at {at}", error.hint) from error
    finally:
        if on_call is not None:
            on_call(None)
    return _result(run, simulation, planner, began)


RIGID_STREAM: Final = 7  # random stream of rigid jobs
OVERESTIMATES: Final = (1.1, 3.0)  # time limit of a program, in its true lengths; chosen


def with_rigid_jobs(trace: Trace, scenario: Scenario, model: TrainingModel, seed: int) -> Trace:
    """Return the trace in which a share of the jobs are programs on exactly the wanted slots.

    Their users state time limits, which are too long by a random factor (Mu'alem and Feitelson,
    TPDS '01).
    """
    if not scenario.rigid:
        return trace
    rng = default_rng((seed, RIGID_STREAM))
    rigid = rng.random(len(trace.jobs)) < scenario.rigid
    factors = rng.uniform(*OVERESTIMATES, len(trace.jobs))
    each = zip(trace.jobs, rigid.tolist(), factors.tolist(), strict=True)
    return msgspec.structs.replace(
        trace,
        jobs=tuple(
            _program(job, factor, scenario, model, seed) if chosen else job
            for job, chosen, factor in each
        ),
    )


def _program(
    job: TraceJob, factor: float, scenario: Scenario, model: TrainingModel, seed: int
) -> TraceJob:
    whole = model.job_model(job, "fixed", seed=seed)
    slots = min(job.slots, scenario.slots)
    alone_s = whole.costs.start_s
    alone_s += training_s(whole, packed(slots, scenario.widest), whole.spec.batch_size)
    limit_s = factor * alone_s
    return msgspec.structs.replace(job, kind="torchrun", slots=slots, max_run_s=limit_s)


def _build(
    run: _Run,
    record: Recorder | None,
    made: Policy | None,
    on_call: Callable[[Seconds | None], None] | None,
) -> tuple[Simulation, SimulatedPlanner]:
    scenario, found, kernel = run.scenario, run.entry, Kernel()
    sim_options = SimOptions(
        scenario,
        whole_seconds=run.model.whole_seconds,
        telemetry_s=TELEMETRY_S if hears_steps(run.policy, run.options) else 0.0,
        seed=run.seed,
    )
    planner_options = PlannerOptions(
        round_s=scenario.round_s,
        latency_s=0.0 if scenario.instant_changes else scenario.latency_s,
        generations=scenario.generations if found.searches else 0,
        think_s=scenario.think_s if found.searches else 0.0,
        asks_after_epochs=found.epochs,
        gangs=found.gangs,
        rebatches=found.rebatches,
        seed=run.seed,
    )
    specs = node_specs(scenario.nodes)
    simulation = Simulation(kernel, specs, sim_options, record=record)
    imagined = ImaginedJobs(simulation.jobs, specs)
    rule = _interference(run, imagined)
    oracle = SimulatorOracle(kernel, simulation.jobs, scenario.widest, imagined, rule)
    policy = made or make(run.policy, run.options, oracle)
    planner = simulation.use_policy(policy, planner_options)
    planner.on_call = on_call
    interference = _interference(run, SimulatedTrainingJobs(simulation.jobs, specs))
    if interference is not None:
        simulation.use_interference(interference)
    return simulation, planner


def _interference(run: _Run, jobs: TrainingJobs) -> Interference | None:
    scenario = run.scenario
    return make_interference(scenario.interference, jobs, run.seed, usual_demands(scenario))


def _schedule(run: _Run, simulation: Simulation) -> None:
    simulation.begin()
    if run.scenario.fair_share and len({(job.project, job.user) for job in run.trace.jobs}) > 1:
        simulation.share(Sharing())
    for place, job in enumerate(run.trace.jobs):
        batch = run.entry.batch if job.kind == "elastic" else "fixed"
        make_model = partial(run.model.job_model, job, batch, seed=run.seed)
        simulation.submit(job, make_model, counted=place >= run.uncounted)
    for at, node in _losses(run.scenario, run.seed):
        simulation.lose_node(node, at, run.scenario.node_back_s)


def _result(
    run: _Run, simulation: Simulation, planner: SimulatedPlanner, began: float
) -> SimulationResult:
    scenario, now = run.scenario, simulation.kernel.now
    jobs = _with_times_alone(run, simulation.results())
    return SimulationResult(
        policy=name_of(run.policy),
        options=dict(run.options),
        setting=msgspec.to_builtins(scenario) | {"trace": run.trace.name},
        seed=run.seed,
        slots=scenario.slots,
        jobs=jobs,
        ended_at=max((job.ended_at or now for job in jobs), default=Seconds(0.0)),
        busy_slot_s=sum(job.slot_s for job in jobs),
        decisions_ms=tuple(planner.decisions_ms),
        events=simulation.events,
        wall_s=time.perf_counter() - began,
        bound_s=_bound_s(run),
    )


def _with_times_alone(run: _Run, jobs: Sequence[JobResult]) -> tuple[JobResult, ...]:
    nodes = run.scenario.nodes
    speeds = sum(each.count * each.slots * RELATIVE_SPEEDS.get(each.model, 1.0) for each in nodes)
    alone = times_alone(
        run.trace.jobs,
        run.model,
        widest=run.scenario.widest,
        speed=speeds / run.scenario.slots,
        first_stall_s=run.scenario.first_stall_s,
        seed=run.seed,
    )
    return tuple(
        msgspec.structs.replace(job, wanted=alone[job.job][0], alone_s=alone[job.job][1])
        if job.job in alone
        else job
        for job in jobs
    )


def _bound_s(run: _Run) -> float | None:
    return lower_bound_s(
        run.trace.jobs[run.uncounted :],
        run.model,
        slots=run.scenario.slots,
        widest=run.scenario.widest,
        fastest=max(RELATIVE_SPEEDS.get(group.model, 1.0) for group in run.scenario.nodes),
        seed=run.seed,
    )


def _losses(scenario: Scenario, seed: int) -> list[tuple[float, NodeId]]:
    """Draw the time and node of each node loss from a Poisson process."""
    if scenario.node_loss_s <= 0.0:
        return []
    nodes = [spec.node for spec in node_specs(scenario.nodes)]
    rng = default_rng((seed, LOSS_STREAM))
    times = np.cumsum(rng.exponential(scenario.node_loss_s, MAX_LOSSES)).tolist()
    places = rng.integers(len(nodes), size=MAX_LOSSES).tolist()
    return [(at, nodes[place]) for at, place in zip(times, places, strict=True)]


def _check_trace(trace: Trace, scenario: Scenario) -> None:
    if not trace.jobs:
        raise TraceError(f"trace {trace.name} has no jobs", "give one with at least one job")
    for job in trace.jobs:
        if job.slots > scenario.slots:
            problem = f"job {job.name} asks for {job.slots} slots, the cluster has {scenario.slots}"
            raise TraceError(problem, "give more nodes, or lower its num_replicas", "num_replicas")
