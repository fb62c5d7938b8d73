"""A job ends once it had slots for as long as its `max_run_s` allows."""

from __future__ import annotations

from typing import Final

from controlplane.core.inputs import RunExpired
from controlplane.journal.snapshots import image_of, reactor_from
from tests.support.builders import N1, S0, A, paused, stop
from tests.support.controller import Controller, cluster_of, running
from tests.unit.controlplane.core.steps import Story, place, played, stories, submit, to

LIMIT_S = 100.0
DUE = RunExpired(job=A)


def limited() -> Controller:
    return running(cluster_of(n1=1), max_run_s=LIMIT_S)


def due_after_a_restart(controller: Controller) -> bool:
    return DUE in reactor_from(image_of(controller.reactor)).due(controller.now)  # type: ignore[arg-type]


STORIES: Final[dict[str, Story]] = {
    "a job is stopped with its reason when its time is used up": [
        limited, LIMIT_S - 1.0, {"due": []}, 1.0, {"due": [DUE]}, DUE,
        {
            "orders": to(stop(A, 2, forget=True), N1), "phase": "failed", "reason": "stopped after 100 s, its max_run_s",
            "due": [],
        },
    ],
    "the time that is left survives a restart and waiting costs none": [
        lambda: cluster_of(n1=1), submit(max_run_s=LIMIT_S), 10 * LIMIT_S, {"due": []}, place({A: S0}), LIMIT_S,
        {due_after_a_restart: True},
    ],
    "a job that was paused meanwhile is not stopped": [limited, paused(A), 0.5 * LIMIT_S, DUE, {"ended": False}],
}  # fmt: skip


@stories(STORIES)
def test_a_job_has_slots_no_longer_than_it_may(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected
