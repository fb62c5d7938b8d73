"""On which GPUs jobs are, and beside whom."""

from __future__ import annotations

from typing import Any

import msgspec

from controlplane.policy.api import JobView, SlotView
from controlplane.policy.ones.slowdowns import PlacementIndex
from schemas.ids import JobId, SlotId
from tests.support.builders import S0, S1, T0, T1, A, B, C, job_view
from tests.support.views import row_of, view_of

D = JobId("d-4")


def on(job: JobId, *slots: SlotId, family: str = "f", **is_changing: Any) -> JobView:
    return job_view(job, family=family, running_on=dict.fromkeys(slots, 8), **is_changing)


def looked(*jobs: JobView, models: tuple[str, ...] = ("", "")) -> PlacementIndex:
    """Two nodes with two slots each."""
    where = PlacementIndex()
    where.update(view_of(row_of(2, 2, models=models), *jobs))
    return where


def test_before_anything_was_seen_nobody_is_anywhere() -> None:
    where = PlacementIndex()

    assert (where.gpu_type(A), where.colocations(A), where.is_alone(A), where.is_changing(A)) == (
        "", [], True, False,
    )  # fmt: skip
    assert where.types == ()


def test_where_all_gpus_are_alike_their_type_does_not_matter() -> None:
    where = looked(on(A, S0), models=("a100", "a100"))

    assert (where.gpu_type(A), where.types) == ("", ("a100",))


def test_a_job_is_on_the_type_of_its_slots_or_on_a_mixture() -> None:
    where = looked(on(A, S0), on(B, T0), on(C, T1, S1), models=("v100", "a100"))

    assert [where.gpu_type(job) for job in (A, B, C, D)] == ["v100", "a100", "a100+v100", ""]
    assert where.types == ("v100", "a100")


def test_a_job_that_waits_is_beside_nobody() -> None:
    where = looked(on(A), on(B, S0))

    assert (where.colocations(A), where.colocations(B)) == ([], [])


def test_company_are_the_others_on_a_shared_node_by_family_and_by_who_spans_nodes() -> None:
    where = looked(on(A, S0), on(B, S1, T0, family="g"), on(C, T1, family="h"))

    assert where.colocations(A) == [(False, "g", True)]
    assert where.colocations(B) == [(True, "f", False), (True, "h", False)]
    assert where.colocations(C) == [(False, "g", True)]
    assert [where.is_alone(job) for job in (A, B, C)] == [False, False, False]


def test_relatives_are_company_too_and_count_once() -> None:
    where = PlacementIndex()
    where.update(view_of(row_of(3), on(A, S0), on(B, S1), on(C, SlotId("n1/2"))))

    assert where.colocations(A) == [(False, "f", False)]


def test_who_has_its_nodes_to_itself_is_beside_nobody() -> None:
    where = looked(on(A, S0, S1), on(B, T0))

    assert (where.colocations(A), where.is_alone(A), where.is_alone(B)) == ([], True, True)


def test_only_the_last_view_counts() -> None:
    where = looked(on(A, S0), on(B, S1, family="g"))
    assert where.colocations(A) == [(False, "g", False)]

    where.update(view_of(row_of(2, 2), on(A, S0), on(B, T1, family="g")))
    assert where.colocations(A) == []


def test_a_job_that_starts_or_is_moved_just_now_is_not_where_it_is_shown() -> None:
    where = looked(on(A, S0, movable=False), on(B, T0))

    assert (where.is_changing(A), where.is_changing(B), where.is_changing(C)) == (
        True,
        False,
        False,
    )


def test_a_slot_that_is_gone_is_on_no_node() -> None:
    lost = view_of([], on(A, S0), on(B, S1))
    where = PlacementIndex()

    where.update(lost)

    assert (where.gpu_type(A), where.colocations(A)) == ("", [])


def test_a_node_of_another_type_that_joins_makes_types_matter() -> None:
    slots: list[SlotView] = row_of(2, models=("v100",))
    where = PlacementIndex()
    where.update(view_of(slots, on(A, S0)))
    assert where.gpu_type(A) == ""

    other = [msgspec.structs.replace(slot, model="a100") for slot in row_of(0, 2)]
    where.update(view_of([*slots, *other], on(A, S0)))
    assert where.gpu_type(A) == "v100"
