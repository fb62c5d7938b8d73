"""What one user is told of another's jobs: nothing, over any request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from controlplane.client.archive import digest_of, pack
from controlplane.service.api.views import HIDDEN, OTHER_JOB, hide_names, hide_users
from schemas.errors import BadFieldError, DeniedError, UnknownJobError
from schemas.ids import JobId
from schemas.sharing import Project, Sharing
from schemas.transport.keys import Identity
from schemas.wire import client
from schemas.wire.client import (
    CancelJob,
    ExplainJob,
    GetJob,
    JobAccepted,
    ListJobs,
    ListNodes,
    PutSnapshot,
    ReadEvents,
    SubmitJob,
    WaitJob,
)
from tests.support import builders
from tests.support.builders import N1, S0, A, B, job_spec
from tests.support.file_trees import PROJECT, tree
from tests.support.service import ANN, LiveService

BOB: Final = Identity("user", "bob")
MATE: Final = Identity("user", "bob", ("ann",))
ADMIN: Final = Identity("admin", "root")
OPERATOR: Final = Identity("operator", "olga")
VIEWER_OF_ALL: Final = Identity("viewer", "wall")
SECRET: Final = {"TOKEN": "hunter2", "MODE": "fast"}


@pytest.fixture
async def service(tmp_path: Path) -> Any:
    """Ann's job a-1 with a secret, and bob's b-2, which waits."""
    made = LiveService(tmp_path)
    made.take(builders.greeting(N1))
    made.take(builders.submission("a", env=SECRET, args=("--key", "hunter3"), user="ann"))
    made.take(builders.submission("b", user="bob"))
    made.place({A: S0})
    await made.loop.caught_up()
    yield made
    made.loop.close()


async def test_lists_contain_only_visible_jobs(service: LiveService) -> None:
    def names(reply: Any) -> list[str]:
        return [row.job for row in reply.jobs]

    for who, expected in ((ANN, [A]), (BOB, [B]), (MATE, [A, B]), (OPERATOR, [A, B])):
        assert names(await service.ask(ListJobs(ended=True), who)) == expected


@pytest.mark.parametrize(
    "request_",
    [GetJob(job=A), WaitJob(job=A, wait_s=30.0), ExplainJob(job=A), CancelJob(job=A)],
    ids=lambda request: type(request).__name__,
)
async def test_a_foreign_job_is_unknown_at_once(service: LiveService, request_: Any) -> None:
    with pytest.raises(UnknownJobError, match="no job 'a-1'"):
        await service.ask(request_, BOB)

    assert not service.loop.reactor.state.jobs[A].ended


@pytest.mark.parametrize(("who", "env", "args"), [
    (ANN, SECRET, ("--key", "hunter3")),
    (MATE, dict.fromkeys(SECRET, HIDDEN), ("--key", "hunter3")),
    (ADMIN, dict.fromkeys(SECRET, HIDDEN), ("--key", "hunter3")),
    (OPERATOR, dict.fromkeys(SECRET, HIDDEN), (HIDDEN, HIDDEN)),
    (VIEWER_OF_ALL, dict.fromkeys(SECRET, HIDDEN), (HIDDEN, HIDDEN)),
], ids=["owner", "project", "admin", "operator", "viewer of all"])  # fmt: skip
async def test_only_the_owner_reads_values_of_the_environment(
    service: LiveService, who: Identity, env: dict[str, str], args: tuple[str, ...]
) -> None:
    detail = await service.ask(GetJob(job=A), who)

    assert (detail.spec.env, detail.spec.args) == (env, args)
    if who is not ANN:
        assert b"hunter2" not in msgspec.msgpack.encode(detail)


async def test_slots_of_invisible_jobs_only_count_as_taken(service: LiveService) -> None:
    (seen,) = (await service.ask(ListNodes(), ANN)).nodes
    (cut,) = (await service.ask(ListNodes(), BOB)).nodes

    assert (seen.jobs, cut.jobs) == ((A,), ())
    assert cut == msgspec.structs.replace(seen, jobs=())


async def test_events_of_invisible_jobs_are_skipped(service: LiveService) -> None:
    whole = (await service.ask(ReadEvents(), ADMIN)).events
    page = await service.ask(ReadEvents(), BOB)

    assert page.events == tuple(event for event in whole if event.job != A)
    assert {event.job for event in page.events} == {None, B}
    beyond = await service.ask(ReadEvents(from_seq=page.next_seq), BOB)
    assert (beyond.events, beyond.next_seq) == ((), whole[-1].seq + 1)


async def test_a_wait_for_events_ends_with_a_visible_event(service: LiveService) -> None:
    last = service.feed.last_seq
    asking = asyncio.create_task(service.ask(ReadEvents(from_seq=last + 1, wait_s=30.0), BOB))
    await asyncio.sleep(0)
    service.take(builders.cancelled(A))
    await service.loop.caught_up()
    assert not asking.done()

    service.take(builders.cancelled(B))

    page = await asking
    assert {event.job for event in page.events} == {B}


async def test_names_of_foreign_jobs_are_hidden_in_reasons() -> None:
    told = hide_names("gives 2 slots to a-1, b-2 (on n1-0); a-1.v3.r0 leaves", {"a-1"}.__contains__)

    assert told == f"gives 2 slots to {OTHER_JOB}, b-2 (on n1-0); {OTHER_JOB}.v3.r0 leaves"


@pytest.mark.parametrize(
    ("reason", "then"),
    [
        (
            "waits: user ann of project p has 4 of its 4 slots; user bob and 2 more want the rest",
            "waits: user ann of project p has 4 of its 4 slots; another user and 2 more want the rest",
        ),
        (
            "gives back 1 slot to user bob: user cid of project nlp has 2 slots and may have 1",
            "gives back 1 slot to another user: another user has 2 slots and may have 1",
        ),
        ("failed: user code of project x", "failed: user code of project x"),
    ],
)
async def test_users_of_foreign_projects_are_hidden_in_reasons(reason: str, then: str) -> None:
    assert hide_users(reason, {"p", "ann"}) == then


async def test_submission_keys_of_two_users_do_not_clash(
    service: LiveService, tmp_path: Path
) -> None:
    accepted = []
    for who in (ANN, BOB, ANN):
        digest = await stored(service, tmp_path, who)
        submitted = SubmitJob(spec=job_spec("c"), snapshot=digest, key="k")
        accepted.append(await service.ask(submitted, who))

    assert [one.job for one in accepted] == ["c-3", "c-4", "c-3"]
    assert isinstance(accepted[0], JobAccepted)


async def test_the_digest_of_an_archive_gives_no_access_to_it(
    service: LiveService, tmp_path: Path
) -> None:
    asked = SubmitJob(spec=job_spec("c"), snapshot=await stored(service, tmp_path, ANN))

    with pytest.raises(BadFieldError, match="is not stored"):
        await service.ask(asked, MATE)

    await service.ask(asked, ANN)  # now it is the archive of a job whose files are his mate's, too
    assert (await service.ask(asked, MATE)).job == JobId("c-4")
    with pytest.raises(BadFieldError, match="is not stored"):
        await service.ask(asked, Identity("user", "eve"))


async def test_a_job_belongs_to_the_named_or_first_project_of_its_user(
    service: LiveService, tmp_path: Path
) -> None:
    who = Identity("user", "ann", ("vision", "speech"))
    digest = await stored(service, tmp_path, who)
    for project in ("", "speech"):
        await service.ask(SubmitJob(spec=job_spec("c"), snapshot=digest, project=project), who)

    rows = (await service.ask(ListJobs(name="c"), who)).jobs
    assert [row.project for row in rows] == ["vision", "speech"]
    with pytest.raises(BadFieldError, match="'bob' is not one of vision, speech"):
        await service.ask(SubmitJob(spec=job_spec("c"), snapshot=digest, project="bob"), who)


async def stored(service: LiveService, folder: Path, who: Identity) -> str:
    """Return the digest of a working directory that a user sent."""
    archive = pack(tree(folder / "workdir", PROJECT))
    digest = digest_of(archive)
    await service.ask(PutSnapshot(digest=digest, offset=0, data=archive, total=len(archive)), who)
    return digest


async def test_a_user_sees_the_shares_of_own_projects_and_an_admin_those_of_all(
    service: LiveService,
) -> None:
    async def accounts(who: Identity) -> list[tuple[str, int, int]]:
        reply: Any = await service.ask(client.GetSharing(), who)
        return [(one.user, one.slots, one.waiting) for one in reply.accounts]

    assert await accounts(ANN) == [("ann", 1, 0)]
    assert await accounts(ADMIN) == [("ann", 1, 0), ("bob", 0, 1)]


async def test_only_an_admin_changes_shares_and_only_the_rules_that_were_read(
    service: LiveService,
) -> None:
    rules = Sharing(projects={"ann": Project(limit=1)})

    with pytest.raises(DeniedError, match="may not manage keys, quotas and the policy"):
        await service.ask(client.ChangeSharing(sharing=rules, based_on=0), OPERATOR)
    changed: Any = await service.ask(client.ChangeSharing(sharing=rules, based_on=0), ADMIN)
    assert changed.sharing == msgspec.structs.replace(rules, revision=1)
    with pytest.raises(BadFieldError, match="have changed since revision 0"):
        await service.ask(client.ChangeSharing(sharing=rules, based_on=0), ADMIN)
    wrong = Sharing(projects={"ann": Project(limit=1, guaranteed=2)})
    with pytest.raises(BadFieldError, match="guarantees 2 slots, but its limit is 1"):
        await service.ask(client.ChangeSharing(sharing=wrong, based_on=1), ADMIN)


async def test_an_operator_pauses_scheduling_and_resumes_it(service: LiveService) -> None:
    with pytest.raises(DeniedError, match="may not manage nodes"):
        await service.ask(client.PauseScheduling(paused=True), ANN)
    paused: Any = await service.ask(client.PauseScheduling(paused=True, reason="disk"), OPERATOR)
    assert paused.paused == "paused by olga: disk"
    service.take(builders.exited(A, code=0))
    resumed: Any = await service.ask(client.PauseScheduling(paused=False), OPERATOR)
    assert resumed.paused == ""
