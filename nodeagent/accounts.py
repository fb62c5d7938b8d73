"""Accounts of jobs. A job runs as its submitter, as the agent, or with a uid of its own."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pwd
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from nodeagent.cgroups import MEMORY, PIDS, find
from nodeagent.errors import NodeStartError
from nodeagent.folders import PASSABLE, PRIVATE, NodeFolders
from nodeagent.job_cgroups import GROUPS_NEEDED, group_of_job
from nodeagent.owned_files import Owner, make_folder, remove_shared
from nodeagent.process_identity import end_all_of
from nodeagent.settings import AgentSettings, Jobs
from schemas.errors import SettingsError
from schemas.ids import JobId, WorkerId

MIN_UID: Final = 100  # lower uids belong to the system
MIN_FILES: Final = 256  # for torch and its data loaders
MIN_PIDS: Final = 64
MIN_MEMORY_BYTES: Final = 256 << 20  # bytes; for torch and a small model
PRLIMIT, SETPRIV = "prlimit", "setpriv"  # programs of util-linux
MAX_UID: Final = 2**32 - 2
AGENT, SUBMITTER, JOB = "agent", "submitter", "job"
KEEP_APART: Final = (
    "run the agent as root (jobs get uids of their own), or set "
    "jobs.trust_each_other = true if all users of the cluster trust each other"
)


@dataclass(frozen=True, slots=True)
class Account:
    """Account that a job runs as."""

    owner: Owner
    groups: tuple[int, ...]
    name: str
    home: str
    cgroup: str = ""  # control group of its zygotes


def run_as(settings: AgentSettings) -> str:
    """Return the setting `run_as`, or the safe default on this host (`AGENT`, `SUBMITTER`, `JOB`).

    Raises:
        SettingsError: if jobs of different users would share the agent's rights, or if the agent
            is not allowed to start processes of other users.
    """
    jobs, alone = settings.jobs, _is_loopback(settings)
    root = os.geteuid() == 0
    chosen: str = jobs.run_as
    if not chosen:
        shared = alone or jobs.trust_each_other
        chosen = AGENT if shared or not root else SUBMITTER if jobs.users else JOB
    if chosen == AGENT and not alone and not jobs.trust_each_other:
        what = "jobs would run as this agent's user, and could read its key and each other's files"
        raise SettingsError(f"jobs.run_as: {what}", KEEP_APART, "jobs.run_as")
    if chosen != AGENT and not root:
        what = f"{chosen!r} needs an agent that is root"
        raise SettingsError(f"jobs.run_as: {what}", KEEP_APART, "jobs.run_as")
    return chosen


def _is_loopback(settings: AgentSettings) -> bool:
    for host in (*settings.controller.hosts, settings.address):
        try:
            if not ip_address(host).is_loopback:
                return False
        except ValueError:
            if host != "localhost":
                return False
    return True


def check_jobs(settings: AgentSettings) -> str:
    """Check the settings of `[jobs]` at start-up, and return the result of `run_as`."""
    chosen = run_as(settings)
    first, count = settings.jobs.uids
    if first < MIN_UID or count < 1 or first + count - 1 > MAX_UID:
        what = f"jobs.uids: [{first}, {count}] is no range of uids for jobs"
        raise SettingsError(what, f"give [FIRST, COUNT] with FIRST from {MIN_UID} on", "jobs.uids")
    _check_limits(settings.jobs, chosen)
    if chosen != AGENT and shutil.which(SETPRIV) is None:
        what = f"jobs.run_as: {chosen!r} needs the program {SETPRIV}"
        raise SettingsError(what, "install util-linux", "jobs.run_as")
    if chosen == SUBMITTER:
        for user in settings.jobs.users:
            account_of(settings.jobs, user)
    return chosen


def _check_limits(jobs: Jobs, chosen: str) -> None:
    for name, least in (
        ("files", MIN_FILES),
        ("pids", MIN_PIDS),
        ("memory_bytes", MIN_MEMORY_BYTES),
    ):
        value = getattr(jobs, name)
        if 0 < value < least:
            what = f"jobs.{name}: {value} is too low for any worker"
            raise SettingsError(what, f"give {least} or more, or 0: no limit", f"jobs.{name}")
    bounded = {name for tree in find(jobs.cgroup) for name in tree.controllers}
    if jobs.memory_bytes and MEMORY not in bounded:
        what = f"jobs.memory_bytes: {_no_groups(jobs)} that limit memory"
        raise SettingsError(what, GROUPS_NEEDED, "jobs.memory_bytes")
    if jobs.pids and PIDS not in bounded and chosen == AGENT:
        what = f"jobs.pids: {_no_groups(jobs)} that limit processes, and jobs run as the agent"
        raise SettingsError(
            what, f'set run_as to "job" or "submitter", or {GROUPS_NEEDED}', "jobs.pids"
        )
    needed = "files" if jobs.files else "pids" if jobs.pids and PIDS not in bounded else ""
    if needed and shutil.which(PRLIMIT) is None:
        what = f"jobs: limits need the program {PRLIMIT}"
        raise SettingsError(what, "install util-linux", f"jobs.{needed}")


def _no_groups(jobs: Jobs) -> str:
    return f"the agent cannot create control groups below {jobs.cgroup or 'its own'}"


def folders_of(settings: AgentSettings, home: Path) -> NodeFolders:
    """Return the folders of this node. Relative paths of the settings start at `home`."""
    mode = PRIVATE if check_jobs(settings) == AGENT else PASSABLE
    run, work, checkpoints = settings.run, settings.work, settings.checkpoints
    return NodeFolders(home / run, home / work, home / checkpoints, mode=mode)


def account_of(jobs: Jobs, user: str) -> Account:
    """Return the account on this host under which the jobs of a cluster user run.

    Raises:
        SettingsError: if the user has no account here, or jobs must not use it.
    """
    field = f"jobs.users.{user}"
    if not user:
        what = "the controller does not name the owner of the job"
        raise SettingsError(what, "upgrade the controller first", "jobs.run_as")
    name = jobs.users.get(user)
    if name is None:
        what = f"user {user!r} has no account on this node"
        raise SettingsError(what, f'add {user} = "ACCOUNT" to [jobs.users] of its agent', field)
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        what = f"{field}: there is no account {name!r} on this host"
        raise SettingsError(what, f"useradd {name}, or name another one", field) from None
    if entry.pw_uid < MIN_UID:
        what = f"{field}: {name!r} has uid {entry.pw_uid}, below {MIN_UID}, which jobs may not use"
        raise SettingsError(what, "name a user's account", field)
    groups = tuple(g for g in os.getgrouplist(name, entry.pw_gid) if g != 0)
    if entry.pw_gid == 0:
        raise SettingsError(f"{field}: {name!r} is in group 0", "name another account", field)
    owner = Owner(entry.pw_uid, entry.pw_gid)
    return Account(owner, groups, name, entry.pw_dir, f"uid-{entry.pw_uid}")


class JobAccounts:
    """Accounts and folders of the jobs on this node.

    The owner of a job's folders is the only record of the job's uid. So a job keeps its uid while
    any of its folders exists, over restarts and on every node that shares the checkpoints.
    """

    def __init__(self, settings: AgentSettings, folders: NodeFolders) -> None:
        self._jobs = settings.jobs
        self._chosen = check_jobs(settings)
        self._folders = folders
        self._taken: dict[int, JobId] = {}
        self._lock = asyncio.Lock()

    @property
    def separate_users(self) -> bool:
        """True if jobs do not run as the agent's user."""
        return self._chosen != AGENT

    def is_own(self, uid: int) -> bool:
        """True if a uid belongs to a single job, and not to an account of this host."""
        first, count = self._jobs.uids
        return self._chosen == JOB and first <= uid < first + count

    def check_key_owner(self, key: Path) -> None:
        """Check that no job runs as the owner of the agent's key."""
        uid = key.stat().st_uid
        users = self._jobs.users if self._chosen == SUBMITTER else ()
        theirs = [user for user in users if account_of(self._jobs, user).owner.uid == uid]
        if theirs or self.is_own(uid):
            what = f"key {key} belongs to an account that jobs run as"
            raise SettingsError(what, f"chown root {key}", "key")

    async def prepare(self, job: JobId, user: str) -> Account | None:
        """Create a job's folders and return its account. If it runs as the agent, return None."""
        if not self.separate_users:
            return None
        async with self._lock:
            return await asyncio.to_thread(self._prepare, job, user)

    def _prepare(self, job: JobId, user: str) -> Account:
        try:
            account = self._own(job) if self._chosen == JOB else account_of(self._jobs, user)
        except SettingsError as error:
            raise NodeStartError(error.message, error.hint) from None
        self._taken[account.owner.uid] = job
        for path in (self._folders.checkpoints / job, self._folders.states(job)):
            make_folder(path, account.owner)
        if self._folders.job(job).exists():
            make_folder(self._folders.job(job), account.owner)
        return account

    def _own(self, job: JobId) -> Account:
        first, count = self._jobs.uids
        owners = self._owners()
        mine = next((uid for uid, names in owners.items() if job in names), None)
        mine = mine or next((uid for uid, name in self._taken.items() if name == job), None)
        if mine is not None and owners.get(mine, {job}) - {job}:
            what = f"uid {mine} of job {job} belongs to another job on this node"
            raise NodeStartError(what, "extend jobs.uids, the same on every node")
        if mine is None:
            begin = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8]) % count
            turns = (first + (begin + turn) % count for turn in range(count))
            mine = next(
                (uid for uid in turns if uid not in owners and uid not in self._taken), None
            )
        if mine is None:
            what = f"all {count} uids of jobs are used by folders of jobs"
            raise NodeStartError(what, "extend jobs.uids, or keep fewer folders of ended jobs")
        home = str(self._folders.job(job))
        return Account(Owner(mine, mine), (), f"job-{mine}", home, group_of_job(job))

    def _owners(self) -> dict[int, set[str]]:
        first, count = self._jobs.uids
        found: dict[int, set[str]] = {}
        for root in (self._folders.work, self._folders.all_states, self._folders.checkpoints):
            for name, uid in _owners_in(root):
                if first <= uid < first + count:
                    found.setdefault(uid, set()).add(name)
        return found

    def forget(self, job: JobId) -> None:
        """Release a job's uid. While folders of the job exist, they still reserve the uid."""
        for uid in [uid for uid, name in self._taken.items() if name == job]:
            del self._taken[uid]


def _owners_in(root: Path) -> Iterator[tuple[str, int]]:
    with suppress(FileNotFoundError), os.scandir(root) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                with suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False).st_uid


def _end_user(uid: int) -> None:
    end_all_of(uid)
    remove_shared(uid)


class JobUids:
    """Uids of running workers. When no worker uses a job's own uid any more, kill its processes.

    `forget` closes the connections to the zygotes of a uid, which are about to be killed.
    """

    def __init__(self, accounts: JobAccounts | None, forget: Callable[[int], None]) -> None:
        self._accounts = accounts
        self._forget = forget
        self._held: dict[WorkerId, int] = {}
        self._ending: dict[int, asyncio.Task[None]] = {}

    def hold(self, worker: WorkerId, uid: int) -> None:
        """Record that a worker uses a uid."""
        self._held[worker] = uid

    async def take(self, worker: WorkerId, account: Account) -> None:
        """Record that a worker uses an account's uid, once earlier workers' processes are dead."""
        uid = account.owner.uid
        self.hold(worker, uid)
        if (ending := self._ending.get(uid)) is not None:
            await ending

    async def release(self, worker: WorkerId) -> None:
        """Release the uid of a worker that exited or did not start."""
        if (uid := self._held.pop(worker, None)) is not None:
            await self._empty(uid)

    async def end_unused(self, sockets: Path) -> None:
        """Kill the zygotes that an earlier agent process left for jobs without workers here."""
        found = await asyncio.to_thread(lambda: [path.name for path in sockets.iterdir()])
        for uid in (int(name) for name in found if name.isdigit()):
            await self._empty(uid)

    async def _empty(self, uid: int) -> None:
        alone = self._accounts is not None and self._accounts.is_own(uid)
        if not alone or uid in self._held.values() or uid in self._ending:
            return
        self._forget(uid)
        self._ending[uid] = asyncio.create_task(asyncio.to_thread(_end_user, uid))
        try:
            await self._ending[uid]
        finally:
            del self._ending[uid]
