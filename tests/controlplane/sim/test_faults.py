"""Scripts that fail, users that give up, nodes that go and come back."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from controlplane.core.events import NodeGreeted, NodeLost, NodeSuspected
from controlplane.policy.registry import POLICIES
from controlplane.sim.node_groups import Nodes
from controlplane.sim.trace_jobs import TraceJob
from schemas.ids import NodeId
from schemas.messages.agent import (
    EpochReported,
    GroupBroken,
    GroupFormed,
    ScriptFailed,
    WorkerExited,
    WorkerStarted,
)
from tests.support.simulated import (
    N0,
    N1,
    S0,
    S1,
    T0,
    A,
    B,
    Life,
    Script,
    Toy,
    job,
    life,
)

ONE_SLOT = (Nodes(count=1, slots=1),)
TWO_NODES = (Nodes(count=2, slots=2),)
SLOW = ("goodput", "ones", "ones-paper", "optimus")  # policies that search
FAST = (Phase.generate,)  # a failure is small enough; to make it smaller takes minutes


# --- scripts


def test_a_script_that_fails_is_tried_again_from_its_last_epoch() -> None:
    lived = life("fifo", job("a", crashes_at=0.6)).run()

    assert lived.times(ScriptFailed) == [32.0]  # at 240 of 400 samples
    assert lived.times(WorkerStarted) == [0.0, 33.0]  # a second later, then 4 s from 200 on
    assert lived.times(EpochReported) == [18.0, 28.0, 47.0, 57.0]
    story = lived.stories["a"]
    assert (story.state, story.ended_at, story.queued_s) == ("succeeded", 57.0, 1.0)


def test_all_workers_of_a_failing_script_end_and_their_slots_are_free_at_once() -> None:
    lived = life("fifo", job("a", slots=2, crashes_at=0.6), job("b")).run()

    assert lived.times(ScriptFailed) == [20.0]
    assert lived.times(WorkerExited, A)[:2] == [20.0, 20.0]
    assert lived.stories["b"].started_at == 20.0
    assert lived.stories["a"].state == "succeeded"


def test_a_script_without_retries_fails_for_good() -> None:
    lived = life("fifo", job("a", crashes_at=0.6), physics=Toy(retries=0)).run()

    story = lived.stories["a"]
    assert (story.state, story.ended_at, story.jct_s) == ("failed", 32.0, 32.0)


def test_a_script_that_fails_in_its_first_epoch_begins_at_nothing() -> None:
    lived = life("fifo", job("a", crashes_at=0.125)).run()

    # 50 samples at 13.0; a second later it starts, and its first start had come to no checkpoint
    assert lived.times(ScriptFailed) == [13.0]
    assert lived.times(EpochReported) == [28.0, 38.0, 48.0, 58.0]


# --- users


def test_a_job_that_is_cancelled_while_it_waits_never_starts() -> None:
    lived = life("fifo", job("a"), job("b", 1.0, cancelled_after_s=9.0), nodes=ONE_SLOT).run()

    story = lived.stories["b"]
    assert (story.state, story.ended_at, story.started_at) == ("cancelled", 10.0, None)
    assert (story.jct_s, story.slot_s) == (None, 0.0)


def test_a_job_that_has_ended_cannot_be_cancelled() -> None:
    lived = life("fifo", job("a", cancelled_after_s=50.0), job("b"), nodes=ONE_SLOT).run()

    assert [story.state for story in lived.stories.values()] == ["succeeded", "succeeded"]


def test_a_job_that_is_cancelled_while_it_trains_leaves_its_slot_at_once() -> None:
    lived = life("fifo", job("a", cancelled_after_s=15.0), job("b", 1.0), nodes=ONE_SLOT).run()

    assert lived.stories["a"].state == "cancelled"
    assert lived.times(EpochReported, A) == []
    assert lived.times(WorkerExited, A) == [15.0]
    assert lived.stories["b"].started_at == 15.0


def test_a_job_that_is_cancelled_while_it_starts_leaves_its_slot_at_once() -> None:
    lived = life("fifo", job("a", cancelled_after_s=5.0), job("b", 1.0), nodes=ONE_SLOT).run()

    assert lived.times(WorkerExited, A) == [5.0]
    assert lived.stories["b"].started_at == 5.0


def test_a_job_that_is_cancelled_while_it_grows_leaves_all_its_slots() -> None:
    plans = Script((0, {A: {S0: 64}}), (10, {A: {S0: 32, S1: 32}}), (20, {B: {S0: 32, S1: 32}}))
    lived = life(plans, job("a", cancelled_after_s=12.0), job("b", 1.0)).run()

    assert lived.times(WorkerExited, A) == [12.0, 12.0]
    story = lived.stories["b"]
    assert (story.state, story.started_at) == ("succeeded", 20.0)


def test_a_job_that_ends_while_it_grows_leaves_all_its_slots() -> None:
    plans = Script((0, {A: {S0: 64}}), (46, {A: {S0: 32, S1: 32}}), (60, {B: {S0: 32, S1: 32}}))
    lived = life(plans, job("a"), job("b")).run()

    assert lived.stories["a"].ended_at == 48.0  # its newcomer would be ready at 52.0
    assert lived.times(WorkerExited, A) == [48.0, 48.0]
    story = lived.stories["b"]
    assert (story.state, story.started_at) == ("succeeded", 60.0)


def test_a_newcomer_gets_the_slot_of_a_job_that_is_cancelled_before_it_left() -> None:
    plans = Script((0, {A: {S0: 64}, B: {S1: 64}}), (20, {A: {S0: 32, S1: 32}}))
    lived = life(plans, job("a"), job("b", cancelled_after_s=15.0)).run()

    # ready at 26.0 with 180 samples, twice as fast from 26.5 on
    assert lived.times(EpochReported, A) == [18.0, 27.5, 32.5, 37.5]


# --- nodes


def test_a_group_that_loses_a_node_mends_itself_and_loses_no_step() -> None:
    plans = Script((0, {A: {S0: 32, T0: 32}}), (30, {A: {S0: 64}}))
    lived = life(plans, job("a"), nodes=TWO_NODES, losses=[(N1, 20.0, 1000.0)]).run()

    assert lived.times(GroupBroken) == [20.0]
    assert lived.times(NodeSuspected) == [26.0]
    assert lived.times(NodeLost) == [50.0]
    # 240 samples at 20.0, half as fast from 50.5 on; or from 51.0, if its batch is changed again
    recovered = lived.times(GroupFormed)[2:]
    assert recovered[0] == 50.5
    assert lived.times(EpochReported) == [13.0, 18.0, recovered[-1] + 6.0, recovered[-1] + 16.0]


def test_a_job_on_one_node_goes_back_to_its_last_epoch_when_that_is_lost() -> None:
    lived = life(Script((0, {A: {S0: 64}})), job("a"), losses=[(N0, 20.0, 100.0)]).run()

    assert lived.times(NodeGreeted) == [0.0, 120.0]
    # 20 samples of the second epoch are lost; 4 s after the node is back it is begun again
    assert lived.times(EpochReported) == [18.0, 134.0, 144.0, 154.0]
    assert lived.stays("a") == [(S0, 0.0, 50.0), (S0, 120.0, 154.0)]


def test_a_node_is_lost_before_it_is_back_however_soon_that_is() -> None:
    lived = life("fifo", job("a"), losses=[(N0, 20.0, 1.0)], nodes=ONE_SLOT).run()

    assert lived.times(NodeLost) == [50.0]
    assert lived.times(NodeGreeted) == [0.0, 51.0]
    assert lived.times(EpochReported) == [18.0, 65.0, 75.0, 85.0]


def test_an_order_that_a_dead_node_never_got_is_given_again_when_it_is_back() -> None:
    lived = life("fifo", job("a", 13.0), nodes=ONE_SLOT, losses=[(N0, 12.0, 50.0)]).run(1e4)

    assert lived.times(NodeLost) == [42.0]
    assert lived.times(NodeGreeted) == [0.0, 62.0]
    assert lived.times(WorkerStarted) == [62.0]
    assert lived.times(EpochReported) == [80.0, 90.0, 100.0, 110.0]


def test_a_start_goes_on_elsewhere_when_its_node_is_lost() -> None:
    plans = Script((0, {A: {S0: 32, T0: 32}}), (20, {A: {S0: 64}}))
    lived = life(plans, job("a"), nodes=TWO_NODES, losses=[(N1, 4.0, 1000.0)]).run()

    assert lived.times(GroupFormed) == [42.0]  # it had never trained: 8 s after the loss at 34.0
    assert lived.stories["a"].ended_at == 82.0


def test_a_job_goes_on_when_the_node_of_its_newcomer_is_lost() -> None:
    plans = Script((0, {A: {S0: 64}}), (20, {A: {S0: 32, T0: 32}}), (40, {A: {S0: 64}}))
    long = Toy(epoch_samples=200)
    lived = life(plans, job("a"), nodes=TWO_NODES, physics=long, losses=[(N1, 22.0, 1000.0)]).run()

    assert lived.times(EpochReported) == [28.0, 48.0, 68.0, 88.0]
    assert lived.stories["a"].state == "succeeded"


def test_a_node_that_is_away_cannot_be_lost_again() -> None:
    once = life("fifo", job("a"), losses=[(N0, 20.0, 100.0)]).run()
    twice = life("fifo", job("a"), losses=[(N0, 20.0, 100.0), (N0, 95.0, 100.0)]).run()

    assert twice.times(NodeLost) == once.times(NodeLost) == [50.0]
    assert twice.stories == once.stories


def test_a_node_can_be_lost_again_when_it_is_back() -> None:
    lived = life("fifo", job("a"), losses=[(N0, 20.0, 100.0), (N0, 130.0, 100.0)]).run()

    assert lived.times(NodeLost) == [50.0, 160.0]
    assert lived.times(NodeGreeted) == [0.0, 120.0, 230.0]
    assert lived.stories["a"].state == "succeeded"


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
                    f"j{number}",
                    float(at),
                    slots,
                    samples=samples,
                    cancelled_after_s=None if waits is None else float(waits),
                    crashes_at=share,
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
    )


def ends_well(lived: Life, jobs: list[TraceJob]) -> None:
    """Every job ended, and those that succeeded did all of their work."""
    patience = {each.name: each.cancelled_after_s for each in jobs}
    for name, story in lived.stories.items():
        wanted = {"succeeded"} if patience[name] is None else {"succeeded", "cancelled"}
        assert story.state in wanted, f"{name} is {story.state}"
    for name, training in lived.trainings.items():
        if lived.state.jobs[name].phase.value == "succeeded":
            assert training.progress == training.work.epoch_ends_at(training.work.epochs - 1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("cancels", [False, True])
def test_whatever_fails_every_job_comes_to_its_end(policy: str, cancels: bool) -> None:  # noqa: FBT001 - a parameter
    few = 4 if policy in SLOW else 25

    @settings(max_examples=few, deadline=None, derandomize=True, database=None, phases=FAST)
    @given(trouble=troubles(cancels=cancels), round_s=st.sampled_from([0.0, 30.0]))
    def lives(trouble: tuple[list[TraceJob], list[Loss]], round_s: float) -> None:
        jobs, losses = trouble
        lived = life(policy, *jobs, nodes=TWO_NODES, losses=losses, round_s=round_s).run(1e6)
        ends_well(lived, jobs)

    lives()
