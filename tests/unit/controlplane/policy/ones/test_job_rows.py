"""Rows of jobs: cached rows, batches and speeds of sizes, costs of changes, weights."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.api import (
    EpochSeen,
    JobView,
)
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.job_history import BatchHold
from controlplane.policy.ones.job_rows import (
    SizeTable,
    size_table,
    stall_share,
)
from controlplane.policy.ones.problem_builder import weights
from controlplane.policy.options import OnesOptions
from controlplane.prediction import FloatArray
from schemas.ids import Seconds
from tests.support.builders import S0, S1, A, B, job_view
from tests.support.views import epoch_seen
from tests.unit.controlplane.policy.tables import cases

OPTIONS = OnesOptions()


def measured(slots: int, batch: int, step_s: float) -> EpochSeen:
    return epoch_seen(B, family="f", slots=slots, global_batch=batch, samples_per_s=batch / step_s)


def table(
    job: JobView, *events: EpochSeen, limit: int = 0, hold: BatchHold = BatchHold.NO
) -> SizeTable:
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
    return size_table(job, estimates, sizes, np.ones_like(sizes), hold=hold)


def a_job(**changes: object) -> JobView:
    """First batch 64, up to 256, 256 on a slot."""
    job = job_view(A, slots=(1, 4), family="f", batch_limit=256, local_limit=256)
    return msgspec.structs.replace(job, **changes)


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


STEADY = (measured(1, 64, 0.1), measured(1, 256, 0.1), measured(2, 128, 0.1))


NOISY: dict[str, Any] = {"noise_scale": 1e9}
ON_ONE, ON_TWO = {S0: 64}, {S0: 32, S1: 32}
# Steps take 0.1 s + 1 ms a sample; at a noise scale of 64 the best batch is 64 * 2 ** (2 / 6).
UNEVEN = tuple(measured(1, batch, 0.1 + 0.001 * batch) for batch in (64, 128, 256))
SLIGHTLY = (measured(1, 64, 0.1), measured(1, 128, 0.11))


@cases(
    "changes, events, limit, batches",
    r=(NOISY, STEADY, 100, [100, 100]),
    twice_the_present_batch=({**NOISY, "running_on": ON_ONE}, STEADY, 256, [128, 128]),
    twice_the_last_batch=({**NOISY, "last_batch": 64}, STEADY, 256, [128, 128]),
    local_limit=({**NOISY, "local_limit": 64}, STEADY, 256, [64, 128]),
    the_users_limit=(NOISY, STEADY, 256, [256, 256]),
    noise_makes_a_larger_batch_better=({"noise_scale": 1e6}, SLIGHTLY, 128, [128]),
    without_noise_a_small_batch_is_better=({"noise_scale": 1.0}, SLIGHTLY, 128, [64]),
    six_steps_for_a_doubling=({"noise_scale": 64.0}, UNEVEN, 256, [81]),
    the_present_batch_stays_for_a_small_gain=(
        {**NOISY, "running_on": ON_ONE}, (STEADY[0], measured(1, 128, 0.21)), 128, [64]),
    a_large_gain_changes_the_batch=(
        {**NOISY, "running_on": ON_ONE}, (STEADY[0], measured(1, 128, 0.1)), 128, [128]),
)  # fmt: skip
def test_a_batch_is_the_best_within_r_and_the_limits_and_twice_the_present_or_last_batch(
    changes: dict[str, Any], events: tuple[EpochSeen, ...], limit: int, batches: list[int]
) -> None:
    """The batch on one slot, and on two slots if it is given."""
    seen = table(a_job(**changes), *events, limit=limit)

    assert seen.batches.tolist()[: len(batches)] == batches


# --- length and change


MARGIN = 0.02


@cases(
    "left_s, stall_s, share",
    share_of_the_rest=(300.0, 10.0, 1 - 25 / 300),
    at_least_10_s=(4.0, 1.0, 1 - 2.5 / 10),
    at_most_15_min=(1e6, 30.0, 1 - 75 / 900),
    margin=(300.0, 1.0, 1 - MARGIN),
    never_0=(40.0, 1000.0, 0.05),
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


CROWDED = OnesOptions(ageing=1.0)


def weighed(
    *remaining: float,
    waited: tuple[float, ...] = (),
    ran: tuple[float, ...] = (),
    load: float = 1.0,
) -> FloatArray:
    none = (0.0,) * len(remaining)
    length, idle, busy = (np.array(times or none) for times in (remaining, waited, ran))
    return weights(length, np.ones(len(remaining)), idle, busy, CROWDED, load=load)


PART = 500 / 3


@cases(
    "remaining, lengths",
    patience=((100.0, 9900.0, 20000.0), (400.0, 10200.0, 20300.0)),  # mean 10000 s: all of the 300 s
    patience_of_short_jobs=((20.0, 60.0), (30.0, 70.0)),  # a quarter of the mean of 40 s
    unknown_half_the_median=((math.nan, 400.0, 1200.0), (400 + PART, 400 + PART, 1200 + PART)),
    all_unknown=((math.nan, math.nan), (75.0, 75.0)),
    nothing_left=((0.0,), (1.0,)),
    no_jobs=((), ()),
)  # fmt: skip
def test_short_jobs_weigh_more_by_their_length_and_the_patience(
    remaining: tuple[float, ...], lengths: tuple[float, ...]
) -> None:
    assert weighed(*remaining).tolist() == pytest.approx([length**-0.55 for length in lengths])


@pytest.mark.parametrize(
    ("load", "size", "age"), [(0.5, 0.55, 0.0), (1.5, 0.425, 0.5), (2.0, 0.3, 1.0), (9.0, 0.3, 1.0)]
)
def test_where_jobs_queue_size_counts_less_and_the_response_ratio_more(
    load: float, size: float, age: float
) -> None:
    waited, ran = (0.0, 125.0, 1250.0), (0.0, 0.0, 1125.0)

    found = weighed(100.0, 100.0, 100.0, waited=waited, ran=ran, load=load)

    assert found.tolist() == pytest.approx([125**-size, 2**age * 125**-size, 2**age * 125**-size])


def test_a_job_that_waits_long_enough_overtakes_short_ones() -> None:
    starving = weighed(10_000.0, 1.0, waited=(1e7, 0.0), load=2.0)

    assert starving[0] > 10 * starving[1]


def test_a_small_batch_limit_does_not_reduce_the_gains() -> None:
    steps = (measured(1, 64, 0.1), measured(2, 128, 0.1), measured(2, 256, 0.12))

    begun = table(a_job(noise_scale=1e6, running_on={S0: 64}), *steps)
    grown = table(a_job(noise_scale=1e6, running_on={S0: 256}), *steps, limit=256)
    assert begun.batches.max() <= 128
    assert begun.gains.tolist() == pytest.approx(grown.gains.tolist())
    assert begun.one_speed == pytest.approx(grown.one_speed)
