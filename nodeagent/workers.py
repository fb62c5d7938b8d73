"""Manager of worker processes, which carries out the reconciler's actions and emits events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import msgspec
import structlog

from nodeagent import reconciler
from nodeagent.accounts import Account, JobAccounts, JobUids
from nodeagent.connections import SnapshotFetcher
from nodeagent.containers import (
    SIGNALLED,
    container_name,
    engine_words,
    open_namespace,
    remove,
)
from nodeagent.devices import device_environment, usable_cores
from nodeagent.ended_jobs import mark_used
from nodeagent.environments import name_of
from nodeagent.errors import AgentError, NodeStartError, StartError
from nodeagent.folders import NodeFolders, WorkerFolder
from nodeagent.job_cgroups import JobGroups
from nodeagent.job_folders import is_laid_out, lay_out
from nodeagent.logs import LogShipper
from nodeagent.owned_files import acting_as, make_folder, remove_tree, write_private
from nodeagent.process_identity import (
    belongs_to,
    in_session,
    open_process,
    session_members,
    signal_group,
    start_ticks,
)
from nodeagent.settings import AgentSettings, python_of
from nodeagent.terminals import DRAIN_S, SHELL_S, SOCKET
from nodeagent.zygotes import LAUNCHER, ZygotePool
from schemas.codec import encode
from schemas.host.fork_server import NO_SECRETS
from schemas.ids import JobId, Rank, WorkerId, index_of, is_place, node_of
from schemas.jobs import EndWarning, JobSpec, is_reserved
from schemas.nodes import Group, SlotSpec
from schemas.wire.agent import GroupDelta, ScriptReport
from schemas.wire.streams import OpenStream
from schemas.wire.worker import Assignment, ExitStatus, ProcessMark, ShellOrder

log = structlog.get_logger("worker_manager")
EXIT_FILE_TIMEOUT_S: Final = 2.0  # from the exit of a process to its zygote's exit file
EXIT_FILE_POLL_S: Final = 0.01
GROUP_POLL_S: Final = 0.1  # between looks for processes that a stopped program has left
REFUSAL_DELAY_S: Final = 5.0  # delay of a refusal, since the controller retries at once
MAX_LAST_REPORTS_BYTES: Final = 64 << 20  # bytes of reports read after a worker has exited
REPORTS_AT_ONCE: Final = 10_000  # of one worker; also after its exit
REPORTS_PER_S: Final = 100.0  # of one worker, on average


Claim = Callable[[JobId, str, str], None]  # job, user, journal


@dataclass(slots=True)
class _Watched:
    folder: WorkerFolder
    job: JobId
    pid: int = 0
    pidfd: int | None = None
    position: int = 0  # in the report file
    read: int = 0  # reports before this position
    allowance: float = field(default_factory=lambda: float(REPORTS_AT_ONCE))  # reports
    earned_at: float = field(default_factory=time.monotonic)  # last increase of the allowance
    exited: bool = False
    fenced: bool = False  # stopped because the controller did not reply
    disk_limit: int | None = None  # killed because the job's files exceeded this number of bytes
    uid: int | None = None  # user of the worker; None: the agent's
    grace_s: float | None = None  # rigid jobs: seconds from TERM to KILL
    interactive: bool = False  # its program has a terminal
    in_container: bool = False  # an elastic worker, whose engine reports signals as exit codes
    kill_at: float | None = None  # monotonic time of KILL, after TERM

    def next_reports(self) -> list[ScriptReport]:
        """Read the next reports, as far as the allowance permits.

        The allowance grows until the worker exits, and is cut to `REPORTS_AT_ONCE` whenever all
        reports have been read. So reports that waited for the agent or the controller are read at
        once, if the worker wrote them at the permitted rate.
        """
        self._earn()
        reports, self.position = self.folder.reports(self.position, int(self.allowance))
        if not reports:
            self.allowance = min(self.allowance, REPORTS_AT_ONCE)
        self.allowance -= len(reports)
        self.read += len(reports)
        return reports

    def rewind(self) -> None:
        """Let the reports that were read be read again."""
        self.position, self.allowance, self.read = 0, self.allowance + self.read, 0

    def end(self) -> None:
        """Fix the allowance for the last reports, after the worker's exit."""
        self._earn()
        self.exited = True
        self.allowance = max(self.allowance, REPORTS_AT_ONCE)

    def _earn(self) -> None:
        now = time.monotonic()
        if not self.exited:
            self.allowance += (now - self.earned_at) * REPORTS_PER_S
        self.earned_at = now


@dataclass(frozen=True, slots=True)
class _Fault:
    error: str
    hint: str = ""
    node_fault: bool = False

    @property
    def text(self) -> str:
        return f"{self.error}; {self.hint}" if self.hint else self.error


class WorkerManager:
    """Worker processes of a node, each on one slot, from the assignment to the exit code.

    `settings` returns the current settings. `check_node` checks whether the node can start workers,
    and reports its problems. `may_read` is False while the controller has to catch up with reports.
    `claim` records the owner of a job's files before a start, and raises a StartError if they
    belong to another job.
    """

    def __init__(
        self,
        *,
        settings: Callable[[], AgentSettings],
        folders: NodeFolders,
        slots: tuple[SlotSpec, ...],
        zygotes: ZygotePool,
        shipper: LogShipper,
        fetcher: SnapshotFetcher,
        on_event: Callable[[reconciler.Event], None],
        may_read: Callable[[], bool],
        check_node: Callable[[], Awaitable[None]],
        accounts: JobAccounts | None = None,
        groups: JobGroups | None = None,
        claim: Claim = lambda *_: None,
    ) -> None:
        self._settings = settings
        self._groups = groups or JobGroups()
        self._accounts = accounts
        self._claim = claim
        self._uids = JobUids(accounts, zygotes.forget)
        self._folders = folders
        self._slots = {slot.index: slot for slot in slots}
        self._zygotes = zygotes
        self._shipper = shipper
        self._fetcher = fetcher
        self._on_event = on_event
        self._may_read = may_read
        self._check_node = check_node
        self._watched: dict[WorkerId, _Watched] = {}
        self.tokens: dict[WorkerId, str] = {}  # each worker sends its token when it greets
        self._laying: WeakValueDictionary[JobId, asyncio.Lock] = WeakValueDictionary()
        self._environments: dict[WorkerId, str] = {}  # name of the environment of each worker
        self._tasks: set[asyncio.Task[None]] = set()

    # --- actions of the reconciler

    def perform(
        self,
        action: reconciler.FetchWorkspace
        | reconciler.StartWorker
        | reconciler.AwaitExit
        | reconciler.Warn
        | reconciler.Terminate
        | reconciler.Kill
        | reconciler.RemoveWorker,
    ) -> None:
        """Start an action. An event reports the action's outcome.

        A signal to an exited process is ignored. A `StartWorker` is ignored if its delta has no
        group or spec.
        """
        match action:
            case reconciler.FetchWorkspace():
                self._spawn(self._fetch_workspace(action))
            case reconciler.StartWorker():
                self._spawn(self._start(action))
            case reconciler.AwaitExit(worker=worker):
                self._spawn(self._await_grace(worker))
            case reconciler.Warn(worker=worker, warning=warning):
                self._warn(worker, warning)
            case reconciler.Terminate(worker=worker):
                self._terminate(worker)
            case reconciler.Kill(worker=worker):
                self._signal(worker, signal.SIGKILL)
            case reconciler.RemoveWorker(worker=worker):
                self._remove(worker)

    def adopt(self) -> None:
        """Find the workers that an earlier agent process left, whether they run or have exited."""
        self._groups.open()
        for folder in self._folders.workers():
            assignment, mark = folder.assignment(), folder.mark()
            if assignment is None or (mark is None and folder.exit() is None):
                self._discard(folder)
                if assignment is not None:  # counted, because the start may have ended that agent
                    self._on_event(reconciler.Adopted(folder.worker, assignment, None, None))
                    self._on_event(reconciler.Ended(folder.worker, None, None, unseen=True))
                continue
            pid, ticks = (mark.pid, mark.started_ticks) if mark else (None, None)
            self.tokens[folder.worker] = assignment.token
            self._on_event(reconciler.Adopted(folder.worker, assignment, pid, ticks))
            self._shipper.watch(folder.worker, assignment, folder)
            watched = self._watched[folder.worker] = self._watch_folder(folder, assignment)
            watched.earned_at -= folder.age_s
            runs = mark is not None and start_ticks(mark.pid) == mark.started_ticks
            stated = assignment.spec.shape
            self._groups.adopt(folder.worker, assignment.job, pid if runs else None, stated)
            if mark is not None:
                self._watch_process(folder.worker, watched, mark.pid, mark.started_ticks)
            else:
                self._spawn(self._on_exit(folder.worker, watched))
            log.info("worker adopted", worker=folder.worker, pid=pid)
        self._spawn(self._end_unused())

    def read_reports(self, worker: WorkerId) -> None:
        """Emit the new reports of a worker as events, at a limited rate.

        Do nothing while `may_read` is False.
        """
        watched = self._watched.get(worker)
        if watched is None or not self._may_read():
            return
        for report in watched.next_reports():
            self._on_event(reconciler.ReportRead(worker, report))

    def read_all_reports(self) -> None:
        """Read the reports of all workers, in case a hint about new ones was lost."""
        for worker in list(self._watched):
            self.read_reports(worker)

    def report_again(self) -> None:
        """Emit all reports once more, because the controller lost some of them."""
        for worker, watched in self._watched.items():
            watched.rewind()
            self._spawn(self._report_again(worker, watched))

    async def _report_again(self, worker: WorkerId, watched: _Watched) -> None:
        await self._read_last_reports(worker, watched)
        self._on_event(reconciler.ReportedAgain(worker))

    def kill_unreportable(self) -> None:
        """Kill workers with deleted folders, because their reports cannot be read."""
        for worker, watched in self._watched.items():
            if watched.pidfd is not None and not watched.folder.written:
                log.error("worker folder was deleted, killing the worker", worker=worker)
                self._signal(worker, signal.SIGKILL)

    def fence(self) -> None:
        """Stop every worker, because the controller might consider this node lost."""
        for worker, watched in self._watched.items():
            if watched.pidfd is None or watched.fenced:
                continue
            watched.fenced = True
            log.error("controller does not reply, stopping the worker", worker=worker)
            with contextlib.suppress(OSError):  # on a full disk, its own exit code is reported
                watched.folder.mark_stopped()
            self._signal(worker, signal.SIGTERM)
            self._spawn(self._kill_after_grace(worker))

    def end_large(self, job: JobId, limit: int) -> None:
        """Kill the workers of a job, because its files in one folder exceed `limit` bytes."""
        for worker, watched in self._watched.items():
            if watched.job == job and watched.pidfd is not None:
                log.error("files of the job exceed their limit", worker=worker, limit=limit)
                watched.disk_limit = limit
                self._signal(worker, signal.SIGKILL)

    def processes(self, worker: WorkerId) -> list[int]:
        """Return the processes of a running worker: those of its control group, else its session.

        Without a group, processes of other users are left out.
        """
        watched = self._watched.get(worker)
        if watched is None or watched.pidfd is None:
            return []
        if found := self._groups.processes(worker):
            return found
        uid = os.getuid() if watched.uid is None else watched.uid
        return [pid for pid in in_session(watched.pid) if belongs_to(pid, uid)]

    async def start_shell(
        self, asked: OpenStream, folder: Path, secrets: Mapping[str, str] = NO_SECRETS
    ) -> None:
        """Start a shell beside a running worker: with its account, group, folder and variables.

        `folder` is a new folder in the agent's folder of the worker. `secrets` are those variables
        of the job that no file has.
        """
        watched = self._watched.get(asked.worker)
        assignment = watched.folder.assignment() if watched is not None else None
        if watched is None or watched.pidfd is None or assignment is None:
            raise StartError("the worker does not run any more")
        account = await self._prepare(assignment.job, assignment.user, assignment.journal)
        owner = account.owner if account is not None else None
        python = Path(assignment.spec.python or python_of(self._settings())).parent
        path = f"{python}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        inherits = assignment.spec.rigid or assignment.environment or not python.name
        path = "" if inherits else path
        named = {"TERM": asked.term, "LANG": asked.lang, "PATH": path}
        env = {name: value for name, value in named.items() if value}
        order = ShellOrder(argv=asked.argv, env=env, worker=watched.pid, limit_s=SHELL_S)
        await asyncio.to_thread(make_folder, folder, owner)
        with acting_as(owner):
            write_private(folder / "assignment", encode(assignment))
            write_private(folder / "order", encode(order))
        await self._zygotes.get(LAUNCHER, account)
        enter = partial(self._groups.enter, asked.worker) if self._groups.there else None
        await self._zygotes.fork(LAUNCHER, folder, account, enter, secrets)

    def close(self) -> None:
        """Release all resources without stopping workers."""
        for task in self._tasks:
            task.cancel()
        self._shipper.close()
        self._zygotes.close()
        self._groups.close()

    # --- implementation

    async def _end_unused(self) -> None:
        await asyncio.to_thread(self._groups.end_left)
        await self._uids.end_unused(self._folders.sockets)
        await asyncio.to_thread(self._groups.tidy)

    def _watch_folder(self, folder: WorkerFolder, assignment: Assignment) -> _Watched:
        if (uid := folder.uid) is not None:
            self._uids.hold(folder.worker, uid)
        spec = assignment.spec
        grace_s = spec.grace_limit_s if spec.rigid else None
        interactive = spec.kind == "interactive"
        if assignment.environment:
            self._environments[folder.worker] = Path(assignment.environment).name
        return _Watched(
            folder,
            assignment.job,
            uid=uid,
            grace_s=grace_s,
            interactive=interactive,
            in_container=bool(assignment.container) and not spec.rigid,
        )

    async def _prepare(self, job: JobId, user: str, journal: str) -> Account | None:
        """Return the account of a job. Raise an error if there is none, after a delay."""
        try:
            await asyncio.to_thread(self._claim, job, user, journal)
            return await self._accounts.prepare(job, user) if self._accounts is not None else None
        except NodeStartError:
            await asyncio.sleep(REFUSAL_DELAY_S)
            raise

    async def _fetch_workspace(self, asked: reconciler.FetchWorkspace) -> None:
        job, digest = asked.job, asked.digest
        try:
            account = await self._prepare(job, asked.user, asked.journal)
            await self._lay_out(job, digest, account)
        except Exception as error:  # noqa: BLE001 - the controller waits for an outcome
            fault = await self._fault(error)
            self._on_event(reconciler.WorkspaceFailed(job, digest, fault.text, fault.node_fault))
        else:
            self._on_event(reconciler.WorkspaceReady(job, digest))

    async def _lay_out(self, job: JobId, digest: str, account: Account | None) -> None:
        folder = self._folders.job(job)
        archive = folder.with_name(f".{job}.tar")
        lock = self._laying.setdefault(job, asyncio.Lock())
        async with lock:
            if await asyncio.to_thread(is_laid_out, folder, digest):
                return
            try:
                await self._fetcher.fetch(digest, archive)
                owner, bounds = account.owner if account else None, self._settings().workdir
                await asyncio.to_thread(lay_out, archive, folder, digest, bounds, owner)
            finally:
                archive.unlink(missing_ok=True)

    async def _start(self, action: reconciler.StartWorker) -> None:
        worker, delta = action.worker, action.delta
        if delta.group is None or delta.spec is None:
            return
        folder = self._folders.worker(worker)
        try:
            if delta.secrets.keys() != set(delta.spec.secret_names):
                what = "the controller no longer has the values of its secret_env"
                raise StartError(what, f"`ones rerun {delta.job} --secret-env FILE`")  # noqa: TRY301
            account = await self._prepare(delta.job, delta.user, delta.journal)
            if account is not None:
                await self._uids.take(worker, account)
            await asyncio.to_thread(self._groups.hold, worker, delta.job, delta.spec.shape)
            if not self._folders.job(delta.job).is_dir():  # deleted since the job arrived
                await self._lay_out(delta.job, delta.snapshot, account)
            python = delta.spec.python or python_of(self._settings())
            environment = await asyncio.to_thread(self._environment, worker, delta, python, account)
            launched = delta.spec.rigid or environment or delta.spec.stated_image
            python = LAUNCHER if launched else python
            await self._zygotes.get(python, account)
            token = secrets.token_hex()
            assignment = self._assignment(action, delta.group, delta.spec, token, environment)
            if delta.spec.stated_image:
                words = self._engine_words(assignment, account)
                if account is not None:
                    await asyncio.to_thread(open_namespace, words[0], account.owner.uid)
                assignment = msgspec.structs.replace(assignment, container=words)
            folder.write_assignment(assignment, account.owner if account else None)
            self.tokens[worker] = token
            self._shipper.watch(worker, assignment, folder)
            enter = partial(self._groups.enter, worker) if self._groups.there else None
            forked = await self._zygotes.fork(python, folder.own, account, enter, delta.secrets)
            if account is not None:
                mark = ProcessMark(pid=forked.pid, started_ticks=forked.started_ticks)
                folder.write_mark(mark)
        except Exception as error:  # noqa: BLE001 - the controller waits for an outcome
            _kill_unannounced(folder)
            self.tokens.pop(worker, None)
            self._spawn(self._release(worker))
            fault = await self._fault(error)
            self._on_event(
                reconciler.StartFailed(worker, fault.error, fault.hint, fault.node_fault)
            )
            return
        watched = self._watched[worker] = self._watch_folder(folder, assignment)
        self._watch_process(worker, watched, forked.pid, forked.started_ticks)
        # Watch the process before reporting it: the handler may stop it at once.
        self._on_event(reconciler.Started(worker, forked.pid, forked.started_ticks))

    async def _release(self, worker: WorkerId, folder: Path | None = None) -> None:
        """Release what a worker used, and delete its folder if it exists."""
        await asyncio.to_thread(self._groups.release, worker)
        await self._uids.release(worker)
        await asyncio.to_thread(self._groups.tidy)
        if folder is not None:
            await asyncio.to_thread(remove_tree, folder)

    async def _fault(self, error: Exception) -> _Fault:
        """Describe an error. Report a fault of the node first, so that no new worker comes here."""
        match error:
            case AgentError():
                fault = _Fault(error.message, error.hint, node_fault=error.node_fault)
            case OSError():
                fault = _Fault(f"cannot write {error.filename}: {error.strerror}", node_fault=True)
            case _:
                log.error("worker could not be started", exc_info=error)
                fault = _Fault(f"the agent failed: {error!r}", node_fault=True)
        if fault.node_fault:
            await self._check_node()
        return fault

    def _environment(
        self, worker: WorkerId, delta: GroupDelta, python: str, account: Account | None
    ) -> str:
        """Return the folder of a job's environment, which may have to be built; empty: none."""
        if delta.spec is None or not (wanted := delta.spec.stated_requirements):
            return ""
        owner = account.owner if account is not None else None
        with acting_as(owner):
            file = self._folders.job(delta.job) / wanted
            key = name_of(
                file, python, user=delta.user, snapshot=delta.snapshot, env=delta.spec.env
            )
        name = f"{'agent' if owner is None else owner.uid}-{key}"
        if owner is not None and self._accounts is not None and self._accounts.is_own(owner.uid):
            name = f"{delta.job}-{key}"  # another job may get this uid later
        folder = self._folders.environments / name
        self._environments[worker] = name
        mark_used(self._folders.environments, name)
        make_folder(folder, owner)
        return str(folder)

    def _engine_words(self, assignment: Assignment, account: Account | None) -> tuple[str, ...]:
        uid = os.geteuid() if account is None else account.owner.uid
        return engine_words(
            self._settings().containers,
            container_name(assignment.journal, assignment.job, assignment.version, assignment.rank),
            assignment.workdir,
            uid=uid,
            own_uid=self._accounts is not None and self._accounts.is_own(uid),
            tty=assignment.spec.kind == "interactive",
        )

    async def _remove_container(self, watched: _Watched) -> None:
        if (one := watched.folder.assignment()) is None or not one.container:
            return
        name = container_name(one.journal, one.job, one.version, one.rank)
        try:
            await asyncio.to_thread(remove, one.container[0], name, watched.uid)
        except (
            OSError,
            KeyError,
            subprocess.SubprocessError,
        ) as error:  # or no reply of the engine
            log.warning("container not removed", container=name, why=repr(error))

    @property
    def environments(self) -> set[str]:
        """Names of the environments that workers use."""
        return set(self._environments.values())

    def _assignment(
        self,
        action: reconciler.StartWorker,
        group: Group,
        spec: JobSpec,
        token: str,
        environment: str = "",
    ) -> Assignment:
        member = group.members[action.rank]
        index = index_of(member.slot)
        if index not in self._slots and not is_place(member.slot):
            hint = "check devices and CUDA_VISIBLE_DEVICES of its agent"
            raise StartError(f"slot {member.slot} is not offered any more", hint)
        own = {name: value for name, value in spec.env.items() if not is_reserved(name)}
        if (element := spec.stated_element) is not None:
            own |= element.variables
        own_node, here = node_of(member.slot), [index]
        if spec.rigid:  # its program sees the devices of all its slots here
            here = [index_of(one.slot) for one in group.members if node_of(one.slot) == own_node]
            folder = Path(spec.python or python_of(self._settings())).parent
            path = os.environ.get("PATH", os.defpath)
            own = {"PATH": f"{folder}{os.pathsep}{path}" if folder.name else path, **own}
        devices = [self._slots[one] for one in here if one in self._slots]
        own = {"OMP_NUM_THREADS": str(self._threads(spec, len(here))), **own}
        environ = {**own, **device_environment(*devices)}
        folders = self._folders
        socket = folders.container_socket if spec.stated_image else folders.socket
        return Assignment(
            job=action.delta.job,
            journal=action.delta.journal,
            version=group.version,
            rank=Rank(action.rank),
            slot=index,
            group=group,
            spec=spec,
            workdir=str(self._folders.job(action.delta.job)),
            checkpoints=str(self._folders.checkpoints / action.delta.job),
            socket=socket,
            env=environ,
            address=self._settings().address,
            kind=action.delta.kind,
            granted=action.granted,
            states=str(self._folders.states(action.delta.job)) if spec.stated_sweep else "",
            token=token,
            user=action.delta.user,
            environment=environment,
            python=spec.python or python_of(self._settings()),
        )

    def _threads(self, spec: JobSpec, slots: int) -> int:
        """Return the threads of a worker: as many as its cores, at least 1 for each slot."""
        many = slots if spec.single else 1
        if cpus := spec.shape.cpus or (0.0 if spec.slots[1] else 1.0):
            return max(1, int(cpus * many))
        return max(1, usable_cores() // len(self._slots)) * many

    def _watch_process(self, worker: WorkerId, watched: _Watched, pid: int, ticks: int) -> None:
        watched.pid = pid
        watched.pidfd = open_process(pid, ticks)
        if watched.pidfd is None:
            self._spawn(self._on_exit(worker, watched))
            return
        pidfd = watched.pidfd
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(pidfd)
            self._spawn(self._on_exit(worker, watched))

        loop.add_reader(pidfd, gone)

    async def _on_exit(self, worker: WorkerId, watched: _Watched) -> None:
        status = await self._exit_status(watched.folder)
        if watched.pid and watched.kill_at is not None:
            await self._await_group(watched.pid, watched.kill_at)
        if watched.interactive:
            await self._await_terminal(watched.folder.own / SOCKET)
        seen = watched.pidfd is not None
        if watched.pidfd is not None:
            signal_group(watched.pid, signal.SIGKILL, watched.uid)  # its remaining children
            os.close(watched.pidfd)
            watched.pidfd = None
        if watched.pid and (watched.interactive or not seen):  # a shell gives each job a group
            for left_behind in session_members(watched.pid):
                if watched.uid is None or belongs_to(left_behind, watched.uid):
                    with contextlib.suppress(OSError):
                        os.kill(left_behind, signal.SIGKILL)
        await self._remove_container(watched)
        exceeded = await asyncio.to_thread(self._groups.release, worker)
        watched.end()
        await self._read_last_reports(worker, watched)
        if watched.allowance < 1:
            log.warning("worker wrote too many reports, the last are not read", worker=worker)
        code = status.code if status else None
        by = status.signal if status else None
        if watched.in_container and code is not None and code > SIGNALLED:
            by, code = code - SIGNALLED, None
        # A program that the node stops may save its work and exit with 0, which is no result.
        if watched.folder.stopped and (code != 0 or watched.grace_s is not None):
            code, by = None, int(signal.SIGTERM)
            exceeded = None
        self._shipper.worker_ended(worker)
        memory, disk = (exceeded, watched.disk_limit) if code != 0 else (None, None)
        unseen = status is None
        asked = watched.folder.asked
        self._on_event(
            reconciler.Ended(
                worker, code, by, unseen, memory_limit=memory, disk_limit=disk, asked=asked
            )
        )

    @staticmethod
    async def _await_terminal(path: Path) -> None:
        """Wait until clients have the last output of a terminal, for a limited time."""
        deadline = time.monotonic() + DRAIN_S + EXIT_FILE_TIMEOUT_S
        while _is_socket(path) and time.monotonic() < deadline:
            await asyncio.sleep(EXIT_FILE_POLL_S)

    @staticmethod
    async def _await_group(leader: int, until: float) -> None:
        """Wait until no process of a session is left, or until a monotonic time.

        A shell dies of TERM before the program that it started has saved its work.
        """
        while time.monotonic() < until and session_members(leader):
            await asyncio.sleep(GROUP_POLL_S)

    async def _read_last_reports(self, worker: WorkerId, watched: _Watched) -> None:
        """Read all remaining reports, up to a limit, because the file might be endless."""
        before, most = -1, watched.position + MAX_LAST_REPORTS_BYTES
        while before < watched.position <= most:
            while not self._may_read():
                await asyncio.sleep(EXIT_FILE_TIMEOUT_S)
            before = watched.position
            self.read_reports(worker)
            await asyncio.sleep(0)

    async def _exit_status(self, folder: WorkerFolder) -> ExitStatus | None:
        deadline = time.monotonic() + EXIT_FILE_TIMEOUT_S
        while (status := folder.exit()) is None and time.monotonic() < deadline:
            await asyncio.sleep(EXIT_FILE_POLL_S)
        return status

    def _signal(self, worker: WorkerId, what: signal.Signals) -> None:
        watched = self._watched.get(worker)
        if watched is not None and watched.pidfd is not None:
            signal_group(watched.pid, what, watched.uid)

    def _warn(self, worker: WorkerId, warning: EndWarning) -> None:
        watched = self._watched.get(worker)
        if watched is None or watched.pidfd is None or not watched.folder.mark_warned():
            return
        what = signal.Signals[f"SIG{warning.signal}"]
        if warning.to == "first":
            signal.pidfd_send_signal(watched.pidfd, what)
        elif warning.to == "all":
            self._signal(worker, what)
        else:
            for pid in in_session(watched.pid):
                if pid != watched.pid:
                    with contextlib.suppress(OSError):
                        os.kill(pid, what)

    def _terminate(self, worker: WorkerId) -> None:
        watched = self._watched.get(worker)
        if watched is not None and watched.grace_s is not None:
            with contextlib.suppress(OSError):  # on a full disk, its own exit code is reported
                watched.folder.mark_asked()
            watched.kill_at = time.monotonic() + watched.grace_s
            if watched.interactive:
                self._signal(worker, signal.SIGHUP)  # interactive shells ignore TERM
        self._signal(worker, signal.SIGTERM)
        self._spawn(self._await_grace(worker, watched.grace_s if watched is not None else None))

    async def _await_grace(self, worker: WorkerId, grace_s: float | None = None) -> None:
        await asyncio.sleep(self._settings().kill_grace_s if grace_s is None else grace_s)
        self._on_event(reconciler.GraceOver(worker))

    async def _kill_after_grace(self, worker: WorkerId) -> None:
        await asyncio.sleep(self._settings().kill_grace_s)
        self._signal(worker, signal.SIGKILL)

    def _remove(self, worker: WorkerId) -> None:
        self._watched.pop(worker, None)
        self._environments.pop(worker, None)
        self.tokens.pop(worker, None)
        self._shipper.forget(worker)
        path = self._folders.worker(worker).path
        if self._accounts is None or not self._accounts.separate_users:
            remove_tree(path)
        else:
            self._spawn(self._release(worker, path))

    @staticmethod
    def _discard(folder: WorkerFolder) -> None:
        """Remove a folder that has no process, so that a fork in progress finds no assignment."""
        doomed = WorkerFolder(folder.path.with_name(f".{folder.path.name}"))
        remove_tree(doomed.path)
        folder.path.rename(doomed.path)
        if (mark := doomed.mark()) is not None:  # the process started just now
            signal_group(mark.pid, signal.SIGKILL, doomed.uid)
        remove_tree(doomed.path)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task of the worker manager failed", error=repr(error))


def _is_socket(path: Path) -> bool:
    return path.is_socket()


def _kill_unannounced(folder: WorkerFolder) -> None:
    """Kill a worker that started after the agent stopped waiting for its zygote's reply."""
    if (mark := folder.mark()) is None:
        return
    if (pidfd := open_process(mark.pid, mark.started_ticks)) is not None:
        signal_group(mark.pid, signal.SIGKILL, folder.uid)
        os.close(pidfd)
