"""An epoch remembers who shared its job's nodes, if they were the same from beginning to end."""

from __future__ import annotations

from controlplane.core.policy_events import history
from controlplane.policy.api import EpochSeen
from tests.support.builders import N1, S0, S1, A, B, cancelled, epoch_end, exited
from tests.support.controller import Controller, begin, cluster_of


def beside(controller: Controller) -> list[object]:
    """Of each epoch of the first job."""
    return [epoch.beside for epoch in controller.history_of(A).epochs]


def pair() -> Controller:
    """Two jobs of one node; both train."""
    controller = cluster_of(n1=2)
    for name, job, slot in (("a", A, S0), ("b", B, S1)):
        controller.submit(name)
        begin(controller, job, 1, on=slot)
    return controller


def test_the_first_epoch_beside_a_neighbour_is_not_known_to_be_whole_the_next_ones_are() -> None:
    controller = pair()
    family = controller.job(B).family

    for epoch in (1, 2, 3):
        controller.tell(N1, epoch_end(A, epoch))

    assert beside(controller) == [None, ((1, (family,)),), ((1, (family,)),)]


def test_an_epoch_in_which_a_neighbour_left_is_beside_nobody() -> None:
    controller = pair()
    for epoch in (1, 2):
        controller.tell(N1, epoch_end(A, epoch))

    controller.take(cancelled(B))
    controller.tell(N1, exited(B))
    controller.tell(N1, epoch_end(A, 3))
    controller.tell(N1, epoch_end(A, 4))

    assert beside(controller)[2:] == [None, ((1, ()),)]


def test_a_policy_that_begins_anew_hears_who_was_there() -> None:
    controller = pair()
    for epoch in (1, 2):
        controller.tell(N1, epoch_end(A, epoch))

    state, histories = controller.reactor.state, controller.histories
    told = [
        event
        for _, event in history(state.jobs.values(), histories)
        if isinstance(event, EpochSeen)
    ]

    assert [event.beside for event in told] == [None, ((1, (controller.job(B).family,)),)]
