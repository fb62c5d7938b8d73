"""What becomes of every job: when it started, who had which slot, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import HOLDING, Phase
from controlplane.core.state import State
from controlplane.policy.api import StartForecast as Forecast
from controlplane.sim.engine.job_progress import TrainingProgress
from controlplane.sim.simulation_result import (
    JobResult,
    LossLeft,
    SizeChange,
    SlotAllocation,
    StartForecast,
)
from controlplane.sim.submissions import TraceJob
from schemas.ids import JobId, Seconds, SlotId


@dataclass(slots=True)
class _Record:
    submission: TraceJob
    training: TrainingProgress
    counted: bool
    started_at: Seconds | None = None
    allocations: list[SlotAllocation] | None = None  # that are over; None: nobody wants them
    slots: tuple[SlotId, ...] = ()  # at present
    since: Seconds = Seconds(0.0)  # when it got them
    losses: list[LossLeft] = field(default_factory=list)  # empty: its model knows none
    sizes: list[SizeChange] = field(default_factory=list)  # where it has losses
    epoch: int = 0  # of the last one of the losses
    forecast: StartForecast | None = None  # the first of its start


class JobLog:
    """A record for each job, in order of submission."""

    def __init__(self, *, record_allocations: bool) -> None:
        """Begin without jobs; `record_allocations`: write down who had which slot when.

        Args:
            record_allocations: if not, jobs have no allocations in the end.
        """
        self._record_allocations = record_allocations
        self._records: dict[JobId, _Record] = {}

    def add(
        self, job: JobId, submission: TraceJob, training: TrainingProgress, *, counted: bool
    ) -> None:
        """A job was accepted.

        Args:
            training: its progress, which others count.
        """
        begins = training.model.loss_left(0)
        self._records[job] = _Record(
            submission=submission,
            training=training,
            counted=counted,
            allocations=[] if self._record_allocations else None,
            losses=[] if begins is None else [LossLeft(submission.at, begins)],
        )

    def note(self, job: Job, now: Seconds) -> None:
        """Something happened to a job.

        Args:
            now: virtual seconds.
        """
        record = self._records.get(job.job)
        if record is None:
            return
        if record.started_at is None and job.phase in HOLDING:
            record.started_at = now
        if record.losses:
            _note_loss(record, len(job.size.slots), now)
        _note_slots(record, tuple(job.size.slots), now)

    def forecast(self, starts: Mapping[JobId, Forecast], now: Seconds) -> None:
        """A plan says when waiting jobs are expected to start; what is said first counts.

        Args:
            now: virtual seconds.
        """
        for name, said in starts.items():
            record = self._records.get(name)
            if record is not None and record.started_at is None and record.forecast is None:
                record.forecast = StartForecast(now, said.at, said.earliest, said.latest)

    def results(self, state: State, now: Seconds) -> tuple[JobResult, ...]:
        """What became of every job, in order of submission.

        Args:
            now: virtual seconds.
        """
        found = []
        for name, record in self._records.items():
            _note_slots(record, (), now)
            found.append(_result(record, state.jobs[name]))
        return tuple(found)


def _note_loss(record: _Record, slots: int, now: Seconds) -> None:
    if slots != (record.sizes[-1].slots if record.sizes else 0):
        record.sizes.append(SizeChange(now, slots))
    epoch = record.training.epoch
    left = record.training.model.loss_left(epoch) if epoch != record.epoch else None
    if left is not None:
        record.epoch = epoch
        record.losses.append(LossLeft(now, left))


def _note_slots(record: _Record, slots: tuple[SlotId, ...], now: Seconds) -> None:
    if record.allocations is None or slots == record.slots:
        return
    record.allocations += [
        SlotAllocation(slot=slot, since=record.since, until=now) for slot in record.slots
    ]
    record.since, record.slots = now, slots


def _result(record: _Record, job: Job) -> JobResult:
    return JobResult(
        job=record.submission.name,
        application=record.training.model.application,
        submitted_at=job.submitted_at,
        started_at=record.started_at,
        ended_at=job.accounting.since if job.ended else None,
        state=job.phase.value,
        queued_s=job.accounting.queued_s,
        exec_s=job.accounting.running_s,
        slot_s=job.accounting.slot_s,
        rescales=job.accounting.rescales,
        batch_changes=job.accounting.batch_changes,
        trained_s=record.training.trained_s,
        extrapolated_s=record.training.extrapolated_s,
        worth=_worth(job),
        most_worth=job.spec.stated_utility.value if job.spec.stated_utility else 0.0,
        promised_at=job.promised_end.first if job.promised_end else None,
        counted=record.counted,
        forecast=record.forecast,
        allocations=tuple(record.allocations or ()),
        losses=tuple(record.losses),
        sizes=tuple(record.sizes),
    )


def _worth(job: Job) -> float | None:
    """What its end was worth; one that did not succeed was worth nothing."""
    utility = job.spec.stated_utility
    if utility is None:
        return None
    if job.phase is not Phase.SUCCEEDED:
        return 0.0
    return utility.at(job.accounting.since - job.submitted_at)
