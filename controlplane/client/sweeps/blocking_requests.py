"""The same for scripts without an event loop."""

from __future__ import annotations

import abc
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from controlplane.client.key_requests import BlockingKeyRequests
from controlplane.client.sweeps.blocking_runs import BlockingSweepRun
from controlplane.client.sweeps.requests import Change, SweepRequests
from controlplane.client.sweeps.sweep import Sweep
from schemas.messages.client import Ledger, SweepChanged, SweepDetail
from schemas.sweeps import Value

T = TypeVar("T")


class BlockingSweepRequests(BlockingKeyRequests):
    """What `BlockingClient` does with sweeps."""

    @property
    @abc.abstractmethod
    def _sweeps(self) -> SweepRequests:
        """The client whose loop runs in a thread."""

    @abc.abstractmethod
    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Let the client's loop do it."""

    def submit_sweep(
        self, sweep: Sweep, workdir: Path | str | None = None, key: str | None = None
    ) -> BlockingSweepRun:
        """See `Client.submit_sweep`.

        Args:
            workdir: where its functions lie; None: as `sweep` says.
            key: the same key gives the same sweep; None: a new one each time.
        """
        run = self._run(self._sweeps.submit_sweep(sweep, workdir, key))
        return BlockingSweepRun(run, self._run)

    def sweep_run(self, job: str) -> BlockingSweepRun:
        """See `Client.sweep_run`.

        Args:
            job: its name, as `submit` returned it.
        """
        return BlockingSweepRun(self._sweeps.sweep_run(job), self._run)

    def sweep(self, job: str) -> SweepDetail:
        """See `Client.sweep`.

        Args:
            job: its name, as `submit` returned it.
        """
        return self._run(self._sweeps.sweep(job))

    def change_sweep(
        self,
        job: str,
        change: Change,
        trial: int | None = None,
        *,
        values: Mapping[str, Value] | None = None,
        parent: int | None = None,
        key: str | None = None,
    ) -> SweepChanged:
        """See `Client.change_sweep`.

        Args:
            trial: all but `add`.
            values: `add`: of the configuration; beside a parent's own where there is one.
            parent: `add`: go on from this trial's state.
            key: makes a repetition harmless; None: a new change each time.
        """
        changing = self._sweeps.change_sweep(
            job, change, trial, values=values, parent=parent, key=key
        )
        return self._run(changing)

    def ledger(self, job: str) -> Ledger:
        """See `Client.ledger`."""
        return self._run(self._sweeps.ledger(job))
