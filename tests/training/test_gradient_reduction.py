"""The reducer's buckets, losses and dropped steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from elastic.step.gradient_reduction import Reducer
from elastic.training_errors import UsageError


def test_a_group_of_one_leaves_gradients_to_torch() -> None:
    layer = nn.Linear(2, 1)
    ended: list[bool] = []
    reducer = Reducer(layer.parameters(), lambda: ended.append(True))

    layer(torch.ones(1, 2)).sum().backward()
    layer(torch.ones(1, 2)).sum().backward()
    reducer.close()
    layer(torch.ones(1, 2)).sum().backward()

    assert layer.weight.grad.tolist() == [[3.0, 3.0]]
    assert ended == [True, True]
    assert [loss.shape for loss in reducer.losses] == [torch.Size([])] * 2


def test_a_loss_is_checked_before_its_pass() -> None:
    layer = nn.Linear(2, 1)
    judged: list[float] = []

    def refuse(loss: torch.Tensor) -> None:
        judged.append(loss.item())
        assert loss.grad_fn is not None
        if loss > 5:
            raise UsageError("it is too large", "")

    reducer = Reducer(layer.parameters(), lambda: None)
    reducer.check_loss = refuse
    loss = layer(torch.ones(1, 2)).sum() * 0
    loss.backward(retain_graph=True)
    loss.backward(torch.tensor(0.5), retain_graph=True)
    torch.autograd.backward(loss, grad_tensors=torch.tensor(0.5))
    with pytest.raises(UsageError, match="too large"):
        (layer(torch.ones(1, 2)).sum() * 0 + 6).backward()
    torch.autograd.backward([layer(torch.ones(1, 2)).sum() * 0 + 3])
    reducer.close()

    assert judged == [0.0, 6.0, 3.0]


def test_sparse_gradients_are_refused_with_a_remedy() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    reducer = Reducer(table.parameters(), lambda: None)
    reducer.active = True
    table(torch.tensor([1])).sum().backward()
    reducer.close()

    with pytest.raises(UsageError, match="use sparse=False"):
        reducer.pack(1.0, 0)


def test_a_dropped_step_leaves_zeros_and_kept_gradients() -> None:
    layer = nn.Linear(2, 1, bias=False)
    reducer = Reducer(layer.parameters(), lambda: None)
    layer(torch.ones(1, 2)).sum().backward()
    reducer.active = True
    layer(torch.full((1, 2), 5.0)).sum().backward()
    reducer.pack(1.0, 0)
    reducer.discard()
    kept = layer.weight.grad
    layer.weight.grad = None
    layer(torch.full((1, 2), 7.0)).sum().backward()
    bucket, tail = reducer.pack(0.5, 1)
    reducer.close()

    assert kept.tolist() == [[1.0, 1.0]]
    assert bucket.tolist() == [3.5, 3.5, 0.0, 1.0]
    assert tail.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("part", [lambda grad: grad, lambda grad: grad.detach()[:1]])
def test_a_gradient_that_is_kept_does_not_change(
    part: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    layer = nn.Linear(2, 1)
    reducer = Reducer(layer.parameters(), lambda: None)
    reducer.active = True

    def step(value: float) -> tuple[torch.Tensor, int]:
        layer.zero_grad()
        layer(torch.full((1, 2), value)).sum().backward()
        bucket, _ = reducer.pack(1.0, 0)
        reducer.unpack([True, True])
        return layer.weight.grad, bucket.data_ptr()

    first, second = step(1.0)[1], step(2.0)[1]
    kept = part(step(3.0)[0])
    third, fourth = step(4.0)[1], step(5.0)[1]
    reducer.close()

    assert kept.flatten()[0] == 3.0
    assert first == second != third == fourth


def test_a_batch_of_weight_0_adds_nothing() -> None:
    layer = nn.Linear(1, 1, bias=False)
    reducer = Reducer(layer.parameters(), lambda: None)
    reducer.active = True
    layer(torch.full((1, 1), torch.nan)).sum().backward()
    bucket, _ = reducer.pack(0.0, 1)
    reducer.close()

    assert bucket.tolist() == [0.0, 0.0, 0.0]
