"""Requests about sweeps: submit, inspect and change them, with all pages joined."""

from __future__ import annotations

import abc
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from controlplane.client.files import KeyRequests
from controlplane.client.sweeps.runs import SweepRun
from controlplane.client.sweeps.sweep import Sweep
from schemas.ids import JobId
from schemas.jobs import JobSpec
from schemas.sweeps import Value
from schemas.wire.client import (
    ChangeSweep,
    GetLedger,
    GetSweep,
    JobDetail,
    Ledger,
    SweepChanged,
    SweepDetail,
)

Change = Literal["add", "stop", "pause", "resume", "delete"]


class SweepRequests(KeyRequests):
    """Requests that submit, inspect and change sweeps."""

    @abc.abstractmethod
    async def submit(self, spec: JobSpec, key: str | None = None) -> JobId:
        """Upload the working directory, submit a job and return its name; see `Client.submit`."""

    @abc.abstractmethod
    async def wait(self, job: str, timeout: float | None = None) -> JobDetail:  # noqa: ASYNC109
        """Wait until a job has ended and return it; see `Client.wait`."""

    @abc.abstractmethod
    async def cancel(self, job: str) -> JobDetail:
        """Cancel a job; see `Client.cancel`."""

    async def submit_sweep(
        self, sweep: Sweep, workdir: Path | str | None = None, key: str | None = None
    ) -> SweepRun:
        """Upload the working directory and submit a sweep.

        Args:
            workdir: folder of the sweep's functions; None: as stated in `sweep`.
            key: idempotency key; the same key returns the same sweep. None: a new sweep each time.

        Raises:
            BadFieldError: if a field is invalid; no sweep was submitted.
            TooLargeError: if the packed working directory exceeds the limits of the cluster.
        """
        spec = sweep.job_spec()
        if workdir is not None:
            spec = msgspec.structs.replace(spec, workdir=str(workdir))
        return SweepRun(self, await self.submit(spec, key))

    def sweep_run(self, job: str) -> SweepRun:
        """Return a handle for the sweep of this name; no request is sent."""
        return SweepRun(self, JobId(job))

    async def sweep(self, job: str) -> SweepDetail:
        """Return the state of a sweep, with all its trials.

        Raises:
            UnknownJobError: if there is no such job.
            BadFieldError: if the job is not a sweep.
        """
        detail = await self._call(GetSweep(job=JobId(job)), SweepDetail)
        trials = list(detail.trials)
        while len(trials) < detail.trials_in_all:
            page = await self._call(GetSweep(job=JobId(job), from_trial=len(trials)), SweepDetail)
            if not page.trials:
                break
            trials += page.trials
        return msgspec.structs.replace(detail, trials=tuple(trials))

    async def change_sweep(
        self,
        job: str,
        change: Change,
        trial: int | None = None,
        *,
        values: Mapping[str, Value] | None = None,
        parent: int | None = None,
        key: str | None = None,
    ) -> SweepChanged:
        """Change one trial of a sweep, or add one; the change is durable when this returns.

        Args:
            trial: required unless `change` is `add`.
            values: for `add`: the configuration, or with `parent` the values that differ from it.
            parent: for `add`: the trial from whose state the new one continues.
            key: idempotency key; None: a new change each time.

        Raises:
            UnknownJobError: if there is no such job.
            BadFieldError: if the job is not a sweep, has no such trial, or does not allow the
                change.
            DeniedError: if the sweep belongs to another user.
        """
        request = ChangeSweep(
            job=JobId(job),
            change=change,
            trial=trial,
            values=dict(values or {}),
            parent=parent,
            key=key or uuid.uuid4().hex,
        )
        return await self._call(request, SweepChanged)

    async def ledger(self, job: str) -> Ledger:
        """Return the counted units of a sweep, in the order in which they ended.

        Raises:
            UnknownJobError: if there is no such job.
            BadFieldError: if the job is not a sweep.
        """
        ledger = await self._call(GetLedger(job=JobId(job)), Ledger)
        units = list(ledger.units)
        while len(units) < ledger.units_in_all:
            page = await self._call(GetLedger(job=JobId(job), from_unit=len(units)), Ledger)
            if not page.units:
                break
            units += page.units
        return msgspec.structs.replace(ledger, units=tuple(units))
