"""The last trials of a sweep go on as jobs of their own: at the end of an epoch, with their state."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controlplane.sweeps.configurations import stream
from controlplane.sweeps.orders import Graduate, Order, RunUnit, StateName, UnitReport
from controlplane.sweeps.sweep import Sweep
from schemas.ids import NodeId, WorkerId
from schemas.sweeps import Asha, RandomSearch, Searcher, SuccessiveHalving
from tests.support.sizes import examples
from tests.support.sweeps import NOW, SweepSite, search

N0, W0 = NodeId("n0"), WorkerId("w0")


def graduates(orders: list[Order]) -> list[Graduate]:
    return [order for order in orders if isinstance(order, Graduate)]


def report(accuracy: float) -> UnitReport:
    return UnitReport({"loss": 1.0}, 10, 2.0, {"accuracy": accuracy}, digest="d")


def alone(slots: int, epochs: int = 3) -> tuple[Sweep, RunUnit]:
    """A sweep of one trial over one partition, and its first unit."""
    sweep = Sweep(search(RandomSearch(1), epochs), 1, graduate_slots=slots)
    orders = [*sweep.begin(NOW), *sweep.nodes_hold({N0: {0}}, NOW)]
    orders += sweep.worker_came(W0, N0, NOW)
    (unit,) = [order for order in orders if isinstance(order, RunUnit)]
    return sweep, unit


def test_one_trial_on_four_slots_graduates_after_its_epoch() -> None:
    sweep, unit = alone(slots=4)

    orders = sweep.unit_done(unit.attempt, report(0.5), NOW)

    values = sweep.state.trials[0].values
    assert graduates(orders) == [Graduate(0, values, StateName(0, 1), "d", 1)]
    assert not [order for order in orders if isinstance(order, RunUnit)]
    assert sweep.state.trials[0].ended == "graduated"
    assert sweep.over
    assert sweep.state.stored.on(N0) == [StateName(0, 1)]  # until its job has it
    sweep.graduate_ended_epoch(0, {"accuracy": 0.75})
    sweep.graduate_ended_epoch(0, {"loss": 0.1})
    assert sweep.state.trials[0].scores == (0.5, 0.75), "epochs of its job count"
    assert sweep.state.trials[0].ended == "graduated"
    sweep.close("it is over")
    assert sweep.state.stored.on(N0) == [StateName(0, 1)]


@pytest.mark.parametrize(("slots", "epochs", "ended"), [(2, 3, ""), (4, 1, "done")])
def test_a_trial_on_few_slots_or_at_its_end_does_not_graduate(
    slots: int, epochs: int, ended: str
) -> None:
    sweep, unit = alone(slots, epochs)

    orders = sweep.unit_done(unit.attempt, report(0.5), NOW)

    assert graduates(orders) == []
    assert sweep.state.trials[0].ended == ended
    assert any(isinstance(order, RunUnit) for order in orders) is not bool(ended)


def test_the_winner_of_asha_graduates_and_the_other_trials_stop() -> None:
    sweep = Sweep(search(Asha(4, eta=2), 4), 1, graduate_slots=4)
    site = SweepSite(sweep, {N0: {0}}, 1)

    site.run(stream(1))

    ended = [trial.ended for trial in sweep.state.trials]
    assert ended.count("graduated") == 1
    assert set(ended) == {"graduated", "stopped"}


def test_an_added_trial_cancels_a_graduation() -> None:
    sweep = Sweep(search(RandomSearch(1), 3), 2, graduate_slots=4)
    site = SweepSite(sweep, {N0: {0, 1}}, 1)
    (worker,) = site.running
    site.end_unit(worker)
    assert sweep.state.graduating == {0}

    site.do(sweep.add({"lr": 0.1}, NOW))

    assert sweep.state.graduating == set()


def test_a_copy_trains_an_epoch_before_it_graduates() -> None:
    sweep, unit = alone(slots=8)
    sweep.pause(0)
    sweep.unit_done(unit.attempt, report(0.5), NOW)

    orders = sweep.add({"lr": 0.5}, NOW, parent=0)
    (own,) = [order for order in orders if isinstance(order, RunUnit)]
    assert graduates(orders) == []
    orders = sweep.unit_done(own.attempt, report(0.6), NOW)

    assert [(one.trial, one.state) for one in graduates(orders)] == [(1, StateName(1, 2))]


@pytest.mark.parametrize(
    "searcher",
    [RandomSearch(5), SuccessiveHalving(5, eta=2), Asha(7, eta=2)],
    ids=["random", "halving", "asha"],
)
@settings(max_examples=examples(40), deadline=None)
@example(slots=3, faults=8, seed=3126)  # a state that comes back lets its trial go
@given(slots=st.integers(0, 12), faults=st.sampled_from([0, 8]), seed=st.integers(0, 10_000))
def test_losses_leave_every_trial_ended_and_every_graduate_with_a_state(
    searcher: Searcher, slots: int, faults: int, seed: int
) -> None:
    nodes = {NodeId(f"n{at}"): {0, 1, 2} for at in range(2)}
    sweep = Sweep(search(searcher, 4, seed=seed), 3, graduate_slots=slots)
    site = SweepSite(sweep, nodes, 4, lost_disks=False)

    site.run(stream(seed), faults)

    gone = [trial for trial in sweep.state.trials if trial.ended == "graduated"]
    assert 2 * len(gone) <= max(0, slots)
    for trial in gone:
        name = sweep.state.graduated_states[trial.number]
        assert name.version % 3 == 0
        assert name.version == len(sweep.state.models[trial.number].finished_units)
        assert any(name in states for states in site.states.values())
    assert {trial.ended for trial in sweep.state.trials} <= {"done", "stopped", "graduated"}
