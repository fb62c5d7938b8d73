"""The same for scripts without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from controlplane.client.sweeps.manifest import Manifest
from controlplane.client.sweeps.preview import Preview
from controlplane.client.sweeps.runs import Exported, SweepRun
from controlplane.client.sweeps.sampler import SamplerName
from controlplane.client.sweeps.tables import Best
from schemas.ids import JobId
from schemas.messages.client import JobDetail, SweepDetail
from schemas.sweeps import Value

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
