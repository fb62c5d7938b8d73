"""A steady cluster in virtual time: jobs train, telemetry is noisy, and plans are carried out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from numpy.random import default_rng

from controlplane.policy.api import (
    Budget,
    ClusterView,
    EpochSeen,
    JobView,
    PlanTaken,
    SlotView,
    StepsSeen,
)
from controlplane.policy.ones.policy import Ones
from schemas.ids import JobId, Seconds, SlotId, node_of
from tests.support.builders import job_view
from tests.support.views import view_of

EPOCH = 20_000  # samples
SMOOTHING = 0.1  # of noise scales, by the library


class SteadyCluster:
    """Feeds a policy what a live cluster would, and does what it plans at once."""

    def __init__(
        self,
        slots: Sequence[SlotView],
        jobs: Sequence[JobView],
        *,
        noise: float = 0.05,
        seed: int = 0,
        scaling: float = 0.8,
        thinks: int = 32,
        step_s: float = 0.1,
        phi: float | None = None,
    ) -> None:
        self.policy = Ones()
        self.slots, self.noise, self.scaling, self.thinks = slots, noise, scaling, thinks
        self.first_step_s, self.phi = step_s, phi
        self.jobs = {job.job: job for job in jobs}
        self.done = dict.fromkeys(self.jobs, 0.0)
        self.steps = dict.fromkeys(self.jobs, 0.0)
        self.group = dict.fromkeys(self.jobs, 1)
        self.off = dict.fromkeys(self.jobs, 0.0)
        self.now, self.version = 100.0, 1
        self.rng = default_rng(seed)
        self.changes: list[tuple[float, JobId, str, str]] = []

    def speed(self, on: Mapping[SlotId, int]) -> float:
        """Samples per second: half of a step does not depend on the batch."""
        batch, slots = sum(on.values()), len(on)
        far = 1.15 if len({node_of(slot) for slot in on}) > 1 else 1.0
        step_s = (
            self.first_step_s * (0.5 + 0.5 * batch / slots / 64) * slots ** (1 - self.scaling) * far
        )
        return float(batch / step_s)

    def run(self, seconds: int) -> None:
        """Live through so much time, a second at a time."""
        for _ in range(seconds):
            self.now += 1.0
            for name in self.jobs:
                self._train(name)
            view = self.view()
            rng = default_rng((0, self.version))
            self.policy.improve(view, Budget(steps=self.thinks), rng, Seconds(self.now))
            self._carry_out(view)

    def view(self) -> ClusterView:
        return view_of(self.slots, *self.jobs.values(), version=self.version)

    def _train(self, name: JobId) -> None:
        job = self.jobs[name]
        if not job.running_on:
            return
        on, before = job.running_on, self.done[name]
        speed = self.speed(on)
        batch = sum(on.values())
        self.done[name] += self._noisy(speed)
        self.steps[name] += (self.done[name] - before) / batch
        nodes = len({node_of(slot) for slot in on})
        size: dict[str, Any] = {
            "family": job.family,
            "slots": len(on),
            "nodes": nodes,
            "global_batch": batch,
        }
        seen = StepsSeen(
            job=name, group=self.group[name], step=int(self.steps[name]),
            samples_done=int(self.done[name]), samples_per_s=self._noisy(speed),
            noise_scale=self._noise_scale(name), **size,
        )  # fmt: skip
        self.policy.observe(seen, Seconds(self.now))
        epoch = int(self.done[name] // EPOCH)
        if epoch > job.epoch:
            self.version += 1
            self.jobs[name] = msgspec.structs.replace(
                job, epoch=epoch, epoch_at=Seconds(self.now), samples_done=epoch * EPOCH,
                epoch_samples=EPOCH, samples_per_s=speed,
            )  # fmt: skip
            whole = before >= EPOCH * (epoch - 1) and job.moved_at < job.epoch_at
            heard = EpochSeen(
                job=name, samples_per_s=self._noisy(speed), whole=whole, epoch=epoch,
                noise_scale=self._noise_scale(name), **size,
            )  # fmt: skip
            self.policy.observe(heard, Seconds(self.now))

    def _noisy(self, speed: float) -> float:
        return speed * max(0.1, 1.0 + self.noise * float(self.rng.standard_normal()))

    def _noise_scale(self, name: JobId) -> float | None:
        """Measured roughly, ten times as far off as a speed, and smoothed as the library does."""
        if self.phi is None:
            return None
        off = 10.0 * self.noise * float(self.rng.standard_normal())
        self.off[name] += SMOOTHING * (off - self.off[name])
        return self.phi * math.exp(self.off[name])

    def _carry_out(self, view: ClusterView) -> None:
        plan = self.policy.plan(view, Seconds(self.now))
        moved = False
        for name, job in view.jobs.items():
            placed = plan.local_batch.get(name, {})
            if placed == job.running_on:
                continue
            moved = True
            why = plan.reasons[name]
            self.changes.append((self.now - 100.0, name, why.code, why.text))
            self.group[name] += 1
            ran = self.now - job.moved_at if job.running_on else 0.0
            stays = placed.keys() == job.running_on.keys()
            self.jobs[name] = msgspec.structs.replace(
                job, running_on=placed, moved_at=Seconds(self.now), ran_s=job.ran_s + ran,
                placed_at=job.placed_at if stays else Seconds(self.now),
                start_s=3.0,
            )  # fmt: skip
        if moved:
            self.version += 1
            waiting = tuple(n for n, job in self.jobs.items() if not job.running_on)
            self.policy.observe(PlanTaken(waiting=waiting), Seconds(self.now))


def a_job(number: int, **changes: object) -> JobView:
    """A job of 1 to 8 slots that has hours to go."""
    job = job_view(JobId(f"j-{number}"), at=float(number), slots=(1, 8))
    job = msgspec.structs.replace(
        job, family="f", batch_limit=512, local_limit=128, stop_samples=20_000_000
    )
    return msgspec.structs.replace(job, **changes)
