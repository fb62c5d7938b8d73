"""Recordings of a cluster as values, and step times derived from their measurements.

No closed form is fitted to step times: the policies fit one to their observations, and a truth of
the same form would prove them right. Between two measurements a step time is interpolated linearly.
Beyond all of them it is extrapolated, and marked so: a step grows with the local batch, and with
the slots, by the power between the two nearest measurements, from 0 (not at all) to 1 (in
proportion); with a single measurement, by a published power (`BATCH_POWER`, `SLOTS_POWER`). A group
within a node where only groups across nodes were measured, or vice versa, is as fast as the other
kind of the same size.

Files of recordings: JSON lines with a header, then families, then jobs.

`write_whole` writes any file atomically.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from controlplane.sim.cluster import RELATIVE_SPEEDS, NodeGroup, TraceError
from controlplane.sim.models.job_model import Placement, StepParts
from controlplane.sim.results import Trace, TraceJob
from schemas.errors import OnesError
from schemas.ids import Seconds
from schemas.jobs import JobSpec, problems

MIN_POSITIVE: Final = 1e-9  # smallest positive number
MAX_NUMBER: Final = 1e12  # largest number: 30,000 years in seconds
FAILURE_SHARE: Final = 1.0 - 1e-6  # share of the work at which a failed job fails again

Positive = Annotated[float, msgspec.Meta(ge=MIN_POSITIVE, le=MAX_NUMBER)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_NUMBER)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Ending = Literal["succeeded", "failed", "cancelled", "unfinished"]


class ChangeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Median durations of changes from order to outcome, in seconds; None: there was none."""

    start_s: NotNegative | None = None  # first start
    restart_s: NotNegative | None = None  # from a checkpoint
    join_s: NotNegative | None = None  # change with newcomers; training continues
    switch_s: NotNegative | None = None  # change without: batch, fewer slots


class EpochSpeed(msgspec.Struct, frozen=True, array_like=True):
    """Measured speed of a whole epoch on one group."""

    nodes: PositiveInt
    slots: PositiveInt
    batch: PositiveInt  # global, samples per step
    samples_per_s: Positive
    sync_s: NotNegative | None = None  # per step, in the reduction; None: not reported
    passes: PositiveInt | None = None  # per step and worker


class Epoch(msgspec.Struct, frozen=True, array_like=True):
    """Report of one epoch of a job."""

    number: PositiveInt
    batch: PositiveInt  # global, at its end
    noise_scale: Positive | None  # of the gradients, samples
    train_loss: float | None
    speed: EpochSpeed | None = None  # None: several groups trained it
    lasted_s: Positive | None = None  # since the end of the epoch before; None as above


class Family(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="family"):
    """Jobs of one script and model, inside the window or outside."""

    name: Text
    speeds: tuple[EpochSpeed, ...]
    epoch_samples: Count  # ||D||, the largest
    took: ChangeTimes = ChangeTimes()
    finished: tuple[PositiveInt, ...] = ()  # samples of each succeeded job
    furthest: Count = 0  # largest number of samples of any job


class Submission(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="job"):
    """Job that was submitted in the window."""

    name: Text  # name in the cluster
    at: NotNegative  # seconds after the first submission of the window
    user: Text
    family: Text
    spec: JobSpec  # without environment, arguments, paths
    ended: Ending
    ended_after_s: NotNegative | None  # after the submission; None: not ended
    samples: Count  # processed
    stated_samples: PositiveInt | None  # stated work, if it does not depend on a metric
    epoch_samples: PositiveInt  # ||D|| of the job or its family
    epochs: tuple[Epoch, ...]  # the last thousand at most


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a replay: cluster, families and submissions."""

    name: str
    nodes: tuple[NodeGroup, ...]  # when the cluster had most slots in the window
    took: ChangeTimes  # over all families
    families: tuple[Family, ...]
    jobs: tuple[Submission, ...]
    left_out: dict[str, int]  # jobs of the window that cannot be replayed, by reason

    def as_trace(self) -> Trace:
        """Return the submissions; a job's workload is its own name, because its work is its own.

        A job that its user cancelled is cancelled after the same time; a job that failed fails at
        the end of what it had processed.
        """
        return Trace(name=self.name, jobs=tuple(_trace_job(job) for job in self.jobs))


def _trace_job(job: Submission) -> TraceJob:
    return TraceJob(
        name=job.name,
        at=Seconds(job.at),
        workload=job.name,
        slots=job.spec.wanted,
        batch=job.spec.batch_size,
        user=job.user,
        cancelled_after_s=job.ended_after_s if job.ended == "cancelled" else None,
        crashes_at=FAILURE_SHARE if job.ended == "failed" else None,
        samples=job.samples or None,
    )


# Powers of the growth of step times where a family has a single measurement.
# By local batch: the median of the six applications in Pollux' published tables (OSDI 2021) on
# one GPU, from the smallest to the largest batch; the range is 0.15 to 0.82.
BATCH_POWER: Final = 0.7
# By slots, at the same local batch: the median of the 19 workloads that Gavel published both on
# 1 and on 8 GPUs (`trace_csv.STEPS_PER_S`); the range is -0.19 to 0.57.
SLOTS_POWER: Final = 0.1
MIN_STEP_S: Final = 1e-9


class StepTime(NamedTuple):
    """Seconds of a step, and whether they are extrapolated."""

    seconds: float
    extrapolated: bool


class _Size(NamedTuple):
    nodes: int
    slots: int
    batch: int  # global, samples per step


class _Line:
    """Step times of one size by local batch."""

    def __init__(self, points: Mapping[float, float]) -> None:
        self._locals = sorted(points)
        self._seconds = [points[local] for local in self._locals]

    def at(self, local: float) -> StepTime:
        """Interpolate between measurements, or extrapolate by a power of the batch."""
        least, most = self._locals[0], self._locals[-1]
        if least <= local <= most:
            seconds = float(np.interp(local, self._locals, self._seconds))
            return StepTime(seconds, extrapolated=False)
        edge = slice(0, 2) if local < least else slice(-2, None)
        points = list(zip(self._locals[edge], self._seconds[edge], strict=True))
        return StepTime(_extrapolate(points, local, BATCH_POWER), extrapolated=True)


class StepTimes:
    """Step times of one family."""

    def __init__(self, family: Family) -> None:
        """Index the family's measurements; at least one whole epoch on one group is needed."""
        seen: dict[_Size, list[float]] = {}
        for speed in family.speeds:
            size = _Size(speed.nodes, speed.slots, speed.batch)
            seen.setdefault(size, []).append(speed.batch / speed.samples_per_s)
        self._known: dict[tuple[Placement, int], StepTime] = {}
        self._reduction_times = _reduction_times(family.speeds)
        sizes = list(seen)
        self._exact = {
            shape: _line(seen, [size for size in sizes if size[:2] == shape])
            for shape in {size[:2] for size in sizes}
        }
        near = [size for size in sizes if size.nodes == 1]
        far = [size for size in sizes if size.nodes > 1]
        self._near, self._far = (
            {
                slots: _line(seen, [size for size in kind if size.slots == slots])
                for slots in {size.slots for size in kind}
            }
            for kind in (near, far)
        )

    def step(self, placement: Placement, batch: int) -> StepTime:
        """Return the step time of a group with a global batch."""
        key = (placement, batch)
        known = self._known.get(key)
        if known is None:
            size = _Size(len(placement), sum(placement), batch)
            known = self._known[key] = self._step(size)
        return known

    def parts(self, placement: Placement, batch: int, step_s: float) -> StepParts | None:
        """Return how a step of `step_s` divides, or None if such workers did not report it."""
        size = _Size(len(placement), sum(placement), batch)
        sync_s, passes = self._reduction_times.get(size, (0.0, 0))
        if not passes:
            return None
        sync_s = min(sync_s, step_s)
        share = -(-batch // size.slots)
        return StepParts((step_s - sync_s) / passes + sync_s, sync_s, -(-share // passes), passes)

    def slowdown(self, job: Submission) -> float:
        """Return the factor by which a job's steps were slower than its family's; 1 without epochs.

        The fewer epochs of the job were measured, the closer the factor is to 1.
        """
        seen = [epoch.speed for epoch in job.epochs if epoch.speed is not None]
        if not seen:
            return 1.0
        took = [1.0 / speed.samples_per_s for speed in seen]
        usual = [self._step(_Size(s.nodes, s.slots, s.batch)).seconds / s.batch for s in seen]
        believed = float(np.mean(usual))  # one more epoch, at the usual speed
        return (math.fsum(took) + believed) / (math.fsum(usual) + believed)

    def _step(self, size: _Size) -> StepTime:
        local = size.batch / size.slots
        exact = self._exact.get((size.nodes, size.slots))
        if exact is not None:
            found = exact.at(local)
        else:
            same, other = self._near, self._far
            if size.nodes > 1:
                same, other = other, same
            found = _across_slots(same or other, size.slots, local)
            if not same:
                found = StepTime(found.seconds, extrapolated=True)
        return StepTime(max(MIN_STEP_S, found.seconds), found.extrapolated)


def _reduction_times(speeds: Sequence[EpochSpeed]) -> dict[_Size, tuple[float, int]]:
    """Return mean reduction seconds and passes of a step by size, where workers reported them."""
    reported: dict[_Size, list[tuple[float, int]]] = {}
    for speed in speeds:
        if speed.sync_s is not None and speed.passes is not None:
            size = _Size(speed.nodes, speed.slots, speed.batch)
            reported.setdefault(size, []).append((speed.sync_s, speed.passes))
    return {
        size: (float(np.mean([sync_s for sync_s, _ in each])), each[-1][1])
        for size, each in reported.items()
    }


def _line(seen: Mapping[_Size, Sequence[float]], sizes: Sequence[_Size]) -> _Line:
    """Return the means over all measurements of `sizes`, which share one line, by local batch."""
    found: dict[float, list[float]] = {}
    for size in sizes:
        found.setdefault(size.batch / size.slots, []).extend(seen[size])
    return _Line({local: float(np.mean(times)) for local, times in found.items()})


def _across_slots(lines: Mapping[int, _Line], slots: int, local: float) -> StepTime:
    """Interpolate between the nearest measured sizes of one kind, or extrapolate beyond them."""
    sizes = sorted(lines)
    place = bisect_left(sizes, slots)
    if place < len(sizes) and sizes[place] == slots:
        return lines[slots].at(local)
    if 0 < place < len(sizes):
        low, high = sizes[place - 1], sizes[place]
        one, other = lines[low].at(local), lines[high].at(local)
        share = (slots - low) / (high - low)
        seconds = one.seconds * (1.0 - share) + other.seconds * share
        return StepTime(seconds, one.extrapolated or other.extrapolated)
    pair = sizes[:2] if place == 0 else sizes[-2:]
    points = [(float(size), lines[size].at(local).seconds) for size in pair]
    return StepTime(_extrapolate(points, float(slots), SLOTS_POWER), extrapolated=True)


def _extrapolate(points: Sequence[tuple[float, float]], target: float, usual: float) -> float:
    """Extrapolate beyond one or two points by the power between them; `usual` for one point.

    Points are (batch or slots, seconds), in increasing order.
    """
    (low, one), (high, other) = points[0], points[-1]
    power = usual
    if high > low:
        power = min(1.0, max(0.0, math.log(other / one) / math.log(high / low)))
    nearest, seconds = points[0] if target < low else points[-1]
    return seconds * math.pow(target / nearest, power)


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
    """Write a recording atomically, for `read_recording`."""
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
    """Read a recording."""
    lines = _Lines(path)
    first = lines.read()
    found = lines.decode(first, _Kind, NO_RECORDING)
    if found.version != VERSION:
        hint = f"this release reads version {VERSION}: export it again"
        raise lines.refusal(f"a recording of version {found.version}", hint)
    header = lines.decode(first, Header, NO_RECORDING)
    if not header.nodes or any(group.count < 1 or group.slots < 1 for group in header.nodes):
        raise lines.refusal("a cluster without slots", "give nodes with some", "nodes")
    if any(group.model not in RELATIVE_SPEEDS for group in header.nodes):
        raise lines.refusal("unknown GPU type", "leave it empty", "nodes")
    if not header.jobs:
        raise lines.refusal("no jobs", "record a cluster to which some were submitted")
    families: dict[str, Family] = {}
    jobs: dict[str, Submission] = {}
    for _ in range(header.families):
        family = lines.decode(lines.read(), Family)
        lines.add(family.name, family, families)
    for _ in range(header.jobs):
        job = lines.decode(lines.read(), Submission)
        lines.add(job.name, job, jobs)
        _check_job(lines, job, families)
    if lines.read(at_end=True).strip():
        raise lines.refusal("more lines than the header states", "export it again")
    return Recording(
        name=header.name,
        nodes=header.nodes,
        took=header.took,
        families=tuple(families.values()),
        jobs=tuple(sorted(jobs.values(), key=lambda job: job.at)),
        left_out=header.left_out,
    )


class _Lines:
    """Lines of a recording's file; errors name the file and the line read last."""

    def __init__(self, path: Path) -> None:
        self._path, self._number, self._rest = path, 0, self._open(path)

    def _open(self, path: Path) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                while raw := file.readline(MAX_LINE_BYTES):
                    yield raw
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror}", "name a readable file") from None
        except ValueError as error:  # a NUL in the path
            raise TraceError(f"{str(path)!r}: {error}", "name a readable file") from None

    def read(self, *, at_end: bool = False) -> bytes:
        """Return the next line; none left is an error, or empty `at_end`."""
        self._number += 1
        raw = next(self._rest, b"")
        if not at_end and (not raw or self._number > MAX_LINES):
            early = "the file ends before all its jobs"
            raise self.refusal(early if self._number > 1 else "the file is empty", NO_RECORDING)
        return raw

    def decode(self, raw: bytes, line: type[Line], hint: str = "export it again") -> Line:
        """Decode the line read last."""
        try:
            return msgspec.json.decode(raw, type=line)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise self.refusal(str(error), hint) from None

    def add(self, name: str, line: Line, known: dict[str, Line]) -> None:
        """Add a line to those of its kind, whose names are unique."""
        if name in known:
            raise self.refusal(f"{name!r} is duplicated", "delete one")
        known[name] = line

    def refusal(self, problem: str, hint: str, field: str = "") -> TraceError:
        """Return the error of the line read last, to be raised."""
        return TraceError(f"{self._path}:{self._number}: {problem}", hint, field)


def _check_job(lines: _Lines, job: Submission, families: Mapping[str, Family]) -> None:
    if job.family not in families:
        problem = f"job {job.name}: there is no line for family {job.family!r}"
        raise lines.refusal(problem, "add a line for the family, or delete the job", "family")
    if job.ended == "cancelled" and job.ended_after_s is None:
        problem = f"job {job.name} was cancelled at an unknown time"
        raise lines.refusal(problem, "give its ended_after_s", "ended_after_s")
    for wrong in problems(job.spec):
        problem = f"job {job.name}: {wrong.field}: {wrong.what}"
        raise lines.refusal(problem, wrong.remedy, wrong.field)
