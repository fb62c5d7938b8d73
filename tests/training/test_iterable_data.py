"""Workers read all of an iterable dataset, in its order, and take their parts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from elastic import ScalingAgent
from elastic.sample_stream import SampleStream
from elastic.step.batch_loader import StreamReader
from elastic.training_errors import UsageError
from tests.training.groups import LOOP, PLAIN, SEED, SIZE, Alone, alone, crew, furthest, script

SAMPLES = 10


class Numbers(IterableDataset[int]):
    """0, 1, 2, ...; a loader worker takes its part only if it knows that it is one."""

    def __init__(self, gives: int = SAMPLES) -> None:
        self.gives = gives
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from range(first + 100 * self.epochs[-1], 100 * self.epochs[-1] + self.gives, step)


class Shuffled(Numbers):
    def __iter__(self) -> Iterator[int]:
        numbers = list(super().__iter__())
        random.shuffle(numbers)
        for number in numbers:
            yield number + 1000 * int(torch.randint(9, ()))


def reader(source: Numbers) -> StreamReader:
    return StreamReader(source, SampleStream(3, SAMPLES, shuffled=False))


def read(source: StreamReader, epoch: int, *places: int, keep: int = SAMPLES) -> list[Any]:
    return source.__getitems__([(epoch, place, keep) for place in places])


def test_an_earlier_position_restarts_the_reading() -> None:
    numbers = Numbers()
    stream = reader(numbers)

    assert read(stream, 1, 2, 3) == [2, 3]
    assert read(stream, 1, 7) == [7]
    assert numbers.epochs == [0]
    assert read(stream, 1, 6, 9) == [6, 9]
    assert read(stream, 2, 0, 1) == [100, 101]
    assert numbers.epochs == [0, 0, 1]


def test_kept_samples_are_returned_without_reading_again() -> None:
    numbers = Numbers()
    stream = reader(numbers)

    taken = [
        read(stream, 1, 2, 3, keep=2),
        read(stream, 1, 6, 7, keep=4),
        read(stream, 1, 4, 5, keep=4),  # the step is dropped, and divided anew
        read(stream, 1, 6, 9, keep=4),
        read(stream, 1, 6, 9, keep=6),
    ]
    read_once = numbers.epochs == [0]

    assert (taken, read_once) == ([[2, 3], [6, 7], [4, 5], [6, 9], [6, 9]], True)
    assert read(stream, 1, 5, keep=6) == [5]
    assert numbers.epochs == [0, 0]
    assert read(stream, 2, 6, keep=6) == [106]


def test_a_stream_of_another_length_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"returned 8 samples in epoch 0; its len\(\) is 10"):
        read(reader(Numbers(gives=8)), 1, 5, 9)
    longer = reader(Numbers(gives=11))
    assert read(longer, 1, 8) == [8]
    with pytest.raises(
        UsageError, match=r"returned more than 10 samples in epoch 0; its len\(\) is"
    ):
        read(longer, 1, 9)


def test_a_drawn_order_follows_from_seed_and_epoch() -> None:
    def epoch(number: int) -> list[int]:
        return read(reader(Shuffled()), number, *range(SAMPLES))

    torch.manual_seed(1)
    random.seed(1)
    drawn = torch.rand(()), random.random()  # noqa: S311
    torch.manual_seed(1)
    random.seed(1)
    first = epoch(1)
    split = reader(Shuffled())
    pieces = [read(split, 1, 0, 1, 2), read(split, 1, 5), read(split, 1, 8, 9)]

    assert (torch.rand(()), random.random()) == drawn  # noqa: S311 - the script's go on
    assert list(itertools.chain(*pieces)) == [first[place] for place in (0, 1, 2, 5, 8, 9)]
    assert [number % 100 for number in first] != sorted(number % 100 for number in first)
    assert [number % 100 for number in first] != [number % 100 for number in epoch(2)]


def epochs_of(source: Numbers, workers: int) -> list[list[int]]:
    agent = ScalingAgent.from_env(seed=3)
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    _, _, loader = agent.load(
        lambda: nn.Linear(1, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        source,
        batch_size=4,
        shuffle=False,
        **options,
    )
    assert len(loader) == 3
    return [list(itertools.chain(*(b.tolist() for b in loader))) for _ in agent.epochs(2)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than there are cores
def test_loader_workers_read_the_whole_stream() -> None:
    assert epochs_of(Numbers(), 2) == [list(range(10)), list(range(100, 110))]
    assert epochs_of(Shuffled(), 2) == epochs_of(Shuffled(), 0)


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return len(inputs)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(self.epoch))
        for place in order[info.id :: info.num_workers] if info else order:
            yield inputs[place], targets[place]

data = Stream()
"""
STREAMED = LOOP.replace(
    "batch_size=1", "batch_size=1, num_workers=agent.rank % 2, prefetch_factor=AHEAD, **FORK"
).replace(
    "model, optimizer, loader",
    'AHEAD, FORK = (3, {"multiprocessing_context": "fork"}) if agent.rank % 2 else (None, {})\n'
    "model, optimizer, loader",
    1,
)


class InOrder(Alone):
    def __init__(self, source: str, batch: int, size: int) -> None:
        super().__init__(source, batch, size)
        self.stream = SampleStream(SEED, size, shuffled=False)

    def step(self, ids: Any) -> None:
        generator = torch.Generator().manual_seed(len(self.after))
        super().step(torch.randperm(len(self.inputs), generator=generator)[ids].tolist())


@pytest.mark.slow
def test_a_changing_group_reads_each_position_once(tmp_path: Path) -> None:
    faults = "reduce:rank=2:step=9:version=1=kill"
    with crew(tmp_path, script(PLAIN, STREAM, STREAMED), faults=faults) as job:
        job.through((4, 4, 4), "loss", (3, 3, 3, 3), 1, (7, 5), 1)

        last = job.epochs()[-1].epoch
        assert job.samples() == {epoch: list(range(SIZE)) for epoch in range(1, last + 1)}
        assert furthest(job.final(), alone(PLAIN, last, 12, kind=InOrder)) < 1e-9
