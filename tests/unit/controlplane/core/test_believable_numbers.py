"""What users and their scripts say reaches a policy as numbers that it can work with."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core import policy_events
from controlplane.core.model.job import MAX_FAMILY_CHARACTERS
from controlplane.core.model.report_bounds import MAX_COUNT, MAX_MEASURE, clamp_numbers
from controlplane.policy.api import ClusterView, EpochSeen, JobEnded, JobView, StepsSeen
from controlplane.service.pipes import encode_frame
from controlplane.service.planner.search_messages import TO_SEARCH, FullView
from schemas.epochs import StepTimes
from schemas.ids import JobId
from schemas.jobs import StopRule
from tests.support import builders
from tests.support.builders import BATCH, N1, A, job_view
from tests.support.controller import Controller, running
from tests.support.sizes import examples

NUMBERS = st.sampled_from([0, 1, 2**53, 2**53 + 1, 2**63, 2**64, -(2**70), 0.0, 1e15, 1e300,
                           -1e300, math.nan, math.inf, -math.inf])  # fmt: skip
SEEN = EpochSeen(job=A, family="f", slots=1, nodes=1, global_batch=BATCH, samples_per_s=1.0,
                 whole=True)  # fmt: skip
STEPS = StepsSeen(job=A, family="f", group=1, slots=1, nodes=1, global_batch=1, step=1,
                  samples_done=1)  # fmt: skip
TOLD = (SEEN, STEPS, JobEnded(job=A, family="f", samples_done=1, succeeded=True), job_view(A))


def view_of(controller: Controller) -> JobView:
    return controller.view().jobs[A]


def test_what_is_within_its_bounds_is_the_same_object() -> None:
    for told in TOLD:
        assert clamp_numbers(told) is told


def test_what_is_beyond_is_at_the_bound_and_what_is_no_number_is_not_told() -> None:
    told = clamp_numbers(
        msgspec.structs.replace(
            SEEN,
            samples_done=2**63,
            epoch=-(2**70),
            samples_per_s=math.nan,
            train_loss=math.nan,
            step_times=StepTimes(math.inf, -1e300, 1, 1),
        )
    )

    assert told == msgspec.structs.replace(
        SEEN,
        samples_done=MAX_COUNT,
        epoch=-MAX_COUNT,
        samples_per_s=0.0,
        train_loss=None,
        step_times=StepTimes(MAX_MEASURE, -MAX_MEASURE, 1, 1),
    )


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(TOLD), st.data())
def test_whatever_is_told_can_be_sent_to_a_search(told: Any, data: st.DataObject) -> None:
    numeric = [f for f in told.__struct_fields__ if type(getattr(told, f)) in {int, float}]
    changes = data.draw(st.dictionaries(st.sampled_from(numeric), NUMBERS))

    safe = clamp_numbers(msgspec.structs.replace(told, **changes))

    for field in numeric:
        value = getattr(safe, field)
        assert value is None or abs(value) <= max(MAX_COUNT, MAX_MEASURE)


@pytest.mark.parametrize("epochs", [2**63, 2**64 - 1])
def test_a_job_of_more_epochs_than_can_be_counted_has_as_many_samples_as_can_be(
    epochs: int,
) -> None:
    controller = running(stop=StopRule(epochs=epochs))  # of a release that took any number

    controller.tell(N1, builders.epoch_end(A, 1))

    view = controller.view()
    assert view.jobs[A].stop_samples == MAX_COUNT
    assert view.jobs[A].stop == StopRule(epochs=MAX_COUNT)
    sent = TO_SEARCH.decode(encode_frame(FullView(view=view))[4:])
    assert isinstance(sent, FullView)
    assert sent.view == view


def test_a_family_is_short_whatever_the_arguments_and_differs_where_they_do() -> None:
    families = set[str]()
    for last in ("a", "b"):
        controller = running(args=("x" * 30_000, last))
        controller.tell(N1, builders.epoch_end(A, 1))
        (epoch,) = [
            event
            for _, event in policy_events.history(
                controller.state.jobs.values(), controller.histories
            )
        ]
        assert epoch.family == view_of(controller).family
        families.add(epoch.family)

    assert len(families) == 2
    assert {len(family) for family in families} == {MAX_FAMILY_CHARACTERS + 17}


def test_a_view_of_many_jobs_with_the_largest_job_files_is_small() -> None:
    large = running(args=("x" * 30_000,) * 30, stop=StopRule(metric="m" * 100, at_least=0.5))
    one = view_of(large)
    jobs = {JobId(f"a-{n}"): msgspec.structs.replace(one, job=JobId(f"a-{n}")) for n in range(100)}

    sent = encode_frame(FullView(view=ClusterView(version=1, slots=(), jobs=jobs)))

    assert len(sent) < 100 * 2500
