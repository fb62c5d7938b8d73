"""A job has the job file's seed, else the script's, on all workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from elastic.sample_stream import SampleStream
from elastic.state import random_state as job_seed
from elastic.state.random_state import (
    JobSeed,
    random_state,
    restore_random_state,
    seed_initial_generators,
)
from tests.training.groups import LOOP, PLAIN, SEED, SIZE, Alone, alone, crew, furthest, script
from tests.training.test_iterable_data import InOrder

Draws = tuple[int, float, float]


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    before = random_state()
    yield
    restore_random_state(before)
    job_seed._marks.set()


def drawn() -> Draws:
    return int(torch.randint(2**60, ())), random.random(), float(np.random.rand())  # noqa: S311, NPY002


def seed_script(torch_seed: int | None, python_seed: int | None, numpy_seed: int | None) -> None:
    for seed_generator, seed in (
        (torch.manual_seed, torch_seed), (random.seed, python_seed), (np.random.seed, numpy_seed),
    ):  # fmt: skip
        if seed is not None:
            seed_generator(seed)


def of(*seeds: int) -> Draws:
    seed_script(*seeds)
    return drawn()


ALL_THREE = (7, 8, 9)


@pytest.mark.parametrize(("told", "script", "value", "overruled", "seeds"), [
    ((None, None), (None, None, None), 0, None, (0, 0, 0)),
    ((None, None), (7, None, None), 7, None, (7, 7, 7)),
    ((None, None), (0, None, None), 0, None, (0, 0, 0)),
    ((None, None), ALL_THREE, 7, None, (7, 8, 9)),
    ((None, None), (None, 8, 9), 0, None, (0, 8, 9)),
    ((None, 5), ALL_THREE, 5, None, (5, 5, 5)),
    ((11, None), (None, None, None), 11, None, (11, 11, 11)),
    ((11, None), ALL_THREE, 11, 7, (11, 11, 11)),
    ((7, None), ALL_THREE, 7, None, (7, 7, 7)),
    ((11, 5), (None, None, None), 11, 5, (11, 11, 11)),
])  # fmt: skip
def test_seeds_rank_job_file_argument_torch(
    told: tuple[int | None, int | None],
    script: tuple[int | None, int | None, int | None],
    value: int,
    overruled: int | None,
    seeds: tuple[int, int, int],
) -> None:
    stated, given = told
    seed_initial_generators(stated)
    seed_script(*script)
    seed = JobSeed(stated)

    said = seed.begin(given)

    assert (seed.value, said, drawn()) == (value, overruled, of(*seeds))


def test_a_later_seed_of_the_script_counts() -> None:
    seed_initial_generators(None)
    torch.manual_seed(3)
    seed = JobSeed(None)
    seed.begin(None)
    assert (seed.follow(), seed.value) == (None, 3)
    random.seed(8)
    torch.manual_seed(7)

    assert (seed.follow(), seed.value, drawn()) == (None, 7, of(7, 8, 7))


def test_the_job_files_seed_overrides_a_later_seed() -> None:
    seed_initial_generators(11)
    seed = JobSeed(11)
    seed.begin(None)
    seed_script(*ALL_THREE)

    assert (seed.follow(), seed.value, drawn()) == (7, 11, of(11, 11, 11))


def test_generators_seeded_by_the_script_keep_their_state() -> None:
    seed_initial_generators(None)
    seed_script(*ALL_THREE)
    first = drawn()
    JobSeed(None).begin(None)
    second = drawn()

    assert (first, second) == (of(7, 8, 9), drawn())


def test_workers_draw_equal_numbers_before_they_have_a_seed() -> None:
    seed_initial_generators(None)
    first = drawn()
    seed_initial_generators(None)

    assert first == drawn()
    seed_initial_generators(1)
    assert not set(first) & set(drawn())


def test_a_seed_from_before_the_import_is_the_scripts() -> None:
    torch.manual_seed(5)
    marks = job_seed._GeneratorMarks()
    assert marks.torch is None
    torch.seed()  # as torch begins

    assert job_seed._GeneratorMarks().torch == torch.initial_seed()


# --- real workers

FIRST = "ME == 'toy-1.v1.r0'"
OWN = f"import random\ntorch.manual_seed(7 if {FIRST} else random.SystemRandom().randrange(2**40))"
BEFORE = script(PLAIN.replace("torch.manual_seed(3)", "pass"), LOOP).replace(
    "agent = Sc", f"{OWN}\nagent = Sc", 1
)
DRAWN_STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return len(inputs)

    def __iter__(self):
        for place in torch.randperm(len(inputs)).tolist():
            yield inputs[place], targets[place]

data = Stream()
"""
BEHIND = script(PLAIN.replace("torch.manual_seed(3)", "pass"), DRAWN_STREAM, OWN, "\n", LOOP)
UNSEEDED = PLAIN.replace("torch.manual_seed(3)", "torch.manual_seed(BEGIN)")


class Seeded(Alone):
    def __init__(self, source: str, batch: int, size: int) -> None:
        super().__init__(source, batch, size)
        self.stream = SampleStream(7, size)


class SeededInOrder(InOrder):
    def step(self, ids: Any) -> None:
        seed = SampleStream(7, SIZE).epoch_seed(len(self.after) + 1)
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))
        Alone.step(self, order[ids].tolist())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "kind"), [(BEFORE, Seeded), (BEHIND, SeededInOrder)], ids=["before", "behind"]
)
def test_a_job_keeps_the_seed_of_its_first_worker(
    tmp_path: Path, source: str, kind: type[Alone]
) -> None:
    with crew(tmp_path, source, seed=msgspec.UNSET) as job:
        job.through((6, 6), (4, 4, 4), 1, "pause", (6, 6), (12,))

        last = job.epochs()[-1].epoch
        assert job.samples() == {epoch: list(range(SIZE)) for epoch in range(1, last + 1)}
        plain = UNSEEDED.replace("BEGIN", "7")
        assert furthest(job.final(), alone(plain, last, 12, kind=kind)) < 1e-9


@pytest.mark.slow
def test_the_log_states_an_overridden_seed_once(tmp_path: Path) -> None:
    with crew(tmp_path, BEFORE) as job:
        epochs = job.through((6, 6), (4, 4, 4))

        plain = UNSEEDED.replace("BEGIN", str(SEED))
        assert furthest(job.final(), alone(plain, len(epochs), 12)) < 1e-9
        logs = [(worker.folder / "log").read_text() for worker in job.workers.values()]
        said = f"[ones] seed {SEED} of the job file overrides the script's 7"
        lines = [line for log in logs for line in log.splitlines()]
        assert [line for line in lines if "seed" in line] == [said]
