"""Loading of what a scenario names: training model, trace, costs, options of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from controlplane.sim.cluster import TraceError
from controlplane.sim.models import curves, harmony
from controlplane.sim.models.curves import CurvesModel, RecordedCurves, read_curves, shipped_curves
from controlplane.sim.models.demands import DEMANDS, Demand, demand_of
from controlplane.sim.models.harmony import BATCHES, HarmonyModel
from controlplane.sim.models.job_model import ChangeCosts, EarlyStops, TrainingModel
from controlplane.sim.models.profiles import ProfilesModel
from controlplane.sim.models.recorded import RecordedModel
from controlplane.sim.models.recording import Recording
from controlplane.sim.models.table2 import TYPICAL_COSTS, Table2Model, duration_s
from controlplane.sim.models.table2_constants import ROWS
from controlplane.sim.results import Trace
from controlplane.sim.scenario import Scenario
from controlplane.sim.traces.generators import (
    generate,
    generate_curves,
    generate_harmony,
    with_utilities,
)
from controlplane.sim.traces.recording_file import read_recording
from controlplane.sim.traces.trace_csv import read_trace

USUAL_STALL_S: Final = 30.0  # of every change, if neither the scenario nor a model states it
USUAL_COSTS: Final[Mapping[str, ChangeCosts]] = {
    "table2": TYPICAL_COSTS,
    "curves": curves.COSTS,
    "harmony": harmony.COSTS,
}
PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = {
    # As in the simulator published with the profiles.
    "tiresias": {"limits": [57_600.0], "placer": "emptiest"},
    "optimus": {"remaining": "oracle", "interval_s": 0.0},
}


def model_of(scenario: Scenario) -> TrainingModel:
    """Return the training model of the scenario's jobs.

    Raises:
        TraceError: if its tables or its recording cannot be used.
    """
    model = _whole_model_of(scenario)
    return EarlyStops(model, scenario.early_share) if scenario.early_share else model


def _whole_model_of(scenario: Scenario) -> TrainingModel:
    """Return the model in which all jobs train to their end."""
    stated = scenario.knowledge == "L3"
    if scenario.physics == "profiles":
        return ProfilesModel(
            Path(scenario.profiles),
            costs_of(scenario),
            stated=stated,
            whole_seconds=scenario.instant_changes,
        )
    if scenario.physics == "recorded":
        return RecordedModel(recording_of(scenario), costs_of(scenario), stated=stated)
    if scenario.physics == "curves":
        return CurvesModel(
            curves_of(scenario).by_name(),
            costs_of(scenario),
            work_core_s=scenario.work_core_s,
            scaling=scenario.scaling,
            stated=stated,
        )
    if scenario.physics == "harmony":
        return HarmonyModel(
            costs_of(scenario),
            slots_per_node=scenario.widest,
            job_s=scenario.job_s,
            stated=stated,
        )
    return Table2Model(stated=stated, erratic=scenario.erratic)


def usual_demands(scenario: Scenario) -> tuple[Demand, ...]:
    """Return the demands of the model's workloads; a share of interference is a mean over these."""
    if scenario.physics == "harmony":
        servers = 0 if scenario.exchange == "all-reduce" else 2  # mean of 1 to 3
        return tuple(replace(demand_of(name), servers=servers) for name in BATCHES)
    names = ROWS if scenario.physics == "table2" else DEMANDS
    return tuple(demand_of(name) for name in names)


def curves_of(scenario: Scenario) -> RecordedCurves:
    """Return the loss curves that the scenario's jobs replay.

    Raises:
        TraceError: if the file is missing or not a file of curves.
    """
    return read_curves(Path(scenario.curves)) if scenario.curves else shipped_curves()


def recording_of(scenario: Scenario) -> Recording:
    """Return the cluster recording that `scenario.workload` names.

    Raises:
        TraceError: if the file is missing or not a recording.
    """
    if not scenario.workload:
        problem = "physics recorded needs a recording of a cluster"
        raise TraceError(problem, "give --workload FILE, from `ones sim import`", "workload")
    return read_recording(Path(scenario.workload))


def trace_of(scenario: Scenario, seed: int) -> Trace:
    """Return the submissions, read from a file or generated.

    Raises:
        TraceError: if the file cannot be read, or nothing can be generated for this model.
    """
    if scenario.physics == "recorded":
        return recording_of(scenario).as_trace()
    if scenario.workload:
        return read_trace(Path(scenario.workload))
    if scenario.physics == "profiles":
        raise TraceError("the profiles have no generator", "give --workload FILE.csv", "workload")
    if scenario.physics == "curves":
        return generate_curves(
            curves_of(scenario).curves,
            jobs=scenario.jobs,
            seed=seed,
            arrivals=scenario.arrivals,
            mean_interval_s=scenario.interval_s,
            crash_share=scenario.crash_share,
            cancel_share=scenario.cancel_share,
            work_core_s=scenario.work_core_s,
            most_slots=scenario.slots,
        )
    if scenario.physics == "harmony":
        return generate_harmony(
            jobs=scenario.jobs,
            seed=seed,
            arrivals=scenario.arrivals,
            mean_interval_s=scenario.interval_s,
            exchange=scenario.exchange,
            job_s=scenario.job_s,
            crash_share=scenario.crash_share,
            cancel_share=scenario.cancel_share,
            most_slots=scenario.slots,
        )
    trace = generate(
        jobs=scenario.jobs,
        seed=seed,
        mix=scenario.mix,
        arrivals=scenario.arrivals,
        mean_interval_s=scenario.interval_s,
        crash_share=scenario.crash_share,
        cancel_share=scenario.cancel_share,
        most_slots=scenario.slots,
    )
    if not scenario.utilities:
        return trace
    return with_utilities(trace, seed, lambda job: duration_s(job.workload, job.slots))


def costs_of(scenario: Scenario) -> ChangeCosts:
    """Return the costs of changes as far as they do not depend on the job.

    Costs that the scenario does not state: 30 s for everything with the profiles, the middle of
    Table 2's models, hardly anything with loss curves, seconds in Harmony's testbed.
    """
    usual = USUAL_COSTS.get(scenario.physics)
    if usual is not None:
        return usual.overridden(scenario.stall_s, scenario.first_stall_s, scenario.prepare_s)
    stall_s = USUAL_STALL_S if scenario.stall_s is None else scenario.stall_s
    start_s = stall_s if scenario.first_stall_s is None else scenario.first_stall_s
    prepare_s = start_s if scenario.prepare_s is None else scenario.prepare_s
    return ChangeCosts(start_s=start_s, restart_s=start_s, prepare_s=prepare_s, switch_s=stall_s)


def options_of(policy: str, scenario: Scenario, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy's options, including those that an operator would set for the costs."""
    chosen: dict[str, Any] = {}
    if scenario.physics == "profiles" and scenario.round_s > 0.0:
        chosen |= PUBLISHED.get(policy, {})
    costs = costs_of(scenario)
    if policy in {"ones", "ones-paper"}:
        chosen |= {"rescale_stall_s": costs.switch_s, "start_stall_s": costs.restart_s}
    if policy == "ones" and not scenario.share_families:
        chosen["share_lengths"] = False
    if policy == "goodput":
        chosen |= {"share_family": scenario.share_families, "reallocation_s": costs.switch_s}
    return chosen | dict(options)
