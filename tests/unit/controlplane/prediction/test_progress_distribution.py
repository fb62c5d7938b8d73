"""Progress as a Beta distribution: likelihood, fit, calibration, bounded sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from scipy.optimize import approx_fprime
from scipy.special import betainc
from scipy.stats import beta as beta_distribution

from controlplane.prediction.progress_distribution import (
    FEATURES,
    Points,
    ProgressModel,
    Reservoir,
    features,
    fit,
    loss,
    mean_progress,
    points_of,
    prior,
)
from tests.support.sizes import examples

TRUE = ProgressModel(
    weights=np.array([0.0, 0.0, -4.0, 0.0, 6.0]), bias=15.0, mean=np.zeros(FEATURES),
    scale=np.ones(FEATURES),
)  # fmt: skip


def synthetic(many: int, seed: int) -> Points:
    """Points whose progress is drawn from the very model that is to be found."""
    rng = default_rng(seed)
    rows = rng.standard_normal((many, FEATURES))
    epochs = rng.integers(1, 30, many).astype(np.float64)
    alpha, beta = TRUE.shapes(rows, epochs)
    return Points(rows, epochs, rng.beta(alpha, beta))


def lives(many: int, seed: int, *, spread: float = 0.3, killed: float = 0.0) -> list[Points]:
    """Logs of jobs that last 8 to 60 epochs, by family, with falling losses."""
    rng = default_rng(seed)
    found = []
    for _ in range(many):
        size = float(rng.choice([5000.0, 20_000.0, 40_000.0]))
        total = max(2, round(8 + size / 2000 + 5 * spread * rng.standard_normal()))
        epochs = np.arange(1, total + 1, dtype=np.float64)
        losses = 2.0 / (1 + 9 * epochs / total) * np.exp(spread * rng.standard_normal(total))
        if rng.random() < killed:  # it never came to its end
            epochs = epochs[: max(1, total // 3)]
        rows = np.array(
            [features(size, 2.0, size * k, value) for k, value in zip(epochs, losses, strict=False)]
        )
        found.append(points_of(rows, epochs))
    return found


def joined(parts: list[Points]) -> Points:
    return Points(
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.epochs for part in parts]),
        np.concatenate([part.progress for part in parts]),
    )


def accuracy(model: ProgressModel, points: Points) -> tuple[float, float]:
    """Return the share of points in the 90% interval, and the mean error of the mean progress."""
    alpha, beta = model.shapes(points.features, points.epochs)
    rank = betainc(alpha, beta, np.clip(points.progress, 0.0, 1.0))
    error = np.abs(mean_progress(alpha, beta) - points.progress)
    return float(((rank >= 0.05) & (rank <= 0.95)).mean()), float(error.mean())


# --- the likelihood


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_gradient_equals_finite_differences(seed: int) -> None:
    rng = default_rng(seed)
    points = synthetic(30, seed)
    design = np.column_stack([points.features, np.ones(30)])
    progress = np.clip(points.progress, 1e-3, 1 - 1e-3)
    at = np.append(rng.normal(0.0, 0.5, FEATURES), rng.uniform(4.0, 12.0))

    def value(parameters: np.ndarray) -> float:
        return loss(parameters, design, points.epochs, progress)[0]

    numeric = approx_fprime(at, value, 1e-6)
    analytic = loss(at, design, points.epochs, progress)[1]
    assert analytic == pytest.approx(numeric, rel=1e-3, abs=1e-4)


def test_the_loss_is_the_mean_negative_log_density() -> None:
    points = synthetic(50, 1)
    design = np.column_stack([points.features, np.ones(50)])
    at = np.append(np.zeros(FEATURES), 7.0)

    value, _ = loss(at, design, points.epochs, points.progress)

    density = beta_distribution.logpdf(points.progress, np.maximum(points.epochs, 1.0), 7.0)
    assert value == pytest.approx(-density.mean())


def test_alpha_and_beta_are_never_below_one() -> None:
    model = ProgressModel(np.zeros(FEATURES), -100.0, np.zeros(FEATURES), np.ones(FEATURES))

    alpha, beta = model.shapes(np.zeros((2, FEATURES)), np.array([0.0, 12.0]))

    assert alpha.tolist() == [1.0, 12.0]
    assert beta.tolist() == [1.0, 1.0]


# --- learning


def test_known_parameters_are_recovered() -> None:
    model = fit(synthetic(4000, 3))
    assert model is not None

    raw = model.weights / model.scale
    bias = model.bias - float(raw @ model.mean)
    assert raw == pytest.approx(TRUE.weights, abs=0.6)
    assert bias == pytest.approx(15.0, abs=0.6)


def test_a_fit_halves_the_error_of_the_prior() -> None:
    points = joined(lives(40, 1))
    model = fit(points)
    assert model is not None

    before, after = accuracy(prior(10.0), points), accuracy(model, points)
    assert after[1] < 0.5 * before[1]


def test_a_warm_start_has_the_same_result() -> None:
    points = joined(lives(60, 2))
    cold = fit(points)
    warm = fit(points, fit(joined(lives(60, 5))))
    assert cold is not None
    assert warm is not None

    both = [accuracy(model, points)[1] for model in (cold, warm)]
    assert both[0] == pytest.approx(both[1], abs=0.01)


def test_a_fit_needs_points() -> None:
    assert fit(points_of(np.zeros((0, FEATURES)), np.zeros(0))) is None


def test_the_last_epoch_of_a_job_is_no_point() -> None:
    assert len(points_of(np.zeros((1, FEATURES)), np.ones(1))) == 0
    assert points_of(np.zeros((4, FEATURES)), np.arange(1.0, 5.0)).progress.tolist() == [
        0.25, 0.5, 0.75,
    ]  # fmt: skip


def test_features_are_those_of_the_paper_or_nan() -> None:
    assert features(100.0, 2.0, 300.0, 0.5, 0.9).tolist() == [100.0, 2.0, 300.0, 0.75, 0.9]
    assert np.isnan(features(100.0, None, 0.0, None)).tolist() == [False, True, False, True, True]
    assert np.isnan(features(100.0, float("inf"), 0.0, float("nan"))[[1, 3]]).all()


def test_unknown_features_count_as_the_mean() -> None:
    model = ProgressModel(np.ones(FEATURES), 8.0, np.full(FEATURES, 3.0), np.ones(FEATURES))

    _, beta = model.shapes(np.full((1, FEATURES), np.nan), np.array([2.0]))

    assert beta.tolist() == [8.0]


# --- calibration


def test_a_model_that_is_true_or_fitted_is_calibrated_and_a_wrong_model_is_not() -> None:
    wrong = ProgressModel(np.zeros(FEATURES), 400.0, np.zeros(FEATURES), np.ones(FEATURES))
    fitted = fit(synthetic(1500, 8))
    assert fitted is not None

    assert accuracy(TRUE, synthetic(5000, 7))[0] == pytest.approx(0.9, abs=0.015)
    assert accuracy(fitted, synthetic(3000, 9))[0] == pytest.approx(0.9, abs=0.03)
    assert accuracy(wrong, synthetic(500, 1))[0] < 0.1


@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_smooth_and_erratic_curves_give_calibrated_models(spread: float) -> None:
    model = fit(joined(lives(60, 3, spread=spread)))
    assert model is not None

    coverage, error = accuracy(model, joined(lives(60, 4, spread=spread)))

    assert coverage > 0.8
    assert error < 0.15


def test_killed_jobs_leave_a_model_better_than_the_prior() -> None:
    model = fit(joined(lives(80, 3, killed=0.4)))
    assert model is not None

    points = joined(lives(60, 4))

    assert accuracy(model, points)[1] < accuracy(prior(10.0), points)[1]
    assert np.isfinite(model.weights).all()


def test_values_that_are_not_finite_are_ignored() -> None:
    points = joined(lives(20, 1))
    points.progress[0], points.epochs[3] = np.nan, np.nan

    model = fit(points)

    assert model is not None
    assert np.isfinite(model.bias)


def test_the_mean_progress_is_alpha_over_both() -> None:
    assert mean_progress(np.array([1.0, 9.0]), np.array([3.0, 1.0])).tolist() == [0.25, 0.9]


# --- the bounded sample


def numbered(first: int, many: int) -> Points:
    epochs = np.arange(first, first + many, dtype=np.float64)
    return Points(np.zeros((many, FEATURES)), epochs, np.full(many, 0.5))


def test_a_sample_below_its_capacity_holds_all_points() -> None:
    sample = Reservoir(10)
    sample.offer(numbered(0, 4), default_rng(0))
    sample.offer(numbered(4, 4), default_rng(0))

    assert sample.points.epochs.tolist() == list(range(8))


def test_every_point_is_equally_likely_in_the_sample() -> None:
    rounds, capacity, offered = 3000, 5, 20
    seen = np.zeros(offered)
    for seed in range(rounds):
        sample, rng = Reservoir(capacity), default_rng(seed)
        for first in range(0, offered, 4):
            sample.offer(numbered(first, 4), rng)
        seen[sample.points.epochs.astype(int)] += 1

    expected = rounds * capacity / offered
    assert len(sample.points) == capacity
    assert (np.abs(seen - expected) < 5 * np.sqrt(expected)).all()


def test_the_sample_depends_only_on_the_seed() -> None:
    first, again = Reservoir(5), Reservoir(5)
    for sample in (first, again):
        sample.offer(numbered(0, 50), default_rng(4))

    assert first.points.epochs.tolist() == again.points.epochs.tolist()
