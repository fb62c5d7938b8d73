"""The 50 workloads of Table 2: their training, their mix in traces, and scripts that leave early."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields
from typing import Literal

import numpy as np
import pytest

from controlplane.sim.cluster import TraceError
from controlplane.sim.models import table2_constants
from controlplane.sim.models.job_model import (
    ChangeCosts,
    EarlyStops,
    JobModel,
    Placement,
    Throughput,
    TrainingModel,
    packed,
    seconds_of,
    training_s,
)
from controlplane.sim.models.table2 import (
    WORKLOADS,
    Table2Model,
    closest,
    duration_s,
    gpu_times,
    lost_epochs,
    step_parts,
    step_s,
    sync_s,
)
from controlplane.sim.models.table2_constants import ROWS, SOURCES, Row, source
from controlplane.sim.results import TraceJob
from controlplane.sim.scenario import Scenario, model_of
from controlplane.sim.traces import generators
from controlplane.sim.traces.generators import generate
from schemas.epochs import StepTimes
from schemas.ids import Seconds
from schemas.jobs import StopRule, problems

RESNET = "resnet50-imagenet-16k"
BATCHES: tuple[Literal["fixed", "elastic"], ...] = ("fixed", "elastic")


def trace_job(
    workload: str = RESNET, *, name: str = "a", slots: int = 2, batch: int = 0,
    samples: int | None = None,
) -> TraceJob:  # fmt: skip
    return TraceJob(
        name=name, at=Seconds(0.0), workload=workload, slots=slots, batch=batch, samples=samples
    )


def job_model_of(
    workload: str = RESNET, batch: Literal["fixed", "elastic"] = "elastic", *, name: str = "a",
    slots: int = 2, seed: int = 1, training_model: Table2Model | None = None,
) -> JobModel:  # fmt: skip
    checked: TrainingModel = training_model or Table2Model()
    return checked.job_model(trace_job(workload, name=name, slots=slots), batch, seed=seed)


# --- the table


def test_there_are_the_fifty_workloads_of_the_paper() -> None:
    sets = {"imagenet": 24, "cifar10": 15, "cola": 4, "mrpc": 1, "sst2": 6}

    assert Counter(name.split("-")[1] for name in WORKLOADS) == sets
    assert {RESNET, "vgg16-cifar10-35k", "bert-cola-5k", "bert-mrpc-3.6k"} <= set(WORKLOADS)


@pytest.mark.parametrize("application", ROWS)
def test_every_entry_of_the_table_has_a_source(application: str) -> None:
    said = {field.name: source(application, field.name) or "" for field in fields(Row)}

    assert [
        name for name, why in said.items() if not why.startswith(("source: ", "chosen: "))
    ] == []


def test_every_constant_has_a_source_and_every_source_a_constant() -> None:
    names = {name for name in vars(table2_constants) if name.isupper()} - {"ROWS", "SOURCES"}
    columns = {field.name for field in fields(Row)}
    keys = {name for row in ROWS for part in (row, *row.split("-")) for name in [part]}
    about_rows = {f"{key}.{column}" for key in keys for column in columns} | columns

    assert names <= set(SOURCES)
    assert set(SOURCES) <= names | about_rows


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_workload_can_be_submitted(workload: str, batch: Literal["fixed", "elastic"]) -> None:
    for slots in (1, 2, 4, 8):
        spec = job_model_of(workload, batch, slots=slots, name="übel/" + "x" * 60).spec

        assert problems(spec) == ()
        assert (spec.args, spec.family, spec.slots, spec.wanted) == (
            (workload,), workload, (1, 32), slots,
        )  # fmt: skip


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_takes_from_half_a_minute_to_two_hours(workload: str) -> None:
    durations = [duration_s(workload, slots) for slots in (1, 2, 4, 8)]

    assert min(durations) > 30.0
    assert max(durations) < 7200.0
    assert sorted(durations, reverse=True) == durations


def test_an_unknown_workload_is_refused_with_suggestions() -> None:
    with pytest.raises(TraceError, match="did you mean resnet50-imagenet-1"):
        Table2Model().job_model(trace_job("resnet50-imagenet-15k"), "fixed", seed=1)


@pytest.mark.parametrize(
    "job",
    [
        trace_job(slots=0), trace_job(slots=4, batch=3), trace_job(batch=-1),
        trace_job("gpu-time:soon"), trace_job("gpu-time:nan"), trace_job("gpu-time:-1"),
        trace_job("gpu-time:1e400"), trace_job("gpu-time:1.1e12"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused(job: TraceJob) -> None:
    with pytest.raises(TraceError):
        Table2Model().job_model(job, "fixed", seed=1)


def test_a_recorded_gpu_time_becomes_the_closest_workload() -> None:
    target = 4 * duration_s("bert-cola-7k", 4)

    assert closest(target + 1.0, 4) == "bert-cola-7k"
    assert job_model_of(f"gpu-time:{target + 1.0}", slots=4).spec.args == ("bert-cola-7k",)


@pytest.mark.parametrize("slots", [1, 2, 8, 16])
@pytest.mark.parametrize("gpu_s", [1e4, 123_456.0, 3.7e7, 1e12])
def test_a_job_longer_than_all_workloads_keeps_its_gpu_time(gpu_s: float, slots: int) -> None:
    name = f"gpu-time:{gpu_s}"
    job = job_model_of(name, "fixed", slots=slots)

    assert slots * duration_s(name, slots) == pytest.approx(gpu_s, rel=1e-4)
    assert job.epochs < 50  # the data set grows instead
    assert problems(job.spec) == ()
    assert duration_s(name, slots) == pytest.approx(
        training_s(job, packed(slots, 4), job.spec.batch_size), rel=0.3  # epochs are random
    )  # fmt: skip


def test_long_jobs_train_all_applications_equally_often() -> None:
    jobs = [job_model_of(f"gpu-time:{gpu_s}", slots=1) for gpu_s in range(10_000, 12_000)]
    counts = Counter(job.application for job in jobs)

    assert counts.keys() == ROWS.keys()
    assert min(counts.values()) > 150


def test_recorded_samples_set_the_length() -> None:
    training_model = Table2Model()
    long = training_model.job_model(trace_job(samples=16_000 * 57), "fixed", seed=1)
    short = training_model.job_model(trace_job(samples=16_000), "fixed", seed=1)

    assert (long.epochs, short.epochs) == (57, 11)


# --- speed


def test_a_ring_moves_twice_the_gradients_over_the_slowest_link() -> None:
    row = ROWS["resnet50-imagenet"]

    assert sync_s(row, (1,)) == 0.0
    assert sync_s(row, (4,)) == pytest.approx(2 * 3 / 4 * 102.4e6 / 30e9 + 6 * 10e-6)
    assert sync_s(row, (4, 4)) == pytest.approx(2 * 7 / 8 * 102.4e6 / 7e9 + 14 * 30e-6)
    assert sync_s(row, (4, 0)) == sync_s(row, (4,))


def test_a_step_overlaps_the_reduction_with_its_last_pass() -> None:
    row = ROWS["resnet50-imagenet"]
    full_pass = 0.030 + 128 / 400

    assert step_s(row, (1,), 128) == pytest.approx(full_pass)
    assert 128 / step_s(row, (1,), 128) == pytest.approx(367, rel=0.02)  # as NVIDIA measured
    assert step_s(row, (3,), 97) == step_s(row, (3,), 99)  # the slowest worker sets the pace
    assert step_s(row, (2,), 256) == pytest.approx(math.hypot(full_pass, sync_s(row, (2,))))


@pytest.mark.parametrize("apart", [(1, 1, 1, 1), (2, 2), (3, 1)])
def test_nodes_apart_are_slower_than_one(apart: Placement) -> None:
    job_model = job_model_of("bert-cola-5k")

    assert (
        job_model.throughput(apart, 64, 0).samples_per_s
        < job_model.throughput((4,), 64, 0).samples_per_s
    )


def test_a_fixed_batch_gains_little_from_many_slots_and_a_larger_one_more() -> None:
    job_model = job_model_of("resnet18-cifar10-40k")
    one, fixed, grown = (
        job_model.throughput(placement, batch, 0).samples_per_s
        for placement, batch in [((1,), 64), ((4, 4), 64), ((4, 4), 1024)]
    )

    assert fixed < 3 * one
    assert grown > 6 * one


# --- convergence


def test_progress_at_the_first_batch_is_counted_in_samples() -> None:
    job_model = job_model_of()
    took_s = 0.030 + 32 / 400

    assert job_model.throughput((1,), 32, 7) == Throughput(
        32 / took_s, 32 / took_s, took_s, parts=StepTimes(took_s, 0.0, 32, 1)
    )
    assert [job_model.epoch_ends_at(epoch) for epoch in (0, 1, 9)] == [16e3, 32e3, 160e3]
    assert job_model.epoch_samples == 16_000


def test_only_the_last_pass_of_a_step_synchronises() -> None:
    row = ROWS["resnet50-imagenet"]
    full_pass = 0.030 + 128 / 400
    last = math.hypot(full_pass, sync_s(row, (2,)))

    parts = step_parts(row, (2,), 512)

    assert (parts.pass_s, parts.sync_s) == pytest.approx((last, last - full_pass))
    assert (parts.local_batch, parts.passes) == (128, 2)
    assert seconds_of(parts) == step_s(row, (2,), 512) == pytest.approx(full_pass + last)


def test_a_large_batch_is_worth_less_and_less_so_as_training_goes_on() -> None:
    job_model = job_model_of()
    to_target = job_model.epochs - 10
    worth = [
        throughput.progress_per_s / throughput.samples_per_s
        for epoch in (0, to_target, to_target + 9)
        for throughput in [job_model.throughput((4,), 512, epoch)]
    ]

    assert worth == pytest.approx([632 / 1112, 6032 / 6512, 6032 / 6512])


def test_throughputs_do_not_depend_on_earlier_queries() -> None:
    shared = Table2Model()
    for name in ("vgg16-imagenet-10k", RESNET, "bert-cola-5k"):
        job_model_of(name, training_model=shared).throughput((4,), 64, 0)
    job_model = job_model_of(training_model=shared)

    found = job_model.throughput((4,), 64, 0)

    assert found == job_model_of().throughput((4,), 64, 0)
    assert found is job_model.throughput((4,), 64, 0)


@pytest.mark.parametrize(
    ("before", "batch", "epochs"),
    [
        (0, 4096, 0.0), (256, 300, 0.0), (256, 512, 0.0), (256, 1024, 1.0), (256, 4096, 3.0),
        (4096, 256, 0.0),
    ],
)  # fmt: skip
def test_a_jump_beyond_a_doubling_costs_epochs(before: int, batch: int, epochs: float) -> None:
    assert lost_epochs(before, batch) == epochs
    assert job_model_of().lost_progress(before, batch, 5) == epochs * 16_000


def test_the_remaining_steps_are_those_at_the_submitted_batch() -> None:
    job_model = job_model_of(batch="fixed", slots=4)
    left = 16_000 * job_model.epochs - 1000.0

    assert job_model.remaining_steps(0, 1000.0) == pytest.approx(
        left / 256 * (600 + 256) / (600 + 32)
    )
    assert job_model.remaining_steps(job_model.epochs, 1e9) == 0.0


def test_jobs_differ_in_length_by_about_a_tenth_and_only_by_name_and_seed() -> None:
    lengths = [job_model_of(name=f"job-{number}").epochs - 10 for number in range(300)]

    assert np.mean(lengths) == pytest.approx(20, rel=0.03)
    assert np.std(lengths) == pytest.approx(2.0, rel=0.25)
    assert job_model_of(name="job-7", batch="fixed").epochs - 10 == lengths[7]
    assert [job_model_of(name=f"job-{n}", seed=2).epochs - 10 for n in range(300)] != lengths


# --- what is reported


@pytest.mark.parametrize("workload", ["alexnet-imagenet-10k", "bert-sst2-10k"])
@pytest.mark.parametrize("erratic", [False, True])
def test_ten_reports_above_the_target_end_the_job(workload: str, *, erratic: bool) -> None:
    for seed in range(20):
        job_model = job_model_of(workload, seed=seed, training_model=Table2Model(erratic=erratic))
        stop = job_model.spec.stop
        assert stop is not None
        assert stop.at_least is not None
        above = [
            job_model.epoch_metrics(epoch, 64).metrics["accuracy"] >= stop.at_least
            for epoch in range(1, job_model.epochs + 1)
        ]

        assert above == [False] * (job_model.epochs - 10) + [True] * 10


def test_users_state_a_target_or_the_epochs() -> None:
    stated = job_model_of(training_model=Table2Model(stated=True))

    assert job_model_of().spec.stop == StopRule(metric="accuracy", at_least=0.75, consecutive=10)
    assert stated.spec.stop == StopRule(epochs=stated.epochs)


def test_a_loss_falls_smoothly_unless_it_is_erratic() -> None:
    def roughness(training_model: Table2Model) -> float:
        job_model = job_model_of(training_model=training_model)
        losses = [
            job_model.epoch_metrics(epoch, 64).train_loss or 0.0
            for epoch in range(job_model.epochs + 1)
        ]
        assert losses[0] > 2 * losses[-1] > 0.0
        return float(np.mean(np.abs(np.diff(np.log(losses), n=2))))

    assert roughness(Table2Model()) < 0.15
    assert roughness(Table2Model(erratic=True)) > 0.2


def test_erratic_losses_have_plateaus_and_others_have_none() -> None:
    def drop(model: Table2Model) -> list[float]:
        jobs = [job_model_of(name=f"job-{number}", training_model=model) for number in range(300)]
        losses = [
            [each.epoch_metrics(k, 64).train_loss or 0.0 for each in jobs] for k in (5, 9, 10)
        ]
        middle = np.median(losses, axis=1)
        return [middle[1] / middle[0], middle[2] / middle[1]]

    assert drop(Table2Model(erratic=True)) == pytest.approx([1.0, 0.65], abs=0.06)
    assert drop(Table2Model()) == pytest.approx([0.69, 0.94], abs=0.06)


def test_the_reported_noise_scale_grows_tenfold_and_has_an_error() -> None:
    job_model = job_model_of(name="b")
    epochs = range(job_model.epochs)
    scales = [job_model.epoch_metrics(epoch + 1, 64).noise_scale or 0.0 for epoch in epochs]
    truth = [600 * 10 ** min(1.0, epoch / (job_model.epochs - 10)) for epoch in epochs]
    errors = np.log(np.array(scales) / np.array(truth))

    assert 0.05 < np.std(errors) < 0.2
    assert abs(np.mean(errors)) < 0.08


def test_the_reported_noise_scale_is_that_of_the_finished_epoch() -> None:
    job_models = [job_model_of(name=f"job-{number}") for number in range(300)]
    scales = [each.epoch_metrics(1, 64).noise_scale or 0.0 for each in job_models]

    assert abs(np.mean(np.log(np.array(scales) / 600.0))) < 0.02
    for epoch in range(job_models[0].epochs):  # telemetry has the scale of the coming report
        told = job_models[0].epoch_metrics(epoch + 1, 64).noise_scale
        assert job_models[0].noise_scale(epoch, 512) == told


def test_the_throughput_depends_on_the_true_noise_scale_not_on_the_measured_one() -> None:
    job_model = job_model_of()
    first = job_model.spec.batch_size

    for epoch in (0, 7, job_model.epochs):
        phi = 600 * 10 ** min(1.0, epoch / (job_model.epochs - 10))
        throughput = job_model.throughput((4,), 512, epoch)
        worth = throughput.progress_per_s / throughput.samples_per_s
        assert worth == pytest.approx((phi + first) / (phi + 512))
        assert job_model.noise_scale(epoch, 512) != pytest.approx(phi, rel=1e-3)


def test_reports_do_not_depend_on_the_order_of_queries() -> None:
    forward = [job_model_of().epoch_metrics(epoch, 64) for epoch in range(30)]
    job_model = job_model_of()

    assert [job_model.epoch_metrics(epoch, 64) for epoch in reversed(range(30))] == forward[::-1]


# --- what users submit, and what changes cost


def test_a_fixed_batch_is_the_tuned_batch_and_an_elastic_batch_begins_small() -> None:
    fixed = job_model_of(batch="fixed", slots=4).spec
    own = Table2Model().job_model(trace_job(slots=4, batch=100), "fixed", seed=1).spec
    elastic = job_model_of(batch="elastic", slots=4).spec

    assert (fixed.batch_size, fixed.batch_limit, fixed.local_limit) == (256, 256, 256)
    assert (own.batch_size, own.batch_limit, own.local_limit) == (100, 100, 128)
    assert (elastic.batch_size, elastic.batch_limit, elastic.local_limit) == (32, 1024, 128)


def test_a_restart_takes_longer_for_larger_models() -> None:
    assert job_model_of("googlenet-cifar10-20k").costs == ChangeCosts(20.0, 20.0, 15.0, 1.0)
    assert job_model_of("vgg16-imagenet-10k").costs == ChangeCosts(20.0, 40.0, 15.0, 1.0)
    assert 20.0 < job_model_of("bert-cola-5k").costs.restart_s < 40.0


# --- traces


def test_a_trace_depends_on_the_seed_only() -> None:
    one, same, other = (generate(jobs=50, seed=seed) for seed in (1, 1, 2))

    assert one == same
    assert one.jobs != other.jobs


def test_gpu_times_are_replaced_by_the_closest_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "sample", lambda _, count: [1500.0] * count)

    trace = generate(jobs=40, seed=3)

    assert [job.workload for job in trace.jobs] == [
        closest(1500.0, job.slots) for job in trace.jobs
    ]


def test_the_heavy_mix_is_the_mix_of_philly_with_its_longest_jobs() -> None:
    philly, heavy = (generate(jobs=2000, seed=3, mix=mix) for mix in ("philly", "heavy"))
    longest = {slots: max(slots * duration_s(name, slots) for name in WORKLOADS)
               for slots in (1, 2, 4, 8)}  # fmt: skip
    pairs = list(zip(gpu_times(philly.jobs), gpu_times(heavy.jobs), philly.jobs, strict=True))

    assert [(job.name, job.at, job.slots) for job in philly.jobs] == [
        (job.name, job.at, job.slots) for job in heavy.jobs
    ]
    cut = [(short, long) for short, long, job in pairs if long > longest[job.slots]]
    assert all(short == long for short, long, job in pairs if long <= longest[job.slots])
    assert len(cut) / len(pairs) == pytest.approx(0.25, abs=0.05)
    assert sum(long for _, long in cut) > 20.0 * sum(short for short, _ in cut)


def test_users_ask_for_few_slots_more_often_than_for_many() -> None:
    trace = generate(jobs=2000, seed=1, mix="uniform")
    counts = Counter(job.slots for job in trace.jobs)

    assert [counts[slots] / 2000 for slots in (1, 2, 4, 8)] == pytest.approx(
        [0.4, 0.25, 0.25, 0.1], abs=0.03
    )
    assert len({job.workload for job in trace.jobs}) == 50


def test_crashes_and_cancellations_have_their_shares_and_change_nothing_else() -> None:
    calm = generate(jobs=1000, seed=1, mix="uniform")
    rough = generate(jobs=1000, seed=1, mix="uniform", crash_share=0.2, cancel_share=0.1)
    crashed = [job.crashes_at for job in rough.jobs if job.crashes_at is not None]
    cancelled = [job for job in rough.jobs if job.cancelled_after_s is not None]

    assert {(job.crashes_at, job.cancelled_after_s) for job in calm.jobs} == {(None, None)}
    assert [(j.at, j.workload, j.slots) for j in rough.jobs] == [
        (j.at, j.workload, j.slots) for j in calm.jobs
    ]
    assert (len(crashed) / 1000, len(cancelled) / 1000) == pytest.approx((0.2, 0.1), abs=0.03)
    assert all(0.0 < share < 1.0 for share in crashed)


def test_jobs_on_whole_nodes_are_packed() -> None:
    assert [packed(slots, 4) for slots in (1, 4, 6, 8)] == [(1,), (4,), (4, 2), (4, 4)]


WHOLE = Table2Model()


def jobs(many: int = 60) -> list[TraceJob]:
    return [
        TraceJob(name=f"j-{n}", at=Seconds(0.0), workload="resnet18-cifar10-20k", slots=1)
        for n in range(many)
    ]


def lengths(share: float, seed: int = 5) -> list[tuple[int, int]]:
    """Epochs of each job, and of the whole job."""
    models = (EarlyStops(WHOLE, share), WHOLE)
    return [
        tuple(model.job_model(job, "elastic", seed=seed).epochs for model in models)  # type: ignore[misc]
        for job in jobs()
    ]


def test_the_share_of_jobs_leaves_early_and_the_others_train_to_their_end() -> None:
    found = lengths(0.4)

    assert 15 <= sum(here < whole for here, whole in found) <= 33
    assert all(1 <= here <= whole for here, whole in found)
    assert all(here == whole for here, whole in lengths(0.0))
    assert sum(here < whole for here, whole in lengths(1.0)) > 50
    assert lengths(0.5, seed=6) != lengths(0.5, seed=5)


def test_the_length_is_the_same_for_every_policy_and_not_stated() -> None:
    early, job = EarlyStops(WHOLE, 1.0), jobs()[3]
    fixed, elastic = (early.job_model(job, batch, seed=5) for batch in ("fixed", "elastic"))  # type: ignore[arg-type]

    assert fixed.epochs == elastic.epochs
    assert elastic.spec == WHOLE.job_model(job, "elastic", seed=5).spec


def test_a_scenario_sets_the_share() -> None:
    assert isinstance(model_of(Scenario(early_share=0.25)), EarlyStops)
    assert isinstance(model_of(Scenario()), Table2Model)


@pytest.mark.parametrize(
    ("share", "physics", "said"),
    [(1.5, "table2", "not a number"), (-1.0, "table2", "not a number"), (0.5, "curves", "has no")],
)
def test_an_impossible_share_is_refused(share: float, physics: str, said: str) -> None:
    with pytest.raises(TraceError, match=said) as refused:
        Scenario(early_share=share, physics=physics)  # type: ignore[arg-type]

    assert refused.value.field == "early_share"
