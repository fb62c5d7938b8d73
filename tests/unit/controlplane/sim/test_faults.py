"""Failing scripts, cancellations, losses of nodes."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from controlplane.core.inputs import NodeGreeted, NodeLost, NodeSuspected
from controlplane.policy.registry import POLICIES
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import TraceJob
from schemas.ids import NodeId
from schemas.wire.agent import (
    EpochReported,
    GroupBroken,
    GroupFormed,
    ScriptFailed,
    WorkerExited,
    WorkerStarted,
)
from tests.support.simulations import (
    N0,
    N1,
    S0,
    S1,
    T0,
    A,
    B,
    ScriptedPolicy,
    SimulatedRun,
    ToyModel,
    job,
    simulated_run,
)

pytestmark = pytest.mark.slow
ONE_SLOT = (NodeGroup(count=1, slots=1),)
TWO_NODES = (NodeGroup(count=2, slots=2),)
SLOW = ("drl", "goodput", "harmony-drl", "ones", "ones-paper", "optimus", "slaq")  # that search
FAST = (Phase.generate,)  # a failure is small enough; to make it smaller takes minutes


# --- scripts


def test_a_failed_script_restarts_from_its_last_epoch() -> None:
    run = simulated_run("fifo", job("a", crashes_at=0.6)).run()

    assert run.times(ScriptFailed) == [32.0]  # at 240 of 400 samples
    assert run.times(WorkerStarted) == [0.0, 33.0]  # a second later, then 4 s from 200 on
    assert run.times(EpochReported) == [18.0, 28.0, 47.0, 57.0]
    ended = run.jobs["a"]
    assert (ended.state, ended.ended_at, ended.queued_s) == ("succeeded", 57.0, 1.0)
    ended = (
        simulated_run("fifo", job("a", crashes_at=0.6), model=ToyModel(retries=0)).run().jobs["a"]
    )
    assert (ended.state, ended.ended_at, ended.jct_s) == ("failed", 32.0, 32.0)


def test_the_slots_of_a_failed_script_are_free_at_once() -> None:
    run = simulated_run("fifo", job("a", slots=2, crashes_at=0.6), job("b")).run()

    assert run.times(ScriptFailed) == [20.0]
    assert run.times(WorkerExited, A)[:2] == [20.0, 20.0]
    assert run.jobs["b"].started_at == 20.0
    assert run.jobs["a"].state == "succeeded"


def test_a_script_that_fails_in_its_first_epoch_starts_over() -> None:
    run = simulated_run("fifo", job("a", crashes_at=0.125)).run()

    # 50 samples at 13.0; a second later it starts, and its first start had come to no checkpoint
    assert run.times(ScriptFailed) == [13.0]
    assert run.times(EpochReported) == [28.0, 38.0, 48.0, 58.0]


# --- users


def test_a_job_cancelled_while_it_waits_never_starts() -> None:
    run = simulated_run(
        "fifo", job("a"), job("b", 1.0, cancelled_after_s=9.0), nodes=ONE_SLOT
    ).run()

    ended = run.jobs["b"]
    assert (ended.state, ended.ended_at, ended.started_at) == ("cancelled", 10.0, None)
    assert (ended.jct_s, ended.slot_s) == (None, 0.0)


def test_a_job_that_has_ended_cannot_be_cancelled() -> None:
    run = simulated_run("fifo", job("a", cancelled_after_s=50.0), job("b"), nodes=ONE_SLOT).run()

    assert [ended.state for ended in run.jobs.values()] == ["succeeded", "succeeded"]


@pytest.mark.parametrize("after_s", [5.0, 15.0])  # it starts up to 8.0, and then trains
def test_a_cancelled_job_leaves_its_slot_at_once(after_s: float) -> None:
    run = simulated_run(
        "fifo", job("a", cancelled_after_s=after_s), job("b", 1.0), nodes=ONE_SLOT
    ).run()

    assert run.jobs["a"].state == "cancelled"
    assert run.times(EpochReported, A) == []
    assert run.times(WorkerExited, A) == [after_s]
    assert run.jobs["b"].started_at == after_s


def test_a_job_cancelled_while_it_grows_leaves_all_its_slots() -> None:
    plans = ScriptedPolicy(
        (0, {A: {S0: 64}}), (10, {A: {S0: 32, S1: 32}}), (20, {B: {S0: 32, S1: 32}})
    )
    run = simulated_run(plans, job("a", cancelled_after_s=12.0), job("b", 1.0)).run()

    assert run.times(WorkerExited, A) == [12.0, 12.0]
    ended = run.jobs["b"]
    assert (ended.state, ended.started_at) == ("succeeded", 20.0)


def test_a_job_that_ends_while_it_grows_leaves_all_its_slots() -> None:
    plans = ScriptedPolicy(
        (0, {A: {S0: 64}}), (46, {A: {S0: 32, S1: 32}}), (60, {B: {S0: 32, S1: 32}})
    )
    run = simulated_run(plans, job("a"), job("b")).run()

    assert run.jobs["a"].ended_at == 48.0  # its newcomer would be ready at 52.0
    assert run.times(WorkerExited, A) == [48.0, 48.0]
    ended = run.jobs["b"]
    assert (ended.state, ended.started_at) == ("succeeded", 60.0)


def test_a_newcomer_gets_the_slot_of_a_job_that_is_cancelled_before_it_left() -> None:
    plans = ScriptedPolicy((0, {A: {S0: 64}, B: {S1: 64}}), (20, {A: {S0: 32, S1: 32}}))
    run = simulated_run(plans, job("a"), job("b", cancelled_after_s=15.0)).run()

    # ready at 26.0 with 180 samples, twice as fast from 26.5 on
    assert run.times(EpochReported, A) == [18.0, 27.5, 32.5, 37.5]


# --- nodes


def test_a_group_that_loses_a_node_recovers_and_loses_no_step() -> None:
    plans = ScriptedPolicy((0, {A: {S0: 32, T0: 32}}), (30, {A: {S0: 64}}))
    run = simulated_run(plans, job("a"), nodes=TWO_NODES, losses=[(N1, 20.0, 1000.0)]).run()

    assert run.times(GroupBroken) == [20.0]
    assert run.times(NodeSuspected) == [26.0]
    assert run.times(NodeLost) == [50.0]
    # 240 samples at 20.0, half as fast from 50.5 on; or from 51.0, if its batch is changed again
    recovered = run.times(GroupFormed)[2:]
    assert recovered[0] == 50.5
    assert run.times(EpochReported) == [13.0, 18.0, recovered[-1] + 6.0, recovered[-1] + 16.0]


def test_a_job_on_a_lost_node_goes_back_to_its_last_epoch() -> None:
    run = simulated_run(
        ScriptedPolicy((0, {A: {S0: 64}})), job("a"), losses=[(N0, 20.0, 100.0)]
    ).run()

    assert run.times(NodeGreeted) == [0.0, 120.0]
    # 20 samples of the second epoch are lost; 4 s after the node is back it is begun again
    assert run.times(EpochReported) == [18.0, 134.0, 144.0, 154.0]
    assert run.allocations("a") == [(S0, 0.0, 50.0), (S0, 120.0, 154.0)]


def test_a_node_is_lost_before_it_returns() -> None:
    run = simulated_run("fifo", job("a"), losses=[(N0, 20.0, 1.0)], nodes=ONE_SLOT).run()

    assert run.times(NodeLost) == [50.0]
    assert run.times(NodeGreeted) == [0.0, 51.0]
    assert run.times(EpochReported) == [18.0, 65.0, 75.0, 85.0]


def test_an_order_to_a_lost_node_is_repeated_after_its_return() -> None:
    run = simulated_run("fifo", job("a", 13.0), nodes=ONE_SLOT, losses=[(N0, 12.0, 50.0)]).run(1e4)

    assert run.times(NodeLost) == [42.0]
    assert run.times(NodeGreeted) == [0.0, 62.0]
    assert run.times(WorkerStarted) == [62.0]
    assert run.times(EpochReported) == [80.0, 90.0, 100.0, 110.0]


def test_a_start_continues_elsewhere_after_a_loss() -> None:
    plans = ScriptedPolicy((0, {A: {S0: 32, T0: 32}}), (20, {A: {S0: 64}}))
    run = simulated_run(plans, job("a"), nodes=TWO_NODES, losses=[(N1, 4.0, 1000.0)]).run()

    assert run.times(GroupFormed) == [42.0]  # it had never trained: 8 s after the loss at 34.0
    assert run.jobs["a"].ended_at == 82.0


def test_a_job_continues_after_the_loss_of_its_newcomer() -> None:
    plans = ScriptedPolicy((0, {A: {S0: 64}}), (20, {A: {S0: 32, T0: 32}}), (40, {A: {S0: 64}}))
    long = ToyModel(epoch_samples=200)
    run = simulated_run(
        plans, job("a"), nodes=TWO_NODES, model=long, losses=[(N1, 22.0, 1000.0)]
    ).run()

    assert run.times(EpochReported) == [28.0, 48.0, 68.0, 88.0]
    assert run.jobs["a"].state == "succeeded"


def test_a_lost_node_cannot_be_lost_again() -> None:
    once = simulated_run("fifo", job("a"), losses=[(N0, 20.0, 100.0)]).run()
    twice = simulated_run("fifo", job("a"), losses=[(N0, 20.0, 100.0), (N0, 95.0, 100.0)]).run()

    assert twice.times(NodeLost) == once.times(NodeLost) == [50.0]
    assert twice.jobs == once.jobs


def test_a_returned_node_can_be_lost_again() -> None:
    run = simulated_run("fifo", job("a"), losses=[(N0, 20.0, 100.0), (N0, 130.0, 100.0)]).run()

    assert run.times(NodeLost) == [50.0, 160.0]
    assert run.times(NodeGreeted) == [0.0, 120.0, 230.0]
    assert run.jobs["a"].state == "succeeded"


# --- whatever happens


Loss = tuple[NodeId, float, float]


def troubles(*, cancels: bool) -> st.SearchStrategy[tuple[list[TraceJob], list[Loss]]]:
    patience = st.none() | st.integers(0, 60) if cancels else st.none()
    crash = st.none() | st.floats(0.05, 0.95)
    each = st.tuples(st.integers(0, 60), st.integers(1, 4), st.integers(20, 300), patience, crash)
    # far enough apart that a node is back before it is lost again
    losses = st.lists(st.tuples(st.sampled_from([N0, N1]), st.integers(0, 80)), max_size=2)
    return st.tuples(
        st.lists(each, min_size=1, max_size=4).map(
            lambda rows: [
                job(
                    f"j{number}", float(at), slots, samples=samples,
                    cancelled_after_s=None if waits is None else float(waits), crashes_at=share,
                )
                for number, (at, slots, samples, waits, share) in enumerate(
                    sorted(rows, key=lambda row: row[0])
                )
            ]
        ),
        losses.map(
            lambda rows: [
                (node, at + 100.0 * number, 50.0) for number, (node, at) in enumerate(rows)
            ]
        ),
    )  # fmt: skip


def ends_well(run: SimulatedRun, jobs: list[TraceJob]) -> None:
    """Every job ended, and those that succeeded did all of their work."""
    patience = {each.name: each.cancelled_after_s for each in jobs}
    for name, ended in run.jobs.items():
        wanted = {"succeeded"} if patience[name] is None else {"succeeded", "cancelled"}
        assert ended.state in wanted, f"{name} is {ended.state}"
    for name, training in run.trainings.items():
        if run.job(name).phase.value == "succeeded":
            assert training.progress == training.model.epoch_ends_at(training.model.epochs - 1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("cancels", [False, True])
def test_every_job_ends_under_any_faults(policy: str, cancels: bool) -> None:  # noqa: FBT001 - a parameter
    few = 4 if policy in SLOW else 25

    @settings(max_examples=few, deadline=None, derandomize=True, database=None, phases=FAST)
    @given(trouble=troubles(cancels=cancels), round_s=st.sampled_from([0.0, 30.0]))
    def runs(trouble: tuple[list[TraceJob], list[Loss]], round_s: float) -> None:
        jobs, losses = trouble
        run = simulated_run(policy, *jobs, nodes=TWO_NODES, losses=losses, round_s=round_s).run(1e6)
        ends_well(run, jobs)

    runs()
