"""How fast the present group goes, and how its steps divide into passes and reduction.

The training loss, as seen in `backward()`: the script need not hand it over.

The gradient noise scale: how large a batch can be before its samples say the same.

McCandlish et al. 2018, appendix A.1: the squared norms of the gradients of a small and of a large
batch differ by the noise. One worker's share is the small one, the group's batch the large one.
Where a worker takes its share in several passes, each pass but the last is a small one: so a worker
that is alone measures, too.

What a worker takes of its host beside a GPU: processor time, and gradients that it sends.

How fast a job goes.

How long a step takes.

When a job is done.
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
from schemas.jobs import StopRule

WINDOW_S: Final = 2.0
LEAST_S: Final = 0.5  # of a first window that is not complete


@dataclass(frozen=True, slots=True)
class PassTimes:
    """How one worker's steps divide: a step takes `passes` passes, the last one with reduction."""

    pass_s: float  # seconds of a step's last pass, with its reduction
    sync_s: float  # of these, in the reduction, waits for slower peers too; 0 alone
    local_batch: int  # samples of a pass, the largest of the step
    passes: int  # in a step

    @property
    def step_s(self) -> float:
        """Seconds of a whole step."""
        return (self.pass_s - self.sync_s) * self.passes + self.sync_s


@dataclass(frozen=True, slots=True)
class StepMeans:
    """Of steps that one group did with the same shares, and nothing before them."""

    version: int  # of the group
    shares: tuple[int, ...]  # samples of a step, by rank
    samples_per_s: float = 0.0  # of late, all workers, pauses between epochs included; 0: not yet
    times: PassTimes | None = None  # of whole steps of late, without such pauses; None: not yet


@dataclass(slots=True)
class _WholeSteps:
    """Sums over steps of one group and share that took all of their batch."""

    steps: int = 0
    seconds: float = 0.0
    sync_s: float = 0.0
    share: int = 0  # samples of this worker
    passes: int = 1

    def add(self, took_s: float, sync_s: float, share: int, passes: int) -> None:
        """One more."""
        self.steps, self.share, self.passes = self.steps + 1, share, passes
        self.seconds, self.sync_s = self.seconds + took_s, self.sync_s + sync_s

    def times(self) -> PassTimes | None:
        """Means; all passes alike but for the last one's reduction. None: there was no step."""
        if not self.steps:
            return None
        step_s, sync_s = self.seconds / self.steps, self.sync_s / self.steps
        return PassTimes(
            pass_s=(step_s - sync_s) / self.passes + sync_s,
            sync_s=sync_s,
            local_batch=-(-self.share // self.passes),
            passes=self.passes,
        )


class RecentSteps:
    """Windows of whole steps; time comes in from outside, in seconds of any origin.

    It begins anew with each group, and with each change of the shares. The first step of either is
    passed over: it has the change in it. While somebody has no share, because the state is still on
    its way to him, nothing is measured.
    """

    def __init__(self, now: float) -> None:
        """Begin with nothing measured."""
        self.means: StepMeans | None = None  # replaced as a whole: another thread reads it
        self.steps = 0  # that the present group did with the present shares
        self._step_began = now
        self._sync_s = 0.0  # of the step that is under way
        self._is_first = True  # window of its group: it is looked at before it is complete
        self._epoch = _WholeSteps()
        self._begin_window(now)

    def _begin_window(self, now: float) -> None:
        self._began = now
        self._samples, self._window = 0, _WholeSteps()

    def begin_epoch(self, now: float) -> None:
        """What the script did since the last step is no part of the next one.

        Args:
            now: seconds.
        """
        self._step_began, self._epoch = now, _WholeSteps()

    def of_epoch(self) -> PassTimes | None:
        """Of the epoch's whole steps so far in the present group; None: there was none."""
        return self._epoch.times()

    def reduced(self, seconds: float) -> None:
        """The step under way spent so long in a reduction, one of maybe several.

        Args:
            seconds: by the training thread's clock.
        """
        self._sync_s += seconds

    def usual(self) -> tuple[float, float]:
        """Seconds of a step, and of its reductions, as measured last; zeros before that."""
        times = self.means.times if self.means is not None else None
        return (times.step_s, times.sync_s) if times is not None else (0.0, 0.0)

    def synced_s(self) -> float:
        """Seconds that the step under way spent in reductions so far."""
        return self._sync_s

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
        """A step is done.

        Args:
            now: seconds.
            shares: samples of a step by rank, as they are dealt out at present.
            rank: of this worker; None: it has no share.
            samples: of this step; less than the sum of `shares` where it ended an epoch.
            passes: that this worker took its share in.
        """
        took_s, self._step_began = now - self._step_began, now
        sync_s, self._sync_s = min(self._sync_s, took_s), 0.0
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
        if elapsed >= (LEAST_S if self._is_first else WINDOW_S):
            speed, times = self._samples / elapsed, self._window.times() or means.times
            self.means = StepMeans(version, shares, speed, times)
        if elapsed >= WINDOW_S:
            self._is_first = False
            self._begin_window(now)


class LossMeter:
    """Mean over the steps since the last `take`.

    Nothing is synchronised: the sum stays a tensor on its device until somebody reads it.
    """

    def __init__(self) -> None:
        self.scale: Callable[[], float] = lambda: 1.0  # of a gradient scaler, if one is tracked
        self._sum: torch.Tensor | float | None = None
        self._count = 0
        self.last: torch.Tensor | float | None = None  # of the step under way, once it is known

    def of_pass(self, losses: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The loss of one backward pass, unscaled; None when no scalar was seen.

        Args:
            losses: scalars that `backward` was called on in this pass.
        """
        if not losses:
            return None
        total = losses[0] if len(losses) == 1 else torch.stack(list(losses)).mean()
        return total / self.scale()

    def add(self, loss: torch.Tensor | float) -> None:
        """Count one step's loss.

        Args:
            loss: mean over the step's samples, or over what they weigh; a tensor has one element.
        """
        self._sum = loss if self._sum is None else self._sum + loss
        self.last = loss
        self._count += 1

    def mean(self) -> float | None:
        """The mean so far; None when nothing was seen."""
        total, count = self._sum, self._count
        return float(total) / count if total is not None and count else None

    def take(self) -> float | None:
        """The mean so far, and begin anew."""
        mean, self._sum, self._count = self.mean(), None, 0
        return mean


EVERY: Final = 4  # steps between measurements
SMOOTHING: Final = 0.1  # weight of the newest
LEAST: Final = 16  # measurements before anything is said


class NoiseMeter:
    """Running estimates of |G|^2 and tr(Sigma), whose ratio is the noise scale in samples."""

    def __init__(self) -> None:
        # Of the step under way: squared norms of mean gradients of small batches, and the inverse
        # sizes of these batches; sums.
        self._squares = 0.0
        self._inverse_sizes, self._parts = 0.0, 0
        self._means = (0.0, 0.0)  # |G|^2 and tr(Sigma); one pair, because another thread reads it
        self._count = 0

    def begin(self) -> None:
        """A step begins that is measured."""
        self._squares, self._inverse_sizes, self._parts = 0.0, 0.0, 0

    def before(self, share: torch.Tensor, own: int, whole: int) -> None:
        """Look at one pass's part of the step's sum.

        Args:
            share: shape (scalars,), its mean gradient times own / whole.
        """
        # A number at once: the device is through with `share`, which is summed and given away next.
        self._squares += float(torch.dot(share, share)) * (whole / own) ** 2
        self._inverse_sizes += 1.0 / own
        self._parts += 1

    def after(self, total: torch.Tensor, whole: int) -> None:
        """Look at the sum after the reduction, and take in what both say of the noise.

        Args:
            total: shape (scalars,), the mean gradient of the batch.
            whole: samples of the step; where one pass took all of it, nothing is measured.
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
            return  # a step that overflowed
        self._count += 1
        weight = max(SMOOTHING, 1.0 / self._count)
        old_signal, old_noise = self._means
        self._means = (
            old_signal + weight * (signal - old_signal),
            old_noise + weight * (noise - old_noise),
        )

    def scale(self) -> float | None:
        """The ratio of noise and signal, in samples; None while it cannot be estimated.

        Any thread may ask.
        """
        signal, noise = self._means
        if self._count < LEAST or signal <= 0 or noise <= 0:
            return None
        return noise / signal


USAGE_WINDOW_S: Final = 5.0
USER_TICKS, SYSTEM_TICKS = 11, 12  # places in a process's stat, behind its name
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Means over the last window."""

    cpu_cores: float  # of this process and its children
    sent_bytes_per_s: float  # gradients


class UsageMeter:
    """Rates of what is counted elsewhere; time comes in from outside.

    Steps count in one thread what they send, and another one asks.
    """

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self._sent = 0.0  # bytes in all
        self._mark: tuple[float, float, float] | None = None  # time, CPU seconds, bytes
        self._latest: Usage | None = None

    def exchanged(self, many: int, members: int) -> None:
        """A ring summed so many bytes: each member sends 2 (w - 1)/w times as much.

        Args:
            many: bytes of the sum.
        """
        self._sent += 2.0 * (members - 1) / members * many

    def usage(self, cpu_s: float, now: float) -> Usage | None:
        """Means over the last whole window; None before the first one is over.

        Args:
            cpu_s: processor time so far, seconds, any origin.
            now: seconds, any origin.
        """
        if self._mark is None:
            self._mark = (now, cpu_s, self._sent)
        began, cpu_then, sent_then = self._mark
        elapsed = now - began
        if elapsed >= USAGE_WINDOW_S:
            cores = (
                max(0.0, cpu_s - cpu_then) / elapsed
            )  # a child that ended may take its time away
            self._latest = Usage(cores, (self._sent - sent_then) / elapsed)
            self._mark = (now, cpu_s, self._sent)
        return self._latest


def cpu_seconds() -> float:
    """Processor time of this process and its children, such as those that load data.

    Children that run are asked of /proc, where it has them; those that ended and were waited for
    are remembered by the kernel.

    Returns:
        Seconds since it began.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() + ended.ru_utime + ended.ru_stime
    for listed in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):
            seconds += sum(map(_seconds_of, listed.read_text(encoding="ascii").split()))
    return seconds


def _seconds_of(pid: str) -> float:
    """Of a process that may just have ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()
        return (int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])) / TICKS_PER_S
    return 0.0


class SpeedMeter:
    """Samples per second over the epoch; time comes in from outside.

    Args:
        now: seconds, any origin; the epoch begins.
    """

    def __init__(self, now: float) -> None:
        self._epoch_began = now
        self._epoch_samples = 0

    def add(self, samples: int) -> None:
        """A step over `samples` ended.

        Args:
            samples: of the step, over all workers.
        """
        self._epoch_samples += samples

    def of_epoch(self, now: float) -> tuple[float, float]:
        """Samples per second over the epoch so far, and its seconds.

        Args:
            now: seconds, any origin.
        """
        seconds = max(now - self._epoch_began, 1e-9)
        return self._epoch_samples / seconds, seconds

    def begin_epoch(self, now: float) -> None:
        """The next epoch begins.

        Args:
            now: seconds, any origin.
        """
        self._epoch_began, self._epoch_samples = now, 0


class StepTimer:
    """How long a step takes, without the pauses that are no steps; time comes in from outside."""

    def __init__(self) -> None:
        self._mark = 0.0
        self._seconds = 0.0

    def lap(self, now: float) -> float:
        """Seconds since the last lap, but at most twice what the lap before took.

        Args:
            now: seconds, any origin.
        """
        took = now - self._mark if self._mark else 0.0
        self._seconds = min(took, 2 * self._seconds) if self._seconds else took
        self._mark = now
        return self._seconds


class StopState(msgspec.Struct, kw_only=True):
    """What a stop rule has to remember between epochs; part of every checkpoint."""

    in_a_row: int = 0  # epochs at or above `at_least`
    best: float | None = None
    since_best: int = 0  # epochs without an increase


def stop_reason(
    rule: StopRule, state: StopState, epoch: int, samples: int, metrics: Mapping[str, float]
) -> str:
    """Take in a finished epoch; why the job is done, or nothing.

    Args:
        state: updated in place.
        epoch: finished, 1-based.
        metrics: what the script reported for this epoch.

    Raises:
        MissingMetricError: if the rule's metric was not reported.
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
    """What a rule says, in the words of a job file.

    Args:
        rule: its fields that are None are left out, and so is a `consecutive` that says
            nothing.
    """
    fields = {k: v for k, v in msgspec.to_builtins(rule).items() if v is not None}
    if rule.metric is None or rule.consecutive == 1:
        fields.pop("consecutive", None)
    return ", ".join(f"{key} {value}" for key, value in fields.items())
