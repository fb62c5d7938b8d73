"""Training loop, with `drl`: interruption, refusals, learning curves; choices and rewards of `drl`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from controlplane.policy.learned.drl import read_actor_model
from controlplane.policy.learned.model_file import softmax
from controlplane.policy.registry import make
from controlplane.sim.cluster import TrainingError
from controlplane.sim.learning.actor_critic import ActorCriticTrainer, as_batch
from controlplane.sim.learning.drl_environment import (
    DrlEnvironment,
    DrlRecipe,
    drawn,
    episode,
    past,
    rewards,
    training_scenario,
)
from controlplane.sim.learning.training_run import (
    InterruptedTrainingError,
    Order,
    as_csv,
    draw_curve,
    make_trainer,
    train,
)
from schemas.errors import SettingsError

pytestmark = pytest.mark.slow
TINY = DrlRecipe(
    warm_iterations=1, rounds=1, sizes=(8,), jobs=2, past=2, rollouts=2, warm_updates=3,
    updates=2, validate_every=2, looks=1, batch=16, replay=40,
)  # fmt: skip


class Interrupted(ActorCriticTrainer):
    """Ctrl-C is pressed at the end of an iteration, before its state is kept."""

    last = 1

    def iterate(self, iteration: int) -> dict[str, float | str]:
        row = super().iterate(iteration) if self.last else {}
        if iteration == self.last:
            raise KeyboardInterrupt
        return row


def trainer(seed: int = 5, kind: type[ActorCriticTrainer] = ActorCriticTrainer) -> Any:
    return kind(DrlEnvironment(seed, TINY), seed)


def trained(trainer: Any, folder: Path, *, resume: bool = False, **changes: Any) -> None:
    fields = {"policy": "drl", "seed": 5, "out": folder / "m.npz", "command": "ones sim train drl"}
    train(trainer, Order(**{**fields, **changes}), resume=resume, report=lambda *_: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted training."""
    folder = tmp_path_factory.mktemp("whole")
    trained(trainer(), folder)
    return folder


def test_an_interrupted_training_resumes_and_ends_with_the_same_model(
    finished: Path, tmp_path: Path
) -> None:
    with pytest.raises(InterruptedTrainingError, match="after 1 of 2 iterations; repeat it with"):
        trained(trainer(kind=Interrupted), tmp_path)
    assert not (tmp_path / "m.npz").exists()

    trained(trainer(), tmp_path, resume=True)

    whole, resumed = (read_actor_model(str(f / "m.npz")) for f in (finished, tmp_path))
    assert all((resumed.arrays[name] == value).all() for name, value in whole.arrays.items())
    assert (tmp_path / "m.csv").read_text() == (finished / "m.csv").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.csv", "m.npz"]


def test_a_model_has_a_card_and_its_policy_accepts_it(finished: Path, tmp_path: Path) -> None:
    card = read_actor_model(str(finished / "m.npz")).card

    assert (card.policy, card.seed, card.slots, card.command) == (
        "drl", 5, (8, 8), "ones sim train drl",
    )  # fmt: skip
    assert card.figures.keys() == {
        "iterations", "cpu_s", "warm_up_loss", "jct_vs_heuristic", "jct_vs_heuristic_warm",
    }  # fmt: skip
    make("drl", {"model": str(finished / "m.npz")})
    broken = tmp_path / "broken.npz"
    broken.write_bytes((finished / "m.npz").read_bytes()[:-20])
    with pytest.raises(SettingsError, match=r"broken\.npz: not a complete model file; leave it"):
        make("drl", {"model": str(broken)})


def test_an_interrupted_training_is_neither_lost_nor_mixed_with_another(tmp_path: Path) -> None:
    at_once = trainer(kind=Interrupted)
    at_once.last = 0
    with pytest.raises(InterruptedTrainingError):
        trained(at_once, tmp_path)

    with pytest.raises(TrainingError, match=r"m\.training: an interrupted training; resume"):
        trained(trainer(), tmp_path)
    with pytest.raises(TrainingError, match=r"a training with seed 5, not 6"):
        trained(trainer(6), tmp_path, seed=6, resume=True)
    torch.save({"format": 1}, tmp_path / "m.training")
    with pytest.raises(TrainingError, match=r"m\.training: a state of another version"):
        trained(trainer(), tmp_path, resume=True)
    (tmp_path / "m.training").write_bytes(b"PK")
    with pytest.raises(TrainingError, match=r"m\.training: damaged state of a training"):
        trained(trainer(), tmp_path, resume=True)


@pytest.mark.parametrize(
    ("out", "resume", "problem"),
    [
        ("m.npz", True, "no training was interrupted here; leave out --resume"),
        ("m.zip", False, "a model's file ends in .npz"),
        ("none/m.npz", False, "none: no such folder"),
    ],
)
def test_a_training_that_cannot_begin_is_refused(
    tmp_path: Path, *, out: str, resume: bool, problem: str
) -> None:
    with pytest.raises(TrainingError, match=problem):
        trained(trainer(), tmp_path, out=tmp_path / out, resume=resume)


def test_an_untrained_policy_and_a_missing_torch_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TrainingError, match="'fifo' is not trained beforehand; choose one of drl"):
        make_trainer("fifo", 0)
    assert make_trainer("drl", 0).iterations == 60
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TrainingError, match=r"training a policy needs torch; pip install"):
        make_trainer("drl", 0)


def test_torch_and_numpy_evaluate_the_same_network() -> None:
    learner = trainer()
    scenario, draws = training_scenario(8, 3, 5.0), drawn(np.random.default_rng(1))
    steps, _ = episode(learner.arrays(), scenario, 7, draws, past(2, 8))
    batch = as_batch(steps)

    logs = learner.log_probabilities(batch).gather(-1, batch["chosen"][..., None])[:, 0, 0]

    assert logs.tolist() == pytest.approx([step.log_probability for step in steps], abs=1e-4)
    assert len({len(step.choices[0].allowed) for step in steps}) > 1  # hence padded
    assert softmax(np.array([1.0, -np.inf, 1.0])).tolist() == [0.5, 0.0, 0.5]  # illegal: 0


def test_rewards_without_a_discount_sum_to_minus_all_completion_times() -> None:
    jobs = [SimpleNamespace(submitted_at=0.0, ended_at=30.0),
            SimpleNamespace(submitted_at=10.0, ended_at=None)]  # fmt: skip

    found = rewards(SimpleNamespace(jobs=jobs, ended_at=50.0))  # type: ignore[arg-type]  # a part

    assert found == [(0.0, 10.0, -1.0), (10.0, 30.0, -2.0), (30.0, 50.0, -1.0)]


def test_a_learning_curve_is_written_as_a_table_and_a_picture(tmp_path: Path) -> None:
    rows: list[dict[str, float | str]] = [
        {"phase": "imitation", "loss": 0.5, "jct_vs_heuristic": math.nan},
        {"phase": "actor and critic", "loss": 0.25, "jct_vs_heuristic": 0.96},
    ]

    draw_curve(rows, tmp_path / "c.svg", "training of drl")

    assert as_csv(rows) == (
        "iteration,phase,loss,jct_vs_heuristic\n1,imitation,0.5,\n2,actor and critic,0.25,0.96\n"
    )
    picture = (tmp_path / "c.svg").read_text()
    assert all(text in picture for text in ("training of drl", "jct vs heuristic", "iteration"))
