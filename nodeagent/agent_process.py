"""The agent's process: builds its parts, owns their tasks, leaves workers alone when it goes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import sys
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import structlog

from nodeagent import agent_settings, job_files
from nodeagent.agent_errors import StartError
from nodeagent.agent_settings import AgentSettings
from nodeagent.ended_jobs import EndedJobs
from nodeagent.folder_checks import places_of
from nodeagent.folder_locks import FolderLocks
from nodeagent.health_watch import HealthWatch
from nodeagent.log_shipper import LogShipper
from nodeagent.reconciler import Reconciler
from nodeagent.reconciler_actions import (
    Action,
    ForgetJob,
    GrantSlot,
    KeepStates,
    OrderGroup,
    OrderUnit,
    PublishEvent,
    StartWorker,
)
from nodeagent.reconciler_events import Connected, Desired, Event, LogsStored, SweepDesired
from nodeagent.slot_devices import inventory
from nodeagent.snapshot_fetcher import SnapshotFetcher
from nodeagent.state_keeper import StateKeeper, serve_states
from nodeagent.worker_folders import SOCKET, NodeFolders
from nodeagent.worker_manager import WorkerManager
from nodeagent.zygote_pool import ZygotePool
from schemas.codec import FROM_WORKER, TO_AGENT, TO_SHIPPER, encode
from schemas.errors import OnesError
from schemas.ids import BootId, NodeId, Seconds, WorkerId, worker_id
from schemas.link import Link, Socket, load_keys, load_public
from schemas.logging_and_watchdog import notify, watchdog
from schemas.messages import Message
from schemas.messages.agent import (
    AgentEvent,
    GroupDelta,
    Hello,
    NodeHealth,
    StepsReported,
    Telemetry,
    Welcome,
)
from schemas.messages.files import AskFiles, AskPiece
from schemas.messages.hopping import SweepDelta, UnitTask
from schemas.messages.logs import LogStored, SnapshotPiece
from schemas.messages.worker import GroupOrder, Reported, SlotGranted, WorkerHello
from schemas.session import (
    AgentOutput,
    AgentSession,
    Apply,
    Publish,
    Rejected,
    SayHello,
    ToController,
    Welcomed,
)
from schemas.settings_reload import SettingsReload

log = structlog.get_logger("agent")
TICK_S: Final = 0.25
LOOK_S: Final = 1.0
RELOADED: Final = (
    "kill_grace_s",
    "keep_work_s",
    "keep_work_bytes",
    "keep_checkpoints_s",
    "keep_checkpoints_bytes",
    "disk_reserve_bytes",
    "python",
)
READERS: Final = 4  # of files of jobs, at once


class Agent:
    """One node's agent: session with the controller, channel to workers, manager of processes.

    Args:
        settings: what the settings file says.
        home: the folder that relative paths in it are relative to.

    Raises:
        SettingsError: if keys, folders or devices cannot be used.
    """

    def __init__(self, settings: AgentSettings, home: Path) -> None:
        self._settings = settings
        self._home = home
        self._node = NodeId(settings.node)
        self._spec = inventory(settings)
        self._folders = NodeFolders(
            home / settings.run, home / settings.work, home / settings.checkpoints
        )
        self._folders.make()
        self._locks = FolderLocks(self._folders, self._node)
        self._server = serve_states(self._folders, settings.address, settings.states_port)
        port = self._server.port if self._server else 0
        self._spec = msgspec.structs.replace(self._spec, states_port=port)
        self._states = StateKeeper(self._folders, self._happened)
        self._link = Link(load_keys(home / (settings.key or f"keys/{self._node}.key_secret")))
        self._server_key = load_public(home / settings.controller.key)
        self._session = AgentSession(
            self._node, BootId(uuid.uuid4().hex[:12]), chance=random.random
        )
        self._reconciler = Reconciler(self._node)
        self._ended_jobs = EndedJobs(
            self._folders, lambda: self._settings, lambda: set(self._reconciler.jobs)
        )
        host, port = settings.controller.host, settings.controller.agents
        self._orders = self._connect("DEALER", f"tcp://{host}:{port}")
        self._events: Socket | None = None
        self._ports = (0, 0)
        self._workers = Link().bind("ROUTER", self._folders.socket)
        places, shared = places_of(self._folders, settings.disk_reserve_bytes)
        self._health = HealthWatch(
            places=places,
            shared=shared,
            socket=self._folders.sockets / SOCKET,
            listen=lambda: self._workers.listen(self._folders.socket),
            changed=lambda problems: self._happened(NodeHealth(problems=problems)),
        )
        self._routes: dict[WorkerId, bytes] = {}
        self._shipper = LogShipper(self._node, lambda worker: self._handle(LogsStored(worker)))
        self._fetcher = SnapshotFetcher()
        self._zygotes = ZygotePool(self._folders)
        self._python = settings.python or sys.executable
        self._manager = WorkerManager(
            node=self._node,
            address=settings.address,
            folders=self._folders,
            slots=self._spec.slots,
            python=self._python,
            grace_s=settings.kill_grace_s,
            zygotes=self._zygotes,
            shipper=self._shipper,
            fetcher=self._fetcher,
            on_event=self._handle,
            may_read=lambda: not self._session.spool_full,
            check_node=self._health.look,
        )
        self._bulk: Socket | None = None
        self._reading = asyncio.Semaphore(READERS)
        self._bulk_receiving: asyncio.Task[None] | None = None

    def settings_of(self, path: Path) -> SettingsReload[AgentSettings]:
        """What takes over those settings that may change while the agent runs.

        Args:
            path: of the settings file.
        """
        safe = dict.fromkeys(RELOADED, self._use)
        return SettingsReload(self._settings, partial(agent_settings.load, path), safe)

    def _use(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._python = self._manager.python = settings.python or sys.executable
        self._manager.grace_s = settings.kill_grace_s
        self._health.reserve(settings.disk_reserve_bytes)

    async def run(self, stop: asyncio.Event) -> None:
        """Be the agent until `stop`.

        Args:
            stop: set to end the agent; its workers go on.
        """
        self._manager.adopt()
        await self._health.look()  # so that the first hello says it
        self._reconciler.forgotten.update(await self._ended_jobs.find())
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            owned = [
                tasks.create_task(work)
                for work in (
                    self._receive_from_controller(),
                    self._receive_from_workers(),
                    self._keep_session(),
                    self._read_reports(),
                    self._health.run(),
                    *self._ended_jobs.tasks(),
                    self._shipper.ship(),
                    self._warm_up(),
                    watchdog(),
                )
            ]
            self._write_pid()
            log.info("agent ready", node=self._node, slots=len(self._spec.slots))
            notify("READY=1")
            await stop.wait()
            notify("STOPPING=1")
            for task in owned:
                task.cancel()
            if self._bulk_receiving:
                self._bulk_receiving.cancel()
        self._manager.close()
        self._states.close()
        if self._server is not None:
            self._server.close()
        self._link.close()
        self._locks.close()
        log.info("agent stopped; its workers go on", node=self._node)

    # --- tasks

    async def _receive_from_controller(self) -> None:
        async for incoming in self._orders:
            try:
                message = TO_AGENT.decode(incoming.frames[-1])
            except OnesError as error:
                log.warning("dropped", error=str(error))
                continue
            with _going_on("message of the controller", kind=type(message).__name__):
                if isinstance(message, AskFiles | AskPiece):
                    self._tasks.create_task(self._answer_about_files(message))
                else:
                    self._apply(self._session.receive(message, self._now()))

    async def _answer_about_files(self, asked: AskFiles | AskPiece) -> None:
        with _going_on("question about files", kind=type(asked).__name__):
            async with self._reading:
                found = await asyncio.to_thread(job_files.answer, asked, self._folders)
            if self._bulk is not None:
                self._bulk.send(encode(found))

    async def _receive_from_workers(self) -> None:
        async for incoming in self._workers:
            try:
                message = FROM_WORKER.decode(incoming.frames[-1])
            except OnesError as error:
                log.warning("dropped", error=str(error))
                continue
            worker = worker_id(message.job, message.version, message.rank)
            with _going_on("message of a worker", worker=worker):
                match message:
                    case WorkerHello():
                        self._routes[worker] = incoming.route
                        self._manager.read_reports(worker)
                        self._handle(Connected(worker))
                    case Reported():
                        self._manager.read_reports(worker)
                    case StepsReported():
                        self._publish(encode(Telemetry(node=self._node, steps=message)))

    async def _receive_from_relay(self, bulk: Socket) -> None:
        async for incoming in bulk:
            with _going_on("message of the relay"):
                match TO_SHIPPER.decode(incoming.frames[-1]):
                    case LogStored() as stored:
                        self._shipper.receive(stored)
                    case SnapshotPiece() as piece:
                        self._fetcher.receive(piece)

    async def _keep_session(self) -> None:
        while True:
            with _going_on("a turn of the session"):
                self._apply(self._session.tick(self._now()))
            await asyncio.sleep(TICK_S)

    async def _read_reports(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with _going_on("a look at the workers"):
                self._manager.end_unheard()
                self._manager.read_all_reports()

    async def _warm_up(self) -> None:
        """Have the default interpreter's zygote ready before the first job needs it."""
        if self._python == sys.executable and importlib.util.find_spec("torch") is None:
            return
        try:
            await self._zygotes.get(self._python)
        except StartError as error:
            log.warning("no zygote yet", error=str(error))

    # --- outputs of the session

    def _apply(self, outputs: Iterable[AgentOutput]) -> None:
        for output in outputs:
            match output:
                case ToController(message=message):
                    self._orders.send(encode(message))
                case Publish(numbered=numbered):
                    self._publish(encode(numbered))
                case SayHello():
                    if not self._orders.send(encode(self._hello())):
                        self._session.unheard(self._now())
                case Apply(delta=GroupDelta() as delta):
                    self._handle(Desired(delta))
                case Apply(delta=SweepDelta() as delta):
                    self._handle(SweepDesired(delta))
                case Welcomed(welcome=welcome):
                    self._welcomed(welcome)
                case Rejected(refused=refused):
                    log.error("the controller refuses this node", why=refused.message)

    def _hello(self) -> Hello:
        return Hello(
            node=self._node,
            boot=self._session.boot,
            spec=self._spec,
            workers=self._reconciler.seen(),
            events_sent=self._session.sent,
            events_dropped=self._session.dropped,
            problems=self._health.problems,
            echo=self._session.echo,
            jobs=self._ended_jobs.unended,
        )

    def _welcomed(self, welcome: Welcome) -> None:
        log.info("welcome", session=welcome.session, term=welcome.term)
        ports = (welcome.event_port, welcome.log_port)
        if ports == self._ports:
            return
        self._ports = ports
        if self._events is not None:
            self._events.close()
        host = self._settings.controller.host
        self._events = self._connect("PUB", f"tcp://{host}:{welcome.event_port}")
        if self._bulk_receiving is not None:
            self._bulk_receiving.cancel()
        if self._bulk is not None:
            self._bulk.close()
        bulk = self._bulk = self._connect("DEALER", f"tcp://{host}:{welcome.log_port}")
        self._bulk_receiving = self._tasks.create_task(self._receive_from_relay(bulk))
        self._shipper.use(bulk)
        self._fetcher.use(bulk)

    def _publish(self, data: bytes) -> None:
        if self._events is not None:
            self._events.send(self._node.encode(), data)

    # --- events to the reconciler, and its actions

    def _handle(self, event: Event) -> None:
        for action in self._reconciler.handle(event):
            with _going_on("an action", kind=type(action).__name__):
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case PublishEvent(event=event):
                self._happened(event)
            case OrderGroup(worker=worker, delta=delta):
                self._send_order(worker, delta)
            case GrantSlot(worker=worker):
                self._send(worker, SlotGranted())
            case OrderUnit(worker=worker, unit=unit):
                self._send(worker, UnitTask(unit=unit))
            case KeepStates(delta=delta):
                self._states.keep(delta)
            case ForgetJob(job=job):
                self._session.forget_job(job)
                self._states.forget(job)
                self._ended_jobs.note(job, ended=True)
            case StartWorker(delta=delta):
                self._ended_jobs.note(delta.job, ended=False)
                self._manager.perform(action)
            case _:
                self._manager.perform(action)

    def _happened(self, event: AgentEvent) -> None:
        self._apply(self._session.happened(event))

    def _send_order(self, worker: WorkerId, delta: GroupDelta) -> None:
        if delta.group is not None:
            order = GroupOrder(
                version=delta.version,
                stage=delta.stage,
                kind=delta.kind,
                group=delta.group,
                former=delta.former,
                store=delta.store,
                source=delta.source,
            )
            self._send(worker, order)

    def _send(self, worker: WorkerId, message: Message) -> None:
        """To a worker that greeted; the others hear of everything when they do."""
        if (route := self._routes.get(worker)) is not None:
            self._workers.send(route, encode(message))

    def _connect(self, kind: str, address: str) -> Socket:
        return self._link.connect(kind, address, self._server_key)

    def _now(self) -> Seconds:
        return Seconds(asyncio.get_running_loop().time())

    def _write_pid(self) -> None:
        if self._settings.pid_file:
            path = self._home / self._settings.pid_file
            path.write_text(f"{os.getpid()}\n", encoding="ascii")


def _too_early() -> None:
    log.info("settings are being read at this moment")


@contextlib.contextmanager
def _going_on(what: str, **detail: str) -> Iterator[None]:
    """What fails in there is a line in the log, and holds up nothing behind it."""
    try:
        yield
    except Exception:
        log.exception("failed, and passed over", what=what, **detail)


async def run(path: Path) -> None:
    """Be the agent of a node until a signal asks to stop; workers go on without it.

    SIGHUP has it read its settings again.

    Args:
        path: of the settings file, absolute; relative paths in it are relative to its folder.

    Raises:
        SettingsError: if keys, folders or devices cannot be used.
    """
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _too_early)
    agent = Agent(agent_settings.load(path), path.parent)
    agent.settings_of(path).listen()
    await agent.run(stop)
