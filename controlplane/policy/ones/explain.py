"""Why a plan does what it does: words for people, codes and numbers for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.policy.api import Reason
from controlplane.policy.ones.genome import Candidate
from controlplane.policy.ones.problem import Case, Problem
from schemas.ids import JobId, SlotId

SHOWN = 3  # names in a sentence


@dataclass(frozen=True, slots=True)
class Owners:
    """Whose each slot is before and after a plan: the row of the job, by place of the slot."""

    before: dict[int, int]
    after: dict[int, int]
    jobs: tuple[JobId, ...]

    def names(self, rows: Iterable[int]) -> list[JobId]:
        """The jobs of these rows, in order of arrival."""
        return [self.jobs[row] for row in sorted(rows)]


def owners_of(problem: Problem, best: Candidate) -> Owners:
    """Who has which slot now, and who will have it."""
    return Owners(
        before={slot: row for row, case in enumerate(problem.cases) for slot in case.now},
        after={slot: row for row, slots in enumerate(best.placed) for slot in slots},
        jobs=tuple(case.job.job for case in problem.cases),
    )


def for_change(
    problem: Problem, best: Candidate, owners: Owners, row: int, placed: Mapping[SlotId, int]
) -> Reason:
    """Why a job starts, grows, shrinks, moves, stops or gets another batch."""
    case = problem.cases[row]
    numbers = _numbers(problem, best, row)
    was, now = len(case.now), len(placed)
    if not now:
        heirs = _heirs(owners, problem, row) or "others"
        text = f"paused: its {_slots(was)} serve {heirs} better"
        return Reason("pause", text, numbers)
    if not was:
        return _start(case, numbers, now)
    ratio = numbers["speed_then"] / max(numbers["speed_now"], 1e-9)
    speedup = f"{ratio:.2f} x the speed expected"
    batch = int(numbers["batch_then"])
    to = _slots(now) if batch == numbers["batch_now"] else f"{_slots(now)} and batch {batch}"
    if now > was:
        text = f"grows to {to} ({speedup})"
        return Reason("grow", f"{text}: {_room(owners, best, row)}", numbers)
    if now < was:
        heirs = _heirs(owners, problem, row)
        if heirs:
            text = f"gives {_slots(was - now)} to {heirs}, goes on with {to} ({speedup})"
        else:
            text = f"is better off with {to} ({speedup})"
        return Reason("shrink", text, numbers)
    if best.packed[row]:
        return Reason("pack", f"brought together on fewer nodes ({speedup})", numbers)
    if batch < numbers["batch_now"]:
        text = f"batch down to {batch}, its limit is {case.limit}"
    else:
        text = f"batch up to {batch} ({speedup}), its limit is {case.limit}"
    return Reason("batch", text, numbers)


def least_worth(problem: Problem, best: Candidate) -> float:
    """The least that any slot in use is worth; nan if none is."""
    rows = np.flatnonzero(best.levels)
    if not len(rows):
        return float("nan")
    levels = best.levels[rows]
    return float((problem.worth[rows, levels] / problem.sizes[rows, levels]).min())


def waits(problem: Problem, best: Candidate, row: int, least: float) -> Reason:
    """Why a job has no slots.

    Args:
        problem: the table.
        best: the schedule that leaves it out.
        row: which job.
        least: see `least_worth`.
    """
    case = problem.cases[row]
    need = int(case.offers.sizes[0])
    numbers = _numbers(problem, best, row) | {"needs": float(need)}
    text = f"waits for {_slots(need)}"
    if problem.capacity < need:
        return Reason("waits", f"{text}, {problem.capacity} could be had", numbers)
    if np.isfinite(least):
        numbers["least_value_of_a_slot"] = least
    return Reason("waits", f"{text}: others are worth more on them", numbers)


def _start(case: Case, numbers: dict[str, float], size: int) -> Reason:
    if case.job.epoch or case.job.samples_done:
        return Reason("resume", f"goes on, on {_slots(size)}", numbers)
    if size == case.job.least:
        return Reason("start", f"starts on {_slots(size)}, to warm up", numbers)
    return Reason("start", f"starts on {_slots(size)}", numbers)


def _room(owners: Owners, best: Candidate, row: int) -> str:
    """Where the slots of a growing job come from."""
    donors = {owners.before.get(slot, row) for slot in best.placed[row]} - {row}
    return f"from {_names(owners.names(donors))}" if donors else "nobody else needs them more"


def _heirs(owners: Owners, problem: Problem, row: int) -> str:
    """Who gets the slots of a job that gives some up."""
    heirs = {owners.after.get(slot, row) for slot in problem.cases[row].now} - {row}
    return _names(owners.names(heirs))


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


def _slots(many: int) -> str:
    return f"{many} slot{'s' * (many != 1)}"


def _numbers(problem: Problem, best: Candidate, row: int) -> dict[str, float]:
    case = problem.cases[row]
    was, now = int(problem.present[row]), int(best.levels[row])
    numbers = {
        "slots_now": float(problem.sizes[row, was]),
        "slots_then": float(problem.sizes[row, now]),
        "batch_now": float(sum(case.job.running_on.values())),
        "batch_then": float(case.offers.batches[now - 1]) if now else 0.0,
        "batch_limit": float(case.limit),
        "noise_scale": case.offers.noise_scale,
        "value_now": float(problem.worth[row, was]) if was else 0.0,
        "value_then": float(problem.worth[row, now]),
    }
    if np.isfinite(case.remaining_s):
        numbers["remaining_on_one_slot_s"] = case.remaining_s
    if now:
        speed, goodput = case.offers.speeds[now - 1], case.offers.goodputs[now - 1]
        numbers |= {"speed_then": float(speed), "goodput_then": float(goodput)}
    if was:
        speed, goodput = case.present
        numbers |= {"speed_now": speed, "goodput_now": goodput}
    return numbers
