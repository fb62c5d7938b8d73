"""The handle of a submitted sweep: trials with their rows and states, models, manifest."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from controlplane.client.files import JobFile, replacement
from controlplane.client.sweeps.preview import Preview, preview
from controlplane.client.sweeps.sampler import SamplerName, suggested
from schemas.errors import BadFieldError, SettingsError
from schemas.ids import JobId
from schemas.jobs import ENDED, JobSpec
from schemas.sweeps import Value
from schemas.wire.client import JobDetail, Ledger, LedgerUnit, SweepDetail, TrialInfo

if TYPE_CHECKING:
    from controlplane.client.client import Client


FORMAT: Final = 1


class ManifestTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Trial of a sweep, with its configuration, parent and state."""

    number: int
    values: dict[str, Value]
    parent: int | None = None
    start_epochs: int = 0
    state: str = ""
    epochs: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a sweep as a document."""

    format: int
    job: str
    snapshot: str  # SHA-256 of the working directory's archive
    spec: JobSpec  # its `workdir` is the folder on the submitting host
    trials: tuple[ManifestTrial, ...]
    units: tuple[LedgerUnit, ...]  # in the order in which they ended

    def visits(self, trial: int) -> list[LedgerUnit]:
        """Return the units that led to a trial's state, starting with the units of its ancestors.

        Raises:
            BadFieldError: if there is no such trial.
        """
        of = {one.number: one for one in self.trials}
        if trial not in of:
            raise BadFieldError(f"no trial {trial}", f"0 to {len(self.trials) - 1}", "trial")
        sweep = self.spec.stated_sweep
        found: list[LedgerUnit] = []
        one, until = of[trial], math.inf
        while True:
            own = (u for u in self.units if u.trial == one.number and u.version <= until)
            found = [*sorted(own, key=lambda u: u.version), *found]
            if one.parent is None:
                return found
            one, until = of[one.parent], one.start_epochs * (sweep.partitions if sweep else 0)


def manifest_of(spec: JobSpec, detail: SweepDetail, ledger: Ledger) -> Manifest:
    """Return the manifest of a sweep. `detail` has all trials, and `ledger` has all units."""
    trials = msgspec.convert(detail.trials, tuple[ManifestTrial, ...], from_attributes=True)
    return Manifest(
        format=FORMAT,
        job=ledger.job,
        snapshot=ledger.snapshot,
        spec=spec,
        trials=trials,
        units=ledger.units,
    )


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest as JSON, completely or not at all. Replace an existing file."""
    with replacement(path, "choose another file", "file") as fresh:
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def read_manifest(path: Path) -> Manifest:
    """Read a file that `write_manifest` wrote, or raise `SettingsError`."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", "check the path", "manifest") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = f"{path} is not a manifest: {error}"
        raise SettingsError(problem, "`ones sweep manifest` writes one", "manifest") from None
    if found.format != FORMAT or found.spec.stated_sweep is None:
        problem = f"{path} is a manifest of format {found.format}, this is {FORMAT}"
        raise SettingsError(problem, "use the release that wrote it", "manifest")
    return found


DELETED: Final = "deleted"


class Best(NamedTuple):
    """Best epoch of the best trial."""

    trial: TrialInfo
    score: float  # as reported
    epoch: int  # epoch of the score, including epochs of the parent


def best_of(detail: SweepDetail) -> Best | None:
    """Return the trial that the controller ranks best, or None if no trial has a score."""
    if detail.best is None or detail.best >= len(detail.trials):
        return None
    return best_epoch(detail.trials[detail.best])


def best_epoch(trial: TrialInfo) -> Best | None:
    """Return the best epoch of a trial, or None if the trial has no score."""
    if trial.best_score is None:
        return None
    return Best(trial, trial.best_score, trial.best_epoch)


def ranked(detail: SweepDetail) -> list[TrialInfo]:
    """Return the trials: best ones first, then those without a score, then deleted trials."""
    sign = 1.0 if detail.spec.search.mode == "max" else -1.0

    def place(trial: TrialInfo) -> tuple[bool, float, int]:
        found = best_epoch(trial)
        score = math.inf if found is None else -sign * found.score
        return trial.state == DELETED, score, trial.number

    return sorted(detail.trials, key=place)


def trial_row(trial: TrialInfo) -> dict[str, Any]:
    """Return a flat row for a trial: values as `config.NAME`, state, slot, best score, metrics."""
    found = best_epoch(trial)
    last = trial.metrics[-1] if trial.metrics else {}
    return {
        "trial": trial.number,
        "parent": trial.parent,
        **{f"config.{name}": value for name, value in trial.values.items()},
        "state": trial.state,
        "reason": trial.reason,
        "epochs": trial.epochs,
        "granted": trial.granted,
        "partition": trial.partition,
        "slot": trial.slot,
        "best": None if found is None else found.score,
        "best_epoch": None if found is None else found.epoch,
        **last,
    }


def epoch_rows(detail: SweepDetail, trials: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return a row for every epoch of `trials` (empty: all) since each trial was copied."""
    return [
        {
            "trial": trial.number,
            "parent": trial.parent,
            **{f"config.{name}": value for name, value in trial.values.items()},
            "epoch": trial.first_epoch + at,
            "ended": trial.ended_at[at] if at < len(trial.ended_at) else None,
            **metrics,
        }
        for trial in detail.trials
        if not trials or trial.number in trials
        for at, metrics in enumerate(trial.metrics)
    ]


STATE_NAME: Final = re.compile(r"states/[^/]+/(\d+)-(\d+)-(\d+)\.state")


class StoredState(NamedTuple):
    """Training state of a trial, stored on a node."""

    file: JobFile
    trial: int
    version: int  # number of units trained
    attempt: int


def stored_states(files: Iterable[JobFile]) -> list[StoredState]:
    """Return the states among the files of a sweep."""
    named = ((file, STATE_NAME.fullmatch(file.name)) for file in files)
    return [StoredState(file, *map(int, name.groups())) for file, name in named if name]


def chosen_state(detail: SweepDetail, files: Iterable[JobFile], trial: int) -> StoredState:
    """Return a trial's state after its best epoch if a node stores it, else its newest state."""
    if not 0 <= trial < len(detail.trials):
        hint = f"0 to {len(detail.trials) - 1}: see `ones sweep show`"
        raise BadFieldError(f"{detail.summary.job} has no trial {trial}", hint, "trial")
    info = detail.trials[trial]
    best = best_epoch(info)
    wanted = -1 if best is None else best.epoch * detail.spec.partitions
    chosen = max(
        (state for state in stored_states(files) if state.trial == trial),
        key=lambda one: (one.version == wanted, one.version, one.attempt),
        default=None,
    )
    if info.graduated_as is not None and (chosen is None or chosen.version != wanted):
        hint = f"`ones export {info.graduated_as} FILE` has its model"
        raise BadFieldError(f"trial {trial} {info.reason}", hint, "trial")
    if chosen is None:
        hint = f"an ended sweep keeps the best {detail.spec.keep}; `keep` sets more"
        raise BadFieldError(f"no node has a state of trial {trial}", hint, "trial")
    return chosen


SAMPLE_INTERVAL_S: Final = 0.5
ACTIVE_STATES: Final = frozenset({"training", "waiting"})


class Exported(NamedTuple):
    """Model that was written to a file."""

    path: Path
    trial: int
    epoch: float  # number of epochs that the model has trained


class SweepRun:
    """The handle of one sweep of a cluster; the client must be open."""

    def __init__(self, client: Client, job: JobId) -> None:
        self._client = client
        self.job = job

    async def detail(self) -> SweepDetail:
        """Return the state of the sweep, with all its trials."""
        return await self._client.sweep(self.job)

    async def table(self) -> list[dict[str, Any]]:
        """Return a row for each trial, best first: `config.NAME`, `state`, `epochs`, `best`, ..."""
        detail = await self.detail()
        return [trial_row(trial) for trial in ranked(detail)]

    async def epochs(self, trials: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return a row with all metrics for each epoch of `trials` (empty: all trials)."""
        return epoch_rows(await self.detail(), trials)

    async def best(self) -> Best | None:
        """Return the best trial with its best score and epoch, or None if no trial has a score."""
        return best_of(await self.detail())

    async def stop(self, trial: int) -> str:
        """Stop a trial and return its new state. The sweep keeps using its results."""
        return (await self._client.change_sweep(self.job, "stop", trial)).state

    async def pause(self, trial: int) -> str:
        """Pause a trial after its current unit and return its new state. `resume` continues it."""
        return (await self._client.change_sweep(self.job, "pause", trial)).state

    async def resume(self, trial: int) -> str:
        """Resume a paused trial and return its new state."""
        return (await self._client.change_sweep(self.job, "resume", trial)).state

    async def delete(self, trial: int) -> str:
        """End a trial at once, drop its training states, and return its new state.

        A deleted trial is never the best one.
        """
        return (await self._client.change_sweep(self.job, "delete", trial)).state

    async def add(self, values: Mapping[str, Value]) -> int:
        """Add a trial with a value for each parameter of the space, and return its number."""
        return (await self._client.change_sweep(self.job, "add", values=values)).trial

    async def clone(self, trial: int, values: Mapping[str, Value] | None = None) -> int:
        """Add a trial that continues from the state of another trial, and return its number.

        `values` are the values that differ from those of the other trial.
        """
        changed = await self._client.change_sweep(self.job, "add", values=values, parent=trial)
        return changed.trial

    async def sample(
        self,
        trials: int,
        sampler: SamplerName = "tpe",
        parallel: int | None = None,
        on_added: Callable[[int, Mapping[str, Value]], None] | None = None,
    ) -> int:
        """Add a configuration whenever a trial ends; Optuna suggests it from the results so far.

        This call keeps no state. To continue the sampling of a sweep that has not ended, repeat the
        call.

        Args:
            trials: target for the number of trials of the sweep, including the initial ones.
            sampler: `tpe`, or `gp` (requires torch).
            parallel: maximum number of trials that train or wait for a slot; None: the sweep's
                maximum of slots, plus one.
            on_added: called with the number and the values of each new trial.

        Returns:
            The number of trials of the sweep; less than `trials` if the sweep ended before.

        Raises:
            SettingsError: if Optuna is not installed.
        """
        if parallel is None:
            parallel = (await self._client.job(self.job)).spec.slots[1] + 1
        while True:
            detail = await self.detail()
            count = len(detail.trials)
            if count >= trials or detail.summary.state in ENDED:
                return count
            if sum(one.state in ACTIVE_STATES for one in detail.trials) >= parallel:
                await asyncio.sleep(SAMPLE_INTERVAL_S)
                continue
            values = await asyncio.to_thread(suggested, detail, sampler)
            key = f"{sampler}-{count}"  # if two samplers run at once, only one adds this trial
            added = await self._client.change_sweep(self.job, "add", values=values, key=key)
            if on_added is not None:
                on_added(added.trial, values)

    async def manifest(self) -> Manifest:
        """Return the sweep's spec, the digest of its working directory, and every recorded unit."""
        job = await self._client.job(self.job)
        return manifest_of(job.spec, await self.detail(), await self._client.ledger(self.job))

    async def preview(self, unit_s: float | None = None, state_bytes: int | None = None) -> Preview:
        """Estimate the cost of the sweep if it were run again.

        By default, use the seconds per unit and the bytes per state measured so far.
        """
        detail, job = await self.detail(), await self._client.job(self.job)
        largest = max((trial.state_bytes for trial in detail.trials), default=0)
        return preview(
            detail.spec,
            job.spec.slots,
            detail.unit_s if unit_s is None else unit_s,
            (largest or None) if state_bytes is None else state_bytes,
        )

    async def export(
        self, path: Path | str, trial: int | None = None, python: str | None = None
    ) -> Exported:
        """Write the `state_dict` of a trial after its best epoch, or else of its newest model.

        Args:
            path: an existing file is replaced.
            trial: number; None: the best trial.
            python: interpreter with torch; None: this interpreter, or the sweep's if this one has
                no torch.

        Raises:
            BadFieldError: if there is no such trial, or no stored state of the trial.
            NoTorchError: if no interpreter on this host has torch.
        """
        detail, target = await self.detail(), Path(path)
        if trial is None:
            best = best_of(detail)
            if best is None:
                problem = f"no trial of {self.job} has a score yet"
                raise BadFieldError(problem, "name a trial, or wait for the first epoch", "trial")
            trial = best.trial.number
        there = await self._client.files(self.job, "states/*")
        state = chosen_state(detail, there.files, trial)
        await self._client.export_model(self.job, state.file, target, python)
        return Exported(target, trial, state.version / detail.spec.partitions)

    async def wait(self, timeout: float | None = None) -> JobDetail:  # noqa: ASYNC109
        """Wait until the sweep has ended and return its job, as `Client.wait` does."""
        return await self._client.wait(self.job, timeout)

    async def cancel(self) -> JobDetail:
        """Cancel the sweep. The results of its trials remain available."""
        return await self._client.cancel(self.job)
