"""Jobs that have ended leave the state, and nothing but that is different."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from controlplane.core.commands import Accept, Command, RequestPlan
from controlplane.core.handlers import lifecycle
from controlplane.core.history import JobLeft
from controlplane.core.model.job_phases import Phase
from controlplane.core.reactor import Reactor
from controlplane.journal.database import input_from
from schemas.errors import UnknownJobError
from schemas.ids import JobId, Version
from schemas.wire.agent import SETTLED
from tests.support import builders
from tests.support.builders import (
    N1,
    S0,
    A,
    B,
    C,
    cancelled,
    cleared,
    exited,
    finished,
    greeting,
    seen,
    stop,
)
from tests.support.controller import Controller, cluster_of, running
from tests.support.recorded_history import of_jobs
from tests.unit.controlplane.core.steps import Story, lose, place, played, stories, submit, to, told


def ended(**spec: object) -> Controller:
    """Job a has ended, and nothing of it lives."""
    controller = running(cluster_of(n1=1), epochs=1, **spec)
    return told(controller, finished(A, index=4, reason="all epochs are done"), exited(A, code=0))


def left_version(controller: Controller) -> Version:
    return controller.left[0].last.version


def foreign(controller: Controller) -> object:
    return controller.state.nodes[N1].foreign_workers


def jobs(controller: Controller) -> list[JobId]:
    return [*controller.state.jobs]


def gone() -> Controller:
    """Job a, of version 2, has left the state; job b waits."""
    return told(ended(), submit("b"))


def one() -> Controller:
    return running(cluster_of(n1=1))


LEAVE: Final[dict[str, Story]] = {
    "a job whose process still lives stays": [
        one, cancelled(A), submit("b"), {jobs: [A, B]}, exited(A, code=0), submit("c"), {jobs: [B, C]},
    ],
    "a submission of a job that left is the same job": [
        lambda: ended(key="k"), submit("b"), submit("a", key="k"), {"commands": [Accept(A)], jobs: [B]},
    ],
    "a node that comes back with a process of a job that left is told to stop it": [
        gone, {left_version: 2}, greeting(N1, seen(A)),
        {"orders": to(stop(A, 2, forget=True), N1), foreign: {S0: "a-1.v1.r0"}},  # until it has exited
    ],
    "a process that a node no longer has gives its slot back": [
        gone, greeting(N1, seen(A)), {foreign: {S0: "a-1.v1.r0"}},
        (N1, cleared(A, 1)), {foreign: {S0: "a-1.v1.r0"}},  # only older versions
        (N1, cleared(A, 2)), {foreign: {}},
    ],
    "a node hears which of the jobs that left something there have ended": [
        gone, place({B: S0}), greeting(N1, seen(B), jobs=(A, B, JobId("unknown-9"))),
        {"orders": [*to(builders.run(B), N1), *to(stop(A, 2, forget=True), N1)]},
    ],
    "a node hears of a job that waits that it has not ended": [
        lambda: cluster_of(n1=1), submit(), greeting(N1, boot="boot-2", jobs=(A,)),
        {"orders": to(stop(A, 0, stage=SETTLED), N1), "version": 0},
    ],
    "a job with a process on a lost node stays until the node is back": [
        one, cancelled(A), lose(N1), submit("b"), {jobs: [A, B]}, greeting(N1, boot="boot-2"), submit("c"), {jobs: [B, C]},
    ],
}  # fmt: skip


@stories(LEAVE)
def test_a_job_leaves_when_nothing_of_it_lives(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected


def test_a_job_that_has_ended_leaves_with_the_next_input_and_says_its_last() -> None:
    controller = ended(key="k")
    last = controller.job(A)
    assert controller.left == []

    controller.submit("b")

    assert controller.left == [JobLeft(job=A, last=last)]
    assert (last.phase, last.key) == (Phase.SUCCEEDED, "ann/k")
    assert list(controller.state.jobs) == [B]
    with pytest.raises(UnknownJobError):
        controller.state.job(A)


def test_what_is_said_late_of_a_job_that_left_changes_nothing() -> None:
    controller = ended()
    controller.submit("b")
    jobs, totals = dict(controller.state.jobs), msgspec.msgpack.encode(controller.reactor.totals)

    for event in (
        builders.epoch_end(A, 9),
        builders.ready(A),
        builders.formed(A),
        builders.exited(A, code=3),
        builders.cleared(A, 9),
    ):
        assert controller.tell(N1, event) == []
    for due in controller.due(1e6):
        controller.take(due)

    assert controller.state.jobs == jobs
    assert msgspec.msgpack.encode(controller.reactor.totals) == totals


def test_what_is_remembered_of_those_that_left_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "MAX_LEFT_JOBS", 2)
    monkeypatch.setattr(lifecycle, "MAX_LEFT_KEYS", 3)
    controller = cluster_of(n1=1)
    for number in range(1, 7):
        job = JobId(f"a-{number}")
        controller.submit("a", key=f"k{number}")
        controller.place({job: S0})
        controller.tell(N1, builders.started(job))
        controller.take(builders.cancelled(job))
        controller.tell(N1, builders.exited(job, code=0))
    controller.submit("b", key="b")

    state = controller.state
    assert list(state.left_jobs) == ["a-5", "a-6"]
    assert list(state.left_submission_keys) == ["ann/k4", "ann/k5", "ann/k6"]
    assert list(state.submission_keys) == ["ann/b"]


@pytest.mark.parametrize("seed", range(8))
def test_all_orders_are_the_same_as_if_no_job_left(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, leaves, gone = Reactor(), Reactor(), set[JobId]()
    for at, body in of_jobs(seed, 150).history:
        event = input_from(body)
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle, "remove_leaving", lambda _: None)
            expected = orders(stays.handle(event, at))
        stays.state.leaving_jobs.clear()
        assert orders(leaves.handle(event, at)) == expected
        gone |= {record.job for record in leaves.records if isinstance(record, JobLeft)}

    assert leaves.state.jobs == {n: j for n, j in stays.state.jobs.items() if n not in gone}
    assert leaves.state.nodes == stays.state.nodes
    assert leaves.totals == stays.totals
    assert gone


def orders(commands: list[Command]) -> list[Command]:
    """All but questions for a plan: late words of a job that left lead to none."""
    return [command for command in commands if command != RequestPlan()]
