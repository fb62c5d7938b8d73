"""A name that nobody has comes back with the one that may have been meant."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from controlplane.client import Client
from controlplane.client.cluster_connection import ClusterConnection
from schemas.errors import UnknownJobError, suggestion
from schemas.messages.client import Jobs, JobSummary, ListJobs
from tests.support.schemas_examples import EXAMPLES

A_JOB = next(one for one in EXAMPLES.values() if isinstance(one, JobSummary))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("digts-1", "did you mean digits-1? look"),
        ("digits", "did you mean digits-12? look"),
        ("a", "did you mean a-1? look"),
        ("nobody-1", "look"),
    ],
)
def test_a_hint_names_what_is_most_like_it_and_the_last_of_a_numbered_row(
    name: str, hint: str
) -> None:
    assert suggestion(name, ["digits-1", "a-1", "digits-2", "digits-12"], "look") == hint


async def test_a_job_that_there_is_not_is_named_with_one_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = Jobs(jobs=(msgspec.structs.replace(A_JOB, job="digits-1"),))

    async def ask(_: object, _channel: object, request: Any, _wait_s: float) -> Jobs:
        if isinstance(request, ListJobs):
            return jobs
        raise UnknownJobError(request.job)

    monkeypatch.setattr(ClusterConnection, "_ask", ask)
    client = Client.__new__(Client)
    client._calls = cast("Any", "open")

    with pytest.raises(UnknownJobError) as error:
        await client.job("digist-1")

    assert str(error.value) == (
        "no job 'digist-1'; did you mean digits-1? `ones ps --all` lists every job"
    )
