"""Episodes: whole simulations in which a policy that is being trained decides.

Decisions that are learnt from again and again, and how they are kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.random import Generator

from controlplane.policy.api import PolicyEvent
from controlplane.policy.learned.decision_round import CLUSTER_INPUTS, JOB_INPUTS, Moment
from controlplane.policy.learned.drl import Drl, DrlOptions
from controlplane.policy.learned.model_file import LearnedModel
from controlplane.policy.min_slots import RestoringPolicy
from controlplane.policy.registry import make
from controlplane.prediction import BoolArray, FloatArray
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import SimulationResult
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from schemas.ids import Seconds

SLOTS_PER_NODE: Final = 4
GAMMA: Final = 0.99  # of a reward one round later
GRID_S: Final = 5.0  # a round
HUNDRED_S: Final = 100.0  # a reward is a job that is there for so long, negative


@dataclass(frozen=True, slots=True)
class Decision:
    """One action that was taken, and what would have been."""

    at: Seconds
    jobs: FloatArray  # shape (N, JOB_INPUTS)
    cluster: FloatArray  # shape (CLUSTER_INPUTS,)
    legal: BoolArray  # shape (3 N + 1,)
    action: int
    probability: float  # with which it was drawn
    taught: int  # what the teacher would have done; -1: was not asked


Pick = Callable[[Moment, FloatArray], tuple[int, int]]  # the action, and the teacher's or -1


class RecordingDrl(Drl):
    """Policy `drl`, but who picks is given, and every decision is written down."""

    def __init__(self, model: LearnedModel, pick: Pick, options: DrlOptions | None = None) -> None:
        """Begin with nothing decided."""
        super().__init__(options, model)
        self._pick = pick
        self.decisions: list[Decision] = []

    def pick(self, moment: Moment, odds: FloatArray, now: Seconds) -> int:
        """As it was told, and written down."""
        action, taught = self._pick(moment, odds)
        self.decisions.append(
            Decision(
                at=now,
                jobs=moment.jobs,
                cluster=moment.cluster,
                legal=moment.legal,
                action=action,
                probability=float(odds[action]),
                taught=taught,
            )
        )
        return action


def drawn(rng: Generator) -> Pick:
    """Draws actions by their probability."""

    def pick(_: Moment, odds: FloatArray) -> tuple[int, int]:
        action = int(np.searchsorted(np.cumsum(odds), rng.random() * odds.sum(), side="right"))
        return min(action, int(np.flatnonzero(odds)[-1])), -1

    return pick


def training_scenario(slots: int, jobs: int, interval_s: float) -> Scenario:
    """A cluster and its jobs, as the tables have them, but shorter.

    Args:
        slots: of the cluster, a multiple of 4.
        interval_s: mean seconds between submissions.
    """
    return Scenario(
        jobs=jobs,
        interval_s=interval_s,
        nodes=(NodeGroup(count=slots // SLOTS_PER_NODE, slots=SLOTS_PER_NODE),),
        warm_up=0.0,
    )


class _Remembering(RestoringPolicy):
    """First come, first served; and what a policy would have heard meanwhile."""

    def __init__(self) -> None:
        """Begin with nothing heard."""
        super().__init__(make("fifo"), gangs=True)
        self.heard: list[PolicyEvent] = []

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Write it down."""
        self.heard.append(event)


def past(jobs: int, seed: int) -> list[PolicyEvent]:
    """What was reported while so many jobs of Table 2 ran: speeds at users' sizes, and lengths.

    Args:
        jobs: that ran, on 64 slots.
    """
    fifo = _Remembering()
    simulate("fifo", training_scenario(64, jobs, 30.0), seed, made=fifo)
    return fifo.heard


def episode(
    model: LearnedModel,
    scenario: Scenario,
    seed: int,
    pick: Pick,
    heard: Sequence[PolicyEvent] = (),
) -> tuple[list[Decision], SimulationResult]:
    """Live through a scenario.

    Args:
        heard: what was reported before it begins; a cluster that has run for long knows its jobs.

    Returns:
        All decisions, in order, and what became of the jobs.
    """
    policy = RecordingDrl(model, pick)
    for event in heard:
        policy.observe(event, Seconds(0.0))
    result = simulate("drl", scenario, seed, made=RestoringPolicy(policy))
    return policy.decisions, result


def average_jct_s(result: SimulationResult) -> float:
    """Mean completion time of all jobs that finished, seconds."""
    return float(np.mean([job.jct_s for job in result.jobs if job.jct_s is not None]))


def returns(result: SimulationResult) -> FloatArray:
    """Discounted returns at every round of an episode.

    A reward is minus the jobs that are there times seconds, so that without discount the return
    from the beginning on is minus the sum of all completion times (Little's law).

    Returns:
        Shape (T,): of the round that begins at t times `GRID_S`.
    """
    ends = [job.ended_at or result.ended_at for job in result.jobs]
    edges = np.arange(0.0, max(ends) + 2 * GRID_S, GRID_S)
    begun = np.array([job.submitted_at for job in result.jobs])[:, None]
    over = np.array(ends)[:, None]
    inside = np.clip(edges, begun, over)
    rewards = -np.diff(inside, axis=1).sum(axis=0) / HUNDRED_S
    found = np.zeros(len(rewards) + 1)
    for at in range(len(rewards) - 1, -1, -1):
        found[at] = rewards[at] + GAMMA * found[at + 1]
    return found


@dataclass(frozen=True, slots=True)
class Experience:
    """A decision, and how much better than usual it went from then on."""

    decision: Decision
    gain: float  # in deviations of the episodes on that trace


def pack(kept: Sequence[Experience]) -> dict[str, Any]:
    """All of it as few tensors; decisions about different numbers of jobs lie end to end.

    Args:
        kept: D of them, about J jobs in all.
    """
    decisions = [experience.decision for experience in kept]
    numbers = [
        (d.at, d.action, d.probability, d.taught, experience.gain, len(d.jobs))
        for d, experience in zip(decisions, kept, strict=True)
    ]
    jobs = [d.jobs for d in decisions] or [np.zeros((0, JOB_INPUTS))]
    clusters = [d.cluster for d in decisions]
    legal = [d.legal for d in decisions] or [np.zeros(0, dtype=np.bool_)]
    return {
        "numbers": torch.tensor(numbers, dtype=torch.float64).reshape(-1, 6),
        "jobs": torch.from_numpy(np.concatenate(jobs)),
        "clusters": torch.from_numpy(np.array(clusters).reshape(-1, CLUSTER_INPUTS)),
        "legal": torch.from_numpy(np.concatenate(legal)),
    }


def unpack(packed: dict[str, Any]) -> list[Experience]:
    """What `pack` made tensors of."""
    jobs, clusters = packed["jobs"].numpy(), packed["clusters"].numpy()
    legal, found, at, bit = packed["legal"].numpy(), [], 0, 0
    for row, numbers in enumerate(packed["numbers"].tolist()):
        many = int(numbers[5])
        decision = Decision(
            at=Seconds(numbers[0]),
            jobs=jobs[at : at + many],
            cluster=clusters[row],
            legal=legal[bit : bit + 3 * many + 1],
            action=int(numbers[1]),
            probability=numbers[2],
            taught=int(numbers[3]),
        )
        found.append(Experience(decision, numbers[4]))
        at, bit = at + many, bit + 3 * many + 1
    return found
