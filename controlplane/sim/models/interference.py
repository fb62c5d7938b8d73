"""Rules of interference between jobs that share nodes, and the option that selects a rule.

A rule depends on a job's neighbours (`pollux`, `pairwise`, `class`), on demands for a node's cores,
PCIe and network (`resources`), or on measurements (`gavel`). Gavel's `simulation_throughputs.json`
(https://github.com/stanford-futuredata/gavel, MIT; Narayanan et al., OSDI '20) lists steps per
second of each job alone and next to each other job, for K80, P100 and V100. Its pairs share one
*GPU*, so their slow-downs are the largest. An invalid option, and a file that cannot be used, raise
`TraceError`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args
from zlib import crc32

import msgspec
from numpy.random import default_rng

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.demands import (
    FAMILY_ALIASES,
    Bound,
    Demand,
    Interference,
    TrainingJobs,
    Workers,
)
from schemas.ids import JobId, NodeId

Kind = Literal["none", "pollux", "pairwise", "class", "resources", "gavel"]
KINDS: Final = "none, pollux:SHARE, pairwise:SHARE, class:SHARE, resources:SHARE or gavel:FILE"


@dataclass(frozen=True, slots=True)
class InterferenceSpec:
    """Kind of a rule, with the share of speed lost or the file of measurements."""

    kind: Kind
    share: float = 0.0  # share of the speed lost, in [0, 1); a mean, except for `pollux`
    file: str = ""


def parse_interference(text: str) -> InterferenceSpec:
    """Parse `none`, a kind with a share like `pairwise:0.25` (0 means `none`), or `gavel:FILE`."""
    kind, _, rest = text.partition(":")
    if kind == "gavel" and rest:
        return InterferenceSpec("gavel", file=rest)
    try:
        share = float(rest) if rest else 0.0
    except ValueError:
        share = -1.0
    if kind == "gavel" or kind not in get_args(Kind) or not 0.0 <= share < 1.0:
        hint = "with 0 <= SHARE < 1"
        raise TraceError(f"interference {text!r} is not one of {KINDS}", hint, "interference")
    return InterferenceSpec(cast("Kind", kind), share) if share else InterferenceSpec("none")


USUAL_GPU: Final = "v100"
MIN_SPEED: Final = 0.01  # smallest share of the speed kept
# Model without measurement -> measured job of a similar kind, at a middle batch.
NEAREST_MEASURED: Final[Mapping[str, str]] = {
    "resnet50": "ResNet-50 (batch size 32)", "vgg16": "ResNet-50 (batch size 64)",
    "alexnet": "ResNet-50 (batch size 16)", "inception": "ResNet-50 (batch size 128)",
    "resnext110": "ResNet-18 (batch size 128)", "googlenet": "ResNet-18 (batch size 64)",
    "seq2seq": "Transformer (batch size 64)", "bert": "Transformer (batch size 32)",
    "wlm": "LM (batch size 20)", "ctc": "LM (batch size 5)", "speech": "LM (batch size 80)",
    "recommendation": "Recommendation (batch size 2048)", "yolo": "CycleGAN",
}  # fmt: skip
UNKNOWN_JOB: Final = "A3C"  # represents all unknown models

Pairs = Mapping[str, Mapping[str, float]]  # job -> neighbour -> share of the speed kept


def read_pairs(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Read Gavel's table: GPU type -> job -> neighbour -> share of the speed kept, in (0, 1].

    A pair that did not fit into the memory of one GPU has a speed of 0 in the table. It gets the
    speed next to the job's worst other neighbour instead.
    """
    try:
        table = msgspec.json.decode(path.expanduser().read_bytes())
    except OSError as error:
        raise _refused(path, error.strerror or "cannot be read") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(path, f"is not JSON ({error})") from None
    if not isinstance(table, dict):
        raise _refused(path, "is not a table by GPU type")
    found = {
        gpu: _pairs(path, gpu, rows)
        for gpu, rows in table.items()
        if not gpu.endswith("_unconsolidated")
    }
    if USUAL_GPU not in found or UNKNOWN_JOB not in found[USUAL_GPU]:
        raise _refused(path, f"has no pairs of {UNKNOWN_JOB} on {USUAL_GPU}")
    return found


def _pairs(path: Path, gpu: str, rows: Any) -> dict[str, dict[str, float]]:
    if not isinstance(rows, dict):
        raise _refused(path, f"has no table of {gpu}")
    found: dict[str, dict[str, float]] = {}
    for key, row in rows.items():
        name = _single(key)
        if name is None:
            continue
        try:
            alone = float(row["null"])
            beside = {
                other: float(speeds[0])
                for label, speeds in row.items()
                if (other := _single(label)) is not None
            }
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            raise _refused(path, f"{gpu}, {name}: no steps per second") from None
        good = [speed for speed in (alone, *beside.values()) if math.isfinite(speed)]
        if alone <= 0.0 or min(good) < 0.0 or len(good) <= len(beside):
            raise _refused(path, f"{gpu}, {name}: a speed is not a number of at least 0")
        worst = min((speed for speed in beside.values() if speed > 0.0), default=alone)
        found[name] = {
            other: min(1.0, max(MIN_SPEED, (speed or worst) / alone))
            for other, speed in beside.items()
        }
    return found


def _single(key: str) -> str | None:
    """Return the job in a key like `('A3C', 1)`, or None if the job has more than one GPU."""
    try:
        name, gpus = ast.literal_eval(key)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return str(name) if gpus == 1 else None


def _refused(path: Path, problem: str) -> TraceError:
    hint = "give simulation_throughputs.json as Gavel publishes it"
    return TraceError(f"interference {path}: {problem}", hint, "interference")


def as_measured(pairs: Mapping[str, Pairs], jobs: TrainingJobs) -> Interference:
    """Return the rule of measured pairs: the worst neighbour on any node sets a job's speed."""
    usual = pairs[USUAL_GPU]
    name = cache(lambda family: measured_name(family, usual))

    def kept(gpu: str, mine: str, other: str) -> float:
        row = (pairs.get(gpu) or usual).get(mine, {})
        return row.get(other, min(row.values(), default=1.0))

    def remaining_speed(job: JobId, at: Workers) -> float:
        mine = name(jobs.family(job))
        neighbours = ((node, other) for node, here in at.items() for other in here if other != job)
        speeds = (kept(jobs.gpu(node), mine, name(jobs.family(o))) for node, o in neighbours)
        return min(speeds, default=1.0)

    return remaining_speed


def measured_name(family: str, known: Pairs) -> str:
    """Return the measured job that represents a family: the family itself, or a similar job."""
    if family in known:
        return family
    part = next((FAMILY_ALIASES[part] for part in FAMILY_ALIASES if part in family.lower()), "")
    near = NEAREST_MEASURED.get(part, UNKNOWN_JOB)
    return near if near in known else UNKNOWN_JOB


# Bottlenecks of a job and of its neighbour -> loss of the job, before scaling to the requested
# mean. Chosen: two equal bottlenecks lose most, except for the GPU, which jobs do not share.
LOSSES: Final[Mapping[tuple[Bound, Bound], float]] = {
    ("cpu", "cpu"): 1.0, ("cpu", "pcie"): 0.3, ("cpu", "network"): 0.3, ("cpu", "compute"): 0.4,
    ("pcie", "cpu"): 0.2, ("pcie", "pcie"): 1.0, ("pcie", "network"): 0.5, ("pcie", "compute"): 0.1,
    ("network", "cpu"): 0.2, ("network", "pcie"): 0.4, ("network", "network"): 1.0,
    ("network", "compute"): 0.1, ("compute", "cpu"): 0.4, ("compute", "pcie"): 0.1,
    ("compute", "network"): 0.1, ("compute", "compute"): 0.1,
}  # fmt: skip
BISECTION_STEPS: Final = 60  # halvings of the interval that contains a scale


def of_spread_jobs(share: float, spread: Callable[[JobId], bool]) -> Interference:
    """Return Pollux' rule: two jobs that are `spread` lose a `share` if they meet on a node."""

    def remaining_speed(job: JobId, at: Workers) -> float:
        others = (other for here in at.values() for other in here if other != job)
        return 1.0 - share if spread(job) and any(map(spread, others)) else 1.0

    return remaining_speed


def of_pairs(mean: float, seed: int, family: Callable[[JobId], str]) -> Interference:
    """Return the rule of pairs of families: the worst neighbour sets the speed of a job.

    Each ordered pair of families has its own loss of speed, between 0 and twice the mean.
    """

    @cache
    def kept(mine: str, other: str) -> float:
        rng = default_rng((seed, crc32(mine.encode()), crc32(other.encode())))
        return 1.0 - min(0.9, float(rng.uniform(0.0, 2.0 * mean)))

    def remaining_speed(job: JobId, at: Workers) -> float:
        others = {family(other) for here in at.values() for other in here if other != job}
        return min((kept(family(job), other) for other in others), default=1.0)

    return remaining_speed


def of_classes(scale: float, bound: Callable[[JobId], Bound]) -> Interference:
    """Return the rule of classes: a job loses speed to all neighbours on its worst node.

    speed = exp(-scale * max over the job's nodes of the sum of LOSSES[class, neighbour's class]).
    """

    def remaining_speed(job: JobId, at: Workers) -> float:
        sums = [
            math.fsum(LOSSES[bound(job), bound(other)] for other in here if other != job)
            for here in at.values()
        ]
        return math.exp(-scale * max(sums, default=0.0))

    return remaining_speed


def class_scale(share: float, bounds: Iterable[Bound]) -> float:
    """Return the scale at which random pairs of models lose `share` of their speed on average."""
    pairs = [LOSSES[pair] for pair in permutations(bounds, 2)]
    low, high = 0.0, 1e3
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2.0
        mean = sum(1.0 - math.exp(-middle * loss) for loss in pairs) / max(1, len(pairs))
        low, high = (middle, high) if mean < share else (low, middle)
    return high


Amounts = Sequence[float]  # cores, PCIe bytes/s, sent network bytes/s
# A node of Harmony's testbed has 8 cores, 2 GPUs, a NIC of 50 Gb/s. Chosen: the servers' TCP
# reaches about 12 Gb/s; PCIe reaches 4 GB/s, through the host's memory and back.
PER_SLOT: Final[Amounts] = (4.0, 2.0e9, 0.75e9)
MAX_SCALE: Final = 1e6


def capacity(slots: int) -> Amounts:
    """Return the resources of a node."""
    return [each * slots for each in PER_SLOT]


def servers_on(placement: Mapping[NodeId, int], servers: int) -> dict[NodeId, int]:
    """Return the number of a job's parameter servers on each node.

    Paper: servers are placed like workers. Here a cluster allocates only GPUs, which servers do not
    need. Servers are therefore distributed over the workers in the order of `placement`.
    """
    nodes = [node for node, many in placement.items() for _ in range(many)]
    found = dict.fromkeys(placement, 0)
    for number in range(servers):
        found[nodes[number % len(nodes)]] += 1
    return found


def node_demand(demand: Demand, placement: Mapping[NodeId, int], node: NodeId) -> Amounts:
    """Return the demand of a job at full speed on one of its nodes.

    A worker produces g gradient bytes per second. The job has w workers and p servers, of which w'
    and p' are on the node.

    - Servers: every worker sends its gradients to all servers and receives parameters. The node
      sends w' g (1 - p'/p) + (p'/p) g (w - w'), and every gradient crosses PCIe twice.
    - All-reduce: a ring crosses each node once. The node sends 2 (w - 1)/w g if the job has another
      node. The same amount crosses PCIe for each worker, if the job has at least two workers.
    """
    workers, here = sum(placement.values()), placement[node]
    rate, servers = demand.gradient_bytes_per_s, demand.servers
    if servers:
        served = servers_on(placement, servers)[node]
        share = served / servers
        cores = demand.cores * here + demand.server_cores * served
        sent = rate * (here * (1.0 - share) + share * (workers - here))
        through = 2.0 * rate
    else:
        cores = demand.cores * here
        through = 2.0 * (workers - 1) / workers * rate
        sent = through if len(placement) > 1 else 0.0
    return cores, here * (demand.input_bytes_per_s + through), sent


def stretch(demand: Demand, own: Amounts, all_of_it: Amounts, limits: Amounts) -> float:
    """Return the factor by which an overloaded node lengthens a job's step, at least 1.

    Every job gets the same share of its demand. The factor is 1 plus a sum over the resources that
    the job uses: wait x (demand / capacity - 1), where this is positive. `own` is the job's demand
    on the node, `all_of_it` the demand of all jobs on the node, and `limits` the node's capacity.
    """
    return 1.0 + sum(
        wait * max(0.0, asked / available - 1.0)
        for wait, mine, asked, available in zip(demand.waits, own, all_of_it, limits, strict=True)
        if mine > 0.0
    )


def of_resources(jobs: TrainingJobs, scale: float = 1.0) -> Interference:
    """Return the rule of overloaded resources: the worst node sets the speed of a job.

    speed = 1 / (1 + scale (stretch with all jobs / stretch alone - 1)). The workers of one job slow
    each other down even without other jobs; their full speed includes this effect.
    """

    def asks(job: JobId, node: NodeId) -> Amounts:
        return node_demand(jobs.demand(job), jobs.placement(job), node)

    def on(job: JobId, node: NodeId, here: Iterable[JobId]) -> float:
        others = [asks(other, node) for other in here if other != job]
        limits = capacity(jobs.slots(node))
        return kept(jobs.demand(job), asks(job, node), others, limits, scale) if others else 1.0

    return lambda job, at: min((on(job, node, here) for node, here in at.items()), default=1.0)


def kept(
    demand: Demand, own: Amounts, others: Iterable[Amounts], limits: Amounts, scale: float
) -> float:
    """Return the share of its speed that a job keeps on a node, in (0, 1].

    `others` are the demands of the other jobs on the node; `scale` multiplies all slow-downs.
    """
    everything = [math.fsum(parts) for parts in zip(own, *others, strict=True)]
    alone = stretch(demand, own, own, limits)
    more = stretch(demand, own, everything, limits) / alone - 1.0
    return 1.0 / (1.0 + scale * max(0.0, more))


@cache
def scale_for(share: float, demands: tuple[Demand, ...]) -> float:
    """Return the scale at which random pairs of jobs lose `share` of their speed on average.

    A pair consists of two different models on the same servers, as in Harmony's case study 2. Each
    job has one worker on each of two nodes, and its servers if any, so that it uses the network.

    Raises:
        TraceError: if the demands are too small for such a slow-down.
    """
    both = {NodeId("a"): 1, NodeId("b"): 1}
    asks = [(demand, node_demand(demand, both, NodeId("a"))) for demand in demands]
    pairs = list(permutations(asks, 2))
    limits = capacity(2)

    def mean(scale: float) -> float:
        losses = (1.0 - kept(mine, own, [its], limits, scale) for (mine, own), (_, its) in pairs)
        return sum(losses) / max(1, len(pairs))

    most = mean(MAX_SCALE)
    if most < share:
        problem = f"interference: these jobs slow each other down by at most {most:.2f} on average"
        raise TraceError(problem, "give a smaller SHARE", "interference")
    low, high = 0.0, MAX_SCALE
    for _ in range(BISECTION_STEPS):
        middle = math.sqrt(max(low, 1e-9) * high)
        low, high = (middle, high) if mean(middle) < share else (low, middle)
    return high


def make_interference(
    option: str, jobs: TrainingJobs, seed: int, demands: tuple[Demand, ...]
) -> Interference | None:
    """Return the rule that an option names, or None for `none`.

    Only `pairwise` uses `seed`. Only `class` and `resources` use `demands`: their share is a mean.
    """
    spec = parse_interference(option)
    match spec.kind:
        case "none":
            return None
        case "pollux":
            return of_spread_jobs(spec.share, lambda job: len(jobs.placement(job)) > 1)
        case "pairwise":
            return of_pairs(spec.share, seed, jobs.family)
        case "class":
            scale = class_scale(spec.share, [demand.bound for demand in demands])
            return of_classes(scale, lambda job: jobs.demand(job).bound)
        case "resources":
            return of_resources(jobs, scale_for(spec.share, demands))
        case "gavel":
            return as_measured(read_pairs(Path(spec.file)), jobs)
