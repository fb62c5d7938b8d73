"""The environment of harmony-drl is the simulator's truth; its training goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.random import default_rng

from controlplane.policy.learned.gang_model import (
    CLASSES,
    Candidates,
    TrainedModel,
    best,
    place_gang,
)
from controlplane.policy.learned.harmony_drl import HarmonyDrl, HarmonyDrlOptions
from controlplane.policy.learned.shared_nodes import SharedNodes
from controlplane.policy.registry import make
from controlplane.sim.learning.harmony_actor_critic import (
    LAMBDA,
    ActorCritic,
    Networks,
    Placement,
    arrays_of,
    critic_width,
)
from controlplane.sim.learning.harmony_testbed import TRAINED_FAMILIES, HarmonyTestbed, pattern
from controlplane.sim.learning.harmony_trainer import (
    HarmonyDrlTrainer,
    Schedule,
    mean_jct_s,
    placed_by,
)
from controlplane.sim.learning.training_run import InterruptedTrainingError, Order, train
from controlplane.sim.run import simulate
from controlplane.sim.scenario import HARMONY

pytestmark = pytest.mark.slow
TINY = Schedule(
    reward_epochs=1, rounds=2, twins=2, updates=2, batch=16, validate_every=2, validations=1,
    histories=1, jobs=8,
)  # fmt: skip
CROWDED = replace(HARMONY, jobs=12, interval_s=60.0, latency_s=0.0)


def networks() -> TrainedModel:
    nets = Networks(3)
    return TrainedModel(nets.reward_model(), nets.placing(), TRAINED_FAMILIES)


def test_jobs_end_in_the_environment_when_they_end_in_the_simulator() -> None:
    model, bed = networks(), HarmonyTestbed(CROWDED, 7, TRAINED_FAMILIES)
    policy = HarmonyDrl(HarmonyDrlOptions(learn=False, backfill=False), model)

    result = simulate("harmony-drl", CROWDED, 7, made=policy)
    ends = placed_by(bed, model.reward, model.actor, best)

    simulated = {job.job: job.ended_at for job in result.jobs}
    assert ends == pytest.approx(simulated, abs=0.01)


# --- a training


class Interrupted(HarmonyDrlTrainer):
    """Somebody presses Ctrl-C at the end of its third iteration, before that is kept."""

    def iterate(self, iteration: int) -> dict[str, float | str]:
        row = super().iterate(iteration)
        if iteration == 2:
            raise KeyboardInterrupt
        return row


def trained(trainer: HarmonyDrlTrainer, folder: Path, *, resume: bool = False) -> None:
    order = Order("harmony-drl", 4, folder / "m.npz", "ones sim train harmony-drl --seed 4")
    train(trainer, order, resume=resume, report=lambda *_: None)


def test_an_interrupted_training_goes_on_and_ends_with_the_same_model(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    at_once, gone_on = HarmonyDrlTrainer(4, TINY), HarmonyDrlTrainer(4, TINY)
    trained(at_once, whole)
    with pytest.raises(InterruptedTrainingError, match="after 2 of 3 iterations"):
        trained(Interrupted(4, TINY), broken)

    trained(gone_on, broken, resume=True)

    with np.load(whole / "m.npz") as one, np.load(broken / "m.npz") as other:
        assert {name: one[name].tolist() for name in one.files if name != "card.json"} == {
            name: other[name].tolist() for name in other.files if name != "card.json"
        }
    assert (whole / "m.csv").read_text() == (broken / "m.csv").read_text()
    make("harmony-drl", {"model": str(broken / "m.npz")})
    for name, value in at_once._mean.items():
        assert torch.equal(gone_on._mean[name], value)


def test_the_curve_names_the_phase_and_what_was_measured_in_it() -> None:
    trainer = HarmonyDrlTrainer(4, TINY)

    rows = [trainer.iterate(number) for number in range(trainer.iterations)]

    assert [row["phase"] for row in rows] == [
        "reward model",
        "actor and critic",
        "actor and critic",
    ]
    assert [not np.isnan(row["reward_rmse"]) for row in rows] == [True, False, False]
    assert [not np.isnan(row["jct_vs_greedy"]) for row in rows] == [False, True, True]


def test_before_any_training_the_actor_is_the_greedy_choice() -> None:
    bed, nets = HarmonyTestbed(CROWDED, 8, TRAINED_FAMILIES), Networks(1)

    def least_cost(among: Candidates) -> int:
        return int(np.argmin(among.costs))

    greedy = mean_jct_s(bed, nets.reward_model(), nets.placing(), least_cost)
    assert mean_jct_s(bed, nets.reward_model(), nets.placing(), best) == greedy


def test_a_class_that_nobody_trained_is_the_mean_of_those_that_were() -> None:
    nets = Networks(5)
    arrays = arrays_of(nets.reward_model(), nets.placing(), families=2)

    first = arrays["beside.0.weight"]
    assert first[:, 2:CLASSES] == pytest.approx(
        np.repeat(first[:, :2].mean(axis=1, keepdims=True), CLASSES - 2, axis=1)
    )
    assert arrays["spread.0.weight"][:, CLASSES - 1] == pytest.approx(
        arrays["spread.0.weight"][:, :2].mean(axis=1)
    )


# --- what it explores, and what it makes of that


@pytest.mark.parametrize(
    ("name", "nodes"), [("packed", {1}), ("balanced", {1, 2}), ("least loaded", {1, 2})]
)
def test_a_pattern_places_a_whole_job_by_one_idea(name: str, nodes: set[int]) -> None:
    """Node 0 has a neighbour and a free slot; nodes 1 and 2 of two slots are empty."""
    shared = SharedNodes(networks().reward, [2, 2, 2])
    shared.add("old", 0, 1)
    shared.put("old", 0)
    shared.add("new", 1, 2)

    chosen = placed_nodes(shared, name)

    assert chosen == nodes


def placed_nodes(shared: SharedNodes, name: str) -> set[int]:
    return {one.node for one in place_gang(shared, networks().actor, "new", pattern(name))}


def test_an_advantage_is_what_came_beyond_what_the_critic_expected() -> None:
    """A critic that says nothing: rewards of 1 and 2, of which the second is discounted."""
    nets = Networks(0)
    learner = ActorCritic(nets.actor, nets.sharpness, nets.critic)
    state = np.zeros(critic_width(CLASSES))
    placements = [
        Placement(state, [], 0.0, reward=1.0, discount=0.5),
        Placement(state, [], 0.0, reward=2.0, discount=0.5),
    ]

    found, values = learner.advantages(placements)

    assert found.tolist() == pytest.approx([1.0 + 0.5 * LAMBDA * 2.0, 2.0])
    assert values.tolist() == pytest.approx(found.tolist())


def test_what_went_better_than_expected_becomes_more_probable() -> None:
    nets = Networks(0)
    learner = ActorCritic(nets.actor, nets.sharpness, nets.critic)
    inputs = next(nets.actor.parameters()).shape[1]
    rng = default_rng(0)
    features = torch.tensor(rng.normal(size=(2, 1, 2, inputs)), dtype=torch.float32)
    features[1] = features[0]
    batch: dict[str, Any] = {
        "features": features,
        "costs": torch.zeros(2, 1, 2),
        "allowed": torch.ones(2, 1, 2, dtype=torch.bool),
        "placed": torch.ones(2, 1),
        "chosen": torch.tensor([[0], [1]]),
        "log_probability": torch.log(torch.tensor([0.5, 0.5])),
        "advantage": torch.tensor([1.0, -1.0]),
        "value": torch.zeros(2),
        "state": torch.zeros(2, critic_width(CLASSES)),
    }

    for _ in range(20):
        learner.learn(batch)

    first, second = nets.actor(features)[0, 0, :, 0].tolist()
    assert first > second + 0.1
