"""Recordings of a cluster as values, and step times derived from their measurements.

No formula is fitted to step times. Policies fit a formula to their observations, and a simulated
truth of the same form would make their forecasts exact. Between two measurements a step time is
interpolated linearly. Beyond all measurements it is extrapolated, and marked as such: it grows as a
power of the local batch and of the slots. The exponent is that of the two nearest measurements,
limited to the range from 0 to 1. With a single measurement a published exponent is used. If only
groups across nodes were measured, a group within one node is as fast as a group of the same size
across nodes, and vice versa.

The file of a recording has JSON lines: a header, then families, then jobs.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from controlplane.sim.cluster import RELATIVE_SPEEDS, NodeGroup, TraceError
from controlplane.sim.models.job_model import Placement
from controlplane.sim.results import Trace, TraceJob
from schemas.epochs import StepTimes
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
    """Median seconds from the order of a change to its outcome, or None if none was recorded."""

    pause_s: NotNegative | None = None  # pause of training in changes of a running group
    start_s: NotNegative | None = None  # first start
    restart_s: NotNegative | None = None  # start from a checkpoint
    join_s: NotNegative | None = None  # change with new workers; training continues
    switch_s: NotNegative | None = None  # change of the batch, or to fewer slots


class EpochSpeed(msgspec.Struct, frozen=True, array_like=True):
    """Measured speed of a whole epoch that one group trained."""

    nodes: PositiveInt
    slots: PositiveInt
    batch: PositiveInt  # global, samples per step
    samples_per_s: Positive
    sync_s: NotNegative | None = None  # time of the reduction per step; None: not reported
    passes: PositiveInt | None = None  # per step and worker


class Epoch(msgspec.Struct, frozen=True, array_like=True):
    """The report about one epoch of a job."""

    number: PositiveInt
    batch: PositiveInt  # global, at the end of the epoch
    noise_scale: Positive | None  # of the gradients, samples
    train_loss: float | None
    speed: EpochSpeed | None = None  # None: several groups trained the epoch
    lasted_s: Positive | None = None  # since the end of the previous epoch; None: unknown


class Family(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="family"):
    """Jobs with the same script and model, including jobs outside the recorded window."""

    name: Text
    speeds: tuple[EpochSpeed, ...]
    epoch_samples: Count  # largest ||D|| of any job
    took: ChangeTimes = ChangeTimes()
    finished: tuple[PositiveInt, ...] = ()  # samples that each succeeded job processed
    furthest: Count = 0  # largest number of samples that any job processed


class Submission(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="job"):
    """Job that was submitted in the recorded window."""

    name: Text  # name in the cluster
    at: NotNegative  # seconds after the first submission of the window
    user: Text
    family: Text
    spec: JobSpec  # without environment, arguments and paths
    ended: Ending
    ended_after_s: NotNegative | None  # seconds after the submission; None: not ended
    samples: Count  # number of processed samples
    stated_samples: PositiveInt | None  # stated work; None: not stated, or depends on a metric
    epoch_samples: PositiveInt  # ||D|| of the job or its family
    epochs: tuple[Epoch, ...]  # at most the last thousand


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster, families and submissions, which a simulation replays."""

    name: str
    nodes: tuple[NodeGroup, ...]  # at the time when the cluster had most slots
    took: ChangeTimes  # medians over all families
    families: tuple[Family, ...]
    jobs: tuple[Submission, ...]
    left_out: dict[str, int]  # jobs of the window that cannot be replayed, by reason

    def as_trace(self) -> Trace:
        """Return the submissions as a trace; the workload of a job is its own name.

        A job that was cancelled is cancelled after the same time. A job that failed fails at the
        end of the work that it had done.
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


# Exponents by which step times grow if a family has a single measurement.
# Over the local batch: the median of the six applications in Pollux' published tables (OSDI 2021)
# on one GPU, from the smallest to the largest batch. The range is 0.15 to 0.82.
BATCH_POWER: Final = 0.7
# Over the slots, at the same local batch: the median of the 19 workloads that Gavel published
# both on 1 and on 8 GPUs (`trace_layouts.STEPS_PER_S`). The range is -0.19 to 0.57.
SLOTS_POWER: Final = 0.1
MIN_STEP_S: Final = 1e-9


class StepTime(NamedTuple):
    """Seconds of a step, and True if they are extrapolated."""

    seconds: float
    extrapolated: bool


class _Size(NamedTuple):
    nodes: int
    slots: int
    batch: int  # global, samples per step


Kind = TypeVar("Kind")
_Line = Sequence[tuple[float, float]]  # local batch and seconds of a step, in increasing order


def _at(line: _Line, local: float) -> StepTime:
    """Return the interpolated step time at a local batch; beyond all points, extrapolate."""
    if line[0][0] <= local <= line[-1][0]:
        locals_, seconds = zip(*line, strict=True)
        return StepTime(float(np.interp(local, locals_, seconds)), extrapolated=False)
    edge = line[:2] if local < line[0][0] else line[-2:]
    return StepTime(_extrapolate(edge, local, BATCH_POWER), extrapolated=True)


class FamilyStepTimes:
    """Step times of one family, for any group and batch."""

    def __init__(self, family: Family) -> None:
        """Index the measurements of a family, at least one whole epoch on one group."""
        seen: dict[_Size, list[float]] = {}
        for speed in family.speeds:
            size = _Size(speed.nodes, speed.slots, speed.batch)
            seen.setdefault(size, []).append(speed.batch / speed.samples_per_s)
        self._reduction_times = _reduction_times(family.speeds)
        self._exact = _lines(seen, lambda size: (size.nodes, size.slots))
        near = {size: times for size, times in seen.items() if size.nodes == 1}
        far = {size: times for size, times in seen.items() if size.nodes > 1}
        self._near, self._far = (_lines(kind, lambda size: size.slots) for kind in (near, far))

    def step(self, placement: Placement, batch: int) -> StepTime:
        """Return the step time of a group at a global batch."""
        return self._step(_Size(len(placement), sum(placement), batch))

    def parts(self, placement: Placement, batch: int, step_s: float) -> StepTimes | None:
        """Return the parts of a step of `step_s` seconds, or None if no such group has them."""
        size = _Size(len(placement), sum(placement), batch)
        sync_s, passes = self._reduction_times.get(size, (0.0, 0))
        if not passes:
            return None
        sync_s = min(sync_s, step_s)
        share = -(-batch // size.slots)
        return StepTimes((step_s - sync_s) / passes + sync_s, sync_s, -(-share // passes), passes)

    def slowdown(self, job: Submission) -> float:
        """Return the ratio of a job's step times to its family's; closer to 1 for few epochs."""
        seen = [epoch.speed for epoch in job.epochs if epoch.speed is not None]
        if not seen:
            return 1.0
        took = [1.0 / speed.samples_per_s for speed in seen]
        usual = [self._step(_Size(s.nodes, s.slots, s.batch)).seconds / s.batch for s in seen]
        believed = float(np.mean(usual))  # counts as one more epoch at the family's usual speed
        return (math.fsum(took) + believed) / (math.fsum(usual) + believed)

    def _step(self, size: _Size) -> StepTime:
        local = size.batch / size.slots
        exact = self._exact.get((size.nodes, size.slots))
        if exact is not None:
            found = _at(exact, local)
        else:
            same, other = self._near, self._far
            if size.nodes > 1:
                same, other = other, same
            found = _across_slots(same or other, size.slots, local)
            if not same:
                found = StepTime(found.seconds, extrapolated=True)
        return StepTime(max(MIN_STEP_S, found.seconds), found.extrapolated)


def _reduction_times(speeds: Sequence[EpochSpeed]) -> dict[_Size, tuple[float, int]]:
    """Return mean reduction seconds and passes of a step by size; skip sizes without reports."""
    reported: dict[_Size, list[tuple[float, int]]] = {}
    for speed in speeds:
        if speed.sync_s is not None and speed.passes is not None:
            size = _Size(speed.nodes, speed.slots, speed.batch)
            reported.setdefault(size, []).append((speed.sync_s, speed.passes))
    return {
        size: (float(np.mean([sync_s for sync_s, _ in each])), each[-1][1])
        for size, each in reported.items()
    }


def _lines(
    seen: Mapping[_Size, Sequence[float]], kind_of: Callable[[_Size], Kind]
) -> dict[Kind, _Line]:
    """Return the step times of each kind of size by local batch, averaged over measurements."""
    found: dict[Kind, dict[float, list[float]]] = {}
    for size, times in seen.items():
        line = found.setdefault(kind_of(size), {})
        line.setdefault(size.batch / size.slots, []).extend(times)
    return {
        kind: [(local, float(np.mean(times))) for local, times in sorted(line.items())]
        for kind, line in found.items()
    }


def _across_slots(lines: Mapping[int, _Line], slots: int, local: float) -> StepTime:
    """Return the step time between or beyond the nearest measured sizes in `lines`."""
    sizes = sorted(lines)
    place = bisect_left(sizes, slots)
    if place < len(sizes) and sizes[place] == slots:
        return _at(lines[slots], local)
    if 0 < place < len(sizes):
        low, high = sizes[place - 1], sizes[place]
        one, other = _at(lines[low], local), _at(lines[high], local)
        share = (slots - low) / (high - low)
        seconds = one.seconds * (1.0 - share) + other.seconds * share
        return StepTime(seconds, one.extrapolated or other.extrapolated)
    pair = sizes[:2] if place == 0 else sizes[-2:]
    points = [(float(size), _at(lines[size], local).seconds) for size in pair]
    return StepTime(_extrapolate(points, float(slots), SLOTS_POWER), extrapolated=True)


def _extrapolate(points: Sequence[tuple[float, float]], target: float, usual: float) -> float:
    """Return the value at `target`, by the power of the line through one or two points.

    Points are (batch or slots, seconds), in increasing order. A single point has power `usual`.
    """
    (low, one), (high, other) = points[0], points[-1]
    power = usual
    if high > low:
        power = min(1.0, max(0.0, math.log(other / one) / math.log(high / low)))
    nearest, seconds = points[0] if target < low else points[-1]
    return seconds * math.pow(target / nearest, power)


def write_whole(path: Path, content: str | bytes, refusal: type[OnesError]) -> None:
    """Write a file atomically; text is UTF-8. Raise `refusal` if the file cannot be written."""
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
MAX_LINE_BYTES: Final = 1 << 26  # the line of a family has a measurement for each epoch
MAX_LINES: Final = 1_000_000
NO_RECORDING: Final = "name a file that a recording was written to"
Line = TypeVar("Line")


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="recording"):
    """First line of a recording's file."""

    version: int
    name: str
    nodes: tuple[NodeGroup, ...]
    took: ChangeTimes
    left_out: dict[str, int]
    families: Count  # number of family lines
    jobs: Count  # number of job lines


class _Kind(msgspec.Struct, frozen=True):
    kind: Literal["recording"]
    version: int


def write_recording(recording: Recording, path: Path) -> None:
    """Write a recording atomically; `read_recording` reads the file."""
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
    """Read the recording that `write_recording` wrote; raise `TraceError` if this is impossible."""
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
    """Lines of a recording's file; an error names the file and the last line that was read."""

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
        """Return the next line; at the end raise `TraceError`, or return b"" if `at_end`."""
        self._number += 1
        raw = next(self._rest, b"")
        if not at_end and (not raw or self._number > MAX_LINES):
            early = "the file ends before all its jobs"
            raise self.refusal(early if self._number > 1 else "the file is empty", NO_RECORDING)
        return raw

    def decode(self, raw: bytes, line: type[Line], hint: str = "export it again") -> Line:
        """Decode `raw`, the last line that was read."""
        try:
            return msgspec.json.decode(raw, type=line)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise self.refusal(str(error), hint) from None

    def add(self, name: str, line: Line, known: dict[str, Line]) -> None:
        """Add a line to `known` under its name; raise `TraceError` if the name exists."""
        if name in known:
            raise self.refusal(f"{name!r} is duplicated", "delete one")
        known[name] = line

    def refusal(self, problem: str, hint: str, field: str = "") -> TraceError:
        """Return an error about the last line that was read; the caller raises it."""
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
