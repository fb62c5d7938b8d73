"""What a client does with sweeps: submits and changes them, and asks, with all pages joined."""

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
    """Submits sweeps, asks for them and changes them."""

    @abc.abstractmethod
    async def submit(self, spec: JobSpec, key: str | None = None) -> JobId:
        """Ship the working directory and submit.

        Args:
            key: the same key gives the same job.
        """

    @abc.abstractmethod
    async def wait(self, job: str, timeout: float | None = None) -> JobDetail:  # noqa: ASYNC109
        """The job when it has ended.

        Args:
            timeout: seconds; None: for ever.
        """

    @abc.abstractmethod
    async def cancel(self, job: str) -> JobDetail:
        """End a job."""

    async def submit_sweep(
        self, sweep: Sweep, workdir: Path | str | None = None, key: str | None = None
    ) -> SweepRun:
        """Ship the working directory and submit a sweep.

        Args:
            workdir: where its functions lie; None: as `sweep` says.
            key: makes a repetition harmless: the same key gives the same sweep.

        Raises:
            BadFieldError: if a field cannot be accepted; nothing was submitted.
            TooLargeError: if the working directory packs to more than the cluster takes.
        """
        spec = sweep.job_spec()
        if workdir is not None:
            spec = msgspec.structs.replace(spec, workdir=str(workdir))
        return SweepRun(self, await self.submit(spec, key))

    def sweep_run(self, job: str) -> SweepRun:
        """The sweep of that name, to be followed and changed.

        Args:
            job: its name, as `submit` returned it.
        """
        return SweepRun(self, JobId(job))

    async def sweep(self, job: str) -> SweepDetail:
        """How a sweep stands, with all its trials.

        Args:
            job: its name, as `submit` returned it.

        Raises:
            UnknownJobError: if there is no such job.
            BadFieldError: if it is no sweep.
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
        """Change one trial of a sweep, or add one; it is durable when this returns.

        Args:
            trial: all but `add`.
            values: `add`: of the configuration; beside a parent's own where there is one.
            parent: `add`: go on from this trial's state.
            key: makes a repetition harmless; None: a new change each time.

        Raises:
            UnknownJobError: if there is no such job.
            BadFieldError: if it is no sweep, has no such trial, or cannot be changed so.
            DeniedError: if it is somebody else's.
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
        """The units of a sweep that count, in the order in which they ended.

        Raises:
            UnknownJobError: if there is no such job.
            BadFieldError: if it is no sweep.
        """
        ledger = await self._call(GetLedger(job=JobId(job)), Ledger)
        units = list(ledger.units)
        while len(units) < ledger.units_in_all:
            page = await self._call(GetLedger(job=JobId(job), from_unit=len(units)), Ledger)
            if not page.units:
                break
            units += page.units
        return msgspec.structs.replace(ledger, units=tuple(units))
