"""Trainings of many kinds: the script of each, and one plain process on the same samples.

A `Training` gives the script of a job's workers, and `Replay`, which uses nothing of the library and
takes each recorded step in the shares of the ranks. So layers that see a share as a whole (batch
normalisation) can be compared to the last digits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
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
    "state of its own": "Stateful()",
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
STATEFUL: Final = "state of its own"  # whose forward passes change buffers and parameters
LOOPS: Final = ("plain", "scaled and clipped", "closure", "weighed", "turns")
TWICE: Final = ((1.0, 1.0), (0.5, 0.3))  # weights and aims of the losses of a loop with two passes

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

class Stateful(nn.Module):  # a codebook that follows its inputs, and rows of limited length
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(53, 4, max_norm=0.7)
        self.first, self.head = nn.Linear(10, 7), nn.Linear(7, 1)
        self.register_buffer("codes", torch.linspace(-1.0, 1.0, 21).reshape(3, 7))
        self.register_buffer("uses", torch.ones(3))

    def forward(self, x):
        rows = self.rows((x[:, 0].abs() * 31).long() % 53)
        hidden = torch.tanh(self.first(torch.cat([x, rows], dim=1)))
        near = torch.softmax(-torch.cdist(hidden, self.codes).detach() * 3.0, dim=1)
        read = near @ self.codes
        if self.training:
            with torch.no_grad():
                self.uses.data.mul_(0.9).add_(near.sum(dim=0), alpha=0.1)
                self.codes.data.lerp_(near.T @ hidden / near.sum(dim=0)[:, None], 0.05)
        return self.head(hidden + 0.3 * read)

class Average:  # an exponential mean of the parameters, which the script keeps
    def __init__(self, model):
        self.model = model
        self.values = [kept.detach().clone() for kept in model.parameters()]

    def update(self):
        with torch.no_grad():
            for mean, kept in zip(self.values, self.model.parameters()):
                mean.lerp_(kept, 0.1)

    def parameters(self):
        return [*self.values, *TEMPERATURE, *self.model.buffers()]

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        for mean, each in zip(self.values, state["values"]):
            mean.copy_(each)

WHERE = globals().get("DEVICE", "cpu")
TEMPERATURE = [nn.Parameter(torch.ones(1, device=WHERE))] if OUTSIDE else []

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
        return one([*parameters, *TEMPERATURE])
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
average = Average(model)
agent.track(average=average)

def losses(x, y):
    found = model(x) * TEMPERATURE[0] if TEMPERATURE else model(x)
    return (found - y).square().sum(dim=1)

for epoch in agent.epochs(10**9):
    for x, y in loader:
        time.sleep(0.001)
BATCH
        per_batch.step()
        average.update()
    if agent._membership.has_full_state:
        say(epoch=epoch + 1, step=agent.step, digest=digest(model) + digest(average))
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
    "twice": """
        optimizer.zero_grad()
        for weight, aim in TWICE:
            (weight * losses(x, aim * y).mean()).backward()
        optimizer.step()
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
        outside = self.model == STATEFUL and not turns
        words = f"{scaled}, {turns}, {self.stream}, {self.leave}, {outside}, {TWICE}"
        return f"SCALED, TURNS, STREAM, LEAVE, OUTSIDE, TWICE = {words}\n{text}"

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


def any_training(draw: random.Random, model: str = "") -> Training:
    kinds = sorted(name for name in MODELS if not name.startswith("every kind"))
    model, optimizer = model or draw.choice(kinds), draw.choice(sorted(OPTIMIZERS))
    if (model, optimizer) == ("branches", "SGD fused"):  # which torch itself cannot do
        optimizer = "SGD"
    loop = draw.choice((*LOOPS, "twice"))
    whole = loop == "turns" or model == STATEFUL  # turns, and its replay, take no passes
    return Training(
        model=model,
        optimizer=optimizer,
        schedule=draw.choice(sorted(SCHEDULES)),
        loop=loop,
        loaders=tuple(draw.randrange(4) for _ in range(9)) if draw.random() < 0.5 else (0,) * 9,
        bound=1000 if whole else draw.choice((1000, 5)),
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
        self._trained += names["TEMPERATURE"]
        self._temperature = names["TEMPERATURE"]
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
        passes = {0: [ids]}
        if not self._whole:
            passes = {rank: chunks(share, self.training.bound) for rank, share in shares.items()}
        for optimizer, aim in zip(self.optimizers, (1.0, 0.5), strict=False):
            self._turn(optimizer, aim, passes)
        for _ in range(self._schedule_steps(cursor, cursor + len(ids))):
            self._per_batch.step()
        self._agent.step += 1
        return cursor + len(ids)

    def _turn(
        self,
        optimizer: torch.optim.Optimizer,
        aim: float,
        passes: Mapping[int, list[Sequence[int]]],
    ) -> None:
        items = sum(self._items(chunk) for chunks in passes.values() for chunk in chunks)
        sums = [torch.zeros(p.shape, dtype=self._sums_type) for p in self._trained]
        used = [False] * len(sums)
        losses = TWICE if self.training.loop == "twice" else ((1.0, aim),)
        for weight, target in losses:
            for chunk in self._in_turn(passes):
                for every in self.optimizers:
                    every.zero_grad()
                self._scaler.scale(weight * self._loss(chunk, target)).backward()
                for place, parameter in enumerate(self._trained):
                    if parameter.grad is not None:
                        part = parameter.grad.to(self._sums_type) * (self._items(chunk) / items)
                        sums[place] += part
                        used[place] = True
        for parameter, total, is_used in zip(self._trained, sums, used, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(total) if is_used else None
        if self.training.loop == "scaled and clipped":
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self._scaler.step(optimizer)
        self._scaler.update()

    def _in_turn(self, passes: Mapping[int, list[Sequence[int]]]) -> Iterator[Sequence[int]]:
        """Yield the passes of all ranks; each begins with the same buffers, and rank 0's stay."""
        buffers = list(self.model.buffers()) if self.training.model == STATEFUL else []
        before = [buffer.clone() for buffer in buffers]
        kept = before
        for rank in sorted(passes):
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            yield from passes[rank]
            if rank == min(passes):
                kept = [buffer.clone() for buffer in buffers]
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)

    def _items(self, ids: Sequence[int]) -> float:
        if self.training.loop != "weighed":
            return len(ids)
        return float((1.0 + self.targets[torch.tensor(ids)].flatten().abs()).sum())

    def _loss(self, ids: Sequence[int], aim: float) -> torch.Tensor:
        x, y = self.inputs[torch.tensor(ids)], aim * self.targets[torch.tensor(ids)]
        found = self.model(x) * self._temperature[0] if self._temperature else self.model(x)
        losses: torch.Tensor = (found - y).square().sum(dim=1)
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
