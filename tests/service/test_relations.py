"""Requests about what keeps a job from starting, and jobs that are submitted again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from controlplane.client.archive import digest_of, pack
from schemas.errors import BadFieldError, DeniedError
from schemas.ids import JobId
from schemas.relations import ArrayElement
from schemas.transport.keys import Identity
from schemas.wire.client import (
    CancelJob,
    ExplainJob,
    GetJob,
    HoldJob,
    ListJobs,
    PutSnapshot,
    ReleaseJob,
    RerunJob,
    ResizeJob,
    SubmitJob,
    WaitJob,
)
from tests.support import builders
from tests.support.builders import N1, A, job_spec
from tests.support.file_trees import PROJECT, tree
from tests.support.service import LiveService

ADMIN: Final = Identity("admin", "root")
MATE: Final = Identity("user", "bob", ("ann",))
SECRET: Final = {"TOKEN": "hunter2"}


@pytest.fixture
async def service(tmp_path: Path) -> Any:
    """Ann's job a-1, with a stored working directory and a secret."""
    made = LiveService(tmp_path)
    made.take(builders.greeting(N1))
    await submit(made, tmp_path, env=SECRET, not_before="+1h")
    yield made
    made.loop.close()


async def submit(service: LiveService, folder: Path, name: str = "a", **spec: Any) -> Any:
    archive = pack(tree(folder / "workdir", PROJECT))
    digest = digest_of(archive)
    await service.ask(PutSnapshot(digest=digest, offset=0, data=archive, total=len(archive)))
    return await service.ask(SubmitJob(spec=job_spec(name, **spec), snapshot=digest))


async def test_a_hold_and_an_earliest_start_are_the_reasons_of_a_job(service: LiveService) -> None:
    early = (await service.ask(ExplainJob(job=A))).decisions[-1]
    assert early.code == "not_before"
    assert early.reason.startswith("starts at 20")
    assert early.reason.endswith("Z or later (not_before)")

    held = await service.ask(HoldJob(job=A), ADMIN)

    assert (held.summary.state, held.summary.reason) == ("queued", "held by root")
    last = (await service.ask(ExplainJob(job=A))).decisions[-1]
    assert (last.code, last.reason, last.outcome) == ("held", "held by root", "waits")
    freed = await service.ask(ReleaseJob(job=A))
    assert freed.summary.reason == early.reason


async def test_an_ended_job_cannot_be_held(service: LiveService) -> None:
    await service.ask(CancelJob(job=A))

    with pytest.raises(BadFieldError, match="a-1 has cancelled") as refused:
        await service.ask(HoldJob(job=A))

    assert refused.value.hint == "`ones rerun a-1`"


async def test_a_job_is_submitted_again_also_after_it_has_left(service: LiveService) -> None:
    before = await service.ask(GetJob(job=A))
    await service.ask(CancelJob(job=A))
    service.take(builders.greeting(N1))  # a-1 leaves the state
    await service.loop.caught_up()
    assert A not in service.loop.reactor.state.jobs

    replies = [await service.ask(RerunJob(job=A, key="k")) for _ in range(2)]

    assert [one.job for one in replies] == ["a-2", "a-2"]
    again = await service.ask(GetJob(job=replies[0].job))
    assert (again.snapshot, again.spec.env, again.spec.script) == (
        before.snapshot, SECRET, "train.py",
    )  # fmt: skip
    assert service.loop.reactor.state.jobs[again.summary.job].starts_at == 0.0


@pytest.mark.parametrize("who", [ADMIN, MATE], ids=["admin", "mate"])
async def test_only_the_owner_reruns_a_job(service: LiveService, who: Identity) -> None:
    with pytest.raises(DeniedError, match="you may not rerun a-1: it belongs to ann"):
        await service.ask(RerunJob(job=A), who)


async def test_a_job_without_its_working_directory_is_not_submitted_again(
    service: LiveService, tmp_path: Path
) -> None:
    (tmp_path / "snapshots" / service.loop.job(A).snapshot).unlink()

    with pytest.raises(BadFieldError, match="the working directory of a-1 is no longer stored"):
        await service.ask(RerunJob(job=A))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tomorrow", "not_before: 'tomorrow' is not a time"),
        ("2026-12-01T08:00", "not_before: '2026-12-01T08:00' has no time zone"),
        ("+2w", "not_before: '[+]2w' is not a time"),
        ("+99999999h", "is not a time"),
        ("", "not_before: '' is not a time"),
    ],
)
async def test_a_time_that_cannot_be_read_is_refused(
    service: LiveService, tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(BadFieldError, match=problem) as refused:
        await submit(service, tmp_path, "b", not_before=text)

    assert refused.value.field == "not_before"


async def test_the_end_of_a_parent_is_known_when_it_has_left(
    service: LiveService, tmp_path: Path
) -> None:
    await service.ask(CancelJob(job=A))
    service.take(builders.greeting(N1))
    await service.loop.caught_up()

    met = await submit(service, tmp_path, "b", after=("any:a-1",))
    missed = await submit(service, tmp_path, "c", after=("a-1",))

    assert (met.state, met.notes) == ("queued", ())
    reason = "waited for a-1 to succeed, which was cancelled"
    assert (missed.state, missed.notes) == ("cancelled", (reason,))


async def test_a_parent_that_ends_before_its_end_is_durable_is_waited_for(
    service: LiveService, tmp_path: Path
) -> None:
    service.take(builders.cancelled(A))
    service.take(builders.greeting(N1))  # a-1 has left the newest state, and is durable as queued
    assert A not in service.loop.reactor.state.jobs

    accepted = await submit(service, tmp_path, "b", after=("failed:a-1",))

    assert accepted.state == "queued"


@pytest.mark.parametrize("parent", ["x-9", "x", "a-99", "b-2"])
async def test_an_unknown_or_invisible_parent_is_refused_by_name(
    service: LiveService, tmp_path: Path, parent: str
) -> None:
    service.take(builders.submission("b", user="eve"))
    await service.loop.caught_up()

    with pytest.raises(BadFieldError, match=f"after: no job '{parent}'") as refused:
        await submit(service, tmp_path, "c", after=(f"any:{parent}",))

    assert refused.value.field == "after"


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        (("done:a-1",), "after: 'done:a-1' names no job"),
        (("ok:",), "after: 'ok:' names no job"),
        (("ok:a-1\n",), "names no job"),
        (("a-1", "any:a-1"), "after: a-1 is named twice"),
        (tuple(f"a-{n}" for n in range(101)), "after: 101 jobs, at most 100"),
    ],
)
async def test_an_entry_that_cannot_be_read_is_refused(
    service: LiveService, tmp_path: Path, after: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(BadFieldError, match=problem):
        await submit(service, tmp_path, "c", after=after)


async def test_an_array_is_shown_waited_for_and_cancelled_as_one_job(
    service: LiveService, tmp_path: Path
) -> None:
    accepted = await submit(service, tmp_path, "b", array="5-14%3")
    assert (accepted.job, accepted.state) == ("b-2", "running")
    rows = {row.job: row for row in (await service.ask(ListJobs(states=("running",)))).jobs}
    assert [*rows] == ["b-2"]
    assert rows["b-2"].reason == "0 of 10 elements have ended, 2 are live"
    elements = (await service.ask(ListJobs(name="b_*"))).jobs
    assert [row.job for row in elements] == ["b_5-3", "b_6-4"]

    await service.ask(CancelJob(job=accepted.job))

    ended = await service.ask(WaitJob(job=accepted.job))
    assert (ended.state, ended.reason) == ("cancelled", "cancelled by ann")
    assert {row.state for row in (await service.ask(ListJobs(name="b_*", ended=True))).jobs} == {
        "cancelled"
    }
    again = await service.ask(RerunJob(job=accepted.job))
    assert (await service.ask(GetJob(job=again.job))).spec.array == "5-14%3"


async def test_an_array_cannot_be_resized(service: LiveService, tmp_path: Path) -> None:
    accepted = await submit(service, tmp_path, "b", array="0-9")

    with pytest.raises(BadFieldError, match="b-2 is an array and has no slots"):
        await service.ask(ResizeJob(job=accepted.job, slots=1))


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        ("0-999999", "array: 1000000 elements, at most 10000"),
        ("0-10000", "array: 10001 elements"),
        ("0-9999999999999", "is not a range"),
        ("9-0", "array: '9-0' is not a range"),
        ("1,2", "is not a range"),
        ("0-9%0", "is not a range"),
        ("", "is not a range"),
    ],
)
async def test_an_array_that_is_too_large_or_no_range_is_refused(
    service: LiveService, tmp_path: Path, array: str, problem: str
) -> None:
    with pytest.raises(BadFieldError, match=problem) as refused:
        await submit(service, tmp_path, "b", array=array)

    assert refused.value.field == "array"


async def test_only_the_cluster_makes_elements(service: LiveService, tmp_path: Path) -> None:
    with pytest.raises(BadFieldError, match="element: is written by the cluster"):
        await submit(service, tmp_path, "b", element=ArrayElement(array=A, index=3))
    with pytest.raises(BadFieldError, match="an array's name has 39 characters, at most 38"):
        await submit(service, tmp_path, "b" * 39, array="0-9")


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ({"team": "a\x1b[31m"}, "the value of team is too long or has control characters"),
        ({"team": "a\n"}, "control characters"),
        ({"team": "a" * 101}, "too long"),
        ({"": "a"}, "labels: '' is not a name"),
        ({"a b": "c"}, "labels: 'a b' is not a name"),
        ({f"k{n}": "" for n in range(33)}, "labels: 33 labels, at most 32"),
    ],
)
async def test_an_invalid_label_is_refused(
    service: LiveService, tmp_path: Path, labels: dict[str, str], problem: str
) -> None:
    with pytest.raises(BadFieldError, match=problem) as refused:
        await submit(service, tmp_path, "b", labels=labels)

    assert refused.value.field == "labels"


async def test_the_history_has_labels_exit_codes_and_slot_time(
    service: LiveService, tmp_path: Path
) -> None:
    await submit(service, tmp_path, "b", labels={"team": "vision"})
    for job in ("a-1", "b-2"):
        await service.ask(CancelJob(job=JobId(job)))

    asked = ListJobs(states=("cancelled",), labels={"team": "vision"}, newest_first=True, limit=9)
    (row,) = (await service.ask(asked)).jobs

    assert (row.job, row.labels, row.exit_code, row.slot_s) == (
        "b-2",
        {"team": "vision"},
        None,
        0.0,
    )
