"""A journal that lost inputs: numbers and versions are not reused, and other jobs are left alone."""

from __future__ import annotations

from typing import Any, Final

from controlplane.core.inputs import ControllerStarted
from schemas.ids import JobId, Term
from tests.support.builders import N1, S0, S1, A, epoch_end, exited, formed, greeting, ready, seen
from tests.support.controller import Controller, cluster_of, running, starting
from tests.unit.controlplane.core.steps import (
    Happens,
    Story,
    do,
    place,
    played,
    stories,
    submit,
    told,
)

LOST, KEPT = "1111111111111111", "2222222222222222"  # ids of journals
BEHIND = "the journal is older than node n1, and lacks {}"


def restore(**fields: int) -> Happens:
    """The next controller has a restored journal."""
    return lambda controller: controller.take(
        ControllerStarted(
            term=Term(controller.state.term + 1), release="0", journal=KEPT, restored=True, **fields
        )
    )


def restored() -> Controller:
    return told(cluster_of(), restore())


def outdated(controller: Controller) -> str:
    return controller.state.outdated


def foreign(controller: Controller) -> dict[Any, Any]:
    return controller.state.nodes[N1].foreign_workers


def late_version(controller: Controller) -> bool:
    """Whether the present version is one that no lost input can have used."""
    return controller.job(A).version > 1000


def greets(*jobs: str, **fields: Any) -> Any:
    return greeting(N1, jobs=tuple(JobId(job) for job in jobs), **fields)


ANOTHER = greeting(N1, seen(A, journal=LOST), slots=2)  # of another job with the same name
RESTORED: Final[dict[str, Story]] = {
    "numbers of jobs continue after those that were lost": [
        lambda: cluster_of(n1=1), restore(jobs=57), submit(), {"active": ["a-58"]},
    ],
    "numbers that a node names are not given again": [
        restored, greeting(N1, seen(JobId("x-12"), journal=LOST), jobs=(JobId("y-30"),)), submit(),
        {"active": ["a-31"], outdated: ""},  # the admin knows
    ],
    "a number out of all bounds or none at all is bounded": [
        restored, greets("y-" + "9" * 5000, "no number", "z-999999999999"), submit(), {"active": ["a-1000001"]},
    ],
    "versions that may have been lost are not used again": [
        running, restore(), greeting(N1), {"phase": "paused"},  # its process is gone
        place({A: S0}), {late_version: True, "phase": "starting"},
    ],
    "a worker of another job with the same name is left alone": [
        restored, submit(), ANOTHER, {"orders": [], foreign: {S0: "a-1.v1.r0"}, "phase": "queued"},
    ],
    "its reports are not those of the new job": [
        restored, submit(), ANOTHER, place({A: S1}), (N1, epoch_end(A, 1, journal=LOST)),
        (N1, exited(A, code=0, journal=LOST)), {foreign: {}, "phase": "starting", "progress.epoch": 0},
        {"workers": {(1, 0): "ordered"}, "attempts.losses": 0},
    ],
    "a worker of a lost group keeps its slot until it exits": [
        lambda: running(cluster_of(n1=2)), restore(), greeting(N1, seen(A), seen(A, 5, rank=0, slot=1), slots=2),
        {
            "phase": "paused",
            "reason": "a later change of its group was lost with the journal; restarts from the beginning",
            foreign: {S1: "a-1.v5.r0"},
        },
        (N1, exited(A, 5, signal=15)), {foreign: {}},
    ],
    "a starting job continues once its reports come again": [
        starting, restore(), greeting(N1, seen(A)), ready(A), formed(A), {"phase": "running"},
    ],
    "a node that knows more than the journal stops new jobs": [
        lambda: cluster_of(n1=1), do("start"), greeting(N1, events_dropped=7), {outdated: BEHIND.format("its events 1 to 7")},
        do("start"), greeting(N1, events_dropped=7), {outdated: BEHIND.format("its events 1 to 7")},  # until an admin decides
        restore(), {outdated: ""},
    ],
    "a node that has seen a later term stops new jobs": [
        cluster_of, greeting(N1, term=Term(9)), {outdated: BEHIND.format("term 9")},
    ],
    "a folder that only looks like a job's stops no new jobs": [
        cluster_of, greeting(N1, highest_job=2024), submit(), {outdated: "", "active": ["a-2025"]},
    ],
}  # fmt: skip


@stories(RESTORED)
def test_a_restored_journal_reuses_nothing(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected
