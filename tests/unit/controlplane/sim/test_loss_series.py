"""Losses of a simulation, computed by hand for three jobs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.sim.analysis.comparison import means
from controlplane.sim.analysis.plots import draw as draw_all
from controlplane.sim.analysis.plots import normalised_loss, slots_by_loss, times_to_reductions
from controlplane.sim.analysis.summary import (
    LOSS_FIGURES,
    loss_figures,
    loss_series,
    mean_time_to,
    summary,
    time_to,
)
from controlplane.sim.results import JobResult, LossLeft, SimulationResult, SizeChange
from schemas.ids import Seconds
from tests.support.simulations import job_result, result

Draw = Callable[[Sequence[SimulationResult], Path], None]


def learner(
    name: str,
    at: float,
    losses: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, int]] = (),
    **changes: object,
) -> JobResult:
    """Ends with its last loss."""
    changes["losses"] = tuple(LossLeft(Seconds(when), share) for when, share in losses)
    changes["sizes"] = tuple(SizeChange(Seconds(when), slots) for when, slots in sizes)
    return job_result(name, losses[-1][0] - at, at=at, **changes)


def three() -> tuple[JobResult, JobResult, JobResult]:
    return (
        learner("a", 100.0, [(100, 1.0), (104, 0.1), (112, 0.0)], [(101, 2), (104, 6), (112, 0)]),
        learner("b", 103.0, [(103, 1.0), (109, 0.04), (110, 0.0)], [(104, 1), (110, 0)]),
        learner("c", 109.0, [(109, 1.0), (110, 0.5), (116, 0.0)], [(110, 2), (116, 0)]),
    )


def test_the_mean_loss_is_over_active_jobs() -> None:
    series = loss_series(result(*three()))

    assert series.times_s.tolist() == list(range(16))
    assert series.mean_loss.tolist() == pytest.approx(
        [
            1, 1, 1, 1, 0.55, 0.55, 0.55, 0.55, 0.55, (0.1 + 0.04 + 1) / 3, 0.3, 0.3, 0.5, 0.5, 0.5,
            0.5,
        ]
    )  # fmt: skip
    assert series.window_s == (3.0, 6.0)


def test_slots_are_grouped_by_the_order_of_losses() -> None:
    cores = loss_series(result(*three())).cores

    assert np.isnan(cores[0]).all(), "nobody has a slot yet"
    assert cores[3].tolist() == [0.0, 1.0, 0.0], "of two jobs the first is in the middle"
    assert cores[5].tolist() == pytest.approx([0.0, 1 / 7, 6 / 7])
    assert cores[9].tolist() == pytest.approx([0.0, 0.0, 1.0]), "c has none yet, a 6 and b 1"
    assert cores[11].tolist() == pytest.approx([0.0, 2 / 8, 6 / 8])


def test_a_summary_has_figures_of_losses() -> None:
    a, b, c = three()
    found = summary(result(a, b, c))

    assert {name: found[name] for name in LOSS_FIGURES} == pytest.approx(
        {
            "t90_s": (4.0 + 6.0 + 7.0) / 3, "t95_s": (12.0 + 6.0 + 7.0) / 3,
            "mean_loss": (1.0 + 0.55 + 0.55) / 3,
            "loss_area_s": ((4 + 0.8) + (6 + 0.04) + (1 + 3.0)) / 3, "cores_high": 0.0,
            "cores_medium": (1 + 1 / 7 + 1 / 7) / 3, "cores_low": (0 + 6 / 7 + 6 / 7) / 3,
        }
    )  # fmt: skip
    assert means([result(a, b, c), result(a, b, c)])["t90_s"] == pytest.approx(17.0 / 3)


def test_jobs_without_losses_have_no_such_figures() -> None:
    plain = result(job_result("a", 40.0))

    assert loss_figures(plain) == {}
    assert not set(LOSS_FIGURES) & (summary(plain).keys() | means([plain]).keys())


def test_times_to_a_loss_omit_uncounted_jobs_and_jobs_that_never_reached_it() -> None:
    a, b, _ = three()
    warm = learner("w", 90.0, [(90, 1.0), (95, 0.0)], counted=False)
    stuck = job_result("s", None, losses=(LossLeft(Seconds(0.0), 1.0),))

    assert mean_time_to(result(warm, a, b, stuck), 0.9) == 5.0
    assert mean_time_to(result(stuck), 0.9) is None
    assert time_to(a, 1.0) == 12.0


# --- figures


def words(path: Path) -> list[str]:
    """What an SVG file says, in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (
            normalised_loss,
            ["fair: mean 0.700, completion 9 s", "time since the first submission (s)"],
        ),
        (slots_by_loss, ["slaq: 0% / 43% / 57%", "share of the slots in use (%)", "highest 25%"]),
        (times_to_reductions, ["fair", "slaq", "mean time since submission (s)", "90"]),
    ],
)
def test_figures_of_losses_are_reproducible(tmp_path: Path, draw: Draw, told: list[str]) -> None:
    both = [result(*three(), policy=policy) for policy in ("fair", "slaq")]

    draw(both, tmp_path / "a.svg")
    draw(both, tmp_path / "b.svg")

    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert set(told) <= set(words(tmp_path / "a.svg"))


@pytest.mark.slow
def test_losses_are_drawn_where_all_jobs_have_them(tmp_path: Path) -> None:
    learning, plain = result(*three()), result(job_result("a", 40.0))
    of_losses = {"losses-4.png", "loss-slots-4.png", "loss-times-4.png"}

    assert {file.name for file in draw_all([learning], tmp_path / "l")} >= of_losses
    assert not of_losses & {file.name for file in draw_all([learning, plain], tmp_path / "p")}


# --- for all runs


LOSSES = st.lists(st.floats(0.0, 1.2), min_size=1, max_size=6)
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.floats(0.0, 50.0), LOSSES, SIZES), min_size=1, max_size=8))
def test_shares_add_up_and_means_are_bounded(
    drawn: list[tuple[float, list[float], list[int]]],
) -> None:
    jobs = [
        learner(
            str(number), at, [(at + 3.0 * k, share) for k, share in enumerate([1.0, *losses])],
            [(at + 3.0 * k, slots) for k, slots in enumerate(sizes)],
        )
        for number, (at, losses, sizes) in enumerate(drawn)
    ]  # fmt: skip

    series = loss_series(result(*jobs))

    held = series.cores[np.isfinite(series.cores).all(axis=1)]
    assert held.sum(axis=1) == pytest.approx(np.ones(len(held)))
    known = series.mean_loss[np.isfinite(series.mean_loss)]
    assert ((known >= 0.0) & (known <= 1.2)).all()
    assert math.isclose(series.mean_loss[0], 1.0)
