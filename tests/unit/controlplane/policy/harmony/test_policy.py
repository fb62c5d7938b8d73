"""Policy `harmony`: placement, migrations, reasons, and costs of neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from controlplane.policy.api import ClusterView, EpochSeen, JobView, Plan, StepsSeen
from controlplane.policy.harmony.policy import Harmony
from controlplane.policy.options import HarmonyOptions
from controlplane.policy.registry import make
from schemas.errors import SettingsError
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of, slot_id
from tests.support.builders import cluster_view, job_view, slot_view
from tests.support.views import ToldOracle, epoch_seen, steps_seen

SPEED = 100.0
HURTS = {("loud", "meek"): 0.0, ("meek", "loud"): 0.5, ("loud", "loud"): 0.0, ("meek", "meek"): 0.0}
NOW = Seconds(1000.0)
SOON = Seconds(NOW + 10.0)


def on(node: int, index: int = 0) -> SlotId:
    return slot_id(NodeId(f"n{node}"), index)


def job(name: str, *slots: SlotId, at: float = 0.0, wanted: int = 1, **changes: Any) -> JobView:
    """Gang of its family that has run on these slots for long."""
    held = dict.fromkeys(slots, 16)
    view = {
        "family": name.partition("-")[0], "running_on": held, "wanted": wanted, "batch_limit": 64,
        "batch_size": 16, "start_s": 3.0, "ran_s": 900.0, "samples_done": 1000 if slots else 0,
        **changes,
    }  # fmt: skip
    return job_view(JobId(name), at, slots=(1, 4), **view)


def cluster(*jobs: JobView, nodes: int = 2, slots: int = 2, version: int = 1) -> ClusterView:
    held = {slot for one in jobs for slot in one.running_on}
    row = [on(node, index) for node in range(nodes) for index in range(slots)]
    return cluster_view(
        *(slot_view(slot, usable=slot not in held) for slot in row), *jobs, version=version
    )


def teach(policy: Harmony, losses: Mapping[tuple[str, str], float] = HURTS) -> Harmony:
    """Report epochs of each family alone and beside each other."""
    for (family, other), loss in losses.items():
        for beside, speed in (((), SPEED), ((other,), SPEED * (1.0 - loss))):
            for _ in range(10):
                policy.observe(epoch(family, beside, speed), NOW)
    return policy


def epoch(
    family: str, beside: tuple[str, ...] | None, speed: float, *, whole: bool = True
) -> EpochSeen:
    crowds = None if beside is None else ((1, beside),)
    return epoch_seen(JobId(f"{family}-0"), family=family, samples_per_s=speed, global_batch=16,
                      whole=whole, beside=crowds)  # fmt: skip


def steps(name: str, speed: float = SPEED) -> StepsSeen:
    family = name.partition("-")[0]
    return steps_seen(JobId(name), family=family, global_batch=16, samples_per_s=speed)


def nodes(plan: Plan, name: str) -> list[str]:
    return sorted(node_of(slot) for slot in plan.local_batch.get(JobId(name), {}))


def learnt(**options: Any) -> Harmony:
    return teach(Harmony(HarmonyOptions(**options)))


# --- placement


def test_a_job_avoids_costly_neighbours() -> None:
    view = cluster(job("loud-1", on(0)), job("meek-2", on(1)), job("meek-3", at=1.0))

    assert nodes(learnt().plan(view, NOW), "meek-3") == ["n1"]
    assert nodes(Harmony().plan(view, NOW), "meek-3") == ["n0"]  # nothing is known

    hurts = cluster(job("meek-1", on(0)), job("loud-2", on(1)), job("loud-3", at=1.0))
    assert nodes(learnt().plan(hurts, NOW), "loud-3") == ["n1"]


def test_a_gang_stays_on_one_node() -> None:
    gang = job("meek-3", at=1.0, wanted=2)
    lonely = cluster(job("meek-1", on(0)), gang)
    noisy = cluster(job("loud-1", on(0)), job("meek-2", on(1)), gang, nodes=3, slots=2)

    assert nodes(learnt().plan(lonely, NOW), "meek-3") == ["n1", "n1"]
    assert nodes(learnt().plan(noisy, NOW), "meek-3") == ["n2", "n2"]


def test_gangs_wait_in_order_of_arrival() -> None:
    view = cluster(
        job("meek-1", on(0), on(0, 1), on(1), wanted=3),
        job("meek-2", at=1.0, wanted=2),
        job("meek-3", at=2.0),
    )

    plan = learnt().plan(view, NOW)

    assert plan.local_batch.keys() == {"meek-1"}
    assert plan.reasons[JobId("meek-2")].text == "waits: needs 2 slots, 1 slot free"
    assert plan.reasons[JobId("meek-3")].text == "waits: needs 1 slot, 1 slot free, behind 1 job"


def test_a_short_job_overtakes_without_a_delay() -> None:
    full = job("meek-1", on(0), on(0, 1), on(1), wanted=3, stop_samples=11_000, samples_per_s=100.0)
    first = job("meek-2", at=1.0, wanted=4)  # its slots are free in 100 s
    short, long = (job("meek-3", at=2.0, stop_samples=seconds * 100) for seconds in (50, 200))

    passes = learnt().plan(cluster(full, first, short), NOW)

    assert nodes(passes, "meek-3") == ["n1"]
    assert passes.reasons[JobId("meek-3")].text.endswith("it does not delay meek-2")
    for options, third in (({}, long), ({"backfill": False}, short)):
        assert not nodes(learnt(**options).plan(cluster(full, first, third), NOW), "meek-3")


# --- migrations


def test_a_job_moves_to_free_slots_with_lower_costs() -> None:
    view = cluster(job("loud-1", on(0), movable=False), job("meek-2", on(0, 1)))

    plan = learnt().plan(view, NOW)

    assert nodes(plan, "meek-2") == ["n1"]
    reason = plan.reasons[JobId("meek-2")]
    assert reason.code == "pack"
    assert reason.text == (
        "moves to other slots: has its node to itself (until now it keeps 51% of its speed: "
        "loud-1 costs it 49%); expected: together, the jobs gain 0.52 of a job's speed"
    )
    assert reason.numbers["speed_share_before"] == pytest.approx(0.51, abs=0.01)


def test_the_second_half_of_a_migration_releases_the_worse_place() -> None:
    both = job("meek-2", on(0, 1), on(1), running_on={on(0, 1): 8, on(1): 8})

    plan = learnt().plan(cluster(job("loud-1", on(0)), both), NOW)

    assert plan.local_batch[JobId("meek-2")] == {on(1): 16}
    said = "shrinks to 1 slot: it has moved, and has its node to itself"
    assert plan.reasons[JobId("meek-2")].text == said


def test_two_jobs_exchange_places_on_a_full_cluster() -> None:
    pairs = (job("loud-1", on(0)), job("meek-2", on(0, 1)),
             job("loud-3", on(1)), job("meek-4", on(1, 1)))  # fmt: skip

    plan = learnt().plan(cluster(*pairs), NOW)

    together = {tuple(sorted(name for name in plan.local_batch if nodes(plan, name) == [node]))
                for node in ("n0", "n1")}  # fmt: skip
    assert together == {("loud-1", "loud-3"), ("meek-2", "meek-4")}
    traded = [name for name in plan.reasons if "exchanges slots with" in plan.reasons[name].text]
    assert len(traded) == len(plan.reasons) == 2
    for migrations in ("free", "none"):
        assert not learnt(migrations=migrations).plan(cluster(*pairs), NOW).reasons
    free = learnt(migrations="free").plan(cluster(*pairs, nodes=4), NOW)
    assert len(free.reasons) == 1  # one job at a time


@pytest.mark.parametrize(
    "changes",
    [
        {"moved_at": Seconds(NOW - 30.0)},
        {"stop_samples": 1100, "samples_per_s": 100.0},
        {"movable": False},
        {"batch_limit": 1, "batch_size": 1, "running_on": {on(0, 1): 1}},
    ],
    ids=["it moved recently", "it ends soon", "it is changing", "its batch is too small for both"],
)
def test_a_job_stays_if_a_move_does_not_pay_or_is_impossible(changes: dict[str, Any]) -> None:
    view = cluster(job("loud-1", on(0), movable=False), job("meek-2", on(0, 1), **changes))

    assert nodes(learnt().plan(view, NOW), "meek-2") == ["n0"]


def test_a_plan_is_requested_again_when_a_job_has_settled() -> None:
    view = cluster(job("loud-1", on(0), moved_at=Seconds(NOW - 20.0)))

    assert learnt().plan(view, NOW).wake_at == NOW + 40.0
    assert learnt(migrations="none").plan(view, NOW).wake_at is None


# --- learning


def test_costs_are_learnt_from_telemetry_beside_settled_neighbours() -> None:
    policy, view = Harmony(), cluster(job("loud-1", on(0)), job("meek-2", on(0, 1)))
    believed = policy.costs.cost("meek", "loud")

    policy.plan(view, NOW)
    for at in (NOW, Seconds(NOW + 1.0)):
        policy.observe(steps("meek-2"), at)
    assert policy.costs.step_s("meek", 1, 16) is None  # they have just met

    policy.observe(steps("meek-2", SPEED / 2), SOON)
    alone = cluster(job("meek-2", on(0, 1)), version=2)
    policy.plan(alone, SOON)
    for later in range(10, 40, 10):
        policy.observe(steps("meek-2"), Seconds(SOON + later))

    assert policy.costs.cost("meek", "loud") > believed + 0.1
    assert policy.costs.step_s("meek", 1, 16) == pytest.approx(16 / SPEED, rel=0.1)


def test_reports_during_changes_are_not_used() -> None:
    policy = Harmony()
    policy.observe(epoch("meek", None, SPEED), NOW)
    policy.observe(epoch("meek", (), SPEED, whole=False), NOW)

    policy.plan(cluster(job("loud-1", on(0), movable=False), job("meek-2", on(0, 1))), NOW)

    policy.observe(steps("meek-2"), SOON)
    policy.observe(steps("meek-2"), SOON)

    assert policy.costs.step_s("meek", 1, 16) is None


@pytest.mark.parametrize("speed", [float("nan"), -1.0, 1e300])
def test_an_implausible_speed_is_dropped_and_named_in_reasons(speed: float) -> None:
    policy = learnt()
    before = policy.costs.cost("meek", "loud")
    policy.plan(cluster(job("meek-2", on(0))), NOW)
    for at in (SOON, Seconds(SOON + 1.0)):
        policy.observe(steps("meek-2", speed), at)

    plan = policy.plan(cluster(job("meek-3"), version=2), SOON)

    said = f"its family reported {speed:g} samples/s, which is implausible and ignored"
    assert policy.costs.cost("meek", "loud") == before
    assert plan.reasons[JobId("meek-3")].text == f"starts on 1 slot: has its node to itself; {said}"


def test_an_oracle_replaces_learnt_costs() -> None:
    class NodeOracle(ToldOracle):
        """Half speed on node 0."""

        def speed_share(self, job: JobId, layouts: Any, on: Mapping[NodeId, Any]) -> float:
            return 0.5 if NodeId("n0") in on else 1.0

    view = cluster(job("meek-1", at=1.0))
    told = make("harmony", {"slowdowns": "oracle"}, NodeOracle())

    assert nodes(told.plan(view, NOW), "meek-1") == ["n1"]
    with pytest.raises(SettingsError, match="no cluster has an oracle"):
        make("harmony", {"slowdowns": "oracle"})
