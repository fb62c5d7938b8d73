"""A job whose workers die on a node again and again is placed somewhere else."""

from __future__ import annotations

import pytest

from controlplane.core.plan_check import difference
from schemas.ids import JobId, Seconds, SlotId, node_of
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
    greeting,
    proposal,
    refused,
)
from tests.support.controller import Controller, begin, cluster_of, running, starting, training


def proposed(controller: Controller, placed: dict[JobId, dict[SlotId, int]]) -> object:
    """What becomes of a plan before it enters the history."""
    now, state = Seconds(controller.now), controller.state
    return difference(proposal(placed, based_on=state.version).plan, state, now).local_batch


def died_on_n1(controller: Controller, times: int, **how: int) -> Controller:
    """Job a starts on the first slot there, and its worker dies, so many times."""
    running(controller, retries=9)
    for count in range(1, times + 1):
        version = controller.job(A).version
        controller.tell(N1, exited(A, version, **how))
        controller.now += 100.0
        if count < times:
            begin(controller, A, version + 2)
    return controller


@pytest.mark.parametrize("how", [{"signal": 9}, {"code": 1}, {}], ids=["killed", "failed", "gone"])
def test_after_two_deaths_on_a_node_a_job_starts_on_another(how: dict[str, int]) -> None:
    controller = died_on_n1(cluster_of(n1=1, n2=1), 2, **how)

    assert proposed(controller, {A: {S0: BATCH}}) == {A: {T0: BATCH}}
    assert controller.replayed() == controller.state


def test_one_death_is_bad_luck() -> None:
    controller = died_on_n1(cluster_of(n1=1, n2=1), 1, signal=9)

    assert proposed(controller, {A: {S0: BATCH}}) == {A: {S0: BATCH}}


def test_a_slot_that_somebody_else_is_to_have_is_none() -> None:
    controller = died_on_n1(cluster_of(n1=1, n2=1), 2, signal=9)
    controller.submit("b")

    both = {A: {S0: BATCH}, B: {T0: BATCH}}
    assert proposed(controller, both) == both


def test_another_kind_of_device_is_none() -> None:
    controller = cluster_of(n1=1)
    controller.take(greeting(N2, model="H200"))
    died_on_n1(controller, 2, signal=9)

    assert proposed(controller, {A: {S0: BATCH}}) == {A: {S0: BATCH}}


def test_a_growth_goes_elsewhere_and_what_trains_stays() -> None:
    controller = training(cluster_of(n1=2, n2=2), S0)
    controller.job(A).attempts.crashes_by_node[N1] = 2

    wide = {A: {S0: BATCH // 2, S1: BATCH // 2}}
    assert proposed(controller, wide) == {A: {S0: BATCH // 2, T0: BATCH // 2}}


def test_other_jobs_may_still_go_there() -> None:
    controller = died_on_n1(cluster_of(n1=1, n2=1), 2, signal=9)
    controller.submit("b")

    assert proposed(controller, {B: {S0: BATCH}}) == {B: {S0: BATCH}}


def test_a_node_that_could_not_start_a_worker_counts() -> None:
    controller = starting(cluster_of(n1=1, n2=1))

    controller.tell(N1, refused(A, error="the disk is full", node_fault=True))

    assert controller.job(A).attempts.crashes_by_node == {N1: 1}


def test_who_ends_as_a_consequence_of_another_s_death_does_not_count() -> None:
    controller = training(cluster_of(n1=1, n2=2), S0, T0, T1)
    controller.tell(N1, exited(A, signal=9))
    controller.tell(N2, exited(A, rank=1, signal=6))

    assert controller.job(A).attempts.crashes_by_node == {node_of(S0): 1}
