"""Policy `ones`: an online evolutionary search, and the reasons of its plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    Plan,
    PolicyEvent,
    Reason,
    SearchStats,
    StepsSeen,
)
from controlplane.policy.ones.evolution import Candidate, EvolutionarySearch
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.job_rows import JobRow
from controlplane.policy.ones.problem import FREE, Problem
from controlplane.policy.ones.problem_builder import ProblemBuilder
from controlplane.policy.ones.slowdowns import CoreDemand
from controlplane.policy.ones.start_forecast import StartForecasts
from controlplane.policy.options import OnesOptions
from controlplane.policy.placement.slot_partition import (
    backs_off,
    slots_in_words,
    split,
    too_large,
    with_batch,
)
from controlplane.policy.search.search_loop import SearchPolicy
from controlplane.prediction import FloatArray, IntArray
from schemas.ids import JobId, Seconds, SlotId

MAX_NAMES: Final = 3  # most names in a sentence


class PlanReasons:
    """The reasons for a schedule: text for users, codes and numbers for programs."""

    def __init__(self, problem: Problem, best: Candidate) -> None:
        self._problem = problem
        self._best = best
        plans = ((problem.present, problem.owner), (best.levels, best.owner))
        # The shares of speed that places leave to jobs, before and after the plan.
        self._pace = [_place_share(problem, *plan) for plan in plans]
        rows = np.flatnonzero(best.levels)
        at = (rows, best.levels[rows])
        slot_values = problem.value[at] / problem.sizes[at]
        self.least_value = float(slot_values.min()) if len(rows) else math.nan  # of a used slot

    def of(self, row: int, placed: Mapping[SlotId, int]) -> Reason | None:
        """Return why a job changes or waits, given its local batches; None: nothing changes."""
        if placed == dict(self._problem.job_rows[row].job.running_on):
            return None if placed else self._waiting(row)
        return self._with_fairness(row, self._change(row, placed))

    def _with_fairness(self, row: int, reason: Reason) -> Reason:
        """Return `reason`, with the effect of `max_stretch` added to its text."""
        floors = self._problem.floors
        if floors is None or not floors.level[row]:
            return reason
        expected = f"expected: {floors.expected[row]:.1f} x the time of its fair share"
        if floors.at_best[row] > floors.limit:
            least = f"{floors.at_best[row]:.1f} x the time of its fair share"
            text = f"max_stretch {floors.limit:g} cannot be kept, it takes {least} or more"
        elif int(self._best.levels[row]) >= int(floors.level[row]):
            text = f"required by max_stretch {floors.limit:g} ({expected})"
        else:
            text = f"other jobs are further behind, max_stretch is {floors.limit:g} ({expected})"
        return Reason(reason.code, f"{reason.text}; {text}", reason.numbers)

    def _change(self, row: int, placed: Mapping[SlotId, int]) -> Reason:
        """Return why a job changes."""
        problem, job_row = self._problem, self._problem.job_rows[row]
        numbers, recipients = self._numbers(row), self._recipients(row)
        was, now = len(job_row.now), len(placed)
        if not now:
            text = f"paused: {recipients or 'other jobs'} can use its {slots_in_words(was)} better"
            return Reason("pause", text, numbers)
        if not was:
            return _start(job_row, numbers, now)
        speedup, batch = _speedup(numbers), int(numbers["batch_then"])
        same_batch = batch == numbers["batch_now"]
        to = slots_in_words(now) if same_batch else f"{slots_in_words(now)} and batch {batch}"
        if now > was:
            return Reason("grow", f"grows to {to} ({speedup}): {self._sources(row)}", numbers)
        if now < was:
            if job_row.moves_to and {problem.slots[at] for at in job_row.moves_to} == placed.keys():
                text = f"has moved: leaves its former slots, goes on with {to}"
                return Reason("move", text, numbers)
            if job_row.growth_loss is not None:
                said = f"measured: {job_row.growth_loss:.2f} x the former progress"
                text = f"undoes its growth ({said}); goes on with {to}"
            elif recipients:
                given = slots_in_words(was - now)
                text = f"gives {given} to {recipients}, goes on with {to} ({speedup})"
            else:
                text = f"is better off with {to} ({speedup})"
            return Reason("shrink", text, numbers)
        if set(placed) != set(job_row.job.running_on):
            code, text = self._move(row)
            fresh = "" if same_batch else f", with batch {batch}"
            return Reason(code, f"{text}{fresh} ({speedup})", numbers)
        return Reason("batch", _batch_text(numbers, job_row.limit), numbers)

    def _waiting(self, row: int) -> Reason:
        """Return why a job has no slots."""
        need = int(self._problem.job_rows[row].table.sizes[0])
        numbers = self._numbers(row) | {"needs": float(need)}
        text = f"waits for {slots_in_words(need)}"
        if self._problem.capacity < need:
            text = f"{text}, only {self._problem.capacity} available"
            return Reason("waits", text, numbers)
        if np.isfinite(self.least_value):
            numbers["least_value_of_a_slot"] = self.least_value
        free = int(np.count_nonzero(self._best.owner == FREE))
        if 0 < free < need:
            only = "only 1 slot is free" if free == 1 else f"only {free} slots are free"
            text = f"{text}: {only}, other jobs gain more from the others"
        else:
            text = f"{text}: other jobs gain more from them"
        return self._with_fairness(row, Reason("waits", text, numbers))

    def _move(self, row: int) -> tuple[str, str]:
        """Return the code and the text of the first reason that explains a same-size move."""
        problem = self._problem
        was, now = list(problem.job_rows[row].now), list(self._best.slots(row))
        former, new = (set(problem.node_of[slots].tolist()) for slots in (was, now))
        if len(new) < len(former):
            return "pack", "moved together to fewer nodes"
        if problem.slow is not None:
            times = problem.slow[row, problem.cluster.type_of]
            if times[now].max() < times[was].max():
                return "move", "moved to faster GPUs"
        if recipients := self._recipients(row):
            return "move", f"moved to make room for {recipients}"
        return "move", "moved to other slots"

    def _sources(self, row: int) -> str:
        """Return text that says which jobs the slots of a growing job are taken from."""
        taken = self._problem.owner[self._best.owner == row]
        donors = set(taken[taken >= 0].tolist()) - {row}
        return f"from {self._names(donors)}" if donors else "no other job needs them more"

    def _recipients(self, row: int) -> str:
        """Return the names of the jobs that get a job's present slots; empty if there are none."""
        given = self._best.owner[list(self._problem.job_rows[row].now)]
        return self._names(set(given[given >= 0].tolist()) - {row})

    def _names(self, rows: Iterable[int]) -> str:
        """Return the names of the jobs of these rows, in order of arrival, as text."""
        names = [self._problem.job_rows[row].job.job for row in sorted(rows)]
        shown = ", ".join(names[:MAX_NAMES])
        return f"{shown} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else shown

    def _numbers(self, row: int) -> dict[str, float]:
        problem, job_row = self._problem, self._problem.job_rows[row]
        table = job_row.table
        was, now = int(problem.present[row]), int(self._best.levels[row])
        numbers = {
            "slots_now": float(problem.sizes[row, was]),
            "slots_then": float(problem.sizes[row, now]),
            "batch_now": float(sum(job_row.job.running_on.values())),
            "batch_then": float(table.batches[now - 1]) if now else 0.0,
            "batch_limit": float(job_row.limit),
            "noise_scale": table.noise_scale,
            "value_now": float(problem.value[row, was]) if was else 0.0,
            "value_then": float(problem.value[row, now]),
        }
        if problem.floors is not None:
            numbers["stretch"] = float(problem.floors.expected[row])
            numbers["max_stretch"] = problem.floors.limit
        if np.isfinite(job_row.remaining_s):
            numbers["remaining_on_one_slot_s"] = job_row.remaining_s
        before, after = (float(pace[row]) for pace in self._pace)
        if now:
            numbers["speed_then"] = float(table.speeds[now - 1]) * after
            numbers["goodput_then"] = float(table.goodputs[now - 1]) * after
        if was:
            speed, goodput = job_row.present
            numbers |= {"speed_now": speed * before, "goodput_now": goodput * before}
        return numbers


def batch_reason(job_row: JobRow) -> Reason:
    """Return why a job gets another batch on its present slots."""
    table, at = job_row.table, job_row.level - 1
    slots, (speed, goodput) = float(len(job_row.now)), job_row.present
    numbers = {
        "slots_now": slots,
        "slots_then": slots,
        "batch_now": float(sum(job_row.job.running_on.values())),
        "batch_then": float(table.batches[at]),
        "batch_limit": float(job_row.limit),
        "noise_scale": table.noise_scale,
        "speed_now": speed,
        "speed_then": float(table.speeds[at]),
        "goodput_now": goodput,
        "goodput_then": float(table.goodputs[at]),
    }
    return Reason("batch", _batch_text(numbers, job_row.limit), numbers)


def _batch_text(numbers: Mapping[str, float], limit: int) -> str:
    before, batch, speedup = numbers["batch_now"], int(numbers["batch_then"]), _speedup(numbers)
    if batch > before:
        return f"batch up to {batch} ({speedup}), its limit is {limit}"
    if limit < before:
        return f"batch down to {batch}, its limit is {limit}"
    return f"batch down to {batch}: more progress with fewer samples ({speedup})"


def _speedup(numbers: Mapping[str, float]) -> str:
    ratio = numbers["speed_then"] / max(numbers["speed_now"], 1e-9)
    return f"expected: {ratio:.2f} x its present speed"


def _start(job_row: JobRow, numbers: dict[str, float], size: int) -> Reason:
    if job_row.job.epoch or job_row.job.samples_done:
        return Reason("resume", f"resumes on {slots_in_words(size)}", numbers)
    warm_up = ", to warm up" if size == job_row.job.least else ""
    return Reason("start", f"starts on {slots_in_words(size)}{warm_up}", numbers)


def _place_share(problem: Problem, levels: IntArray, owner: IntArray) -> FloatArray:
    """Return the share of its speed that each job keeps at its place, shape (J,)."""
    value, moved = problem.placed_value(levels, owner)
    plain = problem.value[problem.rows, levels]
    sane = (levels > 0) & (plain > 0.0)
    share = np.divide(value, plain, out=np.ones(len(value)), where=sane)
    pace = np.power(share, 1.0 / problem.speedup_exponent)
    stalled = moved & sane & (levels == problem.present)  # leave out the temporary stall
    return np.asarray(np.where(stalled, pace / problem.move_factor, pace))


class Ones(SearchPolicy[Problem]):
    """Policy that chooses the batch and the slots of each job for the benefit of all jobs.

    Each view becomes a table with the value of every size of every job. A population of candidate
    schedules evolves against this table. It starts from the schedule in force and from greedy ones.
    A plan is available at once and improves while there is time.
    """

    def __init__(self, options: OnesOptions | None = None) -> None:
        self.options = options or OnesOptions()
        self.estimates = Estimates(self.options)
        self.builder = ProblemBuilder(self.estimates, self.options)
        self._search = EvolutionarySearch(self.options)
        self._core_demand = CoreDemand()
        self._forecasts = StartForecasts()
        self._reported: dict[JobId, None] = {}  # jobs that reported since batches were last chosen
        super().__init__(self.estimates, self._search)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds, lengths, limits, and the CPU use of workers from `event`."""
        super().observe(event, now)
        self._core_demand.observe(event)
        if isinstance(event, EpochSeen | StepsSeen):
            self._reported[event.job] = None

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the fittest candidate as a plan, with reasons for jobs that change or wait."""
        problem = self._current_problem(view, now)
        self._reported.clear()  # a full plan chooses all batches
        best = self._search.best
        local_batch = {name: dict(placed) for name, placed in problem.kept.items()}
        reasons: dict[JobId, Reason] = {}
        starts = self._forecasts.of(problem, best, now)
        why = PlanReasons(problem, best)
        for row, places in enumerate(best.by_row()):
            name = problem.job_rows[row].job.job
            placed = _local_batches(problem, best, row, places)
            if placed:
                local_batch[name] = placed
            if reason := why.of(row, placed):
                reasons[name] = reason
        reasons |= {name: backs_off(at, now) for name, at in problem.backing_off.items()}
        reasons |= {
            name: too_large(needs, len(problem.slots)) for name, needs in problem.too_large.items()
        }
        return Plan(
            based_on=view.version,
            local_batch=local_batch,
            reasons=reasons,
            starts=starts,
            wake_at=self._next_change(problem, view, now),
        )

    def stats(self) -> SearchStats:
        """Return statistics of the search and of the predicted lengths."""
        return self.estimates.lengths.calibration.added_to(super().stats())

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the best batch on present slots of each job that reported since the last call."""
        local_batch: dict[JobId, dict[SlotId, int]] = {}
        reasons: dict[JobId, Reason] = {}
        for job_row in self.builder.rows(self._core_demand.shown(view), self._reported, now):
            job, batch = job_row.job, int(job_row.table.batches[job_row.level - 1])
            if job_row.moves_to or batch == sum(job.running_on.values()):
                continue
            local_batch[job.job] = split(batch, list(job.running_on))
            reasons[job.job] = batch_reason(job_row)
        self._reported.clear()
        return Plan(based_on=view.version, local_batch=local_batch, reasons=reasons)

    def _build_problem(self, view: ClusterView, now: Seconds) -> Problem:
        problem = self.builder.build(self._core_demand.shown(view), now)
        self._search.update(problem)
        self._forecasts.update(view, now)
        return problem

    def _next_change(self, problem: Problem, view: ClusterView, now: Seconds) -> Seconds | None:
        times = [
            *problem.backing_off.values(),
            *(job.retry_at for job in view.jobs.values()),
            *problem.gates,
        ]
        return min((at for at in times if at > now), default=None)


def _local_batches(
    problem: Problem, best: Candidate, row: int, places: Sequence[int]
) -> dict[SlotId, int]:
    """Return a job's local batches, unchanged if its slots and its global batch stay the same."""
    job_row = problem.job_rows[row]
    level = int(best.levels[row])
    if not level:
        return {}
    slots = [problem.slots[place] for place in places]
    return with_batch(job_row.job, int(job_row.table.batches[level - 1]), slots)
