"""Episodes for training `drl`: whole simulations, their decisions, and a replay on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.random import Generator

from controlplane.policy.api import PolicyEvent
from controlplane.policy.learned.decision_round import CLUSTER_INPUTS, JOB_INPUTS, DecisionInput
from controlplane.policy.learned.drl import Drl, DrlOptions
from controlplane.policy.learned.model_file import LearnedModel
from controlplane.policy.min_slots import MinSlotsPolicy
from controlplane.policy.registry import make
from controlplane.prediction import BoolArray, FloatArray
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import SimulationResult
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from schemas.ids import Seconds

SLOTS_PER_NODE: Final = 4
GAMMA: Final = 0.99  # discount per round
GRID_S: Final = 5.0  # length of a round
REWARD_UNIT_S: Final = 100.0  # unit of a reward: minus one job during this time


@dataclass(frozen=True, slots=True)
class TakenAction:
    """Action that was taken, with its inputs and alternatives."""

    at: Seconds
    jobs: FloatArray  # shape (N, JOB_INPUTS)
    cluster: FloatArray  # shape (CLUSTER_INPUTS,)
    legal: BoolArray  # shape (3 N + 1,)
    action: int
    probability: float  # of the drawn action
    taught: int  # action of the teacher; -1: none


Pick = Callable[[DecisionInput, FloatArray], tuple[int, int]]  # action; the teacher's or -1


class RecordingDrl(Drl):
    """Policy `drl` with an external choice of actions; records every decision."""

    def __init__(self, model: LearnedModel, pick: Pick, options: DrlOptions | None = None) -> None:
        super().__init__(options, model)
        self._pick = pick
        self.decisions: list[TakenAction] = []

    def pick(self, moment: DecisionInput, odds: FloatArray, now: Seconds) -> int:
        """Return the chosen action, and record it."""
        action, taught = self._pick(moment, odds)
        self.decisions.append(
            TakenAction(
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
    """Return a picker that draws actions by their probability."""

    def pick(_: DecisionInput, odds: FloatArray) -> tuple[int, int]:
        action = int(np.searchsorted(np.cumsum(odds), rng.random() * odds.sum(), side="right"))
        return min(action, int(np.flatnonzero(odds)[-1])), -1

    return pick


def training_scenario(slots: int, jobs: int, interval_s: float) -> Scenario:
    """Return a short version of the standard cluster and workload.

    `slots` is a multiple of 4; `interval_s` is the mean time between submissions in seconds.
    """
    return Scenario(
        jobs=jobs,
        interval_s=interval_s,
        nodes=(NodeGroup(count=slots // SLOTS_PER_NODE, slots=SLOTS_PER_NODE),),
        warm_up=0.0,
    )


class _EventCollector(MinSlotsPolicy):
    """FIFO policy that collects the events a policy would observe."""

    def __init__(self) -> None:
        super().__init__(make("fifo"), gangs=True)
        self.heard: list[PolicyEvent] = []

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Record the event."""
        self.heard.append(event)


def past(jobs: int, seed: int) -> list[PolicyEvent]:
    """Return the events of a FIFO run of Table 2's jobs on 64 slots.

    They contain speeds at users' sizes, and lengths.
    """
    fifo = _EventCollector()
    simulate("fifo", training_scenario(64, jobs, 30.0), seed, made=fifo)
    return fifo.heard


def episode(
    model: LearnedModel,
    scenario: Scenario,
    seed: int,
    pick: Pick,
    heard: Sequence[PolicyEvent] = (),
) -> tuple[list[TakenAction], SimulationResult]:
    """Simulate a scenario with a recorded policy; return its decisions in order, and the result.

    `heard` are events observed before the episode: a long-running cluster knows its jobs.
    """
    policy = RecordingDrl(model, pick)
    for event in heard:
        policy.observe(event, Seconds(0.0))
    result = simulate("drl", scenario, seed, made=MinSlotsPolicy(policy))
    return policy.decisions, result


def average_jct_s(result: SimulationResult) -> float:
    """Return the mean completion time of finished jobs, seconds."""
    return float(np.mean([job.jct_s for job in result.jobs if job.jct_s is not None]))


def returns(result: SimulationResult) -> FloatArray:
    """Return discounted returns at every round of an episode; shape (T,), round t at t x `GRID_S`.

    A reward is minus the integral of the number of active jobs, so that without discount the return
    from the start is minus the sum of all completion times (Little's law).
    """
    ends = [job.ended_at or result.ended_at for job in result.jobs]
    edges = np.arange(0.0, max(ends) + 2 * GRID_S, GRID_S)
    begun = np.array([job.submitted_at for job in result.jobs])[:, None]
    over = np.array(ends)[:, None]
    inside = np.clip(edges, begun, over)
    rewards = -np.diff(inside, axis=1).sum(axis=0) / REWARD_UNIT_S
    found = np.zeros(len(rewards) + 1)
    for at in range(len(rewards) - 1, -1, -1):
        found[at] = rewards[at] + GAMMA * found[at + 1]
    return found


@dataclass(frozen=True, slots=True)
class Experience:
    """Decision with its advantage."""

    decision: TakenAction
    gain: float  # advantage, in standard deviations over the episodes of the trace


def pack(kept: Sequence[Experience]) -> dict[str, Any]:
    """Pack experiences into a few tensors; decisions of different sizes are concatenated."""
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
    """Restore the experiences that `pack` packed."""
    jobs, clusters = packed["jobs"].numpy(), packed["clusters"].numpy()
    legal, found, at, bit = packed["legal"].numpy(), [], 0, 0
    for row, numbers in enumerate(packed["numbers"].tolist()):
        many = int(numbers[5])
        decision = TakenAction(
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
