"""Trainings of many kinds: the script of each, and one plain process on the same samples.

A `Training` gives the script of a job's workers, and `Replay`, which uses nothing of the library and
takes each recorded step in the shares of the ranks. So layers that see a share as a whole (batch
normalisation) can be compared to the last digits.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from tests.training.groups import script

BASE_BATCH: Final = 12  # what a training's rate and schedules are meant for

MODELS: Final = {
    "perceptron": "nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))",
    "batch norm": "nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7, eps=0.1), nn.Tanh(), nn.Linear(7, 1))",
    "channels last": "nn.Sequential("
    "nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, (2, 1)), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1)"
    ").to(memory_format=torch.channels_last)",
    "branches": "Branches()",
    "every kind": "Together(lambda: agent.step, narrow=False, leave=LEAVE)",
    "every kind, narrow": "Together(lambda: agent.step, narrow=True, leave=LEAVE)",
    "wide": "nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 1))",
}  # fmt: skip
OPTIMIZERS: Final = {
    "SGD": "torch.optim.SGD(parameters, lr=0.005, momentum=0.9, nesterov=True)",
    "SGD fused": "torch.optim.SGD(parameters, lr=0.02, momentum=0.9, fused=True)",
    "AdamW": "torch.optim.AdamW(parameters, lr=0.001, eps=1e-4, amsgrad=True, foreach=True)",
    "Adam fused": "torch.optim.Adam(parameters, lr=0.001, eps=1e-4, fused=True)",
    "Adagrad": "torch.optim.Adagrad(parameters, lr=0.01, eps=1e-4)",
}
SCHEDULES: Final = {
    "none": "Steps(), Steps()",
    "wrapped": """(
        every.SequentialLR(optimizer, [
            every.LinearLR(optimizer, 0.3, total_iters=11),
            every.MultiStepLR(optimizer, (17, 190, 700), 0.9)], [11]),
        Both(
            every.ChainedScheduler([every.LambdaLR(optimizer, lambda epoch: 0.99**epoch)], optimizer),
            every.ReduceLROnPlateau(optimizer, factor=0.9, patience=9)))""",
    "restarts": "(every.CosineAnnealingWarmRestarts(optimizer, 37, eta_min=1e-4), Steps())",
    "one cycle": """(
        every.OneCycleLR(
            optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=10**6,
            pct_start=1e-4, cycle_momentum=False),
        Steps())""",
}
LOOPS: Final = ("plain", "scaled and clipped", "closure", "weighed", "turns")

PARTS: Final = """
from tests.training.kinds import Together

every = torch.optim.lr_scheduler

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 7), nn.Linear(7, 1)
        self.odd, self.even = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x):
        branch = self.even if agent.step % 2 else self.odd
        return self.head(torch.tanh(branch(torch.tanh(self.first(x)))))

class Steps:
    def step(self):
        pass

class Both(every.LRScheduler):
    def __init__(self, *parts):
        self.parts = list(parts)

    def step(self):
        self.parts[0].step()
        self.parts[1].step(1.0)

def build_model():
    torch.manual_seed(3)
    return MODEL

class Stream(torch.utils.data.IterableDataset):
    def __init__(self, whole):
        self.whole = whole

    def __len__(self):
        return len(self.whole)

    def __iter__(self):
        return iter(self.whole)

def one(parameters):
    return OPTIMIZER

def build_optimizer(parameters):
    if not TURNS:
        return one(parameters)
    every = list(parameters)
    half = len(every) // 2
    return one(every[:half]), one(every[half:])

def schedules(optimizer):
    return SCHEDULES

def scaler_for(device):
    return torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=7, enabled=SCALED)
"""

LOOP: Final = """
import time
WORKERS = LOADERS[int(ME.split(".v")[-1].split(".r")[0]) * 7 % 5 + agent.rank]
model, optimizers, loader = agent.load(
    build_model, build_optimizer, Stream(data) if STREAM else data, batch_size=1,
    lr_scaling="none", num_workers=WORKERS,
    multiprocessing_context="fork" if WORKERS else None,
)
optimizer, second = optimizers if TURNS else (optimizers, None)
per_batch, per_epoch = schedules(optimizer)
scaler = scaler_for(DEVICE)

def losses(x, y):
    return (model(x) - y).square().sum(dim=1)

for epoch in agent.epochs(10**9):
    for x, y in loader:
        time.sleep(0.001)
BATCH
        per_batch.step()
    if agent._membership.has_full_state:
        say(epoch=epoch + 1, step=agent.step, digest=digest(model))
    per_epoch.step()
    agent.report(enough=enough())
if agent.rank == 0:
    torch.save(model.state_dict(), HOME / "final.pt")
"""
BATCHES: Final = {
    "plain": """
        optimizer.zero_grad()
        losses(x, y).mean().backward()
        optimizer.step()
""",
    "scaled and clipped": """
        optimizer.zero_grad()
        scaler.scale(losses(x, y).mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
""",
    "turns": """
        for each, aim in ((optimizer, y), (second, 0.5 * y)):
            optimizer.zero_grad()
            second.zero_grad()
            losses(x, aim).mean().backward()
            each.step()
""",
    "closure": """
        def closure():
            optimizer.zero_grad()
            loss = losses(x, y).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
""",
    "weighed": """
        optimizer.zero_grad()
        weights = 1.0 + y.flatten().abs()
        agent.weight(weights.sum())
        ((losses(x, y) * weights).sum() / weights.sum()).backward()
        optimizer.step()
""",
}


@dataclass(frozen=True, slots=True)
class Training:
    """Model and loop of a job, by the names in the tables above."""

    model: str
    optimizer: str
    schedule: str
    loop: str
    loaders: tuple[int, ...]  # loader workers, by version and rank
    bound: int  # samples of a pass
    size: int  # of the data set
    stream: bool = False  # iterable data
    leave: tuple[str, ...] = ()  # out of every kind

    @property
    def min_samples(self) -> int:
        return 2 if self.model == "batch norm" else 1

    @property
    def described(self) -> str:
        loaders = f"loader workers to {max(self.loaders)}, passes of {self.bound}"
        loaders += ", iterable" if self.stream else ""
        model = ", but ".join((self.model, *self.leave))
        return f"{model} | {self.optimizer} | {self.schedule} | {self.loop} | {loaders}"

    def _parts(self) -> str:
        made = {
            "MODEL": MODELS[self.model],
            "OPTIMIZER": OPTIMIZERS[self.optimizer],
            "SCHEDULES": SCHEDULES[self.schedule],
        }
        text = PARTS
        for word, how in made.items():
            text = text.replace(f"return {word}\n", f"return {how}\n")
        scaled, turns = self.loop == "scaled and clipped", self.loop == "turns"
        words = f"{scaled}, {turns}, {self.stream}, {self.leave}"
        return f"SCALED, TURNS, STREAM, LEAVE = {words}\n{text}"

    def script(self) -> str:
        loop = LOOP.replace("LOADERS", str(self.loaders)).replace(
            "BATCH\n", BATCHES[self.loop].strip("\n") + "\n"
        )
        return script(self._parts(), loop, size=self.size)

    def built(self, agent: Any) -> dict[str, Any]:
        """Return the names that the script defines, for one plain process; `agent` has `step`."""
        names: dict[str, Any] = {"torch": torch, "nn": nn, "agent": agent}
        exec(self._parts(), names)  # noqa: S102 - the part of the script that builds
        return names


def any_training(draw: random.Random) -> Training:
    kinds = sorted(name for name in MODELS if not name.startswith("every kind"))
    model, optimizer = draw.choice(kinds), draw.choice(sorted(OPTIMIZERS))
    if (model, optimizer) == ("branches", "SGD fused"):  # which torch itself cannot do
        optimizer = "SGD"
    loop = draw.choice(LOOPS)
    return Training(
        model=model,
        optimizer=optimizer,
        schedule=draw.choice(sorted(SCHEDULES)),
        loop=loop,
        loaders=tuple(draw.randrange(4) for _ in range(9)) if draw.random() < 0.5 else (0,) * 9,
        bound=1000 if loop == "turns" else draw.choice((1000, 5)),  # turns take no passes
        size=draw.randrange(150, 400),
        stream=draw.random() < 0.25,
    )


Shares = Mapping[int, Sequence[int]]  # the ids of a step, by rank


class Replay:
    """One plain process that trains on the recorded steps of a job.

    `whole`: each step is one batch; else it is summed over the passes that the ranks took.
    """

    def __init__(self, training: Training, *, whole: bool = False) -> None:
        self.training = training
        self._whole = whole
        self._agent = SimpleNamespace(step=0)
        names = training.built(self._agent)
        self.model = names["build_model"]()
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        wide = any(p.dtype is torch.float64 for p in self._trained)
        self._sums_type = torch.float64 if wide else torch.float32
        built = names["build_optimizer"](self.model.parameters())
        self.optimizers = built if isinstance(built, tuple) else (built,)
        self._per_batch, self._per_epoch = names["schedules"](self.optimizers[0])
        self._scaler = names["scaler_for"]("cpu")
        self.inputs = torch.randn(training.size, 6, generator=torch.Generator().manual_seed(5))
        self.targets = self.inputs.sum(dim=1, keepdim=True).sin()

    def train(self, epochs: Mapping[int, Mapping[int, Shares]]) -> dict[str, torch.Tensor]:
        for epoch in sorted(epochs):
            cursor = 0
            for step in sorted(epochs[epoch]):
                assert step == self._agent.step + 1, f"step {step} after {self._agent.step}"
                cursor = self._step(epochs[epoch][step], cursor)
            self._per_epoch.step()
        return {name: kept.detach() for name, kept in self.model.named_parameters()}

    def _step(self, shares: Shares, cursor: int) -> int:
        ids = [i for share in shares.values() for i in share]
        passes = [ids]
        if not self._whole:
            passes = [c for share in shares.values() for c in chunks(share, self.training.bound)]
        for optimizer, aim in zip(self.optimizers, (1.0, 0.5), strict=False):
            self._turn(optimizer, aim, passes)
        for _ in range(self._schedule_steps(cursor, cursor + len(ids))):
            self._per_batch.step()
        self._agent.step += 1
        return cursor + len(ids)

    def _turn(
        self, optimizer: torch.optim.Optimizer, aim: float, passes: Sequence[Sequence[int]]
    ) -> None:
        items = sum(self._items(chunk) for chunk in passes)
        sums = [torch.zeros(p.shape, dtype=self._sums_type) for p in self._trained]
        used = [False] * len(sums)
        for chunk in passes:
            for every in self.optimizers:
                every.zero_grad()
            self._scaler.scale(self._loss(chunk, aim)).backward()
            for place, parameter in enumerate(self._trained):
                if parameter.grad is not None:
                    sums[place] += parameter.grad.to(self._sums_type) * (self._items(chunk) / items)
                    used[place] = True
        for parameter, total, is_used in zip(self._trained, sums, used, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(total) if is_used else None
        if self.training.loop == "scaled and clipped":
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self._scaler.step(optimizer)
        self._scaler.update()

    def _items(self, ids: Sequence[int]) -> float:
        if self.training.loop != "weighed":
            return len(ids)
        return float((1.0 + self.targets[torch.tensor(ids)].flatten().abs()).sum())

    def _loss(self, ids: Sequence[int], aim: float) -> torch.Tensor:
        x, y = self.inputs[torch.tensor(ids)], aim * self.targets[torch.tensor(ids)]
        losses: torch.Tensor = (self.model(x) - y).square().sum(dim=1)
        if self.training.loop == "weighed":
            losses = losses * (1.0 + y.flatten().abs())
        return losses.sum() / self._items(ids)

    def _schedule_steps(self, before: int, after: int) -> int:
        size, min_samples = self.training.size, self.training.min_samples
        begins = [0]
        while size - begins[-1] - BASE_BATCH >= min_samples:
            begins.append(begins[-1] + BASE_BATCH)
        return sum(before <= begin < after for begin in begins)


def chunks(ids: Sequence[int], bound: int) -> list[Sequence[int]]:
    count = -(-len(ids) // bound)
    found, start = [], 0
    for place in range(count):
        end = start + len(ids) // count + (place < len(ids) % count)
        found.append(ids[start:end])
        start = end
    return found


def replayed(
    training: Training, epochs: Mapping[int, Mapping[int, Shares]], *, whole: bool = False
) -> dict[str, torch.Tensor]:
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        return Replay(training, whole=whole).train(epochs)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
