"""Events from which a policy learns, made from records, telemetry and the history of jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from controlplane.core.history import (
    EpochFinished,
    HistoryReader,
    PhaseChanged,
    Record,
)
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.report_bounds import (
    clamp_numbers,
    first_valid_noise_scale,
    plausible_bytes,
    plausible_cores,
    plausible_steps,
    plausible_times,
)
from controlplane.core.state import State
from controlplane.policy.api import EpochSeen, JobEnded, PolicyEvent, StepsSeen
from schemas.ids import Seconds, node_of
from schemas.jobs import ENDED
from schemas.wire.agent import StepsReported
from schemas.wire.client import EpochInfo

KEPT_JOBS: Final = 1000  # jobs that a restarted search learns from
KEPT_EPOCHS: Final = 50  # latest epochs of each job


def event_of_record(record: Record, state: State) -> PolicyEvent | None:
    """Return the policy event for a record of the last input, or None if none is needed.

    `state` is the state after that input.
    """
    job = state.jobs.get(record.job)
    event = _of_record(record, job) if job is not None else None
    return event if event is None else clamp_numbers(event)


def _of_record(record: Record, job: Job) -> PolicyEvent | None:
    match record:
        case EpochFinished(epoch=info):
            return _epoch(job, info)
        case PhaseChanged(change=change) if change.to_state in ENDED:
            return _end(job)
    return None


def event_of_steps(steps: StepsReported, state: State) -> PolicyEvent | None:
    """Return the policy event for telemetry, or None if the reporting group no longer trains."""
    job = state.jobs.get(steps.job)
    if job is None or job.group is None or job.group.version != steps.group:
        return None
    slots = [member.slot for member in job.group.members]
    seen = StepsSeen(
        job=job.job,
        family=job.family,
        group=steps.group,
        slots=len(slots),
        nodes=len({node_of(slot) for slot in slots}),
        global_batch=steps.global_batch,
        step=steps.step if job.sweep is None else job.sweep.units_done,
        samples_done=steps.samples_done if job.sweep is None else job.progress.samples_done,
        samples_per_s=steps.samples_per_s,
        noise_scale=first_valid_noise_scale(steps.noise_scale),
        train_loss=steps.train_loss,
        cpu_cores=plausible_cores(steps),
        sent_bytes_per_s=plausible_bytes(steps),
        group_steps=plausible_steps(steps),
        step_times=plausible_times(steps),
    )
    return clamp_numbers(seen)


def history(jobs: Iterable[Job], past: HistoryReader) -> list[tuple[Seconds, PolicyEvent]]:
    """Return past events of `jobs` with their times, oldest first, for a policy that starts.

    Only the latest `KEPT_JOBS` of `jobs` (oldest first) are used.
    """
    found: list[tuple[Seconds, PolicyEvent]] = []
    for job in deque(jobs, maxlen=KEPT_JOBS):
        history = past.of(job.job)
        found += [(info.time, _epoch(job, info)) for info in history.epochs[-KEPT_EPOCHS:]]
        if job.ended:
            found.append((job.accounting.since, _end(job)))
    return sorted(((at, clamp_numbers(event)) for at, event in found), key=lambda entry: entry[0])


def _epoch(job: Job, info: EpochInfo) -> EpochSeen:
    return EpochSeen(
        job=job.job,
        family=job.family,
        stop_metric=_stop_metric(job, info),
        **{name: getattr(info, name) for name in _SHARED},
    )


# Fields of an epoch that an event copies from the history.
_SHARED: Final = sorted({*EpochSeen.__struct_fields__} & {*EpochInfo.__struct_fields__})


def _stop_metric(job: Job, info: EpochInfo) -> float | None:
    stop = job.spec.stop
    return info.metrics.get(stop.metric) if stop is not None and stop.metric else None


def _end(job: Job) -> JobEnded:
    return JobEnded(
        job=job.job,
        family=job.family,
        samples_done=job.progress.samples_done,
        succeeded=job.phase is Phase.SUCCEEDED,
        slot_s=job.accounting.slot_s,
    )
