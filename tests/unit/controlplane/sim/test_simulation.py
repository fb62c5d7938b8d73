"""Small simulations against a watch: when groups begin, change and end, and what they did by then."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from inspect import cleandoc
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from controlplane.policy.api import EpochSeen, JobEnded, PlanTaken, Policy, StepsSeen
from controlplane.policy.registry import POLICIES, make
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.engine.event_queue import Kernel, SimOptions
from controlplane.sim.engine.simulation import Simulation
from controlplane.sim.models.demands import DEMANDS, Interference, Workers
from controlplane.sim.models.interference import of_spread_jobs
from controlplane.sim.models.job_model import ChangeCosts
from controlplane.sim.results import TraceJob
from controlplane.sim.scenario import Scenario
from schemas.ids import JobId
from schemas.wire.agent import EpochReported
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

ONE_SLOT = (NodeGroup(count=1, slots=1),)
TWO_NODES = (NodeGroup(count=2, slots=2),)
SLOW = (  # that search
    "drl", "goodput", "harmony-drl", "ones", "ones-paper", "optimus", "pollux", "slaq",
)  # fmt: skip
FAST = (Phase.generate,)  # a failure is small enough; to make it smaller takes minutes


def half_beside(*slowed: JobId) -> Interference:
    """The jobs `slowed` have half of their speed beside any neighbour."""

    def remaining_speed(job: JobId, at: Workers) -> float:
        return 0.5 if job in slowed and any(len(here) > 1 for here in at.values()) else 1.0

    return remaining_speed


def half_if_spread(simulation: Simulation) -> Interference:
    return of_spread_jobs(0.5, lambda name: len(simulation.jobs[name].placement()) > 1)


def in_whole_seconds(samples: int) -> dict[str, Any]:
    costs = replace(DEAR, start_s=30.0)
    model = ToyModel(costs=costs, epochs=1, epoch_samples=samples, whole_seconds=True)
    return {"nodes": ONE_SLOT, "model": model, "round_s": 60.0}


P = ScriptedPolicy
AT_ONCE = ToyModel(costs=FREE)
ONE, BOTH = {S0: 64}, {S0: 32, S1: 32}
AT_ROUNDS = replace(DEAR, start_s=30.0, restart_s=30.0, switch_s=30.0)
MIXED = (NodeGroup(count=1, slots=2, model="v100"), NodeGroup(count=1, slots=2, model="k80"))
STORIES = {
    "a job starts up and trains epoch after epoch": (P((0, {A: ONE})), [job("a")], {},
        """a: started 0, ready 8, formed 8, epochs 18 28 38 48, exited 48
        on 0/0 0-48; succeeded at 48, ran 48"""),
    "a job that waits is queued until it has slots": (
        "fifo", [job("a"), job("b", 5.0)], {"nodes": ONE_SLOT},
        """a: started 0, ready 8, formed 8, epochs 18 28 38 48, exited 48
        on 0/0 0-48; succeeded at 48, ran 48
        b: started 48, ready 56, formed 56, epochs 66 76 86 96, exited 96
        on 0/0 48-96; succeeded at 96, queued 43, ran 48"""),
    # 180 samples at 26, where it stalls for half a second, and then it is twice as fast
    "an incumbent trains while a newcomer prepares": (
        P((0, {A: ONE}), (20, {A: BOTH})), [job("a")], {},
        """a: started 0 20, ready 8 26, formed 8 26.5 26.5, epochs 18 27.5 32.5 37.5, exited 37.5 37.5
        on 0/0 0-26.5, 0/0 26.5-37.5, 0/1 26.5-37.5; succeeded at 37.5, ran 37.5, rescales 1"""),
    "a job that shrinks stalls and frees the slot at once": (
        P((0, {A: BOTH}), (20, {A: ONE})), [job("a")], {},
        """a: started 0 0, ready 8 8, formed 8 8 20.5, epochs 13 18 26.5 36.5, exited 20.5 36.5
        on 0/0 0-20.5, 0/1 0-20.5, 0/0 20.5-36.5; succeeded at 36.5, ran 36.5, rescales 1"""),
    # 120 samples at 20, 90 of them left
    "a change of the batch stalls no job and costs only lost progress": (
        P((0, {A: ONE}), (20, {A: {S0: 128}})), [job("a")], {"model": ToyModel(jump=30.0)},
        """a: started 0, ready 8, formed 8 20, epochs 18 31 41 51, exited 51
        on 0/0 0-51; succeeded at 51, ran 51, batches 1"""),
    "a change of the batch in rounds stalls no job": (  # the start's stall is the only one
        P((0, {A: ONE}), (30, {A: {S0: 128}})), [job("a")], {"round_s": 30.0},
        """a: started 0, ready 0, formed 0 30, epochs 18 28 38 48, exited 48
        on 0/0 0-48; succeeded at 48, ran 48, batches 1"""),
    "a pause keeps every step and a restart is cheaper than a start": (
        P((0, {A: ONE}), (20, {}), (30, {A: ONE})), [job("a")], {},
        """a: started 0 30, ready 8 34, formed 8 34, epochs 18 42 52 62, suspended 20, exited 20 62
        on 0/0 0-20, 0/0 30-62; succeeded at 62, queued 10, ran 52, rescales 2"""),
    # b leaves after its stall at 20.5; only then a's newcomer is ready, and a stalls until 21
    "a newcomer is prepared on a slot that another job leaves": (
        P((0, {A: {T0: 64}, B: BOTH}), (20, {A: {T0: 32, S1: 32}, B: ONE})), [job("a"), job("b")],
        {"nodes": TWO_NODES, "model": ToyModel(costs=replace(DEAR, prepare_s=0.25))},
        """a: started 0 20, ready 8 20.5, formed 8 21 21, epochs 18 24.75 29.75 34.75, exited 34.75 34.75
        on 1/0 0-21, 1/0 21-34.75, 0/1 21-34.75; succeeded at 34.75, ran 34.75, rescales 1
        b: started 0 0, ready 8 8, formed 8 8 20.5, epochs 13 18 26.5 36.5, exited 20.5 36.5
        on 0/0 0-20.5, 0/1 0-20.5, 0/0 20.5-36.5; succeeded at 36.5, ran 36.5, rescales 1"""),
    # b came while the first plan was on its way
    "a request during the latency of a plan follows the plan": (
        "fifo", [job("a"), job("b", 1.0)], {"latency_s": 3.0},
        """a: started 3, ready 11, formed 11, epochs 21 31 41 51, exited 51
        on 0/0 3-51; succeeded at 51, queued 3, ran 48
        b: started 6, ready 14, formed 14, epochs 24 34 44 54, exited 54
        on 0/1 6-54; succeeded at 54, queued 5, ran 48"""),
    # epochs of 5.3 s and 2.65 s, in whole seconds
    "jobs wait for the next round and stall at once": (
        "fifo", [job("a", 1.0), job("b", 2.0, 2)],
        {"model": ToyModel(costs=AT_ROUNDS, epoch_samples=53, whole_seconds=True), "round_s": 60.0},
        """a: started 60, ready 60, formed 60, epochs 95 100 105 110, exited 110
        on 0/0 60-110; succeeded at 110, queued 59, ran 50
        b: started 120 120, ready 120 120, formed 120 120, epochs 153 156 159 162, exited 162 162
        on 0/0 120-162, 0/1 120-162; succeeded at 162, queued 118, ran 42"""),
    "an epoch rounded down to a round frees its slot for this round": (
        "fifo", [job("a", 1), job("b", 2)], in_whole_seconds(298),
        """a: started 60, ready 60, formed 60, epochs 120, exited 120
        on 0/0 60-120; succeeded at 120, queued 59, ran 60
        b: started 120, ready 120, formed 120, epochs 180, exited 180
        on 0/0 120-180; succeeded at 180, queued 118, ran 60"""),
    "an epoch rounded up to a round frees its slot for the next round": (
        "fifo", [job("a", 1), job("b", 2)], in_whole_seconds(302),
        """a: started 60, ready 60, formed 60, epochs 120, exited 120
        on 0/0 60-120; succeeded at 120, queued 59, ran 60
        b: started 180, ready 180, formed 180, epochs 240, exited 240
        on 0/0 180-240; succeeded at 240, queued 178, ran 60"""),
    # 520 samples at 60, then twice as fast from 90 on
    "a change in rounds stalls from the plan on": (
        P((0, {A: ONE}), (60, {A: BOTH})), [job("a")],
        {"model": ToyModel(costs=replace(DEAR, switch_s=30.0), epoch_samples=1000), "round_s": 60.0},
        """a: started 0 60, ready 0 60, formed 0 60 60, epochs 114 164 214 264, exited 264 264
        on 0/0 0-60, 0/0 60-264, 0/1 60-264; succeeded at 264, ran 264, rescales 1"""),
    "jobs slow down beside a neighbour and recover without it": (
        P((0, {A: {S0: 32, T0: 32}, B: {S1: 32, T1: 32}})), [job("a"), job("b", 5.0)],
        {"nodes": TWO_NODES, "model": AT_ONCE, "interference": half_if_spread},
        """a: started 0 0, ready 0 0, formed 0 0, epochs 5 15 25 35, exited 35 35
        on 0/0 0-35, 1/0 0-35; succeeded at 35, ran 35
        b: started 5 5, ready 5 5, formed 5 5, epochs 15 25 35 40, exited 40 40
        on 0/1 5-40, 1/1 5-40; succeeded at 40, ran 35"""),
    # at 12 to the other node, without a stop
    "a job recovers when its neighbour moves away": (
        P((0, {A: ONE, B: {S1: 64}}), (12.0, {A: ONE, B: {T0: 64}})), [job("a"), job("b")],
        {"nodes": TWO_NODES, "model": AT_ONCE, "interference": lambda _: half_beside(A, B)},
        """a: started 0, ready 0, formed 0, epochs 16 26 36 46, exited 46
        on 0/0 0-46; succeeded at 46, ran 46
        b: started 0 12, ready 0 12, formed 0 12 12 12, epochs 16 26 36 46, exited 12 46
        on 0/1 0-12, 0/1 12-12, 1/0 12-12, 1/0 12-46; succeeded at 46, ran 46, rescales 2"""),
    "the slowest gpu of a group counts": (
        P((0, {A: {S0: 32, T0: 32}}), (50, {A: BOTH})), [job("a")],
        {"nodes": MIXED, "model": AT_ONCE},
        """a: started 0 0 50, ready 0 0 50, formed 0 0 50 50 50 50 50, epochs 25 50 55 60, exited 50 60 60
        on 0/0 0-50, 1/0 0-50, 0/0 50-50, 1/0 50-50, 0/1 50-50, 0/0 50-60, 0/1 50-60; succeeded at 60, ran 60, rescales 2"""),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "jobs", "options", "story"), STORIES.values(), ids=STORIES)
def test_a_simulation_has_this_course(
    policy: str | Policy, jobs: list[TraceJob], options: dict[str, Any], story: str
) -> None:
    assert simulated_run(policy, *jobs, **options).run(1e4).story() == cleandoc(story)


def test_policies_see_the_types_of_gpus() -> None:
    run = simulated_run("fifo", job("a"), nodes=MIXED).run(20.0)

    seen = [(slot.slot, slot.model) for slot in run.simulation.reactor.view().slots]
    assert seen == [(S0, "v100"), (S1, "v100"), (T0, "k80"), (T1, "k80")]


# --- observations of policies


def test_a_policy_observes_epochs_ends_and_plans() -> None:
    script = P((0, {A: ONE}))
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
    script = P((0, {A: ONE}))
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
    script = P((0, {A: ONE}))
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
    few, many = (
        simulated_run(P((0, {A: ONE})), job("a"), nodes=(NodeGroup(count=count, slots=2),)).run()
        for count in (1, 9)
    )

    assert many.jobs == few.jobs


FOUR = (NodeGroup(count=1, slots=4),)
LIVE = ChangeCosts(start_s=2.0, restart_s=2.0, prepare_s=1.0, switch_s=0.3)
HALF_A_MINUTE = ToyModel(costs=LIVE, epochs=10, epoch_samples=30, noise=400.0, loss_epochs=40)
GANGS = {name for name, entry in POLICIES.items() if entry.gangs}


def eight_jobs() -> list[TraceJob]:
    """Three seconds apart, each 3 to 30 s on one slot."""
    samples = (30, 6, 12, 30, 3, 20, 6, 30)
    return [
        job(f"j{number}", 3.0 * number, slots=(1, 2, 1, 4)[number % 4], samples=size)
        for number, size in enumerate(samples)
    ]


def changes(run: SimulatedRun) -> Counter[str]:
    """What became of each job's slots after its start, by the codes of the decisions."""
    histories = run.simulation.histories
    return Counter(one.code for past in histories.jobs.values() for one in past.decisions)


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in GANGS])
def test_a_policy_that_chooses_sizes_changes_them_while_jobs_run(name: str) -> None:
    quick = {"pollux": {"interval_s": 5.0, "rescale_stall_s": 1.0}}  # for jobs of half a minute
    policy = make(name, quick[name]) if name in quick else name
    run = simulated_run(
        policy, *eight_jobs(), nodes=FOUR, model=HALF_A_MINUTE, telemetry_s=1.0, generations=4
    ).run()

    assert {ended.state for ended in run.jobs.values()} == {"succeeded"}
    done = changes(run)
    assert done["grow"] + done["restart"] + done["shrink"] > 0, done


@pytest.mark.parametrize("name", ["goodput", "optimus"])
def test_who_comes_between_rounds_starts_on_an_idle_slot(name: str) -> None:
    model = replace(HALF_A_MINUTE, most=2)
    run = simulated_run(
        name, job("a"), job("b", 1.5), nodes=FOUR, model=model, telemetry_s=1.0
    ).run()

    assert run.jobs["b"].queued_s == pytest.approx(0.0)
