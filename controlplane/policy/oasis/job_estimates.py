"""The estimates of the speed of jobs by number of slots, and of their remaining work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    JobEnded,
    JobView,
    PolicyEvent,
    StepsSeen,
)
from controlplane.policy.search.observed_families import FamilyHistories
from controlplane.prediction import FloatArray
from controlplane.prediction.lengths import remaining_samples
from controlplane.prediction.slowdowns import stretch
from schemas.ids import JobId, Seconds, node_of

MIN_PACE_AGE_S: Final = 5.0  # younger groups have too few reports
SMOOTHING: Final = 0.2  # weight of the newest pace; a judgement
MIN_PACE: Final = 0.02


@dataclass(slots=True)
class _Seen:
    """Latest telemetry of a job, and the first telemetry of its group."""

    group: tuple[int, int] = (0, 0)  # (version, batch)
    samples: int = 0
    samples_per_s: float = 0.0
    at: Seconds = Seconds(0.0)
    first: int = 0  # samples at the first report of the group
    began: Seconds = Seconds(0.0)


class OasisEstimates:
    """The speeds of families by epochs and telemetry, and the work of jobs, stated or by family.

    If workers share the cores of their host, measured speeds are converted to those of a job alone.
    Predictions assume that every slot of the host is busy, because a promise must be kept in this
    case, too. GPU types are not distinguished.
    """

    def __init__(self) -> None:
        self._families = FamilyHistories()
        self._seen: dict[JobId, _Seen] = {}
        self._paces: dict[str, float] = {}  # by family: samples done over those at full speed
        self._stretch: dict[JobId, float] = {}  # slow-down of running jobs on their nodes now
        self._fullest = 1.0  # slow-down on a node without idle slots

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from an epoch, telemetry, or the end of a job."""
        match event:
            case EpochSeen():
                if event.whole:
                    self._measured(event)
            case StepsSeen():
                self._steps(event, now)
            case JobEnded():
                family = self._families[event.family]
                if event.succeeded and event.samples_done:
                    family.finished.append(event.samples_done)
                family.reached = max(family.reached, event.samples_done)
                self._seen.pop(event.job, None)

    def _steps(self, event: StepsSeen, now: Seconds) -> None:
        seen = self._seen.setdefault(event.job, _Seen())
        group = (event.group, event.global_batch)
        if seen.group != group:
            seen.first, seen.began = event.samples_done, now
        elif event.samples_done > seen.samples:
            self._measured(event)  # the first report may include a group that was still forming
            self._paced(event, seen, now)
        seen.group, seen.at = group, now
        seen.samples, seen.samples_per_s = event.samples_done, event.samples_per_s

    def _paced(self, event: StepsSeen, seen: _Seen, now: Seconds) -> None:
        """Learn the share of time that a family spends in steps; evaluations are no steps."""
        full = event.samples_per_s * (now - seen.began)
        if now - seen.began < MIN_PACE_AGE_S or not 0.0 < full < math.inf:
            return
        pace = min(max((event.samples_done - seen.first) / full, MIN_PACE), 1.0)
        before = self._paces.get(event.family, pace)
        self._paces[event.family] = before + SMOOTHING * (pace - before)

    def _measured(self, event: EpochSeen | StepsSeen) -> None:
        self._families[event.family].observe_speed(event, self._stretch.get(event.job, 1.0))

    def follow(self, view: ClusterView) -> None:
        """Record how much shared cores slow jobs down in this view."""
        cores = {slot.node: slot.cores or math.inf for slot in view.slots}
        slots = Counter(slot.node for slot in view.slots)
        busy = Counter(node_of(slot) for job in view.jobs.values() for slot in job.running_on)
        now = {node: stretch(many, cores.get(node, math.inf)) for node, many in busy.items()}
        self._stretch = {
            name: max(now[node_of(slot)] for slot in job.running_on)
            for name, job in view.jobs.items()
            if job.running_on
        }
        self._fullest = max((stretch(slots[node], cores[node]) for node in slots), default=1.0)

    def knows_speed(self, job: JobView) -> bool:
        """True if a job of this family was measured, including this job."""
        return bool(self._families[job.family].means)

    def largest(self, job: JobView) -> int:
        """Return the most slots on which a job of this family was measured, or 1 if none was."""
        return self._families[job.family].largest

    def samples_per_s(self, job: JobView, slots: Sequence[int], nodes: Sequence[int]) -> FloatArray:
        """Return the speed at each size with the user's batch, in samples/s, shape (sizes,)."""
        many = np.array(slots, dtype=np.int64)
        model = self._families[job.family].speed_model(job.batch_size)
        step_s = model.step_s(np.array(nodes, dtype=np.int64), many, job.batch_size / many)
        pace = self._paces.get(job.family, 1.0)
        return np.asarray(pace * job.batch_size / np.maximum(step_s * self._fullest, 1e-12))

    def remaining(self, job: JobView, now: float) -> float | None:
        """Return the remaining samples, extrapolated from the last report, or None if unknown."""
        family, seen = self._families[job.family], self._seen.get(job.job)
        done = float(job.samples_done)
        if seen is not None and seen.samples >= job.samples_done:
            on_s = max(0.0, now - seen.at) if job.running_on else 0.0
            pace = self._paces.get(job.family, 1.0)
            done = seen.samples + on_s * seen.samples_per_s * pace
        if job.stop_samples is None and not family.finished:
            return None
        return remaining_samples(done, job.stop_samples, family.finished, family.reached)
