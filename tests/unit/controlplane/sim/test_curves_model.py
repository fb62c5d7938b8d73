"""Recorded loss curves, jobs that replay them, and their recorder."""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.sim.analysis.bounds import UNTRIED_MARGIN, lower_bound_s
from controlplane.sim.cluster import NodeGroup, TraceError
from controlplane.sim.models.curves import (
    CurvesModel,
    LossCurve,
    RecordedCurves,
    decode,
    encode,
    shipped_curves,
)
from controlplane.sim.models.job_model import packed
from controlplane.sim.models.recorded_curves import descend, hinge, least_squares, minimise, softmax
from controlplane.sim.results import LossLeft, SizeChange, TraceJob
from controlplane.sim.run import simulate
from controlplane.sim.scenario import SLAQ, Scenario, trace_of
from schemas.ids import Seconds
from schemas.jobs import StopRule, problems
from tests.support.simulations import FREE, ToyModel, job

FAMILIES: Final = {  # SLAQ section 3, and L-BFGS, which its section 2 names
    "linear-regression", "logistic-regression", "logistic-lbfgs", "svm-linear", "svm-polynomial",
    "k-means", "boosted-classification", "boosted-regression", "mlp", "lda",
}  # fmt: skip
SHIPPED: Final = shipped_curves().by_name()


def curve(*losses: float, name: str = "c") -> LossCurve:
    return LossCurve(
        name=name, family="f", convergence="linear", data="d", settings={}, losses=losses
    )


def recorded(*curves: LossCurve) -> RecordedCurves:
    return RecordedCurves(command="x", date="2026-01-02", seed=0, versions={}, curves=curves)


def submission(workload: str, slots: int = 4, name: str = "a") -> TraceJob:
    return TraceJob(name=name, at=Seconds(0.0), workload=workload, slots=slots)


# --- the file


def test_the_shipped_curves_have_every_family_and_fall() -> None:
    kept = shipped_curves()

    assert {c.family for c in kept.curves} == FAMILIES
    assert len(kept.curves) >= 40
    assert kept.command == "ones sim record-curves FILE --seed 0"
    assert kept.versions.keys() == {"python", "numpy", "scipy", "scikit-learn"}
    for each in kept.curves:
        assert all(math.isfinite(loss) for loss in each.losses), each.name
        assert each.iterations >= 15, each.name
        assert each.normalised(0) == 1.0
        assert each.normalised(each.iterations) < 0.02, f"{each.name} ends far above its least"
        shares = [each.normalised(k) for k in range(each.iterations + 1)]
        assert max(shares) < 1.2, each.name
        early = next(k for k, share in enumerate(shares) if share <= 0.2)
        assert early <= each.iterations * 0.5, f"{each.name}: the paper's curves fall early"


def test_a_written_file_of_curves_can_be_read() -> None:
    kept = recorded(curve(3.0, 2.0, name="a"), curve(1.0, 0.5, 0.25, name="b"))

    text = encode(kept)

    assert decode(text, "f") == kept
    assert len(text.splitlines()) == 4, "each curve has a line of its own"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"[]", "f: Expected `object`"),
        (b'{"command": "\xff"}', "f: .*(can.t decode byte 0xff|Invalid UTF-8)"),
        (encode(recorded()), "curves need names"),
        (encode(recorded(curve(2.0, 1.0), curve(2.0, 1.0))), "each its own"),
        (encode(recorded(curve(2.0))), "'c' lowers no loss"),
        (encode(recorded(curve(2.0, 3.0))), "'c' lowers no loss"),
        (encode(recorded(curve(2.0, 1.0))).replace(b"1.0", b"null"), r"\$.curves\[0\].losses\[1\]"),
    ],
)
def test_a_file_that_cannot_be_replayed_is_refused(text: bytes, told: str) -> None:
    with pytest.raises(TraceError, match=told) as caught:
        decode(text, "f")
    assert caught.value.hint


def test_the_normalised_loss_is_one_at_first_and_zero_at_the_minimum() -> None:
    falls = curve(5.0, 3.0, 1.0, 2.0)

    assert [falls.normalised(k) for k in range(5)] == [1.0, 0.5, 0.0, 0.25, 0.25]


# --- jobs


@given(
    name=st.sampled_from(sorted(SHIPPED)), slots=st.integers(1, 128), more=st.integers(1, 128),
    scaling=st.floats(0.1, 1.0), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_a_job_is_submittable_and_more_cores_are_faster_by_the_scaling(
    name: str, slots: int, more: int, scaling: float, seed: int
) -> None:
    model = CurvesModel(SHIPPED, scaling=scaling).job_model(
        submission(name, slots), "fixed", seed=seed
    )
    batch = model.spec.batch_size

    few = model.throughput(packed(slots, 32), batch, 0)
    many = model.throughput(packed(slots + more, 32), batch, model.epochs - 1)

    assert problems(model.spec) == ()
    assert model.application == model.spec.family == SHIPPED[name].family
    assert (model.spec.batch_limit, model.spec.wanted) == (batch, slots)
    assert many.progress_per_s / few.progress_per_s == pytest.approx(
        ((slots + more) / slots) ** scaling
    )
    assert few.progress_per_s * few.step_s == pytest.approx(batch), "a step is an iteration"
    assert model.epoch_ends_at(model.epochs - 1) == model.epochs * model.epoch_samples


@given(name=st.sampled_from(sorted(SHIPPED)), epoch=st.integers(0, 300))
def test_an_epoch_reports_only_the_loss_of_its_iteration(name: str, epoch: int) -> None:
    model = CurvesModel(SHIPPED).job_model(submission(name), "elastic", seed=0)
    losses = SHIPPED[name].losses

    said = model.epoch_metrics(epoch, model.spec.batch_size)

    assert (said.train_loss, said.metrics, said.noise_scale) == (
        losses[min(epoch, len(losses) - 1)], {}, None,
    )  # fmt: skip
    assert model.epochs == len(losses) - 1
    assert model.loss_left(0) == 1.0


def test_the_work_of_jobs_has_the_given_mean() -> None:
    models = CurvesModel(SHIPPED, work_core_s=50.0)
    jobs = [
        models.job_model(submission(min(SHIPPED), name=str(number)), "fixed", seed=1)
        for number in range(2000)
    ]
    alone = [job.epochs * job.throughput((1,), job.spec.batch_size, 0).step_s for job in jobs]

    assert np.mean(alone) == pytest.approx(50.0, rel=0.05)
    assert np.std(np.log(alone)) == pytest.approx(0.8, rel=0.05)


def test_stated_work_is_the_number_of_iterations() -> None:
    name = min(SHIPPED)
    stops = [
        CurvesModel(SHIPPED, stated=stated).job_model(submission(name), "fixed", seed=0).spec.stop
        for stated in (True, False)
    ]

    assert stops == [StopRule(epochs=SHIPPED[name].iterations), None]


@pytest.mark.parametrize(
    ("workload", "slots", "told"),
    [("bert", 4, "'bert' is not a recorded curve"), (min(SHIPPED), 0, "0 cores")],
)
def test_an_impossible_job_is_refused(workload: str, slots: int, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        CurvesModel(SHIPPED).job_model(submission(workload, slots), "fixed", seed=0)


# --- traces and runs


def test_the_default_workload_is_that_of_the_paper() -> None:
    trace = trace_of(SLAQ, 3)

    assert (SLAQ.jobs, SLAQ.interval_s, SLAQ.slots, SLAQ.widest) == (160, 15.0, 640, 32)
    assert len(trace.jobs) == 160
    assert {SHIPPED[job.workload].family for job in trace.jobs} == FAMILIES
    assert trace.jobs[-1].at == pytest.approx(160 * 15.0, rel=0.25)
    assert trace_of(SLAQ, 3) == trace
    assert trace_of(SLAQ, 4) != trace


SMALL: Final = Scenario(
    physics="curves", jobs=4, interval_s=5.0, warm_up=0.0, work_core_s=100.0,
    nodes=(NodeGroup(count=2, slots=4, kind="cpu"),), crash_share=0.5,
)  # fmt: skip


def test_every_job_replays_its_curve_and_its_losses_are_kept() -> None:
    found = simulate("fair", SMALL, 7)

    for each, asked in zip(found.jobs, trace_of(SMALL, 7).jobs, strict=True):
        replayed = SHIPPED[asked.workload]
        assert each.state == "succeeded"
        assert [left.share for left in each.losses] == [
            replayed.normalised(k) for k in range(replayed.iterations + 1)
        ]
        times = [left.at for left in each.losses]
        assert times == sorted(times)
        assert (times[0], times[-1]) == (each.submitted_at, pytest.approx(each.ended_at, abs=0.1))
        assert each.sizes[-1].slots == 0
        held = sum(
            (after.at - size.at) * size.slots
            for size, after in zip(each.sizes, each.sizes[1:], strict=False)
        )
        assert held == pytest.approx(each.slot_s)


def test_losses_are_kept_only_if_the_model_has_them() -> None:
    trace = msgspec.structs.replace(trace_of(SMALL, 0), jobs=(job("a", 0.0, 1),))
    at_once = msgspec.structs.replace(SMALL, latency_s=0.0)
    lossy, plain = (
        simulate("fifo", at_once, 0, trace=trace, model=toy).jobs[0]
        for toy in (ToyModel(costs=FREE, loss_epochs=2), ToyModel(costs=FREE))
    )

    assert plain.losses == plain.sizes == ()
    assert lossy.losses == tuple(
        LossLeft(Seconds(at), share)
        for at, share in ((0.0, 1.0), (10.0, 0.5), (20.0, 0.0), (30.0, 0.0), (40.0, 0.0))
    )
    assert lossy.sizes == (SizeChange(Seconds(0.0), 1), SizeChange(Seconds(40.0), 0))


def test_the_bound_distinguishes_jobs_of_one_curve() -> None:
    model, name = CurvesModel(SHIPPED), min(SHIPPED)
    far = [
        msgspec.structs.replace(submission(name, name=each), at=Seconds(at))
        for each, at in (("a", 0.0), ("b", 1e6))
    ]
    alone_s = [
        truth.epochs * truth.throughput((120, 8), truth.spec.batch_size, 0).step_s
        for truth in (model.job_model(each, "fixed", seed=0) for each in far)
    ]

    bound_s = lower_bound_s(far, model, slots=128, widest=120, fastest=1.0, seed=0)

    assert alone_s[0] != pytest.approx(alone_s[1], rel=0.01)
    assert bound_s == pytest.approx(sum(alone_s) / 2 * UNTRIED_MARGIN)


# --- trainings


def test_descents_reach_the_minimum() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 3))
    targets = features @ np.array([[1.0], [-2.0], [0.5]])
    signs = (targets > 0).astype(float)

    square = least_squares(features, targets)
    assert descend(square, 300, 1.0)[-1] == pytest.approx(0.0, abs=1e-12)
    assert minimise(square, 50)[-1] == pytest.approx(0.0, abs=1e-6)
    margins = descend(hinge(features, signs), 500, 0.5, "root")
    assert (margins[0], margins[-1] < 0.2) == (1.0, True)
    logistic = softmax(features, np.hstack([1 - signs, signs]), 1e-2)
    slow, quick = descend(logistic, 3000, 1.0), minimise(logistic, 100)
    assert slow[0] == quick[0] == pytest.approx(math.log(2.0))
    assert slow[-1] == pytest.approx(quick[-1], abs=1e-6)
    assert len(quick) < 60


@given(seed=st.integers(0, 2**32))
def test_gradients_match_their_losses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features, labels = rng.normal(size=(6, 3)), np.eye(2)[rng.integers(2, size=6)]
    weights, aside = rng.normal(size=(3, 2)), 1e-6 * rng.normal(size=(3, 2))
    for loss in (least_squares, softmax, hinge):
        f = loss(features, labels, 0.1).value_and_gradient
        rise = f(weights + aside)[0] - f(weights - aside)[0]
        assert rise == pytest.approx(
            2.0 * float((f(weights)[1] * aside).sum()), rel=1e-3, abs=1e-10
        )
