"""A group trains every kind of model as one process does."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.training.kinds import IN_TORCH, NETS, OPTIMIZERS, Kind, Way, alone, furthest, in_a_group

SAME_TYPE = [
    pytest.param(net, marks=[pytest.mark.slow] if net == "compiled" else [])
    for net in NETS
    if net != "mixed types"
]
SMALL = [
    ("mixed types", torch.float32),
    *itertools.product(("channels_last", "tied", "unused parameters that change"), (torch.float32, torch.bfloat16, torch.float16)),
]  # fmt: skip


def worst_by_optimizer(net: str, dtype: torch.dtype, *, chunked: bool) -> dict[str, float]:
    far: dict[str, float] = {}
    for optimizer in OPTIMIZERS:
        if (net, optimizer) in IN_TORCH:
            continue
        kind = Kind(net, optimizer, dtype)
        control = alone(kind, chunked=chunked)
        far[optimizer] = max(furthest(rank, control) for rank in in_a_group(kind))
    return far


@pytest.mark.parametrize("net", SAME_TYPE)
def test_ranks_train_as_one_process_on_the_whole_batch(net: str) -> None:
    far = worst_by_optimizer(net, torch.float64, chunked=False)

    assert {name: worst for name, worst in far.items() if not worst < 1e-9} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("net", "dtype"), SMALL, ids=[f"{n} {d}"[:40] for n, d in SMALL])
def test_rounding_is_that_of_one_process_with_chunks(net: str, dtype: torch.dtype) -> None:
    far = worst_by_optimizer(net, dtype, chunked=True)

    assert {name: worst for name, worst in far.items() if not worst < 1e-6} == {}


WAYS = {
    "branches": ("branches", Way()),
    "passes": ("tied", Way(bound=2)),
    "passes over branches": ("branches", Way(bound=1)),
    "passes over checkpoints": ("reentrant checkpoints", Way(bound=2)),
    "zeros instead of None": ("tied", Way(to_none=False)),
    "zeros instead of None, in passes": ("branches", Way(bound=2, to_none=False)),
    "two batches to a step": ("frozen", Way(every=2)),
    "two batches to a step, in passes": ("branches", Way(bound=2, every=2)),
    "two batches to a step, zeros instead of None": ("branches", Way(every=2, to_none=False)),
    "clipped gradients": ("tied", Way(clip=0.05)),
}


@pytest.mark.parametrize(("net", "way"), WAYS.values(), ids=WAYS.keys())
def test_a_group_takes_steps_as_one_process_does(net: str, way: Way) -> None:
    for optimizer in ("SGD foreach", "AdamW"):
        kind = Kind(net, optimizer, torch.float64)
        control = alone(kind, way)
        assert max(furthest(rank, control) for rank in in_a_group(kind, way)) < 1e-10
