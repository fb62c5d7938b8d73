"""The greedy order played to its end, and the best of several such plays."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from controlplane.sweeps.hopping.bounds import makespan_bound
from controlplane.sweeps.hopping.problem import HopProblem, Visit
from controlplane.sweeps.hopping.progress import Progress, Weights

if TYPE_CHECKING:
    from random import Random

SPREAD: Final = 0.3  # of the logarithms of weights
MOST_VISITS: Final = 2.0  # power; 0: work alone, which is best where slots differ
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
            visits=rng.uniform(0.0, MOST_VISITS),
        )
        took = makespan(problem, weights)
        if took < least:
            least, found = took, weights
    return found
