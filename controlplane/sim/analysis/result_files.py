"""Result files: JSON lines that long experiments resume from, and tables of jobs as Parquet."""

from __future__ import annotations

import fcntl
import importlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import msgspec

from controlplane.sim.cluster import ResultsError
from controlplane.sim.results import SimulationResult

T = TypeVar("T")


class _Key(msgspec.Struct, frozen=True):
    """Fields of a result that identify its simulation; the others are skipped."""

    policy: str
    options: dict[str, Any]
    setting: dict[str, Any]
    seed: int


def key(result: SimulationResult | _Key) -> str:
    """Return JSON text that identifies a result's simulation, whatever the order of options."""
    parts = (result.policy, result.options, result.setting, result.seed)
    return msgspec.json.encode(parts, order="deterministic").decode()


def create(path: Path) -> None:
    """Create an empty file if it is missing, to check early that results can be written.

    Raises:
        ResultsError: if the file cannot be written.
    """
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}", "choose another file") from None


def append(path: Path, result: SimulationResult) -> bool:
    """Append a result durably; return False if the file already has one of the same simulation.

    A line torn by a crash is cut off first. Several processes may append concurrently.

    Raises:
        ResultsError: if the file cannot be written, or holds something else.
    """
    try:
        with path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
            file.seek(0)
            mine, size = key(result), 0
            for number, line in _complete_lines(file):
                if key(_decoded(path, number, line, _Key)) == mine:
                    return False
                size += len(line)
            file.truncate(size)
            file.write(msgspec.json.encode(result) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}", "choose another file") from None
    return True


def load(path: Path) -> list[SimulationResult]:
    """Return the results in a file, each simulation once; empty if the file is missing.

    An unterminated last line was torn by a crash and is ignored.

    Raises:
        ResultsError: if the file cannot be read, or a line is not a result.
    """
    found: dict[str, SimulationResult] = {}
    try:
        with path.open("rb") as file:
            for number, line in _complete_lines(file):
                result = _decoded(path, number, line, SimulationResult)
                found.setdefault(key(result), result)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}", "name a readable file") from None
    return list(found.values())


def _complete_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(file, start=1):
        if line.endswith(b"\n"):
            yield number, line


def _decoded(path: Path, number: int, line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{path}:{number}: {error}"
        raise ResultsError(problem, "delete the line to simulate it again") from None


PARQUET_EXTRA: Final = "parquet"  # extra of this package
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
    """Return a row per job and result: `COLUMNS` and its simulation; options as JSON text."""
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
    """Write the table of `job_rows` into a Parquet file.

    Raises:
        ResultsError: if pyarrow is not installed, or the file cannot be written.
    """
    arrow, parquet = _pyarrow(), _pyarrow("parquet")
    try:
        parquet.write_table(arrow.Table.from_pylist(job_rows(results)), path)
    except OSError as error:
        raise ResultsError(f"{path}: {error}", "choose another file") from None


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Read the rows that `write_parquet` wrote.

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
    """Import pyarrow on demand: it is large and optional."""
    try:
        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError:
        hint = f"in a checkout of ONES: pip install '.[{PARQUET_EXTRA}]'"
        raise ResultsError("Parquet files need pyarrow", hint) from None
