"""What a client asks of a sweep, page by page joined, and how it changes one."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Literal

import msgspec

from controlplane.client.job_files import FileTransfers
from schemas.ids import JobId
from schemas.messages.client import (
    ChangeSweep,
    GetLedger,
    GetSweep,
    Ledger,
    SweepChanged,
    SweepDetail,
)
from schemas.sweeps import Value

Change = Literal["add", "stop", "pause", "resume", "delete"]


class SweepRequests(FileTransfers):
    """Asks for sweeps and changes them."""

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
            job: the sweep.
            change: what to do.
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

        Args:
            job: the sweep.

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
