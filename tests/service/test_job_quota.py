"""One user has so many jobs that have not ended, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.service.api.changes import JobQuota
from controlplane.service.settings import Limits
from schemas.errors import DeniedError
from schemas.ids import JobId
from schemas.wire.client import SubmitJob
from tests.support.builders import SNAPSHOT, cancelled, job_spec
from tests.support.controller import cluster_of
from tests.support.service import LiveService

SPEC = job_spec("a")


@pytest.mark.parametrize(("limits", "args", "why", "setting"), [
    (Limits(live_jobs=2), (), "ann has 2 live jobs", "limits.live_jobs"),
    (Limits(live_bytes=2500), ("x" * 1000,), "the live jobs of ann exceed 2500 bytes", "limits.live_bytes"),
])  # fmt: skip
def test_a_user_at_the_job_limit_is_refused_and_another_user_is_not(
    limits: Limits, args: tuple[str, ...], why: str, setting: str
) -> None:
    controller, now, spec = cluster_of(n1=1), [0.0], job_spec("a", args=args)
    quota = JobQuota(lambda: controller.state, lambda: limits, lambda: now[0])
    for name in ("a", "b"):
        quota.take("ann", spec)
        controller.submit(name, user="ann", args=args)

    with pytest.raises(DeniedError, match=why) as refused:
        quota.take("ann", spec)
    quota.take("bob", spec)

    assert setting in refused.value.hint
    controller.take(cancelled(JobId("a-1"), user="ann"))
    now[0] = 1.0
    quota.take("ann", spec)


def test_jobs_are_counted_near_the_limit_and_at_most_every_second() -> None:
    looks, now = [0], [0.0]
    controller = cluster_of(n1=1)

    def state() -> object:
        looks[0] += 1
        return controller.state

    quota = JobQuota(state, lambda: Limits(live_jobs=100), lambda: now[0])  # type: ignore[arg-type]
    for _ in range(100):
        quota.take("ann", SPEC)
    assert looks == [1]

    for _ in range(50):
        with pytest.raises(DeniedError):
            quota.take("ann", SPEC)
    assert looks == [1]
    now[0] = 1.0
    quota.take("ann", SPEC)
    assert looks == [2]


async def test_a_repeated_submission_ignores_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(key: str) -> SubmitJob:
        return SubmitJob(spec=job_spec("a"), snapshot=SNAPSHOT, key=key)

    service = LiveService(tmp_path)
    service.server.limits = Limits(live_jobs=1)
    monkeypatch.setattr(service.server._changes.snapshots, "is_of", lambda *_: True)
    first = await service.ask(request("once"))
    with pytest.raises(DeniedError, match="ann has 1 live jobs"):
        await service.ask(request("twice"))

    assert await service.ask(request("once")) == first
    service.loop.close()
