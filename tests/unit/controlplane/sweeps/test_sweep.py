"""Whatever comes, goes and is lost: every trial ends as it would have alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.sweeps.configurations import stream
from controlplane.sweeps.orders import (
    CopyState,
    DataRefused,
    DropState,
    ReleaseWorker,
    RunUnit,
    StateDiffers,
    StateName,
    StopUnit,
    TrialEnded,
    UnitReport,
)
from controlplane.sweeps.sweep import Sweep
from controlplane.sweeps.trial_changes import MAX_FAILED_READS
from controlplane.sweeps.trials import Trial, merged
from schemas.ids import NodeId, Seconds, WorkerId
from schemas.sweeps import (
    Asha,
    Grid,
    Hyperband,
    MedianStopping,
    PopulationBased,
    RandomSearch,
    Searcher,
    SuccessiveHalving,
    VisitOrder,
    choice,
)
from tests.support.sizes import examples
from tests.support.sweeps import NOW, History, SweepSite, goodness, loss_and_samples, search, step

N0, N1 = NodeId("n0"), NodeId("n1")
W0, W1 = WorkerId("w0"), WorkerId("w1")
LR = {"lr": choice(0.1, 0.2)}


def histories(site: SweepSite) -> dict[int, History]:
    """What each trial's visits amount to, trained alone in their order."""
    found: dict[int, History] = {}
    state = site.sweep.state
    for model in state.models:
        history: History = ()
        for at, visit in enumerate(model.finished_units):
            epoch = 1 + at // state.partitions
            history = step(history, state.trials[visit.trial].values, epoch, visit.partition)
        found[model.trial] = history
    return found


SEARCHERS: list[Searcher] = [
    Grid(),
    RandomSearch(3),
    SuccessiveHalving(5, eta=2),
    Hyperband(2),
    PopulationBased(4),
]
sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("searcher", SEARCHERS, ids=lambda one: type(one).__name__)
@settings(max_examples=examples(60), deadline=None)
@given(
    size=sizes,
    faults=st.sampled_from([0, 12]),
    seed=st.integers(0, 10_000),
    order=st.sampled_from(get_args(VisitOrder)),
    lost_disks=st.booleans(),
)
def test_faults_change_no_result_and_repeat_no_finished_unit(
    searcher: Searcher,
    size: tuple[int, int, int],
    faults: int,
    seed: int,
    order: VisitOrder,
    *,
    lost_disks: bool,
) -> None:
    nodes, partitions, workers = size
    rng = stream(seed)
    names = [NodeId(f"n{at}") for at in range(nodes)]
    held = {node: set(range(partitions)) for node in names}
    spec = search(searcher, 4, LR if isinstance(searcher, Grid) else None, seed)
    sweep = Sweep(spec, partitions, order=order)
    site = SweepSite(sweep, held, workers, lost_disks=lost_disks)

    site.run(rng, faults)

    alone = histories(site)
    state = site.sweep.state
    for model in state.models:
        for epoch in range(model.whole_epochs):
            visits = model.finished_units[epoch * partitions : (epoch + 1) * partitions]
            assert sorted(one.partition for one in visits) == list(range(partitions))
    for one in site.scored:
        assert one.metrics == {
            "accuracy": goodness(alone[one.trial][: one.epoch * partitions]),
            "loss": pytest.approx(mean_loss(partitions)),
        }
    done = sum(
        len(model.finished_units) - (model.parents[-1].version if model.parents else 0)
        for model in state.models
    )
    assert site.units >= done
    if not faults:
        assert site.units == done
    for states in site.states.values():
        for name, history in states.items():
            assert history == alone[name.trial][: name.version]


def mean_loss(partitions: int) -> float:
    samples = [loss_and_samples(partition) for partition in range(partitions)]
    return sum(loss * many for loss, many in samples) / sum(many for _, many in samples)


def sweep(
    *, workers: dict[WorkerId, NodeId], epochs: int = 1, partitions: int = 2, many: int = 2
) -> tuple[Sweep, list[object]]:
    """A random search on nodes that have everything; what it orders last."""
    found = Sweep(search(RandomSearch(many), epochs), partitions)
    orders: list[object] = list(found.begin(NOW))
    orders += found.nodes_hold({node: range(partitions) for node in workers.values()}, NOW)
    for worker, node in workers.items():
        orders += found.worker_came(worker, node, NOW)
    return found, orders


def units(orders: Sequence[object]) -> list[RunUnit]:
    return [order for order in orders if isinstance(order, RunUnit)]


def one_trial(**changes: int) -> tuple[Sweep, RunUnit]:
    """A sweep of one trial on one worker, and its first unit."""
    found, orders = sweep(workers={W0: N0}, many=1, **changes)
    (run,) = units(orders)
    return found, run


def report(**scores: float) -> UnitReport:
    return UnitReport({"loss": 1.0}, 10, 2.0, scores)


def test_a_state_is_dropped_when_the_next_one_has_two_replicas() -> None:
    one, orders = sweep(workers={W0: N0, W1: N1}, epochs=2)
    first, second = units(orders)

    orders = one.unit_done(first.attempt, report(), NOW)
    copy = CopyState(StateName(first.trial, 1), N0, N1)
    assert copy in orders
    orders += one.state_stored(copy.state, N1, NOW)
    assert not [order for order in orders if isinstance(order, DropState)]
    one.unit_done(second.attempt, report(), NOW)

    run = next(run for run in units(orders) if run.trial == first.trial)
    orders = one.unit_done(run.attempt, report(accuracy=0.5), NOW)
    assert not [order for order in orders if isinstance(order, DropState)]
    after = one.state_stored(run.result, N1, NOW)
    assert DropState(copy.state, N0) in after
    assert DropState(copy.state, N1) in after


def test_a_node_keeps_few_states_while_copies_fail() -> None:
    one, orders = sweep(workers={W0: N0, W1: N1}, epochs=50, many=1)
    most = 0
    for _ in range(60):
        (run,) = units(orders)
        orders = one.unit_done(run.attempt, report(accuracy=0.5), NOW)
        most = max(most, sum(len(one.state.stored.on(node)) for node in (N0, N1)))

    assert most <= 4


def test_a_copy_is_tried_three_times_on_different_nodes() -> None:
    one, orders = sweep(workers={W0: N0, W1: N1, WorkerId("w2"): NodeId("n2")}, many=1)
    (run,) = units(orders)
    orders = one.unit_done(run.attempt, report(), NOW)
    targets = []
    while copies := [order for order in orders if isinstance(order, CopyState)]:
        (copy,) = copies
        targets.append(copy.target)
        orders = one.state_missing(copy.state, copy.target, NOW)

    assert len(targets) == 3
    assert len(set(targets)) == 2


def test_the_result_of_an_older_attempt_counts_for_nothing() -> None:
    one, orders = sweep(workers={W0: N0})
    (run,) = units(orders)
    one.worker_gone(W0, NOW)

    assert one.unit_done(run.attempt, report(), NOW) == []
    (again,) = units(one.worker_came(W1, N0, NOW))
    assert again.attempt > run.attempt
    assert again.state is None


def test_a_revoked_worker_ends_its_unit_first_unless_it_has_no_time() -> None:
    one, run = one_trial()
    assert one.worker_revoked(W0, NOW, 120.0) == []
    assert one.unit_done(run.attempt, report(), NOW) == [ReleaseWorker(W0)]

    one, run = one_trial()
    assert one.worker_revoked(W0, NOW, 0.0) == [StopUnit(run.attempt, W0), ReleaseWorker(W0)]
    (again,) = units(one.worker_came(W1, N0, NOW))
    assert (again.trial, again.partition, again.state) == (run.trial, run.partition, None)


def test_a_unit_of_a_leaving_worker_is_given_up_without_blame() -> None:
    one, run = one_trial()
    assert one.worker_revoked(W0, Seconds(10.0), 120.0) == []
    assert one.deadline == 130.0

    assert one.deadline_passed(Seconds(129.0)) == []
    assert one.deadline_passed(Seconds(130.0)) == [StopUnit(run.attempt, W0), ReleaseWorker(W0)]

    assert (one.state.hung_units, one.state.crashes) == ({}, {})
    assert len(units(one.worker_came(W1, N0, Seconds(131.0)))) == 1


@pytest.mark.parametrize(("at", "ends_first"), [(50.0, False), (90.0, True)])
def test_a_unit_that_cannot_end_in_time_is_given_up_at_once(at: float, *, ends_first: bool) -> None:
    one, run = one_trial()
    took = UnitReport({}, 10, 200.0)
    (following,) = units(one.unit_done(run.attempt, took, NOW))  # 200 s a unit
    one.unit_begun(following.attempt, 10, NOW)

    orders = one.worker_revoked(W0, Seconds(at), 120.0)

    given_up = [StopUnit(following.attempt, W0), ReleaseWorker(W0)]
    assert orders == ([] if ends_first else given_up)


def test_a_kept_worker_takes_units_again() -> None:
    one, run = one_trial()
    one.worker_revoked(W0, NOW, 120.0)

    one.worker_kept(W0, NOW)

    assert one.deadline != 120.0
    assert len(units(one.unit_done(run.attempt, report(), NOW))) == 1


def test_a_trial_that_fails_ends_alone() -> None:
    one, orders = sweep(workers={W0: N0})
    (run,) = units(orders)

    ended, *following = one.unit_failed(run.attempt, "model_fn raised", "trial", NOW)

    assert ended == TrialEnded(run.trial, "failed", "model_fn raised")
    assert [order.trial for order in units(list(following))] == [1 - run.trial]


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        ({}, "no unit reported metric 'accuracy' (reported: loss); return it from eval_fn"),
        ({"accuracy": float("nan")}, "metric accuracy is nan, not a finite number"),
    ],
)
def test_a_missing_or_infinite_metric_fails_its_trial(scores: dict[str, float], why: str) -> None:
    one, run = one_trial(partitions=1)

    orders = one.unit_done(run.attempt, report(**scores), NOW)

    assert TrialEnded(run.trial, "failed", why) in orders
    assert one.over


def test_a_second_hanging_unit_fails_its_trial() -> None:
    one, run = one_trial()
    one.unit_begun(run.attempt, 10, Seconds(100.0))
    assert one.deadline == 3700.0

    assert one.deadline_passed(Seconds(3600.0)) == []
    assert one.deadline_passed(Seconds(3700.0)) == [StopUnit(run.attempt, W0), ReleaseWorker(W0)]
    (again,) = units(one.worker_came(W1, N0, Seconds(3700.0)))
    one.unit_begun(again.attempt, 10, Seconds(3700.0))
    _, _, ended = one.deadline_passed(Seconds(7300.0))

    assert ended == TrialEnded(
        0, "failed", "2 units exceeded 3600 s; check train_fn for a deadlock"
    )


def test_a_unit_has_five_times_its_expected_duration() -> None:
    one, run = one_trial()
    (following,) = units(one.unit_done(run.attempt, UnitReport({}, 10, 100.0), Seconds(100.0)))
    one.unit_begun(following.attempt, 10, Seconds(200.0))

    assert one.deadline == 700.0


def test_an_unreadable_state_is_trained_again_from_the_earlier_one() -> None:
    one, run = one_trial()
    (following,) = units(one.unit_done(run.attempt, report(), NOW))

    for _ in range(MAX_FAILED_READS):
        assert following.state == StateName(0, 1)
        (following,) = units(one.unit_failed(following.attempt, "digest", "state", NOW))

    again = following
    assert (again.state, again.partition, again.evaluate) == (None, run.partition, False)


def test_a_paused_trial_takes_no_unit_until_it_is_resumed() -> None:
    one, run = one_trial()
    one.pause(0)

    assert units(one.unit_done(run.attempt, report(), NOW)) == []
    assert len(units(one.resume(0, NOW))) == 1


def test_a_configuration_continues_from_its_parent_s_state_until_the_last_epoch() -> None:
    one, run = one_trial(partitions=1, epochs=2)
    one.pause(0)
    one.unit_done(run.attempt, report(accuracy=0.5), NOW)

    (child,) = units(one.add({"lr": 0.5}, NOW, parent=0))
    assert (child.trial, child.values, child.epoch) == (1, {"lr": 0.5}, 2)
    assert (child.state, child.result) == (StateName(0, 1), StateName(1, 2))

    one.unit_done(child.attempt, report(accuracy=0.5), NOW)
    orders = one.add({"lr": 0.5}, NOW, parent=1)
    assert TrialEnded(2, "stopped", "trial 1 has already trained all 2 epochs") in orders


def test_the_running_unit_of_a_stopped_trial_does_not_count() -> None:
    one, orders = sweep(workers={W0: N0})
    (run,) = units(orders)

    assert one.stop(run.trial, "ended by anna", NOW) == [
        TrialEnded(run.trial, "stopped", "ended by anna")
    ]
    (following,) = one.unit_done(run.attempt, report(), NOW)

    assert isinstance(following, RunUnit)
    assert following.trial == 1 - run.trial
    assert one.state.models[run.trial].finished_units == []


def test_states_of_a_returned_node_count_again() -> None:
    one, run = one_trial()
    one.unit_done(run.attempt, UnitReport({}, 10, 1.0, {}, "d1"), NOW)

    one.node_lost(N0, NOW)
    assert one.state.models[0].at == 0
    one.node_back(N0, NOW)
    one.nodes_hold({N0: range(2)}, NOW)
    (again,) = units(one.worker_came(W1, N0, NOW))

    assert again.state == run.result


def test_a_repeated_unit_with_another_state_is_announced() -> None:
    one, run = one_trial()
    (following,) = units(one.unit_done(run.attempt, UnitReport({}, 10, 1.0, {}, "d1"), NOW))
    one.state_missing(run.result, N0, NOW)
    for _ in range(MAX_FAILED_READS):
        (following,) = units(one.unit_failed(following.attempt, "gone", "state", NOW))

    orders = one.unit_done(following.attempt, UnitReport({}, 10, 1.0, {}, "d2"), NOW)

    assert StateDiffers(run.result) in orders
    assert one.state.models[0].digest(1) == "d2"


def test_three_consecutive_crashes_fail_a_trial() -> None:
    one, orders = sweep(workers={W0: N0}, many=1)
    ended: list[object] = []
    for at in range(3):
        assert len(units(orders)) == 1
        worker = W0 if not at else WorkerId(f"again{at}")
        ended = one.worker_gone(worker, NOW, "a worker crashed with SIGSEGV", fault=True)
        orders = one.worker_came(WorkerId(f"again{at + 1}"), N0, NOW)

    why = "3 consecutive workers exited in units of this trial: a worker crashed with SIGSEGV"
    assert TrialEnded(0, "failed", why) in ended
    assert one.over


def test_a_node_with_other_data_is_left_out() -> None:
    one, orders = sweep(workers={W0: N0, W1: N1})
    first, second = units(orders)
    assert first.partition != second.partition
    one.state.data.sizes[second.partition] = (10, N0)

    stop, released, refused, *_ = one.unit_begun(second.attempt, 9, NOW)

    why = "n1 has 9 samples of the partition, n0 has 10; input_fn must return the same data on every node"
    assert (stop, released) == (StopUnit(second.attempt, W1), ReleaseWorker(W1))
    assert refused == DataRefused(N1, second.partition, why)
    assert second.partition not in one.state.staged[N1]
    assert one.state.stuck_reason == ""
    one.unit_failed(first.attempt, "no such file", "data", NOW)
    (again,) = [lease.order for lease in one.state.leases.values() if lease.order.worker == W0]
    one.unit_failed(again.attempt, "no such file", "data", NOW)
    assert "no such file" in one.state.stuck_reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "searcher",
    [RandomSearch(5), SuccessiveHalving(9), Asha(9), Hyperband(), PopulationBased(4)],
    ids=lambda one: type(one).__name__,
)
@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 99),
    workers=st.integers(1, 5),
    chance=st.integers(0, 999),
    faults=st.sampled_from([0, 6]),
)
def test_the_fixed_order_gives_the_same_trials_on_any_slots(
    searcher: Searcher, seed: int, workers: int, chance: int, faults: int
) -> None:
    def trials(workers: int, chance: int, faults: int) -> list[Trial]:
        one = Sweep(search(searcher, epochs=9, seed=seed), 4, order="fixed")
        held = {N0: {0, 1, 2}, N1: {1, 2, 3}}
        SweepSite(one, held, workers=2 + workers).run(stream("chance", chance), faults)
        return one.state.trials

    assert trials(workers, chance, faults) == trials(0, 0, 0)


JOINED: list[Searcher] = [
    RandomSearch(4),
    SuccessiveHalving(9),
    Asha(9),
    Hyperband(),
    MedianStopping(4),
    PopulationBased(4, interval_epochs=2),
]


@pytest.mark.parametrize("searcher", JOINED, ids=lambda one: type(one).__name__)
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 99), after=st.integers(0, 60), failing=st.booleans())
def test_a_sweep_ends_with_trials_added_at_any_time(
    searcher: Searcher, seed: int, after: int, *, failing: bool
) -> None:
    rng = stream("joining", seed)
    one = Sweep(search(searcher, epochs=9, seed=seed), 2)
    site = SweepSite(one, {N0: {0, 1}, N1: {0, 1}}, workers=3)
    for _ in range(after):
        if site.running:
            site.end_unit(sorted(site.running)[rng.randrange(len(site.running))])
    if failing and (scored := [trial for trial in one.state.trials if not trial.ended]):
        lease = one.state.lease_of(scored[0].number)
        if lease is not None:
            site.running.pop(lease.order.worker)
            site.idle.add(lease.order.worker)
            nan = UnitReport({}, 10, 1.0, {"accuracy": math.nan}, "d")
            site.do(one.unit_done(lease.order.attempt, nan, NOW))
    for _ in range(3):
        many = len(one.state.trials)
        parent = rng.choice([None, *range(many)])
        site.do(one.add({"lr": 0.01}, NOW, parent))

    site.run(rng)

    for trial in one.state.trials:
        model = one.state.models[trial.number]
        assert trial.ended
        assert trial.epochs <= 9
        if trial.ended == "done":
            assert trial.epochs == model.whole_epochs == 9


def test_a_copy_of_a_copy_continues_from_the_state_of_the_first() -> None:
    one, run = one_trial(partitions=1, epochs=3)
    one.pause(0)
    one.unit_done(run.attempt, report(accuracy=0.5), NOW)
    one.worker_gone(W0, NOW)
    one.add({"lr": 0.5}, NOW, parent=0)
    one.pause(1)
    one.add({"lr": 0.6}, NOW, parent=1)

    (child,) = units(one.worker_came(W1, N0, NOW))

    assert (child.state, child.result) == (StateName(0, 1), StateName(2, 2))


@pytest.mark.parametrize(
    ("losses", "mean"), [((math.inf, -math.inf), math.nan), ((1e306, 1.2e306), 1.1e306)]
)
def test_huge_metrics_are_merged(losses: tuple[float, float], mean: float) -> None:
    parts = [({"loss": loss}, 100) for loss in losses]

    assert merged(parts) == {"loss": pytest.approx(mean, nan_ok=True)}
