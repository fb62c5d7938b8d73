"""A training: interrupted it goes on and ends as if it never was; what cannot be is said."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controlplane.policy.learned.decision_round import read_actor_model
from controlplane.policy.learned.model_file import softmax
from controlplane.policy.registry import make
from controlplane.sim.cluster import TrainingError
from controlplane.sim.learning.drl_episodes import drawn, episode, past, training_scenario
from controlplane.sim.learning.drl_trainer import (
    ActionBatch,
    ActorNet,
    DrlTrainer,
    Recipe,
    advantages,
    model_of,
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
TINY = Recipe(
    warm_iterations=1, iterations=2, sizes=(8,), jobs=2, past=2, rollouts=2, warm_updates=3,
    updates=2, look_every=2, looks=1, batch=16, replay=40,
)  # fmt: skip


class Interrupted(DrlTrainer):
    """Somebody presses Ctrl-C at the end of its second iteration, before that is kept."""

    def iterate(self, iteration: int) -> dict[str, float | str]:
        row = super().iterate(iteration)
        if iteration == 1:
            raise KeyboardInterrupt
        return row


class InterruptedAtOnce(DrlTrainer):
    """Somebody presses Ctrl-C before anything is done."""

    def iterate(self, iteration: int) -> dict[str, float | str]:
        raise KeyboardInterrupt


def order(folder: Path, **changes: Any) -> Order:
    said = {"policy": "drl", "seed": 5, "out": folder / "m.npz", "command": "ones sim train drl"}
    return Order(**{**said, **changes})


def trained(trainer: DrlTrainer, order: Order, *, resume: bool = False) -> list[dict[str, Any]]:
    return train(trainer, order, resume=resume, report=lambda *_: None).rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trained(DrlTrainer(5, TINY), order(folder))
    return folder


@pytest.mark.slow
def test_an_interrupted_training_goes_on_and_ends_with_the_same_model(
    finished: Path, tmp_path: Path
) -> None:
    with pytest.raises(InterruptedTrainingError, match="after 1 of 2 iterations; repeat it with"):
        trained(Interrupted(5, TINY), order(tmp_path))
    assert not (tmp_path / "m.npz").exists()

    trained(DrlTrainer(5, TINY), order(tmp_path), resume=True)

    whole, gone_on = (read_actor_model(str(f / "m.npz")) for f in (finished, tmp_path))
    assert all((gone_on.arrays[name] == value).all() for name, value in whole.arrays.items())
    assert (tmp_path / "m.csv").read_text() == (finished / "m.csv").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.csv", "m.npz"]


def test_a_model_says_what_it_is_and_its_policy_takes_it(finished: Path) -> None:
    card = read_actor_model(str(finished / "m.npz")).card

    assert (card.policy, card.seed, card.slots, card.command) == (
        "drl", 5, (8, 8), "ones sim train drl",
    )  # fmt: skip
    assert card.figures.keys() == {
        "iterations",
        "cpu_s",
        "jct_vs_heuristic",
        "jct_vs_heuristic_warm",
    }
    make("drl", {"model": str(finished / "m.npz")})


def test_a_policy_with_a_broken_model_is_refused_by_the_name_of_the_option(
    finished: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.npz"
    broken.write_bytes((finished / "m.npz").read_bytes()[:-20])

    with pytest.raises(
        SettingsError, match=r"broken\.npz: not a complete model file; leave it"
    ) as refused:
        make("drl", {"model": str(broken)})
    assert refused.value.field == "policy.options.model"


def test_an_interrupted_training_is_neither_lost_nor_mixed_with_another(tmp_path: Path) -> None:
    with pytest.raises(InterruptedTrainingError):
        trained(InterruptedAtOnce(5, TINY), order(tmp_path))

    with pytest.raises(TrainingError, match=r"m\.training: an interrupted training; resume"):
        trained(DrlTrainer(5, TINY), order(tmp_path))
    with pytest.raises(TrainingError, match=r"a training with seed 5, not 6"):
        trained(DrlTrainer(6, TINY), order(tmp_path, seed=6), resume=True)
    (tmp_path / "m.training").write_bytes(b"PK")
    with pytest.raises(TrainingError, match=r"m\.training: damaged state of a training"):
        trained(DrlTrainer(5, TINY), order(tmp_path), resume=True)


@pytest.mark.parametrize(
    ("out", "resume", "said"),
    [
        ("m.npz", True, "no training was interrupted here; leave out --resume"),
        ("m.zip", False, "a model's file ends in .npz"),
        ("none/m.npz", False, "none: no such folder"),
    ],
)
def test_a_training_that_cannot_begin_says_why(
    tmp_path: Path, *, out: str, resume: bool, said: str
) -> None:
    with pytest.raises(TrainingError, match=said):
        trained(DrlTrainer(5, TINY), order(tmp_path, out=tmp_path / out), resume=resume)


def test_what_is_not_trained_beforehand_and_a_missing_torch_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TrainingError, match="'fifo' is not trained beforehand; choose one of drl"):
        make_trainer("fifo", 0)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TrainingError, match=r"training a policy needs torch; in a checkout"):
        make_trainer("drl", 0)


def test_torch_and_numpy_evaluate_the_same_network() -> None:
    model = model_of(ActorNet().arrays(), (8,))
    decisions, _ = episode(
        model, training_scenario(8, 3, 5.0), 7, drawn(np.random.default_rng(1)), past(2, 8)
    )
    batch = ActionBatch(decisions)
    net = ActorNet()
    net.load_state_dict({k: v.clone() for k, v in _tensors(model.arrays).items()})

    odds = net(batch.jobs, batch.cluster, batch.legal).exp()
    taken = odds.gather(1, batch.index([d.action for d in decisions])[:, None])[:, 0]

    assert taken.tolist() == pytest.approx([d.probability for d in decisions], rel=1e-4)
    assert len({len(d.jobs) for d in decisions}) > 1  # filled up, and none the wiser


def _tensors(arrays: Any) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - as the trainer does

    return {name: torch.tensor(value, dtype=torch.float32) for name, value in arrays.items()}


def test_advantages_are_against_the_mean_at_the_same_time() -> None:
    gains = advantages([np.array([-3.0, -1.0]), np.array([-1.0, -1.0, -2.0])])

    scale = float(np.array([[-1.0, 0.0, 1.0], [1.0, 0.0, -1.0]]).std())
    assert [gain.tolist() for gain in gains] == [
        [-1.0 / scale, 0.0, 1.0 / scale],
        [1.0 / scale, 0.0, -1.0 / scale],
    ]


def test_probabilities_of_what_is_not_legal_are_none() -> None:
    assert softmax(np.array([1.0, -np.inf, 1.0])).tolist() == [0.5, 0.0, 0.5]


def test_a_curve_is_a_table_and_a_picture(tmp_path: Path) -> None:
    rows: list[dict[str, float | str]] = [
        {"phase": "imitates", "loss": 0.5, "jct_vs_heuristic": float("nan")},
        {"phase": "reinforced", "loss": 0.25, "jct_vs_heuristic": 0.96},
    ]

    draw_curve(rows, tmp_path / "c.svg", "training of drl")

    assert as_csv(rows) == (
        "iteration,phase,loss,jct_vs_heuristic\n1,imitates,0.5,\n2,reinforced,0.25,0.96\n"
    )
    drawn_text = (tmp_path / "c.svg").read_text()
    assert all(said in drawn_text for said in ("training of drl", "jct vs heuristic", "iteration"))
