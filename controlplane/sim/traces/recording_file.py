"""Files of recordings: JSON lines with a header, then families, then jobs.

`write_whole` writes any file atomically.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from controlplane.sim.cluster import RELATIVE_SPEEDS, NodeGroup, TraceError
from controlplane.sim.models.recording import ChangeTimes, Count, Family, Recording, Submission
from schemas.errors import OnesError
from schemas.jobs import problems


def write_whole(path: Path, content: str | bytes, refusal: type[OnesError]) -> None:
    """Write a file atomically: a temporary file replaces it once it is on the disk.

    Text is written as UTF-8.

    Raises:
        OnesError: of class `refusal`, if the file cannot be written.
    """
    beside = ""
    try:
        data = content.encode() if isinstance(content, str) else content
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except (OSError, ValueError) as error:
        if beside:
            with contextlib.suppress(OSError):
                Path(beside).unlink()
        said = getattr(error, "strerror", None) or error
        raise refusal(f"{path}: {said}", "choose another file") from None


VERSION: Final = 1
MAX_LINE_BYTES: Final = 1 << 26  # a family line has a measurement for each epoch
MAX_LINES: Final = 1_000_000
NO_RECORDING: Final = "name a file that a recording was written to"
Line = TypeVar("Line")


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="recording"):
    """First line."""

    version: int
    name: str
    nodes: tuple[NodeGroup, ...]
    took: ChangeTimes
    left_out: dict[str, int]
    families: Count  # number of lines
    jobs: Count  # number of lines


class _Kind(msgspec.Struct, frozen=True):
    kind: Literal["recording"]
    version: int


def write_recording(recording: Recording, path: Path) -> None:
    """Write a recording atomically, for `read_recording`.

    Raises:
        TraceError: if the file cannot be written.
    """
    header = Header(
        version=VERSION,
        name=recording.name,
        nodes=recording.nodes,
        took=recording.took,
        left_out=recording.left_out,
        families=len(recording.families),
        jobs=len(recording.jobs),
    )
    lines = [header, *recording.families, *recording.jobs]
    write_whole(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines), TraceError)


def read_recording(path: Path) -> Recording:
    """Read a recording.

    Raises:
        TraceError: if the file cannot be read or is not a recording; names file and line.
    """
    lines = _lines(path)
    first = _next(path, lines, 1)
    found = _decoded(path, 1, first, _Kind, NO_RECORDING)
    if found.version != VERSION:
        what = f"{path}:1: a recording of version {found.version}"
        raise TraceError(what, f"this release reads version {VERSION}: export it again")
    header = _decoded(path, 1, first, Header, NO_RECORDING)
    _check_nodes(path, header.nodes)
    families = _read_families(path, lines, header)
    jobs = _read_jobs(path, lines, header, families)
    if next(lines, b"").strip():
        what = f"{path}:{2 + len(families) + len(jobs)}: more lines than the header states"
        raise TraceError(what, "export it again")
    if not jobs:
        raise TraceError(f"{path}:1: no jobs", "record a window in which some were submitted")
    return Recording(
        name=header.name,
        nodes=header.nodes,
        took=header.took,
        families=tuple(families.values()),
        jobs=tuple(sorted(jobs.values(), key=lambda job: job.at)),
        left_out=header.left_out,
    )


def _read_families(path: Path, lines: Iterator[bytes], header: Header) -> dict[str, Family]:
    families: dict[str, Family] = {}
    for number in range(2, 2 + header.families):
        family = _decoded(path, number, _next(path, lines, number), Family)
        _only_once(path, number, family.name, families)
        families[family.name] = family
    return families


def _read_jobs(
    path: Path, lines: Iterator[bytes], header: Header, families: dict[str, Family]
) -> dict[str, Submission]:
    jobs: dict[str, Submission] = {}
    first = 2 + len(families)
    for number in range(first, first + header.jobs):
        job = _decoded(path, number, _next(path, lines, number), Submission)
        _only_once(path, number, job.name, jobs)
        _check_job(path, number, job, families)
        jobs[job.name] = job
    return jobs


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while raw := file.readline(MAX_LINE_BYTES):
                yield raw
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "name a readable file") from None
    except ValueError as error:  # a NUL in the path
        raise TraceError(f"{str(path)!r}: {error}", "name a readable file") from None


def _next(path: Path, lines: Iterator[bytes], number: int) -> bytes:
    raw = next(lines, None)
    if raw is None or number > MAX_LINES:
        what = f"{path}:{number}: the file ends before all its jobs" if number > 1 else str(path)
        raise TraceError(what if number > 1 else f"{what}:1: the file is empty", NO_RECORDING)
    return raw


def _decoded(
    path: Path, number: int, raw: bytes, line: type[Line], hint: str = "export it again"
) -> Line:
    try:
        return msgspec.json.decode(raw, type=line)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise TraceError(f"{path}:{number}: {error}", hint) from None


def _only_once(path: Path, number: int, name: str, known: dict[str, Line]) -> None:
    if name in known:
        raise TraceError(f"{path}:{number}: {name!r} is duplicated", "delete one")


def _check_nodes(path: Path, nodes: tuple[NodeGroup, ...]) -> None:
    if not nodes or any(group.count < 1 or group.slots < 1 for group in nodes):
        raise TraceError(f"{path}:1: a cluster without slots", "give nodes with some", "nodes")
    if any(group.model not in RELATIVE_SPEEDS for group in nodes):
        raise TraceError(f"{path}:1: unknown GPU type", "leave it empty", "nodes")


def _check_job(path: Path, number: int, job: Submission, families: dict[str, Family]) -> None:
    if job.family not in families:
        what = f"{path}:{number}: job {job.name}: there is no line for family {job.family!r}"
        raise TraceError(what, "add a line for the family, or delete the job", "family")
    if job.ended == "cancelled" and job.ended_after_s is None:
        what = f"{path}:{number}: job {job.name} was cancelled at an unknown time"
        raise TraceError(what, "give its ended_after_s", "ended_after_s")
    for problem in problems(job.spec):
        what = f"{path}:{number}: job {job.name}: {problem.field}: {problem.what}"
        raise TraceError(what, problem.remedy, problem.field)
