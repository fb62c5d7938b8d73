"""What a sweep would do and take before it starts: its searcher, played with made-up scores."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import Final

import msgspec

from controlplane.sweeps.search import first_trials, next_decisions
from controlplane.sweeps.trials import Trial, apply, with_score
from schemas.sweeps import Grid, Hyperband, PopulationBased, RandomSearch, SearchSpec, SweepSpec

PLAYS: Final = 8
PLAYED_UNITS: Final = 200_000  # of all plays together; larger sweeps are counted by epochs
ONE_BY_ONE: Final = 300  # configurations; more come to a rung together, in one play
PLAYED: Final = 1000  # configurations; of more, the result of so many is scaled up


class Range(msgspec.Struct, frozen=True):
    """What several plays gave."""

    least: float
    mean: float
    most: float


class SlotHours(msgspec.Struct, frozen=True):
    """How long it takes on so many slots."""

    slots: int
    hours: float
    busy: float  # share of the slots' time that trains, 0 to 1


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep before it starts. Scores are made up: who is promoted is not known yet."""

    configurations: int  # to begin with
    trials: Range  # with copies that are made on the way
    epochs: Range  # of all trials together
    units: Range
    units_to_the_end: int  # if every configuration trained to its last epoch
    unit_s: float | None  # that was assumed or measured
    slots: tuple[SlotHours, ...]  # for the least, the most, and what lies between
    state_bytes: int | None
    hop_bytes: float | None  # states that come from another process, at most
    useful_slots: int  # more would be idle from the first minute on


def preview(
    spec: SweepSpec,
    slots: tuple[int, int],
    unit_s: float | None = None,
    state_bytes: int | None = None,
) -> Preview:
    """Play the searcher to its end a few times.

    Args:
        spec: checked.
        slots: least and most.
        unit_s: seconds of one unit; None: nothing is said of hours.
        state_bytes: of one state; None: nothing is said of what hops.
    """
    search, partitions = spec.search, spec.partitions
    first = len(first_trials(search))
    counted = _counted(search, first)
    epochs = [sum(per_trial) for per_trial in counted]
    useful = min(slots[1], first)
    units = _range([many * partitions for many in epochs])
    hours: list[SlotHours] = []
    if unit_s is not None:
        for many in _between(slots):
            took = fmean(_makespan(one, partitions, many) for one in counted) * unit_s
            worked = units.mean * unit_s
            hours.append(
                SlotHours(many, took / 3600, min(1.0, worked / (many * took)) if took else 1.0)
            )
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
        useful_slots=useful,
    )


def _counted(search: SearchSpec, first: int) -> list[list[int]]:
    """Epochs of each trial, in each play."""
    searcher = search.searcher
    if isinstance(searcher, Grid | RandomSearch):
        return [[search.epochs] * first]
    scale = 1
    if first > PLAYED and not isinstance(searcher, Hyperband):
        scale = round(first / PLAYED)
        field = "population" if isinstance(searcher, PopulationBased) else "configurations"
        smaller = msgspec.structs.replace(searcher, **{field: PLAYED})
        search = msgspec.structs.replace(search, searcher=smaller)
    plays = PLAYS if first <= ONE_BY_ONE else 1
    return [_played(search, Random(play)) * scale for play in range(plays)]  # noqa: S311 - no secret


def _played(spec: SearchSpec, chance: Random) -> list[int]:
    """Epochs that each trial trained, with a score of its own each that chance decides."""
    quality: dict[int, float] = {}
    trials: list[Trial] = apply([], first_trials(spec))
    together = len(trials) > ONE_BY_ONE
    while training := [one for one in trials if not one.ended and not one.waits]:
        turn = training if together else [training[chance.randrange(len(training))]]
        for one in turn:
            ability = quality.setdefault(one.number, chance.random())
            score = ability - 1.0 / (one.epochs + 1)
            trials[one.number] = with_score(one, score, spec.epochs)
        while decisions := next_decisions(spec, trials):
            trials = apply(trials, decisions)
    return [len(one.scores) for one in trials]


def _makespan(epochs: Sequence[int], partitions: int, slots: int) -> float:
    """Units one after the other on the busiest slot, the longest trials first (Graham's bound)."""
    if sum(epochs) * partitions > PLAYED_UNITS:
        return max(sum(epochs) * partitions / slots, max(epochs) * partitions)
    left = sorted((-many * partitions for many in epochs if many), reverse=False)
    heapq.heapify(left)
    turns = 0
    while left:  # in each turn every slot takes one of those with the most left
        taken = [heapq.heappop(left) for _ in range(min(slots, len(left)))]
        step = _whole_turns(taken, left)
        turns += step
        for one in taken:
            if one + step < 0:
                heapq.heappush(left, one + step)
    return float(turns)


def _whole_turns(taken: Sequence[int], left: Sequence[int]) -> int:
    """How many turns the same trials may take one after the other."""
    ends_first = -max(taken)
    if not left:
        return ends_first
    lead = left[0] - max(taken)  # until somebody else has more left
    return max(1, min(ends_first, lead))


def _between(slots: tuple[int, int]) -> list[int]:
    least, most = slots
    found = {least, most}
    at = least
    while at * 2 < most:
        at *= 2
        found.add(at)
    return sorted(found)


def _range(values: Sequence[float]) -> Range:
    return Range(min(values), fmean(values), max(values))
