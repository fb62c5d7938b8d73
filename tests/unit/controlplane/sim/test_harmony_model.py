"""Jobs of Harmony's testbed, and the traces that submit them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from controlplane.sim.cluster import NodeGroup, TraceError
from controlplane.sim.models.demands import DEMANDS
from controlplane.sim.models.harmony import (
    BATCHES,
    COSTS,
    EPOCHS,
    HarmonyJob,
    HarmonyModel,
    workload_of,
)
from controlplane.sim.models.interference import scale_for
from controlplane.sim.results import Trace, TraceJob
from controlplane.sim.run import simulate
from controlplane.sim.scenario import HARMONY, trace_of, usual_demands
from controlplane.sim.traces.generators import generate_harmony
from schemas.ids import Seconds
from schemas.jobs import problems
from tests.support.sizes import examples

WORKLOADS = st.builds(
    lambda name, many: f"{name}-{many}ps" if many else name,
    st.sampled_from(sorted(BATCHES)),
    st.integers(0, 3),
)


def harmony_job(workload: str, workers: int = 2, samples: int | None = None) -> HarmonyJob:
    submitted = TraceJob(
        name="a", at=Seconds(0.0), workload=workload, slots=workers, samples=samples
    )
    return HarmonyModel().job_model(submitted, "fixed", seed=0)


@settings(max_examples=examples(50), deadline=None)
@given(workload=WORKLOADS, workers=st.integers(1, 3))
def test_a_job_is_a_gang_that_can_be_submitted(workload: str, workers: int) -> None:
    job = harmony_job(workload, workers)

    assert problems(job.spec) == ()
    assert job.spec.slots == (workers, workers)
    assert job.spec.batch_size == job.spec.max_batch_size == workers * BATCHES[job.application]
    assert job.spec.family == job.application == workload.partition("-")[0]
    assert job.demand == replace(DEMANDS[job.application], servers=workload_of(workload)[1])


def test_two_workers_share_the_cores_of_their_node() -> None:
    """Two of ctc ask for 14 of 8 cores, and wait for them in six tenths of a step."""
    one, two = harmony_job("ctc", 1), harmony_job("ctc", 2)

    assert one.throughput((1,), 50, 0).step_s == DEMANDS["ctc"].step_s
    together = two.throughput((2,), 100, 0).step_s
    assert together == pytest.approx(DEMANDS["ctc"].step_s * (1 + 0.6 * (14 / 8 - 1)))
    assert two.throughput((1, 1), 100, 0).step_s == DEMANDS["ctc"].step_s


def test_a_trace_sets_the_length_of_a_job_with_a_default() -> None:
    assert harmony_job("wlm", samples=2000).epoch_samples == 100
    usual = harmony_job("wlm", 1)
    seconds = EPOCHS * usual.epoch_samples / usual.throughput((1,), 20, 0).samples_per_s
    assert seconds == pytest.approx(900.0, rel=1e-3)


@pytest.mark.parametrize(
    ("workload", "slots"),
    [("gpt", 1), ("vgg16-9999ps", 1), ("vgg16-ps", 1), ("-1ps", 1), ("vgg16", 0)],
)
def test_an_impossible_job_is_refused(workload: str, slots: int) -> None:
    submitted = TraceJob(name="a", at=Seconds(0.0), workload=workload, slots=slots)
    with pytest.raises(TraceError) as refused:
        HarmonyModel().job_model(submitted, "fixed", seed=0)

    assert refused.value.field in {"workload", "slots"}


def test_models_workers_and_servers_are_drawn_evenly_and_lengths_around_their_mean() -> None:
    trace = generate_harmony(jobs=3000, seed=1, mean_interval_s=10.0)

    drawn = [(*workload_of(job.workload), job.slots) for job in trace.jobs]
    for place, values in enumerate((set(BATCHES), {1, 2, 3}, {1, 2, 3})):
        counts = Counter(each[place] for each in drawn)
        assert counts.keys() == values
        assert min(counts.values()) > 0.8 * 3000 / len(values)
    seconds = [
        (job.samples or 0) * DEMANDS[model].step_s / (BATCHES[model] * workers)
        for job, (model, _, workers) in zip(trace.jobs, drawn, strict=True)
    ]
    assert np.mean(seconds) == pytest.approx(900.0, rel=0.05)


@pytest.mark.parametrize(("exchange", "share"), [("all-reduce", 0.0), ("mixed", 0.5)])
def test_the_exchange_sets_the_share_of_jobs_with_servers(exchange: str, share: float) -> None:
    trace = trace_of(structs.replace(HARMONY, exchange=exchange, jobs=400), 1)

    with_servers = sum(workload_of(job.workload)[1] > 0 for job in trace.jobs) / len(trace.jobs)
    assert with_servers == pytest.approx(share, abs=0.1)


def test_two_jobs_on_one_server_share_its_cores() -> None:
    """Both ask for 7 of 8 cores: 7/4 - 1 of six tenths of a step, times the scale of the share."""
    alone_s = DEMANDS["ctc"].step_s * 20 * 50
    jobs = tuple(
        TraceJob(name=name, at=Seconds(0.0), workload="ctc", slots=1, samples=20 * 50 * 50)
        for name in ("a", "b")
    )
    server = structs.replace(
        HARMONY, nodes=(NodeGroup(count=1, slots=2),), exchange="all-reduce", latency_s=0.0
    )
    found = simulate("fifo", server, 1, trace=Trace(name="two", jobs=jobs))

    scale = scale_for(0.3, usual_demands(server))
    ends = COSTS.start_s + alone_s * (1.0 + scale * 0.6 * (7 / 4 - 1))
    assert [job.ended_at for job in found.jobs] == [pytest.approx(ends, rel=1e-9)] * 2


def test_neighbours_slow_jobs_down_and_all_succeed() -> None:
    """The same trace with and without interference."""
    busy = simulate("fifo", HARMONY, 1)
    quiet = simulate("fifo", structs.replace(HARMONY, interference="none"), 1)

    assert [job.state for job in busy.jobs] == ["succeeded"] * HARMONY.jobs
    assert busy.busy_slot_s > 1.15 * quiet.busy_slot_s
