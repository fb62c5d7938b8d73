"""What the search has learnt: speeds and lengths per family, batch limits per job.

What came of speed-ups that were promised for sizes nobody had measured, family by family.

Jobs of which nobody can say how long they last: no relatives, no stated end.

Then what a job has got so far is all there is to go by, and lengths are told apart less: long ones
are only those that have run long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    GainSeen,
    JobEnded,
    JobView,
    PlanTaken,
    PolicyEvent,
    StepsSeen,
)
from controlplane.policy.ones.growth_trials import BatchCaps, last_loss
from controlplane.policy.ones.job_history import (
    Measurements,
    OnesJobHistory,
    half_move,
    noise_estimate,
)
from controlplane.policy.ones.job_lengths import JobLengths
from controlplane.policy.ones.length_evidence import LearntErrors
from controlplane.policy.ones.slowdowns import LearntSlowdowns, PlacementIndex
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.batch_limits import resumed
from controlplane.policy.search.observed_families import (
    KEPT_RELATIVES,
    FamilyHistories,
    FamilyHistory,
)
from controlplane.policy.search.observed_jobs import ArrivalRate
from controlplane.prediction import FloatArray, IntArray
from schemas.ids import JobId, Seconds, SlotId

TRUST: Final = 0.5  # measured promises that the model's word counts for; a judgement
SPREAD: Final = 0.3  # of logarithms of such errors, before any came
LEAST, MOST = 0.4, 1.5  # what a promise is multiplied by; beyond, something else is wrong


class GainCorrections:
    """A model of speeds is right where it was measured, and may be wrong in one way beyond that."""

    def __init__(self) -> None:
        self._errors = LearntErrors(SPREAD, TRUST)

    def observe(self, event: GainSeen) -> None:
        """A promise met what came.

        Args:
            event: counts if it was for a size that the family had not been measured at.
        """
        used = event.correction
        if used is None or not used > 0.0 or not min(event.predicted, event.realised) > 0.0:
            return
        error = math.log(event.realised / event.predicted) + math.log(used)
        self._errors.add((event.family,), error)

    def factor(self, family: str) -> float:
        """What a speed at a size beyond those that were measured is multiplied by.

        Args:
            family: 1 until a promise of it was measured.
        """
        bias, _ = self._errors.of((family,))
        return min(max(math.exp(bias), LEAST), MOST)

    def corrections(
        self, family: str, measured: Iterable[tuple[int, int]], nodes: IntArray, slots: IntArray
    ) -> FloatArray:
        """The same for each of some sizes; nan where the family was measured as large as that.

        Args:
            measured: nodes and slots of groups of it that were.
            nodes: that the sizes span, shape (L,).

        Returns:
            Shape (L,).
        """
        seen = list(measured)
        if not seen:
            return np.full(len(slots), np.nan)
        widest, largest = max(span for span, _ in seen), max(size for _, size in seen)
        beyond = (slots > largest) | (nodes > widest)
        return np.where(beyond, self.factor(family), np.nan)


def is_lone(job: JobView, options: OnesOptions) -> bool:
    """Whether nothing tells how long `job` lasts but itself.

    Args:
        options: whether lengths are shared, and whether lone jobs are looked at in their own way.
    """
    return options.lone_jobs and not options.share_lengths and job.stop_samples is None


def lone_remaining_s(
    job: JobView, one_s: float, options: OnesOptions, now: Seconds, *, known: bool
) -> float:
    """T1 of a lone job: what was guessed, but at least `lone_least_s`.

    Args:
        one_s: seconds on one slot, as guessed from what is done; nan: nobody can say.
        now: seconds on the controller's clock.
        known: whether its speed was measured; else what it got so far counts.

    Returns:
        Seconds on one slot.
    """
    guess = one_s if known and math.isfinite(one_s) else job.served(now)
    return max(guess, options.lone_least_s)


def for_jobs(jobs: Iterable[JobView], options: OnesOptions) -> OnesOptions:
    """The options, with the exponents of lone jobs if all of them are lone."""
    if options.share_lengths or not all(is_lone(job, options) for job in jobs):
        return options
    return msgspec.structs.replace(
        options,
        size_exponent=options.lone_size_exponent,
        speedup_exponent=options.lone_speedup_exponent,
    )


OWN_NOISE: Final = -1  # instead of a count


class Standing(NamedTuple):
    """How often what is known of a job has changed; of its family only what matters to it."""

    edition: int
    family_edition: int
    largest: int  # slots that any of the family ran on
    measured: bool  # whether any of it was
    noise_count: int  # measurements by relatives, or `OWN_NOISE`: it does not depend on them
    ends: int  # jobs that were over: lengths are learnt from all of them
    until: float  # seconds on the controller's clock, when a gate opens; it changes at most then


class Estimates:
    """Takes policy events in; answers what is known of a job."""

    def __init__(self, options: OnesOptions) -> None:
        """Begin with nothing learnt.

        Args:
            options: what of relatives, neighbours and GPU types counts.
        """
        self._options = options
        self._families = FamilyHistories()
        self._slowdowns = LearntSlowdowns(self._families)
        self._placement = PlacementIndex()
        self._measurements = Measurements(self._families, self._placement, options)
        self._histories: dict[JobId, OnesJobHistory] = {}
        self._known: set[JobId] = set()
        self.arrivals = ArrivalRate()
        self.lengths = JobLengths(options.length_model)
        self._gains = GainCorrections()
        self._caps = BatchCaps()
        self._services: deque[float] = deque(maxlen=KEPT_RELATIVES)  # of jobs that finished
        self._ends = 0  # jobs that were over

    # --- what happens

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from `event`.

        Args:
            event: an epoch, telemetry, the end of a job, or a plan that was put in force.
            now: seconds on the controller's clock.
        """
        self.lengths.observe(event)
        match event:
            case EpochSeen():
                self._epoch(event, now)
            case StepsSeen():
                self._steps(event, now)
            case JobEnded():
                self._ends += 1
                family = self.family(event.family)
                if event.succeeded and event.samples_done:
                    family.finished.append(event.samples_done)
                    self._services.append(event.slot_s)
                family.reached = max(family.reached, event.samples_done)
                self._histories.pop(event.job, None)
                self._known.discard(event.job)
                self._caps.forget(event.job)
            case GainSeen():
                self._gains.observe(event)
                if event.correction is not None:  # what the family promises is another thing now
                    self.family(event.family).model = None
            case PlanTaken(waiting=waiting, slots=slots):
                for name in waiting:
                    history = self._histories.get(name)
                    if history is not None:
                        history.limit = resumed(history.limit, history.bounds)
                        history.edition += 1
                for name, placed in slots.items():
                    history = self._histories.get(name)
                    if history is not None and history.view is not None:
                        history.move = half_move(history.view.running_on, placed)
                        history.edition += 1

    def _epoch(self, event: EpochSeen, now: Seconds) -> None:
        history = self._history(event.job)
        history.edition += 1
        history.epoch_due, history.counted_at = True, now
        if event.whole or not self._options.grows_by_steps:
            history.limit = max(history.limit, event.global_batch)
        history.epoch = max(history.epoch, event.epoch)
        self._measurements.epoch(event, history)

    def _steps(self, event: StepsSeen, now: Seconds) -> None:
        history = self._history(event.job)
        history.edition += 1
        family = self.family(event.family)
        family.reached = max(family.reached, event.samples_done)
        counts = history.observe_steps(event)
        if self._options.grows_by_steps:
            history.grow_limit(self._options.growth_steps)
        self._measurements.steps(event, history, counts=counts)
        if counts and self._options.batch_caps and (view := history.view) is not None:
            self._caps.observe(view, history.trial, self.noise_scale(view), now)

    def update(self, view: ClusterView, *, contended: bool, now: Seconds) -> None:
        """Take note of arrivals, and move the limits of jobs that reported an epoch.

        Args:
            contended: whether a job waits that would fit.
            now: seconds on the controller's clock.
        """
        jobs = list(view.jobs.values())
        self._placement.update(view)
        self.lengths.forget(view.jobs)
        self._caps.expire(now)
        self._families.priors.types = self._placement.types
        for job in jobs:  # all of them first: limits depend on the rate of arrivals
            if job.job not in self._known:
                self._known.add(job.job)
                self.arrivals.add(job.submitted_at)
        for job in jobs:
            history = self._history(job.job)
            waits_on = not history.epoch_due and now < history.due_at
            if history.view is not job or (job.running_on and not waits_on):
                self._follow(job, history, contended=contended, now=now)

    def _follow(
        self, job: JobView, history: OnesJobHistory, *, contended: bool, now: Seconds
    ) -> None:
        """Move R if an epoch or a report interval ended, and note who gave slots back."""
        before = (history.limit, history.gave_back_at)
        if history.follow(job, self._options, now, contended=contended, warm=self.warm(job)):
            history.count_epoch(
                job,
                now,
                self._options.scale_down,
                self.arrivals.per_s,
                contended=contended,
                gradual=True,
            )
        history.edition += before != (history.limit, history.gave_back_at)

    # --- answers

    def standing(self, job: JobView, now: Seconds) -> Standing | None:
        """What all answers about a job follow from: as long as it is the same, so are they.

        Args:
            now: seconds on the controller's clock.

        Returns:
            None if they follow from more than that.
        """
        history, options = self._histories.get(job.job), self._options
        if history is None or job.job in self._caps or is_lone(job, options):
            return None
        if not self.lengths.is_settled(job):
            return None
        family = self.family(job.family)
        own = history.last_noise is not None and not options.smooth_noise
        gate, kept_until = self.gate(job), history.gave_back_at + options.report_interval_s
        until = min(gate if now < gate else math.inf, kept_until if now <= kept_until else math.inf)
        return Standing(
            history.edition,
            family.edition,
            family.largest,
            bool(family.means),
            OWN_NOISE if own else family.noise_count,
            self._ends,
            until,
        )

    def stands(self, job: JobView, standing: Standing, now: Seconds) -> bool:
        """Whether a job stands as it did; to ask costs a tenth of asking for its standing.

        Args:
            now: seconds on the controller's clock, not before then.
        """
        history, family = self._histories.get(job.job), self._families.of(job.family)
        return (
            history is not None
            and history.edition == standing.edition
            and now < standing.until
            and family.edition == standing.family_edition
            and family.model is not None
            and family.largest == standing.largest
            and standing.noise_count in {OWN_NOISE, family.noise_count}
            and bool(family.means) == standing.measured
            and self._ends == standing.ends
            and job.job not in self._caps
        )

    def family(self, name: str) -> FamilyHistory:
        """What is known of a family.

        Args:
            name: of the family; the empty one is a family too.
        """
        return self._families.of(name)

    def gain_corrections(self, family: str, nodes: IntArray, slots: IntArray) -> FloatArray:
        """What speeds at sizes are multiplied by, as promises for such sizes came true.

        Args:
            nodes: that the sizes span, shape (L,).

        Returns:
            Shape (L,); nan up to the largest size that the family was measured at.
        """
        if not self._options.gain_correction:
            return np.full(len(slots), np.nan)
        measured = ((spans, size) for spans, size, *_ in self.family(family).means)
        return self._gains.corrections(family, measured, nodes, slots)

    def limit(self, job: JobView) -> int:
        """R of a job, samples per step."""
        known = self._histories.get(job.job)
        limit = known.limit if known else job.batch_size
        if job.job in self._caps:
            limit = self._caps.capped(job, limit, self.noise_scale(job))
        return max(job.batch_size, min(limit, job.batch_limit))

    def warm(self, job: JobView) -> bool:
        """Whether a job may have more than its least slots.

        It has done its first steps, and how fast they are is known: of it or of a relative.
        """
        history = self._histories.get(job.job)
        steps = history.steps if history else 0
        measured = bool(self.family(job.family).means)
        return job.epoch > 0 or (measured and steps >= self._options.warmup_steps)

    def gated(self, job: JobView, now: Seconds) -> bool:
        """Whether a job has not finished an epoch or report interval since it was last moved.

        Paper: the schedule changes when *all* running jobs have finished an epoch. Here: each job
        by itself, because one slow epoch would hold all others back.

        Args:
            now: seconds on the controller's clock.
        """
        return now < self.gate(job)

    def growth_loss(self, job: JobView) -> tuple[float, int] | None:
        """What its last growth made of its progress, a factor, and its slots before; if it loses.

        A place that is farther apart counts as one, with as many slots before.

        Returns:
            None if it did not grow, too little was measured, or the growth does not lose.
        """
        history = self._histories.get(job.job)
        if history is None or not history.trial.compares or self.moves_to(job) is not None:
            return None
        loss = last_loss(history.trial, job, self.noise_scale(job))
        if loss is None or loss.batch is not None:
            return None  # a batch is taken back where it is
        if loss.slots == len(job.running_on) and not self._options.place_trials:
            return None
        return loss.ratio, loss.slots

    def moves_to(self, job: JobView) -> frozenset[SlotId] | None:
        """Slots that a job shall go on with which is half-way to them; None if it is not."""
        history = self._histories.get(job.job)
        move = history.move if history else None
        return move.to if move is not None and move.through == job.running_on.keys() else None

    def gate(self, job: JobView) -> Seconds:
        """When a gated job may be moved again, if no epoch ends before."""
        options = self._options
        moved_at = job.placed_at if options.rebatch else job.moved_at
        wait_s = options.settle_s if job.epoch_at > moved_at else options.report_interval_s
        return Seconds(moved_at + wait_s)

    def may_have(self, job: JobView, now: Seconds) -> int | None:
        """Slots that a job should stay below for a while, because it gave them back; None: any.

        Args:
            now: seconds on the controller's clock.
        """
        history = self._histories.get(job.job)
        if history is None or now - history.gave_back_at > self._options.report_interval_s:
            return None
        return history.gave_back - 1

    def remaining(self, job: JobView) -> float | None:
        """Samples that a job has left; None if nothing at all is known."""
        if is_lone(job, self._options):
            history = self._histories.get(job.job)
            done = max(job.samples_done, history.samples if history else 0)
            return self._options.lone_residual * done if done else None
        return self.lengths.remaining(job)

    def noise_scale(self, job: JobView) -> float:
        """See `noise_estimate`."""
        history = self._histories.get(job.job)
        relatives = self.family(job.family).noise_at if job.family else None
        return noise_estimate(job, history, relatives, self._options)

    def remaining_service(self, job: JobView, now: Seconds) -> float | None:
        """Slot seconds that jobs which got as much as this one still took; None: none got it.

        Only where no relative has finished yet.

        Args:
            now: seconds on the controller's clock.
        """
        alone = not self._options.share_lengths
        if alone or self.family(job.family).finished or job.stop_samples is not None:
            return None
        if self.lengths.informed(job.job):
            return None
        served = job.served(now)
        longer = [service for service in self._services if service > served]
        return sum(longer) / len(longer) - served if longer else None

    def type_slowdowns(self, types: Sequence[str], families: Sequence[str]) -> FloatArray | None:
        """See `LearntSlowdowns.by_type`; None if the policy does not tell types apart.

        Returns:
            Shape (J, types), factors of 1 or more; None also if no type is slower.
        """
        return self._slowdowns.by_type(types, families) if self._options.gpu_types else None

    def log_slowdowns(self, families: Sequence[str]) -> FloatArray | None:
        """See `LearntSlowdowns.by_neighbour`; None if the policy does not look at neighbours.

        Args:
            families: F of them, which give the classes their numbers.

        Returns:
            Shape (2 F, 2 F), logarithms; None also if nobody slows anybody down.
        """
        return self._slowdowns.by_neighbour(families) if self._options.interference else None

    def _history(self, name: JobId) -> OnesJobHistory:
        found = self._histories.get(name)
        if found is None:
            found = self._histories[name] = OnesJobHistory()
        return found
