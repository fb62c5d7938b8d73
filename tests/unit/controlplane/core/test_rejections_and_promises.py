"""A plan may end a job that never started, and says by when the others will be done."""

from __future__ import annotations

from typing import Final

import pytest

from controlplane.core.commands import RequestPlan
from controlplane.core.inputs import PlanProposed
from controlplane.core.model.job import PromisedEnd
from controlplane.core.model.job_phases import Phase
from controlplane.core.plan_check import Verdict, check, difference
from controlplane.core.policy_events import history
from controlplane.policy.api import JobEnded, Plan, Reason
from schemas.ids import JobId, Seconds
from schemas.jobs import Utility
from schemas.wire.client import Decision, PromiseInfo, Size
from tests.support.builders import (
    N1,
    S0,
    A,
    B,
    deltas,
    exited,
    formed,
    news,
    ready,
    resized,
    started,
)
from tests.support.controller import Controller, cluster_of, running

WHY: Final = Reason(
    "rejected", "its value is gone by 00:16:45; deadline_s >= 60 would do", {"deadline_s": 60.0}
)
WORTH: Final = Utility(value=2.0, deadline_s=5.0, decay=0.5)


def waiting() -> Controller:
    controller = cluster_of(n1=1)
    controller.submit("a", utility=WORTH)
    return controller


def plan(
    controller: Controller,
    *,
    rejected: dict[JobId, Reason] | None = None,
    promised: dict[JobId, float] | None = None,
    start: bool = False,
) -> Plan:
    return Plan(
        based_on=controller.state.version,
        local_batch={A: {S0: 64}} if start else {},
        rejected=rejected or {},
        promised={job: Seconds(end) for job, end in (promised or {}).items()},
    )


def verdict(controller: Controller, proposed: Plan) -> Verdict:
    return check(proposed, controller.state, Seconds(controller.now))


def take(controller: Controller, proposed: Plan) -> list[object]:
    return list(controller.take(PlanProposed(plan=proposed)))


# --- rejected


def test_a_job_that_never_started_is_rejected_and_its_user_told_why() -> None:
    controller = waiting()

    commands = take(controller, plan(controller, rejected={A: WHY}))

    assert commands == [
        news(
            "job.rejected", A, reason=WHY.text, exit_code=None, epoch=0, code="rejected",
            deadline_s=60.0,
        ),
        RequestPlan(),
    ]  # fmt: skip
    job = controller.job(A)
    assert (job.phase, job.reason, job.ended) == (Phase.REJECTED, WHY.text, True)
    assert controller.view().jobs == {}
    assert controller.history_of(A).decisions == [
        Decision(
            time=Seconds(controller.now), before=Size(), to=Size(), reason=f"rejected: {WHY.text}",
            code="rejected", numbers={"deadline_s": 60.0}, outcome="rejected",
        )
    ]  # fmt: skip


def test_a_rejected_job_is_nobodys_any_more() -> None:
    controller = waiting()
    take(controller, plan(controller, rejected={A: WHY}))

    assert controller.place({A: S0}) == []
    assert take(controller, plan(controller, rejected={A: WHY}, promised={A: 2000.0})) == []


def test_a_job_that_has_started_is_rejected_no_more() -> None:
    controller = running()
    proposed = plan(controller, rejected={A: WHY})

    assert verdict(controller, proposed) == Verdict(
        refused={A: "a job that has started cannot be rejected"}
    )
    assert take(controller, proposed) == [RequestPlan()]
    assert controller.job(A).phase is Phase.RUNNING


def test_a_job_that_was_promised_an_end_is_rejected_no_more() -> None:
    controller = waiting()
    take(controller, plan(controller, promised={A: 2000.0}))

    assert verdict(controller, plan(controller, rejected={A: WHY})) == Verdict(
        refused={A: "a job with a promised end cannot be rejected"}
    )


def test_a_job_that_an_operator_holds_is_not_rejected() -> None:
    controller = waiting()
    controller.take(resized(A, 0))

    assert verdict(controller, plan(controller, rejected={A: WHY})).empty


def test_a_job_that_is_rejected_is_not_started_by_the_same_plan() -> None:
    controller = waiting()

    commands = take(controller, plan(controller, rejected={A: WHY}, start=True))

    assert deltas(commands) == []  # type: ignore[arg-type]
    assert controller.job(A).phase is Phase.REJECTED


def test_others_get_what_the_plan_gives_them_beside_a_rejection() -> None:
    controller = waiting()
    controller.submit("b")
    proposed = plan(controller, rejected={B: WHY}, start=True)

    take(controller, proposed)

    phases = [controller.job(job).phase for job in (A, B)]
    assert phases == [Phase.STARTING, Phase.REJECTED]


# --- promised


def test_a_promise_is_announced_and_policies_see_it() -> None:
    controller = waiting()

    commands = take(controller, plan(controller, promised={A: 2000.0}))

    assert commands == [news("job.promised", A, end=2000.0, first=2000.0)]
    view = controller.view().jobs[A]
    assert (view.promised_at, view.expected_at, view.undecided) == (2000.0, 2000.0, False)
    assert view.utility == WORTH


def test_the_first_promise_counts_and_what_is_said_later_is_its_history() -> None:
    controller = waiting()
    take(controller, plan(controller, promised={A: 2000.0}))
    controller.now += 10.0

    commands = take(controller, plan(controller, promised={A: 2300.0}))

    assert commands == [news("job.promised", A, end=2300.0, first=2000.0)]
    assert controller.job(A).promised_end == PromisedEnd(
        first=Seconds(2000.0), latest=Seconds(2300.0)
    )
    assert controller.history_of(A).promises == [
        PromiseInfo(time=Seconds(1000.0), end=Seconds(2000.0)),
        PromiseInfo(time=Seconds(1010.0), end=Seconds(2300.0)),
    ]


def test_a_promise_and_the_start_that_it_is_about_come_with_one_plan() -> None:
    controller = waiting()

    commands = take(controller, plan(controller, promised={A: 2000.0}, start=True))

    assert commands[0] == news("job.promised", A, end=2000.0, first=2000.0)
    assert controller.job(A).phase is Phase.STARTING


@pytest.mark.parametrize("end", [2000.0, float("nan"), float("inf")])
def test_what_is_no_news_is_not_announced(end: float) -> None:
    controller = waiting()
    take(controller, plan(controller, promised={A: 2000.0}))

    assert take(controller, plan(controller, promised={A: end, B: 1.0})) == []


def test_nobody_promises_anything_to_a_job_that_has_ended() -> None:
    controller = running()
    controller.tell(N1, exited(A, code=0))

    assert take(controller, plan(controller, promised={A: 2000.0})) == []


# --- before and after


def test_the_difference_keeps_rejections_and_promises_that_are_news() -> None:
    controller = waiting()
    controller.submit("b")
    take(controller, plan(controller, promised={A: 2000.0}))
    whole = plan(controller, rejected={B: WHY}, promised={A: 2000.0, B: 1.0})

    changes = difference(whole, controller.state, Seconds(controller.now))

    assert changes == plan(controller, rejected={B: WHY})
    assert not changes.empty
    controller.take(PlanProposed(plan=changes))
    assert difference(whole, controller.state, Seconds(controller.now)).empty


def test_replay_brings_rejections_and_promises_back() -> None:
    controller = waiting()
    controller.submit("b")
    take(controller, plan(controller, rejected={B: WHY}, promised={A: 2000.0}, start=True))
    take(controller, plan(controller, promised={A: 2100.0}))

    again = controller.replayed()

    assert again == controller.state
    assert again.jobs[A].promised_end == PromisedEnd(first=Seconds(2000.0), latest=Seconds(2100.0))
    assert controller.job(B).phase is Phase.REJECTED


def test_a_job_that_was_rejected_teaches_that_it_did_nothing() -> None:
    controller = waiting()
    take(controller, plan(controller, rejected={A: WHY}))

    learnt = history(controller.state.jobs.values(), controller.histories)

    ended = JobEnded(job=A, family=controller.job(A).family, samples_done=0, succeeded=False)
    assert learnt == [(controller.now, ended)]


def test_a_job_is_undecided_until_it_is_promised_an_end_or_starts() -> None:
    controller = waiting()
    assert controller.view().jobs[A].undecided

    controller.place({A: S0})
    assert not controller.view().jobs[A].undecided
    for event in (started(A), ready(A), formed(A)):
        controller.tell(N1, event)
    controller.tell(N1, exited(A, signal=9))

    assert (controller.job(A).phase, controller.view().jobs[A].undecided) == (Phase.PAUSED, False)
