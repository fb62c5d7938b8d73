"""Actor and critic, and the environment of `harmony-drl`, which agrees with the simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.random import default_rng

from controlplane.policy.learned import gang_model
from controlplane.policy.learned.harmony_drl import HarmonyDrl, HarmonyDrlOptions
from controlplane.policy.learned.shared_nodes import SharedNodes
from controlplane.sim.learning import actor_critic, harmony_environment
from controlplane.sim.learning.harmony_testbed import TRAINED_FAMILIES, HarmonyTestbed, pattern
from controlplane.sim.run import simulate
from controlplane.sim.scenario import HARMONY

pytestmark = pytest.mark.slow
TINY = harmony_environment.HarmonyRecipe(
    warm_iterations=1, rounds=2, rollouts=2, updates=2, batch=16, validate_every=4, validations=1,
    histories=1, jobs=8,
)  # fmt: skip
CROWDED = replace(HARMONY, jobs=12, interval_s=60.0, latency_s=0.0)


def trainer(seed: int = 3) -> actor_critic.ActorCriticTrainer:
    return actor_critic.ActorCriticTrainer(harmony_environment.HarmonyEnvironment(seed, TINY), seed)


def untrained() -> gang_model.TrainedModel:
    return gang_model.model_of(trainer().arrays(), TRAINED_FAMILIES)


def test_jobs_end_in_the_environment_when_they_end_in_the_simulator() -> None:
    model, bed = untrained(), HarmonyTestbed(CROWDED, 7)
    policy = HarmonyDrl(HarmonyDrlOptions(learn=False, backfill=False), model)

    result = simulate(policy, CROWDED, 7)

    simulated = {job.job: job.ended_at for job in result.jobs}
    assert harmony_environment.placed_by(bed, model, gang_model.best) == pytest.approx(
        simulated, abs=0.01
    )


def test_a_resumed_training_continues_with_equal_numbers() -> None:
    one, other = trainer(), trainer()
    rows = [one.iterate(number) for number in range(2)]

    other.restore(one.state())
    rows.append(one.iterate(2))

    assert other.iterate(2) == rows[2]
    assert [row["phase"] for row in rows] == ["reward model", *["actor and critic"] * 2]
    assert [math.isnan(row["critic_loss"]) for row in rows] == [True, False, False]
    assert [math.isnan(row["jct_vs_greedy"]) for row in rows] == [False, True, False]
    arrays = [one.trained().arrays, other.trained().arrays]
    assert all((arrays[1][name] == value).all() for name, value in arrays[0].items())


def test_before_any_training_the_actor_is_the_greedy_choice() -> None:
    bed, model = HarmonyTestbed(CROWDED, 8), untrained()

    greedy = harmony_environment.mean_jct_s(bed, model, lambda among: int(np.argmin(among.costs)))

    assert harmony_environment.mean_jct_s(bed, model, gang_model.best) == greedy


def test_an_untrained_class_is_the_mean_of_the_trained_ones() -> None:
    arrays = harmony_environment.with_other_classes(trainer().arrays(), families=2)

    first = arrays["beside.0.weight"]
    assert first[:, 2 : gang_model.CLASSES] == pytest.approx(
        np.repeat(first[:, :2].mean(axis=1, keepdims=True), gang_model.CLASSES - 2, axis=1)
    )
    assert arrays["spread.0.weight"][:, gang_model.CLASSES - 1] == pytest.approx(
        arrays["spread.0.weight"][:, :2].mean(axis=1)
    )


@pytest.mark.parametrize(
    ("name", "nodes"), [("packed", {1}), ("balanced", {1, 2}), ("least loaded", {1, 2})]
)
def test_a_pattern_places_a_whole_job(name: str, nodes: set[int]) -> None:
    """Node 0 has a neighbour and a free slot; nodes 1 and 2 of two slots are empty."""
    model = untrained()
    shared = SharedNodes(model.reward, [2, 2, 2])
    shared.add("old", 0, 1)
    shared.put("old", 0)
    shared.add("new", 1, 2)

    assert {
        one.node for one in gang_model.place_gang(shared, model.actor, "new", pattern(name))
    } == nodes


# --- actor and critic


def step(
    at: float = 0.0, place: float = 0.0, chosen: int = 0, advantage: float = 0.0
) -> actor_critic.Step:
    """Step with one choice among two equal nodes."""
    features, allowed = np.ones((2, 12 + 2 * gang_model.CLASSES)), np.ones(2, dtype=np.bool_)
    features[1] *= -1.0
    choice = actor_critic.Choice({"features": features, "costs": np.zeros(2)}, allowed, chosen)
    state = np.zeros(harmony_environment.HarmonyEnvironment.states)
    return actor_critic.Step(at, place, state, [choice], math.log(0.5), advantage)


def test_rewards_count_until_the_next_step_and_are_discounted() -> None:
    rollout = actor_critic.Rollout([step(0.0), step(10.0)], [(0.0, 5.0, -1.0), (5.0, 20.0, -2.0)])

    found, discounts = actor_critic.discounted(rollout, horizon_s=10.0)

    half, one = math.exp(-0.5), math.exp(-1.0)
    assert found.tolist() == pytest.approx([-(1 - half) - 2 * (half - one), -2 * (1 - one)])
    assert discounts.tolist() == pytest.approx([one, 0.0])


def test_an_advantage_is_the_reward_beyond_the_expectation_of_the_critic() -> None:
    silent = actor_critic.advantages(np.array([1.0, 2.0]), np.array([0.5, 0.5]), np.zeros(2))
    right = actor_critic.advantages(
        np.array([1.0, 2.0]), np.array([0.5, 0.5]), np.array([2.0, 2.0])
    )

    assert silent.tolist() == pytest.approx([1.0 + 0.5 * actor_critic.LAMBDA * 2.0, 2.0])
    assert right.tolist() == pytest.approx([0.0, 0.0])


def test_advantages_are_compared_with_other_rollouts_at_the_same_place() -> None:
    early = actor_critic.Rollout([step(place=0.0), step(place=10.0)], [])
    late = actor_critic.Rollout([step(place=5.0)], [])

    gains = actor_critic.compared([np.array([1.0, 3.0]), np.array([0.0])], [early, late])

    scale = float(np.array([0.5, 1.5, -1.0]).std())
    assert np.concatenate(gains).tolist() == pytest.approx([0.5 / scale, 1.5 / scale, -1.0 / scale])


def test_a_better_choice_becomes_more_probable() -> None:
    learner = trainer()
    batch = actor_critic.as_batch([step(chosen=0, advantage=1.0), step(chosen=1, advantage=-1.0)])

    for _ in range(20):
        learner.learn(batch)

    first, second = learner.log_probabilities(batch)[0, 0].tolist()
    assert first > second + 0.1


def test_replayed_steps_are_the_latest_and_padded_choices_do_not_count() -> None:
    learner, gang = trainer(), step()
    gang.choices *= 2
    learner.remember([step()] * TINY.replay)
    learner.remember([gang])

    batch = actor_critic.as_batch([step(), gang])

    assert len(learner.replayed(default_rng(0))["made"]) == TINY.batch
    assert batch["made"].tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert torch.isfinite(learner.log_probabilities(batch)).all()
