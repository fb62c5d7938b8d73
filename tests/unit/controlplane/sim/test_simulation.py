"""Small simulations against a watch: when groups begin, change and end, and what they did by then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from controlplane.core.inputs import PlanProposed
from controlplane.policy.api import EpochSeen, JobEnded, PlanTaken, StepsSeen
from controlplane.policy.registry import POLICIES
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.engine.event_queue import Kernel, SimOptions
from controlplane.sim.engine.simulation import Simulation
from controlplane.sim.models.demands import DEMANDS, Interference, Workers
from controlplane.sim.models.interference import of_spread_jobs
from controlplane.sim.results import TraceJob
from controlplane.sim.scenario import Scenario
from schemas.ids import JobId
from schemas.wire.agent import (
    EpochReported,
    GroupFormed,
    Suspended,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from tests.support.simulations import (
    DEAR,
    FREE,
    RATE,
    S0,
    S1,
    T0,
    T1,
    A,
    B,
    ScriptedPolicy,
    SimulatedRun,
    ToyModel,
    job,
    simulated_run,
)

TWO_NODES = (NodeGroup(count=2, slots=2),)
SLOW = ("drl", "goodput", "harmony-drl", "ones", "ones-paper", "optimus", "slaq")  # that search
FAST = (Phase.generate,)  # a failure is small enough; to make it smaller takes minutes


# --- one job


def test_a_job_starts_up_and_trains_epoch_after_epoch() -> None:
    run = simulated_run(ScriptedPolicy((0, {A: {S0: 64}})), job("a")).run()

    assert run.times(WorkerStarted) == [0.0]
    assert run.times(GroupFormed) == [8.0]
    assert run.times(EpochReported) == [18.0, 28.0, 38.0, 48.0]
    ended = run.jobs["a"]
    assert (ended.state, ended.started_at, ended.ended_at) == ("succeeded", 0.0, 48.0)
    assert (ended.queued_s, ended.exec_s, ended.slot_s) == (0.0, 48.0, 48.0)
    assert run.allocations("a") == [(S0, 0.0, 48.0)]


def test_a_job_that_waits_is_queued_until_it_has_slots() -> None:
    run = simulated_run("fifo", job("a"), job("b", 5.0), nodes=(NodeGroup(count=1, slots=1),)).run()

    ended = run.jobs["b"]
    assert (ended.submitted_at, ended.started_at, ended.ended_at) == (5.0, 48.0, 96.0)
    assert (ended.queued_s, ended.exec_s) == (43.0, 48.0)


def test_an_incumbent_trains_while_a_newcomer_prepares() -> None:
    run = simulated_run(
        ScriptedPolicy((0, {A: {S0: 64}}), (20, {A: {S0: 32, S1: 32}})), job("a")
    ).run()

    assert run.times(WorkerStarted) == [0.0, 20.0]
    assert run.times(WorkerReady) == [8.0, 26.0]
    assert run.times(GroupFormed) == [8.0, 26.5, 26.5]  # it stalls for half a second
    # 180 samples at 26.0, and twice as fast from 26.5 on
    assert run.times(EpochReported) == [18.0, 27.5, 32.5, 37.5]
    assert run.jobs["a"].rescales == 1
    assert run.allocations("a") == [(S0, 0.0, 26.5), (S0, 26.5, 37.5), (S1, 26.5, 37.5)]


def test_a_job_that_shrinks_stalls_and_frees_the_slot_at_once() -> None:
    plans = ScriptedPolicy((0, {A: {S0: 32, S1: 32}}), (20, {A: {S0: 64}}))
    run = simulated_run(plans, job("a")).run()

    assert run.times(EpochReported) == [13.0, 18.0, 26.5, 36.5]
    assert run.times(WorkerExited) == [20.5, 36.5]


def test_a_change_of_the_batch_stalls_no_job_and_costs_only_lost_progress() -> None:
    plans = ScriptedPolicy((0, {A: {S0: 64}}), (20, {A: {S0: 128}}))
    run = simulated_run(plans, job("a"), model=ToyModel(jump=30.0)).run()

    # 120 samples at 20.0, 90 of them left
    assert run.times(EpochReported) == [18.0, 31.0, 41.0, 51.0]
    ended = run.jobs["a"]
    assert (ended.rescales, ended.batch_changes) == (0, 1)

    in_rounds = ScriptedPolicy((0, {A: {S0: 64}}), (30, {A: {S0: 128}}))
    run = simulated_run(in_rounds, job("a"), round_s=30.0).run()

    assert run.times(EpochReported) == [18.0, 28.0, 38.0, 48.0]  # the start's stall is the only one
    assert run.jobs["a"].batch_changes == 1


def test_a_pause_keeps_every_step_and_a_restart_is_cheaper_than_a_start() -> None:
    plans = ScriptedPolicy((0, {A: {S0: 64}}), (20, {}), (30, {A: {S0: 64}}))
    run = simulated_run(plans, job("a")).run()

    assert run.times(Suspended) == [20.0]
    assert run.times(EpochReported) == [18.0, 42.0, 52.0, 62.0]
    ended = run.jobs["a"]
    assert (ended.queued_s, ended.exec_s, ended.slot_s) == (10.0, 52.0, 52.0)
    assert run.allocations("a") == [(S0, 0.0, 20.0), (S0, 30.0, 62.0)]


def test_a_newcomer_is_prepared_on_a_slot_that_another_job_leaves() -> None:
    plans = ScriptedPolicy(
        (0, {A: {T0: 64}, B: {S0: 32, S1: 32}}), (20, {A: {T0: 32, S1: 32}, B: {S0: 64}})
    )
    quick = ToyModel(costs=replace(DEAR, prepare_s=0.25))
    run = simulated_run(plans, job("a"), job("b"), nodes=TWO_NODES, model=quick).run()

    # b leaves after its stall at 20.5; only then a's newcomer is ready, and a stalls until 21.0
    assert run.times(WorkerStarted, A) == [0.0, 20.0]
    assert run.times(WorkerReady, A) == [8.0, 20.5]
    assert run.times(GroupFormed, A) == [8.0, 21.0, 21.0]
    assert run.times(EpochReported, A) == [18.0, 24.75, 29.75, 34.75]
    assert run.times(EpochReported, B) == [13.0, 18.0, 26.5, 36.5]


# --- latency and rounds


def test_a_request_during_the_latency_of_a_plan_follows_the_plan() -> None:
    run = simulated_run("fifo", job("a"), job("b", 1.0), latency_s=3.0).run()

    assert run.times(PlanProposed) == [3.0, 6.0]  # b came while the first one was on its way
    assert run.times(WorkerStarted) == [3.0, 6.0]


def test_jobs_wait_for_the_next_round_and_stall_at_once() -> None:
    costs = replace(DEAR, start_s=30.0, restart_s=30.0, switch_s=30.0)
    model = ToyModel(costs=costs, epoch_samples=53, whole_seconds=True)
    run = simulated_run("fifo", job("a", 1.0), job("b", 2.0, 2), model=model, round_s=60.0).run()

    assert run.times(PlanProposed) == [60.0, 120.0]
    assert run.times(GroupFormed, A) == [60.0]
    assert run.times(EpochReported, A) == [95.0, 100.0, 105.0, 110.0]  # 5.3 s, in whole seconds
    assert run.times(EpochReported, B) == [153.0, 156.0, 159.0, 162.0]  # 2.65 s


@pytest.mark.parametrize(("samples", "next_starts"), [(298, 120.0), (302, 180.0)])
def test_an_epoch_rounded_to_a_round_belongs_to_the_next(samples: int, next_starts: float) -> None:
    costs = replace(DEAR, start_s=30.0)
    model = ToyModel(costs=costs, epochs=1, epoch_samples=samples, whole_seconds=True)
    nodes = (NodeGroup(count=1, slots=1),)

    run = simulated_run(
        "fifo", job("a", 1), job("b", 2), nodes=nodes, model=model, round_s=60.0
    ).run()

    assert run.jobs["a"].ended_at == 120.0
    assert run.jobs["b"].started_at == next_starts


def test_a_change_in_rounds_stalls_from_the_plan_on() -> None:
    plans = ScriptedPolicy((0, {A: {S0: 64}}), (60, {A: {S0: 32, S1: 32}}))
    model = ToyModel(costs=replace(DEAR, switch_s=30.0), epoch_samples=1000)
    run = simulated_run(plans, job("a"), model=model, round_s=60.0).run()

    # 520 samples at 60.0, then twice as fast from 90.0 on
    assert run.times(GroupFormed) == [0.0, 60.0, 60.0]
    assert run.times(EpochReported) == [114.0, 164.0, 214.0, 264.0]


# --- neighbours and kinds of GPUs


def half_beside(*slowed: JobId) -> Interference:
    """The jobs `slowed` have half of their speed beside any neighbour."""

    def remaining_speed(job: JobId, at: Workers) -> float:
        return 0.5 if job in slowed and any(len(here) > 1 for here in at.values()) else 1.0

    return remaining_speed


def test_jobs_slow_down_beside_a_neighbour_and_recover_without_it() -> None:
    placed = {A: {S0: 32, T0: 32}, B: {S1: 32, T1: 32}}

    def halved(simulation: Simulation) -> Interference:
        return of_spread_jobs(0.5, lambda name: len(simulation.jobs[name].placement()) > 1)

    run = simulated_run(
        ScriptedPolicy((0, placed)), job("a"), job("b", 5.0), nodes=TWO_NODES,
        model=ToyModel(costs=FREE), interference=halved,
    ).run()  # fmt: skip

    assert run.times(EpochReported, A) == [5.0, 15.0, 25.0, 35.0]
    assert run.times(EpochReported, B) == [15.0, 25.0, 35.0, 40.0]


def test_a_job_recovers_when_its_neighbour_moves_away() -> None:
    """B is on A's node up to 12.0, where it moves to the other one without a stop."""
    together, apart = {A: {S0: 64}, B: {S1: 64}}, {A: {S0: 64}, B: {T0: 64}}

    run = simulated_run(
        ScriptedPolicy((0, together), (12.0, apart)), job("a"), job("b"), nodes=TWO_NODES,
        model=ToyModel(costs=FREE), interference=lambda _: half_beside(A, B),
    ).run()  # fmt: skip

    assert run.times(EpochReported, A) == [16.0, 26.0, 36.0, 46.0]


def test_the_slowest_gpu_of_a_group_counts() -> None:
    nodes = (NodeGroup(count=1, slots=2, model="v100"), NodeGroup(count=1, slots=2, model="k80"))
    plans = ScriptedPolicy((0, {A: {S0: 32, T0: 32}}), (50, {A: {S0: 32, S1: 32}}))
    run = simulated_run(plans, job("a"), nodes=nodes, model=ToyModel(costs=FREE)).run()

    assert run.times(EpochReported) == [25.0, 50.0, 55.0, 60.0]


def test_policies_see_the_types_of_gpus() -> None:
    nodes = (NodeGroup(count=1, slots=2, model="v100"), NodeGroup(count=1, slots=1, model="k80"))
    run = simulated_run("fifo", job("a"), nodes=nodes).run(20.0)

    seen = [(slot.slot, slot.model) for slot in run.simulation.reactor.view().slots]
    assert seen == [(S0, "v100"), (S1, "v100"), (T0, "k80")]


# --- observations of policies


def test_a_policy_observes_epochs_ends_and_plans() -> None:
    script = ScriptedPolicy((0, {A: {S0: 64}}))
    simulated_run(script, job("a"), job("b")).run(100.0)

    epochs = [
        (at, e.epoch, e.samples_per_s) for at, e in script.observed if isinstance(e, EpochSeen)
    ]
    assert epochs == [(18.0, 1, RATE), (28.0, 2, RATE), (38.0, 3, RATE), (48.0, 4, RATE)]
    plans = [(at, e.waiting) for at, e in script.observed if isinstance(e, PlanTaken)]
    assert plans == [(0.0, (B,))]
    ends = [(at, e.job, e.succeeded) for at, e in script.observed if isinstance(e, JobEnded)]
    assert ends == [(48.0, A, True)]
    assert not any(isinstance(e, StepsSeen) for _, e in script.observed)  # no telemetry


def test_telemetry_reports_the_steps_of_a_group_until_its_end() -> None:
    script = ScriptedPolicy((0, {A: {S0: 64}}))
    simulated_run(script, job("a"), model=ToyModel(epoch_samples=1000), telemetry_s=100.0).run(
        1000.0
    )

    steps = [(at, e) for at, e in script.observed if isinstance(e, StepsSeen)]
    # 12 steps of 6.4 s after 8.0, then twice as late up to every 100 s, until 408.0
    assert [at for at, _ in steps] == pytest.approx([84.8, 161.6, 261.6, 361.6])
    assert [e.samples_done for _, e in steps] == [768, 1536, 2536, 3536]
    assert [e.step for _, e in steps] == [12, 24, 39, 55]
    assert [e.group_steps for _, e in steps] == [12, 24, 39, 55]
    assert {(e.group, e.slots, e.nodes, e.global_batch, e.samples_per_s) for _, e in steps} == {
        (1, 1, 1, 64, RATE)
    }
    assert {e.noise_scale for _, e in steps} == {None}


def test_telemetry_has_the_noise_scale_of_the_running_epoch() -> None:
    script = ScriptedPolicy((0, {A: {S0: 64}}))
    model = ToyModel(epoch_samples=1000, noise=50.0)
    simulated_run(script, job("a"), model=model, telemetry_s=100.0).run(1000.0)

    steps = [e.noise_scale for _, e in script.observed if isinstance(e, StepsSeen)]
    epochs = [(at, e.noise_scale) for at, e in script.observed if isinstance(e, EpochSeen)]
    assert steps == [50.0, 100.0, 150.0, 200.0]
    assert epochs == [(108.0, 50.0), (208.0, 100.0), (308.0, 150.0), (408.0, 200.0)]


def test_telemetry_reports_usage_at_the_reduced_speed() -> None:
    script = ScriptedPolicy((0, {A: {S0: 32, T0: 32}, B: {S1: 64}}))
    simulated_run(
        script, job("a", workload="vgg16"), job("b", workload="ctc"), nodes=TWO_NODES,
        model=ToyModel(costs=FREE, epoch_samples=1000), telemetry_s=100.0,
        interference=lambda _: half_beside(A),
    ).run(100.0)  # fmt: skip

    vgg16, ctc = DEMANDS["vgg16"], DEMANDS["ctc"]
    seen = {e.job: e for _, e in script.observed if isinstance(e, StepsSeen)}
    assert (seen[A].cpu_cores, seen[B].cpu_cores) == (0.5 * vgg16.cores, ctc.cores)
    assert seen[A].sent_bytes_per_s == pytest.approx(0.5 * vgg16.gradient_bytes_per_s)
    assert seen[B].sent_bytes_per_s == 0.0


# --- any trace


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


def ends_whole(run: SimulatedRun) -> None:
    """Every job did all of its work, epoch after epoch."""
    for name, training in run.trainings.items():
        assert run.job(name).phase.value == "succeeded"
        assert training.progress == training.model.epoch_ends_at(training.model.epochs - 1)
        reported = [
            inner.epoch
            for _, event, _ in run.events
            if isinstance(inner := getattr(event, "event", None), EpochReported)
            and inner.job == name
        ]
        assert reported == list(range(1, training.model.epochs + 1))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("round_s", [0.0, 30.0])
def test_all_jobs_end_and_no_slot_has_two_jobs(policy: str, round_s: float) -> None:
    @settings(
        max_examples=examples(policy), deadline=None, derandomize=True, database=None, phases=FAST
    )
    @given(jobs=traces(), late_s=st.sampled_from([0.0, 0.05]))
    def runs(jobs: list[TraceJob], late_s: float) -> None:
        late_s = 0.0 if round_s else late_s
        run = simulated_run(policy, *jobs, nodes=TWO_NODES, round_s=round_s, latency_s=late_s)
        ends_whole(run.run())

    runs()


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_jobs_hold_slots_for_exactly_their_work_if_changes_are_free(policy: str) -> None:
    @settings(
        max_examples=examples(policy), deadline=None, derandomize=True, database=None, phases=FAST
    )
    @given(jobs=traces())
    def runs(jobs: list[TraceJob]) -> None:
        run = simulated_run(policy, *jobs, nodes=TWO_NODES, model=ToyModel(costs=FREE)).run()

        ends_whole(run)
        work = {each.name: 4 * (each.samples or 0) / RATE for each in jobs}
        served = {name: ended.slot_s for name, ended in run.jobs.items()}
        assert served == pytest.approx(work, rel=1e-9)
        busy = sum(until - since for name in work for _, since, until in run.allocations(name))
        assert busy == pytest.approx(sum(work.values()), rel=1e-9)

    runs()


def test_a_simulation_without_nodes_or_jobs_ends_at_once() -> None:
    kernel = Kernel()
    simulation = Simulation(kernel, [], SimOptions(Scenario()))
    simulation.begin()
    kernel.run()

    assert (kernel.now, simulation.events, simulation.results()) == (0.0, 1, ())


def test_unused_nodes_change_nothing() -> None:
    few = simulated_run(ScriptedPolicy((0, {A: {S0: 64}})), job("a")).run()
    many = simulated_run(
        ScriptedPolicy((0, {A: {S0: 64}})), job("a"), nodes=(NodeGroup(count=9, slots=2),)
    ).run()

    assert many.jobs == few.jobs
