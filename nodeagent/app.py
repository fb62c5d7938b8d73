"""The agent's process, which builds the agent's parts and runs their tasks. Workers outlive it."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from nodeagent import reconciler
from nodeagent import settings as agent_settings
from nodeagent.accounts import AGENT, JobAccounts, check_jobs, folders_of, run_as
from nodeagent.cgroups import find
from nodeagent.connections import BulkTraffic, ControllerPorts, SnapshotFetcher, WorkerChannel
from nodeagent.devices import gpu_check, inventory
from nodeagent.ended_jobs import DiskLimits, EndedJobs
from nodeagent.errors import log_errors
from nodeagent.folders import SOCKET, FolderLocks, WorkerFolder
from nodeagent.health import HealthWatch, checked_places
from nodeagent.job_cgroups import JobGroups
from nodeagent.logs import LogShipper
from nodeagent.metrics import NodeFigures, NodeMetrics
from nodeagent.notices import NoticeWatch
from nodeagent.settings import AgentSettings
from nodeagent.states import StateKeeper, serve_states
from nodeagent.streams import JobStreams
from nodeagent.usage import UsageWatch, nvml_of
from nodeagent.workers import WorkerManager
from nodeagent.zygotes import ZygotePool
from schemas.codec import TO_AGENT, encode
from schemas.errors import OnesError
from schemas.host.files import take_pid_file
from schemas.host.logging import notify, watchdog
from schemas.host.metrics_server import MetricsServer
from schemas.host.reload import SettingsReload
from schemas.host.tasks import supervised
from schemas.ids import BootId, NodeId, Seconds, WorkerId
from schemas.session import AgentOutput, AgentSession, Apply, Publish, SendHello, ToController
from schemas.transport.keys import ServerKeys, load_keys
from schemas.transport.sockets import Link
from schemas.wire import Message
from schemas.wire import agent as wire
from schemas.wire.files import AskFiles, AskPiece
from schemas.wire.streams import OpenStream
from schemas.wire.sweeps import SweepDelta, UnitTask
from schemas.wire.worker import FromWorker, SlotGranted, WorkerHello

log = structlog.get_logger("agent")
TICK_INTERVAL_S: Final = 0.25
CHECK_INTERVAL_S: Final = 1.0
TERM_MARGIN_S: Final = 5.0  # from the deadline of a notice to the last report
TELEMETRY_S: Final = 0.1  # between reports of one kind of one worker; others are dropped
MAX_REMEMBERED: Final = 10_000  # workers and kinds
OTHER_KEY_S: Final = 5.0  # without a message; in a rotation the controller may have its next key
RELOADABLE: Final = (
    "kill_grace_s", "keep_work_s", "keep_work_bytes", "keep_checkpoints_s",
    "keep_checkpoints_bytes", "disk_reserve_bytes", "log_bytes", "python", "workdir.size",
    "workdir.files", "workdir.depth", "jobs.memory_bytes", "jobs.pids", "jobs.disk_bytes",
    "notice.on_term_s", "notice.file", "notice.seconds",
)  # fmt: skip


class Agent:
    """Agent of one node, with its session, its connections to workers, and their processes.

    `job_umask` is for jobs that run as the agent; -1 is the umask of this process.
    """

    def __init__(self, settings: AgentSettings, home: Path, job_umask: int = -1) -> None:
        self._settings = settings
        self._home = home
        self._node = NodeId(settings.node)
        if settings.pid_file:
            take_pid_file(home / settings.pid_file)
        self._spec = inventory(settings)
        self._folders = folders_of(settings, home)
        self._folders.make()
        self._accounts = JobAccounts(settings, self._folders)
        self._locks = FolderLocks(self._folders, self._node)
        self._run_id = self._folders.run_id()
        self._states = StateKeeper(self._folders, self._record_event)
        self._server = serve_states(
            self._folders, self._states.key, settings.address, settings.states_port
        )
        port = self._server.port if self._server else 0
        self._spec = msgspec.structs.replace(self._spec, states_port=port)
        own_key = home / (settings.key or f"keys/{self._node}.key_secret")
        self._link = Link(load_keys(own_key))
        self._accounts.check_key_owner(own_key)
        self._session = AgentSession(
            self._node,
            BootId(uuid.uuid4().hex[:12]),
            longest_heartbeat_s=settings.fence_s / 3.0 or math.inf,
            chance=random.random,
        )
        self._reconciler = reconciler.Reconciler(self._node)
        self._ended_jobs = EndedJobs(
            self._folders,
            lambda: self._settings,
            lambda: set(self._reconciler.jobs),
            lambda: self._manager.environments,
        )
        self._server_keys = ServerKeys(home / settings.controller.key)
        self._ports = ControllerPorts(
            self._link, settings.controller, self._server_keys, self._node
        )
        self._heard_at = Seconds(0.0)  # last message of the controller, or last change of the key
        self._workers = WorkerChannel(
            self._folders.socket,
            self._on_worker_message,
            self._token_of,
            open_to_all=self._accounts.separate_users,
            link=self._folders.container_socket if settings.containers.engine else "",
        )
        places, shared = checked_places(self._folders, settings.disk_reserve_bytes)
        self._health = HealthWatch(
            places=places,
            shared=(*shared, *filter(None, [gpu_check(self._spec.slots)])),
            socket=self._folders.sockets / SOCKET,
            listen=self._workers.listen,
            changed=self._health_changed,
        )
        self._notices = NoticeWatch(lambda: self._settings.notice, home, self._record_event)
        self._leaving: asyncio.Task[None] | None = None
        self._refusal = ""  # of the controller, since the last welcome
        self._shipper = LogShipper(
            self._node,
            lambda worker: self._handle(reconciler.LogsStored(worker)),
            settings.log_bytes,
        )
        fetcher = SnapshotFetcher()
        self._telemetry_at: dict[tuple[WorkerId, type[Message]], Seconds] = {}
        self._bulk = BulkTraffic(self._folders, self._shipper, fetcher)
        self._groups = JobGroups(find(settings.jobs.cgroup), self._folders.run, settings.jobs)
        self._zygotes = ZygotePool(self._folders, settings.jobs, self._groups, job_umask)
        self._manager = WorkerManager(
            settings=lambda: self._settings,
            folders=self._folders,
            slots=self._spec.slots,
            zygotes=self._zygotes,
            shipper=self._shipper,
            fetcher=fetcher,
            on_event=self._handle,
            may_read=lambda: not self._session.spool_full,
            check_node=self._health.look,
            accounts=self._accounts,
            groups=self._groups,
            claim=self._ended_jobs.claim,
        )
        self._streams = self._bulk.streams = JobStreams(
            send=self._bulk.send,
            worker=self._folder_of,
            start_shell=self._start_shell,
            pids=self._manager.processes,
        )
        self._usage = UsageWatch(
            workers=lambda: [
                w for w in self._reconciler.workers.values() if w.phase in reconciler.LISTENING
            ],
            processes=self._manager.processes,
            uuids={slot.index: slot.uuid for slot in self._spec.slots if slot.kind == "gpu"},
            nvml=nvml_of(self._spec.slots),
            report=lambda used: self._ports.publish(
                encode(wire.UsageTelemetry(node=self._node, used=used))
            ),
        )
        self._disk_limits = DiskLimits(
            self._folders,
            most=lambda: self._settings.jobs.disk_bytes,
            running=lambda: self._reconciler.jobs,
            stop=self._manager.end_large,
            is_own=self._accounts.is_own,
        )

    def _health_changed(self, problems: tuple[str, ...]) -> None:
        self._record_event(wire.NodeHealth(problems=problems))
        if problems:
            self._ended_jobs.make_room()

    def settings_of(self, path: Path) -> SettingsReload[AgentSettings]:
        """Return an object that applies changes of the settings file while the agent runs."""
        safe = dict.fromkeys(RELOADABLE, self._use)
        return SettingsReload(self._settings, partial(_load_checked, path), safe)

    def _use(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._zygotes.limits = settings.jobs
        self._groups.use(settings.jobs)
        self._health.reserve(settings.disk_reserve_bytes)
        self._shipper.max_bytes = settings.log_bytes

    def terminate(self, stop: asyncio.Event) -> None:
        """Set `stop`, at the first TERM after a notice if the settings say so."""
        within_s = self._settings.notice.on_term_s
        if not within_s or self._leaving is not None:
            stop.set()
            return
        self._record_event(wire.NodeNoticed(within_s=within_s, reason="its agent was told to stop"))
        self._leaving = asyncio.create_task(self._leave(within_s, stop))

    async def _leave(self, within_s: float, stop: asyncio.Event) -> None:
        """Set `stop` when no worker is left and all is reported, or when the notice is over."""
        wait_s = within_s + self._settings.kill_grace_s + TERM_MARGIN_S
        notify(f"EXTEND_TIMEOUT_USEC={wait_s * 1e6:.0f}")
        end = self._now() + wait_s
        while self._now() < end and (self._reconciler.workers or self._session.spool):
            await asyncio.sleep(TICK_INTERVAL_S)
        stop.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Run the agent until `stop` is set. Its workers continue afterwards."""
        self._heard_at = self._now()
        self._manager.adopt()
        await self._health.look()  # the first hello reports the result
        self._reconciler.forgotten.update(await self._ended_jobs.find())
        metrics = NodeMetrics()
        server = MetricsServer(metrics.registry.page, self._unready)
        folders = {name: getattr(self._folders, name) for name in ("run", "work", "checkpoints")}
        async with (
            server.served(self._settings.address, self._settings.metrics),
            asyncio.TaskGroup() as tasks,
        ):
            works: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
                "controller": self._receive_from_controller,
                "worker messages": self._workers.receive,
                "worker connections": self._workers.watch,
                "session": self._keep_session,
                "reports": self._read_reports,
                "health": self._health.run,
                "notices": self._notices.run,
                "output": self._shipper.ship,
                "zygotes": self._warm_up,
                "disk use": self._disk_limits.run,
                "usage": self._usage.run,
                "metrics": lambda: metrics.keep(self._figures, folders),
                "watchdog": watchdog,
            }
            works |= {f"files {i}": work for i, work in enumerate(self._ended_jobs.tasks())}
            owned = [
                tasks.create_task(supervised(name, work, lambda: False))
                for name, work in works.items()
            ]
            slots, groups = len(self._spec.slots), self._groups.name
            log.info("agent ready", node=self._node, slots=slots, groups=groups)
            notify("READY=1")
            await stop.wait()
            notify("STOPPING=1")
            for task in owned:
                task.cancel()
        self._streams.close()
        self._bulk.close()
        self._workers.close()
        self._manager.close()
        self._states.close()
        if self._server is not None:
            self._server.close()
        self._link.close()
        self._locks.close()
        log.info("agent stopped, workers continue", node=self._node)

    # --- tasks

    async def _warm_up(self) -> None:
        """Start the default zygote, unless each job has zygotes of its own."""
        if not self._accounts.separate_users:
            await self._zygotes.warm_up(agent_settings.python_of(self._settings))

    async def _receive_from_controller(self) -> None:
        async for incoming in self._ports.orders:
            try:
                message = TO_AGENT.decode(incoming.frames[-1])
            except OnesError as error:
                log.warning("dropped", error=str(error))
                continue
            with log_errors("message of the controller", kind=type(message).__name__):
                self._heard_at = self._now()
                if isinstance(message, AskFiles | AskPiece):
                    self._bulk.answer(message)
                elif isinstance(message, OpenStream):
                    self._streams.receive(message)
                elif isinstance(message, wire.NextServerKey):
                    self._server_keys.learn(message.public)
                else:
                    self._apply(self._session.receive(message, self._now()))

    async def _keep_session(self) -> None:
        while True:
            with log_errors("session tick"):
                self._apply(self._session.tick(self._now()))
            with log_errors("fence"):
                fence_s = self._settings.fence_s
                if fence_s and self._session.unconfirmed_s(self._now()) >= fence_s:
                    self._manager.fence()
            if self._now() - self._heard_at >= OTHER_KEY_S:
                self._heard_at = self._now()
                with log_errors("other key"):
                    self._ports.try_other_key()
            await asyncio.sleep(TICK_INTERVAL_S)

    async def _read_reports(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            with log_errors("check of the workers"):
                self._manager.kill_unreportable()
                self._manager.read_all_reports()

    # --- outputs of the session

    def _apply(self, outputs: Iterable[AgentOutput]) -> None:
        for output in outputs:
            match output:
                case ToController(message=message):
                    self._ports.orders.send(encode(message))
                case Publish(numbered=numbered):
                    self._ports.publish(encode(numbered))
                case SendHello():
                    if not self._ports.orders.send(encode(self._hello())):
                        self._session.hello_not_sent(self._now())
                case Apply(delta=wire.GroupDelta() as delta):
                    self._handle(reconciler.Desired(delta))
                case Apply(delta=SweepDelta() as delta):
                    if self._ended_jobs.is_of_other_journal(delta.job, delta.journal):
                        log.error("sweep has the name of another one, not kept", job=delta.job)
                    else:
                        self._handle(reconciler.SweepDesired(delta))
                case wire.Welcome():
                    self._welcomed(output)
                case wire.Refused(message=why):
                    self._refusal = f"the controller refuses this node: {why}"
                    log.error("controller refused this node", why=why)

    def _hello(self) -> wire.Hello:
        return wire.Hello(
            node=self._node,
            boot=self._session.boot,
            spec=self._spec,
            workers=self._reconciler.seen(),
            events_sent=self._session.sent,
            events_dropped=self._session.dropped,
            problems=self._health.problems,
            echo=self._session.echo,
            jobs=self._ended_jobs.unended,
            run_id=self._run_id,
            term=self._session.term,
            highest_job=self._ended_jobs.highest,
        )

    def _welcomed(self, welcome: wire.Welcome) -> None:
        self._server_keys.confirm()
        self._refusal = ""
        log.info("welcome", session=welcome.session, term=welcome.term)
        if (bulk := self._ports.welcomed(welcome)) is not None:
            self._bulk.use(bulk)
        if welcome.report_again:
            self._manager.report_again()

    def _figures(self) -> NodeFigures:
        return NodeFigures(
            slots=len(self._spec.slots),
            workers=Counter(one.phase.value for one in self._reconciler.workers.values()),
            problems=len(self._health.problems),
            events_waiting=len(self._session.spool),
            unconfirmed_s=self._session.unconfirmed_s(self._now()),
        )

    def _unready(self) -> str:
        """Return why the controller gives this node no work, or "" if it may."""
        if self._session.session is None:
            return self._refusal or "no session with the controller"
        return "; ".join(self._health.problems)

    def _folder_of(self, asked: OpenStream) -> WorkerFolder | None:
        known = self._reconciler.workers.get(asked.worker)
        if (
            known is None
            or known.phase not in reconciler.LISTENING
            or known.journal != asked.journal
        ):
            return None
        return self._folders.worker(asked.worker)

    async def _start_shell(self, asked: OpenStream, folder: Path) -> None:
        job = self._reconciler.jobs.get(asked.job)
        secrets = job.delta.secrets if job is not None and job.delta is not None else {}
        await self._manager.start_shell(asked, folder, secrets)

    def _token_of(self, worker: WorkerId) -> str | None:
        return self._manager.tokens.get(worker)

    def _on_worker_message(self, worker: WorkerId, message: FromWorker) -> None:
        """Process a worker's message, which is telemetry or a hint to read the report file."""
        if isinstance(message, wire.StepsReported | wire.WorkerStalled):
            if self._telemetry_is_early(worker, type(message)):
                return
            known = self._reconciler.workers.get(worker)
            own = msgspec.structs.replace(message, journal=known.journal if known else "")
            if isinstance(own, wire.StepsReported):
                self._ports.publish(encode(wire.Telemetry(node=self._node, steps=own)))
            else:
                self._ports.publish(encode(wire.StallTelemetry(node=self._node, stall=own)))
            return
        self._manager.read_reports(worker)
        if isinstance(message, WorkerHello):
            self._handle(reconciler.Connected(worker))

    def _telemetry_is_early(self, worker: WorkerId, kind: type[Message]) -> bool:
        """True if a worker sends telemetry so often that it would delay messages of the node."""
        now, key = self._now(), (worker, kind)
        if now - self._telemetry_at.get(key, Seconds(-TELEMETRY_S)) < TELEMETRY_S:
            return True
        if len(self._telemetry_at) >= MAX_REMEMBERED:
            self._telemetry_at.clear()
        self._telemetry_at[key] = now
        return False

    # --- events to the reconciler, and its actions

    def _handle(self, event: reconciler.Event) -> None:
        for action in self._reconciler.handle(event):
            with log_errors("action", kind=type(action).__name__):
                self._perform(action)

    def _perform(self, action: reconciler.Action) -> None:
        match action:
            case reconciler.PublishEvent(event=event):
                self._record_event(event)
            case reconciler.OrderGroup(worker=worker, delta=delta):
                self._workers.order(worker, delta)
            case reconciler.GrantSlot(worker=worker):
                self._workers.send(worker, SlotGranted())
            case reconciler.OrderUnit(worker=worker, unit=unit):
                key = self._states.key(self._reconciler.workers[worker].job)
                self._workers.send(worker, UnitTask(unit=unit, states_key=key))
            case reconciler.KeepStates(delta=delta):
                self._states.keep(delta)
            case reconciler.ForgetJob(job=job):
                self._session.forget_job(job)
                self._states.forget(job)
                self._accounts.forget(job)
                self._ended_jobs.note(job, ended=True)
            case reconciler.StartWorker(delta=delta):
                self._ended_jobs.note(delta.job, ended=False)
                self._manager.perform(action)
            case reconciler.RemoveWorker(worker=worker):
                self._workers.forget(worker)
                self._manager.perform(action)
            case _:
                self._manager.perform(action)

    def _record_event(self, event: wire.AgentEvent) -> None:
        self._apply(self._session.record_event(event))

    def _now(self) -> Seconds:
        return Seconds(asyncio.get_running_loop().time())


def _load_checked(path: Path) -> AgentSettings:
    """Load the settings. Raise an error if they set limits that this host does not support."""
    settings = agent_settings.load(path)
    check_jobs(settings)
    return settings


def _ignore_reload() -> None:
    log.info("reload signal ignored: still starting")


async def run(path: Path) -> None:
    """Run the agent of a node until SIGTERM or SIGINT. SIGHUP reloads the settings.

    Relative paths of the settings start at the file's folder, so `path` must be absolute.
    """
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _ignore_reload)
    settings = agent_settings.load(path)
    if run_as(settings) != AGENT:
        os.setgroups([])  # acting as a job, have the job's group only
    agent = Agent(settings, path.parent, job_umask=os.umask(0o077))
    agent.settings_of(path).listen()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, agent.terminate, stop)
    await agent.run(stop)
