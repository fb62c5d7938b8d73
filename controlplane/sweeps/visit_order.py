"""Four orders of visits: greedy, greedy with weights from rollouts, fixed, and random.

A fixed order is known beforehand, so that a sweep can be repeated to the last bit. The random order
is the order of the paper (Cerebro, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from controlplane.sweeps.configurations import stream
from controlplane.sweeps.hopping import (
    GreedyOrder,
    HopProblem,
    Partitions,
    Visit,
    Weights,
    makespan_bound,
    members,
)
from controlplane.sweeps.sweep_state import ChosenWeights, SweepState
from schemas.ids import WorkerId

if TYPE_CHECKING:
    from random import Random


class FixedOrder(GreedyOrder):
    """Order in which each model visits the partitions cyclically from its own first partition.

    Idle slots and models decide when a unit begins, but not which unit. Epoch e of model i begins
    with partition (i + e) modulo the number of partitions.
    """

    def __init__(self, problem: HopProblem, turns: Sequence[int]) -> None:
        """Start from the state of `problem`; `turns` has i + e for each model i in its epoch e."""
        self._turns = list(turns)
        super().__init__(problem)

    def end(self, visit: Visit) -> None:
        """End a unit; after the last unit of an epoch, start the model's next epoch, if any."""
        before = self._epochs_left[visit.model]
        super().end(visit)
        self._turns[visit.model] += before - self._epochs_left[visit.model]

    def _open(self, model: int) -> Partitions:
        """Return a set with the next partition in the model's cycle, or an empty set."""
        todo, many = self._todo[model], len(self.problem.sizes)
        turn = self._turns[model] % many
        later = todo >> turn
        return (later & -later) << turn if later else todo & -todo


class RandomOrder(GreedyOrder):
    """Order in which each idle slot takes a random unit of an idle model (section 5.4)."""

    def __init__(self, problem: HopProblem, rng: Random) -> None:
        super().__init__(problem)
        self._rng = rng

    def begin_units(self) -> list[Visit]:
        """Begin random units until no idle slot can take one, and return them."""
        begun: list[Visit] = []
        for slot in sorted(self.idle_slots):
            place = self.problem.slots[slot]
            units = [
                Visit(model, partition, slot)
                for model in sorted(self.idle_models)
                for partition in members(self._todo[model] & (place.primary | place.replicas))
            ]
            if units:
                visit = units[self._rng.randrange(len(units))]
                self._begin(visit)
                begun.append(visit)
        return begun


WEIGHT_SPREAD: Final = 0.3  # standard deviation of the logarithms of weights
MAX_ROLLOUT_VISITS: Final = 2.0  # largest exponent; if slots differ, 0 (work alone) is best
STOP_RATIO: Final = 1.0005  # the search stops at this multiple of the bound


def makespan(
    problem: HopProblem,
    weights: Weights | None = None,
    seconds: Callable[[Visit], float] | None = None,
) -> float:
    """Return the seconds that the greedy order takes; `seconds` returns the real time of a unit."""
    progress = GreedyOrder(problem, weights)
    takes = seconds or problem.seconds
    now = 0.0
    ends = [(unit.ends_in_s, unit.visit) for unit in problem.running]
    heapify(ends)
    while True:
        for visit in progress.begin_units():
            heappush(ends, (now + takes(visit), visit))
        if not ends:
            return now
        now, visit = heappop(ends)
        progress.end(visit)
        while ends and ends[0][0] <= now:
            progress.end(heappop(ends)[1])


def best_weights(problem: HopProblem, rollouts: int, rng: Random) -> Weights | None:
    """Return the weights of the shortest rollout, or None if no rollout shortens the order."""
    found: Weights | None = None
    bound, least = makespan_bound(problem) * STOP_RATIO, makespan(problem)
    for _ in range(rollouts):
        if least <= bound:
            break
        weights = Weights(
            models=[rng.lognormvariate(0.0, WEIGHT_SPREAD) for _ in problem.models],
            slots=[rng.lognormvariate(0.0, WEIGHT_SPREAD) for _ in problem.slots],
            visit_exponent=rng.uniform(0.0, MAX_ROLLOUT_VISITS),
        )
        took = makespan(problem, weights)
        if took < least:
            least, found = took, weights
    return found


ROLLOUTS: Final = 20
UNITS_PER_PLAN: Final = 16  # units that begin before weights are chosen again
MAX_PLANNED_VISITS: Final = 2000  # with more visits, rollouts would block the sweep


def visit_order(
    state: SweepState, problem: HopProblem, numbers: list[int], workers: list[WorkerId]
) -> GreedyOrder | RandomOrder:
    """Return the order of the next units, with the trials and workers of the problem by index."""
    if state.order == "random":
        return RandomOrder(problem, stream("visits", state.spec.seed, state.attempts))
    if state.order == "fixed":
        return FixedOrder(problem, [number + state.models[number].epoch for number in numbers])
    if state.order == "rollouts":
        return GreedyOrder(problem, _weights(state, problem, numbers, workers))
    return GreedyOrder(problem)


def _weights(
    state: SweepState, problem: HopProblem, numbers: list[int], workers: list[WorkerId]
) -> Weights | None:
    chosen = state.weights
    if chosen is None or state.attempts - chosen.attempts >= UNITS_PER_PLAN:
        chosen = state.weights = _choose(state, problem, numbers, workers)
    if not chosen.models:
        return None
    models = [chosen.models.get(number, 1.0) for number in numbers]
    slots = [chosen.slots.get(worker, 1.0) for worker in workers]
    return Weights(models, slots, chosen.visit_exponent)


def _choose(
    state: SweepState, problem: HopProblem, numbers: list[int], workers: list[WorkerId]
) -> ChosenWeights:
    sizes = len(problem.sizes)
    visits = sum(model.todo.bit_count() + model.epochs_left * sizes for model in problem.models)
    rng = stream("plays", state.spec.seed, state.attempts)
    best = best_weights(problem, ROLLOUTS, rng) if visits <= MAX_PLANNED_VISITS else None
    if best is None:
        return ChosenWeights(state.attempts, {}, {}, 0.0)
    models = dict(zip(numbers, best.models, strict=True))
    slots = dict(zip(workers, best.slots, strict=True))
    return ChosenWeights(state.attempts, models, slots, best.visit_exponent)
