"""A job whose workers die on a node again and again is placed somewhere else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from controlplane.core.plan_check import difference
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import (
    BATCH,
    N1,
    N2,
    S0,
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
from tests.unit.controlplane.core.steps import HALVES, ON_N1, submit, told

Placed = Mapping[JobId, Mapping[SlotId, int]]
HERE, THERE = {A: {S0: BATCH}}, {A: {T0: BATCH}}


def died_on_n1(times: int, controller: Controller | None = None, **how: int) -> Controller:
    """Job a starts on the first slot there, and its worker dies, so many times."""
    controller = running(controller or cluster_of(n1=1, n2=1), retries=9)
    for version in range(1, 2 * times, 2):
        told(controller, exited(A, version, **how), 100.0)
        if version < 2 * times - 1:
            begin(controller, A, version + 2)
    return controller


def beside_b() -> Controller:
    return told(died_on_n1(2, signal=9), submit("b"))


def other_device() -> Controller:
    controller = told(cluster_of(n1=1), greeting(N2, model="H200"))
    return died_on_n1(2, controller, signal=9)


def wide() -> Controller:
    controller = training(cluster_of(n1=2, n2=2), S0)
    controller.job(A).attempts.crashes_by_node[N1] = 2
    return controller


@pytest.mark.parametrize(
    ("controller", "planned", "becomes"),
    [
        (lambda: died_on_n1(2, signal=9), HERE, THERE),
        (lambda: died_on_n1(2, code=1), HERE, THERE),
        (lambda: died_on_n1(2), HERE, THERE),
        (lambda: died_on_n1(1, signal=9), HERE, HERE),
        (beside_b, HERE | {B: {T0: BATCH}}, HERE | {B: {T0: BATCH}}),
        (other_device, HERE, HERE),
        (wide, {A: ON_N1}, {A: HALVES}),
        (beside_b, {B: {S0: BATCH}}, {B: {S0: BATCH}}),
    ],
    ids=[
        "two were killed", "two failed", "two are gone", "one is bad luck", "somebody else is to have the slot",
        "another kind of device", "a growth goes elsewhere and what trains stays", "others may still go there",
    ],
)  # fmt: skip
def test_after_two_deaths_on_a_node_a_job_is_placed_on_another(
    controller: object, planned: Placed, becomes: Placed
) -> None:
    made: Controller = controller()  # type: ignore[operator]
    plan = proposal(planned, based_on=made.state.version).plan

    assert difference(plan, made.state, Seconds(made.now)).local_batch == becomes


def test_deaths_are_in_the_history() -> None:
    controller = died_on_n1(2, signal=9)

    assert controller.replayed() == controller.state


def test_a_node_that_could_not_start_a_worker_counts() -> None:
    controller = told(
        starting(cluster_of(n1=1, n2=1)), refused(A, error="the disk is full", node_fault=True)
    )

    assert controller.job(A).attempts.crashes_by_node == {N1: 1}


def test_who_ends_as_a_consequence_of_another_s_death_does_not_count() -> None:
    controller = training(cluster_of(n1=1, n2=2), S0, T0, T1)
    told(controller, exited(A, signal=9), exited(A, rank=1, signal=6))

    assert controller.job(A).attempts.crashes_by_node == {N1: 1}
