"""Replies about sweeps, with the table of trials and the ledger."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from controlplane.core.handlers.sweep_orders import best_score, best_trial
from controlplane.core.history import SweepHistory, TrialHistory
from controlplane.core.model.job import Job
from controlplane.core.model.sweep import JobSweep
from controlplane.journal.ended import EndedSweeps
from controlplane.service.api.views import PAGE_BYTES, numbered, page_of
from schemas.errors import BadFieldError
from schemas.ids import Seconds, SlotId
from schemas.sweeps import SweepSpec
from schemas.wire.client import GetLedger, GetSweep, JobSummary, Ledger, SweepDetail, TrialInfo

MAX_PAGE: Final = 2000
MAX_POSITION: Final = 1 << 31  # above any number of trials or units
SHOWN_EPOCHS: Final = 5000  # maximum per trial; the latest epochs are shown
MAX_ROW_BYTES: Final = PAGE_BYTES // 2  # bytes of the metrics of one trial
Row = TypeVar("Row")
SweepPast = SweepHistory | EndedSweeps  # for a sweep in the state, or a sweep that has left it


def sweep_of(job: Job) -> tuple[JobSweep, SweepSpec]:
    """Return the sweep of a job."""
    spec = job.spec.stated_sweep
    if job.sweep is None or spec is None:
        raise BadFieldError(f"job: {job.job} is not a sweep", "use `ones show` for jobs", "job")
    return job.sweep, spec


def sweep_detail(
    job: Job, past: SweepPast, summary: JobSummary, request: GetSweep, now: Seconds
) -> SweepDetail:
    """Return the state of a sweep with a page of its trials.

    Raises:
        BadFieldError: if the job is not a sweep.
        JournalError: if the sweep has left the state and its counters in the journal are damaged.
    """
    sweep, spec = sweep_of(job)
    state = sweep.engine.state
    first, most = _first(request.from_trial), _page(request.limit)
    history = past.history(job.job, first, most) if isinstance(past, EndedSweeps) else past
    unit_s = (
        sum(history.recent_unit_s) / len(history.recent_unit_s) if history.recent_unit_s else None
    )
    left = 0 if job.ended else sweep.units_left
    workers = len(state.workers)
    end = Seconds(now + left * unit_s / workers) if unit_s and workers and left else None
    numbers = range(first, min(len(state.trials), first + most))
    return SweepDetail(
        summary=summary,
        spec=spec,
        trials=_first_page([trial_info(job, sweep, history, number) for number in numbers]),
        trials_total=len(state.trials),
        best=best_trial(sweep),
        best_score=best_score(sweep),
        units_done=sweep.units_done,
        units_repeated=history.units_repeated,
        units_left=left,
        unit_s=unit_s,
        expected_end=end,
        moved_bytes=history.moved_bytes,
        waited_s=history.waited_s,
        trained_s=history.trained_s,
    )


def trial_info(job: Job, sweep: JobSweep, history: SweepHistory, number: int) -> TrialInfo:
    """Return the row of one trial."""
    state, past = sweep.engine.state, history.trial(number)
    trial, model, lease = state.trials[number], state.models[number], state.lease_of(number)
    slot: SlotId | None = None
    if lease is not None and (worker := job.workers.get(lease.order.worker)) is not None:
        slot = worker.slot
    visited = model.at % state.partitions
    shown = _shown_epochs(past)
    top = max(trial.scores, default=None)
    whole = not visited and (trial.ended or not model.todo(trial.granted))
    return TrialInfo(
        number=number,
        values=dict(trial.values),
        state=trial_state(sweep, number),
        reason=past.reason,
        graduated_as=past.graduated_as,
        parent=trial.parent,
        epochs=trial.epochs,
        granted=trial.granted,
        start_epochs=trial.start_epochs,
        partition=lease.order.partition if lease is not None else None,
        slot=slot,
        partitions_left=0 if whole else state.partitions - visited,
        metrics=tuple(past.metrics[-shown:]),
        first_epoch=trial.start_epochs + max(0, len(past.metrics) - shown) + 1,
        best_score=None if top is None else top if state.spec.mode == "max" else -top,
        best_epoch=0 if top is None else trial.start_epochs + trial.scores.index(top) + 1,
        ended_at=tuple(past.ended_at[-shown:]),
        state_bytes=past.state_bytes,
    )


def _shown_epochs(past: TrialHistory) -> int:
    """Return how many epochs fit into a row. All epochs of a trial have equally many metrics."""
    size = len(msgspec.msgpack.encode(past.metrics[-1])) if past.metrics else 1
    return max(1, min(SHOWN_EPOCHS, MAX_ROW_BYTES // size))


def trial_state(sweep: JobSweep, number: int) -> str:
    """Return the state of a trial, as in `TrialInfo.state`."""
    state = sweep.engine.state
    trial = state.trials[number]
    if number in state.deleted:
        return "deleted"
    if trial.ended:
        return trial.ended
    if state.lease_of(number) is not None:
        return "training"
    if number in state.paused:
        return "paused"
    return "granted" if trial.waits else "waiting"


def ledger(job: Job, past: SweepPast, request: GetLedger) -> Ledger:
    """Return a page of the units of work that a sweep has recorded.

    Raises:
        BadFieldError: if the job is not a sweep.
        JournalError: if the sweep has left the state and its units in the journal are damaged.
    """
    _, spec = sweep_of(job)
    first, most = _first(request.from_unit), _page(request.limit)
    if isinstance(past, EndedSweeps):
        units, in_all = past.units(job.job, first, most)
    else:
        units, in_all = past.units[first : first + most], len(past.units)
    return Ledger(
        job=job.job, spec=spec, snapshot=job.snapshot, units=_first_page(units), units_total=in_all
    )


def _first(place: int) -> int:
    return max(0, min(place, MAX_POSITION))


def _page(limit: int) -> int:
    return max(1, min(limit, MAX_PAGE))


def _first_page(rows: list[Row]) -> tuple[Row, ...]:
    """Return the first rows, as many as fit into a page but at least one."""
    return page_of({"rows": numbered(rows)}, "")[0]["rows"]
