"""Several optimizers in a group that changes and breaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.groups import Alone, Crew, alone, crew, furthest, script
from tests.training.test_group_changes import all_ranks_equal, every_sample_once

pytestmark = pytest.mark.slow
TURNS = """
class Counted(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

made = []

def build_model():
    torch.manual_seed(3)
    made[:] = [nn.ModuleDict({
        "critic": nn.Sequential(Counted(7, 5), nn.Tanh(), nn.Linear(5, 1)),
        "generator": nn.Sequential(Counted(6, 4), nn.Tanh(), nn.Linear(4, 1)),
    })]
    return made[0]

def build_optimizer(parameters):
    critic, generator = made[0]["critic"].parameters(), made[0]["generator"].parameters()
    return {
        "critic": torch.optim.Adam(critic, lr=0.02),
        "generator": torch.optim.SGD(generator, lr=0.05, momentum=0.9),
    }

def companions(optimizers):
    every = torch.optim.lr_scheduler
    falling = every.ExponentialLR(optimizers["critic"], 0.99)
    turning = every.CosineAnnealingLR(optimizers["generator"], 17)
    return falling, turning, torch.amp.GradScaler(DEVICE, init_scale=2.0**6, growth_interval=7)

def train(model, optimizers, companions, x, y):
    critic, generator = model["critic"], model["generator"]
    falling, turning, scaler = companions
    optimizers["critic"].zero_grad()
    made = generator(x)
    real = (critic(torch.cat([x, y], dim=1)) - 1).square().mean()
    false = critic(torch.cat([x, made.detach()], dim=1)).square().mean()
    scaler.scale(real + false).backward()
    scaler.step(optimizers["critic"])
    falling.step()
    optimizers["generator"].zero_grad()
    believed = (critic(torch.cat([x, made], dim=1)) - 1).square().mean()
    scaler.scale(believed).backward()
    scaler.step(optimizers["generator"])
    turning.step()
    scaler.update()
"""

LOOP = """
model, optimizers, loader = agent.load(
    build_model, build_optimizer, data, batch_size=1, lr_scaling="none"
)
assert list(optimizers) == ["critic", "generator"]
beside = companions(optimizers)
for epoch in agent.epochs(1000):
    for x, y in loader:
        train(model, optimizers, beside, x, y)
    rates = [scheduler.get_last_lr() for scheduler in beside[:2]]
    if agent._membership.has_full_state:
        words = str([rates, beside[2].state_dict()])
        say(epoch=epoch + 1, step=agent.step, digest=digest(model) + words)
    agent.report(enough=enough())
if agent.rank == 0:
    torch.save(model.state_dict(), HOME / "final.pt")
"""


class TakingTurns(Alone):
    def __init__(self, source: str, batch: int, size: int) -> None:
        super().__init__(source, batch, size)
        names: dict[str, Any] = {"torch": torch, "nn": nn, "DEVICE": "cpu"}
        exec(source, names)  # noqa: S102 - the part of the script that trains
        self.companions = names["companions"](self.optimizer)
        self.turns = names["train"]

    def step(self, ids: Sequence[int]) -> None:
        parts = self.model, self.optimizer, self.companions
        self.turns(*parts, self.inputs[ids], self.targets[ids])


def as_alone(job: Crew, source: str = TURNS) -> None:
    every_sample_once(job)
    all_ranks_equal(job)
    assert "sending rank 0's state" not in job.said()
    one = alone(source, job.epochs()[-1].epoch, 12, kind=TakingTurns)
    assert furthest(job.final(), one) < 1e-9


def test_optimizers_in_turns_train_as_one_process(tmp_path: Path) -> None:
    with crew(tmp_path, script(TURNS, LOOP)) as job:
        job.through((12,), (6, 6), (3, 3, 3, 3), (4, 4, 4), 1, "pause", (7, 5), 1, (12,))

        as_alone(job)


CLIPPED = TURNS.replace(  # the critic is frozen while the generator learns, and its weights are cut
    "    falling.step()\n",
    """\
    falling.step()
    for parameter in critic.parameters():
        parameter.data.clamp_(-0.3, 0.3)
        parameter.requires_grad_(False)
""",
).replace("    made = generator(x)\n", "    critic.requires_grad_(True)\n    made = generator(x)\n")
LATER = "reduce.later:rank=1:step=10:version=1=kill"
KILLS = {
    "in the second reduction": (TURNS, LATER),
    "where the script changes parameters too": (CLIPPED, LATER),
    "rank 0 in the first reduction": (TURNS, "reduce:rank=0:step=10:version=1=kill"),
    "one rank is through with the first reduction": (TURNS, "reduced:rank=1:step=10:version=1=kill;reduced:rank=0:step=10:version=1=fail"),
    "one rank is through with the step": (TURNS, "reduced.later:rank=1:step=10:version=1=kill;reduced.later:rank=0:step=10:version=1=fail"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "faults"), KILLS.values(), ids=KILLS.keys())
def test_a_half_made_step_is_rolled_back(tmp_path: Path, source: str, faults: str) -> None:
    with crew(tmp_path, script(source, LOOP), faults=faults) as job:
        job.through((4, 4, 4), "loss", 1)

        as_alone(job, source)


TOGETHER = (
    TURNS[: TURNS.index("def build_optimizer")].replace("self.calls += 1", "pass")  # of each pass
    + """
def build_optimizer(parameters):
    critic, generator = made[0]["critic"], made[0]["generator"]
    both = [*critic.parameters(), *generator[2].parameters()]  # whose output has two optimizers
    return torch.optim.Adam(both, lr=0.02), torch.optim.SGD(generator.parameters(), lr=0.1, momentum=0.9)

def companions(optimizers):
    return torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.99), None, None

def train(model, optimizers, companions, x, y):
    critic, generator = model["critic"], model["generator"]
    guess = generator(x)
    optimizers[0].zero_grad()
    (guess - y).square().mean().backward(retain_graph=True)
    optimizers[1].zero_grad()
    critic(torch.cat([x, guess], dim=1)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    companions[0].step()
"""
)
TOGETHER_LOOP = (
    LOOP.replace("    rates = [scheduler.get_last_lr() for scheduler in beside[:2]]\n", "")
    .replace("[rates, beside[2].state_dict()]", "beside[0].get_last_lr()")
    .replace('list(optimizers) == ["critic", "generator"]', "type(optimizers) is tuple")
)


def test_shares_are_passes_if_optimizers_step_at_the_end(tmp_path: Path) -> None:
    with crew(tmp_path, script(TOGETHER, TOGETHER_LOOP), bound=4) as job:
        job.through((12,), (7, 5), 1)

        as_alone(job, TOGETHER)


REFUSED = {
    "a worker that passes over a batch": (
        "if agent.rank or agent.step != 2: train(model, optimizers, beside, x, y)", "1 of 2 workers skipped a batch",
    ),
    "workers that differ in their backward passes": (
        """train(model, optimizers, beside, x, y)
        if agent.rank and agent.step == 2: model['critic'](x.new_ones(1, 7)).sum().backward()""",
        "the same number of backward passes",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("step", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_an_inexact_loop_of_optimizers_is_refused(tmp_path: Path, step: str, text: str) -> None:
    loop = LOOP.replace("train(model, optimizers, beside, x, y)", step)
    with crew(tmp_path, script(TURNS, loop), bound=12) as job:
        assert text in job.refusal(6, 6)
