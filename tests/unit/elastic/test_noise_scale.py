"""The gradient noise scale, from gradients whose noise is known."""

from __future__ import annotations

import pytest
import torch

from elastic.metrics import MIN_MEASUREMENTS, NoiseMeter

SCALARS = 2000


def measured(own: int, whole: int, times: int, *, signal: float = 0.05) -> tuple[NoiseMeter, float]:
    """A meter that saw gradients with noise 1 per scalar and sample, and their true noise scale."""
    torch.manual_seed(0)
    gradient = torch.randn(SCALARS) * signal
    meter = NoiseMeter()
    for _ in range(times):
        share = (gradient + torch.randn(SCALARS) / own**0.5) * (own / whole)
        others = whole - own
        rest = (gradient + torch.randn(SCALARS) / others**0.5) * (others / whole)
        meter.begin()
        meter.add_pass(share, own, whole)
        meter.add_total(share + rest, whole)
    return meter, SCALARS / float(torch.dot(gradient, gradient))


@pytest.mark.parametrize(("own", "whole"), [(16, 32), (16, 64), (32, 256), (7, 20)])
def test_the_noise_scale_is_found_from_any_share_of_the_batch(own: int, whole: int) -> None:
    meter, true = measured(own, whole, 400)

    assert meter.scale() == pytest.approx(true, rel=0.25)


def test_nothing_is_said_before_enough_was_seen() -> None:
    assert measured(16, 64, MIN_MEASUREMENTS - 1)[0].scale() is None
    assert measured(16, 64, MIN_MEASUREMENTS)[0].scale() is not None


def test_a_step_that_overflowed_is_passed_over() -> None:
    meter, _ = measured(16, 64, MIN_MEASUREMENTS)
    before = meter.scale()

    meter.add_pass(torch.full((SCALARS,), float("inf")), 16, 64)
    meter.add_total(torch.full((SCALARS,), float("inf")), 64)

    assert meter.scale() == before


def test_a_signal_that_is_lost_in_noise_has_no_scale() -> None:
    meter = NoiseMeter()
    for _ in range(2 * MIN_MEASUREMENTS):
        meter.add_pass(torch.ones(SCALARS) * 0.5, 32, 64)
        meter.add_total(torch.zeros(SCALARS), 64)

    assert meter.scale() is None


@pytest.mark.parametrize("passes", [(32, 32), (11, 11, 10), (16,) * 8])
def test_one_worker_finds_it_from_the_passes_of_its_steps(passes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    gradient, whole, meter = torch.randn(SCALARS) * 0.05, sum(passes), NoiseMeter()
    for _ in range(400):
        parts = [(gradient + torch.randn(SCALARS) / own**0.5) * (own / whole) for own in passes]
        meter.begin()
        for part, own in zip(parts[:-1], passes, strict=False):
            meter.add_pass(part, own, whole)
        meter.add_total(torch.stack(parts).sum(0), whole)

    true = SCALARS / float(torch.dot(gradient, gradient))
    assert meter.scale() == pytest.approx(true, rel=0.25)


def test_passes_of_a_step_that_nobody_finished_do_not_count() -> None:
    torch.manual_seed(0)
    meter = NoiseMeter()
    for _ in range(2 * MIN_MEASUREMENTS):
        meter.begin()
        meter.add_pass(torch.full((SCALARS,), float("nan")), 16, 64)
        share, rest = torch.ones(SCALARS) * 0.3, torch.ones(SCALARS) * 0.7
        meter.begin()
        meter.add_pass(share, 16, 64)
        meter.add_total(share + rest, 64)

    assert meter.scale() is not None


def test_one_worker_alone_in_one_pass_measures_nothing() -> None:
    meter = NoiseMeter()
    for _ in range(2 * MIN_MEASUREMENTS):
        meter.add_pass(torch.ones(SCALARS), 64, 64)
        meter.add_total(torch.ones(SCALARS), 64)

    assert meter.scale() is None
