"""Lightning's Trainer as an elastic job: real workers, against one plain loop of torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.frameworks.jobs import (
    BATCH,
    EPOCHS,
    IN_FLOAT32,
    STEPS,
    PlainLoop,
    batches,
    computing_in,
    dies_of,
    each_sample_once,
    example,
    fork_with,
    in_float64,
    job,
    runs_alone,
    toy_data,
)
from tests.training.groups import Crew, furthest

pytestmark = pytest.mark.slow

BUILD = """
def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    every = torch.optim.lr_scheduler
    warm = every.LinearLR(optimizer, 0.2, total_iters=5)
    falling = every.CosineAnnealingLR(optimizer, STEPS - 5)
    return model, optimizer, every.SequentialLR(optimizer, [warm, falling], [5])
"""

SCRIPT = """
import warnings
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from elastic.lightning import ElasticStrategy

warnings.simplefilter("ignore")  # of Lightning, about loaders and logging
STEPS, PASSES = 36, 1

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.adam, self.schedule = build()

    def training_step(self, batch, place):
        wait_at_gate(self.global_step)
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, place):
        x, y = batch
        self.log("val", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self):
        planned = self.trainer.estimated_stepping_batches
        assert planned == STEPS, planned
        return {
            "optimizer": self.adam,
            "lr_scheduler": {"scheduler": self.schedule, "interval": "step"},
        }

class Kept(Logger):
    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.steps, self.epochs = {}, {}

    def log_hyperparams(self, *args, **options):
        pass

    def log_metrics(self, metrics, step=None):
        if "train_step" in metrics:
            self.steps[step] = metrics["train_step"]
        if "train_epoch" in metrics:
            self.epochs[metrics["epoch"]] = metrics["train_epoch"]

class Saved(Callback):
    def on_save_checkpoint(self, trainer, module, checkpoint):
        say(saved=trainer.global_step, rank=agent.rank)

CALLBACKS = []
"""

FIT = """
kept, module = Kept(), Module()
loader = torch.utils.data.DataLoader(data, batch_size=12 // PASSES, shuffle=True)
held_out = torch.utils.data.DataLoader(data, batch_size=7)
trainer = Trainer(
    strategy=ElasticStrategy(agent=agent, lr_scaling="none"), devices=1, accelerator="cpu",
    max_epochs=6, gradient_clip_val=0.3, accumulate_grad_batches=PASSES, log_every_n_steps=1,
    logger=kept, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    default_root_dir=str(HOME), callbacks=[ModelCheckpoint(str(HOME / "out"), save_top_k=-1), Saved(), *CALLBACKS],
)
trainer.fit(module, loader, held_out)
say(
    steps=kept.steps, epochs=kept.epochs, step=trainer.global_step, epoch=trainer.current_epoch,
    rate=module.schedule.get_last_lr()[0], rank=agent.rank, digest=digest(module.net),
)
if trainer.is_global_zero:
    torch.save(module.net.state_dict(), HOME / "final.pt")
"""


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    fork_with("elastic.lightning")


@functools.cache
def plain() -> PlainLoop:
    names: dict[str, Any] = {"torch": torch, "nn": nn, "STEPS": STEPS}
    with in_float64():
        exec(BUILD, names)  # noqa: S102 - the part of the script that builds
        inputs, targets = toy_data()

        def loss(model: nn.Module, ids: list[int]) -> torch.Tensor:
            return nn.functional.mse_loss(model(inputs[ids]), targets[ids])

        one = PlainLoop(*names["build"](), loss)
        one.train(batches())
        return one


def epoch_means() -> list[float]:
    """Of the losses, over samples."""
    losses, sizes = plain().losses, [BATCH] * 5 + [1]
    return [
        sum(a * b for a, b in zip(losses[start : start + 6], sizes, strict=True)) / 61
        for start in range(0, STEPS, 6)
    ]


def ends_as_one_loop(made: Crew, *, counts: bool = True) -> None:
    each_sample_once(made)
    assert furthest(made.final(), plain().model.state_dict()) < 1e-9
    ended = [word for word in made.words() if "steps" in word]
    assert len({word["digest"] for word in ended}) == 1
    for word in ended:
        assert (word["step"], word["epoch"]) == (STEPS, EPOCHS)
        assert word["rate"] == pytest.approx(0)
        if counts:  # passes log each for itself
            for step, loss in word["steps"].items():
                assert loss == pytest.approx(plain().losses[int(step)])
        for epoch, loss in word["epochs"].items():
            assert loss == pytest.approx(epoch_means()[int(epoch)])


def test_a_trainer_in_a_group_that_changes_trains_as_one_loop_would(tmp_path: Path) -> None:
    with job(tmp_path, BUILD + SCRIPT + FIT, gates=(4, 15, 26)) as made:
        made.start(BATCH)
        made.change(6, 6)
        made.change(3, 3, 3, 3)
        made.change(5, 7)
        epochs = made.ended()

        ends_as_one_loop(made)
        first = next(word for word in made.words() if word.get("steps") and not word["rank"])
        assert list(map(int, first["steps"])) == list(range(STEPS))
        assert {"val", "train_epoch"} <= set(epochs[-1].facts.metrics)
        saved = {word["saved"] for word in made.words() if "saved" in word}
        assert saved == set(range(6, 37, 6))
        assert len(list((tmp_path / "out").iterdir())) == EPOCHS


def test_a_batch_that_shrinks_gives_epochs_more_steps_than_were_planned(tmp_path: Path) -> None:
    with job(tmp_path, BUILD + SCRIPT + FIT, gates=(4, 12)) as made:
        made.start(BATCH)
        made.change(2, 2)
        made.change(3, 4)
        made.ended()

        each_sample_once(made)
        ended = [word for word in made.words() if "rate" in word]
        assert [word["rate"] for word in ended] == [pytest.approx(0)] * 2
        assert [word["step"] > STEPS for word in ended] == [True] * 2


def test_a_killed_worker_costs_no_step_and_no_count(tmp_path: Path) -> None:
    faults = "reduce:rank=2:step=12:version=1=kill"  # the last step of an epoch
    with job(tmp_path, BUILD + SCRIPT + FIT, faults=faults) as made:
        made.start(4, 4, 4)
        made.until(made.broken, "a member is lost")
        made.recover()
        made.ended()

        ends_as_one_loop(made)


def test_accumulated_gradients_are_passes_through_a_pause(tmp_path: Path) -> None:
    source = (BUILD + SCRIPT + FIT).replace("PASSES = 36, 1", "PASSES = 36, 3")
    with job(tmp_path, source, gates=(9,), bound=4) as made:
        made.start(5, 7)
        point = made.suspend()
        made.start(12, resume=point)
        made.ended()

        ends_as_one_loop(made, counts=False)


@functools.cache
def plain_autocast() -> PlainLoop:
    names: dict[str, Any] = {"torch": torch, "nn": nn, "STEPS": STEPS}
    with computing_in(torch.float32):
        exec(BUILD, names)  # noqa: S102 - the part of the script that builds
        inputs, targets = (values.float() for values in toy_data())

        def loss(model: nn.Module, ids: list[int]) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return nn.functional.mse_loss(model(inputs[ids]), targets[ids])

        one = PlainLoop(*names["build"](), loss)
        one.train(batches())
        return one


def test_autocast_and_processes_that_load_train_as_one_loop_would(tmp_path: Path) -> None:
    processes = "num_workers=2, persistent_workers=True, multiprocessing_context='fork'"
    fit = FIT.replace("max_epochs=6,", 'max_epochs=6, precision="bf16-mixed",')
    fit = fit.replace("shuffle=True", f"shuffle=True, {processes}")
    source = SCRIPT.replace(
        "loss = nn", "made = self.net(x)\n        narrow.add(str(made.dtype))\n        loss = nn"
    )
    source = IN_FLOAT32 + "narrow = set()\n" + BUILD + source + fit + "say(narrow=list(narrow))\n"
    with job(tmp_path, source, gates=(4, 15)) as made:
        made.start(BATCH)
        made.change(6, 6)
        made.change(3, 3, 6)
        made.ended()

        each_sample_once(made)
        assert furthest(made.final(), plain_autocast().model.state_dict()) < 1e-3
        narrow = [word["narrow"] for word in made.words() if "narrow" in word]
        assert narrow == [["torch.bfloat16"]] * 3


STOPPED = 'CALLBACKS = [EarlyStopping("val", patience=1, min_delta=9.0, mode="min")]\n'


def test_a_callback_that_stops_the_job_stops_it_for_all(tmp_path: Path) -> None:
    with job(tmp_path, BUILD + SCRIPT + STOPPED + FIT) as made:
        made.start(6, 6)

        assert [epoch.epoch for epoch in made.ended()] == [1, 2]


REFUSED = {
    "a part of an epoch": ("max_epochs=6", "max_epochs=6, limit_train_batches=3", "every sample"),
    "checks within an epoch": (
        "max_epochs=6",
        "max_epochs=6, val_check_interval=0.5",
        "set 1.0 or",
    ),
    "its own checkpoints": (
        "loader, held_out)",
        "loader, held_out, ckpt_path='x')",
        "automatically",
    ),
    "another order": ("shuffle=True", "shuffle=False", "shuffled by the job's seed"),
}


@pytest.mark.parametrize(("old", "new", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_exact_is_refused_with_the_remedy(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    fit = FIT.replace(old, new)
    assert fit != FIT
    with job(tmp_path, BUILD + SCRIPT + fit, epochs=1) as made:
        assert said in dies_of(made, BATCH)


BEFORE = """
import warnings

import torch
from lightning.pytorch import LightningModule
from torch import nn

warnings.simplefilter("ignore")

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, place):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, place):
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

module = Module()
data = torch.utils.data.TensorDataset(torch.randn(20, 4))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
held_out = torch.utils.data.DataLoader(data, batch_size=8)
"""


def test_the_example_of_the_page_runs_without_a_cluster(tmp_path: Path) -> None:
    after = "print('ended', trainer.global_step, trainer.current_epoch, *trainer.callback_metrics)"

    assert "ended 9 3 val" in runs_alone(tmp_path, BEFORE + example("Lightning") + after)
