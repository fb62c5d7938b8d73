"""Jobs whose steps sleep like those of a device: four slots of any host are four devices.

Each step of a worker lasts `fixed_s`, `sample_s` for each sample of its share, and `link_s` for each other
worker. So the speed of a size does not depend on this host.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import UNSET

from schemas.jobs import JobSpec, StopRule, Utility
from tests.bench.live_jobs import SLOTS

SAMPLES: Final = 480  # of an epoch
BATCH: Final = 24
SCRIPT: Final = """
    import os
    import time

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from elastic import ScalingAgent

    FIXED_S, SAMPLE_S, LINK_S = (float(os.environ[name]) for name in ("FIXED_S", "SAMPLE_S", "LINK_S"))
    agent = ScalingAgent.from_env()
    torch.manual_seed(0)
    inputs = torch.randn({samples}, 8)
    labels = inputs.mean(dim=1, keepdim=True) + 0.3 * torch.randn({samples}, 1)
    model, optimizer, loader = agent.load(
        lambda: nn.Linear(8, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.02),
        TensorDataset(inputs, labels),
        batch_size={batch},
    )
    for epoch in agent.epochs(1000):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            time.sleep(FIXED_S + SAMPLE_S * len(x) + LINK_S * (agent.world_size - 1))
        agent.report(mse=loss.item())
"""


@dataclass(frozen=True)
class Kind:
    name: str
    fixed_s: float  # of every step
    sample_s: float  # of a sample of the share
    link_s: float  # of another worker

    def step_s(self, slots: int, batch: int) -> float:
        return self.fixed_s + self.sample_s * -(-batch // slots) + self.link_s * (slots - 1)

    def samples_per_s(self, slots: int, batch: int = BATCH) -> float:
        return batch / self.step_s(slots, batch)


KINDS: Final = (
    Kind("wide", 0.010, 0.0060, 0.001),  # each slot brings nearly another
    Kind("plain", 0.040, 0.0030, 0.004),  # somewhat less
    Kind("narrow", 0.030, 0.0015, 0.060),  # two slots are slower than one
)


@dataclass(frozen=True)
class Sleeper:
    kind: Kind
    epochs: int
    at: float  # seconds after the first
    wanted: int  # slots, for policies of fixed sizes

    @property
    def name(self) -> str:
        return f"{self.kind.name} x{self.epochs}"

    @property
    def alone_s(self) -> float:
        return self.epochs * SAMPLES / self.kind.samples_per_s(1)


def sleepers(
    seed: int, gap_s: float, *, many: int | None = None, until_s: float = 0.0
) -> list[Sleeper]:
    """Return a Poisson process of jobs of 5 to 40 s on one slot."""
    rng = random.Random(seed)  # noqa: S311 - a workload, no secret
    found: list[Sleeper] = []
    at = 0.0
    while len(found) < many if many is not None else at < until_s:
        kind = KINDS[len(found) % len(KINDS)]
        epoch_s = SAMPLES / kind.samples_per_s(1)
        epochs = max(1, round(rng.choice((5.0, 10.0, 20.0, 40.0)) / epoch_s))
        found.append(Sleeper(kind, epochs, at, rng.choice((1, 1, 2, 4))))
        at += rng.expovariate(1.0 / gap_s)
    return found


def spec_of(job: Sleeper, folder: Path, *, utility: Utility | None = None) -> JobSpec:
    kind, place = job.kind, folder / job.kind.name
    place.mkdir(parents=True, exist_ok=True)
    script = textwrap.dedent(SCRIPT).format(samples=SAMPLES, batch=BATCH)
    (place / "train.py").write_text(script, encoding="utf-8")
    env = {"FIXED_S": kind.fixed_s, "SAMPLE_S": kind.sample_s, "LINK_S": kind.link_s}
    return JobSpec(
        name=kind.name, family=kind.name, script="train.py", workdir=str(place), batch_size=BATCH,
        max_batch_size=8 * BATCH, max_local_batch=2 * BATCH, slots=(1, SLOTS),
        slots_wanted=job.wanted, stop=StopRule(samples=job.epochs * SAMPLES),
        env={"OMP_NUM_THREADS": "1", **{name: str(value) for name, value in env.items()}},
        utility=UNSET if utility is None else utility,
    )  # fmt: skip


def load(jobs: Sequence[Sleeper]) -> float:
    last = max(job.at for job in jobs)
    return sum(job.alone_s for job in jobs) / max(last, 1e-9)
