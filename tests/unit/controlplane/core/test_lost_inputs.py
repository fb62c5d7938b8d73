"""A journal that lost inputs: numbers and versions are not reused, and other jobs are left alone."""

from __future__ import annotations

from controlplane.core.commands import Accept, SendDelta
from controlplane.core.inputs import ControllerStarted
from controlplane.core.model.job_phases import Phase
from schemas.ids import JobId, Term, Version
from schemas.wire.agent import WorkerExited
from tests.support.builders import N1, S0, S1, A, epoch_end, exited, formed, greeting, ready, seen
from tests.support.controller import Controller, cluster_of, running

LOST, KEPT = "1111111111111111", "2222222222222222"  # ids of journals


def restored(controller: Controller, **fields: int) -> Controller:
    """The next controller has a restored journal."""
    term = Term(controller.state.term + 1)
    controller.take(
        ControllerStarted(term=term, release="0", journal=KEPT, restored=True, **fields)
    )
    return controller


def submitted(controller: Controller) -> str:
    """The name that the next job gets."""
    (name,) = [one.job for one in controller.submit("a") if isinstance(one, Accept)]
    return name


def test_numbers_of_jobs_continue_after_those_that_were_lost() -> None:
    controller = restored(cluster_of(n1=1), jobs=57)

    assert submitted(controller) == "a-58"


def test_numbers_that_a_node_names_are_not_given_again() -> None:
    controller = restored(cluster_of())
    controller.take(greeting(N1, seen(JobId("x-12"), journal=LOST), jobs=(JobId("y-30"),)))

    assert submitted(controller) == "a-31"
    assert controller.state.outdated == ""  # the admin knows


def test_a_number_out_of_all_bounds_or_none_at_all_is_bounded() -> None:
    controller = restored(cluster_of())
    names = (JobId("y-" + "9" * 5000), JobId("no number"), JobId("z-999999999999"))
    controller.take(greeting(N1, jobs=names))

    assert submitted(controller) == "a-1000001"


def test_versions_that_may_have_been_lost_are_not_used_again() -> None:
    controller = restored(running(cluster_of(n1=1)))
    controller.take(greeting(N1))

    assert controller.job(A).phase is Phase.PAUSED  # its process is gone
    controller.place({A: S0})
    assert controller.job(A).version > 1000


def test_a_worker_of_another_job_with_the_same_name_is_left_alone() -> None:
    controller = restored(cluster_of())
    controller.submit("a")
    commands = controller.take(greeting(N1, seen(A, journal=LOST), slots=2))

    assert not [one for one in commands if isinstance(one, SendDelta)]
    assert controller.state.nodes[N1].foreign_workers == {S0: "a-1.v1.r0"}
    assert controller.job(A).phase is Phase.QUEUED


def test_its_reports_are_not_those_of_the_new_job() -> None:
    controller = restored(cluster_of())
    controller.submit("a")
    controller.take(greeting(N1, seen(A, journal=LOST), slots=2))
    controller.place({A: S1})
    before = controller.job(A)

    controller.tell(N1, epoch_end(A, 1, journal=LOST))
    controller.tell(N1, exited(A, code=0, journal=LOST))

    assert controller.job(A) == before
    assert controller.state.nodes[N1].foreign_workers == {}


def test_a_worker_of_a_lost_group_keeps_its_slot_until_it_exits() -> None:
    controller = restored(running(cluster_of(n1=2)))
    controller.take(greeting(N1, seen(A), seen(A, 5, rank=0, slot=1), slots=2))

    assert controller.job(A).phase is Phase.PAUSED
    assert controller.job(A).reason == (
        "a later change of its group was lost with the journal; restarts from the beginning"
    )
    assert controller.state.nodes[N1].foreign_workers == {S1: "a-1.v5.r0"}
    controller.tell(N1, WorkerExited(job=A, version=Version(5), rank=0, code=None, signal=15))
    assert controller.state.nodes[N1].foreign_workers == {}


def test_a_starting_job_continues_once_its_reports_come_again() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    controller.place({A: S0})
    restored(controller)
    controller.take(greeting(N1, seen(A)))

    controller.tell(N1, ready(A))
    controller.tell(N1, formed(A))

    assert controller.job(A).phase is Phase.RUNNING


def test_a_node_that_knows_more_than_the_journal_stops_new_jobs() -> None:
    controller = cluster_of(n1=1)
    controller.start()
    controller.take(greeting(N1, events_dropped=7))
    assert controller.state.outdated == (
        "the journal is older than node n1, and lacks its events 1 to 7"
    )

    controller.start()
    controller.take(greeting(N1, events_dropped=7))
    assert controller.state.outdated != ""  # until an admin decides
    restored(controller)

    assert controller.state.outdated == ""


def test_a_node_that_has_seen_a_later_term_stops_new_jobs() -> None:
    controller = cluster_of()
    controller.take(greeting(N1, term=Term(9)))

    assert controller.state.outdated == "the journal is older than node n1, and lacks term 9"


def test_a_folder_that_only_looks_like_a_job_s_stops_no_new_jobs() -> None:
    controller = cluster_of()
    controller.take(greeting(N1, highest_job=2024))

    assert (controller.state.outdated, submitted(controller)) == ("", "a-2025")
