"""What users say of a job's importance."""

from __future__ import annotations

import msgspec

from controlplane.policy.ones.policy import Ones
from schemas.ids import Seconds
from tests.support.builders import A, B, job_view
from tests.support.views import row_of, view_of

NOW = Seconds(100.0)


def who_runs(priority_of_a: float, priority_of_b: float) -> set[str]:
    """Of two jobs alike that want the only slot."""
    a, b = (
        msgspec.structs.replace(job_view(name, slots=(1, 1)), priority=priority)
        for name, priority in ((A, priority_of_a), (B, priority_of_b))
    )
    return set(Ones().plan(view_of(row_of(1), a, b), NOW).local_batch)


def test_the_job_of_higher_priority_gets_the_only_slot() -> None:
    assert who_runs(2.0, 1.0) == {A}
    assert who_runs(1.0, 2.0) == {B}
