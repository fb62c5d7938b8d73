"""Policy `harmony-drl`: a network places gangs where jobs disturb each other least."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

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
from controlplane.policy.learned.model_file import DenseNet
from controlplane.policy.learned.shared_nodes import (
    MAX_LOG_SLOWDOWN,
    RewardModel,
    SharedNodes,
    spread_inputs,
)
from controlplane.policy.options import Options
from controlplane.policy.placement.free_slots import with_user_batches
from controlplane.policy.placement.sizes import backfill_queue
from controlplane.policy.placement.slot_partition import (
    compose_plan,
    gang_size,
    partition_of,
    slots_in_words,
)
from controlplane.prediction import FloatArray
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of

if TYPE_CHECKING:
    from numpy.random import Generator


class HarmonyDrlOptions(Options, frozen=True):
    """Options of policy `harmony-drl`, table `[policy.options]` of the controller's settings."""

    model: str | None = None  # path of a model file; None: the shipped model
    backfill: bool = True  # start small jobs before a waiting large job if they do not delay it
    learn: bool = True  # train the reward model on reported speeds
    explore: bool = False  # True: draw nodes from the policy's probabilities; False: use the best
    seed: int = 0  # seed of the draws for `explore`

    def __post_init__(self) -> None:
        """Check that the model can be used."""
        if self.model is not None:
            load(self.model)


MIN_NAMED_COST: Final = 0.005  # share of a job's speed; smaller costs are not mentioned


def explain(choices: Sequence[Choice], nodes: Sequence[NodeId]) -> tuple[str, dict[str, float]]:
    """Return a text and numbers: the best nodes, the expected losses, and the next best node."""
    first, last = choices[0], choices[-1]
    names = list(dict.fromkeys(nodes[choice.node] for choice in choices))
    own = float(last.among.own[last.place])
    costs = math.fsum(float((one.among.costs - one.among.own)[one.place]) for one in choices)
    numbers = {"own_loss": own, "neighbours_loss": costs, "score": first.score}
    words = f"{' and '.join(names)} scored best: it keeps {100.0 * (1.0 - own):.0f}% of its speed"
    if costs < MIN_NAMED_COST:
        words += " and slows down no neighbour"
    else:
        words += f" and costs its neighbours {100.0 * costs:.0f}% of a job's speed"
    others = np.delete(first.among.scores, first.place)
    if len(others):
        at = int(np.argmax(others))
        node = int(np.delete(first.among.nodes, first.place)[at])
        numbers["next_score"] = float(others[at])
        words += f"; next is {nodes[node]} ({first.score:.2f} against {others[at]:.2f})"
    return words, numbers


class Classes:
    """Class numbers of families: first the trained ones, then others in order of appearance."""

    def __init__(self, trained: Sequence[str]) -> None:
        self._trained = {name: number for number, name in enumerate(trained)}
        self._others: dict[str, int] = {}

    def number(self, family: str) -> int:
        """Return the class number of a family; the last number is shared by all further families.

        In views, the name of a family is preceded by the name of its user and a slash.
        """
        trained = self._trained.get(family.partition("/")[2])
        if trained is not None:
            return trained
        new = min(len(self._trained) + len(self._others), CLASSES - 1)
        return self._others.setdefault(family, new)


@dataclass(slots=True)
class Situation:
    """View in the form that the networks need."""

    nodes: list[NodeId]
    shared: SharedNodes
    slots: list[list[SlotId]]  # free slots of each node

    def take(self, nodes: Sequence[int]) -> list[SlotId]:
        """Remove and return a free slot for each entry of `nodes`, node by node."""
        order = sorted(nodes, key=nodes.index)
        return [self.slots[node].pop(0) for node in order]


def situation(view: ClusterView, model: RewardModel, classes: Classes) -> Situation:
    """Return the placement and the free slots of a view; add unknown families to `classes`."""
    # A job that is changing may still need a slot after its process has exited.
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


# --- online training


def gradient_step(net: DenseNet, inputs: FloatArray, slopes: FloatArray, rate: float) -> DenseNet:
    """Return the network after one step of gradient descent.

    `inputs` have shape (rows, in). `slopes` are the derivatives of the loss by output, and have
    shape (rows, out).
    """
    taken: list[FloatArray] = [inputs]
    for weight, bias in net.layers[:-1]:
        taken.append(np.tanh(taken[-1] @ weight + bias))
    layers = []
    for (weight, bias), values in zip(reversed(net.layers), reversed(taken), strict=True):
        layers.append((weight - rate * (values.T @ slopes), bias - rate * slopes.sum(axis=0)))
        slopes = (slopes @ weight.T) * (1.0 - values**2)  # for the layer before
    return DenseNet(tuple(reversed(layers)))


MAX_REPORTS: Final = 512  # kept reports; bounds memory
STEPS_PER_BUNDLE: Final = 6  # gradient steps per call of `learn` with new reports
BATCH: Final = 64
LEARNING_RATE: Final = 0.05  # small, so that one odd report changes little
MAX_WEIGHT: Final = 20.0  # most weight of earlier reports, because a family's speed may change
MAX_SAMPLES_PER_S: Final = 1e12  # faster reports are implausible


@dataclass(frozen=True, slots=True)
class Report:
    """Reported speed of a job, with its neighbours."""

    key: Hashable  # jobs of one key are equally fast alone
    beside: FloatArray  # inputs of the reward model for the worst node
    has_neighbours: bool
    spread: FloatArray  # inputs of the reward model, shape (inputs,)
    on_several: bool
    log_speed: float


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = min(self.weight, MAX_WEIGHT) + 1.0
        self.value += (value - self.value) / self.weight


@dataclass(slots=True)
class ReportedSpeeds:
    """The reports of speeds, and the reward model that is trained on them.

    Reports are in samples per second. Jobs with the same key are equally fast alone. Their speed
    alone is the mean of reports by jobs that were alone. Without such reports it is the mean of all
    their reports, corrected by the expected loss.
    """

    model: RewardModel
    _reports: deque[Report] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))
    # Mean logarithms of the speed alone, by key, and whether the reporting jobs were alone.
    _means: dict[tuple[Hashable, bool], _Mean] = field(default_factory=dict)
    _learnt: int = 0  # number of trainings so far
    _new: int = 0  # number of reports since the last training

    def add(self, shared: SharedNodes, name: str, key: Hashable, samples_per_s: float) -> None:
        """Add a report; ignore it if its speed is implausible."""
        if not 0.0 < samples_per_s < MAX_SAMPLES_PER_S:
            return
        job, seen = shared.jobs[name], shared.look(name)
        beside = np.where(seen.others.sum(axis=1) > 0.0, self.model.beside(seen), -1.0)
        nodes, worst = len(job.workers), int(np.argmax(beside))
        report = Report(
            key=key,
            beside=seen.inputs()[worst],
            has_neighbours=bool(beside[worst] >= 0.0),
            spread=spread_inputs(job.number, job.size, nodes, self.model.classes)[0],
            on_several=nodes > 1,
            log_speed=math.log(samples_per_s),
        )
        expected = max(0.0, float(beside[worst])) + self.model.spread(job.number, job.size, nodes)
        is_alone = not report.has_neighbours and not report.on_several
        self._means.setdefault((key, is_alone), _Mean()).add(report.log_speed + expected)
        self._reports.append(report)
        self._new += 1

    def log_speed_alone(self, key: Hashable) -> float:
        """Return the logarithm of the speed alone of jobs with this key; -inf: not reported."""
        known = self._means.get((key, True)) or self._means.get((key, False))
        return -math.inf if known is None else known.value

    def learn(self) -> None:
        """Train the reward model if there are new reports."""
        if self._new and len(self._reports) >= BATCH // 4:
            self._new = 0
            rng = default_rng((self._learnt, len(self._reports)))
            self._learnt += 1
            for _ in range(STEPS_PER_BUNDLE):
                rows = rng.integers(len(self._reports), size=BATCH)
                self._step([self._reports[row] for row in rows])

    def _step(self, reports: list[Report]) -> None:
        """Run one step of least squares on logarithms."""
        beside = np.array([one.beside for one in reports])
        spread = np.array([one.spread for one in reports])
        has = np.array([one.has_neighbours for one in reports])
        several = np.array([one.on_several for one in reports])
        by_others = self.model.beside_net(beside)[:, 0]
        by_nodes = self.model.spread_net(spread)[:, 0]
        expected = np.where(has, np.logaddexp(0.0, by_others), 0.0)
        expected += np.where(several, by_nodes, 0.0)
        found = np.array([self.log_speed_alone(one.key) - one.log_speed for one in reports])
        error = (expected - np.clip(found, -MAX_LOG_SLOWDOWN, MAX_LOG_SLOWDOWN)) / len(reports)
        sigmoid = np.exp(-np.logaddexp(0.0, -by_others))
        slopes = (error * has * sigmoid)[:, None], (error * several)[:, None]
        self.model = RewardModel(
            gradient_step(self.model.beside_net, beside, slopes[0], LEARNING_RATE),
            gradient_step(self.model.spread_net, spread, slopes[1], LEARNING_RATE),
            self.model.classes,
        )


# --- the policy


class HarmonyDrl(ImmediatePolicy):
    """Policy that places gangs of the wanted size in order of arrival, and moves no job.

    Gangs are placed worker by worker. See the README of this folder.

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
        self._seen: Situation | None = None  # situation of the last view

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from a reported speed if the job is where the last view showed it."""
        match event:
            case StepsSeen() | EpochSeen() if self.options.learn and self._seen is not None:
                if isinstance(event, EpochSeen) and not event.whole:
                    return
                shared = self._seen.shared
                job = shared.jobs.get(event.job)
                if job is None or (job.size, len(job.workers)) != (event.slots, event.nodes):
                    return
                key = (event.family, event.slots, event.global_batch)
                self._reports.add(shared, event.job, key, event.samples_per_s)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Train the reward model, and record the places of jobs; return False."""
        self._reports.learn()
        self._seen = situation(view, self._reports.model, self._classes)
        return False

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return a plan that keeps running jobs and starts the next queued jobs that fit."""
        partition = partition_of(view, now)
        current = situation(view, self._reports.model, self._classes)
        room = int(current.shared.free.sum())
        placed = {job.job: list(job.running_on) for job in partition.running}
        partition.room = room + sum(map(len, placed.values()))  # excludes slots being left
        queue = backfill_queue(partition, self._remaining_s, backfill=self.options.backfill)
        explained: dict[JobId, tuple[str, dict[str, float]]] = {}
        for name, size in queue.sizes.items():
            if name not in placed:
                current.shared.add(name, self._classes.number(view.jobs[name].family), size)
                choose = self._choose(name, view.version)
                choices = place_gang(current.shared, self._actor, name, choose)
                placed[name] = current.take([choice.node for choice in choices])
                explained[name] = explain(choices, current.nodes)

        def why(job: JobView, slots: int) -> tuple[str, dict[str, float]]:
            if slots:
                words, numbers = explained[job.job]
                passed = queue.before.get(job.job)
                return words + (f"; it does not delay {passed}" if passed else ""), numbers
            needs, ahead = gang_size(job, partition), queue.ahead.get(job.job, 0)
            behind = f" behind {ahead} job{'s' * (ahead != 1)}" if ahead else ""
            words = f"for {slots_in_words(needs)}{behind}, {room} were free"
            return words, {"needs": float(needs), "free": float(room), "ahead": float(ahead)}

        return compose_plan(partition, with_user_batches(partition, placed), why)

    def _remaining_s(self, job: JobView, slots: int) -> float:
        """Return the seconds for the stated remaining work, or infinity if unknown."""
        if job.stop_samples is None:
            return math.inf
        speed = job.samples_per_s if job.running_on else 0.0
        alone = self._reports.log_speed_alone((job.family, slots, job.batch_size))
        speed = speed or math.exp(alone)
        return max(0.0, job.stop_samples - job.samples_done) / speed if speed else math.inf

    def _choose(self, job: JobId, version: int) -> Choose:
        if not self.options.explore:
            return best
        return sampled(default_rng((self.options.seed, version, *job.encode())))
