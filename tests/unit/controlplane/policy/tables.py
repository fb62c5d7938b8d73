"""Tables of named cases, and traces of a cluster that follows a policy."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.policy.api import JobView
from schemas.ids import JobId
from tests.support.views import InstantCluster

Step = tuple[float, tuple[JobView | JobId, ...], dict[str, Any]]


def cases(arguments: str, **rows: Any) -> pytest.MarkDecorator:
    """Run a test once for each row; the name of a row, with blanks for `_`, is its id."""
    ids = [name.replace("_", " ") for name in rows]
    return pytest.mark.parametrize(arguments.split(", "), list(rows.values()), ids=ids)


def then(now: float, *news: JobView | JobId, **expected: Any) -> Step:
    """At `now`, after these jobs came or, by name, ended.

    Expected are `slots` or `sizes` of running jobs, when the plan `wakes`, and `why` by job.
    """
    return now, news, expected


def follow(cluster: InstantCluster, *steps: Step) -> None:
    """Follow the policy through these steps, and compare what is found at each."""
    for now, news, expected in steps:
        cluster.submit(*(one for one in news if isinstance(one, JobView)))
        cluster.end(*(one for one in news if not isinstance(one, JobView)))
        slots = cluster.at(now)
        plan = cluster.plans[-1]
        seen = {
            "slots": slots,
            "sizes": {job: len(held) for job, held in slots.items()},
            "wakes": plan.wake_at,
            "why": {job: plan.reasons[job].text for job in expected.get("why", ())},
        }
        found = {name: seen[name] for name in expected}
        assert found == expected, f"at {now}: {found}"
