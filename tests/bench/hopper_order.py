"""Time that the order of visits loses, compared with the paper's random order, in virtual time.

`makespan_mean` and `makespan_worst` are relative to the open-shop bound, for 16 and 32 configurations on half
as many slots: costs are spread as those of the paper's 35 networks (0.36 to 21 GFLOPS, mean 5.9), slots as its
four GPUs (section 5.4). `jitter_mean` has eight epochs without a barrier, where every unit takes up to 20% more
or less than expected, relative to the busiest slot or model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from random import Random
from statistics import mean
from typing import Final

from controlplane.sweeps.configurations import stream
from controlplane.sweeps.hopping import (
    GreedyOrder,
    HopProblem,
    Model,
    Slot,
    Visit,
    makespan_bound,
    partitions,
)
from controlplane.sweeps.visit_order import FixedOrder, RandomOrder, best_weights, makespan
from tests.bench import report

SETTINGS: Final = ((16, 16, False), (16, 8, False), (16, 8, True), (32, 16, True))
GPUS: Final = (12.1, 5.6, 11.3, 9.5)  # TFLOPS
ROLLOUTS: Final = 20
JITTER: Final = 0.2
EPOCHS: Final = 8
SLOTS: Final = 8  # of figures, as the next two
CONFIGURATIONS: Final = (8, 12, 16, 24, 32, 48, 64)
SEEDS: Final = 20


def problem(configs: int, slots: int, *, alike: bool, seed: int, epochs: int = 1) -> HopProblem:
    rng = stream("hopper", seed)
    costs = [
        5.9 if alike else min(21.0, max(0.36, rng.lognormvariate(1.4, 0.9))) for _ in range(configs)
    ]
    slowness = [1.0 if alike else GPUS[0] / rng.choice(GPUS) for _ in range(slots)]
    everything = partitions(range(slots))
    return HopProblem(
        models=[Model(cost, everything, epochs - 1) for cost in costs],
        slots=[Slot(partitions([at]), slowness=slow) for at, slow in enumerate(slowness)],
        sizes=[1.0] * slots,
    )


def played(one: HopProblem, order: GreedyOrder) -> float:
    now = 0.0
    ends: list[tuple[float, Visit]] = []
    while True:
        for visit in order.begin_units():
            heappush(ends, (now + one.seconds(visit), visit))
        if not ends:
            return now
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            order.end(heappop(ends)[1])


def with_jitter(one: HopProblem, rng: Random) -> float:
    busy: dict[tuple[str, int], float] = {}

    def seconds(visit: Visit) -> float:
        took = one.seconds(visit) * rng.uniform(1.0 - JITTER, 1.0 + JITTER)
        for whose in (("model", visit.model), ("slot", visit.slot)):
            busy[whose] = busy.get(whose, 0.0) + took
        return took

    took = makespan(one, best_weights(one, ROLLOUTS, rng), seconds)
    return took / max(busy.values())


def decision_ms(one: HopProblem) -> float:
    """Return the mean CPU time of a decision after the end of a unit."""
    progress, took, asked = GreedyOrder(one), 0.0, 0
    running: list[Visit] = []
    while True:
        before = time.perf_counter()
        running += progress.begin_units()
        took += time.perf_counter() - before
        asked += 1
        if not running:
            return took / asked * 1000.0
        progress.end(running.pop(0))


CHANCE, BEST = "random (the paper)", f"greedy, {ROLLOUTS} rollouts"
ORDERS: Final[Mapping[str, tuple[str, Callable[[HopProblem, Random], float]]]] = {
    CHANCE: ("random", lambda one, rng: played(one, RandomOrder(one, rng))),
    "fixed": ("fixed", lambda one, _: played(one, FixedOrder(one, range(len(one.models))))),
    "greedy": ("greedy", lambda one, _: makespan(one)),
    BEST: ("rollouts", lambda one, rng: makespan(one, best_weights(one, ROLLOUTS, rng))),
}  # with the name of its random stream


def over_the_bound(order: str, problems: Sequence[HopProblem]) -> list[float]:
    """Return each problem's makespan in an order, relative to its bound."""
    key, play = ORDERS[order]
    return [play(one, stream(key, seed)) / makespan_bound(one) for seed, one in enumerate(problems)]


def makespans(*, alike: bool, quick: bool) -> dict[str, list[tuple[float, float]]]:
    """Return by order, for each of `CONFIGURATIONS`, the mean and the worst of all seeds."""
    found: dict[str, list[tuple[float, float]]] = {CHANCE: [], "greedy": [], BEST: []}
    for many in report.counted("size", CONFIGURATIONS, len(CONFIGURATIONS)):
        seeds = range(2 if quick else SEEDS)
        problems = [problem(many, SLOTS, alike=alike, seed=seed) for seed in seeds]
        for name, cells in found.items():
            over = over_the_bound(name, problems)
            cells.append((mean(over), max(over)))
    return found


def order_figures(*, quick: bool) -> dict[str, float]:
    seeds = range(3 if quick else 40)
    rows: list[list[object]] = []
    ours: list[float] = []
    chance: list[float] = []
    for configs, slots, differ in report.counted("setting", SETTINGS, len(SETTINGS)):
        problems = [problem(configs, slots, alike=not differ, seed=seed) for seed in seeds]
        found = {name: over_the_bound(name, problems) for name in ORDERS}
        cells = [f"{mean(one):.4f} ({max(one):.4f})" for one in found.values()]
        kind = "different" if differ else "alike"
        rows.append([f"{configs} on {slots}, {kind}", *cells])
        if configs >= 2 * slots:
            ours += found[BEST]
            chance += found[CHANCE]
    report.table(
        f"makespan over the bound, mean (worst) of {len(seeds)} seeds",
        ["configurations", *ORDERS],
        rows,
    )
    report.now("units that take other times than expected")
    jitter = {
        alike: [
            with_jitter(
                problem(16, 8, alike=alike, seed=seed, epochs=EPOCHS), stream("jitter", seed)
            )
            for seed in seeds[:8]
        ]
        for alike in (True, False)
    }
    ms = decision_ms(problem(32, 16, alike=False, seed=0))
    report.table(
        "16 on 8, eight epochs without a barrier, units 20% off, over the busiest; a decision",
        ["", "mean", "worst"],
        [
            ["alike", mean(jitter[True]), max(jitter[True])],
            ["different", mean(jitter[False]), max(jitter[False])],
            ["decision of 32 on 16, ms of a core", ms, ""],
        ],
    )
    return {
        "makespan_mean": mean(ours),
        "makespan_worst": max(ours),
        "random_mean": mean(chance),
        "jitter_mean": mean(jitter[True]),
        "jitter_different_mean": mean(jitter[False]),
        "decision_ms": ms,
    }
