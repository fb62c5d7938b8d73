"""Reports of mean losses, converted to one loss per stretch of training."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.slaq.observed_jobs import LossReports


def stretches(reports: LossReports) -> list[tuple[float, float]]:
    return list(zip(reports.positions, reports.losses, strict=True))


def test_telemetry_adds_the_stretch_since_the_last_report() -> None:
    """Mean 4 over 400 samples, then 3 over 800: 2 over those in between; the epoch's 2.8: 2."""
    reports = LossReports(40)

    reports.take_steps(400, 4.0)
    reports.take_steps(800, 3.0)
    reports.take_epoch(1, 1000, 2.8)
    reports.take_epoch(2, 2000, 1.5)

    assert stretches(reports) == [(200.0, 4.0), (600.0, 2.0), (1500.0, 1.5)]


def test_a_short_stretch_is_not_a_report() -> None:
    """The shortest is a quarter of the last epoch, or of the first one so far."""
    reports = LossReports(40)

    for samples in range(100, 1000, 100):
        reports.take_steps(samples, 1.0)
    reports.take_epoch(1, 1000, 1.0)
    for samples in range(1100, 2000, 100):
        reports.take_steps(samples, 1.0)

    first, second = [50.0, 150.0, 250.0, 350.0, 500.0, 700.0], [1150.0, 1450.0, 1750.0]
    assert list(reports.positions) == [*first, *second]


def test_samples_that_are_trained_again_count_once() -> None:
    reports = LossReports(40)
    reports.take_epoch(1, 1000, 4.0)
    reports.take_steps(1500, 3.0)

    reports.take_steps(1200, 3.2)
    reports.take_steps(1500, 3.0)
    reports.take_epoch(2, 2000, 2.5)

    assert stretches(reports) == [(500.0, 4.0), (1250.0, 3.0), (1750.0, 2.0)]
    resumed = LossReports(40)  # earlier epochs are assumed to be equally long
    resumed.take_epoch(10, 10_000, 1.0)
    assert stretches(resumed) == [(9500.0, 1.0)]


def test_missing_and_implausible_losses_are_ignored() -> None:
    reports = LossReports(40)

    for epoch, loss in enumerate([None, float("nan"), float("inf"), -1e300], 1):
        reports.take_epoch(epoch, 1000 * epoch, loss)

    assert stretches(reports) == []
    assert reports.first is None


def test_a_rise_and_its_return_are_no_reduction() -> None:
    """First 4, then 1000, then 3.5: the loss has fallen by 0.5."""
    reports = LossReports(40)

    for epoch, loss in enumerate([4.0, 1000.0, 3.5], 1):
        reports.take_epoch(epoch, 1000 * epoch, loss)

    assert reports.largest_drop == 0.5


@given(
    told=st.lists(st.tuples(st.integers(1, 500), st.floats(-10, 10)), min_size=1, max_size=30),
    kept=st.integers(3, 10),
)
def test_positions_rise_and_the_latest_are_kept(told: list[tuple[int, float]], kept: int) -> None:
    reports, samples = LossReports(kept), 0
    for number, (more, loss) in enumerate(told):
        samples += more
        if number % 4 == 3:
            reports.take_epoch(number // 4 + 1, samples, loss)
        else:
            reports.take_steps(samples, loss)

    positions = list(reports.positions)
    assert positions == sorted(set(positions))
    assert len(positions) == min(reports.edition, kept)
