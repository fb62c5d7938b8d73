"""Latest telemetry of each job's workers, and the ranks for which a job waits according to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from controlplane.core.inputs import Input, JoinStalled, RescaleExpired, Straggler
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import Rescaling, Running
from controlplane.core.model.rescale import RescalePhase
from controlplane.core.model.worker import WorkerPhase
from controlplane.core.reactor import Reactor
from controlplane.core.state import State
from schemas.ids import JobId, Rank, Seconds, WorkerId, worker_id
from schemas.nodes import Group, Member
from schemas.wire.agent import (
    JOIN,
    RECOVER,
    STALL_INTERVAL_S,
    STALL_S,
    StepsReported,
    WorkerStalled,
    WorkerUsed,
)

FRESH_S: Final = 2.5 * STALL_INTERVAL_S  # age up to which a report without a later one is valid
RECENT_S: Final = 15.0  # age up to which a report of use counts
SETTLE_S: Final = 1.5  # after a wait of `STALL_S`, time for the reports of all other workers
GONE: Final = frozenset({WorkerPhase.RETIRING, WorkerPhase.LEAVING, WorkerPhase.EXITED})


class _Stall(NamedTuple):
    """A report of a worker without steps, and its age in seconds."""

    report: WorkerStalled
    age_s: float

    @property
    def idle_s(self) -> float:
        """Time without a step until now."""
        return self.report.idle_s + self.age_s

    @property
    def waits_s(self) -> float:
        """Time for which the worker has waited; -1 if it does not wait.

        The age of the report counts up to `SETTLE_S` only, because the wait may be over by now.
        """
        waits_s = self.report.waits_s
        return -1.0 if waits_s is None else waits_s + min(self.age_s, SETTLE_S)


_Stalls = Mapping[WorkerId, _Stall]


class Standstill(NamedTuple):
    """State of a job of which at least one rank has made no step for `STALL_S`."""

    idle_s: float
    stragglers: tuple[Straggler, ...]  # empty: all ranks wait for each other


class JobUse(NamedTuple):
    """Cores, memory and GPU that the processes of a job use now."""

    cpu_cores: float | None = None
    memory_bytes: int | None = None
    gpu_share: float | None = None  # 0 to 1, mean of its GPUs
    gpu_memory_bytes: int | None = None


class TelemetryTable:
    """Latest reports of running jobs. They are lost when the controller restarts."""

    def __init__(self) -> None:
        self._latest: dict[JobId, StepsReported] = {}
        self._last_step_at: dict[JobId, Seconds] = {}  # when the latest step was first reported
        self._stalls: dict[JobId, dict[WorkerId, tuple[WorkerStalled, Seconds]]] = {}
        self._used: dict[JobId, dict[WorkerId, tuple[WorkerUsed, Seconds]]] = {}

    def take(self, steps: StepsReported, now: Seconds) -> None:
        """Store a report in place of the last one. Ignore a late report of an older group.

        With a new step, all stalls of the job are over.
        """
        known = self.of(steps.job)
        if known is None or steps.group >= known.group:
            self._latest[steps.job] = steps
            if known is None or (steps.group, steps.step) != (known.group, known.step):
                self._last_step_at[steps.job] = now
                self._stalls.pop(steps.job, None)

    def take_stall(self, report: WorkerStalled, now: Seconds) -> None:
        """Store the report of a worker without steps, or forget its reports if it goes on."""
        stalls = self._stalls.setdefault(report.job, {})
        for worker, (_, at) in list(stalls.items()):
            if now - at > FRESH_S:
                del stalls[worker]
        worker = worker_id(report.job, report.version, report.rank)
        stalls.pop(worker, None)
        if report.idle_s >= STALL_S:
            stalls[worker] = report, now

    def idle_s(self, job: JobId, now: Seconds) -> float:
        """Return how many seconds ago `job` made its last step, or 0 if there is no report."""
        return now - self._last_step_at.get(job, now)

    def of(self, job: JobId) -> StepsReported | None:
        """Return the latest report of `job` since the controller's start, or None."""
        return self._latest.get(job)

    def forget(self, job: JobId) -> None:
        """Drop the reports of an ended job, if any."""
        self._latest.pop(job, None)
        self._last_step_at.pop(job, None)
        self._stalls.pop(job, None)
        self._used.pop(job, None)

    # --- use of processors, memory and GPUs

    def take_usage(self, used: WorkerUsed, now: Seconds) -> None:
        """Store what the processes of a worker use."""
        name = worker_id(used.job, used.version, used.rank)
        known = {w: at for w, at in self._used.get(used.job, {}).items() if now - at[1] <= RECENT_S}
        self._used[used.job] = {**known, name: (used, now)}

    def use_of(self, job: JobId, now: Seconds) -> JobUse:
        """Return what all workers of a job use, by reports of the last `RECENT_S`."""
        recent = [used for used, at in self._used.get(job, {}).values() if now - at <= RECENT_S]
        if not recent:
            return JobUse()
        shares = [used.gpu_share for used in recent if used.gpu_share is not None]
        held = [used.gpu_memory_bytes for used in recent if used.gpu_memory_bytes is not None]
        return JobUse(
            cpu_cores=sum(used.cpu_cores for used in recent),
            memory_bytes=sum(used.memory_bytes for used in recent),
            gpu_share=sum(shares) / len(shares) if shares else None,
            gpu_memory_bytes=sum(held) if held else None,
        )

    # --- stalls

    def standstill(self, job: Job, now: Seconds) -> Standstill | None:
        """Return the ranks for which the others wait, or None if reports do not tell.

        These are the ranks that do not wait. If all reports are of ranks that wait, these are the
        ranks without a report: their processes are stopped, or hold the interpreter.
        """
        stalls = self._fresh(job.job, now)
        if not stalls or not isinstance(job.status, Running | Rescaling):
            return None
        group, at_rest = _trained_group(job, stalls), _at_rest(job)
        members = [m for m in group.members if job.workers[m.worker].phase not in GONE]
        answers = {m.worker: stalls[m.worker] for m in members if m.worker in stalls}
        recovers = job.change is not None and job.change.kind == RECOVER
        known = {
            worker: stall
            for worker, stall in answers.items()
            if recovers or stall.report.group == group.version
        }
        if not known:
            return None
        waits = {worker for worker in known if known[worker].waits_s >= 0.0} | at_rest
        busy = [m for m in members if m.worker in known and m.worker not in waits]
        silent = [m for m in members if m.worker not in answers and m.worker not in at_rest]
        idle_s = max(stall.idle_s for stall in known.values())
        if busy:
            return Standstill(idle_s, tuple(_busy(job, m, known[m.worker]) for m in busy))
        waited_s = max(stall.waits_s for stall in known.values())
        if silent and waited_s < STALL_S + SETTLE_S:
            return None
        return Standstill(idle_s, tuple(_silent(job, m, waited_s) for m in silent))

    def due(self, reactor: Reactor, now: Seconds) -> list[Input]:
        """Return the inputs that are due: passed deadlines, with stragglers, and stalled joins."""
        state = reactor.state
        passed = [
            self._with_stragglers(event, state, now) if isinstance(event, RescaleExpired) else event
            for event in reactor.due(now)
        ]
        return [*passed, *self._stalled_joins(state, now)]

    def _with_stragglers(self, event: RescaleExpired, state: State, now: Seconds) -> RescaleExpired:
        """Add the stragglers of a change that took too long.

        A rank that finished a step in the second half of the time is slow and does not hang.
        """
        found = self.standstill(state.jobs[event.job], now)
        if found is None:
            return event
        limit_s = state.deadlines.rescales[event.job].limit_s
        hung = [s for s in found.stragglers if not s.answers or s.idle_s >= limit_s / 2]
        return msgspec.structs.replace(event, stragglers=tuple(hung))

    def _stalled_joins(self, state: State, now: Seconds) -> Iterator[JoinStalled]:
        """Yield the joins in which all former members have waited `STALL_S` for newcomers."""
        for name in self._stalls:
            job = state.jobs.get(name)
            stragglers = self._late_newcomers(job, now) if job is not None else ()
            if job is not None and job.change is not None and stragglers:
                version = job.change.group.version
                yield JoinStalled(job=name, version=version, stragglers=stragglers)

    def _late_newcomers(self, job: Job, now: Seconds) -> tuple[Straggler, ...]:
        """Return the newcomers that do not wait although all incumbents wait in the new group."""
        status = job.status
        if not isinstance(status, Rescaling) or status.change.kind != JOIN:
            return ()
        change, version = status.change, status.change.group.version
        if change.phase is not RescalePhase.SWITCHING:
            return ()
        stalls = {
            worker: stall
            for worker, stall in self._fresh(job.job, now).items()
            if stall.report.group == version
        }
        stay = [m for m in change.group.members if status.group.member(m.worker) is not None]
        new = [m for m in change.group.members if status.group.member(m.worker) is None]
        waited_s = min(
            (stalls[m.worker].waits_s if m.worker in stalls else -1.0 for m in stay), default=-1.0
        )
        if waited_s < STALL_S + SETTLE_S:
            return ()
        late = [m for m in new if m.worker not in stalls or stalls[m.worker].waits_s < 0.0]
        return tuple(
            _busy(job, m, stalls[m.worker]) if m.worker in stalls else _silent(job, m, waited_s)
            for m in late
        )

    def _fresh(self, job: JobId, now: Seconds) -> dict[WorkerId, _Stall]:
        return {
            worker: _Stall(report, now - at)
            for worker, (report, at) in self._stalls.get(job, {}).items()
            if now - at <= FRESH_S
        }


def _trained_group(job: Job, stalls: _Stalls) -> Group:
    """Return the group in which the members are: the new one from the boundary on."""
    status = job.status
    if isinstance(status, Rescaling) and status.change.phase is not RescalePhase.PREPARING:
        version = status.change.group.version
        new = status.change.kind == RECOVER
        if new or any(stall.report.group == version for stall in stalls.values()):
            return status.change.group
    assert isinstance(status, Running | Rescaling)  # noqa: S101 - the caller has checked it
    return status.group


def _at_rest(job: Job) -> set[WorkerId]:
    """Return the survivors that have quiesced, and wait for the others."""
    return set(job.change.quiesce_points) if job.change is not None else set()


def _rank(job: Job, member: Member) -> Rank:
    """Return the rank in the current group, which users see, or that of a newcomer."""
    now = job.group.member(member.worker) if job.group is not None else None
    return member.rank if now is None else now.rank


def _busy(job: Job, member: Member, stall: _Stall) -> Straggler:
    return Straggler(
        worker=member.worker,
        rank=_rank(job, member),
        idle_s=stall.idle_s,
        answers=True,
        at=stall.report.at,
    )


def _silent(job: Job, member: Member, waited_s: float) -> Straggler:
    rank = _rank(job, member)
    return Straggler(worker=member.worker, rank=rank, idle_s=waited_s, answers=False)
