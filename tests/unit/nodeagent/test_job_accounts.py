"""As whom jobs run, and which settings are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nodeagent import accounts as job_accounts
from nodeagent.accounts import AGENT, JOB, SUBMITTER, JobAccounts, check_jobs, run_as
from nodeagent.errors import NodeStartError
from nodeagent.folders import PASSABLE, NodeFolders
from nodeagent.owned_files import make_folder
from nodeagent.settings import AgentSettings, Controller, Jobs
from schemas.errors import SettingsError
from schemas.ids import JobId
from tests.support.builders import A, B
from tests.support.file_trees import let_pass

UIDS = (70_000, 2)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


def settings(*, alone: bool = False, **jobs: Any) -> AgentSettings:
    host = "127.0.0.1" if alone else "10.0.0.1"
    given = {"uids": UIDS, **jobs}
    return AgentSettings(node="n1", controller=Controller(host=host), jobs=Jobs(**given))


def as_uid(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    monkeypatch.setattr(job_accounts.os, "geteuid", lambda: uid)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("uid", "alone", "jobs", "chosen"),
    [
        (0, True, {}, AGENT),
        (1000, True, {}, AGENT),
        (0, False, {}, JOB),
        (0, False, {"users": {"ann": "root"}}, SUBMITTER),
        (0, False, {"run_as": "job", "users": {"ann": "root"}}, JOB),
        (0, True, {"run_as": "job"}, JOB),
        (0, False, {"trust_each_other": True}, AGENT),
        (1000, False, {"trust_each_other": True}, AGENT),
        (1000, False, {"run_as": "agent", "trust_each_other": True}, AGENT),
    ],
)
def test_the_default_account_of_jobs_is_safe(
    monkeypatch: pytest.MonkeyPatch, uid: int, jobs: dict[str, Any], chosen: str, *, alone: bool
) -> None:
    as_uid(monkeypatch, uid)

    assert run_as(settings(alone=alone, **jobs)) == chosen


ROOT = "could read its key and each other's files"


@pytest.mark.parametrize(
    ("uid", "jobs", "field", "why"),
    [
        (1000, {}, "jobs.run_as", ROOT),
        (0, {"run_as": "agent"}, "jobs.run_as", ROOT),
        (1000, {"run_as": "job"}, "jobs.run_as", "'job' needs an agent that is root"),
        (1000, {"run_as": "submitter"}, "jobs.run_as", "'submitter' needs an agent that is root"),
        (0, {"users": {"ann": "root"}}, "jobs.users.ann", "has uid 0, below 100"),
        (0, {"users": {"ann": "daemon"}}, "jobs.users.ann", "below 100"),
        (0, {"users": {"ann": "nobody-of-that-name"}}, "jobs.users.ann", "there is no account"),
        (0, {"files": 10}, "jobs.files", "too low for any worker"),
        (0, {"pids": 10}, "jobs.pids", "too low for any worker"),
        *(
            (0, {"uids": uids}, "jobs.uids", "no range of uids for jobs")
            for uids in ((0, 10), (70_000, 0), (2**32 - 2, 2))
        ),
    ],
)
def test_accounts_and_limits_that_jobs_must_not_have_are_refused(
    monkeypatch: pytest.MonkeyPatch, uid: int, jobs: dict[str, Any], field: str, why: str
) -> None:
    as_uid(monkeypatch, uid)

    with pytest.raises(SettingsError, match=why) as refused:
        check_jobs(settings(**jobs))

    assert refused.value.field == field
    assert ("jobs.trust_each_other = true" in refused.value.hint) is (field == "jobs.run_as")


@pytest.fixture
def folders(tmp_path: Path) -> NodeFolders:
    let_pass(tmp_path)
    made = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "c", mode=PASSABLE)
    made.make()
    return made


@needs_root
async def test_a_user_without_an_account_is_a_fault_of_the_node(folders: NodeFolders) -> None:
    accounts = JobAccounts(settings(run_as="submitter", users={"ann": "nobody"}), folders)

    with pytest.raises(NodeStartError, match="user 'bob' has no account on this node") as refused:
        await accounts.prepare(A, "bob")
    with pytest.raises(NodeStartError, match="does not name the owner"):
        await accounts.prepare(A, "")

    assert refused.value.hint == 'add bob = "ACCOUNT" to [jobs.users] of its agent'


@needs_root
async def test_each_job_has_a_uid_of_its_own_that_outlives_the_agent(folders: NodeFolders) -> None:
    accounts = JobAccounts(settings(), folders)
    first, second = await accounts.prepare(A, "ann"), await accounts.prepare(B, "ann")
    again = await JobAccounts(settings(), folders).prepare(A, "ann")

    assert first is not None
    assert second is not None
    assert again == first
    assert {first.owner.uid, second.owner.uid} == {70_000, 70_001}
    assert (folders.checkpoints / A).stat().st_uid == first.owner.uid


@needs_root
async def test_a_uid_is_reserved_while_folders_of_its_job_exist(folders: NodeFolders) -> None:
    accounts = JobAccounts(settings(), folders)
    for job in (A, B):
        await accounts.prepare(job, "ann")
        accounts.forget(job)

    with pytest.raises(NodeStartError, match="all 2 uids of jobs are used"):
        await accounts.prepare(JobId("c-3"), "ann")

    for root in (folders.checkpoints, folders.all_states):
        (root / A).rmdir()
    third = await accounts.prepare(JobId("c-3"), "ann")
    assert third is not None


@needs_root
async def test_a_job_takes_the_uid_of_its_checkpoints(folders: NodeFolders) -> None:
    there = await JobAccounts(settings(), folders).prepare(A, "ann")
    assert there is not None
    other = next(uid for uid in (70_000, 70_001) if uid != there.owner.uid)
    for root in (folders.checkpoints, folders.all_states):
        (root / A).rmdir()
    make_folder(folders.checkpoints / A, there.owner._replace(uid=other, gid=other))

    here = await JobAccounts(settings(), folders).prepare(A, "ann")

    assert here is not None
    assert here.owner.uid == other


@needs_root
def test_folders_that_jobs_cannot_reach_are_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    folders = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "c", mode=PASSABLE)

    with pytest.raises(SettingsError, match="cannot pass through") as refused:
        folders.make()

    assert refused.value.field == "run"


@needs_root
def test_the_account_of_the_agents_key_runs_no_job(folders: NodeFolders, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    accounts = JobAccounts(settings(run_as="submitter", users={"ann": "nobody"}), folders)
    accounts.check_key_owner(key)
    os.chown(key, 65_534, 65_534)

    with pytest.raises(SettingsError, match="belongs to an account that jobs run as"):
        accounts.check_key_owner(key)
