"""All jobs, nodes and workers: what decisions are made of, and nothing that is only shown.

How long things may take, and what is waited for now: the one place that knows a deadline.

How many jobs stand where, so that nobody has to walk over all of them to know.

What all jobs came to, in a few numbers, and sweeps: for people; no decision looks at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Final

import msgspec

from controlplane.core.history import SweepHistory
from controlplane.core.inputs import Input, RescaleExpired, StartExpired
from controlplane.core.model.job import Job, SpeedPromise
from controlplane.core.model.job_phases import ENDED, Phase
from controlplane.core.model.node import Node
from controlplane.core.model.rescale import RescalePhase, Swap
from controlplane.core.model.sweep import LeftSweep
from controlplane.core.model.worker import Worker, WorkerPhase
from controlplane.core.slot_index import SlotIndex
from schemas.errors import UnknownJobError
from schemas.ids import JobId, NodeId, Seconds, Term, Version

START_LIMIT_S: Final = 1800.0  # from the order to a formed group
PREPARE_LIMIT_S: Final = 600.0  # newcomers import, build, open their data
SWITCH_LIMIT_S: Final = 1800.0  # the boundary comes; steps and evaluations may be long
QUIESCE_LIMIT_S: Final = 1800.0  # a long evaluation may have to end first
LIMITS_S: Final = {
    RescalePhase.PREPARING: PREPARE_LIMIT_S,
    RescalePhase.SWITCHING: SWITCH_LIMIT_S,
    RescalePhase.QUIESCING: QUIESCE_LIMIT_S,
    RescalePhase.REJOINING: SWITCH_LIMIT_S,
}
RETRY_FIRST_S: Final = 1.0  # before something that failed is tried again; doubles
RETRY_LONGEST_S: Final = 60.0


class Deadline(msgspec.Struct, kw_only=True):
    """Until when version `version` of a job's group is waited for."""

    at: Seconds
    limit_s: float  # how long from when it was set
    version: Version


class Deadlines(msgspec.Struct, kw_only=True):
    """What has to happen in time: at most one thing for each job."""

    starts: dict[JobId, Deadline] = {}  # in order of their orders
    rescales: dict[JobId, Deadline] = {}

    def expect_start(self, job: JobId, version: Version, now: Seconds) -> None:
        """A group was ordered: it has to form.

        Args:
            job: that waits for its group; what was waited for before is replaced.
            version: of the group that was ordered.
            now: when, in seconds; the deadline is `START_LIMIT_S` later.
        """
        at = Seconds(now + START_LIMIT_S)
        self.starts[job] = Deadline(at=at, limit_s=START_LIMIT_S, version=version)

    def expect_rescale(
        self, job: JobId, version: Version, phase: RescalePhase, now: Seconds
    ) -> None:
        """A change came to `phase`: it has to leave it.

        Args:
            phase: one that is not the end of a change.
        """
        limit_s = LIMITS_S[phase]
        at = Seconds(now + limit_s)
        self.rescales[job] = Deadline(at=at, limit_s=limit_s, version=version)

    def clear(self, job: JobId) -> None:
        """Nothing of `job` is waited for any more.

        Args:
            job: may have nothing to wait for.
        """
        self.starts.pop(job, None)
        self.rescales.pop(job, None)

    def begin_anew(self, now: Seconds) -> None:
        """Nothing could happen while no controller was there: every wait begins again.

        Args:
            now: when the new controller began, in seconds; each wait has its whole limit from then
                on.
        """
        for deadline in (*self.starts.values(), *self.rescales.values()):
            deadline.at = Seconds(now + deadline.limit_s)

    def passed(self, now: Seconds, order: Iterable[JobId]) -> list[Input]:
        """What did not happen in time, as inputs.

        Args:
            now: deadlines up to then have passed.
            order: of the jobs whose groups change.
        """
        starts: list[Input] = [
            StartExpired(job=job, version=deadline.version)
            for job, deadline in self.starts.items()
            if deadline.at <= now
        ]
        late = {job: each for job, each in self.rescales.items() if each.at <= now}
        inside = [job for job in order if job in late] if len(late) > 1 else list(late)
        return [*starts, *(RescaleExpired(job=j, version=late[j].version) for j in inside)]


def pause_before(tries: int) -> float:
    """Seconds before the next try, after `tries` that failed.

    Args:
        tries: at least 1. The pause doubles from `RETRY_FIRST_S` up to `RETRY_LONGEST_S`.
    """
    return float(min(RETRY_LONGEST_S, RETRY_FIRST_S * 2 ** min(tries - 1, 10)))


class LivingCounts:
    """Of jobs that have not ended: derived from them once, and kept by whoever changes one.

    Args:
        jobs: that have not ended.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.phases: Counter[Phase] = Counter()
        self.promised: set[JobId] = set()  # whose end somebody promised
        for job in jobs:
            self.came(job)
            if job.promised_end is not None:
                self.promised.add(job.job)

    def came(self, job: Job) -> None:
        """Count a job that was not there."""
        self.phases[job.phase] += 1

    def moved(self, job: Job, before: Phase) -> None:
        """Count a job elsewhere, or no more."""
        self.phases[before] -= 1
        if job.phase in ENDED:
            self.promised.discard(job.job)
        else:
            self.phases[job.phase] += 1


class State(msgspec.Struct, kw_only=True, dict=True):
    """What `handle` works on and what replay rebuilds."""

    term: Term = Term(0)
    version: int = 0  # inputs taken
    feed_seq: int = 0
    jobs_accepted: int = 0
    jobs: dict[JobId, Job] = {}
    active: dict[JobId, None] = {}  # those that have not ended, in order of arrival
    jobs_with_processes: dict[JobId, None] = {}  # those with a process that may still exist
    nodes: dict[NodeId, Node] = {}
    keys: dict[str, JobId] = {}  # USER/KEY of submissions
    left_keys: dict[str, JobId] = {}  # of jobs that left, the latest
    ended_leave: bool = False  # jobs that have ended leave, when nothing of them lives
    sweeps_leave: bool = False  # the same of sweeps
    rules: int = 0  # of the incarnation that decides, see `inputs.RULES`
    leaving: dict[JobId, None] = {}  # with the next input
    left: dict[JobId, Version] = {}  # the latest: nodes that come back hear of them
    deadlines: Deadlines = msgspec.field(default_factory=Deadlines)
    overrides: dict[JobId, None] = {}  # jobs under a manual override, in order of the overrides
    sweeps: dict[JobId, None] = {}  # those that go on, or that some node has to hear of
    ended_sweeps: dict[JobId, None] = {}  # the latest: nodes that come back hear of them
    left_sweeps: dict[JobId, LeftSweep] = {}  # the same of those that left
    draining: dict[NodeId, None] = {}  # nodes with a `drain`
    swaps: list[Swap] = []  # of running jobs that trade slots just now

    def job(self, job: JobId) -> Job:
        """The job of that name.

        Args:
            job: its id; those that have left are not found.

        Raises:
            UnknownJobError: if there is none.
        """
        try:
            return self.jobs[job]
        except KeyError:
            raise UnknownJobError(job) from None

    def living(self) -> Iterator[tuple[Job, Worker]]:
        """Every process that may exist."""
        for name in self.jobs_with_processes:
            job = self.jobs[name]
            for worker in job.workers.values():
                if worker.phase is not WorkerPhase.EXITED:
                    yield job, worker

    @cached_property
    def living_counts(self) -> LivingCounts:
        """Where jobs stand that have not ended: derived from them, as the index is."""
        return LivingCounts(self.jobs[name] for name in self.active)

    @cached_property
    def slot_index(self) -> SlotIndex:
        """Who has which slot: derived from the rest, and no part of what states are compared by."""
        return SlotIndex(self.jobs, self.jobs_with_processes, self.nodes)


KEPT_GAINS: Final = 1000


class Totals(msgspec.Struct, kw_only=True):
    """Counted while handlers decide, so the journal rebuilds it through the same `handle`."""

    plans_taken: int = 0
    ended: dict[str, int] = {}  # jobs by the state that they ended in
    promises_kept: int = 0  # ends of jobs, by when they were promised first
    promises_broken: int = 0
    rescales: int = 0  # changes of membership, of all jobs
    batch_changes: int = 0
    gains: list[tuple[float, float]] = []  # speed-ups of changes, predicted and realised; latest
    sweeps: dict[JobId, SweepHistory] = {}

    def sweep_of(self, job: JobId) -> SweepHistory:
        """The past of the sweep `job`; empty if nothing happened to it yet.

        Args:
            job: may be unknown. What is returned for it is not kept.
        """
        return self.sweeps.get(job) or SweepHistory()

    def sweep(self, job: JobId) -> SweepHistory:
        """The past of the sweep `job`, to be written to."""
        return self.sweeps.setdefault(job, SweepHistory())

    def job_ended(self, job: Job, now: Seconds) -> None:
        """A job is over."""
        phase = job.phase
        self.ended[phase.value] = self.ended.get(phase.value, 0) + 1
        if job.promised_end is None or phase in {Phase.FAILED, Phase.CANCELLED}:
            return
        if now <= job.promised_end.first:
            self.promises_kept += 1
        else:
            self.promises_broken += 1

    def speed_measured(self, promise: SpeedPromise, samples_per_s: float) -> None:
        """A speed-up was measured.

        Args:
            samples_per_s: what came, mean over an epoch.
        """
        self.gains.append((promise.then / promise.now, samples_per_s / promise.now))
        del self.gains[:-KEPT_GAINS]
