"""Jobs that request types of GPUs, labels, cores and memory, and jobs without slots."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.core.inputs import DrainExpired, DrainRequested
from controlplane.core.model.job_phases import Phase
from controlplane.core.plan_check import check, difference
from controlplane.core.plan_cycle import PlanCycle, fitting_plan, fitting_view
from controlplane.core.slot_index import Fit
from controlplane.policy.api import Plan, Reason
from controlplane.policy.sharing.turns import at_once
from schemas.ids import JobId, Seconds, SlotId, slot_id
from tests.support.builders import (
    BATCH,
    N1,
    N2,
    S0,
    S1,
    T0,
    T1,
    A,
    B,
    exited,
    formed,
    greeting,
    proposal,
    ready,
    seen,
    started,
)  # fmt: skip
from tests.support.controller import Controller, cluster_of

GIB = 1 << 30
GANG: dict[str, Any] = {
    "kind": "torchrun", "command": ("python", "train.py"), "script": "", "batch_size": 0,
}  # fmt: skip
PREPARES: dict[str, Any] = {
    "kind": "command", "command": ("make",), "slots": 0, "script": "", "batch_size": 0,
}  # fmt: skip
PLACE, NEXT = slot_id(N1, -1), slot_id(N1, -2)
EVERYWHERE = frozenset({S0, S1, T0, T1})


def mixed(**first: Any) -> Controller:
    """Node n1 with two A100, a label, podman and uv, and node n2 with two V100 and a label."""
    controller = cluster_of()
    labels = {"nvlink": "yes", "zone": "a"}
    aside = {"place_cores": 1.0, "place_memory_bytes": 2 * GIB, "memory_bytes": 34 * GIB}
    has = {"cores": 9, "labels": labels, "containers": "podman", **aside, **first}
    controller.take(greeting(N1, slots=2, model="NVIDIA A100-SXM4-80GB", has=has))
    has = {"cores": 9, "labels": {"zone": "b"}, **aside, "place_cores": 0.0, "environments": False}
    controller.take(greeting(N2, slots=2, model="Tesla V100-SXM2-16GB", has=has))
    return controller


def fit(controller: Controller, **spec: Any) -> Fit:
    controller.submit("a", **spec)
    job = next(reversed(controller.state.jobs.values()))
    return controller.state.slot_index.fit(job.spec)


@pytest.mark.parametrize(
    ("spec", "slots", "missing"),
    [
        ({}, None, ""),
        ({"gpu_type": "a100"}, {S0, S1}, ""),
        ({"gpu_type": "A100-SXM4-80gb"}, {S0, S1}, ""),
        ({"gpu_type": "v100"}, {T0, T1}, ""),
        ({"gpu_type": "a10"}, set(),
         "no slot is of type a10; slots report: NVIDIA A100-SXM4-80GB, Tesla V100-SXM2-16GB"),
        ({"constraints": {"zone": "b"}}, {T0, T1}, ""),
        ({"constraints": {"nvlink": "yes", "zone": "a"}}, {S0, S1}, ""),
        ({"constraints": {"nvlink": "no"}}, set(),
         "no node has label nvlink = no; nodes report: nvlink = yes"),
        ({"constraints": {"rack": "7"}}, set(),
         "no node has label rack = 7; nodes report: nvlink, zone"),
        ({"constraints": {"zone": "b"}, "gpu_type": "a100"}, set(),
         "no node has all that it requests"),
        ({"cpus": 4.0}, EVERYWHERE, ""),
        ({"cpus": 4.5}, {T0, T1}, ""),  # n2 sets no cores aside
        ({"cpus": 5.0}, set(), "no node has cpus = 5 for a slot of it"),
        ({"memory_bytes": 17 * GIB}, set(),
         "no node has memory_bytes = 18253611008 (17 GiB) for a slot of it"),
        ({"memory_bytes": 16 * GIB}, EVERYWHERE, ""),
        ({"image": "debian:12"}, {S0, S1}, ""),
        ({"image": "debian:12", "constraints": {"zone": "b"}}, set(),
         "no node has all that it requests"),
        ({"requirements": "r.txt"}, {S0, S1}, ""),
    ],
)  # fmt: skip
def test_slots_fit_an_elastic_job_by_type_labels_and_the_share_of_a_slot(
    spec: dict[str, Any], slots: set[SlotId] | None, missing: str
) -> None:
    found = fit(mixed(), **spec)

    assert (found.slots, found.missing) == (slots, missing)


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        ({"image": "debian:12"}, "no node runs containers, which its image needs"),
        ({"requirements": "r.txt"}, "no node has uv, which its requirements need"),
    ],
)
def test_a_job_waits_for_a_node_that_can_prepare_it(spec: dict[str, str], missing: str) -> None:
    assert fit(mixed(containers="", environments=False), **spec) == Fit(frozenset(), {}, missing)


def test_a_slot_of_a_program_may_take_the_shares_of_others() -> None:
    found = fit(mixed(), **GANG, slots=1, cpus=6.0, constraints={"zone": "a"})

    assert found == Fit(frozenset({S0, S1}), {N1: 1.5}, "")


def test_no_program_gets_more_than_a_whole_node() -> None:
    assert fit(mixed(), **GANG, slots=1, cpus=10.0).missing == (
        "no node has cpus = 10 for a slot of it"
    )


def test_a_node_with_other_labels_after_its_return_fits_other_jobs() -> None:
    controller = mixed()
    fit(controller, gpu_type="v100")

    controller.take(greeting(N2, slots=2, model="Tesla V100", boot="boot-2"))

    assert fit(controller, constraints={"zone": "b"}).slots == frozenset()


# --- programs


def serve(controller: Controller) -> PlanCycle:
    """Let claims start, as the service does."""
    cycle = PlanCycle(lambda: controller.reactor)
    now = Seconds(controller.now)
    plan = difference(at_once(cycle.serve_claims(now)), controller.state, now, whole=False)
    if not plan.empty:
        controller.take(proposal(plan.local_batch, based_on=controller.state.version))
    return cycle


def test_slots_beside_those_of_a_program_stay_empty_and_count_as_its_own() -> None:
    controller = mixed()
    controller.submit("a", **GANG, slots=1, cpus=6.0, gpu_type="a100")

    serve(controller)

    assert controller.state.slot_index.owners() == {S0: A, S1: A}
    assert [slot.slot for slot in controller.view().slots if slot.usable] == [T0, T1]
    assert controller.job(A).size.slots == (S0,)
    controller.now += 10.0
    controller.tell(N1, started(A))
    controller.tell(N1, exited(A, code=0))
    assert controller.state.slot_index.owners() == {}
    assert controller.job(A).accounting.slot_s == 20.0


def test_a_program_that_no_node_fits_says_what_it_waits_for() -> None:
    controller = mixed()
    controller.submit("a", **GANG, slots=1, constraints={"rack": "7"})

    cycle = serve(controller)

    text = "no node has label rack = 7; nodes report: nvlink, zone"
    assert cycle.claim_reasons == {A: Reason("shape", text, {"needs": 1.0, "slots": 0.0})}


def test_a_plan_with_a_slot_that_does_not_fit_is_refused() -> None:
    controller = mixed()
    controller.submit("a", gpu_type="a100")
    plan = Plan(based_on=controller.state.version, local_batch={A: {T0: BATCH}})

    assert check(plan, controller.state, Seconds(controller.now)).refused == {
        A: "slot n2/0 does not fit what the job requests"
    }


# --- jobs without slots


def prepared(**spec: Any) -> Controller:
    """Job a runs on a place of node n1."""
    controller = mixed()
    controller.submit("a", **{**PREPARES, **spec})
    serve(controller)
    controller.tell(N1, started(A))
    controller.tell(N1, ready(A))
    controller.tell(N1, formed(A))
    return controller


def test_a_job_without_slots_runs_beside_them_and_holds_none() -> None:
    controller = prepared()

    job = controller.job(A)
    assert (job.phase, job.reason) == (Phase.RUNNING, "runs without slots")
    assert job.size.slots == (PLACE,)
    assert [slot.usable for slot in controller.view().slots] == [True] * 4
    controller.now += 10.0
    controller.tell(N1, exited(A, code=0))
    assert controller.job(A).phase is Phase.SUCCEEDED
    assert controller.job(A).accounting.slot_s == 0.0
    assert controller.replayed() == controller.state


def test_jobs_without_slots_wait_for_what_their_node_sets_aside() -> None:
    controller = prepared(cpus=0.6)
    controller.submit("b", **PREPARES, cpus=0.6)

    assert serve(controller).claim_reasons[B].text == "waits for cores and memory beside the slots"
    controller.tell(N1, exited(A, code=0))
    serve(controller)
    assert controller.job(B).size.slots == (PLACE,)


def test_jobs_without_slots_have_places_of_their_own() -> None:
    controller = prepared(cpus=0.5)
    controller.submit("b", **PREPARES, cpus=0.5)

    serve(controller)

    assert controller.job(B).size.slots == (NEXT,)


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        ({"cpus": 2.0}, "no node has cpus = 2 for a job without slots"),
        ({"constraints": {"zone": "b"}}, "no node has all that it requests"),
    ],
)
def test_a_job_without_slots_that_no_node_fits_says_why(spec: dict[str, Any], missing: str) -> None:
    controller = mixed()
    controller.submit("a", **PREPARES, **spec)

    assert serve(controller).claim_reasons[A] == Reason(
        "shape", missing, {"needs": 0.0, "slots": 0.0}
    )


def test_a_job_without_slots_starts_again_elsewhere_after_the_loss_of_its_node() -> None:
    controller = prepared(on_loss="restart")
    has = {"place_cores": 1.0, "place_memory_bytes": GIB}
    controller.take(greeting(N2, slots=2, has=has, boot="boot-2"))

    controller.lose(N1)
    serve(controller)

    assert controller.job(A).size.slots == (slot_id(N2, -1),)


def test_a_job_without_slots_that_may_not_repeat_fails_with_its_node() -> None:
    controller = prepared()

    controller.lose(N1)

    assert controller.job(A).phase is Phase.FAILED


def test_a_drain_stops_a_job_without_slots_at_its_deadline() -> None:
    controller = prepared(on_loss="restart", grace_s=5.0)
    controller.take(DrainRequested(node=N1, user="ann", reason="", within_s=10.0))
    assert controller.job(A).phase is Phase.RUNNING

    controller.now += 11.0
    controller.take(DrainExpired(node=N1))

    assert controller.job(A).phase is Phase.PAUSED
    assert "waits" in serve(controller).claim_reasons[A].code


def test_the_worker_of_a_job_without_slots_is_known_again_after_a_restart() -> None:
    controller = prepared()
    controller.start()
    has = {"place_cores": 1.0, "place_memory_bytes": GIB}
    worker = seen(A, slot=-1)

    controller.take(greeting(N1, worker, slots=2, has=has, boot="boot-2"))

    assert controller.job(A).phase is Phase.RUNNING
    assert controller.state.nodes[N1].foreign_workers == {}


# --- elastic jobs


def mended(controller: Controller, planned: dict[JobId, dict[SlotId, int]]) -> Plan:
    plan = Plan(based_on=controller.state.version, local_batch=planned)
    return fitting_plan(plan, controller.view, controller.state, frozenset())


def test_a_job_on_slots_that_do_not_fit_gets_free_ones_that_do() -> None:
    controller = mixed()
    controller.submit("a", gpu_type="v100", slots=(1, 2))

    assert mended(controller, {A: {S0: 32, S1: 32}}).local_batch == {A: {T0: 32, T1: 32}}


def test_two_jobs_of_a_plan_exchange_slots() -> None:
    controller = mixed()
    controller.submit("a", slots=(1, 2))
    controller.submit("b", gpu_type="v100", slots=(1, 2))
    planned = {A: {T0: 32, T1: 32}, B: {S0: 32, S1: 32}}

    assert mended(controller, planned).local_batch == {
        A: {S0: 32, S1: 32}, B: {T0: 32, T1: 32},
    }  # fmt: skip


def test_a_job_gets_what_another_one_has_above_its_minimum() -> None:
    controller = mixed()
    controller.submit("a", gpu_type="v100", slots=(1, 2))
    controller.submit("b", gpu_type="v100", slots=(1, 2))

    assert mended(controller, {A: {T0: 32, T1: 32}, B: {S0: 64}}).local_batch == {
        A: {T1: 64}, B: {T0: 64},
    }  # fmt: skip


def test_a_job_without_fitting_slots_waits_and_says_so() -> None:
    controller = mixed()
    controller.submit("a", gpu_type="v100", slots=2)
    controller.submit("b", gpu_type="v100")

    plan = mended(controller, {A: {T0: 32, T1: 32}, B: {S0: 64}})

    assert plan.local_batch == {A: {T0: 32, T1: 32}, B: {}}
    assert plan.reasons[B].code == "shape"


def test_policies_see_at_most_the_slots_that_fit_a_job_and_no_job_that_fits_none() -> None:
    controller = mixed()
    controller.submit("a", gpu_type="v100", slots=(1, 4))
    controller.submit("b", gpu_type="h100")

    view, reasons = fitting_view(controller.view(), controller.state)

    assert {name: job.most for name, job in view.jobs.items()} == {A: 2}
    report = "NVIDIA A100-SXM4-80GB, Tesla V100-SXM2-16GB"
    assert reasons[B].text == f"no slot is of type h100; slots report: {report}"


def test_views_and_plans_without_requests_stay_the_same_objects() -> None:
    controller = mixed()
    controller.submit("a")
    view, plan = controller.view(), Plan(based_on=1, local_batch={A: {S0: BATCH}})

    assert fitting_view(view, controller.state)[0] is view
    assert fitting_plan(plan, controller.view, controller.state, frozenset()) is plan
