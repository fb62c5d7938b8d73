"""Hopping configurations train, bit by bit, as they would alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from elastic.sweep_worker.unit import (
    StateFramesError,
    Unit,
    UserFunctions,
    digest,
    from_frames,
    import_functions,
    keyed_seed,
    to_frames,
)
from elastic.sweep_worker.unit_runner import Trained, UnitFailedError, UnitRunner, as_trained
from elastic.training_errors import UsageError
from tests.support.same_values import same
from tests.support.sizes import examples

CPU = torch.device("cpu")
PARTITIONS = 4


def input_fn(partition: int | None, _: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(99 if partition is None else partition)
    x = torch.randn(24, 5, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def model_fn(values: Mapping[str, Any]) -> Trained:
    model = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=values["lr"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    return Trained(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3),
    )


def train_fn(trained: Trained, data: TensorDataset, unit: Unit) -> dict[str, float]:
    total = 0.0
    for x, y in unit.loader(data, batch_size=8):
        trained.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.mse_loss(trained.model(x + 0.1 * torch.randn_like(x)), y)
        trained.scaler.scale(loss).backward()
        trained.scaler.step(trained.optimizer)
        trained.scaler.update()
        trained.scheduler.step()
        total += loss.item()
    return {"loss": total / 3}


def eval_fn(trained: Trained, data: TensorDataset, _: Unit) -> dict[str, float]:
    assert not trained.model.training
    x, y = data.tensors
    torch.randn(3)  # what an evaluation draws is nobody's business
    return {"error": functional.mse_loss(trained.model(x), y).item()}


FUNCTIONS = UserFunctions(input_fn, model_fn, train_fn, eval_fn)


def unit(config: str, epoch: int, partition: int, values: Mapping[str, Any] | None = None) -> Unit:
    return Unit(config, values or {"lr": 0.01}, epoch, partition, PARTITIONS, 7, CPU)


def runner(functions: UserFunctions = FUNCTIONS) -> UnitRunner:
    return UnitRunner(functions, PARTITIONS, CPU)


def alone(config: str, visits: list[tuple[int, int]]) -> str:
    torch.manual_seed(keyed_seed(7, config))
    trained = as_trained(model_fn({"lr": 0.01}))
    for epoch, partition in visits:
        one = unit(config, epoch, partition)
        torch.manual_seed(one.seed)
        train_fn(trained, input_fn(partition, PARTITIONS), one)
    return digest(to_frames(trained.state()))


def test_hopping_configurations_equal_those_alone() -> None:
    orders = {
        "0": [(1, 2), (1, 0), (1, 3), (1, 1), (2, 0), (2, 1)],
        "1": [(1, 0), (1, 1), (1, 2), (1, 3), (2, 3), (2, 2)],
        "2": [(1, 3), (1, 2), (1, 1), (1, 0), (2, 1), (2, 0)],
    }
    slots = [runner() for _ in range(3)]
    states = {config: runner().begin(config, {"lr": 0.01}, 7) for config in orders}
    for turn in range(6):
        for place, (config, visits) in enumerate(orders.items()):
            epoch, partition = visits[turn]
            slot = slots[(turn + place) % 3]
            result = slot.run(unit(config, epoch, partition), states[config], evaluate=turn == 3)
            states[config] = result.frames

    assert {config: digest(state) for config, state in states.items()} == {
        config: alone(config, visits) for config, visits in orders.items()
    }


def test_a_repeated_unit_gives_the_same_state() -> None:
    state = runner().begin("0", {"lr": 0.01}, 7)
    first = runner().run(unit("0", 1, 2), state, evaluate=True)
    other = runner()
    other.run(unit("5", 1, 0), other.begin("5", {"lr": 0.1}, 7))  # somebody else was there before

    assert other.run(unit("0", 1, 2), state, evaluate=True) == first
    assert first.samples == 24
    assert first.metrics.keys() == {"loss"}
    assert first.scores.keys() == {"error"}


def test_units_have_seeds_of_their_own() -> None:
    keys = [(7, "0", 1, 2), (8, "0", 1, 2), (7, "1", 1, 2), (7, "0", 2, 2), (7, "0", 1, 3)]

    assert len({keyed_seed(*key) for key in keys}) == 5
    assert keyed_seed(7, "0", 1, 2) == 1614168487941716987


tensors = st.builds(
    lambda dtype, shape: (torch.arange(math.prod(shape)) % 2).to(dtype).reshape(shape),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.lists(st.integers(0, 3), max_size=3),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.binary(max_size=5) | tensors,
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=examples(150), deadline=None)
@given(st.dictionaries(st.text(max_size=3), values, max_size=3))
def test_a_decoded_state_is_equal(state: dict[str, Any]) -> None:
    frames = to_frames(state)

    assert same(from_frames(frames), state)
    assert digest(to_frames(from_frames(frames))) == digest(frames)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=3), st.data())
def test_hostile_frames_are_refused(hostile: list[bytes], data: st.DataObject) -> None:
    good = to_frames({"weight": torch.ones(3), "step": (1, [2])})
    at = data.draw(st.integers(0, len(good[0]) - 1))
    flipped = bytearray(good[0])
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for frames in (hostile, [bytes(flipped), *good[1:]], good[:1], [good[0], good[1][:-1]]):
        try:
            assert isinstance(from_frames(frames), dict)
        except StateFramesError:
            continue


def test_an_unsupported_value_is_named() -> None:
    with pytest.raises(UsageError, match=r"state\['scheduler'\]\['by'\] is a .*Path"):
        to_frames({"scheduler": {"by": Path()}})


@pytest.mark.parametrize(("functions", "what"), [
    ({"input_fn": lambda *_: 1 / 0}, "input_fn raised ZeroDivisionError: division by zero"),
    ({"model_fn": lambda _: 1 / 0}, "model_fn raised ZeroDivisionError: division by zero"),
    ({"train_fn": lambda *_: 1 / 0}, "train_fn raised ZeroDivisionError: division by zero"),
    ({"eval_fn": lambda *_: 1 / 0}, "eval_fn raised ZeroDivisionError: division by zero"),
    ({"input_fn": lambda *_: []}, "input_fn returned no data for partition 0 of 4"),
    ({"model_fn": lambda _: 3}, "model_fn returned a int"),
    ({"model_fn": lambda _: Trained(model=None)}, "model_fn returned no model"),
    ({"model_fn": lambda _: (nn.Linear(1, 1), 3)}, "optimizer (int) has no state_dict"),
    ({"model_fn": lambda _: nn.Linear(1, 1)}, "the received state has model, optimizer"),
    ({"train_fn": lambda *_: 3}, "train_fn returned a int"),
    ({"train_fn": lambda *_: {"loss": "low"}}, "train_fn returned loss = 'low'"),
    ({"train_fn": lambda *_: {7: 0.5}}, "train_fn returned a metric named '7'"),
    ({"train_fn": lambda *_: {"a\nb": 0.5}}, "train_fn returned a metric named 'a\\nb'"),
    ({"train_fn": lambda *_: dict.fromkeys(map(str, range(101)), 0)}, "returned 101 metrics"),
])  # fmt: skip
def test_an_unusable_result_is_named(functions: dict[str, Any], what: str) -> None:
    state = runner().begin("0", {"lr": 0.01}, 7)
    broken = UserFunctions(**{
        "input_fn": input_fn, "model_fn": model_fn, "train_fn": train_fn, "eval_fn": eval_fn, **functions,
    })  # fmt: skip

    with pytest.raises((UsageError, UnitFailedError)) as raised:
        runner(broken).run(unit("0", 1, 0), state, evaluate=True)

    assert what in str(raised.value)


@pytest.mark.parametrize(("path", "what"), [
    ("train", "is no module:function"),
    ("no_such_module:load", "No module named 'no_such_module'"),
    ("math:no_such", "module math has no no_such"),
    ("math:pi", "is not a function"),
])  # fmt: skip
def test_a_failed_import_is_named(path: str, what: str) -> None:
    with pytest.raises(UsageError, match="model_fn") as raised:
        import_functions({"input_fn": "math:sin", "model_fn": path, "train_fn": "math:sin"})

    assert what in str(raised.value)
    assert raised.value.field == "model_fn"
