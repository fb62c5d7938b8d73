"""No user keeps all slots while another user waits: simulations of the core with every policy."""

from __future__ import annotations

import pytest

from controlplane.policy.registry import POLICIES
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import Trace, TraceJob
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario, trace_of
from controlplane.sim.traces.generators import with_users
from schemas.sharing import Sharing
from tests.support.simulations import SimulatedRun, ToyModel, job, simulated_run

EPOCHS = 10_000  # of 10 s on one slot; longer than any test
EIGHT = (NodeGroup(count=2, slots=4),)
FOUR = (NodeGroup(count=1, slots=4),)
ARRIVAL_S = 100.0
# A start takes 8 s and a shrink 1 s; the policy replies at once.
SOON_S = 20.0


def started_within(run: SimulatedRun, name: str, seconds: float) -> bool:
    run.simulation.kernel.run(until=ARRIVAL_S + seconds)
    (found,) = [one for one in run.simulation.results() if one.job == name]
    return found.started_at is not None


def slots_by_user(run: SimulatedRun) -> dict[str, int]:
    jobs = run.simulation.reactor.state.jobs.values()
    held: dict[str, int] = {}
    for one in jobs:
        held[one.user] = held.get(one.user, 0) + len(one.size.slots)
    return held


def given_back(run: SimulatedRun) -> list[tuple[str, str]]:
    """Jobs that gave slots back, and their reasons, in the order of time."""
    decisions = [
        (one.time, name, one.reason)
        for name in run.simulation.reactor.state.jobs
        for one in run.simulation.histories.of(name).decisions
    ]
    return [(name, why) for _, name, why in sorted(decisions) if "gives back" in why]


def ten_jobs_and_one(policy: str, *, shared: bool = True) -> SimulatedRun:
    """Ten jobs of ann for eight slots, then a job of bob that needs a single one."""
    many = [job(f"a{n}", user="ann") for n in range(10)]
    single = job("b", at=ARRIVAL_S, user="bob")
    run = simulated_run(policy, *many, single, nodes=EIGHT, model=ToyModel(most=1, epochs=EPOCHS))
    if shared:
        run.simulation.share(Sharing())
    return run


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "oasis"])
def test_the_single_job_of_a_user_starts_beside_ten_of_another(policy: str) -> None:
    run = ten_jobs_and_one(policy)

    assert started_within(run, "b", SOON_S)
    assert slots_by_user(run) == {"ann": 7, "bob": 1}


def test_without_rules_of_sharing_it_waits_for_ever() -> None:
    assert not started_within(ten_jobs_and_one("ones", shared=False), "b", 3000.0)


def test_a_user_with_all_slots_gives_half_of_them_back_under_fair() -> None:
    first = job("a", user="ann")
    second = job("b", at=ARRIVAL_S, user="bob")
    others = [job(f"a{n}", user="ann") for n in range(3)]
    run = simulated_run(
        "fair", first, *others, second, nodes=FOUR, model=ToyModel(most=4, epochs=EPOCHS)
    )
    run.simulation.share(Sharing())

    assert started_within(run, "b", SOON_S)
    assert slots_by_user(run) == {"ann": 2, "bob": 2}


def test_the_reasons_say_who_gave_slots_to_whom() -> None:
    run = ten_jobs_and_one("fifo")
    started_within(run, "b", SOON_S)

    gives = "paused: gives back 1 slot to user bob: user ann has 8 slots and may have 7"
    assert [why for _, why in given_back(run)] == [gives]


def test_paused_jobs_of_an_account_take_turns() -> None:
    run = ten_jobs_and_one("fifo")
    run.simulation.kernel.run(until=4 * 1800.0)

    told = given_back(run)
    gives = "paused: gives back 1 slot to another job of user ann after a turn of 30 min"
    assert [why for _, why in told[1:]] == [gives] * (len(told) - 1)
    assert len(told) >= 3
    assert slots_by_user(run) == {"ann": 7, "bob": 1}


# --- traces and scenarios


def small(**changes: object) -> Scenario:
    return Scenario(jobs=12, interval_s=20.0, nodes=EIGHT, generations=1, **changes)  # type: ignore[arg-type] # named by callers


@pytest.mark.parametrize("policy", ["fifo", "fair", "ones"])
def test_with_one_account_a_simulation_is_the_same_to_the_second(policy: str) -> None:
    shared, alone = (simulate(policy, small(fair_share=on), 3).jobs for on in (True, False))

    assert shared == alone


def test_with_several_users_fair_share_can_be_switched_off() -> None:
    on, off = (simulate("fifo", small(users=3, fair_share=on), 3).jobs for on in (True, False))

    assert on != off


def test_jobs_are_dealt_to_users_and_projects_by_the_seed() -> None:
    trace = trace_of(small(users=4, projects=2), 3)
    users = [one.user for one in trace.jobs]

    assert {(one.user, one.project) for one in trace.jobs} <= {
        ("user-1", "project-1"), ("user-2", "project-2"),
        ("user-3", "project-1"), ("user-4", "project-2"),
    }  # fmt: skip
    assert trace == trace_of(small(users=4, projects=2), 3)
    assert users != [one.user for one in trace_of(small(users=4), 4).jobs]
    assert {one.project for one in trace_of(small(users=4), 3).jobs} == {""}


def test_the_first_user_has_most_jobs() -> None:
    jobs = tuple(TraceJob(name=f"j{n}", at=0.0, workload="x", slots=1) for n in range(3000))  # type: ignore[arg-type] # seconds
    users = [one.user for one in with_users(Trace(name="t", jobs=jobs), 0, 3, 0).jobs]

    counts = [users.count(f"user-{n}") for n in (1, 2, 3)]
    assert counts == pytest.approx([1636, 818, 545], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "pollux"])
def test_all_jobs_of_five_users_end_although_nodes_and_scripts_fail(policy: str) -> None:
    storm = Scenario(
        jobs=40, interval_s=15.0, nodes=(NodeGroup(count=3, slots=4),), users=5, projects=2,
        generations=1, crash_share=0.1, cancel_share=0.1, node_loss_s=900.0, node_back_s=120.0,
        utilities=policy == "oasis",
    )  # fmt: skip

    assert all(one.ended_at is not None for one in simulate(policy, storm, 7).jobs)
