"""A plan may end a job that never started, and says by when the others will be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from controlplane.core.commands import RequestPlan
from controlplane.core.inputs import PlanProposed
from controlplane.core.model.job import PromisedEnd
from controlplane.core.plan_check import check, difference
from controlplane.core.policy_events import history
from controlplane.policy.api import JobEnded, Plan, Reason
from schemas.ids import JobId, Seconds
from schemas.jobs import Utility
from schemas.wire.client import Decision, PromiseInfo, Size
from tests.support.builders import (
    S0,
    A,
    B,
    exited,
    formed,
    news,
    ready,
    resized,
    started,
)
from tests.support.controller import Controller, cluster_of, running
from tests.unit.controlplane.core.steps import (
    Happens,
    Story,
    place,
    played,
    replays,
    stories,
    submit,
    told,
)

WHY: Final = Reason(
    "rejected", "its value is gone by 00:16:45; deadline_s >= 60 would do", {"deadline_s": 60.0}
)
WORTH: Final = Utility(value=2.0, deadline_s=5.0, decay=0.5)


GONE: Final = {"rejected": {A: WHY}}
START: Final = {"local_batch": {A: {S0: 64}}}
NOTHING: Final = {"commands": []}


def promises(end: float, job: JobId = A) -> dict[str, Any]:
    return {"promised": {job: Seconds(end)}}


def waiting() -> Controller:
    return told(cluster_of(n1=1), submit(utility=WORTH))


def two() -> Controller:
    return told(waiting(), submit("b"))


def plan(controller: Controller, **fields: Any) -> Plan:
    return Plan(based_on=controller.state.version, **fields)


def proposes(**fields: Any) -> Happens:
    return lambda controller: controller.take(PlanProposed(plan=plan(controller, **fields)))


def refuses(**fields: Any) -> Callable[[Controller], object]:
    """What a check of the plan refuses."""

    def refused(controller: Controller) -> object:
        proposed = plan(controller, **fields)
        verdict = check(proposed, controller.state, Seconds(controller.now))
        return verdict.refused if verdict.empty else verdict

    return refused


def promised_view(controller: Controller) -> object:
    view = controller.view().jobs[A]
    return view.promised_at, view.expected_at, view.undecided, view.utility


def undecided(controller: Controller) -> bool:
    return controller.view().jobs[A].undecided


def decisions(controller: Controller) -> list[Decision]:
    return controller.history_of(A).decisions


def said_promises(controller: Controller) -> list[PromiseInfo]:
    return controller.history_of(A).promises


STORIES: Final[dict[str, Story]] = {
    "a job that never started is rejected and its user told why": [
        waiting, proposes(**GONE),
        {
            "commands": [
                news("job.rejected", A, reason=WHY.text, exit_code=None, epoch=0, code="rejected", deadline_s=60.0),
                RequestPlan(),
            ],
            "phase": "rejected", "reason": WHY.text, "ended": True, "seen": [],
            decisions: [
                Decision(
                    time=Seconds(1000.0), before=Size(), to=Size(), reason=f"rejected: {WHY.text}", code="rejected",
                    numbers={"deadline_s": 60.0}, outcome="rejected",
                )
            ],
        },
    ],
    "a rejected job is nobody's any more": [
        waiting, proposes(**GONE), place({A: S0}), NOTHING, proposes(**GONE, **promises(2000.0)), NOTHING,
    ],
    "a job that has started is rejected no more": [
        running, {refuses(**GONE): {A: "a job that has started cannot be rejected"}}, proposes(**GONE),
        {"commands": [RequestPlan()], "phase": "running"},
    ],
    "a job that was promised an end is rejected no more": [
        waiting, proposes(**promises(2000.0)), {refuses(**GONE): {A: "a job with a promised end cannot be rejected"}},
    ],
    "a job that an operator holds is not rejected": [
        waiting, resized(A, 0), {refuses(**GONE): {}}, proposes(**GONE), {"phase": "queued"},
    ],
    "a job that is rejected is not started by the same plan": [
        waiting, proposes(**GONE, **START), {"orders": [], "phase": "rejected"},
    ],
    "others get what the plan gives them beside a rejection": [
        two, proposes(rejected={B: WHY}, **START), {"phases": {A: "starting", B: "rejected"}},
    ],
    "a promise is announced and policies see it": [
        waiting, proposes(**promises(2000.0)),
        {"commands": [news("job.promised", A, end=2000.0, first=2000.0)], promised_view: (2000.0, 2000.0, False, WORTH)},
    ],
    "the first promise counts and what is said later is its history": [
        waiting, proposes(**promises(2000.0)), 10.0, proposes(**promises(2300.0)),
        {
            "commands": [news("job.promised", A, end=2300.0, first=2000.0)],
            "promised_end": PromisedEnd(first=Seconds(2000.0), latest=Seconds(2300.0)),
            said_promises: [
                PromiseInfo(time=Seconds(1000.0), end=Seconds(2000.0)), PromiseInfo(time=Seconds(1010.0), end=Seconds(2300.0)),
            ],
        },
    ],
    "a promise and the start that it is about come with one plan": [
        waiting, proposes(**promises(2000.0), **START),
        {"first": news("job.promised", A, end=2000.0, first=2000.0), "phase": "starting"},
    ],
    **{
        f"what is no news is not announced: {end}": [
            waiting, proposes(**promises(2000.0)),
            proposes(promised={A: Seconds(end), B: Seconds(1.0)}), NOTHING,
        ]
        for end in (2000.0, float("nan"), float("inf"))
    },
    "nobody promises anything to a job that has ended": [
        running, exited(A, code=0), proposes(**promises(2000.0)), NOTHING,
    ],
    "replay brings rejections and promises back": [
        two, proposes(rejected={B: WHY}, **promises(2000.0), **START), proposes(**promises(2100.0)),
        {"promised_end": PromisedEnd(first=Seconds(2000.0), latest=Seconds(2100.0)), replays: True},
    ],
    "a job is undecided until it is promised an end or starts": [
        waiting, {undecided: True}, place({A: S0}), {undecided: False}, started(A), ready(A), formed(A),
        exited(A, signal=9), {"phase": "paused", undecided: False},
    ],
}  # fmt: skip


@stories(STORIES)
def test_a_plan_rejects_and_promises(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected


def test_the_difference_keeps_rejections_and_promises_that_are_news() -> None:
    controller = told(two(), proposes(**promises(2000.0)))
    ends = {A: Seconds(2000.0), B: Seconds(1.0)}
    whole = plan(controller, rejected={B: WHY}, promised=ends)

    changes = difference(whole, controller.state, Seconds(controller.now))

    assert changes == plan(controller, rejected={B: WHY})
    assert not changes.empty
    controller.take(PlanProposed(plan=changes))
    assert difference(whole, controller.state, Seconds(controller.now)).empty


def test_a_job_that_was_rejected_teaches_that_it_did_nothing() -> None:
    controller = told(waiting(), proposes(**GONE))

    learnt = history(controller.state.jobs.values(), controller.histories)

    ended = JobEnded(job=A, family=controller.job(A).family, samples_done=0, succeeded=False)
    assert learnt == [(controller.now, ended)]
