"""Policy `ones`: an online evolutionary search.

Reasons of a plan: text for users, codes and numbers for programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    Plan,
    PolicyEvent,
    Reason,
    SearchStats,
    StartForecast,
    StepsSeen,
)
from controlplane.policy.ones.evolution import Candidate, EvolutionarySearch
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.problem import JobRow, Problem, Trades
from controlplane.policy.ones.problem_builder import ProblemBuilder
from controlplane.policy.ones.slowdowns import CoreDemand
from controlplane.policy.ones.start_forecast import StartForecasts
from controlplane.policy.options import OnesOptions
from controlplane.policy.placement.slot_partition import backs_off, split, too_large
from controlplane.policy.search.search_loop import SearchPolicy
from controlplane.prediction import FloatArray, IntArray
from schemas.ids import JobId, Seconds, SlotId

MAX_NAMES = 3  # names in a sentence


@dataclass(frozen=True, slots=True)
class SlotOwners:
    """Row of the job on each slot before and after a plan, by place of the slot."""

    before: dict[int, int]
    after: dict[int, int]
    jobs: tuple[JobId, ...]
    pace: tuple[FloatArray, FloatArray]  # before, after: share of the speed that places leave
    kept: tuple[FloatArray, FloatArray]  # before, after: share that neighbours leave
    trades: Trades

    def names(self, rows: Iterable[int]) -> list[JobId]:
        """Return the jobs of these rows, in order of arrival."""
        return [self.jobs[row] for row in sorted(rows)]


def slot_owners(problem: Problem, best: Candidate) -> SlotOwners:
    """Return the owners of slots now and under the schedule `best`."""
    plans = ((problem.present, problem.owner), (best.levels, best.owner))
    before, after = (_place_share(problem, *plan) for plan in plans)
    alone, beside = (_neighbour_share(problem, owner) for _, owner in plans)
    return SlotOwners(
        before={slot: row for row, job_row in enumerate(problem.job_rows) for slot in job_row.now},
        after={slot: row for slot, row in enumerate(best.owner.tolist()) if row >= 0},
        jobs=tuple(job_row.job.job for job_row in problem.job_rows),
        pace=(before, after),
        kept=(alone, beside),
        trades=problem.trades(best.owner),
    )


def for_change(
    problem: Problem, best: Candidate, owners: SlotOwners, row: int, placed: Mapping[SlotId, int]
) -> Reason:
    """Return why a job starts, grows, shrinks, moves, trades places, stops or gets another batch.

    Args:
        placed: the job's local batches in the plan, samples per slot and step.
    """
    reason = _with_fairness(problem, best, row, _own_reason(problem, best, owners, row, placed))
    partners = owners.trades.partners(row)
    if not partners:
        return reason
    others = _names(owners.names(partners))
    return Reason("trade", f"trades places with {others}: {reason.text}", reason.numbers)


def _with_fairness(problem: Problem, best: Candidate, row: int, reason: Reason) -> Reason:
    """Add the effect of `max_stretch` to a reason."""
    floors = problem.floors
    if floors is None or not floors.level[row]:
        return reason
    expected = f"{floors.expected[row]:.1f} x the time of its fair share expected"
    if not floors.is_feasible(row):
        least = f"{floors.at_best[row]:.1f} x the time of its fair share"
        text = f"max_stretch {floors.limit:g} cannot be kept, it takes {least} or more"
    elif int(best.levels[row]) >= int(floors.level[row]):
        text = f"its due by max_stretch {floors.limit:g} ({expected})"
    else:
        text = f"other jobs are further behind, max_stretch is {floors.limit:g} ({expected})"
    return Reason(reason.code, f"{reason.text}; {text}", reason.numbers)


def _own_reason(
    problem: Problem, best: Candidate, owners: SlotOwners, row: int, placed: Mapping[SlotId, int]
) -> Reason:
    """Return why a job changes, without regard to trades."""
    job_row = problem.job_rows[row]
    numbers = _numbers(problem, best, row, owners)
    was, now = len(job_row.now), len(placed)
    if not now:
        recipients = _recipients(owners, problem, row) or "other jobs"
        return Reason("pause", f"paused: {recipients} can use its {_slots(was)} better", numbers)
    if not was:
        return _start(job_row, numbers, now)
    ratio = numbers["speed_then"] / max(numbers["speed_now"], 1e-9)
    speedup = f"{ratio:.2f} x the speed expected"
    batch = int(numbers["batch_then"])
    to = _slots(now) if batch == numbers["batch_now"] else f"{_slots(now)} and batch {batch}"
    if now > was:
        text = f"grows to {to} ({speedup})"
        return Reason("grow", f"{text}: {_slot_sources(owners, best, row)}", numbers)
    if now < was:
        recipients = _recipients(owners, problem, row)
        if job_row.moves_to and {problem.slots[at] for at in job_row.moves_to} == placed.keys():
            return Reason("move", f"has moved: leaves its former slots, goes on with {to}", numbers)
        if job_row.growth_loss is not None:
            said = f"{job_row.growth_loss:.2f} x the progress of before"
            text = f"undoes its growth, which made {said}; goes on with {to}"
        elif recipients:
            text = f"gives {_slots(was - now)} to {recipients}, goes on with {to} ({speedup})"
        else:
            text = f"is better off with {to} ({speedup})"
        return Reason("shrink", text, numbers)
    if set(placed) != set(job_row.job.running_on):
        fewer = _nodes(problem, best.slots(row)) < _nodes(problem, job_row.now)
        fresh = "" if batch == numbers["batch_now"] else f", with batch {batch}"
        text = f"{_move_reason(problem, best, owners, row)}{fresh} ({speedup})"
        return Reason("pack" if fewer else "move", text, numbers)
    return Reason(
        "batch", _batch_text(batch, numbers["batch_now"], job_row.limit, speedup), numbers
    )


def for_batch(job_row: JobRow) -> Reason:
    """Return why a job gets another batch on its slots."""
    table, at = job_row.table, job_row.level - 1
    slots, before = float(len(job_row.now)), float(sum(job_row.job.running_on.values()))
    (speed, goodput), batch = job_row.present, int(table.batches[at])
    numbers = {
        "slots_now": slots,
        "slots_then": slots,
        "batch_now": before,
        "batch_then": float(batch),
        "batch_limit": float(job_row.limit),
        "noise_scale": table.noise_scale,
        "speed_now": speed,
        "speed_then": float(table.speeds[at]),
        "goodput_now": goodput,
        "goodput_then": float(table.goodputs[at]),
    }
    ratio = numbers["speed_then"] / max(speed, 1e-9)
    text = _batch_text(batch, before, job_row.limit, f"{ratio:.2f} x the speed expected")
    return Reason("batch", text, numbers)


def _batch_text(batch: int, before: float, limit: int, speedup: str) -> str:
    if batch > before:
        return f"batch up to {batch} ({speedup}), its limit is {limit}"
    if limit < before:
        return f"batch down to {batch}, its limit is {limit}"
    return f"batch down to {batch}: more progress with fewer samples ({speedup})"


def least_value(problem: Problem, best: Candidate) -> float:
    """Return the least value of a slot in use; nan if none is."""
    rows = np.flatnonzero(best.levels)
    if not len(rows):
        return float("nan")
    levels = best.levels[rows]
    return float((problem.value[rows, levels] / problem.sizes[rows, levels]).min())


def waits(problem: Problem, best: Candidate, row: int, least: float) -> Reason:
    """Return why a job has no slots; `least` is the result of `least_value`."""
    job_row = problem.job_rows[row]
    need = int(job_row.table.sizes[0])
    numbers = _numbers(problem, best, row) | {"needs": float(need)}
    text = f"waits for {_slots(need)}"
    if problem.capacity < need:
        return Reason("waits", f"{text}, only {problem.capacity} available", numbers)
    if np.isfinite(least):
        numbers["least_value_of_a_slot"] = least
    reason = Reason("waits", f"{text}: other jobs gain more from them", numbers)
    return _with_fairness(problem, best, row, reason)


def _start(job_row: JobRow, numbers: dict[str, float], size: int) -> Reason:
    if job_row.job.epoch or job_row.job.samples_done:
        return Reason("resume", f"goes on, on {_slots(size)}", numbers)
    if size == job_row.job.least:
        return Reason("start", f"starts on {_slots(size)}, to warm up", numbers)
    return Reason("start", f"starts on {_slots(size)}", numbers)


def _move_reason(problem: Problem, best: Candidate, owners: SlotOwners, row: int) -> str:
    """Return why a job moves at the same size: the first reason that holds."""
    was, now = list(problem.job_rows[row].now), list(best.slots(row))
    if _nodes(problem, now) < _nodes(problem, was):
        return "brought together on fewer nodes"
    if problem.slow is not None:
        times = problem.slow[row, problem.cluster.type_of]
        if times[now].max() < times[was].max():
            return "moved to faster GPUs"
    before, after = owners.kept
    if after[row] > before[row]:
        return "moved to better neighbours"
    if recipients := _recipients(owners, problem, row):
        return (
            "makes room" if owners.trades.partners(row) else f"moved to make room for {recipients}"
        )
    left = set(problem.node_of[was].tolist()) - set(problem.node_of[now].tolist())
    there = {owner for slot, owner in owners.before.items() if problem.node_of[slot] in left}
    relieved = [other for other in there - {row} if after[other] > before[other]]
    if relieved:
        return f"moved away from {_names(owners.names(relieved))}, slowed down by it"
    return "moved to other slots"


def _nodes(problem: Problem, slots: Sequence[int]) -> int:
    return len(set(problem.node_of[list(slots)].tolist()))


def _place_share(problem: Problem, levels: IntArray, owner: IntArray) -> FloatArray:
    """Return the share of each job's speed that nodes, GPU types and neighbours leave, (J,)."""
    value, moved = problem.placed_value(levels, owner)
    plain = problem.value[problem.rows, levels]
    sane = (levels > 0) & (plain > 0.0)
    share = np.divide(value, plain, out=np.ones(len(value)), where=sane)
    pace = np.power(share, 1.0 / problem.speedup_exponent)
    for row, left in problem.left_by_trading(owner).items():
        pace[row] /= left
    stalled = moved & sane & (levels == problem.present)  # the stall of the move is temporary
    return np.asarray(np.where(stalled, pace / problem.move_factor, pace))


def _neighbour_share(problem: Problem, owner: IntArray) -> FloatArray:
    """Return the share of the speed that neighbours leave each job, shape (J,)."""
    if problem.interference is None:
        return np.ones(len(problem.job_rows))
    at = np.flatnonzero(owner >= 0)
    pairs = np.unique(np.column_stack([owner[at], problem.node_of[at]]), axis=0)
    spans = np.bincount(pairs[:, 0], minlength=len(problem.job_rows))
    return problem.interference.kept(pairs[:, 0], pairs[:, 1], spans)


def _slot_sources(owners: SlotOwners, best: Candidate, row: int) -> str:
    """Return where the slots of a growing job come from."""
    donors = {owners.before.get(slot, row) for slot in best.slots(row)} - {row}
    return f"from {_names(owners.names(donors))}" if donors else "no other job needs them more"


def _recipients(owners: SlotOwners, problem: Problem, row: int) -> str:
    """Return the jobs that get the slots of a job."""
    recipients = {owners.after.get(slot, row) for slot in problem.job_rows[row].now} - {row}
    return _names(owners.names(recipients))


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    return f"{shown} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else shown


def _slots(many: int) -> str:
    return f"{many} slot{'s' * (many != 1)}"


def _numbers(
    problem: Problem, best: Candidate, row: int, owners: SlotOwners | None = None
) -> dict[str, float]:
    job_row = problem.job_rows[row]
    was, now = int(problem.present[row]), int(best.levels[row])
    numbers = {
        "slots_now": float(problem.sizes[row, was]),
        "slots_then": float(problem.sizes[row, now]),
        "batch_now": float(sum(job_row.job.running_on.values())),
        "batch_then": float(job_row.table.batches[now - 1]) if now else 0.0,
        "batch_limit": float(job_row.limit),
        "noise_scale": job_row.table.noise_scale,
        "value_now": float(problem.value[row, was]) if was else 0.0,
        "value_then": float(problem.value[row, now]),
    }
    if problem.floors is not None:
        numbers["stretch"] = float(problem.floors.expected[row])
        numbers["max_stretch"] = problem.floors.limit
    if np.isfinite(job_row.remaining_s):
        numbers["remaining_on_one_slot_s"] = job_row.remaining_s
    if now:
        pace = float(owners.pace[1][row]) if owners else 1.0
        speed, goodput = job_row.table.speeds[now - 1], job_row.table.goodputs[now - 1]
        numbers |= {"speed_then": float(speed) * pace, "goodput_then": float(goodput) * pace}
        if np.isfinite(correction := float(job_row.table.corrections[now - 1])):
            numbers["correction"] = correction
    if was:
        pace = float(owners.pace[0][row]) if owners else 1.0
        speed, goodput = job_row.present
        numbers |= {"speed_now": speed * pace, "goodput_now": goodput * pace}
    return numbers


class Ones(SearchPolicy[Problem]):
    """Policy that chooses the batch and the slots of every job for the benefit of all jobs.

    Each view becomes a table with the value of every size of every job. A population of candidate
    schedules, seeded with the schedule in force and with greedy ones, evolves against this table. A
    plan is available at once and improves while there is time.
    """

    def __init__(self, options: OnesOptions | None = None) -> None:
        self.options = options or OnesOptions()
        self.estimates = Estimates(self.options)
        self.builder = ProblemBuilder(self.estimates, self.options)
        self._search = EvolutionarySearch(self.options)
        self._core_demand = CoreDemand()
        self._forecasts = StartForecasts() if self.options.forecast_starts else None
        self._reported: dict[JobId, None] = {}  # jobs that reported since batches were last chosen
        super().__init__(self.estimates, self._search)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds, lengths, limits, and the CPU use of workers."""
        super().observe(event, now)
        self._core_demand.observe(event)
        if self.options.rebatch and isinstance(event, EpochSeen | StepsSeen):
            self._reported[event.job] = None

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the fittest candidate, with a reason for every job that changes or waits."""
        problem = self._current_problem(view, now)
        self._reported.clear()  # a full plan chooses all batches
        best = self._search.best
        local_batch = {name: dict(placed) for name, placed in problem.kept.items()}
        reasons: dict[JobId, Reason] = {}
        starts: Mapping[JobId, StartForecast] = {}
        if best is not None:
            if self._forecasts is not None:
                starts = self._forecasts.of(problem, best, now)
            least, owners = least_value(problem, best), slot_owners(problem, best)
            for row, places in enumerate(best.by_row()):
                job_row = problem.job_rows[row]
                placed = _local_batches(problem, best, row, places)
                if placed:
                    local_batch[job_row.job.job] = placed
                if placed != dict(job_row.job.running_on):
                    reasons[job_row.job.job] = for_change(problem, best, owners, row, placed)
                elif not placed:
                    reasons[job_row.job.job] = waits(problem, best, row, least)
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
        stats, seen = super().stats(), self.estimates.lengths.calibration
        if seen is None:
            return stats
        return replace(
            stats,
            length_predictions=seen.predictions,
            length_error=seen.median_error,
            length_coverage_80=seen.narrow,
            length_coverage_90=seen.wide,
        )

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the best batch of each job that reported since the last call, on the same slots.

        Batches come from the same table as those of a full plan, with the same limits and margins.
        """
        local_batch: dict[JobId, dict[SlotId, int]] = {}
        reasons: dict[JobId, Reason] = {}
        for job_row in self.builder.rows(self._core_demand.shown(view), self._reported, now):
            job, batch = job_row.job, int(job_row.table.batches[job_row.level - 1])
            if job_row.moves_to or batch == sum(job.running_on.values()):
                continue
            local_batch[job.job] = split(batch, list(job.running_on))
            reasons[job.job] = for_batch(job_row)
        self._reported.clear()
        return Plan(based_on=view.version, local_batch=local_batch, reasons=reasons)

    def _build_problem(self, view: ClusterView, now: Seconds) -> Problem:
        problem = self.builder.build(self._core_demand.shown(view), now)
        self._search.update(problem)
        if self._forecasts is not None:
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
    """Return a job's local batches; the present ones if slots and batch stay the same."""
    job_row = problem.job_rows[row]
    level = int(best.levels[row])
    if not level:
        return {}
    batch = int(job_row.table.batches[level - 1])
    slots = [problem.slots[place] for place in places]
    present = dict(job_row.job.running_on)
    if set(slots) == set(present) and batch == sum(present.values()):
        return present
    return split(batch, slots)
