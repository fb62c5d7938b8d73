"""How fast the present group goes, and how its steps divide into passes and reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
