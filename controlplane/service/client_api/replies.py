"""Core state to what clients see; `telemetry` fills in what happened since the last epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

from controlplane.core.history_read_model import JobHistories, JobHistory
from controlplane.core.model.batch_limit import batch_limit
from controlplane.core.model.job import Job, times
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.node import Node
from controlplane.core.model.worker import Worker, WorkerPhase
from controlplane.core.state import State
from controlplane.policy.api import Reason
from controlplane.service.planner.planner_interface import Planner
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.errors import BadFieldError
from schemas.ids import JobId, Rank, Seconds, node_of, slot_id
from schemas.jobs import ENDED, STATES
from schemas.messages.agent import StepsReported
from schemas.messages.client import (
    Decision,
    Explanation,
    JobDetail,
    JobSummary,
    ListJobs,
    NodeInfo,
    SearchInfo,
    WorkerInfo,
)

SLOW_START_S: Final = 60.0  # most scripts have loaded by then


def job_summary(
    job: Job,
    reason: Reason | None,
    telemetry: TelemetryTable,
    now: Seconds,
    *,
    predicted_loss: float | None = None,
) -> JobSummary:
    """A line of `ones ps`.

    Args:
        job: as the core has it.
        reason: why the latest plan lets it wait, if it said so.
        telemetry: fills in what happened since the last epoch.
        now: seconds since the epoch; queueing and running times are counted until then.
        predicted_loss: by the latest plan, if it said so.
    """
    queued_s, running_s = times(job, now)
    live = telemetry.of(job.job) if job.group else None
    live = live if live and job.group and live.group >= job.group.version else None
    waiting = not job.group and not job.ended
    why = reason.text if reason and waiting and job.phase is Phase.QUEUED else job.why
    if reason and waiting and job.phase is not Phase.QUEUED:
        why = why_it_waits(job.why, reason)
    if job.override_waits:
        why = f"{job.why}; {job.override_waits}"
    if (slow := _slow_start(job, now)) is not None:
        why = f"{slow}; {why}"
    return JobSummary(
        job=job.job,
        name=job.spec.name,
        user=job.user,
        state=job.phase.value,
        reason=why,
        slots=len(job.group.members) if job.group else 0,
        global_batch=job.group.global_batch if job.group else 0,
        lr=live.lr if live else job.progress.lr or job.spec.lr,
        epoch=job.progress.epoch,
        samples_per_s=_speed(job, live),
        progress=_progress(job, live),
        train_loss=_train_loss(job, live),
        metrics=job.progress.metrics,
        submitted_at=job.submitted_at,
        queued_s=queued_s,
        running_s=running_s,
        rescales=job.accounting.rescales,
        batch_changes=job.accounting.batch_changes,
        ended_at=job.accounting.since if job.ended else None,
        promised_end=job.promised_end.first if job.promised_end else None,
        expected_end=job.promised_end.latest if job.promised_end else None,
        predicted_loss=predicted_loss if job.group else None,
    )


def why_it_waits(stopped: str, reason: Reason) -> str:
    """Why a job stopped, and why it still waits if that is for another reason.

    Args:
        stopped: why it did.
        reason: why the latest plan lets it wait.
    """
    same = reason.text.removeprefix("waits: ") in stopped
    return stopped if same else f"{stopped}; {reason.text}"


def _slow_start(job: Job, now: Seconds) -> str | None:
    """What to say of a script that runs for long and does not come to its first epoch."""
    waited_s = now - job.accounting.since
    workers = job.group_workers() if job.phase is Phase.STARTING else []
    here = [worker for worker in workers if worker.phase is WorkerPhase.STARTED]
    if not here or waited_s < SLOW_START_S:
        return None
    where = f" on {len(here)} of {len(workers)} slots" if len(workers) > 1 else ""
    return (
        f"not at agent.epochs after {waited_s / 60:.0f} min{where}: "
        "its script prepares, or it never calls ScalingAgent and is not trained by this cluster"
    )


def chosen_jobs(state: State, request: ListJobs) -> list[Job]:
    """The jobs that a list is asked for, oldest first.

    Args:
        state: the core's, which is only read.
        request: which ones.

    Raises:
        BadFieldError: if one of its states is none.
    """
    for wanted in request.states:
        if wanted not in STATES:
            raise BadFieldError(
                f"no job is ever {wanted!r}", f"one of {', '.join(STATES)}", "state"
            )
    every = request.ended or not ENDED.isdisjoint(request.states)
    jobs = state.jobs.values() if every else (state.jobs[name] for name in state.active)
    return [
        job
        for job in jobs
        if (not request.states or job.phase.value in request.states)
        and request.user in ("", job.user)
        and (
            not request.name
            or fnmatchcase(job.spec.name, request.name)
            or fnmatchcase(job.job, request.name)
        )
    ]


def job_detail(
    job: Job,
    history: JobHistory,
    reason: Reason | None,
    telemetry: TelemetryTable,
    now: Seconds,
    *,
    predicted_loss: float | None = None,
) -> JobDetail:
    """Everything about one job, as `ones show` prints it.

    Args:
        job: as the core has it.
        history: its past.
        reason: why the latest plan lets it wait, if it said so.
        telemetry: fills in what happened since the last epoch.
        now: seconds since the epoch.
        predicted_loss: by the latest plan, if it said so.
    """
    live = telemetry.of(job.job) if job.group else None
    ranks = {m.worker: m.rank for m in job.group.members} if job.group else {}
    return JobDetail(
        summary=job_summary(job, reason, telemetry, now, predicted_loss=predicted_loss),
        spec=job.spec,
        snapshot=job.snapshot,
        workers=tuple(
            _worker_info(worker, ranks.get(worker.worker, worker.rank))
            for worker in job.workers.values()
        ),
        history=tuple(history.changes),
        epochs=tuple(history.epochs),
        versions=tuple(history.versions),
        failures=job.attempts.failures,
        exit_code=job.attempts.exit_code,
        samples_done=_samples_done(job, live),
        version=job.version,
        batch_limit=batch_limit(job),
        promises=tuple(history.promises),
    )


def _worker_info(worker: Worker, rank: Rank) -> WorkerInfo:
    """One process of a job, with its rank in the group that trains."""
    return WorkerInfo(
        rank=rank,
        node=node_of(worker.slot),
        slot=worker.slot,
        pid=worker.pid,
        version=worker.formed or worker.version,
        phase=worker.phase.value,
        local_batch=worker.local_batch,
        worker=worker.worker,
        step=worker.formed_step,
    )


def job_explanation(
    job: Job, history: JobHistory, reason: Reason | None, now: Seconds
) -> Explanation:
    """Every decision about a job; of one that waits also why, as the last entry.

    Args:
        job: as the core has it.
        history: its past.
        reason: why the latest plan lets it wait, if it said so.
        now: seconds since the epoch, the time of that last entry.
    """
    decisions = list(history.decisions)
    if reason is not None and job.group is None and not job.ended:
        waits = Decision(
            time=now, was=job.size, to=job.size, why=reason.text, code=reason.code,
            numbers=reason.numbers, outcome="waits",
        )  # fmt: skip
        decisions.append(waits)
    return Explanation(job=job.job, state=job.phase.value, decisions=tuple(decisions))


def search_info(state: State, histories: JobHistories, policy: str, planner: Planner) -> SearchInfo:
    """How the scheduler stands: the same numbers for clients and for Prometheus.

    Args:
        state: counts of changes.
        histories: counts of plans, predicted and realised gains.
        policy: its name.
        planner: whoever plans.

    Returns:
        Gains are geometric means of speed-ups, None before the first.
    """
    stats = planner.stats
    return SearchInfo(
        policy=policy,
        running=planner.running,
        restarts=planner.restarts,
        plans=histories.plans_taken,
        generations=stats.generations,
        best_fitness=stats.best_fitness,
        mean_fitness=stats.mean_fitness,
        incumbent_fitness=stats.incumbent_fitness,
        diversity=stats.diversity,
        decision_ms=stats.decision_ms,
        rescales=sum(job.accounting.rescales for job in state.jobs.values()),
        batch_changes=sum(job.accounting.batch_changes for job in state.jobs.values()),
        predicted_gain=_geometric_mean([predicted for predicted, _ in histories.gains]),
        realised_gain=_geometric_mean([realised for _, realised in histories.gains]),
        gain_error=_gain_error(histories.gains),
        length_error=stats.length_error,
        length_coverage_80=stats.length_coverage_80,
        length_coverage_90=stats.length_coverage_90,
    )


def _gain_error(gains: Sequence[tuple[float, float]]) -> float | None:
    """The factor by which what came was off from what was promised, either way."""
    sane = [pair for pair in gains if min(pair) > 0.0]
    return _geometric_mean([max(pair) / min(pair) for pair in sane])


def _geometric_mean(values: list[float]) -> float | None:
    positive = [value for value in values if value > 0]
    return math.exp(sum(map(math.log, positive)) / len(positive)) if positive else None


def node_infos(state: State) -> tuple[NodeInfo, ...]:
    """The lines of `ones node list`.

    Args:
        state: the core's, which is only read.

    Returns:
        One for each node that ever joined, in that order; lost ones, too.
    """
    owners = state.slot_index.owners()
    return tuple(_node_info(node, {s: j for s, j in owners.items() if node_of(s) == node.node})
                 for node in state.nodes.values())  # fmt: skip


def _node_info(node: Node, owners: dict[str, JobId]) -> NodeInfo:
    slots = [slot_id(node.node, slot.index) for slot in node.spec.slots]
    foreign = f"slots held by unknown jobs: {sorted(node.foreign)}" if node.foreign else ""
    return NodeInfo(
        node=node.node,
        state=node.phase.value,
        reason=foreign,
        host=node.spec.host,
        address=node.spec.address,
        slots=len(slots),
        free=sum(slot not in owners for slot in slots),
        kind=node.spec.slots[0].kind,
        model=node.spec.slots[0].model,
        jobs=tuple(dict.fromkeys(owners.values())),
        release=node.spec.release,
    )


def _train_loss(job: Job, live: StepsReported | None) -> float | None:
    if live is not None and live.train_loss is not None:
        return live.train_loss
    return job.progress.train_loss


def _speed(job: Job, live: StepsReported | None) -> float:
    if not job.group:
        return 0.0
    return live.samples_per_s if live else job.progress.samples_per_s


def _progress(job: Job, live: StepsReported | None) -> float | None:
    if job.sweep is not None:
        left = 0 if job.phase is Phase.SUCCEEDED else job.sweep.units_left
        return job.sweep.units_done / max(1, job.sweep.units_done + left)
    stop, total = job.spec.stop, job.stop_samples
    if stop is not None and stop.metric is not None:
        return None
    if job.phase is Phase.SUCCEEDED:
        return 1.0 if job.progress.samples_done else 0.0
    if not total:
        return 0.0
    return min(1.0, _samples_done(job, live) / total)


def _samples_done(job: Job, live: StepsReported | None) -> int:
    """As far as is known; a worker of a sweep knows of its own only."""
    counts = live is not None and job.sweep is None
    return max(job.progress.samples_done, live.samples_done if live and counts else 0)
