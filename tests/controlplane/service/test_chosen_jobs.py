"""Which jobs a list has."""

from __future__ import annotations

import pytest

from controlplane.service.client_api.replies import chosen_jobs
from schemas.errors import BadFieldError
from schemas.messages.client import ListJobs
from tests.support.builders import S0, A, B, C, cancelled
from tests.support.controller import Controller, cluster_of


def a_cluster() -> Controller:
    """A runs, B was cancelled, C waits."""
    controller = cluster_of(n1=1)
    controller.submit("a")
    controller.submit("b")
    controller.submit("c")
    controller.place({A: S0})
    controller.take(cancelled(B))
    return controller


@pytest.mark.parametrize(
    ("request_", "jobs"),
    [
        (ListJobs(), [A, C]),
        (ListJobs(ended=True), [A, B, C]),
        (ListJobs(states=("queued",)), [C]),
        (ListJobs(states=("starting", "cancelled")), [A, B]),
        (ListJobs(name="c"), [C]),
        (ListJobs(name="?-[13]"), [A, C]),
        (ListJobs(name="b"), []),
        (ListJobs(ended=True, name="B"), []),
        (ListJobs(user="nobody"), []),
    ],
)
def test_a_list_has(request_: ListJobs, jobs: list[str]) -> None:
    assert [job.job for job in chosen_jobs(a_cluster().state, request_)] == jobs


def test_a_list_of_one_users_jobs() -> None:
    controller = a_cluster()

    assert chosen_jobs(controller.state, ListJobs(user=controller.job(A).user)) == [
        controller.job(A),
        controller.job(C),
    ]


def test_a_state_that_is_none_is_named() -> None:
    with pytest.raises(BadFieldError, match="no job is ever 'done'; one of queued, starting"):
        chosen_jobs(a_cluster().state, ListJobs(states=("done",)))
