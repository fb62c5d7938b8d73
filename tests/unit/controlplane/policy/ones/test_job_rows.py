"""A row that is not worked out again is the one that would come out."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import ClusterView, EpochSeen, JobEnded, PolicyEvent, StepsSeen
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.job_rows import JobRow, JobRowBuilder
from controlplane.policy.ones.problem_builder import in_play
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.cluster_index import ClusterIndexCache
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import job_view
from tests.support.sizes import examples
from tests.support.views import NOW, events_of, row_of, view_of, views


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
def test_rows_that_are_remembered_are_those_that_would_be_made_anew(
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
def test_a_job_of_which_nothing_new_is_known_keeps_its_row(view: ClusterView) -> None:
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
    return EpochSeen(
        job=job, family="f", slots=slots, nodes=1, global_batch=32, whole=True, **known
    )


@pytest.mark.parametrize(
    ("kind", "pause_s"),
    [
        ("a relative finished", 0.0),
        ("a relative's noise", 0.0),
        ("a relative's speed", 0.0),
        ("its gate opened", 31.0),
    ],
)
def test_what_happens_elsewhere_makes_a_row_anew(kind: str, pause_s: float) -> None:
    running = job_view(
        JobId("a-1"),
        slots=(1, 4),
        running_on={SlotId("n1/0"): 32},
        family="f",
        moved_at=NOW,
        epoch=1,
        samples_done=500,
        batch_size=32,
        batch_limit=4000,
        local_limit=4000,
    )
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
