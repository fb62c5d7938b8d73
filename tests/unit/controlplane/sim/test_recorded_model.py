"""Training model of a recording: times of steps, and replays of clusters."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.sim.analysis.summary import summary
from controlplane.sim.cluster import NodeGroup, TraceError
from controlplane.sim.models.job_model import (
    ChangeCosts,
    EpochMetrics,
    JobModel,
    Throughput,
    TrainingModel,
)
from controlplane.sim.models.recorded import RecordedModel
from controlplane.sim.models.recording import (
    BATCH_POWER,
    SLOTS_POWER,
    ChangeTimes,
    Epoch,
    EpochSpeed,
    Family,
    FamilyStepTimes,
    Recording,
    StepTime,
)
from controlplane.sim.results import SimulationResult
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from controlplane.sim.traces.journal_recording import recording_from_journal
from controlplane.sim.traces.trace_layouts import STEPS_PER_S
from schemas.codec import encode
from schemas.epochs import StepTimes
from schemas.jobs import StopRule
from tests.support.recorded_history import History, write
from tests.support.simulations import ONE_SLOT, a_job, recording

COSTS = ChangeCosts(start_s=25.0, restart_s=10.0, prepare_s=20.0, switch_s=1.0)


def job_model_of(found: Recording, **options: Any) -> JobModel:
    """The first job's."""
    training_model: TrainingModel = RecordedModel(found, COSTS, **options)
    return training_model.job_model(found.as_trace().jobs[0], "elastic", seed=1)


def values(throughput: Throughput) -> list[float]:
    return [throughput.samples_per_s, throughput.progress_per_s, throughput.step_s]


def test_a_measured_job_is_as_measured() -> None:
    job_model = job_model_of(recording(a_job()))

    assert values(job_model.throughput((1,), 64, 0)) == pytest.approx([640.0, 640.0, 0.1])
    assert (job_model.application, job_model.epochs, job_model.epoch_samples) == ("m", 4, 1000)
    assert [job_model.epoch_ends_at(epoch) for epoch in range(5)] == [1000, 2000, 3000, 4000, 4000]
    assert job_model.costs == COSTS


def test_unmeasured_speeds_are_marked_as_extrapolated() -> None:
    speeds = (ONE_SLOT, EpochSpeed(1, 2, 128, 1000.0))
    job_model = job_model_of(recording(a_job(epochs=()), speeds=speeds))

    measured, beyond = job_model.throughput((2,), 128, 0), job_model.throughput((2, 2), 256, 0)

    assert measured.step_s == pytest.approx(0.128)
    assert not measured.extrapolated
    # From 1 slot to 2 a step took 1.28 times as long; so it does from 2 to 4.
    assert beyond.step_s == pytest.approx(0.128 * 1.28)
    assert beyond.extrapolated
    assert beyond.times(0.5).extrapolated


def test_a_result_has_the_extrapolated_share_of_training() -> None:
    both = (ONE_SLOT, EpochSpeed(1, 2, 64, 1000.0))
    wider = msgspec.structs.replace(a_job().spec, slots_wanted=2)
    known, unknown = a_job(), a_job(name="b-2", at=500.0, spec=wider)
    what = Scenario(nodes=recording().nodes, warm_up=0.0)

    def shares(found: Recording) -> tuple[float, dict[str, float]]:
        model = RecordedModel(found, COSTS)
        result = simulate("fifo", what, 1, trace=found.as_trace(), model=model)
        by_job = {job.job: job.extrapolated_s / job.trained_s for job in result.jobs}
        return summary(result)["extrapolated_share"], by_job

    assert shares(recording(known, unknown, speeds=both)) == (0.0, {"a-1": 0.0, "b-2": 0.0})
    share, by_job = shares(recording(known, unknown))
    assert by_job == {"a-1": 0.0, "b-2": 1.0}
    assert 0.0 < share < 0.5  # it trains less long on its two slots


def test_a_slow_job_stays_slow_and_pauses_between_epochs_stay() -> None:
    slow = tuple(Epoch(n, 64, None, None, EpochSpeed(1, 1, 64, 320.0)) for n in range(1, 20))
    pausing = tuple(Epoch(n, 64, None, None, ONE_SLOT, 2 * 1000 / 640) for n in (1, 2))

    one, other = (
        job_model_of(recording(a_job(epochs=epochs))).throughput((1,), 64, 0)
        for epochs in (slow, pausing)
    )

    # 19 epochs of twice the time, and one assumed at the usual speed
    assert one.step_s == pytest.approx(0.1 * (19 * 2 + 1) / 20)
    assert values(other)[:2] == pytest.approx([640.0, 320.0])


def test_the_value_of_a_sample_follows_the_noise_scale() -> None:
    epochs = tuple(Epoch(n, 64, phi, None) for n, phi in ((1, 64.0), (2, None), (3, 1024.0)))
    job_model = job_model_of(recording(a_job(epochs=epochs, samples=3000)))

    worths = [
        job_model.throughput((1,), 192, epoch).progress_per_s
        / job_model.throughput((1,), 192, epoch).samples_per_s
        for epoch in range(3)
    ]

    # phi in the middle of each epoch: 64 up to the end of the first one, from there to 1024.
    phis = [64.0, 64.0 * 16**0.25, 64.0 * 16**0.75]
    assert worths == pytest.approx([(phi + 64) / (phi + 192) for phi in phis])
    assert [job_model.noise_scale(epoch, 192) for epoch in range(3)] == pytest.approx(phis)
    assert [job_model.epoch_metrics(n + 1, 64).noise_scale for n in range(3)] == pytest.approx(phis)


def test_a_job_without_a_noise_scale_has_the_mean_of_its_family() -> None:
    told = a_job(name="b-2", epochs=(Epoch(1, 64, 16.0, None), Epoch(2, 64, 64.0, None)))
    of_family, unknown = job_model_of(recording(a_job(), told)), job_model_of(recording(a_job()))
    throughput = unknown.throughput((1,), 512, 0)

    assert of_family.epoch_metrics(1, 64).noise_scale == pytest.approx(32.0)
    assert unknown.epoch_metrics(1, 64) == EpochMetrics(None, {}, None)
    assert throughput.progress_per_s == pytest.approx(throughput.samples_per_s)


def test_work_is_the_value_of_the_samples_at_their_batches() -> None:
    epochs = tuple(Epoch(n, batch, 64.0, None) for n, batch in ((1, 64), (2, 192), (3, 192)))
    found = recording(a_job(epochs=epochs, samples=3000))

    learnt = job_model_of(found)

    assert learnt.epochs == 2
    assert learnt.epoch_ends_at(1) == pytest.approx(1000 * (1 + 0.5 + 0.5))


def test_policies_know_stated_lengths() -> None:
    metric = StopRule(metric="accuracy", at_least=0.9)
    measured = msgspec.structs.replace(a_job().spec, stop=metric)

    assert job_model_of(recording(a_job(spec=measured)), stated=True).spec.stop == metric
    assert job_model_of(recording(a_job())).spec.stop is None
    assert job_model_of(recording(a_job())).spec.retries == 2
    assert job_model_of(recording(a_job(ended="failed"))).spec.retries == 0
    assert job_model_of(recording(a_job()), stated=True).spec.stop == StopRule(epochs=4)
    assert job_model_of(recording(a_job(stated_samples=None)), stated=True).spec.stop is None


@pytest.mark.parametrize(
    ("stated", "finished", "furthest", "epochs"),
    [(9000, (), 0, 9), (None, (6000, 8000), 0, 7), (None, (), 5000, 5), (None, (), 0, 4)],
)
def test_a_cancelled_job_would_have_continued_like_its_relatives(
    stated: int | None, finished: tuple[int, ...], furthest: int, epochs: int
) -> None:
    job = a_job(ended="cancelled", samples=2000, stated_samples=stated)

    assert job_model_of(recording(job, finished=finished, furthest=furthest)).epochs == epochs


def test_costs_are_those_of_the_family_then_of_the_cluster_then_as_given() -> None:
    found = recording(a_job(), took=ChangeTimes(start_s=3.0, join_s=9.0, switch_s=0.5))
    found = msgspec.structs.replace(found, took=ChangeTimes(start_s=4.0, restart_s=2.0))

    model = RecordedModel(found, COSTS)
    assert model.costs == ChangeCosts(4.0, 2.0, 20.0, 1.0)  # policies are told these
    assert job_model_of(found).costs == ChangeCosts(3.0, 2.0, 8.5, 0.5)


@pytest.mark.parametrize(
    ("took", "expected"),
    [
        (ChangeTimes(), (20.0, 30.0)), (ChangeTimes(switch_s=2.0), (20.0, 2.0)),
        (ChangeTimes(switch_s=50.0), (20.0, 30.0)), (ChangeTimes(join_s=9.0), (0.0, 9.0)),
        (ChangeTimes(join_s=40.0), (10.0, 30.0)),
        (ChangeTimes(join_s=9.0, switch_s=2.0), (7.0, 2.0)),
        (ChangeTimes(join_s=1.5, switch_s=2.0), (0.0, 1.5)),
        (ChangeTimes(join_s=9.0, switch_s=2.0, pause_s=0.5), (8.5, 0.5)),
        (ChangeTimes(pause_s=0.5), (20.0, 0.5)),
    ],
)  # fmt: skip
def test_recorded_changes_bound_pauses(took: ChangeTimes, expected: tuple[float, float]) -> None:
    found = msgspec.structs.replace(recording(a_job()), took=took)
    given = ChangeCosts(start_s=25.0, restart_s=10.0, prepare_s=20.0, switch_s=30.0)
    costs = RecordedModel(found, given).job_model(found.as_trace().jobs[0], "elastic", seed=1).costs

    assert (costs.prepare_s, costs.switch_s) == expected


@pytest.mark.parametrize(
    ("took", "restart_s"),
    [(ChangeTimes(), 10.0), (ChangeTimes(start_s=4.0), 4.0),
     (ChangeTimes(start_s=4.0, restart_s=2.0), 2.0)],
    ids=["given", "like a first start", "measured"],
)  # fmt: skip
def test_a_restart_that_was_not_measured_takes_as_long_as_a_first_start(
    took: ChangeTimes, restart_s: float
) -> None:
    found = msgspec.structs.replace(recording(a_job()), took=took)

    assert RecordedModel(found, COSTS).costs.restart_s == restart_s


def test_the_loss_is_that_of_the_same_progress() -> None:
    epochs = (Epoch(1, 64, None, 4.0), Epoch(2, 64, None, None), Epoch(3, 64, None, 2.0))
    job_model = job_model_of(recording(a_job(epochs=epochs, samples=3000)))

    losses = [job_model.epoch_metrics(epoch, 64).train_loss for epoch in (1, 2, 3)]
    assert losses == pytest.approx([4.0, 3.0, 2.0])


def test_jobs_that_cannot_be_replayed_are_refused_with_a_remedy() -> None:
    found = recording(a_job())
    (job,) = found.as_trace().jobs
    stranger = msgspec.structs.replace(job, workload="cifar10")
    unmeasured = RecordedModel(recording(a_job(), speeds=()), COSTS)
    endless = recording(a_job(samples=2**53, epoch_samples=1))

    with pytest.raises(
        TraceError, match=r"job a-1: 'cifar10' is not a job of the recording; simul"
    ):
        RecordedModel(found, COSTS).job_model(stranger, "fixed", seed=1)
    with pytest.raises(TraceError, match=r"no whole epoch of family 'm' was measured; leave the j"):
        unmeasured.job_model(job, "fixed", seed=1)
    with pytest.raises(TraceError, match=r"9007199254740992 epochs of 1 samples; correct its sam"):
        job_model_of(endless)


def cluster_with_journal(policy: str, what: Scenario, seed: int, journal: Path) -> SimulationResult:
    """A cluster that writes down what happens to it."""
    history: History = []
    result = simulate(
        policy, what, seed, record=lambda now, event, _: history.append((now, encode(event)))
    )
    write(journal, history)
    return result


def average_s(result: SimulationResult) -> float:
    found = [job.jct_s for job in result.jobs if job.jct_s is not None]
    return math.fsum(found) / len(found)


# Measured: 0.01 to 0.02; a search decides otherwise on small differences: 0.06 in most seeds, 0.19
# in one (5), where families that it had not met yet are believed to scale as others did.
@pytest.mark.parametrize(
    ("policy", "within"),
    [("fifo", 0.03), ("tiresias", 0.03), pytest.param("ones", 0.15, marks=pytest.mark.slow)],
)
def test_a_replay_takes_as_long_as_the_run(policy: str, within: float, tmp_path: Path) -> None:
    what = Scenario(
        nodes=(NodeGroup(count=4, slots=4),), jobs=12, interval_s=60.0, warm_up=0.0, knowledge="L3"
    )
    was = cluster_with_journal(policy, what, 6, tmp_path / "journal.sqlite")

    found = recording_from_journal(tmp_path / "journal.sqlite")
    model = RecordedModel(found, COSTS, stated=True)
    again = simulate(policy, what, 6, trace=found.as_trace(), model=model)

    assert (found.left_out, found.nodes) == ({}, what.nodes)
    assert [job.state for job in again.jobs] == [job.state for job in was.jobs]
    assert average_s(again) == pytest.approx(average_s(was), rel=within)


def test_cancelled_jobs_are_cancelled_again(tmp_path: Path) -> None:
    what = Scenario(
        nodes=(NodeGroup(count=2, slots=4),), jobs=12, interval_s=60.0, warm_up=0.0,
        cancel_share=0.3,
    )  # fmt: skip
    was = cluster_with_journal("fifo", what, 5, tmp_path / "journal.sqlite")

    found = recording_from_journal(tmp_path / "journal.sqlite")
    model = RecordedModel(found, COSTS)
    again = simulate("fifo", what, 5, trace=found.as_trace(), model=model)

    ended = {place: job.state for place, job in enumerate(was.jobs)}
    kept = {int(job.name.rpartition("-")[2]) - 1: job for job in found.jobs}
    assert [job.state for job in again.jobs] == [ended[place] for place in kept]
    assert {"succeeded", "cancelled"} == {job.state for job in again.jobs}


def test_a_failed_job_fails_again_at_the_end_of_its_work() -> None:
    found = recording(a_job(ended="failed", samples=6400))
    what, model = Scenario(nodes=found.nodes, warm_up=0.0), RecordedModel(found, COSTS)

    result = simulate("fifo", what, 1, trace=found.as_trace(), model=model)

    (job,) = result.jobs
    assert job.state == "failed"
    assert job.jct_s == pytest.approx(COSTS.start_s + 10.0, abs=0.2)  # and the policy's latency


def family(*speeds: EpochSpeed | tuple[int, int, int, float]) -> FamilyStepTimes:
    """A family with these speeds; as a tuple: nodes, slots, local batch, seconds of a step."""
    measured = tuple(
        EpochSpeed(one[0], one[1], one[1] * one[2], one[1] * one[2] / one[3])
        if isinstance(one, tuple)
        else one
        for one in speeds
    )
    return FamilyStepTimes(Family(name="m", speeds=measured, epoch_samples=1000))


def about(seconds: float, *, extrapolated: bool) -> tuple[object, bool]:
    return pytest.approx(seconds), extrapolated


def test_a_step_divides_as_reported_at_its_size() -> None:
    told = [EpochSpeed(1, 2, 128, 64.0, sync_s=sync_s, passes=2) for sync_s in (0.25, 0.75)]
    step_times = family(*told, EpochSpeed(1, 4, 128, 100.0))

    assert step_times.parts((2,), 128, 2.0) == StepTimes(1.25, 0.5, 32, 2)
    assert step_times.parts((2,), 128, 0.25) == StepTimes(0.25, 0.25, 32, 2)
    assert [
        step_times.parts(*group, 2.0) for group in [((2,), 64), ((4,), 128), ((1, 1), 128)]
    ] == [None] * 3


ROOT2 = 2**0.5
KNOWN, BEYOND = False, True  # extrapolated


@pytest.mark.parametrize(
    ("speeds", "steps"),
    [
        pytest.param(
            [(1, 2, 64, 0.1), (1, 2, 64, 0.3), (1, 1, 64, 0.5)], [((2,), 64, 0.2, KNOWN)],
            id="a measured size takes the mean of its measurements"),
        pytest.param(
            [(1, 2, 32, 0.1), (1, 2, 64, 0.4), (1, 2, 128, 0.5)],
            [((2,), 40, 0.175, KNOWN), ((2,), 96, 0.45, KNOWN)],
            id="between local batches it lies on the line of the nearest two"),
        # On 2 slots never below 64: half of the line is extrapolated, so all of it counts as that.
        pytest.param(
            [(1, 2, 64, 0.3), (1, 4, 64, 0.1), (1, 4, 32, 0.1), (2, 4, 64, 9.0)],
            [((3,), 64, 0.2, KNOWN), ((3,), 40, (0.3 * (40 / 64) ** BATCH_POWER + 0.1) / 2, BEYOND)],
            id="between two sizes it lies on the line between them"),
        pytest.param(
            [(2, 4, 64, 0.2), (2, 8, 64, 0.4)],
            [((2, 1, 1), 64, 0.2, KNOWN), ((3, 3), 64, 0.3, KNOWN)],
            id="slots on other nodes are the same size"),
        pytest.param(
            [(2, 4, 64, 0.2), (4, 4, 64, 0.6)],
            [((2, 2), 64, 0.2, KNOWN), ((2, 1, 1), 64, 0.4, KNOWN)],
            id="unless their size was measured"),
        pytest.param(
            [(1, 2, 32, 0.1), (1, 2, 64, 0.1 * ROOT2), (1, 2, 128, 0.2 * ROOT2)],
            [((2,), 8, 0.05, BEYOND), ((2,), 256, 0.4 * ROOT2, BEYOND)],
            id="beyond the local batches it grows as between the nearest two"),
        pytest.param(
            [(1, 2, 32, 0.2), (1, 2, 64, 0.1)], [((2,), 8, 0.2, BEYOND)],
            id="below the local batches it does not grow"),
        pytest.param(
            [(1, 1, 64, 0.1), (1, 2, 64, 0.1), (1, 4, 64, 0.1 * ROOT2)], [((8,), 64, 0.2, BEYOND)],
            id="beyond the sizes it grows as between the nearest two"),
        pytest.param(
            [(1, 1, 64, 0.1), (1, 2, 64, 0.9)], [((4,), 64, 1.8, BEYOND)],
            id="slots beyond a steep growth are of no use, not of harm"),
        pytest.param(
            [(1, 1, 64, 0.2), (1, 2, 64, 0.1)], [((4,), 64, 0.1, BEYOND)],
            id="beyond the sizes it does not fall"),
        pytest.param(
            [(1, 2, 64, 0.1)],
            [((4,), 64, 0.1 * 2**SLOTS_POWER, BEYOND), ((1,), 64, 0.1 / 2**SLOTS_POWER, BEYOND),
             ((2,), 128, 0.1 * 2**BATCH_POWER, BEYOND),
             ((1,), 32, 0.1 / 2 ** (SLOTS_POWER + BATCH_POWER), BEYOND)],
            id="a single measurement is extrapolated by published powers"),
        pytest.param(
            [(1, 4, 64, 0.1)], [((2, 2), 64, 0.1, BEYOND)],
            id="an unmeasured group across nodes is as fast as within a node"),
        pytest.param(
            [(2, 4, 64, 0.1)], [((4,), 64, 0.1, BEYOND)],
            id="an unmeasured group within a node is as fast as across nodes"),
    ],
)  # fmt: skip
def test_a_step_has_the_time_of_measurements_around_it(
    speeds: list[tuple[int, int, int, float]],
    steps: list[tuple[tuple[int, ...], int, float, bool]],
) -> None:
    times = family(*speeds)

    for placement, local, seconds, extrapolated in steps:
        expected = about(seconds, extrapolated=extrapolated)
        assert times.step(placement, sum(placement) * local) == expected


def test_growth_with_the_slots_is_the_median_of_gavels_measurements() -> None:
    grown = [1.0 - math.log(of[8] / of[1], 8) for of in STEPS_PER_S.values() if 8 in of]

    assert len(grown) == 19
    assert median(grown) == pytest.approx(SLOTS_POWER, abs=0.005)


Points = dict[tuple[int, int], float]  # seconds by slots and local batch
some_points = st.dictionaries(
    st.tuples(st.integers(1, 8), st.sampled_from([16, 32, 64])), st.floats(0.01, 10.0), min_size=1,
    max_size=12,
)  # fmt: skip


@given(some_points, st.integers(1, 12), st.integers(8, 100))
def test_interpolated_times_are_bounded_by_measurements(
    points: Points, slots: int, local: int
) -> None:
    times = family(*((1, on, batch, s) for (on, batch), s in points.items()))

    step: StepTime = times.step((slots,), slots * local)

    assert math.isfinite(step.seconds)
    assert step.seconds > 0.0
    if not step.extrapolated:
        inside = min(points.values()) * (1 - 1e-9), max(points.values()) * (1 + 1e-9)
        assert inside[0] <= step.seconds <= inside[1]
    if (slots, local) in points:
        assert step == about(points[slots, local], extrapolated=False)
