"""Jobs that are submitted together and wait for each other by name."""

from __future__ import annotations

import pytest

from controlplane.client.job_order import submission_order, with_parents
from schemas.errors import BadFieldError
from schemas.ids import JobId
from schemas.jobs import JobSpec
from tests.support.builders import job_spec


def specs(**after: tuple[str, ...]) -> list[JobSpec]:
    return [job_spec(name, after=parents) for name, parents in after.items()]


@pytest.mark.parametrize(
    ("after", "order"),
    [
        ({"a": (), "b": (), "c": ()}, "abc"),
        ({"c": ("any:b",), "b": ("a", "x-7"), "a": ()}, "abc"),
        ({"b": ("a-1",), "a": ()}, "ba"),  # a job of the cluster, not a file
    ],
)
def test_parents_are_submitted_first(after: dict[str, tuple[str, ...]], order: str) -> None:
    given = specs(**after)

    assert "".join(given[place].name for place in submission_order(given)) == order


@pytest.mark.parametrize(
    ("after", "circle"),
    [
        ({"a": ("ok:a",)}, "a after a"),
        ({"a": ("b",), "b": ("c",), "c": ("a",)}, "a after b after c after a"),
    ],
)
def test_a_circle_is_named(after: dict[str, tuple[str, ...]], circle: str) -> None:
    with pytest.raises(BadFieldError, match=f"in a circle: {circle};"):
        submission_order(specs(**after))


def test_two_files_of_one_name_cannot_be_waited_for() -> None:
    with pytest.raises(BadFieldError, match="2 of the files have the name 'a'"):
        submission_order([job_spec("a"), job_spec("a"), job_spec("b", after=("a",))])


def test_names_become_jobs_and_a_refused_parent_refuses_its_children() -> None:
    names = {"a": JobId("a-4"), "b": None}

    assert with_parents(job_spec("c", after=("a", "any:x-7")), names).after == (
        "ok:a-4", "any:x-7",
    )  # fmt: skip
    assert with_parents(job_spec("c"), names) == job_spec("c")
    with pytest.raises(BadFieldError, match="b was not submitted, so c was not either"):
        with_parents(job_spec("c", after=("b",)), names)
