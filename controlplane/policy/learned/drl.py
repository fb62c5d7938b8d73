"""Sizes chosen by a network, one job at a time (ONES section 4.1, after Gong et al., IWQoS '19).

In a round, actions change the sizes one by one until the round ends. The actor scores every job
with one small network, and the end of the round with another. Their inputs describe each job and
the cluster by numbers of the order of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np

from controlplane.policy.api import ClusterView, ImmediatePolicy, JobView, Plan, PolicyEvent
from controlplane.policy.learned.model_file import (
    LearnedModel,
    dense_net,
    dense_shapes,
    read_model,
    softmax,
)
from controlplane.policy.options import MIN_ROUND_S, Count, Options, Within
from controlplane.policy.placement.free_slots import Moves
from controlplane.policy.placement.placers import PlacerName, make_placer
from controlplane.policy.placement.sizes import Rounds, fit_targets
from controlplane.policy.placement.slot_partition import (
    Partition,
    partition_of,
    slots_in_words,
    useful_slots,
)
from controlplane.policy.search.observed_jobs import ObservedJobs
from controlplane.prediction import BoolArray, FloatArray, IntArray
from controlplane.prediction.step_times import steps_at
from schemas.ids import JobId, Seconds

INPUTS_VERSION: Final = 1  # increased when the meaning of an input changes
JOB_INPUTS: Final = 15
CLUSTER_INPUTS: Final = 10
SLOT_SCALE: Final = 8.0  # unit for numbers of slots
LOG_SCALE: Final = 8.0  # about log(seconds of an hour)
MIN_STEP_S: Final = 1e-6  # lower bound of a step time


@dataclass(frozen=True, slots=True)
class JobTable:
    """The N jobs that a round decides about; arrays have shape (N,) unless stated otherwise."""

    have: IntArray  # current slots
    least: IntArray
    cap: IntArray  # most slots that the job may have and can use; at least `least`
    wanted: IntArray
    batch: IntArray  # global, samples per step
    coefficients: FloatArray  # coefficients of step times, shape (N, 4)
    steps_left: FloatArray
    known: BoolArray  # False: the length is a guess
    age_s: FloatArray  # seconds since submission
    still_s: FloatArray  # seconds since the last change of the group, or since the wait began
    room: int  # number of slots for all jobs

    def step_s(self, slots: IntArray) -> FloatArray:
        """Return the seconds of a step of each job, shape (N,), on at least 1 slot each."""
        times = steps_at(self.coefficients, slots[:, None], self.batch[:, None])[:, 0]
        return np.maximum(times, MIN_STEP_S)


def job_inputs(table: JobTable, sizes: IntArray) -> FloatArray:
    """Return the network's inputs for each job with its `sizes` so far, shape (N, JOB_INPUTS).

    DL2's state is the type, the age, the remaining work, the dominant share and the workers of each
    job. In the paper a type is an index. Here it is what was measured of jobs with that script and
    model, which also describes new types.
    """
    runs = sizes > 0
    now = np.maximum(sizes, table.least)
    step_s = table.step_s(now)
    grown_s = table.step_s(now + 1)
    fewer = np.maximum(now - 1, 1)
    shrunk_s = table.step_s(fewer)
    saved_s = np.maximum(0.0, step_s - grown_s) * table.steps_left
    lost_s = np.maximum(0.0, shrunk_s - step_s) * table.steps_left
    columns = (
        runs,
        sizes / SLOT_SCALE,
        sizes / max(1, table.room),  # dominant share
        np.log1p(table.age_s) / LOG_SCALE,
        np.log1p(step_s * table.steps_left) / LOG_SCALE,  # remaining seconds at this size
        table.known,
        table.wanted / SLOT_SCALE,
        table.least / SLOT_SCALE,
        np.log10(step_s),
        np.clip(1.0 - grown_s / step_s, -1.0, 1.0),  # gain of one more slot
        np.clip(shrunk_s / step_s - 1.0, -1.0, 1.0),  # cost of one slot less
        np.log1p(saved_s) / LOG_SCALE,
        np.log1p(lost_s) / LOG_SCALE,
        np.log1p(table.still_s) / LOG_SCALE,
        (sizes - table.have) / SLOT_SCALE,  # change so far in this round
    )
    return np.column_stack([np.asarray(column, dtype=np.float64) for column in columns])


def cluster_inputs(table: JobTable, sizes: IntArray, jobs: FloatArray) -> FloatArray:
    """Return the inputs for the cluster, shape (CLUSTER_INPUTS,), from `sizes` and `job_inputs`."""
    waits = sizes == 0
    waiting, running = int(waits.sum()), int((~waits).sum())
    free = table.room - int(sizes.sum())
    fits = waits & (table.least <= free)
    grows = ~waits & (sizes < table.cap)
    shrinks = ~waits & (sizes > table.least)
    queued_s = float((table.least * table.step_s(table.least) * table.steps_left)[waits].sum())
    return np.array(
        [
            free / max(1, table.room),
            min(free, 2.0 * SLOT_SCALE) / SLOT_SCALE,
            np.log1p(waiting) / 4.0,
            np.log1p(running) / 4.0,
            table.room / max(1, running + waiting) / SLOT_SCALE,
            np.log1p(queued_s / max(1, table.room)) / LOG_SCALE,  # time to finish all waiting work
            float(fits.any()),
            jobs[grows, 11].max(initial=0.0),  # greatest time that one more slot saves
            jobs[shrinks, 12].min(initial=2.0),  # least time that one slot less costs
            float((sizes != table.have).any()),
        ]
    )


POLICY: Final = "drl"
HIDDEN: Final = 32  # units of each hidden layer
ACTIONS: Final = 3  # actions per job
MORE: Final = 0
FEWER: Final = 1
SAME: Final = 2
JOB_NET: Final = (JOB_INPUTS + CLUSTER_INPUTS, HIDDEN, HIDDEN, ACTIONS)  # widths of the layers
END_NET: Final = (CLUSTER_INPUTS, HIDDEN, 1)
SHAPES: Final[Mapping[str, tuple[int, ...]]] = {
    **dense_shapes("job", JOB_NET),
    **dense_shapes("end", END_NET),
}


class Actor:
    """Networks that score the actions of a round.

    Every job is scored by the same network, from its own inputs and those of the cluster. So a
    model works for any number of jobs and slots. It works for new types of jobs too, because types
    are described by measurements and not by an index.
    """

    def __init__(self, arrays: Mapping[str, FloatArray]) -> None:
        self._job = dense_net("job", arrays)
        self._end = dense_net("end", arrays)

    def logits(self, jobs: FloatArray, cluster: FloatArray) -> FloatArray:
        """Return the logits of all actions, legal or not, shape (3 N + 1,).

        The order is "more", "fewer" and "same" for each job in turn, then the end of the round.
        """
        both = np.hstack((jobs, np.broadcast_to(cluster, (len(jobs), len(cluster)))))
        end = self._end(cluster[None, :])
        return np.concatenate((self._job(both).ravel(), end.ravel()))


SHIPPED: Final = {None: "drl.npz", "shortest-first": "drl_shortest_first.npz"}


def read_actor_model(file: str | None) -> LearnedModel:
    """Return the checked `drl` model in `file`, which may be a name of `SHIPPED`.

    Raises:
        SettingsError: if the model cannot be used.
    """
    name, path = SHIPPED.get(file, SHIPPED[None]), None if file in SHIPPED else file
    return read_model(path, name, policy=POLICY, features=INPUTS_VERSION, shapes=SHAPES)


@dataclass(frozen=True, slots=True)
class DecisionInput:
    """Input for the choice of one action: 3 actions for each of N jobs, or the end of the round."""

    jobs: FloatArray  # shape (N, JOB_INPUTS)
    cluster: FloatArray  # shape (CLUSTER_INPUTS,)
    legal: BoolArray  # shape (3 N + 1,)
    table: JobTable
    sizes: IntArray  # sizes so far, shape (N,)


Choose = Callable[[DecisionInput], int]


class DecisionRound:
    """Round that applies actions to sizes, and determines which actions are legal.

    "More" gives a running job one slot, and a waiting job its minimum. "Fewer" takes one slot. From
    a job at its minimum it takes all slots, which is legal only with `preempt`. "Same" keeps a job
    unchanged for this round. So that a round ends, a changed job can change further only in the
    same direction; with `one_job` no other job may change in this round. If a waiting job fits,
    only starts are legal as the first action of a round, and as long as no job runs.
    """

    def __init__(self, table: JobTable, *, one_job: bool, preempt: bool) -> None:
        self._table = table
        self._one_job, self._preempt = one_job, preempt
        self.sizes: IntArray = table.have.copy()
        self._settled = np.zeros(len(table.have), dtype=np.bool_)
        self._ended = False

    def run(self, choose: Choose) -> IntArray:
        """Apply chosen actions until the round ends, or only its end is legal; return the sizes."""
        while not self._ended:
            legal = self._legal()
            if not legal[:-1].any():
                break
            jobs = job_inputs(self._table, self.sizes)
            cluster = cluster_inputs(self._table, self.sizes, jobs)
            self._apply(choose(DecisionInput(jobs, cluster, legal, self._table, self.sizes.copy())))
        return self.sizes

    def _legal(self) -> BoolArray:
        table, sizes = self._table, self.sizes
        changed = sizes - table.have
        open_ = ~self._settled
        if self._one_job and changed.any():
            open_ &= changed != 0
        runs = sizes > 0
        free = table.room - int(sizes.sum())
        more = open_ & (changed >= 0)
        more &= np.where(runs, (sizes < table.cap) & (free >= 1), table.least <= free)
        fewer = open_ & (changed <= 0) & runs
        fewer &= (sizes > table.least) | self._preempt
        starts = more & ~runs
        begins = not changed.any() or not runs.any()
        if begins and starts.any():  # no model can keep slots idle while jobs wait
            no = np.zeros_like(starts)
            return np.append(np.column_stack((starts, no, no)).ravel(), False)
        legal = np.column_stack((more, fewer, open_ & (more | fewer))).ravel()
        return np.append(legal, True)

    def _apply(self, action: int) -> None:
        row, kind = divmod(action, ACTIONS)
        if row == len(self.sizes):
            self._ended = True
            return
        size, least = int(self.sizes[row]), int(self._table.least[row])
        if kind == SAME:
            self._settled[row] = True
        elif kind == MORE:
            self.sizes[row] = size + 1 if size else least
        else:
            self.sizes[row] = size - 1 if size > least else 0


# --- the policy


DRIFT: Final = 0.05  # relative change of a step time that triggers another fit


class DrlOptions(Options, frozen=True):
    """Options of policy `drl`, from table `[policy.options]` of the controller's settings."""

    # Path of a model file. None: trained as in the papers; "shortest-first": imitates a heuristic
    model: str | None = None
    interval_s: Annotated[float, Within(MIN_ROUND_S, 3600.0)] = 5.0  # least duration of a round
    one_job: bool = True  # True: one job changes per round (paper); False: any number
    preempt: bool = False  # True: running jobs may be stopped; paper: no
    most: Count | None = None  # most slots of one job
    placer: PlacerName = "consolidate"
    moves: Moves = "elastic"

    def __post_init__(self) -> None:
        """Check the ranges, and that the model can be used."""
        super().__post_init__()
        if self.model is not None:
            read_actor_model(self.model)


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """The facts about a job from the last round, used in the reason for its size."""

    probability: float  # of the action taken, or of the start of a waiting job
    remaining_s: float  # seconds on the job's slots, or on those that it would start with
    known: bool  # False: `remaining_s` is a guess


class Drl(ImmediatePolicy):
    """Policy in which a network assigns slots job by job, in rounds; sizes are fixed in between.

    Batches stay as the users set them. A running job is never stopped (the paper's Table 3), unless
    `preempt` is set. The most probable action is taken, so nothing is random.

    Raises:
        SettingsError: if the model cannot be used.
    """

    def __init__(
        self, options: DrlOptions | None = None, model: LearnedModel | None = None
    ) -> None:
        self.options = options or DrlOptions()
        model = model or read_actor_model(self.options.model)
        self._trained_on = model.card.slots
        self._actor = Actor(model.arrays)
        self._observed = ObservedJobs(DRIFT, count_epochs=True)
        self._placer = make_placer(self.options.placer, self.options.moves)
        self._rounds = Rounds(self.options.interval_s)
        self._targets: dict[JobId, int] = {}  # slots of each job in the last round
        self._facts: dict[JobId, RoundFacts] = {}
        self._decided_for: frozenset[JobId] = frozenset()  # all jobs of the view in the last round
        self._changed = False  # True if the last round changed a size
        self._range_note = ""  # note for clusters outside the training range

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds and lengths from `event`."""
        self._observed.observe(event)
        self._placer.observe(event, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the sizes of the last or a new round, as far as there is room for them now."""
        partition = partition_of(view, now)
        if self._rounds.is_due(partition, self._targets):
            self._range_note = training_range_note(self._trained_on, len(view.slots))
            self._decide(partition)
            self._rounds.begin(now)
        sizes = fit_targets(partition, self._targets, fixed_batches=True)
        more_to_do = self._changed or self._decided_for != view.jobs.keys()
        wake_at = self._rounds.next_at(partition) if more_to_do else None
        return self._placer.plan(partition, sizes, self._why, wake_at)

    def pick(self, moment: DecisionInput, odds: FloatArray, now: Seconds) -> int:
        """Return the index of the most probable action; among equal ones, the first.

        Trainings override this. `odds` are the probabilities of all actions, shape (3 N + 1,).
        """
        return int(odds.argmax())

    def _decide(self, partition: Partition) -> None:
        jobs = [*partition.running, *partition.waiting]
        table = job_table(jobs, partition, self._observed, self._targets, self.options.most)
        odds: dict[JobId, float] = {}

        def choose(moment: DecisionInput) -> int:
            logits = self._actor.logits(moment.jobs, moment.cluster)
            probable = softmax(np.where(moment.legal, logits, -np.inf))
            action = self.pick(moment, probable, partition.now)
            for row in np.flatnonzero(moment.sizes == 0).tolist():
                odds[jobs[row].job] = float(probable[row * ACTIONS + MORE])
            if action < len(probable) - 1:
                odds[jobs[action // ACTIONS].job] = float(probable[action])
            return action

        round_ = DecisionRound(table, one_job=self.options.one_job, preempt=self.options.preempt)
        sizes = round_.run(choose)
        left_s = table.step_s(np.maximum(sizes, table.least)) * table.steps_left
        self._changed = bool((sizes != table.have).any())
        self._decided_for = frozenset(partition.view.jobs)
        self._facts = {
            job.job: RoundFacts(odds.get(job.job, 0.0), seconds, known)
            for job, seconds, known in zip(jobs, left_s.tolist(), table.known.tolist(), strict=True)
        }
        leaving = {job.job: self._targets.get(job.job, 0) for job in partition.leaving}
        chosen = {job.job: size for job, size in zip(jobs, sizes.tolist(), strict=True)}
        self._targets = leaving | chosen

    def _why(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        target, facts = self._targets.get(job.job), self._facts.get(job.job)
        if target is None or facts is None:
            return "sizes are chosen again in the next round", {}
        numbers = {
            "target": float(target),
            "probability": facts.probability,
            "remaining_s": facts.remaining_s,
        }
        if slots:
            rest = f", about {facts.remaining_s:.0f} s left on them" if facts.known else ""
            words = f"the network's choice{rest}"
        elif target:
            words = f"its {slots_in_words(target)} are not free yet"
        else:
            words = "the network does not start it yet"
        return words + self._range_note, numbers


def training_range_note(trained_on: tuple[int, int], slots: int) -> str:
    """Return a note if the cluster is smaller or larger than those of the training, else ""."""
    least, most = trained_on
    if least <= slots <= most:
        return ""
    return f" (it was trained on {least} to {most} slots; this cluster has {slots})"


def job_table(
    jobs: Sequence[JobView],
    partition: Partition,
    observed: ObservedJobs,
    targets: Mapping[JobId, int],
    most: Count | None,
) -> JobTable:
    """Return the table of the N jobs that may change; leaving jobs keep their `targets`."""
    now = partition.now
    caps = [max(j.least, min(useful_slots(j, partition), most or j.most)) for j in jobs]
    return JobTable(
        have=np.array([len(job.running_on) for job in jobs], dtype=np.int64),
        least=np.array([job.least for job in jobs], dtype=np.int64),
        cap=np.array(caps, dtype=np.int64),
        wanted=np.array([job.wanted for job in jobs], dtype=np.int64),
        batch=np.array([job.batch_size for job in jobs], dtype=np.int64),
        coefficients=np.array([observed.model(job).coefficients for job in jobs]).reshape(-1, 4),
        steps_left=np.array([observed.remaining_steps(job) for job in jobs], dtype=np.float64),
        known=np.array([observed.length_known(job) for job in jobs], dtype=np.bool_),
        age_s=np.array([max(0.0, now - job.submitted_at) for job in jobs], dtype=np.float64),
        still_s=np.array([max(0.0, now - job.moved_at) for job in jobs], dtype=np.float64),
        room=partition.room - sum(targets.get(job.job, 0) for job in partition.leaving),
    )
