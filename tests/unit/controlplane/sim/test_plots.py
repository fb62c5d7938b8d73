"""Figures: their files, texts and refusals; losses of a simulation, computed by hand."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.sim.analysis import plots
from controlplane.sim.analysis.comparison import means
from controlplane.sim.analysis.plot_style import POLICIES, grouped, styles, time_unit
from controlplane.sim.analysis.plots import (
    busy_share,
    gantt,
    normalised_loss,
    slots_by_loss,
    times_to_reductions,
    utilisation,
)
from controlplane.sim.analysis.plots import draw as draw_all
from controlplane.sim.analysis.summary import (
    LOSS_FIGURES,
    loss_figures,
    loss_series,
    mean_time_to,
    summary,
    time_to,
)
from controlplane.sim.cluster import ResultsError
from controlplane.sim.results import (
    JobResult,
    LossLeft,
    SimulationResult,
    SizeChange,
    SlotAllocation,
)
from schemas.ids import Seconds
from tests.support.simulations import job_result, result, times

pytest.importorskip("matplotlib")

Draw = Callable[[Sequence[SimulationResult], Path], None]
OF_MANY: list[Draw] = [plots.box_plots, plots.cumulative, plots.averages, plots.scaling]


def held(policy: str = "ones") -> SimulationResult:
    """Two jobs on two of four slots: one for 10 s, the other from 10 s to 20 s on both."""
    first = job_result(
        "first", 10.0, allocations=(SlotAllocation("n2/0", Seconds(0.0), Seconds(10.0)),)
    )
    both = tuple(SlotAllocation(slot, Seconds(10.0), Seconds(20.0)) for slot in ("n2/0", "n10/1"))
    return result(first, job_result("second", 20.0, allocations=both), policy=policy)


def words(path: Path) -> list[str]:
    """What an SVG file says, in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_figures_are_drawn_in_the_format_of_the_suffix(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"figure{suffix}"

    plots.averages([times("ones", 1.0, 50.0)], path)

    begins = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}
    assert path.read_bytes().startswith(begins[suffix])


@pytest.mark.slow
@pytest.mark.parametrize("draw", [*OF_MANY, utilisation])
def test_figures_are_reproducible_and_name_every_policy(tmp_path: Path, draw: Draw) -> None:
    given = [held("ones"), held("tiresias")]

    draw(given, tmp_path / "a.svg")
    draw(given, tmp_path / "b.svg")

    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    said = words(tmp_path / "a.svg")
    assert {"ones", "tiresias"} <= set(said)
    if draw in OF_MANY:
        assert any(re.search(r"completion time \(s\)", word) for word in said)


@pytest.mark.parametrize("draw", OF_MANY)
def test_jobs_without_a_time_and_times_of_zero_can_be_drawn(tmp_path: Path, draw: Draw) -> None:
    given = result(job_result("a", 0.0), job_result("b", None), job_result("c", 5.0))

    draw([given], tmp_path / "f.png")

    assert (tmp_path / "f.png").stat().st_size > 1000


@pytest.mark.parametrize("draw", [*OF_MANY, utilisation])
def test_nothing_to_draw_is_refused(tmp_path: Path, draw: Draw) -> None:
    with pytest.raises(ResultsError, match="there are no results to draw"):
        draw([], tmp_path / "f.svg")


@pytest.mark.parametrize(
    ("results", "file", "problem"),
    [
        ([result(job_result("a", None))], "f.svg", "no job of ones finished"),
        ([times("ones", 1.0)], "f.gif", r"unknown format of a figure; end its name with \.svg"),
        ([times("ones", 1.0)], "no/f.svg", "No such file or directory; choose another file"),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_refused(
    tmp_path: Path, results: list[SimulationResult], file: str, problem: str
) -> None:
    with pytest.raises(ResultsError, match=problem):
        plots.averages(results, tmp_path / file)


def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    problem = r"figures need matplotlib; pip install 'ones_scheduler-.*\[sim\]'"
    with pytest.raises(ResultsError, match=problem):
        plots.averages([times("ones", 1.0)], tmp_path / "f.svg")


def test_scaling_shows_the_gain_over_every_other_policy(tmp_path: Path) -> None:
    given = [
        msgspec.structs.replace(times(policy, jct * 64 / slots), slots=slots)
        for policy, jct in (("ones", 1.0), ("fifo", 2.0))
        for slots in (16, 64)
    ]

    plots.scaling(given, tmp_path / "f.svg")
    with_gain = words(tmp_path / "f.svg")
    plots.scaling(given, tmp_path / "g.svg", ours="slaq")

    assert "ones faster than the other by (%)" in with_gain
    assert {"16", "64", "GPUs of the cluster"} <= set(with_gain)
    assert not any("faster" in word for word in words(tmp_path / "g.svg"))


# --- colours and labels


def test_a_policy_has_one_style_in_every_figure_and_no_other_policy_has_it() -> None:
    found = styles([*POLICIES, "mine", "ones a=1", "ones a=2", "yours"])

    assert styles(["ones", "fifo"])["fifo"] == styles(["fifo", "mine", "drl"])["fifo"]
    assert all(a != b for a, b in itertools.combinations(found.values(), 2))


def test_labels_contain_the_options_that_differ() -> None:
    def with_options(**options: object) -> SimulationResult:
        return msgspec.structs.replace(times("ones", 1.0), options=options)

    given = [with_options(size=1, speed=2), with_options(size=1), times("fifo", 1.0)]

    assert list(grouped(given)) == ["ones speed=2", "ones", "fifo"]


@pytest.mark.parametrize(
    ("longest", "unit"),
    [(600.0, (1.0, "seconds")), (601.0, (60.0, "minutes")), (18_001.0, (3600.0, "hours"))],
)
def test_the_unit_of_time_suits_the_axis(longest: float, unit: tuple[float, str]) -> None:
    assert time_unit(longest) == unit


# --- slots over time


def test_a_gantt_chart_has_a_row_for_each_slot_in_natural_order(tmp_path: Path) -> None:
    gantt(held(), tmp_path / "f.svg")

    said = words(tmp_path / "f.svg")
    assert [word for word in said if "/" in word] == ["n2/0", "n10/1"]
    assert said.count("first") == 1
    assert said.count("second") == 1  # its bars are below each other
    assert {"seconds", "ones: which of 2 jobs had which of 4 slots; grey: free"} <= set(said)


def test_many_slots_are_labelled_by_node(tmp_path: Path) -> None:
    allocations = tuple(
        SlotAllocation(f"n{i // 4}/{i % 4}", Seconds(0.0), Seconds(9.0)) for i in range(200)
    )

    gantt(result(job_result("a", 9.0, allocations=allocations)), tmp_path / "f.svg")

    said = words(tmp_path / "f.svg")
    assert [word for word in said if word[0] == "n"] == [f"n{node}" for node in range(0, 50, 2)]


def test_the_busy_share_of_an_interval_is_the_share_that_jobs_held() -> None:
    share = busy_share(held(), np.array([0.0, 10.0, 15.0, 25.0]))

    assert share.tolist() == [0.25, 0.5, 0.25]


def test_results_without_allocations_are_refused(tmp_path: Path) -> None:
    for draw in (gantt, lambda each, path: utilisation([each], path)):
        with pytest.raises(ResultsError, match="repeat the simulation and record allocations"):
            draw(times("ones", 1.0), tmp_path / "f.svg")


def learner(
    name: str, at: float, losses: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, int]] = (), **changes: object,
) -> JobResult:  # fmt: skip
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


def test_the_mean_loss_is_over_active_jobs_and_slots_are_grouped_by_the_order_of_losses() -> None:
    series = loss_series(result(*three()))
    cores = series.cores

    c_came = (0.1 + 0.04 + 1) / 3
    losses = [1, 1, 1, 1, *[0.55] * 5, c_came, 0.3, 0.3, *[0.5] * 4]
    assert series.times_s.tolist() == list(range(16))
    assert series.mean_loss.tolist() == pytest.approx(losses)
    assert series.window_s == (3.0, 6.0)
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


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (normalised_loss, ["fair: mean 0.700, completion 9 s", "time since the first submission (s)"]),
        (slots_by_loss, ["slaq: 0% / 43% / 57%", "share of the slots in use (%)", "highest 25%"]),
        (times_to_reductions, ["fair", "slaq", "mean time since submission (s)", "90"]),
    ],
)  # fmt: skip
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
