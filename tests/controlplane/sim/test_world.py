"""Little worlds against a watch: when groups begin, change and end, and what they did by then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from controlplane.core.events import PlanProposed
from controlplane.policy.api import EpochSeen, JobEnded, PlanTaken, StepsSeen
from controlplane.policy.registry import POLICIES
from controlplane.sim.engine.kernel import Kernel
from controlplane.sim.engine.simulation import Habits, World
from controlplane.sim.models.interference import Distributed
from controlplane.sim.node_groups import Nodes
from controlplane.sim.trace_jobs import TraceJob
from schemas.messages.agent import (
    EpochReported,
    GroupFormed,
    Suspended,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from tests.support.simulated import (
    DEAR,
    FREE,
    RATE,
    S0,
    S1,
    T0,
    T1,
    A,
    B,
    Life,
    Script,
    Toy,
    job,
    life,
)

TWO_NODES = (Nodes(count=2, slots=2),)
SLOW = ("goodput", "ones", "ones-paper", "optimus")  # policies that search
FAST = (Phase.generate,)  # a failure is small enough; to make it smaller takes minutes


# --- one job


def test_a_job_starts_up_and_trains_epoch_after_epoch() -> None:
    lived = life(Script((0, {A: {S0: 64}})), job("a")).run()

    assert lived.times(WorkerStarted) == [0.0]
    assert lived.times(GroupFormed) == [8.0]
    assert lived.times(EpochReported) == [18.0, 28.0, 38.0, 48.0]
    story = lived.stories["a"]
    assert (story.state, story.started_at, story.ended_at) == ("succeeded", 0.0, 48.0)
    assert (story.queued_s, story.exec_s, story.slot_s) == (0.0, 48.0, 48.0)
    assert lived.stays("a") == [(S0, 0.0, 48.0)]


def test_a_job_that_waits_is_queued_until_it_has_slots() -> None:
    lived = life("fifo", job("a"), job("b", 5.0), nodes=(Nodes(count=1, slots=1),)).run()

    story = lived.stories["b"]
    assert (story.submitted_at, story.started_at, story.ended_at) == (5.0, 48.0, 96.0)
    assert (story.queued_s, story.exec_s) == (43.0, 48.0)


def test_an_incumbent_trains_on_while_a_newcomer_prepares() -> None:
    lived = life(Script((0, {A: {S0: 64}}), (20, {A: {S0: 32, S1: 32}})), job("a")).run()

    assert lived.times(WorkerStarted) == [0.0, 20.0]
    assert lived.times(WorkerReady) == [8.0, 26.0]
    assert lived.times(GroupFormed) == [8.0, 26.5, 26.5]  # it stalls for half a second
    # 180 samples at 26.0, and twice as fast from 26.5 on
    assert lived.times(EpochReported) == [18.0, 27.5, 32.5, 37.5]
    assert lived.stories["a"].rescales == 1
    assert lived.stays("a") == [(S0, 0.0, 26.5), (S0, 26.5, 37.5), (S1, 26.5, 37.5)]


def test_a_job_that_shrinks_stalls_and_frees_the_slot_at_once() -> None:
    plans = Script((0, {A: {S0: 32, S1: 32}}), (20, {A: {S0: 64}}))
    lived = life(plans, job("a")).run()

    assert lived.times(EpochReported) == [13.0, 18.0, 26.5, 36.5]
    assert lived.times(WorkerExited) == [20.5, 36.5]


def test_another_batch_stalls_nobody_and_costs_only_what_it_throws_back() -> None:
    plans = Script((0, {A: {S0: 64}}), (20, {A: {S0: 128}}))
    lived = life(plans, job("a"), physics=Toy(jump=30.0)).run()

    # 120 samples at 20.0, 90 of them left
    assert lived.times(EpochReported) == [18.0, 31.0, 41.0, 51.0]
    story = lived.stories["a"]
    assert (story.rescales, story.batch_changes) == (0, 1)


def test_in_rounds_another_batch_stalls_nobody_either() -> None:
    plans = Script((0, {A: {S0: 64}}), (30, {A: {S0: 128}}))
    lived = life(plans, job("a"), round_s=30.0).run()

    # the start's stall is the only one
    assert lived.times(EpochReported) == [18.0, 28.0, 38.0, 48.0]
    assert lived.stories["a"].batch_changes == 1


def test_a_pause_keeps_every_step_and_a_restart_is_cheaper_than_a_start() -> None:
    plans = Script((0, {A: {S0: 64}}), (20, {}), (30, {A: {S0: 64}}))
    lived = life(plans, job("a")).run()

    assert lived.times(Suspended) == [20.0]
    assert lived.times(EpochReported) == [18.0, 42.0, 52.0, 62.0]
    story = lived.stories["a"]
    assert (story.queued_s, story.exec_s, story.slot_s) == (10.0, 52.0, 52.0)
    assert lived.stays("a") == [(S0, 0.0, 20.0), (S0, 30.0, 62.0)]


def test_a_newcomer_is_prepared_on_a_slot_that_another_job_leaves() -> None:
    plans = Script(
        (0, {A: {T0: 64}, B: {S0: 32, S1: 32}}),
        (20, {A: {T0: 32, S1: 32}, B: {S0: 64}}),
    )
    quick = Toy(costs=replace(DEAR, prepare_s=0.25))
    lived = life(plans, job("a"), job("b"), nodes=TWO_NODES, physics=quick).run()

    # b leaves after its stall at 20.5; only then a's newcomer is ready, and a stalls until 21.0
    assert lived.times(WorkerStarted, A) == [0.0, 20.0]
    assert lived.times(WorkerReady, A) == [8.0, 20.5]
    assert lived.times(GroupFormed, A) == [8.0, 21.0, 21.0]
    assert lived.times(EpochReported, A) == [18.0, 24.75, 29.75, 34.75]
    assert lived.times(EpochReported, B) == [13.0, 18.0, 26.5, 36.5]


# --- plans take their time


def test_an_answer_is_late_and_a_question_meanwhile_is_put_when_it_is_there() -> None:
    lived = life("fifo", job("a"), job("b", 1.0), latency_s=3.0).run()

    assert lived.times(PlanProposed) == [3.0, 6.0]  # b came while the first one was on its way
    assert lived.times(WorkerStarted) == [3.0, 6.0]


def test_in_rounds_everybody_waits_for_the_next_one_and_stalls_at_once() -> None:
    costs = replace(DEAR, start_s=30.0, restart_s=30.0, switch_s=30.0)
    physics = Toy(costs=costs, epoch_samples=53, whole_seconds=True)
    lived = life("fifo", job("a", 1.0), job("b", 2.0, 2), physics=physics, round_s=60.0).run()

    assert lived.times(PlanProposed) == [60.0, 120.0]
    assert lived.times(GroupFormed, A) == [60.0]
    assert lived.times(EpochReported, A) == [95.0, 100.0, 105.0, 110.0]  # 5.3 s, in whole seconds
    assert lived.times(EpochReported, B) == [153.0, 156.0, 159.0, 162.0]  # 2.65 s


@pytest.mark.parametrize(("samples", "next_starts"), [(298, 120.0), (302, 180.0)])
def test_an_epoch_that_is_rounded_down_onto_a_round_is_too_late_for_it(
    samples: int, next_starts: float
) -> None:
    costs = replace(DEAR, start_s=30.0)
    physics = Toy(costs=costs, epochs=1, epoch_samples=samples, whole_seconds=True)
    nodes = (Nodes(count=1, slots=1),)

    lived = life("fifo", job("a", 1), job("b", 2), nodes=nodes, physics=physics, round_s=60.0).run()

    assert lived.stories["a"].ended_at == 120.0
    assert lived.stories["b"].started_at == next_starts


def test_in_rounds_a_change_stalls_from_the_moment_of_the_plan() -> None:
    plans = Script((0, {A: {S0: 64}}), (60, {A: {S0: 32, S1: 32}}))
    physics = Toy(costs=replace(DEAR, switch_s=30.0), epoch_samples=1000)
    lived = life(plans, job("a"), physics=physics, round_s=60.0).run()

    # 520 samples at 60.0, then twice as fast from 90.0 on
    assert lived.times(GroupFormed) == [0.0, 60.0, 60.0]
    assert lived.times(EpochReported) == [114.0, 164.0, 214.0, 264.0]


# --- who else is there


def test_jobs_slow_down_when_a_neighbour_comes_and_recover_when_it_goes() -> None:
    placed = {A: {S0: 32, T0: 32}, B: {S1: 32, T1: 32}}

    def halved(world: World) -> Distributed:
        return Distributed(0.5, lambda name: len(world.crews[name].placement()) > 1)

    lived = life(
        Script((0, placed)),
        job("a"),
        job("b", 5.0),
        nodes=TWO_NODES,
        physics=Toy(costs=FREE),
        interference=halved,
    ).run()

    assert lived.times(EpochReported, A) == [5.0, 15.0, 25.0, 35.0]
    assert lived.times(EpochReported, B) == [15.0, 25.0, 35.0, 40.0]


def test_the_slowest_gpu_of_a_group_counts() -> None:
    nodes = (Nodes(count=1, slots=2, model="v100"), Nodes(count=1, slots=2, model="k80"))
    plans = Script((0, {A: {S0: 32, T0: 32}}), (50, {A: {S0: 32, S1: 32}}))
    lived = life(plans, job("a"), nodes=nodes, physics=Toy(costs=FREE)).run()

    assert lived.times(EpochReported) == [25.0, 50.0, 55.0, 60.0]


def test_policies_see_which_gpu_is_of_which_type() -> None:
    nodes = (Nodes(count=1, slots=2, model="v100"), Nodes(count=1, slots=1, model="k80"))
    lived = life("fifo", job("a"), nodes=nodes).run(20.0)

    seen = [(slot.slot, slot.model) for slot in lived.world.reactor.view().slots]
    assert seen == [(S0, "v100"), (S1, "v100"), (T0, "k80")]


# --- what policies hear


def test_a_policy_hears_of_epochs_ends_and_plans() -> None:
    script = Script((0, {A: {S0: 64}}))
    life(script, job("a"), job("b")).run(100.0)

    epochs = [(at, e.epoch, e.samples_per_s) for at, e in script.heard if isinstance(e, EpochSeen)]
    assert epochs == [(18.0, 1, RATE), (28.0, 2, RATE), (38.0, 3, RATE), (48.0, 4, RATE)]
    plans = [(at, e.waiting) for at, e in script.heard if isinstance(e, PlanTaken)]
    assert plans == [(0.0, (B,))]
    ends = [(at, e.job, e.succeeded) for at, e in script.heard if isinstance(e, JobEnded)]
    assert ends == [(48.0, A, True)]


def test_telemetry_tells_how_far_a_group_is_and_stops_with_it() -> None:
    script = Script((0, {A: {S0: 64}}))
    life(script, job("a"), physics=Toy(epoch_samples=1000), telemetry_s=100.0).run(1000.0)

    steps = [(at, e) for at, e in script.heard if isinstance(e, StepsSeen)]
    # 12 steps of 6.4 s after 8.0, then twice as late up to every 100 s, until 408.0
    assert [at for at, _ in steps] == pytest.approx([84.8, 161.6, 261.6, 361.6])
    assert [e.samples_done for _, e in steps] == [768, 1536, 2536, 3536]
    assert [e.step for _, e in steps] == [12, 24, 39, 55]
    assert {(e.group, e.slots, e.nodes, e.global_batch, e.samples_per_s) for _, e in steps} == {
        (1, 1, 1, 64, RATE)
    }
    assert {e.noise_scale for _, e in steps} == {None}


def test_telemetry_tells_the_noise_scale_of_the_running_epoch_and_reports_of_the_one_before() -> (
    None
):
    script = Script((0, {A: {S0: 64}}))
    physics = Toy(epoch_samples=1000, noise=50.0)
    life(script, job("a"), physics=physics, telemetry_s=100.0).run(1000.0)

    steps = [(at, e.noise_scale) for at, e in script.heard if isinstance(e, StepsSeen)]
    epochs = [(at, e.noise_scale) for at, e in script.heard if isinstance(e, EpochSeen)]
    assert [at for at, _ in steps] == pytest.approx([84.8, 161.6, 261.6, 361.6])
    assert [scale for _, scale in steps] == [50.0, 100.0, 150.0, 200.0]
    assert epochs == [(108.0, 50.0), (208.0, 100.0), (308.0, 150.0), (408.0, 200.0)]


def test_no_telemetry_is_sent_where_nobody_reads_it() -> None:
    script = Script((0, {A: {S0: 64}}))
    life(script, job("a")).run()

    assert [e for _, e in script.heard if isinstance(e, StepsSeen)] == []


# --- whatever the trace


def traces(*, most: int = 4) -> st.SearchStrategy[list[TraceJob]]:
    each = st.tuples(st.integers(0, 60), st.integers(1, 4), st.integers(20, 300))
    return st.lists(each, min_size=1, max_size=most).map(
        lambda rows: [
            job(f"j{number}", float(at), slots, samples=samples)
            for number, (at, slots, samples) in enumerate(sorted(rows))
        ]
    )


def examples(policy: str) -> int:
    return 4 if policy in SLOW else 20


def ends_whole(lived: Life) -> None:
    """Every job did all of its work, epoch after epoch."""
    for name, training in lived.trainings.items():
        assert lived.state.jobs[name].phase.value == "succeeded"
        assert training.progress == training.work.epoch_ends_at(training.work.epochs - 1)
        reported = [
            inner.epoch
            for _, event, _ in lived.events
            if isinstance(inner := getattr(event, "event", None), EpochReported)
            and inner.job == name
        ]
        assert reported == list(range(1, training.work.epochs + 1))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("round_s", [0.0, 30.0])
def test_all_jobs_end_and_no_slot_has_two_of_them(policy: str, round_s: float) -> None:
    @settings(
        max_examples=examples(policy), deadline=None, derandomize=True, database=None, phases=FAST
    )
    @given(jobs=traces(), late_s=st.sampled_from([0.0, 0.05]))
    def lives(jobs: list[TraceJob], late_s: float) -> None:
        late_s = 0.0 if round_s else late_s
        lived = life(policy, *jobs, nodes=TWO_NODES, round_s=round_s, latency_s=late_s)
        ends_whole(lived.run())

    lives()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_where_changes_cost_nothing_jobs_hold_slots_for_exactly_their_work(policy: str) -> None:
    @settings(
        max_examples=examples(policy), deadline=None, derandomize=True, database=None, phases=FAST
    )
    @given(jobs=traces())
    def lives(jobs: list[TraceJob]) -> None:
        lived = life(policy, *jobs, nodes=TWO_NODES, physics=Toy(costs=FREE)).run()

        ends_whole(lived)
        work = {each.name: 4 * (each.samples or 0) / RATE for each in jobs}
        served = {name: story.slot_s for name, story in lived.stories.items()}
        assert served == pytest.approx(work, rel=1e-9)
        busy = sum(until - since for name in work for _, since, until in lived.stays(name))
        assert busy == pytest.approx(sum(work.values()), rel=1e-9)
        assert lived.world.busy_slot_s == pytest.approx(sum(work.values()), rel=1e-9)

    lives()


def test_a_world_without_nodes_or_jobs_ends_at_once() -> None:
    kernel = Kernel()
    world = World(kernel, [], Habits(at_once=False, whole_seconds=False, telemetry_s=0, round_s=0))
    world.begin()
    kernel.run()

    assert (kernel.now, world.events, world.stories()) == (0.0, 1, ())


def test_nodes_that_no_job_uses_change_nothing() -> None:
    few = life(Script((0, {A: {S0: 64}})), job("a")).run()
    many = life(Script((0, {A: {S0: 64}})), job("a"), nodes=(Nodes(count=9, slots=2),)).run()

    assert many.stories == few.stories
