"""Which of a sweep's files has the state of a trial."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from controlplane.client.job_files import JobFile
from controlplane.client.sweeps.tables import best_epoch
from schemas.errors import BadFieldError
from schemas.messages.client import SweepDetail

GRADUATED: Final = re.compile(r"goes on as job ([\w-]+)")
NAME: Final = re.compile(r"states/[^/]+/(\d+)-(\d+)-(\d+)\.state")


class StoredState(NamedTuple):
    """A state of a trial that some node has."""

    file: JobFile
    trial: int
    version: int  # units that it has been through
    attempt: int

    def epoch(self, partitions: int) -> float:
        """Epochs that it has been through."""
        return self.version / partitions


def stored_states(files: Iterable[JobFile]) -> list[StoredState]:
    """Those of a sweep's files that are states."""
    named = ((file, NAME.fullmatch(file.name)) for file in files)
    return [StoredState(file, *map(int, name.groups())) for file, name in named if name]


def chosen_state(detail: SweepDetail, files: Iterable[JobFile], trial: int) -> StoredState:
    """The state of a trial after its best epoch, if some node has it, else its newest.

    Raises:
        BadFieldError: if there is no such trial, or no state of it.
    """
    if not 0 <= trial < len(detail.trials):
        what = f"{detail.summary.job} has no trial {trial}"
        raise BadFieldError(what, f"0 to {len(detail.trials) - 1}: see `ones sweep show`", "trial")
    mine = [state for state in stored_states(files) if state.trial == trial]
    if (job := GRADUATED.match(detail.trials[trial].why)) is not None and not any(
        state.version == _best_version(detail, trial) for state in mine
    ):
        what = f"trial {trial} {detail.trials[trial].why}"
        raise BadFieldError(what, f"`ones export {job[1]} FILE` has its model", "trial")
    if not mine:
        over = detail.spec.keep
        hint = f"a sweep that is over keeps the best {over}; more with `keep`"
        raise BadFieldError(f"no node has a state of trial {trial}", hint, "trial")
    wanted = _best_version(detail, trial)
    return max(mine, key=lambda one: (one.version == wanted, one.version, one.attempt))


def _best_version(detail: SweepDetail, trial: int) -> int:
    best = best_epoch(detail.trials[trial])
    return -1 if best is None else best.epoch * detail.spec.partitions
