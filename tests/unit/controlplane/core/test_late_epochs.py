"""Epochs whose reports come when their group is lost: none that the job goes on from is missing."""

from __future__ import annotations

from controlplane.core.commands import Command
from controlplane.core.model.job_phases import Phase
from schemas.ids import Version
from schemas.wire.agent import EpochReported
from tests.support.builders import (
    N1,
    N2,
    S0,
    S1,
    A,
    cancelled,
    epoch_end,
    exited,
    finished,
    formed,
    greeting,
    quiesced,
    ready,
    started,
)
from tests.support.controller import Controller, cluster_of, running, training

ELSEWHERE = S1.replace(N1, N2).replace("/1", "/0")


def cut_off() -> Controller:
    """Job a trained two epochs on a node that is lost with what it reports meanwhile."""
    controller = running(cluster_of(n1=1, n2=1), epochs=2)
    controller.lose(N1)
    return controller


def back(controller: Controller, *reports: EpochReported) -> list[Command]:
    """The node returns with what it did; its worker has gone."""
    controller.take(greeting(N1))
    return [command for report in reports for command in controller.tell(N1, report)]


def starts_elsewhere(controller: Controller, resumed: int) -> None:
    controller.place({A: ELSEWHERE})
    controller.tell(N2, started(A, 3))
    controller.tell(N2, ready(A, 3, resumed=resumed))
    controller.tell(N2, formed(A, 3, epoch=resumed))


def recovered_in_place() -> Controller:
    """Job a trained an epoch on two nodes; the first, rank 0's, is lost and the second goes on."""
    controller = training(cluster_of(n1=1, n2=1), S0, ELSEWHERE, epochs=1)
    controller.lose(N1)
    controller.tell(N2, quiesced(A, rank=1, group=2, index=3, port=29001))
    controller.tell(N2, formed(A, rank=1, group=2, index=4, step=20))
    group = controller.job(A).group
    assert group is not None
    assert (controller.job(A).phase, group.version) == (Phase.RUNNING, 2)
    return controller


def epochs(controller: Controller) -> list[int]:
    return [epoch.epoch for epoch in controller.history_of(A).epochs]


def test_a_job_without_a_group_is_where_its_lost_group_came_to() -> None:
    controller = cut_off()

    back(controller, epoch_end(A, 3), epoch_end(A, 4))

    progress = controller.job(A).progress
    assert epochs(controller) == [1, 2, 3, 4]
    assert (progress.epoch, progress.samples_done, progress.held_reports) == (4, 4000, [])
    assert progress.checkpoint is not None
    assert (progress.checkpoint.epoch, progress.checkpoint.version) == (4, Version(1))


def test_a_job_that_goes_on_from_unheard_epochs_has_them_and_hears_of_them_later() -> None:
    controller = cut_off()
    starts_elsewhere(controller, resumed=4)
    assert controller.job(A).progress.epoch == 4
    controller.tell(N2, epoch_end(A, 5, 3))

    back(controller, epoch_end(A, 3), epoch_end(A, 4))

    progress = controller.job(A).progress
    assert epochs(controller) == [1, 2, 3, 4, 5]
    assert (progress.epoch, progress.samples_done, progress.missing_epochs) == (5, 5000, [])


def test_a_worker_that_goes_on_from_unheard_epochs_says_what_they_came_to() -> None:
    controller = cut_off()
    controller.place({A: ELSEWHERE})
    controller.tell(N2, started(A, 3))
    controller.tell(N2, ready(A, 3, resumed=4))

    controller.tell(N2, epoch_end(A, 3, 3, index=2, group=1))
    controller.tell(N2, epoch_end(A, 4, 3, index=3, group=1))
    controller.tell(N2, formed(A, 3, epoch=4, index=4))
    controller.tell(N2, epoch_end(A, 5, 3, index=5))

    progress = controller.job(A).progress
    assert epochs(controller) == [1, 2, 3, 4, 5]
    assert (progress.epoch, progress.samples_done, progress.missing_epochs) == (5, 5000, [])
    assert back(controller, epoch_end(A, 3), epoch_end(A, 4)) == []


def test_only_rank_0_says_what_a_job_goes_on_from_because_the_others_take_its_state() -> None:
    controller = running(cluster_of(n1=1, n2=2), epochs=2, slots=(1, 2))
    controller.lose(N1)
    there = {ELSEWHERE: 32, ELSEWHERE.replace("/0", "/1"): 32}
    controller.place({A: there})

    for rank, resumed in ((1, 4), (0, 3)):
        controller.tell(N2, started(A, 3, rank=rank, pid=100 + rank))
        controller.tell(N2, ready(A, 3, rank=rank, resumed=resumed))

    assert controller.job(A).progress.epoch == 3


def test_reports_that_come_while_a_job_starts_wait_for_what_it_goes_on_from() -> None:
    controller = cut_off()
    controller.place({A: ELSEWHERE})
    back(controller, epoch_end(A, 3), epoch_end(A, 4))
    assert epochs(controller) == [1, 2]

    controller.tell(N2, started(A, 3))
    controller.tell(N2, ready(A, 3, resumed=3))

    assert epochs(controller) == [1, 2, 3]
    assert controller.job(A).progress.held_reports == []


def test_epochs_of_a_group_that_trained_on_beside_its_successor_are_none_of_the_job() -> None:
    controller = cut_off()
    starts_elsewhere(controller, resumed=2)

    told = back(controller, epoch_end(A, 3), epoch_end(A, 4))
    controller.tell(N2, epoch_end(A, 3, 3))

    assert told == []
    (*_, third) = controller.history_of(A).epochs
    assert (epochs(controller), third.slots) == ([1, 2, 3], 1)


def test_a_job_without_a_group_takes_no_epoch_of_a_group_before_its_last() -> None:
    controller = cut_off()
    starts_elsewhere(controller, resumed=2)
    controller.tell(N2, epoch_end(A, 3, 3))
    controller.lose(N2)

    told = back(controller, epoch_end(A, 3), epoch_end(A, 4))

    assert (told, epochs(controller)) == ([], [1, 2, 3])


def test_survivors_that_report_first_leave_room_for_what_the_lost_member_finished() -> None:
    controller = recovered_in_place()

    controller.tell(N2, epoch_end(A, 4, 1, rank=1, group=2, index=5))
    assert (epochs(controller), controller.job(A).progress.missing_epochs) == ([1, 4], [2, 3])
    back(controller, epoch_end(A, 2, index=3), epoch_end(A, 3, index=4))

    assert (sorted(epochs(controller)), controller.job(A).progress.missing_epochs) == (
        [1, 2, 3, 4],
        [],
    )


def test_what_a_lost_member_finished_waits_for_what_the_survivors_report() -> None:
    controller = recovered_in_place()

    back(controller, *(epoch_end(A, epoch, index=epoch + 1) for epoch in (2, 3, 4)))
    assert epochs(controller) == [1]
    controller.tell(N2, epoch_end(A, 4, 1, rank=1, group=2, index=5))

    progress = controller.job(A).progress
    assert (epochs(controller), progress.held_reports, progress.missing_epochs) == (
        [1, 2, 3, 4],
        [],
        [],
    )


def test_a_survivor_that_finishes_without_an_epoch_of_its_own_leaves_no_gap() -> None:
    controller = recovered_in_place()
    back(controller, *(epoch_end(A, epoch, index=epoch + 1) for epoch in (2, 3)))
    assert epochs(controller) == [1]

    controller.tell(N2, finished(A, rank=1, index=5, reason="epochs reached"))
    controller.tell(N2, exited(A, rank=1, code=0))

    assert (controller.job(A).phase, epochs(controller)) == (Phase.SUCCEEDED, [1, 2, 3])


def test_a_late_epoch_is_counted_once() -> None:
    controller = cut_off()

    back(controller, epoch_end(A, 3), epoch_end(A, 3))

    assert epochs(controller) == [1, 2, 3]


def test_a_node_that_never_had_a_worker_of_the_job_reports_no_epoch_of_it() -> None:
    controller = cut_off()

    told = controller.tell(N2, epoch_end(A, 3))

    assert (told, epochs(controller)) == ([], [1, 2])


def test_a_cancelled_job_takes_no_late_epoch() -> None:
    controller = cut_off()
    controller.take(cancelled(A))

    assert back(controller, epoch_end(A, 3)) == []


def test_a_checkpoint_that_claims_an_absurd_epoch_costs_no_more_than_others() -> None:
    controller = cut_off()

    starts_elsewhere(controller, resumed=2**40)

    assert len(controller.job(A).progress.missing_epochs) == 1000
