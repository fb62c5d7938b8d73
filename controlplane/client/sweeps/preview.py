"""Cost estimate of a sweep before it starts. The searcher is simulated with random scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import Final

import msgspec

from controlplane.sweeps.search import first_trials, next_decisions
from controlplane.sweeps.trials import Trial, apply, with_score
from schemas.sweeps import Grid, Hyperband, PopulationBased, RandomSearch, SearchSpec, SweepSpec

SIMULATIONS: Final = 8
MAX_SEQUENTIAL: Final = 300  # configurations; more of them train in parallel, in one simulation
MAX_SIMULATED: Final = 1000  # simulated configurations; results for more of them are scaled up


class Range(msgspec.Struct, frozen=True):
    """Smallest, mean and largest result of several simulations."""

    least: float
    mean: float
    most: float


class SlotHours(msgspec.Struct, frozen=True):
    """The estimated duration of the sweep on a given number of slots."""

    slots: int
    hours: float
    busy: float  # share of slot time spent on training, 0 to 1


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate for a sweep before it starts. Scores are random, as promotions are unknown."""

    configurations: int  # at the start
    trials: Range  # including copies made during the sweep
    epochs: Range  # sum over all trials
    units: Range
    units_to_the_end: int  # number of units if every configuration trained to the last epoch
    unit_s: float | None  # assumed or measured
    slots: tuple[SlotHours, ...]  # for the minimum, the maximum, and the powers of two between them
    state_bytes: int | None
    hop_bytes: float | None  # upper bound on bytes of states moved between processes
    useful_slots: int  # number of slots; further ones would be idle from the start


def preview(
    spec: SweepSpec,
    slots: tuple[int, int],
    unit_s: float | None = None,
    state_bytes: int | None = None,
) -> Preview:
    """Simulate the searcher to its end a few times.

    Args:
        spec: checked.
        slots: minimum and maximum.
        unit_s: seconds per unit; None: hours are not estimated.
        state_bytes: size of a state; None: transfers are not estimated.
    """
    search, partitions = spec.search, spec.partitions
    first = len(first_trials(search))
    counted = _simulated_epochs(search, first)
    epochs = [sum(per_trial) for per_trial in counted]
    units = _range([count * partitions for count in epochs])
    hours: list[SlotHours] = []
    if unit_s is not None:
        for count in _between(slots):
            took = fmean(_makespan(one, partitions, count) for one in counted) * unit_s
            busy = min(1.0, units.mean * unit_s / (count * took)) if took else 1.0
            hours.append(SlotHours(count, took / 3600, busy))
    return Preview(
        configurations=first,
        trials=_range([len(one) for one in counted]),
        epochs=_range(epochs),
        units=units,
        units_to_the_end=first * search.epochs * partitions,
        unit_s=unit_s,
        slots=tuple(hours),
        state_bytes=state_bytes,
        hop_bytes=None if state_bytes is None else state_bytes * max(0.0, units.mean - first),
        useful_slots=min(slots[1], first),
    )


def _simulated_epochs(search: SearchSpec, first: int) -> list[list[int]]:
    """Return, for each simulation, the number of epochs of each trial."""
    searcher = search.searcher
    if isinstance(searcher, Grid | RandomSearch):
        return [[search.epochs] * first]
    scale = 1
    if first > MAX_SIMULATED and not isinstance(searcher, Hyperband):
        scale = round(first / MAX_SIMULATED)
        field = "population" if isinstance(searcher, PopulationBased) else "configurations"
        smaller = msgspec.structs.replace(searcher, **{field: MAX_SIMULATED})
        search = msgspec.structs.replace(search, searcher=smaller)
    plays = SIMULATIONS if first <= MAX_SEQUENTIAL else 1
    return [_simulate(search, Random(play)) * scale for play in range(plays)]  # noqa: S311 - no secret


def _simulate(spec: SearchSpec, chance: Random) -> list[int]:
    """Simulate once with a random quality of each trial. Return each trial's number of epochs."""
    quality: dict[int, float] = {}
    trials: list[Trial] = apply([], first_trials(spec))
    together = len(trials) > MAX_SEQUENTIAL
    while training := [one for one in trials if not one.ended and not one.waits]:
        turn = training if together else [training[chance.randrange(len(training))]]
        for one in turn:
            ability = quality.setdefault(one.number, chance.random())
            score = ability - 1.0 / (one.epochs + 1)
            trials[one.number] = with_score(one, score, spec.epochs)
        while decisions := next_decisions(spec, trials):
            trials = apply(trials, decisions)
    return [len(one.scores) for one in trials]


def _makespan(epochs: Sequence[int], partitions: int, slots: int) -> int:
    """Return the units on the busiest slot if the trials with most units left always run.

    This order is optimal for units of equal length (Hu 1961): a trial never runs on two slots.
    """
    return max(math.ceil(sum(epochs) * partitions / slots), max(epochs) * partitions)


def _between(slots: tuple[int, int]) -> list[int]:
    least, most = slots
    found = [least]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return sorted({*found, most})


def _range(values: Sequence[float]) -> Range:
    return Range(min(values), fmean(values), max(values))
