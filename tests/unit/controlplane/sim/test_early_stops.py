"""Scripts that leave before their time."""

from __future__ import annotations

import pytest

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.job_model import EarlyStops
from controlplane.sim.models.table2 import Table2Model
from controlplane.sim.results import TraceJob
from controlplane.sim.scenario import Scenario, model_of
from schemas.ids import Seconds

WHOLE = Table2Model()


def jobs(many: int = 60) -> list[TraceJob]:
    return [
        TraceJob(name=f"j-{n}", at=Seconds(0.0), workload="resnet18-cifar10-20k", slots=1)
        for n in range(many)
    ]


def epochs(share: float, seed: int = 5) -> list[tuple[int, int]]:
    """Of each job, and of the whole one."""
    early = EarlyStops(WHOLE, share)
    return [
        (
            early.job_model(job, "elastic", seed=seed).epochs,
            WHOLE.job_model(job, "elastic", seed=seed).epochs,
        )
        for job in jobs()
    ]


def test_the_share_of_jobs_leaves_early_and_the_others_train_to_their_end() -> None:
    shorter = sum(here < whole for here, whole in epochs(0.4))

    assert 15 <= shorter <= 33
    assert all(1 <= here <= whole for here, whole in epochs(0.4))


def test_none_or_all_may_leave_early() -> None:
    assert all(here == whole for here, whole in epochs(0.0))
    assert sum(here < whole for here, whole in epochs(1.0)) > 50


def test_who_leaves_is_the_same_for_every_policy() -> None:
    early, job = EarlyStops(WHOLE, 0.5), jobs()[3]
    lengths = {
        early.job_model(job, batch, seed=5).epochs for batch in ("fixed", "elastic", "fixed")
    }

    assert len(lengths) == 1
    assert epochs(0.5, seed=6) != epochs(0.5, seed=5)


def test_nobody_is_told() -> None:
    job = jobs()[0]

    early = EarlyStops(WHOLE, 1.0).job_model(job, "elastic", seed=5)

    assert early.spec == WHOLE.job_model(job, "elastic", seed=5).spec


def test_the_scenario_says_how_many() -> None:
    assert isinstance(model_of(Scenario(early_share=0.25)), EarlyStops)
    assert isinstance(model_of(Scenario()), Table2Model)


@pytest.mark.parametrize(
    ("share", "physics", "said"),
    [(1.5, "table2", "is no share"), (-1.0, "table2", "not a number"), (0.5, "curves", "has no")],
)
def test_what_makes_no_sense_is_refused(share: float, physics: str, said: str) -> None:
    with pytest.raises(TraceError, match=said) as refused:
        Scenario(early_share=share, physics=physics)  # type: ignore[arg-type]

    assert refused.value.field == "early_share"
