"""Epochs whose reports come when their group is lost: none that the job goes on from is missing."""

from __future__ import annotations

from typing import Any, Final

from tests.support.builders import (
    N1,
    N2,
    S0,
    T0,
    T1,
    A,
    cancelled,
    epoch_end,
    exited,
    finished,
    formed,
    greeting,
    quiesced,
    ready,
    resume_at,
    started,
)
from tests.support.controller import Controller, cluster_of, running, training
from tests.unit.controlplane.core.steps import Story, lose, place, played, stories, told

BACK = greeting(N1)  # the node returns; its worker has gone
NOTHING = {"commands": []}
WHOLE = {"progress.epoch": 5, "progress.samples_done": 5000, "progress.missing_epochs": []}


def cut_off() -> Controller:
    """Job a trained two epochs on a node that is lost with what it reports meanwhile."""
    return told(running(cluster_of(n1=1, n2=1), epochs=2), lose(N1))


def late(*epochs: int, ahead: int = 2) -> list[Any]:
    """The first group's reports of its epochs."""
    return [(N1, epoch_end(A, epoch, index=ahead + epoch)) for epoch in epochs]


def starts_elsewhere(resumed: int) -> list[Any]:
    there = [started(A, 3), ready(A, 3, resumed=resumed), formed(A, 3, epoch=resumed)]
    return [place({A: T0}), *there]


def recovered_in_place() -> Controller:
    """Job a trained an epoch on two nodes; the first, rank 0's, is lost and the second goes on."""
    return told(
        training(cluster_of(n1=1, n2=1), S0, T0, epochs=1), lose(N1),
        quiesced(A, rank=1, group=2, index=3, port=29001), formed(A, rank=1, group=2, index=4, step=20),
    )  # fmt: skip


def in_order(controller: Controller) -> list[int]:
    return sorted(one.epoch for one in controller.history_of(A).epochs)


def slots_of_the_last(controller: Controller) -> int:
    return controller.history_of(A).epochs[-1].slots


def how_many_miss(controller: Controller) -> int:
    return len(controller.job(A).progress.missing_epochs)


SURVIVOR = epoch_end(A, 4, 1, rank=1, group=2, index=5)
LATE: Final[dict[str, Story]] = {
    "a job without a group is where its lost group came to": [
        cut_off, BACK, *late(3, 4),
        {
            "epochs": [1, 2, 3, 4], "progress.epoch": 4, "progress.samples_done": 4000, "progress.held_reports": [],
            "progress.checkpoint": resume_at(4, 1),
        },
    ],
    "a job that goes on from unheard epochs has them and hears of them later": [
        cut_off, *starts_elsewhere(4), {"progress.epoch": 4}, epoch_end(A, 5, 3), BACK, *late(3, 4),
        {"epochs": [1, 2, 3, 4, 5], **WHOLE},
    ],
    "a worker that goes on from unheard epochs says what they came to": [
        cut_off, place({A: T0}), started(A, 3), ready(A, 3, resumed=4), epoch_end(A, 3, 3, index=2, group=1),
        epoch_end(A, 4, 3, index=3, group=1), formed(A, 3, epoch=4, index=4), epoch_end(A, 5, 3, index=5),
        {"epochs": [1, 2, 3, 4, 5], **WHOLE}, BACK, late(3)[0], NOTHING, late(4)[0], NOTHING,
    ],
    "only rank 0 says what a job goes on from because the others take its state": [
        lambda: running(cluster_of(n1=1, n2=2), epochs=2, slots=(1, 2)), lose(N1), place({A: {T0: 32, T1: 32}}),
        started(A, 3, rank=1), ready(A, 3, rank=1, resumed=4), started(A, 3), ready(A, 3, resumed=3), {"progress.epoch": 3},
    ],
    "reports that come while a job starts wait for what it goes on from": [
        cut_off, place({A: T0}), BACK, *late(3, 4), {"epochs": [1, 2]}, started(A, 3), ready(A, 3, resumed=3),
        {"epochs": [1, 2, 3], "progress.held_reports": []},
    ],
    "epochs of a group that trained on beside its successor are none of the job": [
        cut_off, *starts_elsewhere(2), BACK, late(3)[0], NOTHING, late(4)[0], NOTHING, epoch_end(A, 3, 3),
        {"epochs": [1, 2, 3], slots_of_the_last: 1},
    ],
    "a job without a group takes no epoch of a group before its last": [
        cut_off, *starts_elsewhere(2), epoch_end(A, 3, 3), lose(N2), BACK, late(3)[0], NOTHING, late(4)[0], NOTHING,
        {"epochs": [1, 2, 3]},
    ],
    "survivors that report first leave room for what the lost member finished": [
        recovered_in_place, {"phase": "running", "group.version": 2},
        SURVIVOR, {"epochs": [1, 4], "progress.missing_epochs": [2, 3]},
        BACK, *late(2, 3, ahead=1), {in_order: [1, 2, 3, 4], "progress.missing_epochs": []},
    ],
    "what a lost member finished waits for what the survivors report": [
        recovered_in_place, BACK, *late(2, 3, 4, ahead=1), {"epochs": [1]}, SURVIVOR,
        {"epochs": [1, 2, 3, 4], "progress.held_reports": [], "progress.missing_epochs": []},
    ],
    "a survivor that finishes without an epoch of its own leaves no gap": [
        recovered_in_place, BACK, *late(2, 3, ahead=1), {"epochs": [1]},
        finished(A, rank=1, index=5, reason="epochs reached"), exited(A, rank=1, code=0),
        {"phase": "succeeded", "epochs": [1, 2, 3]},
    ],
    "a late epoch is counted once": [cut_off, BACK, *late(3), *late(3), {"epochs": [1, 2, 3]}],
    "a node that never had a worker of the job reports no epoch of it": [
        cut_off, (N2, epoch_end(A, 3)), NOTHING | {"epochs": [1, 2]},
    ],
    "a cancelled job takes no late epoch": [cut_off, cancelled(A), BACK, *late(3), NOTHING],
    "a checkpoint that claims an absurd epoch costs no more than others": [
        cut_off, *starts_elsewhere(2**40), {how_many_miss: 1000},
    ],
}  # fmt: skip


@stories(LATE)
def test_a_late_epoch_is_where_it_belongs(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected
