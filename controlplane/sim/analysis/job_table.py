"""Results as a flat table with one row for each job, also as a Parquet file."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from controlplane.sim.simulation_result import SimulationResult
from controlplane.sim.simulator_errors import ResultsError

EXTRA: Final = "parquet"  # of this project: what Parquet files need
COLUMNS: Final = (
    "job",
    "application",
    "submitted_at",
    "started_at",
    "ended_at",
    "state",
    "jct_s",
    "queued_s",
    "exec_s",
    "slot_s",
    "rescales",
    "batch_changes",
    "trained_s",
    "extrapolated_s",
    "counted",
)


def job_rows(results: Iterable[SimulationResult]) -> list[dict[str, Any]]:
    """A flat table: one row for each job of each result, `COLUMNS` and which simulation it was.

    Args:
        results: of any policies, sizes and seeds.

    Returns:
        Times in seconds; options and setting as JSON text.
    """
    return [
        {
            "policy": result.policy,
            "options": _text(result.options),
            "setting": _text(result.setting),
            "seed": result.seed,
            "slots": result.slots,
            **{column: getattr(job, column) for column in COLUMNS},
        }
        for result in results
        for job in result.jobs
    ]


def write_parquet(results: Iterable[SimulationResult], path: Path) -> None:
    """Put the table of `job_rows` into a Parquet file.

    Raises:
        ResultsError: if pyarrow is not installed, or the file cannot be written.
    """
    arrow, parquet = _pyarrow(), _pyarrow("parquet")
    try:
        parquet.write_table(arrow.Table.from_pylist(job_rows(results)), path)
    except OSError as error:
        raise ResultsError(f"{path}: {error}", "choose another file") from None


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """The rows that `write_parquet` wrote.

    Raises:
        ResultsError: if pyarrow is not installed, or the file cannot be read.
    """
    arrow, parquet = _pyarrow(), _pyarrow("parquet")
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise ResultsError(f"{path}: {error}", "name a Parquet file") from None
    return rows


def _text(value: dict[str, object]) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _pyarrow(part: str = "") -> Any:
    """Imported when it is needed: it is large, and seldom there."""
    try:
        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError:
        hint = f"in a checkout of ONES: pip install '.[{EXTRA}]'"
        raise ResultsError("Parquet files need pyarrow", hint) from None
