"""The tables of a measured application, as they lie in its folder.

Their layout is that of Pollux' simulator (OSDI 2021): `placements.csv` and `scalability.csv` have
the times of a pass, `validation-BATCH.csv` what training made of each global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.sim.csv_parsing import CsvRow, with_header
from controlplane.sim.models.job_model import Placement
from controlplane.sim.simulator_errors import TraceError

LEAST_STEP_S: Final = 1e-9
LEAST_NOISE: Final = 1e-30
MOST_NOISE: Final = 1e30
VALIDATION: Final = ("progress", "iteration", "grad_sqr", "grad_var")

PassTimes = tuple[float, float]  # seconds of a pass, and of its synchronisation
Size = tuple[int, int, int]  # nodes, slots, local batch


@dataclass(frozen=True, slots=True)
class EpochProfile:
    """One row of a validation table: an epoch with one global batch."""

    progress: float
    iteration: float
    sqr: float
    var: float


def smallest_rotation(placement: Placement) -> Placement:
    """Of all ways to begin around the ring, the lexicographically smallest.

    Args:
        placement: slots on each node, at least one node.
    """
    return min(placement[at:] + placement[:at] for at in range(len(placement)))


def read_placements(file: Path) -> dict[Placement, dict[int, PassTimes]]:
    """Times by local batch, for each placement.

    Args:
        file: with columns placement, local_bsz, step_time and sync_time; times in seconds.

    Returns:
        Placement, as its smallest rotation -> local batch (samples) -> seconds of a pass and of its
        synchronisation, means over the lines that have both.

    Raises:
        TraceError: if a line is wrong, or nothing was measured on one slot.
    """
    seen: dict[Placement, dict[int, list[PassTimes]]] = {}
    for row in with_header(file, ("placement", "local_bsz", "step_time", "sync_time")):
        digits = row.text("placement")
        if not digits.isdecimal() or "0" in digits:
            raise row.error(
                "placement", f"{digits[:40]!r} is no row of digits 1 to 9", "correct it"
            )
        placement = smallest_rotation(tuple(int(digit) for digit in digits))
        times = _times(row)
        seen.setdefault(placement, {}).setdefault(row.whole("local_bsz", 1), []).append(times)
    if (1,) not in seen:
        raise TraceError(f"{file}: nothing was measured on one slot", "add placement 1")
    return {
        placement: {local: _mean(table[local]) for local in sorted(table)}
        for placement, table in seen.items()
    }


def read_sizes(file: Path) -> dict[Size, NDArray[np.float64]]:
    """(pass, synchronisation) seconds, shape (2,), by nodes, slots and local batch.

    Args:
        file: with columns num_nodes, num_replicas, local_bsz, step_time and sync_time.

    Raises:
        TraceError: if a line is wrong.
    """
    seen: dict[Size, list[PassTimes]] = {}
    columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    for row in with_header(file, columns):
        key = (row.whole("num_nodes", 1), row.whole("num_replicas", 1), row.whole("local_bsz", 1))
        seen.setdefault(key, []).append(_times(row))
    return {key: np.array(_mean(times)) for key, times in seen.items()}


def _times(row: CsvRow) -> PassTimes:
    """Seconds of a step, and of the part of it that is synchronisation."""
    step_s = row.number("step_time", LEAST_STEP_S)
    return step_s, row.number("sync_time", 0.0, step_s)


def _mean(times: Sequence[PassTimes]) -> PassTimes:
    return sum(t[0] for t in times) / len(times), sum(t[1] for t in times) / len(times)


def read_validation(folder: Path, epochs: int) -> dict[int, list[EpochProfile]]:
    """A row for each epoch, for each global batch.

    Args:
        epochs: that each table must have, at least.

    Raises:
        TraceError: if a table is wrong or too short, or there is none.
    """
    found: dict[int, list[EpochProfile]] = {}
    for file in sorted(folder.glob("validation-*.csv")):
        number = file.stem.partition("-")[2]
        if not number.isdigit() or int(number) < 1:
            raise TraceError(f"{file}: its name should say the batch", "as in validation-128.csv")
        table = [
            EpochProfile(
                row.number("progress"),
                row.number("iteration"),
                row.number("grad_sqr", 0.0, MOST_NOISE),
                row.number("grad_var", LEAST_NOISE, MOST_NOISE),
            )
            for row in with_header(file, VALIDATION, ("metric",))
        ]
        if len(table) < epochs:
            what = f"{file}: {len(table)} epochs, a job of {folder.name} takes {epochs}"
            raise TraceError(what, "give a table with all of them")
        found[int(number)] = table
    if not found:
        raise TraceError(f"{folder} has no validation-BATCH.csv", "give one for each global batch")
    return found
