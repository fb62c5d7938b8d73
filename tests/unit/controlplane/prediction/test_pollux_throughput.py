"""Pollux' model of a pass, its fit, and the best batches."""

from __future__ import annotations

import numpy as np
import pytest

from controlplane.prediction.pollux_throughput import (
    FREE_S,
    BatchBounds,
    PassModel,
    PassSample,
    _Loss,
    best_batches,
    fit_passes,
)

TRUE = PassModel(compute=(0.05, 0.002), near=(0.02, 0.001), far=(0.1, 0.004), overlap=1.5)


def sample(nodes: int, slots: int, local: int) -> PassSample:
    """A pass of a job that behaves exactly as `TRUE`."""
    whole = TRUE.pass_s(np.array([nodes]), np.array([slots]), np.array([float(local)]))
    return PassSample(nodes, slots, local, TRUE.compute[0] + TRUE.compute[1] * local, whole[0])


ALONE = [sample(1, 1, local) for local in (16, 64)]
NEAR = [sample(1, slots, local) for slots in (2, 3, 4) for local in (16, 64)]
FAR = [sample(nodes, 4 * nodes, local) for nodes in (2, 3) for local in (16, 64)]


def test_measured_passes_are_predicted() -> None:
    samples = [*ALONE, *NEAR, *FAR]

    model = fit_passes(samples)

    nodes, slots, local = (
        np.array([getattr(each, name) for each in samples])
        for name in ("nodes", "slots", "local_batch")
    )
    whole = [each.pass_s for each in samples]  # the loss is not smooth near an exact fit
    assert model.pass_s(nodes, slots, local) == pytest.approx(whole, rel=0.1)
    assert model.compute_s(local) == pytest.approx([s.compute_s for s in samples], rel=0.1)


def test_what_was_not_measured_costs_nothing() -> None:
    one = fit_passes(ALONE[:1])
    alone = fit_passes(ALONE)
    near = fit_passes([*ALONE, *NEAR])
    pairs = fit_passes([*ALONE, *NEAR[:2]])
    far = fit_passes([*ALONE, *FAR])

    assert one.compute[0] == pytest.approx(ALONE[0].compute_s / 2)
    assert one.compute_s(np.array([16.0])) == pytest.approx([ALONE[0].compute_s], rel=1e-3)
    assert (alone.near, alone.far) == ((FREE_S, FREE_S), pytest.approx((1.1 * FREE_S,) * 2))
    assert near.far == pytest.approx((1.1 * near.near[0], 1.1 * near.near[1]))
    assert (pairs.near[1], far.near) == (FREE_S, (FREE_S, FREE_S))


def test_the_gradient_of_the_loss_agrees_with_differences() -> None:
    rows = [(s.nodes, s.slots, s.local_batch, s.compute_s, s.pass_s) for s in [*ALONE, *NEAR, *FAR]]
    nodes, slots, local, compute_s, pass_s = np.array(rows).T
    loss = _Loss(nodes > 1, slots, local, np.log(compute_s), np.log(pass_s))
    at = np.array([0.1, 0.01, 0.2, 0.01, 0.05, 0.02, 2.0])

    _, gradient = loss(at)

    steps = 1e-7 * np.eye(len(at))
    slopes = [(loss(at + step)[0] - loss(at - step)[0]) / 2e-7 for step in steps]
    assert gradient == pytest.approx(np.array(slopes), rel=1e-4, abs=1e-6)


BOUNDS = BatchBounds(first=64, least=64, most=512, most_local=512, most_pass=128)
FREE = PassModel((0.1, 0.001), (FREE_S, FREE_S), (FREE_S, FREE_S), 1.0)


@pytest.mark.parametrize(
    ("bounds", "noise", "batches"),
    [
        (BOUNDS, np.inf, [512, 512, 512]),
        (BOUNDS, 0.0, [64, 64, 64]),
        (BatchBounds(64, 64, 100, 40, 128), np.inf, [0, 80, 100]),
    ],
    ids=["a noisy gradient", "no noise", "a small share of a slot"],
)
def test_the_best_batch_at_each_size(bounds: BatchBounds, noise: float, batches: list[int]) -> None:
    goodputs, chosen = best_batches(FREE, bounds, noise, np.array([1]), np.array([1, 2, 4]))

    assert np.where(goodputs > 0, chosen, 0).tolist() == batches


def test_goodput_agrees_with_a_calculation_by_hand() -> None:
    """A sample of batch 512 is worth (512 + 64) / (512 + 512) of one of batch 64.

    One slot takes four passes of 128 samples, at 0.228 s each. Four slots take one each, and reduce
    in no time. A single slot with 66 samples takes two passes of 33, at 0.133 s each.
    """
    whole, two = BatchBounds(64, 512, 512, 512, 128), BatchBounds(64, 66, 66, 512, 128)

    goodputs, _ = best_batches(FREE, whole, 512.0, np.array([1]), np.array([1, 4]))
    (passes,), (batch,) = best_batches(FREE, two, np.inf, np.array([1]), np.array([1]))

    efficiency = (512 + 64) / (512 + 512)
    assert goodputs == pytest.approx(
        [efficiency * 512 / (4 * 0.228), efficiency * 512 / 0.228], rel=1e-6
    )
    assert (batch, passes) == (66, pytest.approx(66 / (2 * 0.133)))
