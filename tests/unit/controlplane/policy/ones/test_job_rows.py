"""Rows of jobs: cached rows, batches and speeds of sizes, costs of changes, weights."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    JobEnded,
    JobView,
    PolicyEvent,
    StepsSeen,
)
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.job_rows import (
    JobRow,
    JobRowBuilder,
    SizeTable,
    size_table,
    stall_share,
)
from controlplane.policy.ones.problem_builder import in_play, weights
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.cluster_index import ClusterIndexCache
from controlplane.prediction import FloatArray
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, A, B, job_view
from tests.support.sizes import examples
from tests.support.views import NOW, epoch_seen, events_of, row_of, view_of, views


def told(row: JobRow) -> dict[str, Any]:
    """All that a search sees of a job, to be compared."""
    table = row.table
    return {
        "job": row.job.job,
        "level": row.level,
        "limit": row.limit,
        "remaining_s": None if math.isnan(row.remaining_s) else row.remaining_s,
        "change_factor": row.change_factor.tolist(),
        "factors": (row.move_factor, row.restart_factor),
        "gated": row.gated,
        "moves_to": row.moves_to,
        "sizes": table.sizes.tolist(),
        "batches": table.batches.tolist(),
        "goodputs": table.goodputs.tolist(),
        "gains": table.gains.tolist(),
        "noise_scale": table.noise_scale,
    }


@st.composite
def histories(draw: st.DrawFn) -> tuple[ClusterView, list[tuple[float, list[PolicyEvent]]]]:
    """A view, and what happens while it stays the same, or nearly: seconds, and events."""
    view = draw(views())
    pauses = st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0, 31.0])
    steps = [(draw(pauses), draw(events_of(view, at_most=3))) for _ in range(5)]
    noise = st.sampled_from([None, 3.0, 300.0])
    return view, [(pause, [_noisy(one, draw(noise)) for one in events]) for pause, events in steps]


def _noisy(event: PolicyEvent, noise_scale: float | None) -> PolicyEvent:
    if isinstance(event, EpochSeen | StepsSeen):
        return msgspec.structs.replace(event, noise_scale=noise_scale)
    return event


@settings(max_examples=examples(40), deadline=None)
@given(histories(), st.booleans())
def test_cached_rows_equal_fresh_rows(
    history: tuple[ClusterView, list[tuple[float, list[PolicyEvent]]]],
    shared: bool,  # noqa: FBT001 - drawn
) -> None:
    view, steps = history
    options = OnesOptions(share_lengths=shared)
    estimates, now = Estimates(options), NOW
    remembering, clusters = JobRowBuilder(estimates, options), ClusterIndexCache()
    for pause_s, events in steps:
        now = Seconds(now + pause_s)
        for event in events:
            estimates.observe(event, now)
        found = in_play(view, now)
        estimates.update(view, contended=found.supply.contended, now=now)
        fresh = JobRowBuilder(estimates, options)
        for builder in (remembering, fresh):
            builder.update(clusters.of(view), view.jobs, len(view.jobs))

        rows = [
            [told(builder.row(job, found.supply)) for job in found.jobs.values()]
            for builder in (remembering, fresh)
        ]

        assert rows[0] == rows[1]


@settings(max_examples=examples(20), deadline=None)
@given(views())
def test_an_unchanged_job_keeps_its_row(view: ClusterView) -> None:
    options = OnesOptions()
    estimates = Estimates(options)
    builder, clusters = JobRowBuilder(estimates, options), ClusterIndexCache()
    found = in_play(view, NOW)
    estimates.update(view, contended=found.supply.contended, now=NOW)
    builder.update(clusters.of(view), view.jobs, len(view.jobs))

    first = [builder.row(job, found.supply) for job in found.jobs.values()]
    again = [builder.row(job, found.supply) for job in found.jobs.values()]

    assert all(one is other for one, other in zip(first, again, strict=True))


def heard(kind: str) -> list[PolicyEvent]:
    """What changes the row of a job that did nothing itself."""
    old = JobId("old-9")
    match kind:
        case "a relative finished":
            return [JobEnded(job=old, family="f", samples_done=90_000, succeeded=True)]
        case "a relative's noise":
            return [seen(old, noise_scale=900.0)]
        case "a relative's speed":
            return [seen(old, samples_per_s=37.0)]
    return []


def seen(job: JobId, slots: int = 1, **changes: Any) -> EpochSeen:
    known: dict[str, Any] = {"samples_per_s": 100.0, "epoch": 1, "samples_done": 500} | changes
    return epoch_seen(job, family="f", slots=slots, global_batch=32, **known)


@pytest.mark.parametrize(
    ("kind", "pause_s"),
    [
        ("a relative finished", 0.0),
        ("a relative's noise", 0.0),
        ("a relative's speed", 0.0),
        ("its gate opened", 31.0),
    ],
)
def test_news_of_relatives_and_open_gates_renew_a_row(kind: str, pause_s: float) -> None:
    running = job_view(
        JobId("a-1"), slots=(1, 4), running_on={SlotId("n1/0"): 32}, family="f", moved_at=NOW,
        epoch=1, samples_done=500, batch_size=32, batch_limit=4000, local_limit=4000,
    )  # fmt: skip
    view = view_of(row_of(4), running)
    options = OnesOptions()
    estimates = Estimates(options)
    former = JobEnded(job=JobId("old-8"), family="f", samples_done=5000, succeeded=True)
    for event in (seen(running.job), former):
        estimates.observe(event, NOW)
    remembering, clusters = JobRowBuilder(estimates, options), ClusterIndexCache()

    def row(builder: JobRowBuilder, now: Seconds) -> dict[str, Any]:
        found = in_play(view, now)
        estimates.update(view, contended=found.supply.contended, now=now)
        builder.update(clusters.of(view), view.jobs, len(view.jobs))
        return told(builder.row(running, found.supply))

    before = row(remembering, NOW)
    for event in heard(kind):
        estimates.observe(event, NOW)
    later = Seconds(NOW + pause_s)

    after = row(remembering, later)

    assert after == row(JobRowBuilder(estimates, options), later)
    assert after != before


OPTIONS = OnesOptions(batch_margin=0.1)


def measured(slots: int, batch: int, step_s: float) -> EpochSeen:
    return epoch_seen(B, family="f", slots=slots, global_batch=batch, samples_per_s=batch / step_s)


def table(job: JobView, *events: EpochSeen, limit: int = 0, keep_batch: bool = False) -> SizeTable:
    """What one and two slots offer; the job's R is `limit`."""
    estimates = Estimates(OPTIONS)
    for event in events:
        estimates.observe(event, Seconds(1.0))
    if limit:
        estimates.observe(
            EpochSeen(job=job.job, family="other", slots=1, nodes=1, global_batch=limit,
                      samples_per_s=1.0, whole=True),
            Seconds(1.0),
        )  # fmt: skip
    sizes = np.array([1, 2])
    return size_table(job, estimates, OPTIONS, sizes, np.ones_like(sizes), keep_batch=keep_batch)


def a_job(**changes: object) -> JobView:
    """First batch 64, up to 256, 256 on a slot."""
    job = job_view(A, slots=(1, 4), family="f", batch_limit=256, local_limit=256)
    return msgspec.structs.replace(job, **changes)


def on(*slots: SlotId, batch: int) -> dict[SlotId, int]:
    return dict.fromkeys(slots, batch // len(slots))


# --- speed, batch, goodput


def test_each_size_has_its_measured_speed() -> None:
    seen = table(a_job(batch_limit=64), measured(1, 64, 0.1), measured(2, 64, 0.08))

    assert seen.known
    assert seen.batches.tolist() == [64, 64]
    assert seen.speeds.tolist() == pytest.approx([640.0, 800.0])
    assert seen.goodputs.tolist() == pytest.approx([640.0, 800.0])
    assert seen.gains.tolist() == pytest.approx([1.0, 1.25])


def test_an_unmeasured_family_gains_by_the_prior() -> None:
    seen = table(a_job(batch_limit=64))

    # a step of 32 samples a slot takes 0.3 + 0.7 / 2 of one of 64, times 2 ** 0.1
    assert not seen.known
    assert seen.gains.tolist() == pytest.approx([1.0, 1.0 / (0.65 * 2**0.1)])


def test_noise_makes_a_larger_batch_better() -> None:
    steps = (measured(1, 64, 0.1), measured(1, 128, 0.11))

    noisy = table(a_job(noise_scale=1e6), *steps, limit=128)
    quiet = table(a_job(noise_scale=1.0), *steps, limit=128)

    assert (noisy.batches[0], quiet.batches[0]) == (128, 64)


def test_a_doubling_of_the_batch_has_six_steps() -> None:
    """The best batch of a job whose steps take 0.1 s + 1 ms a sample, at a noise scale of 64."""
    steps = tuple(measured(1, batch, 0.1 + 0.001 * batch) for batch in (64, 128, 256))

    seen = table(a_job(noise_scale=64.0), *steps, limit=256)

    tried = [round(64 * 2 ** (step / 6)) for step in range(13)]
    best = max(tried, key=lambda batch: batch / (0.1 + 0.001 * batch) / (64 + batch))
    assert best == 81
    assert seen.batches[0] == best


STEADY = (measured(1, 64, 0.1), measured(1, 256, 0.1), measured(2, 128, 0.1))


@pytest.mark.parametrize(
    ("changes", "limit", "batches"),
    [
        ({}, 100, [100, 100]),
        ({"running_on": {S0: 64}}, 256, [128, 128]),
        ({"last_batch": 64}, 256, [128, 128]),
        ({"local_limit": 64}, 256, [64, 128]),
        ({}, 256, [256, 256]),
    ],
    ids=["R", "twice the present batch", "twice the last batch", "local limit", "user's limit"],
)
def test_a_batch_is_within_r_and_the_users_limits_and_twice_the_present_or_last_batch(
    changes: dict[str, Any], limit: int, batches: list[int]
) -> None:
    seen = table(a_job(noise_scale=1e9, **changes), *STEADY, limit=limit)

    assert seen.batches.tolist() == batches


@pytest.mark.parametrize(("step_s", "batch"), [(0.21, 64), (0.1, 128)])
def test_the_present_batch_stays_until_another_one_gains_more_than_the_margin(
    step_s: float, batch: int
) -> None:
    job = a_job(noise_scale=1e9, running_on=on(S0, batch=64))

    seen = table(job, measured(1, 64, 0.1), measured(1, 128, step_s), limit=128)

    assert seen.batches[0] == batch


def test_keep_batch_keeps_the_present_batch() -> None:
    job = a_job(noise_scale=1e9, running_on=on(S0, S1, batch=64))

    seen = table(job, measured(2, 64, 0.1), measured(2, 128, 0.1), limit=128, keep_batch=True)

    assert seen.batches[1] == 64


# --- length and change


MARGIN = 0.02


@pytest.mark.parametrize(
    ("left_s", "stall_s", "share"),
    [
        (300.0, 10.0, 1 - 25 / 300),
        (4.0, 1.0, 1 - 2.5 / 10),
        (1e6, 30.0, 1 - 75 / 900),
        (300.0, 1.0, 1 - MARGIN),
        (40.0, 1000.0, 0.05),
    ],
    ids=["share of the rest", "at least 10 s", "at most 15 min", "margin", "never 0"],
)
def test_a_change_costs_its_stall_or_the_margin_if_that_is_more(
    left_s: float, stall_s: float, share: float
) -> None:
    assert stall_share(left_s, stall_s, MARGIN) == pytest.approx(share)


@given(left=st.floats(0, 1e9), stall=st.floats(0, 1e6), margin=st.floats(0, 1))
def test_a_change_leaves_between_a_twentieth_and_all_of_a_value(
    left: float, stall: float, margin: float
) -> None:
    found = float(stall_share(left, stall, margin))

    assert 0.05 <= found <= 1.0
    assert found <= max(1.0 - margin, 0.05)


# --- worth


def weighed(
    *remaining: float,
    waited: tuple[float, ...] = (),
    ran: tuple[float, ...] = (),
    options: OnesOptions = OPTIONS,
) -> FloatArray:
    none = (0.0,) * len(remaining)
    length, idle, busy = (np.array(times or none) for times in (remaining, waited, ran))
    return weights(length, np.ones(len(remaining)), idle, busy, options)


AGEING = OnesOptions(ageing=2.0)


AGEING = OnesOptions(ageing=2.0)


@pytest.mark.parametrize(
    ("remaining", "lengths"),
    [
        ((100.0, 9900.0, 20000.0), (400.0, 10200.0, 20300.0)),  # mean 10000 s: all of the 300 s
        ((20.0, 60.0), (30.0, 70.0)),  # a quarter of the mean of 40 s
        ((math.nan, 400.0, 1200.0), (400 + 500 / 3, 400 + 500 / 3, 1200 + 500 / 3)),
        ((math.nan, math.nan), (75.0, 75.0)),
        ((0.0,), (1.0,)),
        ((), ()),
    ],
    ids=["patience", "patience of short jobs", "unknown: half the median", "all unknown",
         "nothing left", "no jobs"],
)  # fmt: skip
def test_short_jobs_weigh_more_by_their_length_and_the_patience(
    remaining: tuple[float, ...], lengths: tuple[float, ...]
) -> None:
    expected = [length**-0.55 for length in lengths]

    assert weighed(*remaining).tolist() == pytest.approx(expected)


def test_with_ageing_a_job_that_waited_weighs_more_by_the_response_ratio() -> None:
    waited, ran = (0.0, 125.0, 1250.0), (0.0, 0.0, 1125.0)

    plain = weighed(100.0, 100.0, 100.0, waited=waited, ran=ran)
    aged = weighed(100.0, 100.0, 100.0, waited=waited, ran=ran, options=AGEING)
    starving = weighed(10_000.0, 1.0, waited=(1e7, 0.0), options=AGEING)

    assert plain.tolist() == [125**-0.55] * 3
    assert (aged / aged[0]).tolist() == pytest.approx([1.0, 4.0, 4.0])
    assert starving[0] > 10 * starving[1]


def test_a_small_batch_limit_does_not_reduce_the_gains() -> None:
    steps = (measured(1, 64, 0.1), measured(2, 128, 0.1), measured(2, 256, 0.12))
    noisy = a_job(noise_scale=1e6, running_on=on(S0, batch=64))
    options = OnesOptions()
    estimates = Estimates(options)
    for event in steps:
        estimates.observe(event, Seconds(1.0))
    sizes = np.array([1, 2])
    begun = size_table(noisy, estimates, options, sizes, np.ones_like(sizes), keep_batch=False)
    estimates.observe(
        msgspec.structs.replace(measured(1, 256, 1.0), job=A, family="other"), Seconds(1.0)
    )
    ramped = msgspec.structs.replace(noisy, running_on=on(S0, batch=256))

    grown = size_table(ramped, estimates, options, sizes, np.ones_like(sizes), keep_batch=False)

    assert begun.batches.max() <= 128
    assert begun.gains.tolist() == pytest.approx(grown.gains.tolist())
    assert begun.one_speed == pytest.approx(grown.one_speed)
