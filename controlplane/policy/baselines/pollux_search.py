"""Genetic search of Pollux: workers of every job on every node (Qiao et al., OSDI '21, 4.2).

The operators and NSGA-II's two objectives are those of the published simulator (petuum/adaptdl,
branch osdi21-artifact), which runs them in pymoo. A candidate is a matrix (jobs, nodes) of workers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from controlplane.prediction import BoolArray, FloatArray, IntArray

States = NDArray[np.int16]  # workers of each job on each node, shape (P, J, N)

POPULATION: Final = 100
CROSSOVER: Final = 0.9  # share of pairs that exchange jobs; otherwise they are copied
RESET: Final = 0.1  # share of jobs that return to their present nodes
DROP: Final = 0.1  # share of jobs that lose workers, and their share of nodes that become empty
FLOOR: Final = 1e-3  # added to each speed-up, so that a job without slots has a finite term
MATINGS: Final = 10  # attempts per generation to find candidates that are new


@dataclass(frozen=True)
class AllocationProblem:
    """Jobs in the order in which they keep contested slots, and the nodes."""

    speedups: FloatArray  # (J, 2, S + 1): on one and on several nodes, by slots; relative to
    # the goodput of a fair share
    present: States  # (J, N): workers now
    most: IntArray  # (J,): most slots
    least: IntArray  # (J,): least slots, if any
    kept: FloatArray  # (J,): share of the speed-up that is left if the placement changes
    slots: IntArray  # (N,): slots of each node that these jobs may use
    all_slots: IntArray  # (N,): slots of each node
    shared: IntArray  # (N,): 1 on nodes with another job that is on several nodes
    power: float = -1.0  # p of the power mean; lower is fairer

    @cached_property
    def scale(self) -> float:
        """Share of the cluster that a node has: a fair share counts as this."""
        return len(self.all_slots) / float(self.all_slots.sum())

    def of(self, states: States) -> FloatArray:
        """Return the speed-ups of each job, shape (P, J), before restarts are charged."""
        many = states.sum(axis=2)
        several = ((states > 0).sum(axis=2) > 1).astype(np.int64)
        return np.asarray(self.speedups[np.arange(len(self.most)), several, many])

    def losses(self, states: States) -> FloatArray:
        """Return minus the power mean of speed-ups, and minus the utility, shape (P, 2).

        Pollux eq. 16 and 17. The utility is the sum of speed-ups per slot of the nodes in use.
        """
        speedups = self.of(states)
        changed = (states != self.present).any(axis=2)
        scaled = speedups * self.scale * np.where(changed, self.kept, 1.0)
        mean = power_mean(scaled + FLOOR, self.power)
        in_use = (states.any(axis=1) * self.all_slots).sum(axis=1)
        return -np.column_stack([mean, speedups.sum(axis=1) / np.maximum(in_use, 1)])


def power_mean(values: FloatArray, power: float) -> FloatArray:
    """Return (1/J sum v^p)^(1/p) of each row, or the geometric mean for p = 0."""
    if power == 0:
        return np.asarray(np.exp(np.log(values).mean(axis=1)))
    return np.asarray((values**power).mean(axis=1) ** (1.0 / power))


def repaired(states: States, problem: AllocationProblem, rng: Generator) -> States:
    """Return valid states.

    In the order of the jobs: a node has at most one job that is on several nodes, a job has at most
    its most slots (on random nodes), and a node has no more workers than slots.
    """
    states = np.array(states, order="F")
    several = (states > 0).sum(axis=2) > 1
    shared = np.tile(problem.shared, (len(states), 1))
    for job in range(states.shape[1]):
        here = states[:, job]
        shared += (here > 0) & several[:, job, None]
        here *= shared <= 1  # as published, this also removes later jobs that are on one node
    cells = np.nonzero(states.sum(axis=2) > problem.most)
    if len(cells[0]):
        excess, most = states[cells], problem.most[cells[1]][:, None]
        order = rng.random(excess.shape, dtype=np.float32).argsort(axis=1)
        filled = np.minimum(np.take_along_axis(excess, order, axis=1).cumsum(axis=1), most)
        np.put_along_axis(excess, order, np.diff(filled, axis=1, prepend=0), axis=1)
        states[cells] = excess
    left = np.tile(problem.slots.astype(np.int16), (len(states), 1))
    for job in range(states.shape[1]):
        here = states[:, job]
        np.minimum(here, left, out=here)
        left -= here
    states[states.sum(axis=2) < problem.least] = 0
    return states


def _mutated(states: States, problem: AllocationProblem, rng: Generator) -> States:
    """Reset some jobs, empty some nodes of some jobs, and raise some workers on free slots."""
    reset = np.nonzero(rng.random(states.shape[:2]) < RESET)
    states[reset] = problem.present[reset[1]]
    dropped = np.nonzero(rng.random(states.shape[:2]) < DROP)
    states[dropped] *= rng.random((len(dropped[0]), states.shape[2])) >= DROP
    states = np.asfortranarray(states)
    free = (states.sum(axis=1) < problem.slots)[:, None, :]
    own = (states > 0) & free
    any_job = 1.0 / states.shape[1]
    own_job = 1.0 / np.maximum(own.sum(axis=1, keepdims=True), 1)
    both = (any_job + own_job - any_job * own_job).astype(np.float32)
    chance = np.where(own, both, np.float32(any_job) * free)
    raised = np.nonzero(rng.random(states.shape, dtype=np.float32) < chance)
    most = problem.slots[raised[2]]
    states[raised] = rng.integers(np.minimum(states[raised], most), most + 1)
    return states


class AllocationSearch:
    """NSGA-II (Deb et al. 2002) over allocations of one problem.

    Args:
        states: candidates to begin with, shape (P, J, N); they are repaired.
    """

    def __init__(self, problem: AllocationProblem, states: States, rng: Generator) -> None:
        self._problem, self._rng = problem, rng
        self._states = _distinct(repaired(states.astype(np.int16, copy=False), problem, rng), set())
        self._losses = problem.losses(self._states)
        self._ranks, self._crowding = ranked(self._losses)

    def evolve(self, generations: int) -> None:
        """Run generations, each of which adds `POPULATION` new candidates and keeps as many."""
        for _ in range(generations):
            new = self._offspring()
            if not len(new):
                return  # nothing new is near
            states = np.concatenate([self._states, new])
            losses = np.concatenate([self._losses, self._problem.losses(new)])
            ranks, crowding = ranked(losses)
            kept = np.lexsort((self._rng.random(len(ranks)), -crowding, ranks))[:POPULATION]
            self._states, self._losses = states[kept], losses[kept]
            self._ranks, self._crowding = ranks[kept], crowding[kept]

    @property
    def front(self) -> States:
        """The candidates that no other candidate dominates, shape (P, J, N)."""
        front: States = self._states[self._ranks == 0]
        return front

    @property
    def best(self) -> States:
        """The candidate with the greatest mean speed-up, shape (J, N)."""
        best: States = self._states[int(self._losses[:, 0].argmin())]
        return best

    def _offspring(self) -> States:
        known = {state.tobytes() for state in self._states}
        found: list[States] = []
        left = POPULATION
        for _ in range(MATINGS):
            children = _mutated(self._crossed(-(-left // 2)), self._problem, self._rng)
            new = _distinct(repaired(children, self._problem, self._rng), known)[:left]
            found.append(new)
            left -= len(new)
            if not left:
                break
        return np.concatenate(found)

    def _crossed(self, pairs: int) -> States:
        """Return two children of each pair, which exchange the jobs before a random one."""
        jobs = np.arange(self._states.shape[1])
        swapped = jobs < self._rng.integers(len(jobs), size=(pairs, 1))
        swapped &= self._rng.random((pairs, 1)) < CROSSOVER
        one, other = self._parents(pairs)[:, :, None]
        parent = np.concatenate([np.where(swapped, other, one), np.where(swapped, one, other)])
        children: States = self._states[parent, jobs]
        return children

    def _parents(self, pairs: int) -> IntArray:
        """Return winners of binary tournaments, shape (2, pairs)."""
        rng, many = self._rng, len(self._states)
        rounds = -(-4 * pairs // many)
        drawn = np.concatenate([rng.permutation(many) for _ in range(rounds)])[: 4 * pairs]
        one, other = drawn.reshape(-1, 2).T
        crowding = self._crowding[one] - self._crowding[other]
        crowding += np.where(crowding == 0, rng.choice([-1, 1], size=len(one)), 0)
        wins = _dominates(self._losses[one], self._losses[other])
        wins |= (crowding > 0) & ~_dominates(self._losses[other], self._losses[one])
        return np.where(wins, one, other).reshape(pairs, 2).T


def _distinct(states: States, known: set[bytes]) -> States:
    """Return the states that are neither known nor repeated, and add them to `known`."""
    states, rows = np.ascontiguousarray(states), []
    for row, state in enumerate(states):
        key = state.tobytes()
        if key not in known:
            known.add(key)
            rows.append(row)
    return states[rows]


def _dominates(one: FloatArray, other: FloatArray) -> BoolArray:
    return np.asarray((one <= other).all(axis=-1) & (one < other).any(axis=-1))


def ranked(losses: FloatArray) -> tuple[IntArray, FloatArray]:
    """Return the rank and the crowding distance of each candidate, shape (P,).

    The rank is 0 if no candidate dominates it, 1 if only those of rank 0 do, and so on. The
    distance is that between the neighbours in its front, and 0 for a repeated pair of losses.
    """
    order = np.lexsort((losses[:, 1], losses[:, 0]))
    ends: list[float] = []  # second loss of the last candidate of each front
    ranks, before, rank = np.zeros(len(losses), dtype=np.int64), (np.nan, np.nan), 0
    for row, one, other in zip(order.tolist(), *losses[order].T.tolist(), strict=True):
        if (one, other) != before:
            rank = bisect_right(ends, other)
            ends[rank : rank + 1] = [other]
            before = (one, other)
        ranks[row] = rank
    order = np.lexsort((losses[:, 1], losses[:, 0], ranks))
    points, rank_of = losses[order], ranks[order]
    edge = np.append(True, rank_of[1:] != rank_of[:-1])
    unique = edge | np.append(True, (points[1:] != points[:-1]).any(axis=1))
    order, points, edge = order[unique], points[unique], edge[unique]
    starts = np.flatnonzero(edge)
    counts = np.diff(starts, append=len(edge))
    spread = np.abs(points[starts + counts - 1] - points[starts])
    spread = np.repeat(np.where(spread > 0, spread, np.inf), counts, axis=0)
    gaps = np.zeros(len(points))
    gaps[1:-1] = (np.abs(points[2:] - points[:-2]) / spread[1:-1]).sum(axis=1)
    gaps[edge | np.append(edge[1:], True)] = FARTHEST
    crowding = np.zeros(len(losses))
    crowding[order] = gaps
    return ranks, crowding


FARTHEST: Final = 1e14  # crowding distance of the ends of a front
