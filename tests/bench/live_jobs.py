"""Jobs of `bin/bench live`: examples of several lengths, and their submissions."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import UNSET
from msgspec.structs import replace

from controlplane.client.job_file import load_job
from schemas.jobs import JobSpec, StopRule, Utility

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
SEEDED: Final = "torch.manual_seed(0)"  # the line of every example that a job's own seed replaces
LEFT_BEHIND: Final = {"__pycache__", "job.toml", "plain.py"}
SLOTS: Final = 4
SIZES: Final = (1, 2, 4)  # that users want
LOAD: Final = 1.5  # work that comes in a second, over what the cores can do in one
Speeds = Mapping[int, float]  # samples per second by slots, at the first batch, alone


@dataclass(frozen=True)
class Example:
    name: str
    metric: str
    better: int  # 1: more of the metric is better, -1: less
    samples: int  # of an epoch
    epochs: tuple[int, ...]  # of its jobs: about 5, 10, 20 and 40 s on a core of their own
    quick: tuple[int, ...]


TRAININGS: Final = (
    Example("digits", "accuracy", 1, 1_347, (4, 7, 15, 30), (3,)),
    Example("language", "perplexity", -1, 5_260, (2, 3, 6, 12), (1,)),
    Example("embedding", "error", -1, 93_446, (6, 12, 25, 50), (2,)),
)


@dataclass(frozen=True)
class Job:
    example: Example
    epochs: int
    seed: int  # of the weights, of dropout, and of the order of samples

    @property
    def name(self) -> str:
        return f"{self.example.name} x{self.epochs}"

    def alone_s(self, speeds: Mapping[str, Speeds], slots: int) -> float:
        """Seconds on an otherwise empty cluster without the start, at the first batch.

        A size that was not measured has the speed of the next smaller one.
        """
        known = speeds[self.example.name]
        nearest = max(size for size in known if size <= slots)
        return self.epochs * self.example.samples / known[nearest]


@dataclass(frozen=True)
class Arrival:
    job: Job
    at: float  # seconds after the first
    wanted: int  # slots
    utility: Utility | None = None  # of its end, if its user says so


def jobs(kinds: Callable[[Example], Sequence[int]]) -> list[Job]:
    """Return jobs of each example with so many epochs, each with a seed of its own."""
    every = [(example, epochs) for example in TRAININGS for epochs in kinds(example)]
    return [Job(example, epochs, seed) for seed, (example, epochs) in enumerate(every, start=1)]


def mean_gap_s(chosen: Sequence[Job], speeds: Mapping[str, Speeds]) -> float:
    """Mean time between submissions at which work comes in `LOAD` times as fast as cores do it.

    Workers have one thread each, so no more cores than slots do any work.
    """
    work_s = math.fsum(job.alone_s(speeds, 1) for job in chosen)
    return work_s / len(chosen) / (min(os.cpu_count() or 1, SLOTS) * LOAD)


def arrivals(chosen: Sequence[Job], repeat: int, gap_s: float) -> list[Arrival]:
    """A Poisson process of the jobs in random order; `repeat` is its seed.

    Wanted sizes are dealt from a deck with as many of each, so that no repeat has many large ones.
    """
    rng = random.Random(repeat)  # noqa: S311 - a workload, no secret
    order = rng.sample(list(chosen), len(chosen))
    deck = [SIZES[place % len(SIZES)] for place in range(len(order))]
    rng.shuffle(deck)
    found, at = [], 0.0
    for job, wanted in zip(order, deck, strict=True):
        found.append(Arrival(job, at, wanted))
        at += rng.expovariate(1.0 / gap_s)
    return found


def attained_limits(chosen: Sequence[Job], speeds: Mapping[str, Speeds]) -> list[float]:
    """Limits of Tiresias' queues that fit these jobs, as an operator would set them.

    Slot seconds that a third and two thirds of the jobs need at the sizes that users want. (The
    defaults, 3250 and 7200, would leave every job of this length in the first queue: `fifo`.)
    """
    needs = sorted(size * job.alone_s(speeds, size) for job in chosen for size in SIZES)
    low, high = (max(1.0, round(needs[len(needs) * third // 3])) for third in (1, 2))
    return [low, max(high, low + 1.0)]


def spec_of(
    job: Job,
    folder: Path,
    *,
    wanted: int = 1,
    fixed: bool = False,
    seed: int | None = None,
    utility: Utility | None = None,
) -> JobSpec:
    used = job.seed if seed is None else seed
    example = EXAMPLES / job.example.name
    stop = StopRule(epochs=job.epochs)
    if utility is not None:
        stop = StopRule(samples=job.epochs * job.example.samples)
    spec = replace(
        load_job(example / "job.toml"), workdir=str(seeded(example, folder, used)), stop=stop,
        slots_wanted=wanted, seed=used, record_samples=True,
        utility=UNSET if utility is None else utility,
    )  # fmt: skip
    return replace(spec, slots=(wanted, wanted), max_batch_size="keep") if fixed else spec


def seeded(training: Path, folder: Path, seed: int) -> Path:
    """Copy the files of a training whose script then starts with `seed`."""
    place = folder / f"{training.name}-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    for file in training.iterdir():
        if file.name not in LEFT_BEHIND:
            text = file.read_text(encoding="utf-8")
            if file.name == "train.py":
                assert text.count(SEEDED) == 1, f"{file} sets its seed in another way"
                text = text.replace(SEEDED, f"torch.manual_seed({seed})")
            (place / file.name).write_text(text, encoding="utf-8")
    return place
