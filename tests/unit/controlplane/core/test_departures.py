"""Jobs that have ended leave the state, and nothing but that is different."""

from __future__ import annotations

import msgspec
import pytest

from controlplane.core.commands import Accept, Command, RequestPlan, SendDelta
from controlplane.core.handlers import lifecycle
from controlplane.core.history import JobLeft
from controlplane.core.model.job_phases import Phase
from controlplane.core.reactor import Reactor
from controlplane.journal.database import input_from
from schemas.errors import UnknownJobError
from schemas.ids import JobId, Rank, Version, worker_id
from schemas.wire.agent import SETTLED
from tests.support import builders
from tests.support.builders import N1, S0, A, B, seen, send, stop
from tests.support.controller import Controller, cluster_of, running
from tests.support.recorded_history import of_jobs


def ended(**spec: object) -> Controller:
    """Job a has ended, and nothing of it lives."""
    controller = running(cluster_of(n1=1), epochs=1, **spec)
    controller.tell(N1, builders.finished(A, index=4, reason="all epochs are done"))
    controller.tell(N1, builders.exited(A, code=0))
    return controller


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


def test_a_job_whose_process_still_lives_stays() -> None:
    controller = running(cluster_of(n1=1))
    controller.take(builders.cancelled(A))

    controller.submit("b")
    assert list(controller.state.jobs) == [A, B]
    controller.tell(N1, builders.exited(A, code=0))
    controller.submit("c")

    assert A not in controller.state.jobs


def test_a_submission_of_a_job_that_left_is_the_same_job() -> None:
    controller = ended(key="k")
    controller.submit("b")

    assert controller.submit("a", key="k") == [Accept(A)]
    assert list(controller.state.jobs) == [B]


def test_a_node_that_comes_back_with_a_process_of_a_job_that_left_is_told_to_stop_it() -> None:
    controller = ended()
    controller.submit("b")
    version = controller.left[0].last.version

    commands = controller.take(builders.greeting(N1, seen(A)))

    assert send(N1, stop(A, version, forget=True)) in commands
    assert controller.state.nodes[N1].foreign_workers == {
        S0: worker_id(A, Version(1), Rank(0))
    }  # until it has exited


def test_a_node_hears_which_of_the_jobs_that_left_something_there_have_ended() -> None:
    controller = ended()
    controller.submit("b")
    controller.place({B: S0})
    version = controller.left[0].last.version
    here = [seen(B)]

    commands = controller.take(builders.greeting(N1, *here, jobs=(A, B, JobId("unknown-9"))))

    assert [one.delta for one in commands if isinstance(one, SendDelta) and one.node == N1] == [
        builders.run(B),
        stop(A, version, forget=True),
    ]


def test_a_node_hears_of_a_job_that_waits_that_it_has_not_ended() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")

    commands = controller.take(builders.greeting(N1, boot="boot-2", jobs=(A,)))

    version = controller.job(A).version
    assert [one.delta for one in commands if isinstance(one, SendDelta)] == [
        stop(A, version, stage=SETTLED)
    ]


def test_a_job_with_a_process_on_a_lost_node_stays_until_the_node_is_back() -> None:
    controller = running(cluster_of(n1=1))
    controller.take(builders.cancelled(A))
    controller.lose(N1)
    controller.submit("b")
    assert list(controller.state.jobs) == [A, B]

    controller.take(builders.greeting(N1, boot="boot-2"))
    controller.submit("c")

    assert A not in controller.state.jobs


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
