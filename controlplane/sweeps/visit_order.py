"""Who visits what next: greedy, the same with weights that plays chose, known before, or chance.

Visits in an order that is known beforehand, so that a sweep can be repeated to the last bit.

The paper's order: chance (Cerebro, Algorithm 1).

The greedy order played to its end, and the best of several such plays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from controlplane.sweeps.configurations import stream
from controlplane.sweeps.hopping import (
    HopProblem,
    Partitions,
    Progress,
    Visit,
    Weights,
    makespan_bound,
    members,
)
from controlplane.sweeps.sweep_state import ChosenWeights, SweepState
from schemas.ids import WorkerId

if TYPE_CHECKING:
    from random import Random


class FixedOrder(Progress):
    """A model visits partitions round and round; each begins elsewhere, so that few meet.

    Who is idle decides when a unit begins, and not which. Epoch e of model i begins with partition
    (i + e) modulo the number of partitions.
    """

    def __init__(self, problem: HopProblem, turns: Sequence[int]) -> None:
        """As the problem is now.

        Args:
            turns: i + e of each model's present epoch, shape (models,).
        """
        self._turns = list(turns)
        super().__init__(problem)

    def end(self, visit: Visit) -> None:
        """The unit has ended; its model goes on with its next epoch if it has one."""
        before = self._epochs_left[visit.model]
        super().end(visit)
        self._turns[visit.model] += before - self._epochs_left[visit.model]

    def _open(self, model: int) -> Partitions:
        """The first one of its round that it has not visited."""
        todo, many = self._todo[model], len(self.problem.sizes)
        turn = self._turns[model] % many
        later = todo >> turn
        return (later & -later) << turn if later else todo & -todo


class RandomOrder(Progress):
    """Each idle slot in turn takes any unit, by chance, whose model is idle (section 5.4)."""

    def __init__(self, problem: HopProblem, rng: Random) -> None:
        """As the problem is now."""
        super().__init__(problem)
        self._rng = rng

    def begin_units(self) -> list[Visit]:
        """Begin what can begin."""
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


SPREAD: Final = 0.3  # of the logarithms of weights
MAX_ROLLOUT_VISITS: Final = 2.0  # power; 0: work alone, which is best where slots differ
CLOSE: Final = 1.0005  # to the bound: nothing is left to be found


def makespan(
    problem: HopProblem,
    weights: Weights | None = None,
    seconds: Callable[[Visit], float] | None = None,
) -> float:
    """Seconds until all is done in the greedy order.

    Args:
        problem: what is left; what runs is waited for.
        weights: on the work that is left; None: all alike.
        seconds: what units really take; None: what is expected.
    """
    progress = Progress(problem, weights)
    takes = seconds or problem.seconds
    now = 0.0
    ends: list[tuple[float, Visit]] = []
    for unit in problem.running:
        heappush(ends, (unit.ends_in_s, unit.visit))
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
    """The weights whose play ends first; the plain order (None) is among them.

    A play that is as good as the bound ends the search, so most problems cost one play.

    Args:
        rollouts: plays beside the plain order.
    """
    found: Weights | None = None
    bound = makespan_bound(problem) * CLOSE
    least = makespan(problem)
    for _ in range(rollouts):
        if least <= bound:
            break
        weights = Weights(
            models=[rng.lognormvariate(0.0, SPREAD) for _ in problem.models],
            slots=[rng.lognormvariate(0.0, SPREAD) for _ in problem.slots],
            visits=rng.uniform(0.0, MAX_ROLLOUT_VISITS),
        )
        took = makespan(problem, weights)
        if took < least:
            least, found = took, weights
    return found


ROLLOUTS: Final = 20
PLANNED_UNITS: Final = 16  # that begin before weights are chosen anew
MOST_VISITS: Final = 2000  # that are left, for weights to be chosen: the plays hold up the sweep


def visit_order(
    state: SweepState, problem: HopProblem, numbers: list[int], workers: list[WorkerId]
) -> Progress | RandomOrder:
    """What says which units begin now.

    Args:
        state: of the sweep; chosen weights are kept there.
        problem: the sweep as the hopper sees it.
        numbers: trials, in the order of the problem's models.
        workers: in the order of the problem's slots.
    """
    if state.order == "random":
        return RandomOrder(problem, stream("visits", state.spec.seed, state.attempts))
    if state.order == "fixed":
        return FixedOrder(problem, [number + state.models[number].epoch for number in numbers])
    if state.order == "rollouts":
        return Progress(problem, _weights(state, problem, numbers, workers))
    return Progress(problem)


def _weights(
    state: SweepState, problem: HopProblem, numbers: list[int], workers: list[WorkerId]
) -> Weights | None:
    chosen = state.weights
    if chosen is None or state.attempts - chosen.attempts >= PLANNED_UNITS:
        chosen = state.weights = _choose(state, problem, numbers, workers)
    if not chosen.models:
        return None
    models = [chosen.models.get(number, 1.0) for number in numbers]
    return Weights(models, [chosen.slots.get(worker, 1.0) for worker in workers], chosen.visits)


def _choose(
    state: SweepState, problem: HopProblem, numbers: list[int], workers: list[WorkerId]
) -> ChosenWeights:
    sizes = len(problem.sizes)
    visits = sum(model.todo.bit_count() + model.epochs_left * sizes for model in problem.models)
    rng = stream("plays", state.spec.seed, state.attempts)
    best = best_weights(problem, ROLLOUTS, rng) if visits <= MOST_VISITS else None
    if best is None:
        return ChosenWeights(state.attempts, {}, {}, 0.0)
    models = dict(zip(numbers, best.models, strict=True))
    return ChosenWeights(
        state.attempts, models, dict(zip(workers, best.slots, strict=True)), best.visits
    )
