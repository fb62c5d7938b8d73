"""Who visits what next: greedy, the same with weights that plays chose, known before, or chance."""

from __future__ import annotations

from typing import Final

from controlplane.sweeps.hopping.fixed_order import FixedOrder
from controlplane.sweeps.hopping.problem import HopProblem
from controlplane.sweeps.hopping.progress import Progress, Weights
from controlplane.sweeps.hopping.random_order import RandomOrder
from controlplane.sweeps.hopping.rollouts import best_weights
from controlplane.sweeps.randomness import stream
from controlplane.sweeps.sweep_state import ChosenWeights, SweepState
from schemas.ids import WorkerId

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
