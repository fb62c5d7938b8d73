"""State of the core, with jobs, nodes, deadlines, and counters that no decision reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Final

import msgspec

from controlplane.core.history import SweepHistory
from controlplane.core.inputs import Input, PolicyChosen, RescaleExpired, StartExpired
from controlplane.core.model.job import Job, SpeedPromise
from controlplane.core.model.job_phases import ENDED, HOLDING, Phase
from controlplane.core.model.node import Node
from controlplane.core.model.rescale import Rescale, RescalePhase, Swap
from controlplane.core.model.sweep import LeftSweep
from controlplane.core.model.usage import Usage
from controlplane.core.model.worker import Worker, WorkerPhase
from controlplane.core.slot_index import AvailableSlots, DirtySlots, Fit, SlotIndex, has_requests
from controlplane.policy.sharing.start_times import PastRun
from schemas.errors import UnknownJobError
from schemas.ids import JobId, NodeId, Seconds, SlotId, Term, Version, node_of
from schemas.jobs import spec_bytes
from schemas.sharing import Sharing

START_LIMIT_S: Final = 1800.0  # time from the order until the group has formed
PREPARE_LIMIT_S: Final = 600.0  # time for newcomers to import modules, build the model, open data
KILL_LIMIT_S: Final = 60.0  # time from the end of a grace until the node has reported the exit
RETRY_FIRST_S: Final = 1.0  # pause before the first retry; the pause doubles with each retry
RETRY_LONGEST_S: Final = 60.0


class Deadline(msgspec.Struct, kw_only=True):
    """Deadline for the formation of the group with `version`."""

    at: Seconds
    limit_s: float  # seconds from the time when the deadline was set
    version: Version


class Deadlines(msgspec.Struct, kw_only=True):
    """Time limits of starts and changes, at most one of each per job."""

    starts: dict[JobId, Deadline] = {}  # in the order in which they were ordered
    rescales: dict[JobId, Deadline] = {}

    def expect_start(self, job: JobId, version: Version, now: Seconds) -> None:
        """Set the deadline of a group that was ordered at `now`."""
        at = Seconds(now + START_LIMIT_S)
        self.starts[job] = Deadline(at=at, limit_s=START_LIMIT_S, version=version)

    def expect_rescale(self, job: Job, change: Rescale, now: Seconds) -> None:
        """Set the deadline of a change that entered its phase. The phase must not be final.

        Until its newcomers are ready, a change has `PREPARE_LIMIT_S`. Then it waits for steps of
        the members, for as long as the job file allows.
        """
        preparing = change.phase is RescalePhase.PREPARING
        limit_s = PREPARE_LIMIT_S if preparing else job.spec.progress_limit_s
        if job.spec.rigid:
            limit_s = job.spec.grace_limit_s + KILL_LIMIT_S
        deadline = Deadline(
            at=Seconds(now + limit_s), limit_s=limit_s, version=change.group.version
        )
        self.rescales[job.job] = deadline

    def clear(self, job: JobId) -> None:
        """Remove the deadlines of `job`, if any."""
        self.starts.pop(job, None)
        self.rescales.pop(job, None)

    def restart(self, now: Seconds) -> None:
        """Restart all limits at `now`.

        While the controller was down, no message could reach it, so this silence does not count.
        """
        for deadline in (*self.starts.values(), *self.rescales.values()):
            deadline.at = Seconds(now + deadline.limit_s)

    def passed(self, now: Seconds, order: Iterable[JobId]) -> list[Input]:
        """Return one input for each deadline that has passed by `now`.

        Expired changes are sorted like their jobs in `order`.
        """
        starts: list[Input] = [
            StartExpired(job=job, version=deadline.version)
            for job, deadline in self.starts.items()
            if deadline.at <= now
        ]
        expired = {job: each for job, each in self.rescales.items() if each.at <= now}
        inside = [job for job in order if job in expired] if len(expired) > 1 else list(expired)
        rescales = [
            RescaleExpired(job=job, version=expired[job].version, stragglers=()) for job in inside
        ]
        return [*starts, *rescales]


def pause_before(tries: int) -> float:
    """Return the seconds to wait before the next try, after `tries` >= 1 failures.

    The pause doubles from `RETRY_FIRST_S` up to `RETRY_LONGEST_S`.
    """
    return float(min(RETRY_LONGEST_S, RETRY_FIRST_S * 2 ** min(tries - 1, 10)))


class JobCounters:
    """Numbers of jobs that have not ended, counted once and then updated."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.phases: Counter[Phase] = Counter()
        self.promised: set[JobId] = set()  # jobs with a promised end
        self.queued: Counter[str] = Counter()  # jobs without slots, except arrays, by user
        self.bytes: Counter[str] = Counter()  # of job files, by user
        self.shaped: set[JobId] = set()  # jobs with requests
        for job in jobs:
            self.add(job)
            if job.promised_end is not None:
                self.promised.add(job.job)

    def add(self, job: Job) -> None:
        """Add a job to the numbers of its phase and its user."""
        self.phases[job.phase] += 1
        self.bytes[job.user] += spec_bytes(job.spec)
        self.queued[job.user] += _queues(job, job.phase)
        if has_requests(job.spec):
            self.shaped.add(job.job)

    def move(self, job: Job, before: Phase) -> None:
        """Update the numbers after a job left phase `before`. Ended jobs are not included."""
        self.phases[before] -= 1
        self.queued[job.user] -= _queues(job, before)
        if job.phase in ENDED:
            self.promised.discard(job.job)
            self.shaped.discard(job.job)
            self.bytes[job.user] -= spec_bytes(job.spec)
        else:
            self.phases[job.phase] += 1
            self.queued[job.user] += _queues(job, job.phase)


def _queues(job: Job, phase: Phase) -> bool:
    return phase not in HOLDING and job.spec.indices is None


class LeftJob(msgspec.Struct, frozen=True):
    """Data with which a returning node is ordered to stop a job that left the state."""

    version: Version
    journal: str


class State(msgspec.Struct, kw_only=True, dict=True):
    """Data on which decisions depend. A replay of the journal rebuilds the state."""

    term: Term = Term(0)
    journal: str = ""  # id of the journal, which new jobs get
    loss_accepted: bool = False  # an admin started this term although inputs were lost
    outdated: str = ""  # why the journal must be older than its nodes, so new jobs are refused
    version: int = 0  # number of inputs handled
    feed_seq: int = 0
    jobs_accepted: int = 0
    jobs: dict[JobId, Job] = {}
    active: dict[JobId, None] = {}  # jobs that have not ended, in order of arrival
    jobs_with_processes: dict[JobId, None] = {}  # jobs with a process that may still exist
    nodes: dict[NodeId, Node] = {}
    submission_keys: dict[str, JobId] = {}  # USER/KEY of submissions
    left_submission_keys: dict[str, JobId] = {}  # the latest keys of jobs that left the state
    leaving_jobs: dict[JobId, None] = {}  # jobs that leave with the next input
    left_jobs: dict[JobId, LeftJob] = {}  # the latest jobs that left; returning nodes stop them
    deadlines: Deadlines = msgspec.field(default_factory=Deadlines)
    overrides: dict[JobId, None] = {}  # jobs under a manual override, in order of the overrides
    limited_runs: dict[JobId, None] = {}  # active jobs with `max_run_s` or `deadline`
    rigid: dict[JobId, None] = {}  # active rigid jobs, in order of arrival
    changed_orders: dict[JobId, None] = {}  # overrides to try again with the next input
    changed_slots: dict[SlotId, None] = {}  # since waiting overrides were tried
    all_slots_changed: bool = False
    sweeps: dict[JobId, None] = {}  # active sweeps, and those with deltas still to be sent
    ended_sweeps: dict[JobId, None] = {}  # the latest; their deltas are sent to returning nodes
    left_sweeps: dict[JobId, LeftSweep] = {}  # the same for sweeps that left the state
    draining: dict[NodeId, None] = {}  # nodes that jobs leave
    planned: dict[NodeId, None] = {}  # nodes that have or had `windows`
    reservations: int = 0  # made so far
    swaps: list[Swap] = []  # swaps in progress
    sharing: Sharing | None = None  # None: older journal; slots are not divided among accounts
    sharing_file: Sharing | None = None  # rules of the settings file that were applied last
    policy: PolicyChosen | None = None  # that plans; None: older journal
    policy_file: PolicyChosen | None = None  # of the settings file, as it was applied last
    policy_since: Seconds = Seconds(0.0)
    scheduling_paused: str = ""  # who paused all starts and growths, and why; empty: nobody
    usage: dict[str, Usage] = {}  # by account, since `sharing` is known
    children: dict[JobId, dict[JobId, None]] = {}  # jobs that wait for the end of a live job
    early: dict[JobId, None] = {}  # active jobs whose earliest start has not come
    arrays: dict[JobId, None] = {}  # active arrays with indices that are no jobs yet
    began_at: dict[JobId, Seconds] = {}  # when jobs with slots got their first ones, since then
    past_runs: dict[str, tuple[PastRun, ...]] = {}  # the latest; see `Present.past`

    def closed_to(self, job: Job) -> tuple[NodeId, ...]:
        """Return the nodes that are reserved for others now."""
        return tuple(
            name
            for name in self.reserved_nodes
            if any(drain.concerns(job.owner) for drain in self.nodes[name].keeps)
        )

    def fit(self, job: Job) -> Fit:
        """Return the slots that a job may use now: they fit it, and are not reserved for others."""
        return self.slot_index.fit(job.spec, self.closed_to(job))

    def available_to(self, job: Job) -> AvailableSlots:
        """Return the slots that a job could get now, if they fit it."""
        found, closed = self.slot_index.available(), self.closed_to(job)
        return AvailableSlots(
            [slot for slot in found.free if node_of(slot) not in closed],
            {slot: by for slot, by in found.releasing.items() if node_of(slot) not in closed},
        )

    def closes(self, job: Job) -> dict[NodeId, tuple[Seconds, str]]:
        """Return when nodes close to a job, and for what. Nodes that are closed now have 0."""
        found: dict[NodeId, tuple[Seconds, str]] = {}
        for node in (self.nodes[name] for name in self.planned if name in self.nodes):
            now = [one.window for one in node.keeps if one.window and one.concerns(job.owner)]
            later = [window for window in node.windows if not window.admits(*job.owner)]
            if now:
                found[node.node] = Seconds(0.0), now[0].purpose
            elif later:
                found[node.node] = later[0].begin, later[0].purpose
        return found

    def job(self, job: JobId) -> Job:
        """Return the job of that name. Jobs that have left the state are not found.

        Raises:
            UnknownJobError: if there is no such job.
        """
        try:
            return self.jobs[job]
        except KeyError:
            raise UnknownJobError(job) from None

    def live_workers(self) -> Iterator[tuple[Job, Worker]]:
        """Yield every process that may exist."""
        for name in self.jobs_with_processes:
            job = self.jobs[name]
            for worker in job.workers.values():
                if worker.phase is not WorkerPhase.EXITED:
                    yield job, worker

    def queued_jobs(self, user: str) -> int:
        """Return how many jobs of a user have no slots. Each index of an array is one of them."""
        arrays = [job.array for job in map(self.jobs.__getitem__, self.arrays) if job.user == user]
        left = sum(one.last - one.following + 1 for one in arrays if one is not None)
        return self.job_counters.queued[user] + left

    @cached_property
    def job_counters(self) -> JobCounters:
        """Counts of the jobs that have not ended, computed from these jobs."""
        return JobCounters(self.jobs[name] for name in self.active)

    def note_changes(self, jobs: Iterable[JobId]) -> None:
        """Record changed slots, and the orders of changed `jobs`, until the next attempt."""
        reader = self._slots_of_orders
        if self.overrides:
            self.changed_orders.update((job, None) for job in jobs if job in self.overrides)
            self.changed_slots |= reader.slots
            self.all_slots_changed |= reader.everything
        reader.slots, reader.everything = {}, False

    @cached_property
    def _slots_of_orders(self) -> DirtySlots:
        self.slot_index.keep_up()
        reader = self.slot_index.dirty_slots()
        reader.everything = False  # of a restored state, the changes are in its fields
        return reader

    @cached_property
    def orders_naming_slots(self) -> dict[JobId, None]:
        """Jobs with orders that name slots, derived from all orders; may include ended jobs."""
        found = ((name, self.jobs[name].override) for name in self.overrides)
        return {name: None for name, override in found if override is not None and override.on}

    @cached_property
    def reserved_nodes(self) -> dict[NodeId, None]:
        """Draining nodes that are reserved for some jobs."""
        return {name: None for name in self.draining if self.nodes[name].keeps}

    @cached_property
    def unchecked_drains(self) -> dict[NodeId, None]:
        """Draining nodes without those that had no jobs and on which no slot has changed."""
        return dict(self.draining)

    @cached_property
    def slots_of_drains(self) -> DirtySlots:
        """Slots that have changed since the draining nodes were checked."""
        return self.slot_index.dirty_slots()

    @cached_property
    def idle_drains(self) -> set[NodeId]:
        """Draining nodes that had no jobs and no time to wait for when they were last visited."""
        return set()

    @cached_property
    def slot_index(self) -> SlotIndex:
        """Index of slots, derived from the rest of the state and not part of comparisons."""
        return SlotIndex(self.jobs, self.jobs_with_processes, self.nodes)


KEPT_GAINS: Final = 1000


class Totals(msgspec.Struct, kw_only=True):
    """Counters for display. A replay rebuilds them through the same `handle`."""

    plans_taken: int = 0
    ended: dict[str, int] = {}  # number of jobs by final phase
    promises_kept: int = 0  # jobs that ended by their first promised time
    promises_broken: int = 0
    rescales: int = 0  # changes of membership
    batch_changes: int = 0
    gains: list[tuple[float, float]] = []  # the latest (predicted, realised) speed-ups
    sweeps: dict[JobId, SweepHistory] = {}

    def sweep_of(self, job: JobId) -> SweepHistory:
        """Return the history of the sweep `job`. If there is none, return a new one, not stored."""
        return self.sweeps.get(job) or SweepHistory()

    def sweep(self, job: JobId) -> SweepHistory:
        """Return the stored history of the sweep `job`, for changes. Create it if necessary."""
        return self.sweeps.setdefault(job, SweepHistory())

    def job_ended(self, job: Job, now: Seconds) -> None:
        """Add an ended job to the totals, and record whether its promised end was kept."""
        phase = job.phase
        self.ended[phase.value] = self.ended.get(phase.value, 0) + 1
        if job.promised_end is None or phase in {Phase.FAILED, Phase.CANCELLED}:
            return
        if now <= job.promised_end.first:
            self.promises_kept += 1
        else:
            self.promises_broken += 1

    def speed_measured(self, promise: SpeedPromise, samples_per_s: float) -> None:
        """Add a measured speed-up. `samples_per_s` is the mean over an epoch."""
        self.gains.append(
            (promise.speed_expected / promise.speed_before, samples_per_s / promise.speed_before)
        )
        del self.gains[:-KEPT_GAINS]
