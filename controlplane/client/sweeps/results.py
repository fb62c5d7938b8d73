"""Results of a sweep: its best trial, rows for tables, and its manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from schemas.errors import BadFieldError, SettingsError
from schemas.jobs import JobSpec
from schemas.sweeps import Value
from schemas.wire.client import Ledger, LedgerUnit, SweepDetail, TrialInfo

FORMAT: Final = 1


class ManifestTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration."""

    number: int
    values: dict[str, Value]
    parent: int | None = None
    began_at: int = 0
    state: str = ""
    epochs: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a sweep as a document."""

    format: int
    job: str
    snapshot: str  # SHA-256 of the working directory's archive
    spec: JobSpec  # its `workdir` is the folder on the submitting host
    trials: tuple[ManifestTrial, ...]
    units: tuple[LedgerUnit, ...]  # in the order in which they ended

    def visits(self, trial: int) -> list[LedgerUnit]:
        """Return the units that led to a trial's state, starting with those of its ancestors.

        Raises:
            BadFieldError: if there is no such trial.
        """
        of = {one.number: one for one in self.trials}
        if trial not in of:
            raise BadFieldError(f"no trial {trial}", f"0 to {len(self.trials) - 1}", "trial")
        lineage = [of[trial]]
        while (parent := lineage[-1].parent) is not None:
            lineage.append(of[parent])
        partitions = self.spec.sweep.partitions if self.spec.stated_sweep else 0  # type: ignore[union-attr]
        found: list[LedgerUnit] = []
        for at, one in enumerate(reversed(lineage)):
            following = len(lineage) - 2 - at
            until = lineage[following].began_at * partitions if following >= 0 else None
            own = sorted((u for u in self.units if u.trial == one.number), key=lambda u: u.version)
            found += [u for u in own if until is None or u.version <= until]
        return found


def manifest_of(spec: JobSpec, detail: SweepDetail, ledger: Ledger) -> Manifest:
    """Return the manifest of a sweep; `detail` includes all trials, `ledger` all units."""
    fields = ManifestTrial.__struct_fields__
    trials = tuple(
        ManifestTrial(**{name: getattr(one, name) for name in fields}) for one in detail.trials
    )
    return Manifest(
        format=FORMAT,
        job=ledger.job,
        snapshot=ledger.snapshot,
        spec=spec,
        trials=trials,
        units=ledger.units,
    )


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest as JSON, completely or not at all; an existing file is replaced.

    Raises:
        BadFieldError: if the file cannot be written.
    """
    fresh = path.with_name(f".{path.name}.part")
    try:
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
        fresh.replace(path)
    except OSError as error:
        raise BadFieldError(f"{path}: {error.strerror}", "choose another file", "file") from None


def read_manifest(path: Path) -> Manifest:
    """Read a file that `write_manifest` wrote.

    Raises:
        SettingsError: if the file is not a manifest of this format.
    """
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
    epoch: int  # of the score; includes a parent's epochs


def best_of(detail: SweepDetail) -> Best | None:
    """Return the trial that the controller ranks best, or None if no trial has a score."""
    if detail.best is None or detail.best >= len(detail.trials):
        return None
    return best_epoch(detail.trials[detail.best])


def best_epoch(trial: TrialInfo) -> Best | None:
    """Return the best epoch of a trial, or None if it has no score."""
    if trial.best_score is None:
        return None
    return Best(trial, trial.best_score, trial.best_epoch)


def ranked(detail: SweepDetail) -> list[TrialInfo]:
    """Return the trials, best first, then those without a score, then deleted ones."""
    sign = 1.0 if detail.spec.search.mode == "max" else -1.0

    def place(trial: TrialInfo) -> tuple[bool, float, int]:
        found = best_epoch(trial)
        score = math.inf if found is None else -sign * found.score
        return trial.state == DELETED, score, trial.number

    return sorted(detail.trials, key=place)


def trial_row(trial: TrialInfo) -> dict[str, Any]:
    """Return a trial as a flat row: values as `config.NAME`, best score, state and place."""
    found = best_epoch(trial)
    last = trial.metrics[-1] if trial.metrics else {}
    return {
        "trial": trial.number,
        "parent": trial.parent,
        **{f"config.{name}": value for name, value in trial.values.items()},
        "state": trial.state,
        "why": trial.why,
        "epochs": trial.epochs,
        "granted": trial.granted,
        "partition": trial.partition,
        "slot": trial.slot,
        "best": None if found is None else found.score,
        "best_epoch": None if found is None else found.epoch,
        **last,
    }


def epoch_rows(detail: SweepDetail, trials: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return a row for every epoch of all trials, or of some.

    The rows of a copy start where it left its parent.
    """
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
