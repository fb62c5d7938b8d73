"""Slow-downs by GPU types and shared cores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from controlplane.policy.api import ClusterView, JobEnded, JobView, PolicyEvent, SlotView, StepsSeen
from controlplane.policy.search.cluster_index import ClusterIndex
from controlplane.policy.search.observed_families import FamilyHistories, FamilyRecord
from controlplane.prediction import FloatArray
from controlplane.prediction.slowdowns import stretch
from controlplane.prediction.throughput import PRIOR_SCALING, Scaling
from schemas.ids import JobId, NodeId, SlotId

MIN_SCALING: Final = 0.7  # least prior exponent; below it no job would try two slots
ALIKE: Final = 0.05  # log step time; smaller differences are noise


class LearnedSlowdowns:
    """Slow-downs by GPU type; an unmeasured type uses the mean of other families.

    These means are also stored as the priors of `families`.
    """

    def __init__(self, families: FamilyHistories) -> None:
        self._families = families
        self._prior_edition = -1  # sum of the families' editions
        self._assumed_types: dict[str, float] = {}  # log step times by type that the models assume

    def by_type(self, types: Sequence[str], families: Sequence[str]) -> FloatArray | None:
        """Return each job's step time by GPU type, divided by that on its fastest type, (J, types).

        Return None if the types do not differ.
        """
        self._update_priors()
        if len(types) < 2:  # noqa: PLR2004 - one is like itself
            return None
        rows = {
            name: np.array(self._families[name].costs(types)) for name in dict.fromkeys(families)
        }
        found = np.array([rows[name] - rows[name].min() for name in families])
        return np.exp(found) if np.abs(found).max(initial=0.0) > ALIKE else None

    def _update_priors(self) -> None:
        """Recompute the means over families, which serve as priors, if a family has changed."""
        families = self._families.values()
        editions = sum(family.edition for family in families)
        if editions == self._prior_edition:
            return
        self._prior_edition = editions
        gpu_types: dict[str, list[float]] = {}
        for family in families:
            if len(family.parts.gpu_types) > 1:
                middle = sum(family.parts.gpu_types.values()) / len(family.parts.gpu_types)
                for gpu_type, cost in family.parts.gpu_types.items():
                    gpu_types.setdefault(gpu_type, []).append(cost - middle)
        means = {gpu_type: sum(found) / len(found) for gpu_type, found in gpu_types.items()}
        if _differ(means, self._assumed_types):  # a different type may be the fastest now
            self._assumed_types = means
            for family in families:
                family.model = None
        self._update_scaling(families)
        self._families.priors.gpu_types = means

    def _update_scaling(self, families: Collection[FamilyRecord]) -> None:
        """Update the prior speed-up of families that were never measured on several slots."""
        known = [family.scaling() for family in families]
        to_two = _with_prior(PRIOR_SCALING.to_two, [found for found, _ in known])
        beyond = _with_prior(PRIOR_SCALING.beyond, [found for _, found in known])
        mean, former = Scaling(max(to_two, MIN_SCALING), beyond), self._families.priors.scaling
        if max(abs(mean.to_two - former.to_two), abs(mean.beyond - former.beyond)) <= ALIKE:
            return
        self._families.priors.scaling = mean
        for family in families:
            if family.model is not None and family.model.near is None:
                family.model = None


def _differ(one: dict[str, float], other: dict[str, float]) -> bool:
    return one.keys() != other.keys() or any(abs(one[k] - other[k]) > ALIKE for k in one)


def _with_prior(prior: float, seen: Sequence[float | None]) -> float:
    """Return the mean of the measurements and the prior, which has the weight of one of them."""
    measured = [found for found in seen if found is not None]
    return (prior + sum(measured)) / (1 + len(measured))


OLD_WEIGHT: Final = 0.8  # weight of the old value at each report
IDLE_CORES: Final = 0.35  # cores; a worker that uses no more mostly waits; a judgement
BUSY_SHARE: Final = 0.85  # share of all cores; if more are used, demand is unknown


class CoreDemand:
    """An estimate of the cores that workers really need, by which the search's view is scaled.

    A worker of one thread is assumed to need one core. If all jobs' workers use much less, because
    they wait for a device, for data or for each other, a host has room for more workers.
    """

    def __init__(self) -> None:
        self._jobs: dict[JobId, float] = {}  # cores used by one worker
        self._families: dict[str, float] = {}
        self._slots: tuple[SlotView, ...] = ()  # slots of the last view
        self._shown: tuple[float, tuple[SlotView, ...]] = (1.0, ())

    def observe(self, event: PolicyEvent) -> None:
        """Record the cores that workers use; drop a job that ended."""
        match event:
            case StepsSeen(cpu_cores=float(cores)):
                before = self._jobs.get(event.job, cores)
                self._jobs[event.job] = OLD_WEIGHT * before + (1.0 - OLD_WEIGHT) * cores
                before = self._families.get(event.family, cores)
                self._families[event.family] = OLD_WEIGHT * before + (1.0 - OLD_WEIGHT) * cores
            case JobEnded():
                self._jobs.pop(event.job, None)

    def shown(self, view: ClusterView) -> ClusterView:
        """Return the view with the number of cores of each slot divided by a worker's demand.

        The search then assumes that a worker needs one core.
        """
        if not any(slot.cores for slot in view.slots):
            return view
        demand = self._demand(view)
        if demand == 1.0:
            return view
        if self._slots is not view.slots or self._shown[0] != demand:
            slots = tuple(replace(one, cores=int(one.cores / demand)) for one in view.slots)
            self._slots, self._shown = view.slots, (demand, slots)
        return replace(view, slots=self._shown[1])

    def _demand(self, view: ClusterView) -> float:
        """Return the cores of one worker of the most demanding job, rounded up to 1, 1/2, 1/4, ...

        The coarse steps keep the result steady.
        """
        most, used = 0.0, 0.0
        for job in view.jobs.values():
            cores = self._of(job)
            if cores > IDLE_CORES:
                return 1.0
            most = max(most, cores)
            used += cores * len(job.running_on)
        hosts = {slot.node: slot.cores for slot in view.slots}
        if not view.jobs or used > BUSY_SHARE * sum(hosts.values()):
            return 1.0
        demand = 1.0
        while demand / 2.0 >= most and demand > 1.0 / 64.0:
            demand /= 2.0
        return demand

    def _of(self, job: JobView) -> float:
        """Return the cores that a job's worker uses: measured, its family's, the mean, or one."""
        known = self._jobs.get(job.job, self._families.get(job.family))
        if known is not None:
            return known
        families = self._families.values()
        return sum(families) / len(families) if families else 1.0


class PlacementIndex:
    """Placement of jobs in the last view; derived data is computed on demand."""

    def __init__(self) -> None:
        self._view: ClusterView | None = None
        self._nodes: dict[SlotId, NodeId] = {}
        self._kinds: dict[SlotId, str] = {}
        self.types: tuple[str, ...] = ()  # GPU types in the cluster
        self._stretch: dict[NodeId, float] = {}  # factor of step times on nodes with shared cores
        self.cores = math.inf  # most cores of any node; infinite if none are shared

    def update(self, view: ClusterView) -> None:
        """Replace the view."""
        if self._view is None or self._view.slots is not view.slots:
            self._nodes = {slot.slot: slot.node for slot in view.slots}
            self._kinds = {slot.slot: slot.model for slot in view.slots}
            self.types = tuple(dict.fromkeys(self._kinds.values()))
            shared = any(slot.cores for slot in view.slots)
            self._stretch = stretches(view) if shared else {}
            self.cores = ClusterIndex.of(view).most_cores if shared else math.inf
        self._view = view

    def gpu_type(self, job: JobId) -> str:
        """Return a job's GPU types, joined by a plus; empty if unknown, or all are alike."""
        found = self._seen(job)
        if found is None or len(self.types) <= 1:
            return ""
        return "+".join(sorted({self._kinds.get(slot, "") for slot in found.running_on}))

    def is_changing(self, job: JobId) -> bool:
        """True if the job is changing, and so does not train on the slots of the view yet."""
        found = self._seen(job)
        return found is not None and not found.movable

    def stretch(self, job: JobId) -> float:
        """Return the factor by which shared cores lengthen steps; unknown job: the worst factor."""
        if not self._stretch:
            return 1.0
        found = self._seen(job)
        nodes = self._nodes_of(found) if found is not None else self._stretch.keys()
        return max((self._stretch.get(node, 1.0) for node in nodes), default=1.0)

    def _seen(self, job: JobId) -> JobView | None:
        return self._view.jobs.get(job) if self._view is not None else None

    def _nodes_of(self, job: JobView) -> set[NodeId]:
        return {self._nodes[slot] for slot in job.running_on if slot in self._nodes}


def stretches(view: ClusterView) -> dict[NodeId, float]:
    """Return the factor of step times on each node that has more slots than cores."""
    slots = Counter(slot.node for slot in view.slots)
    busy = Counter(slot.node for slot in view.slots if not slot.usable)
    cores = {slot.node: slot.cores for slot in view.slots}
    return {
        node: stretch(busy[node], cores[node])
        for node, many in slots.items()
        if 0 < cores[node] < many
    }
