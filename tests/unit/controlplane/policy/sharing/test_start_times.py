"""Predicted starts of jobs that are not submitted yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.sharing.caps import Ledger
from controlplane.policy.sharing.rigid_view import RigidView
from controlplane.policy.sharing.start_times import PastRun, Present, expected_start
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id
from schemas.sharing import Sharing
from schemas.wire.client import ExpectedStart
from tests.support.builders import A, B, C, job_view
from tests.support.views import row_of, view_of

NEW = JobId("new-9")
NOW = Seconds(10_000.0)
PAST = {"rigid": tuple(PastRun(samples=0, slot_s=0, run_s=100.0, share=0.5) for _ in range(32))}
AT_ONCE = ExpectedStart(starts="now", at=NOW, earliest=NOW, latest=NOW)


def n(node: int, *indices: int) -> tuple[SlotId, ...]:
    """Slots of a node."""
    return tuple(slot_id(NodeId(f"n{node}"), index) for index in indices)


def claim(job: JobId = NEW, slots: int = 1, at: float = NOW, **fields: Any) -> RigidView:
    return RigidView(job=job, submitted_at=Seconds(at), slots=slots, account="ann/ann", **fields)


def holder(
    job: JobId, *slots: SlotId, limit_s: float | None = None, began: float = NOW
) -> RigidView:
    ends = None if limit_s is None else Seconds(began + limit_s)
    return claim(
        job, len(slots), at=1.0, waits=False, holds=slots, ends_at=ends, run_limit_s=limit_s,
        began_at=Seconds(began),
    )  # fmt: skip


def elastic(job: JobId, *slots: SlotId, user: str = "ann", **fields: Any) -> JobView:
    usual = {"running_on": dict.fromkeys(slots, 8), "moved_at": NOW - 10.0, "family": "ann/f"}
    return job_view(job, 1.0, slots=(1, 8), account=f"{user}/{user}", **{**usual, **fields})


def told(
    view: ClusterView,
    *rigid: RigidView,
    past: Mapping[str, Sequence[PastRun]] = PAST,
    sharing: Sharing | None = None,
    **fields: Any,
) -> ExpectedStart:
    present = Present(
        job=NEW, view=view, rigid=rigid, sharing=sharing, ledger=Ledger(), past=past, now=NOW,
        **fields,
    )  # fmt: skip
    return expected_start(present, Random(1))  # noqa: S311 - no secret


def test_a_program_starts_at_once_on_free_slots_and_on_the_surplus_of_others() -> None:
    assert told(view_of(row_of(2)), claim(slots=2)) == AT_ONCE
    assert told(view_of(row_of(2), elastic(A, *n(1, 0, 1))), claim()) == AT_ONCE


def test_a_program_waits_for_the_program_that_holds_its_slots() -> None:
    """Programs here used half of their limits, so one of 2000 s ends after about 1000 s."""
    start = told(view_of(row_of(2)), holder(A, *n(1, 0, 1), limit_s=2000.0), claim(slots=2))

    assert (start.starts, start.ahead, start.after) == ("later", 0, A)
    assert start.at is not None
    assert NOW + 500.0 < start.at < NOW + 2000.0
    assert start.earliest is not None
    assert start.latest is not None
    assert NOW < start.earliest < start.at < start.latest
    assert start.after_ends_at == pytest.approx(start.at, abs=100.0)


def test_claims_before_it_are_counted_and_take_their_time() -> None:
    held = holder(A, *n(1, 0, 1), limit_s=2000.0)
    alone = told(view_of(row_of(2)), held, claim(slots=2))

    behind = told(
        view_of(row_of(2)), held, claim(B, 2, at=NOW - 1.0, run_limit_s=4000.0), claim(slots=2)
    )

    assert (behind.ahead, behind.after) == (1, B)
    assert behind.at is not None
    assert alone.at is not None
    assert behind.at - NOW > 2.0 * (alone.at - NOW)


def test_a_short_program_starts_before_a_large_one_that_it_does_not_delay() -> None:
    """A fills half of the cluster for 2000 s at most, B needs all of it."""
    held = holder(A, *n(1, 0, 1), limit_s=2000.0)
    large = claim(B, 4, at=NOW - 1.0, run_limit_s=4000.0)

    assert told(view_of(row_of(4)), held, large, claim(slots=2, run_limit_s=1000.0)) == AT_ONCE
    long = told(view_of(row_of(4)), held, large, claim(slots=2, run_limit_s=3000.0))
    assert (long.starts, long.ahead) == ("later", 1)


def test_an_elastic_job_keeps_its_slots_from_a_program_for_a_turn_at_most() -> None:
    held = elastic(A, *n(1, 0), moved_at=NOW - 800.0, samples_per_s=1.0, stop_samples=10**6)

    start = told(view_of(row_of(1), held), claim(at=NOW))

    assert start.at is not None
    assert 300.0 < start.at - NOW < 3000.0
    assert start.after == A


def test_nothing_is_said_if_nothing_tells_how_long_a_program_runs() -> None:
    view, held = view_of(row_of(1)), holder(A, *n(1, 0))

    assert told(view, held, claim(), past={}) == ExpectedStart(
        reason="nothing tells how long a-1 runs: no time limit, and no ended job"
    )
    assert told(view, held, claim()).starts == "later"  # other programs have ended


def test_a_job_larger_than_the_cluster_has_no_start() -> None:
    assert told(view_of(row_of(2)), claim(slots=3)).reason.startswith("needs 3 slots")
    too_wide = elastic(NEW, least=3)
    assert told(view_of(row_of(2), too_wide)).reason == "needs 3 slots, the cluster has 2"


def test_an_elastic_job_starts_at_once_if_minimums_leave_room() -> None:
    other = elastic(A, *n(1, 0, 1))

    assert told(view_of(row_of(2), other, elastic(NEW))).starts == "now"


def test_an_elastic_job_waits_for_the_end_of_those_at_their_minimum() -> None:
    running = [
        elastic(job, *n(1, at), samples_per_s=10.0, stop_samples=total, epoch_at=NOW)
        for at, (job, total) in enumerate([(A, 6000), (B, 60_000)])
    ]

    start = told(view_of(row_of(2), *running, elastic(NEW)))

    assert (start.starts, start.after) == ("later", A)
    assert start.at is not None
    assert 200.0 < start.at - NOW < 1800.0


def test_an_elastic_job_within_its_account_s_budget_starts_at_once() -> None:
    """Bob has nothing yet, so ann gives a slot back."""
    mine = [elastic(job, *n(1, at)) for at, job in enumerate([A, B])]
    view = view_of(row_of(2), *mine, elastic(NEW, user="bob"))

    assert told(view, sharing=Sharing()) == AT_ONCE
    more = view_of(row_of(2), *mine, elastic(C, user="bob"), elastic(NEW))
    assert told(more, sharing=Sharing()).starts == "unknown"  # no elastic job has ended here


def test_a_job_does_not_start_before_its_earliest_start() -> None:
    later = Seconds(NOW + 5000.0)

    start = told(view_of(row_of(2)), claim(slots=2, ready_at=later))

    assert (start.earliest, start.at, start.latest) == (later, later, later)


@pytest.mark.parametrize("asked", [1, 5])
def test_a_caller_may_end_the_draws(asked: int) -> None:
    calls = iter([True] * (asked - 1) + [False])
    present = Present(
        job=NEW, view=view_of(row_of(1)), rigid=[holder(A, *n(1, 0), limit_s=100.0), claim()],
        sharing=None, ledger=Ledger(), past=PAST, now=NOW,
    )  # fmt: skip

    start = expected_start(present, Random(1), lambda: next(calls))  # noqa: S311

    assert start.starts == "later"
    assert next(calls, None) is None


def test_a_job_that_ran_longer_than_all_like_it_is_expected_to_run_as_long_again() -> None:
    """Programs without a limit: 100 s each, and A has run for 1000 s."""
    start = told(view_of(row_of(1)), holder(A, *n(1, 0), began=NOW - 1000.0), claim())

    assert start.at is not None
    assert 500.0 < start.at - NOW < 2500.0
