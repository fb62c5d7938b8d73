"""Scripts that leave early."""

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


def lengths(share: float, seed: int = 5) -> list[tuple[int, int]]:
    """Epochs of each job, and of the whole job."""
    models = (EarlyStops(WHOLE, share), WHOLE)
    return [
        tuple(model.job_model(job, "elastic", seed=seed).epochs for model in models)  # type: ignore[misc]
        for job in jobs()
    ]


def test_the_share_of_jobs_leaves_early_and_the_others_train_to_their_end() -> None:
    found = lengths(0.4)

    assert 15 <= sum(here < whole for here, whole in found) <= 33
    assert all(1 <= here <= whole for here, whole in found)
    assert all(here == whole for here, whole in lengths(0.0))
    assert sum(here < whole for here, whole in lengths(1.0)) > 50
    assert lengths(0.5, seed=6) != lengths(0.5, seed=5)


def test_the_length_is_the_same_for_every_policy_and_not_stated() -> None:
    early, job = EarlyStops(WHOLE, 1.0), jobs()[3]
    fixed, elastic = (early.job_model(job, batch, seed=5) for batch in ("fixed", "elastic"))  # type: ignore[arg-type]

    assert fixed.epochs == elastic.epochs
    assert elastic.spec == WHOLE.job_model(job, "elastic", seed=5).spec


def test_a_scenario_sets_the_share() -> None:
    assert isinstance(model_of(Scenario(early_share=0.25)), EarlyStops)
    assert isinstance(model_of(Scenario()), Table2Model)


@pytest.mark.parametrize(
    ("share", "physics", "said"),
    [(1.5, "table2", "not a number"), (-1.0, "table2", "not a number"), (0.5, "curves", "has no")],
)
def test_an_impossible_share_is_refused(share: float, physics: str, said: str) -> None:
    with pytest.raises(TraceError, match=said) as refused:
        Scenario(early_share=share, physics=physics)  # type: ignore[arg-type]

    assert refused.value.field == "early_share"
