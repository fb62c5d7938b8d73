"""Lightning's Trainer as an elastic job: real workers, against one plain loop of torch."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.training.frameworks.jobs import BATCH, EPOCHS, STEPS, each_sample_once, job
from tests.training.frameworks.same_tests import *  # noqa: F403
from tests.training.frameworks.same_tests import BUILD, GROWN_AND_SHRUNK, Framework, build_plain
from tests.training.groups import Crew, furthest

pytestmark = pytest.mark.slow

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


plain = functools.cache(build_plain)


def epoch_means() -> list[float]:
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


PROCESSES = "num_workers=2, persistent_workers=True, multiprocessing_context='fork'"
NARROW = SCRIPT.replace(
    "loss = nn", "made = self.net(x)\n        narrow.add(str(made.dtype))\n        loss = nn"
)
NARROW_FIT = FIT.replace("max_epochs=6,", 'max_epochs=6, precision="bf16-mixed",').replace(
    "shuffle=True", f"shuffle=True, {PROCESSES}"
)
REFUSED = {
    "a part of an epoch": ("max_epochs=6", "max_epochs=6, limit_train_batches=3", "every sample"),
    "checks within an epoch": ("max_epochs=6", "max_epochs=6, val_check_interval=0.5", "set 1.0 or"),
    "its own checkpoints": ("loader, held_out)", "loader, held_out, ckpt_path='x')", "automatically"),
    "another order": ("shuffle=True", "shuffle=False", "shuffled by the job's seed"),
}  # fmt: skip


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


FRAMEWORK = Framework(
    module="elastic.lightning",
    heading="Lightning",
    script=BUILD + SCRIPT + FIT,
    narrow="narrow = set()\n" + BUILD + NARROW + NARROW_FIT,
    plain_narrow=lambda: build_plain(torch.float32).model,
    ends=ends_as_one_loop,
    before=BEFORE,
    after="print('ended', trainer.global_step, trainer.current_epoch, *trainer.callback_metrics)",
    printed="ended 9 3 val",
    dies_at=12,  # the last step of an epoch
    refused=REFUSED,
)


@pytest.fixture(scope="module")
def framework() -> Framework:
    return FRAMEWORK


def test_a_trainer_in_a_changing_group_trains_as_one_loop(tmp_path: Path) -> None:
    with job(tmp_path, BUILD + SCRIPT + FIT, gates=(4, 15, 26)) as made:
        epochs = made.through(*GROWN_AND_SHRUNK)

        ends_as_one_loop(made)
        first = next(word for word in made.words() if word.get("steps") and not word["rank"])
        assert list(map(int, first["steps"])) == list(range(STEPS))
        assert {"val", "train_epoch"} <= set(epochs[-1].facts.metrics)
        saved = {word["saved"] for word in made.words() if "saved" in word}
        assert saved == set(range(6, 37, 6))
        assert len(list((tmp_path / "out").iterdir())) == EPOCHS


def test_accumulated_gradients_are_passes_through_a_pause(tmp_path: Path) -> None:
    source = (BUILD + SCRIPT + FIT).replace("PASSES = 36, 1", "PASSES = 36, 3")
    with job(tmp_path, source, gates=(9,), bound=4) as made:
        made.through((5, 7), "pause", (12,))

        ends_as_one_loop(made, counts=False)


STOPPED = 'CALLBACKS = [EarlyStopping("val", patience=1, min_delta=9.0, mode="min")]\n'


def test_a_callback_stops_the_job_on_all_workers(tmp_path: Path) -> None:
    with job(tmp_path, BUILD + SCRIPT + STOPPED + FIT) as made:
        made.start(6, 6)

        assert [epoch.epoch for epoch in made.ended()] == [1, 2]
