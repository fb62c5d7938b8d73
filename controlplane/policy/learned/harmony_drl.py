"""Policy `harmony-drl`: a network places gangs where jobs disturb each other least (INFOCOM 2019).

Also here: the view as the networks take it, and the reasons for a job's place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.random import default_rng

from controlplane.policy.api import (
    Budget,
    ClusterView,
    EpochSeen,
    ImmediatePolicy,
    JobView,
    Plan,
    PolicyEvent,
    StepsSeen,
)
from controlplane.policy.learned.gang_model import (
    CLASSES,
    Choice,
    Choose,
    TrainedModel,
    best,
    load,
    place_gang,
    sampled,
)
from controlplane.policy.learned.reported_speeds import ReportedSpeeds
from controlplane.policy.learned.shared_nodes import RewardModel, SharedNodes
from controlplane.policy.placement.free_slots import with_user_batches
from controlplane.policy.placement.shares import backfill_queue
from controlplane.policy.placement.slot_partition import (
    compose_plan,
    gang_size,
    partition_of,
    slots_in_words,
)
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of

if TYPE_CHECKING:
    from numpy.random import Generator


class HarmonyDrlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `harmony-drl`, table `[policy.options]` of the controller's settings."""

    model: str | None = None  # path of a model file; None: the shipped model
    backfill: bool = True  # start small jobs before a large one that waits, without delaying it
    learn: bool = True  # train the reward model on reported speeds
    explore: bool = False  # draw nodes from the policy's probabilities; else the best
    seed: int = 0  # for `explore`

    def __post_init__(self) -> None:
        """Check that the model can be used."""
        if self.model is not None:
            load(self.model)


MIN_NAMED_COST: Final = 0.005  # share of a job's speed below which a cost is not mentioned


@dataclass(frozen=True, slots=True)
class Explained:
    """Reason for a job's place."""

    words: str
    numbers: dict[str, float] = field(default_factory=dict)


def explain(choices: Sequence[Choice], nodes: Sequence[NodeId]) -> Explained:
    """Return the nodes with the best scores, the expected losses there, and the next best node."""
    first, last = choices[0], choices[-1]
    names = list(dict.fromkeys(nodes[choice.node] for choice in choices))
    own = float(last.among.own[last.place])
    costs = math.fsum(float((one.among.costs - one.among.own)[one.place]) for one in choices)
    numbers = {"own_loss": own, "neighbours_loss": costs, "score": first.score}
    words = f"{' and '.join(names)} scored best: {_expected_words(own, costs)}"
    others = np.delete(first.among.scores, first.place)
    if len(others):
        at = int(np.argmax(others))
        node = int(np.delete(first.among.nodes, first.place)[at])
        numbers["next_score"] = float(others[at])
        words += f"; next is {nodes[node]} ({first.score:.2f} against {others[at]:.2f})"
    return Explained(words, numbers)


def wait_reason(needs: int, free: int, ahead: int) -> tuple[str, dict[str, float]]:
    """Return the reason for a wait; `free` are the free slots before any start."""
    behind = f" behind {ahead} job{'s' * (ahead != 1)}" if ahead else ""
    text = f"for {slots_in_words(needs)}{behind}, {free} were free"
    return text, {"needs": float(needs), "free": float(free), "ahead": float(ahead)}


def _expected_words(own: float, neighbours: float) -> str:
    mine = f"it keeps {100.0 * (1.0 - own):.0f}% of its speed"
    if neighbours < MIN_NAMED_COST:
        return f"{mine} and costs no neighbour any"
    return f"{mine} and costs its neighbours {100.0 * neighbours:.0f}% of one job's"


class Classes:
    """Numbers of families: the trained ones, then others in the order of their appearance."""

    def __init__(self, trained: Sequence[str]) -> None:
        self._trained = {name: number for number, name in enumerate(trained)}
        self._others: dict[str, int] = {}

    def number(self, family: str) -> int:
        """Return the number of a family; the last number stands for all further families.

        Views put the name of its user before a family that a job file states.
        """
        trained = self._trained.get(family.partition("/")[2])
        if trained is not None:
            return trained
        known = self._others.get(family)
        if known is None:
            known = min(len(self._trained) + len(self._others), CLASSES - 1)
            self._others[family] = known
        return known


@dataclass(slots=True)
class Situation:
    """A view as the networks take it."""

    nodes: list[NodeId]
    shared: SharedNodes
    slots: list[list[SlotId]]  # free slots of each node

    def take(self, nodes: Sequence[int]) -> list[SlotId]:
        """Take a free slot of each node, node by node."""
        order = sorted(nodes, key=nodes.index)
        return [self.slots[node].pop(0) for node in order]


def situation(view: ClusterView, model: RewardModel, classes: Classes) -> Situation:
    """Return the placement and the free slots of a view; adds unknown families to `classes`."""
    # A job that is changing may still need a slot whose process has exited.
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    free: dict[NodeId, list[SlotId]] = {slot.node: [] for slot in view.slots}
    sizes = dict.fromkeys(free, 0)
    for slot in view.slots:
        sizes[slot.node] += 1
        if slot.usable and slot.slot not in held:
            free[slot.node].append(slot.slot)
    nodes = list(free)
    place = {node: number for number, node in enumerate(nodes)}
    shared = SharedNodes(model, [sizes[node] for node in nodes])
    for job in view.jobs.values():
        number = classes.number(job.family)
        on = [place[node_of(slot)] for slot in job.running_on if node_of(slot) in place]
        if on:
            shared.add(job.job, number, len(on))
            for node in dict.fromkeys(on):
                shared.put(job.job, node, on.count(node), predict=False)
    shared.predict(range(len(nodes)))
    shared.free = np.array([len(free[node]) for node in nodes], dtype=np.int64)
    return Situation(nodes, shared, [free[node] for node in nodes])


class HarmonyDrl(ImmediatePolicy):
    """Places gangs of the wanted size in order of arrival, worker by worker; moves no job.

    See the README of this folder.

    Raises:
        SettingsError: if the model cannot be used.
    """

    def __init__(
        self, options: HarmonyDrlOptions | None = None, model: TrainedModel | None = None
    ) -> None:
        self.options = options or HarmonyDrlOptions()
        trained = model or load(self.options.model)
        self._actor = trained.actor
        self._reports = ReportedSpeeds(trained.reward)
        self._classes = Classes(trained.families)
        self._seen: Situation | None = None  # of the last view

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from a speed if the job is where the last view showed it."""
        match event:
            case StepsSeen() | EpochSeen() if self.options.learn and self._seen is not None:
                if isinstance(event, EpochSeen) and not event.whole:
                    return
                shared = self._seen.shared
                job = shared.jobs.get(event.job)
                if job is None or (job.size, len(job.workers)) != (event.slots, event.nodes):
                    return
                key = _key(event.family, event.slots, event.global_batch)
                self._reports.add(shared, event.job, key, event.samples_per_s)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Record the places of jobs, and train the reward model."""
        self._reports.learn()
        self._seen = situation(view, self._reports.model, self._classes)
        return False

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Keep what runs; place the next jobs in the queue as long as there is room."""
        partition = partition_of(view, now)
        current = situation(view, self._reports.model, self._classes)
        room = int(current.shared.free.sum())
        placed = {job.job: list(job.running_on) for job in partition.running}
        partition.room = room + sum(map(len, placed.values()))  # without slots that are leaving
        queue = backfill_queue(partition, self._remaining_s, backfill=self.options.backfill)
        explained: dict[JobId, Explained] = {}
        for name, size in queue.sizes.items():
            if name not in placed:
                current.shared.add(name, self._classes.number(view.jobs[name].family), size)
                choose = self._choose(name, view.version)
                choices = place_gang(current.shared, self._actor, name, choose)
                placed[name] = current.take([choice.node for choice in choices])
                explained[name] = explain(choices, current.nodes)

        def why(job: JobView, slots: int) -> tuple[str, dict[str, float]]:
            if slots:
                one = explained[job.job]
                passed = queue.before.get(job.job)
                return one.words + (f"; it does not delay {passed}" if passed else ""), one.numbers
            return wait_reason(gang_size(job, partition), room, queue.ahead.get(job.job, 0))

        return compose_plan(partition, with_user_batches(partition, placed), why)

    def _remaining_s(self, job: JobView, slots: int) -> float:
        """Return the stated rest at the speed of the job or its family; infinite if unknown."""
        if job.stop_samples is None:
            return math.inf
        speed = job.samples_per_s if job.running_on else 0.0
        speed = speed or self._reports.speed_alone(_key(job.family, slots, job.batch_size))
        return max(0.0, job.stop_samples - job.samples_done) / speed if speed else math.inf

    def _choose(self, job: JobId, version: int) -> Choose:
        if not self.options.explore:
            return best
        return sampled(default_rng((self.options.seed, version, *job.encode())))


def _key(family: str, slots: int, batch: int) -> tuple[str, int, int]:
    return family, slots, batch
