"""The same for scripts without an event loop.

The same for scripts without an event loop.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from controlplane.client.files import BlockingKeyRequests
from controlplane.client.sweeps.manifest import Manifest
from controlplane.client.sweeps.preview import Preview
from controlplane.client.sweeps.requests import Change, SweepRequests
from controlplane.client.sweeps.runs import Exported, SweepRun
from controlplane.client.sweeps.sampler import SamplerName
from controlplane.client.sweeps.sweep import Sweep
from controlplane.client.sweeps.tables import Best
from schemas.ids import JobId
from schemas.sweeps import Value
from schemas.wire.client import JobDetail, Ledger, SweepChanged, SweepDetail

T = TypeVar("T")
Await = Callable[[Coroutine[Any, Any, Any]], Any]


class BlockingSweepRun:
    """A `SweepRun` whose client has a loop in a thread of its own.

    Args:
        run_in_loop: gives a coroutine to that loop, and its result back.
    """

    def __init__(self, run: SweepRun, run_in_loop: Await) -> None:
        self._sweep = run
        self._await = run_in_loop

    @property
    def job(self) -> JobId:
        """The sweep's name."""
        return self._sweep.job

    def detail(self) -> SweepDetail:
        """See `SweepRun.detail`."""
        return self._run(self._sweep.detail())

    def table(self) -> list[dict[str, Any]]:
        """See `SweepRun.table`."""
        return self._run(self._sweep.table())

    def epochs(self, trials: Sequence[int] = ()) -> list[dict[str, Any]]:
        """See `SweepRun.epochs`.

        Args:
            trials: only these; none: all.
        """
        return self._run(self._sweep.epochs(trials))

    def best(self) -> Best | None:
        """See `SweepRun.best`."""
        return self._run(self._sweep.best())

    def stop(self, trial: int) -> str:
        """See `SweepRun.stop`."""
        return self._run(self._sweep.stop(trial))

    def pause(self, trial: int) -> str:
        """See `SweepRun.pause`."""
        return self._run(self._sweep.pause(trial))

    def resume(self, trial: int) -> str:
        """See `SweepRun.resume`."""
        return self._run(self._sweep.resume(trial))

    def delete(self, trial: int) -> str:
        """See `SweepRun.delete`."""
        return self._run(self._sweep.delete(trial))

    def add(self, values: Mapping[str, Value]) -> int:
        """See `SweepRun.add`.

        Args:
            values: all of the space.
        """
        return self._run(self._sweep.add(values))

    def clone(self, trial: int, values: Mapping[str, Value] | None = None) -> int:
        """See `SweepRun.clone`.

        Args:
            values: those that are different.
        """
        return self._run(self._sweep.clone(trial, values))

    def sample(
        self,
        trials: int,
        sampler: SamplerName = "tpe",
        parallel: int | None = None,
        on_added: Callable[[int, Mapping[str, Value]], None] | None = None,
    ) -> int:
        """See `SweepRun.sample`.

        Args:
            trials: that the sweep shall have, with those that it began with.
            sampler: `tpe`, or `gp` (needs torch).
            parallel: that may train or wait for a slot at once; None: one more than the most slots.
            on_added: called in the client's thread with the number and the values of each.
        """
        return self._run(self._sweep.sample(trials, sampler, parallel, on_added))

    def manifest(self) -> Manifest:
        """See `SweepRun.manifest`."""
        return self._run(self._sweep.manifest())

    def preview(self, unit_s: float | None = None, state_bytes: int | None = None) -> Preview:
        """See `SweepRun.preview`.

        Args:
            unit_s: seconds of one unit; None: as measured so far.
            state_bytes: of one state; None: as measured so far.
        """
        return self._run(self._sweep.preview(unit_s, state_bytes))

    def export(
        self, path: Path | str, trial: int | None = None, python: str | None = None
    ) -> Exported:
        """See `SweepRun.export`.

        Args:
            path: one that is there is replaced.
            trial: its number; None: the best.
            python: interpreter that has torch; None: this one, else the sweep's.
        """
        return self._run(self._sweep.export(path, trial, python))

    def wait(self, timeout: float | None = None) -> JobDetail:
        """See `SweepRun.wait`.

        Args:
            timeout: seconds; None: for ever.
        """
        return self._run(self._sweep.wait(timeout))

    def cancel(self) -> JobDetail:
        """See `SweepRun.cancel`."""
        return self._run(self._sweep.cancel())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._await(work)  # type: ignore[no-any-return] # as the coroutine gives it


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
