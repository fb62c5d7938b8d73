"""One user has so many queued jobs, submits so often, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.core.inputs import SharingChanged
from controlplane.service.api.changes import JobQuota
from controlplane.service.settings import Limits
from schemas.errors import DeniedError
from schemas.ids import JobId
from schemas.jobs import JobSpec
from schemas.sharing import Sharing, UserLimits
from schemas.wire.client import SubmitJob
from tests.support.builders import SNAPSHOT, cancelled, job_spec
from tests.support.controller import Controller, cluster_of
from tests.support.service import LiveService

SPEC = job_spec("a")


def limited(**limits: int | None) -> Controller:
    controller = cluster_of(n1=1)
    controller.take(SharingChanged(sharing=Sharing(user_limits=UserLimits(**limits))))
    return controller


def quota_of(
    controller: Controller, limits: Limits | None = None, now: list[float] | None = None
) -> JobQuota:
    times = now or [0.0]
    return JobQuota(lambda: controller.state, lambda: limits or Limits(), lambda: times[0])


def test_a_user_with_as_many_queued_jobs_as_the_limit_is_refused_and_another_user_is_not() -> None:
    controller = limited(queued=2)
    quota = quota_of(controller)
    for name in ("a", "b"):
        quota.take("ann", SPEC)
        controller.submit(name, user="ann")

    with pytest.raises(DeniedError) as refused:
        quota.take("ann", SPEC)
    quota.take("bob", SPEC)

    assert refused.value.message == "ann has 2 queued jobs and may have 2; this adds 1"
    remedy = "wait until some start, cancel some, or have sharing.user_limits.queued raised"
    assert refused.value.hint == remedy
    controller.take(cancelled(JobId("a-1"), user="ann"))
    quota.take("ann", SPEC)


@pytest.mark.parametrize(("indices", "fits"), [("0-2", True), ("0-3", False)])
def test_each_index_of_an_array_is_a_queued_job(indices: str, *, fits: bool) -> None:
    controller = limited(queued=7)
    controller.submit("old", user="ann", array="0-3")  # two of its elements are jobs already
    spec = job_spec("a", array=indices)

    assert controller.state.queued_jobs("ann") == 4
    if fits:
        quota_of(controller).take("ann", spec)
    else:
        with pytest.raises(DeniedError, match="ann has 4 queued jobs and may have 7; this adds 4"):
            quota_of(controller).take("ann", spec)


def test_job_files_of_live_jobs_have_a_bounded_size() -> None:
    controller, spec = cluster_of(n1=1), job_spec("a", args=("x" * 1000,))
    quota = quota_of(controller, Limits(live_bytes=2500))
    for name in ("a", "b"):
        quota.take("ann", spec)
        controller.submit(name, user="ann", args=("x" * 1000,))

    with pytest.raises(DeniedError, match="the live jobs of ann exceed 2500 bytes") as refused:
        quota.take("ann", job_spec("a", args=("x" * 1000,)))

    assert "limits.live_bytes" in refused.value.hint


def test_a_user_submits_a_few_times_in_a_minute() -> None:
    now = [0.0]
    quota = quota_of(limited(submissions_per_minute=2), now=now)
    quota.take("ann", SPEC)
    quota.take("ann", SPEC)

    with pytest.raises(DeniedError) as refused:
        quota.take("ann", SPEC)
    quota.take("bob", SPEC)

    text = "ann has submitted 2 times in a minute, as often as one user may"
    assert refused.value.message == text
    assert refused.value.hint == "try again in 30 s, or submit an array"
    now[0] = 30.0
    quota.take("ann", SPEC)


async def test_a_repeated_submission_ignores_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(key: str, spec: JobSpec = SPEC) -> SubmitJob:
        return SubmitJob(spec=spec, snapshot=SNAPSHOT, key=key)

    service = LiveService(tmp_path)
    service.loop.handle(SharingChanged(sharing=Sharing(user_limits=UserLimits(queued=1))))
    monkeypatch.setattr(service.server._changes.snapshots, "is_of", lambda *_: True)
    first = await service.ask(request("once"))
    with pytest.raises(DeniedError, match="ann has 1 queued jobs"):
        await service.ask(request("twice"))

    assert await service.ask(request("once")) == first
    service.loop.close()
