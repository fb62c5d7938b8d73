"""Stop rules, and measurements of training: step times, loss, gradient noise, host usage, speed.

All clocks are arguments. The gradient noise scale estimates how large a batch can be before its
samples become redundant (McCandlish et al. 2018, appendix A.1): the squared norms of the gradients
of a small batch and a large batch differ by the noise. The small batch is a worker's share, and the
large batch is the group's. If a worker processes its share in several passes, each pass but the
last is a small batch. A worker that trains alone in single passes takes two steps in a row as the
small batches, and both together as the large batch (as Pollux does, OSDI '21, section 3.1). The
parameters move between them, which adds to the noise by about the square of the learning rate.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch

from elastic.training_errors import MissingMetricError
from schemas.epochs import StepTimes
from schemas.jobs import StopRule

WINDOW_S: Final = 2.0
FIRST_WINDOW_S: Final = 0.5  # minimum of the first, incomplete window


@dataclass(frozen=True, slots=True)
class StepMeans:
    """Means over the recent steps of one group, while its shares did not change."""

    version: int  # version of the group
    shares: tuple[int, ...]  # samples of a step, by rank
    samples_per_s: float = 0.0  # recent, all workers, including pauses; 0: unknown yet
    times: StepTimes | None = None  # recent whole steps, without pauses; None: unknown yet


@dataclass(slots=True)
class _WholeSteps:
    """Sums over complete steps of one group with the same shares."""

    steps: int = 0
    seconds: float = 0.0
    sync_s: float = 0.0
    share: int = 0  # samples of this worker in a step
    passes: int = 1

    def add(self, took_s: float, sync_s: float, share: int, passes: int) -> None:
        """Add one step."""
        self.steps, self.share, self.passes = self.steps + 1, share, passes
        self.seconds, self.sync_s = self.seconds + took_s, self.sync_s + sync_s

    def times(self) -> StepTimes | None:
        """Return the means, or None without steps. Only the last pass of a step has a reduction."""
        if not self.steps:
            return None
        step_s, sync_s = self.seconds / self.steps, self.sync_s / self.steps
        return StepTimes(
            pass_s=(step_s - sync_s) / self.passes + sync_s,
            sync_s=sync_s,
            local_batch=-(-self.share // self.passes),
            passes=self.passes,
        )


class RecentSteps:
    """Windows of complete steps of one group. Times are in seconds, from any fixed origin.

    A new group, or a change of the shares, starts a new window. The first step is left out, because
    it includes the change. While a member has no share, because its state is still arriving,
    nothing is measured.
    """

    def __init__(self, now: float) -> None:
        self.means: StepMeans | None = None  # replaced, never changed: another thread reads it
        self.steps = 0  # steps of the current group with the current shares
        self.sync_s = 0.0  # seconds of reductions in the running step
        self._is_first = True  # first window of a group: its means are used early
        self.begin_epoch(now)
        self._begin_window(now)

    def _begin_window(self, now: float) -> None:
        self._began = now
        self._samples, self._window = 0, _WholeSteps()

    def begin_epoch(self, now: float) -> None:
        """Start an epoch; the time since the last step is not measured."""
        self._step_began, self._epoch = now, _WholeSteps()
        self._epoch_began, self._epoch_samples = now, 0

    def epoch_speed(self, now: float) -> tuple[float, float]:
        """Return (samples/s of all workers in the epoch so far, seconds of the epoch so far)."""
        seconds = max(now - self._epoch_began, 1e-9)
        return self._epoch_samples / seconds, seconds

    def over_epoch(self) -> StepTimes | None:
        """Return the means over the epoch's complete steps in the current group, or None."""
        return self._epoch.times()

    def add_reduction(self, seconds: float) -> None:
        """Add the seconds of a reduction; a step can have several reductions."""
        self.sync_s += seconds

    def average_step(self) -> tuple[float, float]:
        """Return the mean seconds of a step and of its reductions, both 0 if not measured yet."""
        times = self.means.times if self.means is not None else None
        return (times.step_s, times.sync_s) if times is not None else (0.0, 0.0)

    def step_over(
        self,
        now: float,
        *,
        version: int,
        shares: tuple[int, ...],
        rank: int | None,
        samples: int,
        passes: int,
    ) -> None:
        """Record a finished step.

        `shares` are the current samples of a step, by rank; `rank` is None if this worker has none.
        `samples` is below their sum if the step ended an epoch. `passes` are this worker's passes.
        """
        self._epoch_samples += samples
        took_s, self._step_began = now - self._step_began, now
        sync_s, self.sync_s = min(self.sync_s, took_s), 0.0
        means = self.means
        if means is None or (means.version, means.shares) != (version, shares) or 0 in shares:
            self.means = None if 0 in shares else StepMeans(version, shares)
            self.steps = 0 if 0 in shares else 1
            self._is_first, self._epoch = True, _WholeSteps()
            self._begin_window(now)
            return
        self.steps += 1
        self._samples += samples
        share = shares[rank] if rank is not None else 0
        if share and samples == sum(shares):
            self._window.add(took_s, sync_s, share, passes)
            self._epoch.add(took_s, sync_s, share, passes)
        elapsed = now - self._began
        if elapsed >= (FIRST_WINDOW_S if self._is_first else WINDOW_S):
            speed, times = self._samples / elapsed, self._window.times() or means.times
            self.means = StepMeans(version, shares, speed, times)
        if elapsed >= WINDOW_S:
            self._is_first = False
            self._begin_window(now)


class LossMeter:
    """Mean training loss since the last `take`. Adding a loss does not wait for the device."""

    def __init__(self) -> None:
        self.scale: Callable[[], float] = lambda: 1.0  # factor of a tracked gradient scaler
        self._sum: torch.Tensor | float | None = None
        self._count = 0
        self.last: torch.Tensor | float | None = None  # loss of the running step, once known

    def pass_loss(self, losses: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the unscaled loss of one backward pass; None if `losses` is empty."""
        if not losses:
            return None
        total = losses[0] if len(losses) == 1 else torch.stack(list(losses)).mean()
        return total / self.scale()

    def add(self, loss: torch.Tensor | float) -> None:
        """Add a step's loss, a mean over samples or weighted items; a tensor has one element."""
        self._sum = loss if self._sum is None else self._sum + loss
        self.last = loss
        self._count += 1

    def mean(self) -> float | None:
        """Return the mean so far, or None if there are no losses."""
        total, count = self._sum, self._count
        return float(total) / count if total is not None and count else None

    def take(self) -> float | None:
        """Return the mean so far and reset it."""
        mean, self._sum, self._count = self.mean(), None, 0
        return mean


MEASURE_INTERVAL: Final = 4  # steps between measurements
SMOOTHING: Final = 0.1  # weight of the newest measurement
MIN_MEASUREMENTS: Final = 16  # measurements before the first estimate


class NoiseMeter:
    """Running estimates of the gradient's squared norm |G|^2 and of its variance tr(Sigma).

    The noise scale in samples is tr(Sigma) / |G|^2.
    """

    def __init__(self) -> None:
        # Sums over the running step: squared norms of the mean gradients of small batches, and
        # the inverse sizes of these batches.
        self._squares = 0.0
        self._inverse_sizes, self._parts = 0.0, 0
        self._last: tuple[torch.Tensor, int, int] | None = None  # gradient, step, samples
        self._means = (0.0, 0.0)  # |G|^2 and tr(Sigma); one pair, because another thread reads it
        self._count = 0

    def begin(self) -> None:
        """Start to measure a step."""
        self._squares, self._inverse_sizes, self._parts = 0.0, 0.0, 0

    def add_pass(self, share: torch.Tensor, own: int, whole: int) -> None:
        """Measure one pass's part `share` of the step's sum, shape (scalars,).

        `share` is the pass's mean gradient times `own` / `whole`. `own` is the number of samples
        in the pass, and `whole` is the number of samples in the step.
        """
        # Computed at once, because the reduction overwrites `share`.
        self._squares += float(torch.dot(share, share)) * (whole / own) ** 2
        self._inverse_sizes += 1.0 / own
        self._parts += 1

    def add_total(self, total: torch.Tensor, whole: int) -> None:
        """Measure the reduced sum `total`, shape (scalars,), and update the estimates.

        `total` is the mean gradient of `whole` samples. If one pass had all of these samples,
        nothing is measured.
        """
        squares, inverse, parts = self._squares, self._inverse_sizes, self._parts
        self.begin()
        if not parts or not parts < whole * inverse:
            return
        own, small = parts / inverse, squares / parts
        large = float(torch.dot(total, total))
        signal = (whole * large - own * small) / (whole - own)
        noise = (small - large) / (1.0 / own - 1.0 / whole)
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return  # overflow in this step
        self._count += 1
        weight = max(SMOOTHING, 1.0 / self._count)
        old_signal, old_noise = self._means
        self._means = (
            old_signal + weight * (signal - old_signal),
            old_noise + weight * (noise - old_noise),
        )

    def add_alone(self, gradient: torch.Tensor, step: int, samples: int) -> None:
        """Measure the mean gradient of a worker that trains alone, shape (scalars,).

        The first of two steps is kept, and the second one updates the estimates.
        """
        last, self._last = self._last, None
        if step % MEASURE_INTERVAL == 0:
            self._last = gradient, step, samples
        elif last is not None and last[1:] == (step - 1, samples):
            self.begin()
            for each in (last[0], gradient):
                self.add_pass(each / 2, samples, 2 * samples)
            self.add_total((last[0] + gradient) / 2, 2 * samples)

    def scale(self) -> float | None:
        """Return the noise scale in samples, or None without a valid estimate. Thread-safe."""
        signal, noise = self._means
        if self._count < MIN_MEASUREMENTS or signal <= 0 or noise <= 0:
            return None
        return noise / signal


USAGE_WINDOW_S: Final = 5.0
USER_TICKS, SYSTEM_TICKS = 11, 12  # fields of /proc/PID/stat after the name
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor and network use of a worker: means over the last window."""

    cpu_cores: float  # cores that this process and its children use
    sent_bytes_per_s: float  # rate at which gradients are sent


class UsageMeter:
    """Processor and network rates of a worker. Times are in seconds, from any fixed origin.

    The training thread counts the sent bytes, while another thread calls `usage`.
    """

    def __init__(self) -> None:
        self._sent = 0.0  # total of sent bytes
        self._mark: tuple[float, float, float] | None = None  # time, CPU seconds, bytes
        self._latest: Usage | None = None

    def count_all_reduce(self, sum_bytes: int, members: int) -> None:
        """Count a ring all-reduce: each of w members sends 2 (w - 1)/w times `sum_bytes`."""
        self._sent += 2.0 * (members - 1) / members * sum_bytes

    def usage(self, cpu_s: float, now: float) -> Usage | None:
        """Return the means over the last complete window, or None before the first one ends."""
        if self._mark is None:
            self._mark = (now, cpu_s, self._sent)
        began, cpu_then, sent_then = self._mark
        elapsed = now - began
        if elapsed >= USAGE_WINDOW_S:
            cores = max(0.0, cpu_s - cpu_then) / elapsed  # an exited child's time can vanish
            self._latest = Usage(cores, (self._sent - sent_then) / elapsed)
            self._mark = (now, cpu_s, self._sent)
        return self._latest


def cpu_seconds() -> float:
    """Return the processor seconds of this process and its children, such as loader workers."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() + ended.ru_utime + ended.ru_stime
    for listed in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):
            seconds += sum(map(_seconds_of, listed.read_text(encoding="ascii").split()))
    return seconds


def _seconds_of(pid: str) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()
        return (int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])) / TICKS_PER_S
    return 0.0


class StopState(msgspec.Struct, kw_only=True):
    """State of a stop rule between epochs, which is part of every checkpoint."""

    in_a_row: int = 0  # latest successive epochs at or above `at_least`
    best: float | None = None
    since_best: int = 0  # epochs since the metric last increased


def stop_reason(
    rule: StopRule, state: StopState, epoch: int, samples: int, metrics: Mapping[str, float]
) -> str:
    """Update `state` with a finished epoch (1-based). Return why the job is done, or "".

    If the rule's metric was not reported, it raises MissingMetricError.
    """
    if rule.metric is not None:
        reason = _metric_reason(rule, state, metrics)
        if reason:
            return reason
    if rule.epochs is not None and epoch >= rule.epochs:
        return f"all {rule.epochs} epochs are done" if rule.epochs > 1 else "its epoch is done"
    if rule.samples is not None and samples >= rule.samples:
        return f"all {rule.samples} samples are done"
    return ""


def _metric_reason(rule: StopRule, state: StopState, metrics: Mapping[str, float]) -> str:
    metric = rule.metric or ""
    if metric not in metrics:
        raise MissingMetricError(metric, tuple(metrics))
    value = metrics[metric]
    if rule.at_least is not None:
        state.in_a_row = state.in_a_row + 1 if value >= rule.at_least else 0
        if state.in_a_row >= rule.consecutive:
            often = f" for {rule.consecutive} epochs in a row" if rule.consecutive > 1 else ""
            return f"{metric} {value:.4g} is at least {rule.at_least:g}{often}"
        return ""
    grew = not math.isnan(value) and (state.best is None or value > state.best)
    state.best = value if grew else state.best
    state.since_best = 0 if grew else state.since_best + 1
    if rule.plateau is not None and state.since_best >= rule.plateau:
        return f"{metric} has not grown for {rule.plateau} epochs, best {state.best}"
    return ""


def describe_rule(rule: StopRule) -> str:
    """Describe a rule in the words of a job file, without fields that have no effect."""
    fields = {k: v for k, v in msgspec.to_builtins(rule).items() if v is not None}
    if rule.metric is None or rule.consecutive == 1:
        fields.pop("consecutive", None)
    return ", ".join(f"{key} {value}" for key, value in fields.items())
