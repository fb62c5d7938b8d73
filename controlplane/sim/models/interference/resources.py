"""Slow-downs from what jobs ask of a node: cores, PCIe and the network, never the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from typing import Final

from controlplane.sim.models.interference.demands import Demand
from controlplane.sim.models.interference.rule import TrainingJobs
from controlplane.sim.simulator_errors import TraceError
from schemas.ids import JobId, NodeId

Amounts = tuple[float, float, float]  # cores, PCIe bytes/s, network bytes/s that are sent
# A node of Harmony's testbed has 8 cores, 2 GPUs, a NIC of 50 Gb/s. Of that NIC the servers' TCP
# reaches about 12 Gb/s; chosen. PCIe: 4 GB/s, through the host's memory and back; chosen.
PER_SLOT: Final[Amounts] = (4.0, 2.0e9, 0.75e9)
MOST_SCALE: Final = 1e6
STEPS: Final = 60  # of a bisection


def servers_on(placement: Mapping[NodeId, int], servers: int) -> dict[NodeId, int]:
    """Parameter servers on each node of a job.

    Paper: servers are placed like workers. Here a cluster gives out GPUs, and servers, which need
    none, go along: they are dealt out to the workers in rank order.

    Args:
        placement: workers on each node, in rank order.
    """
    nodes = [node for node, many in placement.items() for _ in range(many)]
    found = dict.fromkeys(placement, 0)
    for number in range(servers):
        found[nodes[number % len(nodes)]] += 1
    return found


def node_demand(demand: Demand, placement: Mapping[NodeId, int], node: NodeId) -> Amounts:
    """What a job at full speed asks of one of its nodes.

    With g gradient bytes per second of one worker, w workers and p servers in all, w' and p' here:

    - servers: every worker sends its gradients to all servers and gets parameters back. What
      leaves the node is w' g (1 - p'/p) + (p'/p) g (w - w'), and every gradient passes PCIe twice;
    - all-reduce: a ring passes each node once, and 2 (w - 1)/w g leaves it where there is another
      node; as much passes PCIe for every worker, where there are two.

    Args:
        placement: its workers on each node, in rank order.
        node: one of these.
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


def stretch(demand: Demand, own: Amounts, all_of_it: Amounts, capacity: Amounts) -> float:
    """How many times as long a step takes where a node is asked for more than it has.

    1 + the sum over resources of wait x (asked / capacity - 1), where that is above 0 and the job
    itself uses the resource: everybody gets the same share of what he asks for.

    Args:
        own: what the job asks of the node.
        all_of_it: what all jobs there ask of it.
    """
    return 1.0 + sum(
        wait * max(0.0, asked / there - 1.0)
        for wait, mine, asked, there in zip(demand.waits, own, all_of_it, capacity, strict=True)
        if mine > 0.0
    )


@dataclass(slots=True)
class ResourceInterference:
    """A job is as fast as on its worst node, beside what it would be there by itself.

    speed = 1 / (1 + scale (stretch with all / stretch alone - 1)): what a job's own workers do to
    each other is part of its speed alone.
    """

    jobs: TrainingJobs
    scale: float = 1.0

    def remaining_speed(self, job: JobId, at: Mapping[NodeId, Mapping[JobId, int]]) -> float:
        """What its worst node leaves."""
        return min((self._on(job, node, here) for node, here in at.items()), default=1.0)

    def _on(self, job: JobId, node: NodeId, here: Mapping[JobId, int]) -> float:
        demand, own = self.jobs.demand(job), self._asks(job, node)
        others = [self._asks(other, node) for other in here if other != job]
        if not others:
            return 1.0
        slots = self.jobs.slots(node)
        capacity = (PER_SLOT[0] * slots, PER_SLOT[1] * slots, PER_SLOT[2] * slots)
        return kept(demand, own, others, capacity, self.scale)

    def _asks(self, job: JobId, node: NodeId) -> Amounts:
        return node_demand(self.jobs.demand(job), self.jobs.placement(job), node)


def kept(
    demand: Demand, own: Amounts, others: Iterable[Amounts], capacity: Amounts, scale: float
) -> float:
    """The share of its speed that a job keeps on a node, in (0, 1].

    Args:
        others: what each other job asks of it; their order does not matter.
        scale: of all slow-downs, 1 for those of the demands as they are.
    """
    parts = [own, *others]
    everything = (
        math.fsum(part[0] for part in parts),
        math.fsum(part[1] for part in parts),
        math.fsum(part[2] for part in parts),
    )
    alone = stretch(demand, own, own, capacity)
    more = stretch(demand, own, everything, capacity) / alone - 1.0
    return 1.0 / (1.0 + scale * max(0.0, more))


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two jobs with a worker, and a server if there are any, on each of two nodes of two slots."""

    mine: Demand
    other: Demand
    own: Amounts = field(init=False)
    its: Amounts = field(init=False)

    def __post_init__(self) -> None:
        both = {NodeId("a"): 1, NodeId("b"): 1}
        object.__setattr__(self, "own", node_demand(self.mine, both, NodeId("a")))
        object.__setattr__(self, "its", node_demand(self.other, both, NodeId("a")))

    def loss(self, scale: float) -> float:
        """The share of its speed that the first one loses."""
        capacity = (2 * PER_SLOT[0], 2 * PER_SLOT[1], 2 * PER_SLOT[2])
        return 1.0 - kept(self.mine, self.own, [self.its], capacity, scale)


@cache
def scale_for(share: float, demands: tuple[Demand, ...]) -> float:
    """The scale at which random pairs of jobs lose so much of their speed on average.

    Pairs as in Harmony's case study 2, two different models on the same servers, but that both
    have a worker (and a server, if any) on each of two nodes, so that they use the network.

    Args:
        share: mean over both jobs of all pairs, in (0, 1).

    Raises:
        TraceError: if they ask for too little to slow each other down so much.
    """
    pairs = [_Pair(mine, other) for mine, other in permutations(demands, 2)]

    def mean(scale: float) -> float:
        return sum(pair.loss(scale) for pair in pairs) / max(1, len(pairs))

    most = mean(MOST_SCALE)
    if most < share:
        what = f"interference: these jobs slow each other down by at most {most:.2f} on average"
        raise TraceError(what, "give a smaller SHARE", "interference")
    low, high = 0.0, MOST_SCALE
    for _ in range(STEPS):
        middle = math.sqrt(max(low, 1e-9) * high)
        low, high = (middle, high) if mean(middle) < share else (low, middle)
    return high
