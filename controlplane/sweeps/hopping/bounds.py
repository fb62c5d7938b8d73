"""How quickly a sweep could end at best."""

from __future__ import annotations

from controlplane.sweeps.hopping.problem import HopProblem, members


def makespan_bound(problem: HopProblem) -> float:
    """Seconds that no order of visits can beat.

    Where each partition is on one slot, this is the open-shop bound: the longest of what one
    model and of what one slot still has to do (Cerebro section 5.1). With replicas a unit may be on
    any slot that holds its partition: for a model the quickest of these counts, and all slots
    together share all work.

    Args:
        problem: what is left; units that run count with what is left of them.
    """
    slots, sizes = problem.slots, problem.sizes
    quickest = [
        min((s.slowness for s in slots if (s.primary | s.replicas) >> p & 1), default=0.0)
        for p in range(len(sizes))
    ]
    of_models = [0.0] * len(problem.models)
    work = 0.0  # seconds on a slot of slowness 1
    alone = [0.0] * len(slots)  # what can be done nowhere else, seconds
    only_at = _only_holders(problem)
    running = {(unit.visit.model, unit.visit.partition) for unit in problem.running}
    for at, model in enumerate(problem.models):
        for p, size in enumerate(sizes):
            visits = model.epochs_left + (model.todo >> p & 1) - ((at, p) in running)
            seconds = visits * model.unit_s * size
            of_models[at] += seconds * quickest[p]
            work += seconds
            if p in only_at:
                alone[only_at[p]] += seconds * slots[only_at[p]].slowness
    shared = 0.0
    for unit in problem.running:
        of_models[unit.visit.model] += unit.ends_in_s
        alone[unit.visit.slot] += unit.ends_in_s
        shared += unit.ends_in_s / slots[unit.visit.slot].slowness
    together = (work + shared) / sum(1.0 / slot.slowness for slot in slots) if slots else 0.0
    return max([together, *of_models, *alone])


def _only_holders(problem: HopProblem) -> dict[int, int]:
    """The slot of each partition that one slot alone holds."""
    holders: dict[int, list[int]] = {}
    for at, slot in enumerate(problem.slots):
        for p in members(slot.primary | slot.replicas):
            holders.setdefault(p, []).append(at)
    return {p: at[0] for p, at in holders.items() if len(at) == 1}
