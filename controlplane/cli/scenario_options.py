"""Options of `ones sim` that describe the simulated scenario."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import Parameter
from msgspec.structs import replace

from controlplane.sim.cluster import NodeGroup, TraceError
from controlplane.sim.models.curves import WORK_CORE_S
from controlplane.sim.models.harmony import JOB_S
from controlplane.sim.models.interference import parse_interference
from controlplane.sim.scenario import HARMONY, SLAQ, Scenario

MAX_GPUS: Final = 1_000_000
MAX_FILES: Final = 1000
TABLE2: Final = Scenario()
DEFAULTS: Final = {"curves": SLAQ, "harmony": HARMONY}
FIELDS: Final = {  # option -> field of the scenario, where the names differ
    "interval": "interval_s", "round": "round_s", "stall": "stall_s",
    "first_stall": "first_stall_s", "prepare": "prepare_s", "latency": "latency_s",
    "work": "work_core_s", "job_seconds": "job_s", "crashes": "crash_share",
    "cancels": "cancel_share", "early_stops": "early_share",
    "node_loss": "node_loss_s", "think_every": "think_s",
}  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Setup:
    """Simulated scenario; see docs/simulator.md."""

    physics: Literal["table2", "profiles", "recorded", "curves", "harmony"] = "table2"
    "Model of training: the paper's Table 2, tables, a journal, loss curves, Harmony's testbed."
    profiles: str = ""
    "Folder of the measured tables (physics profiles)."
    workload: str = ""
    "Trace to submit, a CSV or a recording; default: a generated one."
    curves: str = ""
    "File of `ones sim record-curves` (physics curves); default: the bundled one."
    gpus: int | None = None
    "Slots of the cluster, instead of --nodes."
    nodes: str = ""
    "Nodes: a number, or groups of GPU types as 8xv100,8xk80; default 16, 20 (curves), 6 (harmony)."
    gpus_per_node: int | None = None
    "Slots of each node; default 4, 32 cores (curves), 2 (harmony)."
    jobs: int | None = None
    "Length of a generated trace; default 400, 160 (curves), 60 (harmony)."
    interval: float | None = None
    "Mean seconds between submissions; default 30, 15 (curves), 240 (harmony)."
    arrivals: Literal["poisson", "uniform", "bursts", "philly", "google"] = "poisson"
    "Distribution of submission times."
    mix: Literal["philly", "heavy", "uniform"] = "philly"
    "Distribution of workloads; heavy: as philly, with its longest jobs."
    warm_up: float | None = None
    "Share of the first jobs that is not counted; default 0.05 of Table 2's traces, else 0."
    round: float = 0.0
    "Seconds between plans, as in published simulators; 0: a plan after every event."
    stall: float | None = None
    "Seconds of stall when a group changes."
    first_stall: float | None = None
    "Seconds of a job's start."
    prepare: float | None = None
    "Seconds to prepare a newcomer while the group trains; default: those of a start."
    latency: float = 0.05
    "Seconds from a request to the policy's plan."
    knowledge: Literal["L0", "L2", "L3"] = "L2"
    "Information for the policy: a job's history (L0), also its family's (L2), also estimates (L3)."
    information: Literal["honest", "perfect"] = "honest"
    "Worker reports: measurable values with errors, or exact values."
    noise: Annotated[float | None, Parameter(alias="--speed-noise")] = None
    "Relative error of reported speeds and noise scales; default 0.05, 0 if perfect."
    noise_scale_error: float = 1.0
    "Maximum factor by which all noise scales of a job are too large or too small."
    interference: str | None = None
    "Interference on a node: none, pollux:S, pairwise:S, class:S, resources:S, gavel:FILE."
    utilities: bool = False
    "Generated jobs state the utility of their end; with knowledge L3 also their length."
    users: int = 0
    "Users to whom the jobs are dealt, the k-th with a share of 1/k; 0: the trace's own users."
    projects: int = 0
    "Projects to which these users belong in turn; 0: each user has an own project."
    fair_share: Literal["on", "off"] = "on"
    "Division of the slots among the users of a trace; off: the policy alone decides."
    rigid: float = 0.0
    "Share of the jobs that are programs on exactly their wanted slots, with time limits."
    erratic: bool = False
    "Loss curves with spikes and plateaus (physics table2)."
    work: float = WORK_CORE_S
    "Mean seconds of a job on one core (physics curves)."
    scaling: float = 1.0
    "Exponent of a job's speed over its cores, above 0 and at most 1 (physics curves)."
    job_seconds: float = JOB_S
    "Mean seconds of a job that trains alone (physics harmony)."
    exchange: Literal["servers", "all-reduce", "mixed"] = "servers"
    "Gradient exchange between workers (physics harmony)."
    crashes: float = 0.0
    "Share of the jobs whose scripts fail once."
    cancels: float = 0.0
    "Share of the jobs that users cancel."
    early_stops: float = 0.0
    "Share of the jobs whose scripts exit after part of their epochs (table2, profiles)."
    node_loss: float = 0.0
    "Mean seconds between node losses; 0: none."
    generations: int = 3
    "Generations of a searching policy for each request."
    think_every: float = 5.0
    "Minimum seconds between requests to a searching policy that only an epoch's end caused."

    def scenario(self, *, gpus: int | None = None, record_allocations: bool = False) -> Scenario:
        """Return the scenario that these options describe; `gpus`, if given, replaces `--gpus`."""
        usual = DEFAULTS.get(self.physics, TABLE2)
        if self.physics == "profiles" and not self.profiles:
            hint = "give --profiles DIR, the folder of the measured tables"
            raise TraceError("physics profiles needs tables", hint, "profiles")
        given = {
            FIELDS.get(option, option): value
            for option, value in vars(self).items()
            if value is not None and option not in {"gpus", "nodes", "gpus_per_node"}
        }
        given["fair_share"] = self.fair_share == "on"
        if self.warm_up is None and self.workload:
            given["warm_up"] = 0.0
        form = parse_interference(given.get("interference", usual.interference))
        if form.file:
            given["interference"] = f"gavel:{_absolute(form.file)}"
        for file in ("profiles", "workload", "curves"):
            given[file] = _absolute(given[file])
        found = replace(
            usual,
            nodes=self._nodes(usual.nodes[0], gpus),
            record_allocations=record_allocations,
            **given,
        )
        return replace(found, content=content_of(found))

    def _nodes(self, usual: NodeGroup, gpus: int | None) -> tuple[NodeGroup, ...]:
        per_node = usual.slots if self.gpus_per_node is None else self.gpus_per_node
        nodes = _nodes(self.nodes or str(usual.count), per_node, gpus or self.gpus)
        return tuple(
            replace(group, kind=usual.kind, cores=usual.cores * group.slots // usual.slots)
            for group in nodes
        )


def content_of(scenario: Scenario) -> str:
    """Return a digest of the input files, so that results of other files are not reused."""
    interference = parse_interference(scenario.interference).file
    named = (scenario.workload, scenario.curves, interference)
    files = [Path(name) for name in named if name]
    if scenario.profiles:
        files += sorted(Path(scenario.profiles).expanduser().rglob("*.csv"))[:MAX_FILES]
    seen = sha256()
    for file in files:
        try:
            seen.update(file.expanduser().read_bytes())
        except OSError:  # reported by the loader of the file
            continue
    return seen.hexdigest()[:16] if files else ""


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if path else ""


def _nodes(text: str, per_node: int, gpus: int | None) -> tuple[NodeGroup, ...]:
    """Return the groups of equal nodes in `text`, or one group with `gpus` slots in total."""
    if per_node < 1:
        raise TraceError(f"{per_node} GPUs on a node", "give at least 1", "gpus-per-node")
    if gpus is not None:
        if not text.strip().isdecimal():
            hint = "give only one of them"
            raise TraceError(f"--gpus {gpus} and --nodes {text} conflict", hint, "gpus")
        if gpus > MAX_GPUS:
            raise TraceError(f"{gpus} GPUs", f"give at most {MAX_GPUS}", "gpus")
        if gpus < 1 or (gpus > per_node and gpus % per_node):
            problem = f"{gpus} GPUs cannot be divided among nodes of {per_node}"
            raise TraceError(problem, "give a multiple, or another --gpus-per-node", "gpus")
        slots = min(gpus, per_node)
        return (NodeGroup(count=gpus // slots, slots=slots),)
    groups = []
    for part in text.split(","):
        count, _, model = part.strip().lower().partition("x")
        if not count.isdecimal() or not 1 <= int(count) <= MAX_GPUS // per_node:
            hint = f"such as 16 or 8xv100,8xk80, with at most {MAX_GPUS} GPUs"
            problem = f"nodes {text!r} is neither a number nor a list of groups"
            raise TraceError(problem, hint, "nodes")
        groups.append(NodeGroup(count=int(count), slots=per_node, model=model))
    return tuple(groups)
