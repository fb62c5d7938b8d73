"""A job's state arrives with every bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic.collectives.control_words import DIGEST_BYTES
from elastic.collectives.process_group import as_byte_row
from elastic.state.portions import byte_share, decode_metadata, encode_metadata, portions
from elastic.state.state_tensors import TensorState
from elastic.training_errors import ElasticError, UsageError
from tests.training.handing import (
    MAKERS,
    adam,
    give_all,
    hand_metadata_over,
    hand_over,
    momentum,
    written,
    zoo,
)
from tests.training.peers import CPU, each


@pytest.mark.parametrize("name", MAKERS)
def test_a_newcomer_allocates_the_optimizers_state(name: str) -> None:
    old, new = zoo(MAKERS[name], 1), zoo(MAKERS[name], 2, steps=0)
    new.adopt(decode_metadata(encode_metadata({"s": old.structure(CPU)}))["s"], CPU)
    for ours, theirs in zip(new.units(CPU), old.units(CPU), strict=True):
        for to, came in zip(ours, theirs, strict=True):
            to.copy_(came)
    for to, came in zip(new.buffers(), old.buffers(), strict=True):
        to.copy_(came)
    new.load_hyperparameters(old.hyperparameters())

    assert written(new) == written(old)
    assert new.digest() == old.digest()
    assert new.unit_sizes(CPU) == old.unit_sizes(CPU)
    assert new.hyperparameters() == old.hyperparameters()
    for state in (old, new):
        torch.manual_seed(9)
        state.optimizer.zero_grad()
        state.model(torch.randn(2, 3, 6, 6)).backward()
        state.optimizer.step()
    assert written(new) == written(old)


def test_a_newcomer_drops_other_optimizer_state() -> None:
    old, new = zoo(adam, 1, steps=0), zoo(adam, 2, steps=3)

    new.adopt(old.structure(CPU), CPU)

    assert dict(new.optimizer.state) == {}


def test_allocated_state_starts_with_zeros() -> None:
    old, new = zoo(adam, 1), zoo(adam, 2, steps=0)
    new.adopt(old.structure(CPU), CPU)

    kept = [value for entry in new.optimizer.state.values() for value in entry.values()]

    assert kept
    assert all(not value.any() for value in kept)


def test_another_model_is_refused() -> None:
    other = nn.Linear(2, 2)
    state = TensorState(other, momentum(other.parameters()))

    with pytest.raises(ElasticError, match="has 10 parameters and averaged models, this worker 2"):
        state.adopt(zoo(momentum, 1).structure(CPU), CPU)


def test_other_parameter_groups_are_refused_with_the_reason() -> None:
    layer = nn.Linear(2, 2)
    state = TensorState(layer, momentum(layer.parameters()))
    groups = [*state.hyperparameters(), {"lr": 0.1}]

    with pytest.raises(UsageError, match="2 parameter groups, this worker 1; create all groups in"):
        state.load_hyperparameters(groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "members", "newcomers", "steps"),
    [("momentum", 1, 1, 1), ("adam", 2, 1, 3), ("amsgrad", 3, 2, 4), ("extra", 3, 1, 2)],
)
def test_every_bit_arrives(name: str, members: int, newcomers: int, steps: int) -> None:
    states = each(hand_over, members + newcomers, name, members, steps)

    assert states == [states[0]] * (members + newcomers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "arrives"),
    [
        (3 << 20, [float((3 << 20) - 2), float((3 << 20) - 1)]),  # 12 MiB
        (0, "the state did not arrive: rank 0 could not encode its state"),
    ],
)
def test_metadata_of_any_size_arrives_or_the_newcomer_fails_at_once(
    numbers: int, arrives: object
) -> None:
    assert each(hand_metadata_over, 2, numbers) == ["", arrives]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source"), [("momentum", 0), ("amsgrad", 2), ("extra", 1)])
def test_one_rank_broadcasts_its_state(name: str, source: int) -> None:
    found = each(give_all, 3, name, source)

    assert found == [found[source]] * 3


def _doubled(state: TensorState) -> None:
    state.parameters()[0].detach().mul_(2)


def _last_of_the_momentum(state: TensorState) -> None:
    kept = [state.optimizer.state.get(parameter, {}) for parameter in state.parameters()]
    next(entry for entry in reversed(kept) if entry)["momentum_buffer"].view(-1)[-1:].add_(1)


def _another_step(state: TensorState) -> None:
    state.model(torch.ones(2, 3, 6, 6)).backward()
    state.optimizer.step()


@pytest.mark.parametrize("change", [_doubled, _last_of_the_momentum, _another_step])
def test_checksums_of_different_states_differ(change: Callable[[TensorState], None]) -> None:
    one, two = zoo(momentum, 1), zoo(momentum, 1)
    assert one.digest() == two.digest()
    assert len(one.digest()) == DIGEST_BYTES

    change(two)

    assert one.digest() != two.digest()


def test_metadata_cannot_run_code() -> None:
    with pytest.raises(Exception, match="weights_only"):
        decode_metadata(encode_metadata({"evil": Path}))


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.integers(1, 64))
def test_portions_have_every_unit_once_in_order(sizes: list[int], steps: int) -> None:
    found = portions(sizes, steps)

    assert len(found) == steps
    assert [index for portion in found for index in portion] == list(range(len(sizes)))
    for portion in found:
        assert sum(sizes[i] for i in portion) <= -(-sum(sizes) // steps) + max(sizes)


@given(
    st.lists(
        st.tuples(st.integers(0, 9000), st.sampled_from([torch.uint8, torch.float32, torch.int64])),
        max_size=8,
    ),
    st.integers(1, 9),
)
def test_members_cover_every_byte_once(pieces: list[tuple[int, torch.dtype]], members: int) -> None:
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in pieces]
    for member in range(members):
        for piece in byte_share(tensors, member, members):
            piece.add_(1)

    for tensor in tensors:
        assert (as_byte_row(tensor) == 1).all()
