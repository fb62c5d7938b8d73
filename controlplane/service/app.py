"""Process of the controller. It builds the parts, runs their tasks, and shuts down in order."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from controlplane.core import policy_events
from controlplane.core.commands import Announce, Command, RequestPlan, SendDelta, SendSweepDelta
from controlplane.core.history import PhaseChanged, Record
from controlplane.core.inputs import PolicyChosen, SharingChanged
from controlplane.core.model.job import number_of
from controlplane.core.model.job_phases import Phase
from controlplane.core.state import State
from controlplane.journal.releases import delete_old_code, keep_own_code, own_release
from controlplane.policy.api import PolicyEvent
from controlplane.service import keys
from controlplane.service import settings as controller_settings
from controlplane.service.api import replies
from controlplane.service.api.replies import PolicyNotes
from controlplane.service.api.server import RequestServer
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.event_feed import MAX_TOPIC, EventFeed
from controlplane.service.file_keeper import ArchiveKeeper, JournalKeeper, tidy_repeatedly
from controlplane.service.keys import KeyFile, KeyTable
from controlplane.service.metrics import Metrics, ServiceFigures
from controlplane.service.node_sessions import NodeSessions
from controlplane.service.planner.plan_coordinator import (
    PlanCoordinator,
    PolicyObserver,
    make_planner,
)
from controlplane.service.planner.policy_check import CheckedPolicy, check_policy
from controlplane.service.relay import child, messages
from controlplane.service.relay.child import RelayChild
from controlplane.service.rights import READERS, JobOwners, projects_of, sees_all, topics_of
from controlplane.service.secret_store import SecretStore
from controlplane.service.settings import (
    ControllerSettings,
    JournalSettings,
    Limits,
    Silence,
    Store,
)
from controlplane.service.standby.active import CONTROLLER, ActiveSide
from controlplane.service.standby.election import Elected, elect
from controlplane.service.uploads import SnapshotStore
from controlplane.service.webhooks import Webhooks
from controlplane.service.worker_telemetry import TelemetryTable
from schemas import __version__
from schemas.codec import MAX_BYTES
from schemas.errors import BadFieldError, OnesError, SettingsError
from schemas.host.archives import ArchiveBounds
from schemas.host.files import take_pid_file
from schemas.host.logging import Audit, extended_start, notify, watchdog
from schemas.host.metrics_server import MetricsServer
from schemas.host.reload import SettingsReload
from schemas.host.tasks import supervised
from schemas.ids import JobId, Seconds, Term
from schemas.jobs import JobSpec
from schemas.session import SessionTimings
from schemas.sharing import Sharing
from schemas.transport.keys import (
    Identity,
    load_authorised,
    load_keys,
    load_public,
    next_key_path,
)
from schemas.transport.listeners import listen as listen_at
from schemas.transport.listeners import when_free
from schemas.transport.sockets import HIGH_WATER, Link, Socket
from schemas.wire.client import Cluster, SearchInfo

log = structlog.get_logger("controller")
MAX_REQUEST: Final = 1 << 20  # bytes of a request; decrypting one delays all other requests
EXTENSION_US: Final = 60_000_000  # start timeout of systemd, renewed while the start goes on
# A thread of libzmq accepts one connection per port between other work of all its connections.
IO_THREADS: Final = 4


async def run(path: Path) -> None:
    """Run the controller until SIGTERM or SIGINT. SIGHUP reloads the settings.

    With `standby.lease`, first follow the active controller until the lease can be claimed. `path`
    is absolute. Relative paths in the settings start at the folder of this file.

    Raises:
        SettingsError: if keys or addresses cannot be used.
        JournalError: if the journal cannot be used.
        LeaseLostError: if another controller has claimed the lease.
        OtherReleaseError: if a standby has to run the code of another release.
    """
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _ignore_reload)
    with extended_start(EXTENSION_US):
        settings = controller_settings.load(path)
        if settings.pid_file:
            take_pid_file(path.parent / settings.pid_file)
    elected = await elect(settings, path.parent, stop) if settings.standby.lease else None
    if stop.is_set():
        return
    with extended_start(EXTENSION_US):
        controller = Controller(settings, path.parent, elected)
    try:
        await controller.open()
        controller.settings_of(path).listen()
        await controller.serve(stop)
    finally:
        controller.close()
        await controller.release_lease()
    log.info("controller stopped", term=controller.term)


def _ignore_reload() -> None:
    log.info("reload signal ignored: still starting")


def _own_code(journal: Path) -> Path | None:
    try:
        return keep_own_code(journal)
    except OSError as error:  # as after a full disk, on which the controller starts nevertheless
        log.warning(
            "code of this release not stored, children use what is installed", why=str(error)
        )
        return None


class Controller:
    """Controller with all its parts. The constructor replays the journal.

    Relative paths in the settings refer to `home`.
    """

    term: Term
    _active: ActiveSide | None = None
    _feed: EventFeed
    _launch_relay: child.Launch = staticmethod(child.launch)
    _node_sessions: NodeSessions
    _relay: RelayChild
    _request_server: RequestServer
    _webhooks: Webhooks

    def __init__(
        self, settings: ControllerSettings, home: Path, elected: Elected | None = None
    ) -> None:
        self._settings = settings
        self._home = home
        self._elected = elected
        self._folder = home / settings.state
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._audit = Audit()
        self._server_keys = load_keys(home / settings.keys.server)
        self._link = Link(self._server_keys, io_threads=IO_THREADS)
        self._key_file = KeyFile(self._folder / keys.FILE)
        self._keys = KeyTable(self._key_file, self._listed_keys(settings))
        self._keys.on_revoked = self._cut_off
        self._authority = self._link.authority(
            self._keys.known, lambda why, address: self._audit.refused("key", why, peer=address)
        )
        journal = self._folder / "journal.sqlite"
        code = _own_code(journal)
        stated = PolicyChosen(name=settings.policy.name, options=settings.policy.options)
        checked = check_policy(stated.name, stated.options, code=code)
        self._stated_policy = stated
        self._code = code
        self._commit_loop = elected.commit_loop if elected else CommitLoop(journal)
        self._commit_loop.use(self._perform, self._record)
        self._journal_keeper = JournalKeeper(self._commit_loop, journal, settings.journal, code)
        self._owners = JobOwners(self._commit_loop)
        self._plans = PlanCoordinator(self._commit_loop)
        self._telemetry = TelemetryTable()
        self._metrics = Metrics()
        self._ready = False
        self._observer = PolicyObserver(self._commit_loop, self._plans, self._telemetry)
        self._notes = PolicyNotes(stated.name, checked.needs)
        self._use_policy(*self._policy_at_start(checked))
        store = settings.store
        self._snapshots = SnapshotStore(
            self._folder / "snapshots",
            store.snapshot_bytes,
            store.workdir,
            store.upload_bytes,
            settings.limits.archive_bytes,
        )
        self._listening: list[socket.socket] = []  # ports of the relay
        self._snapshots.needed = self._needed_archives
        self._archive_keeper = ArchiveKeeper(self._state, self._snapshots, store)
        self._secrets = SecretStore(self._folder / "secrets")
        self._secrets.keep_only(self._live_specs())

    def _listed_keys(self, settings: ControllerSettings) -> dict[bytes, Identity]:
        """Return the keys of authorised.toml. Standbys use the server's own key."""
        own = {self._link.public: Identity(CONTROLLER, "standby")} if self._elected else {}
        return load_authorised(self._home / settings.keys.authorised) | own

    # --- lifecycle

    async def open(self) -> None:
        """Bind the sockets and start a new term."""
        listen = self._settings.listen
        self._feed = EventFeed(
            await self._bind("XPUB", listen.feed, largest=MAX_TOPIC),
            self._audit,
            self._state().feed_seq,
            self._rebind_feed,
            self._owners.of,
        )
        if self._elected:
            self._active = self._elected.active_side(
                await self._bind("ROUTER", self._settings.standby.port), self._folder, self._audit
            )
            self._secrets.on_stored = self._key_file.on_stored = self._active.announce_before
            self._snapshots.on_stored = self._active.announce
        self.term = self._commit_loop.begin(
            own_release(), self._elected.term if self._elected else 0
        )
        self._apply_sharing(self._settings)
        self._apply_policy()
        delete_old_code(self._commit_loop.reader.path)
        self._node_sessions = NodeSessions(
            commit_loop=self._commit_loop,
            orders=await self._bind("ROUTER", listen.agents),
            events=await self._bind("SUB", listen.events),
            term=self.term,
            timings=_timings(self._settings),
            ports=(listen.shippers, listen.events),
            on_steps=self._observer.steps_reported,
            on_stall=self._observer.stall_reported,
            on_usage=self._observer.usage_reported,
            audit=self._audit,
            next_key=self._next_key(),
            secrets=self._secrets.of,
        )
        self._webhooks = Webhooks(
            self._settings.webhooks,
            home=self._home,
            state=self._folder,
            journal=self._commit_loop.reactor.state.journal,
            reader=self._commit_loop.reader,
            feed=self._feed,
            owner_of=self._owners.of,
        )
        for port in (listen.shippers, listen.followers):
            self._listening.append(await self._listen(port))
        self._relay = RelayChild(
            commit_loop=self._commit_loop,
            start=self._start_of_relay,
            ask=self._node_sessions.ask,
            code=self._code,
            launch=self._launch_relay,
        )
        self._keys.on_changed = self._relay.change_keys
        self._request_server = RequestServer(
            commit_loop=self._commit_loop,
            plans=self._plans,
            socket=await self._bind("ROUTER", listen.clients, largest=MAX_REQUEST),
            feed=self._feed,
            snapshots=self._snapshots,
            secrets=self._secrets,
            telemetry=self._telemetry,
            audit=self._audit,
            notes=self._notes,
            cluster_info=self._cluster_info,
            search_info=self._search_info,
            owners=self._owners,
            limits=self._settings.limits,
            keys=self._keys,
            prepare_policy=self._prepare_policy,
            files_stored=self._files_stored,
        )

    def _start_of_relay(self) -> messages.StartRelay:
        standby = self._settings.standby
        shippers, followers = map(_listener, self._listening)
        return messages.StartRelay(
            state=str(self._folder.absolute()),
            journal=str(self._commit_loop.path.absolute()),
            acknowledged=self._commit_loop.acknowledged,
            shippers=shippers,
            followers=followers,
            server=self._server_keys,
            keys=dict(self._keys.known),
            store=self._archive_keeper.settings,
            # A standby might claim the lease of a frozen controller, whose relay must then be gone.
            silence_s=standby.lease_s / 2 if standby.lease else float("inf"),
        )

    # --- the policy

    def _policy_at_start(self, stated: CheckedPolicy) -> tuple[PolicyChosen, CheckedPolicy]:
        """Return the policy that an admin set, unless the settings file names another one since."""
        state = self._commit_loop.reactor.state
        if state.policy is not None and state.policy_file == self._stated_policy:
            chosen = state.policy
            try:
                return chosen, check_policy(chosen.name, chosen.options, code=self._code)
            except SettingsError as error:  # such as a module that was removed since
                log.error(  # noqa: TRY400
                    "the policy that was set cannot be used, using that of the settings file",
                    policy=chosen.name, by=chosen.user, why=str(error),
                )  # fmt: skip
        return self._stated_policy, stated

    def _apply_policy(self) -> None:
        """Make the policy of the settings file an input of the core if it plans and is new."""
        stated, planning = self._stated_policy, self._commit_loop.reactor.state.policy
        if self._policy is stated and stated != planning:
            self._commit_loop.handle(stated)

    def _prepare_policy(self, chosen: PolicyChosen) -> Callable[[], None]:
        """Check a policy, and return the function that exchanges the planner for it.

        Raises:
            BadFieldError: if it may not be set while the controller runs.
            SettingsError: if there is no such policy, or if it or its options cannot be used.
        """
        settings = self._settings.policy
        if ":" in chosen.name and chosen.name != settings.name and settings.outside is not True:
            what = f"policy: {chosen.name[:64]!r} is code from outside"
            remedy = "name it in [policy] of the settings file, or set `outside = true` there"
            raise BadFieldError(what, remedy, "policy")
        checked = check_policy(chosen.name, chosen.options, code=self._code)
        return partial(self._use_policy, chosen, checked)

    def _use_policy(self, chosen: PolicyChosen, checked: CheckedPolicy) -> None:
        planner = make_planner(
            chosen,
            checked,
            history=self._history,
            view_now=self._plans.view_now,
            propose=self._plans.propose,
            request_again=self._plans.request_plan,
            code=self._code,
        )
        self._policy = chosen
        self._planner = planner
        self._notes.use(chosen.name, checked.needs)
        self._plans.use(planner, gangs=checked.gangs)

    def settings_of(self, path: Path) -> SettingsReload[ControllerSettings]:
        """Return an object that reloads and applies settings that can change at run time."""
        sections: dict[str, tuple[type[msgspec.Struct], Callable[[ControllerSettings], None]]] = {
            "silence": (Silence, lambda fresh: self._node_sessions.use(_timings(fresh))),
            "store": (Store, self._apply_store),
            "store.workdir": (ArchiveBounds, self._apply_store),
            "limits": (Limits, self._apply_limits),
            "sharing": (Sharing, self._apply_sharing),
            "journal": (JournalSettings, lambda fresh: self._journal_keeper.use(fresh.journal)),
        }
        safe = {
            f"{section}.{name}": apply
            for section, (fields, apply) in sections.items()
            for name in fields.__struct_fields__
        }
        load = partial(controller_settings.load, path)
        return SettingsReload(self._settings, load, safe, [self._reload_keys])

    def _apply_limits(self, settings: ControllerSettings) -> None:
        self._request_server.limits = settings.limits
        self._snapshots.user_bytes = settings.limits.archive_bytes

    def _apply_sharing(self, settings: ControllerSettings) -> None:
        """Make the rules of sharing an input of the core if they changed in the settings file.

        Rules that an admin has set since then stay otherwise.
        """
        state = self._commit_loop.reactor.state
        former, applied = state.sharing, state.sharing_file
        revision = former.revision if former is not None else 0
        if applied is None or settings.sharing != msgspec.structs.replace(applied, revision=0):
            sharing = msgspec.structs.replace(settings.sharing, revision=revision + 1)
            self._commit_loop.handle(SharingChanged(sharing=sharing))

    def _apply_store(self, settings: ControllerSettings) -> None:
        self._snapshots.max_bytes = settings.store.snapshot_bytes
        self._snapshots.bounds = settings.store.workdir
        self._snapshots.upload_bytes = settings.store.upload_bytes
        self._archive_keeper.settings = settings.store
        self._relay.change_store(settings.store)

    def _reload_keys(self, settings: ControllerSettings) -> None:
        self._keys.reload(self._listed_keys(settings))
        self._node_sessions.announce_key(self._next_key())

    def _next_key(self) -> str:
        """Return the public key that will replace the server's key, or "" if there is none."""
        path = next_key_path(self._home / self._settings.keys.server)
        return load_public(path).decode() if path.exists() else ""

    def _cut_off(self, owners: list[Identity]) -> None:
        """Disconnect the owners of keys that were revoked, have expired or were changed."""
        log.info("keys are no longer authorised", owners=[str(who) for who in owners])
        self._node_sessions.cut_off_revoked()
        self._request_server.waiting.end_revoked()
        if any(who.role in READERS for who in owners):
            self._feed.cut_off()

    async def serve(self, stop: asyncio.Event) -> None:
        """Run all tasks until `stop` is set.

        Raises:
            JournalError: if the journal has failed permanently.
        """
        listen = self._settings.listen
        failure: OnesError | None = None
        server = MetricsServer(
            self._metrics.registry.page,
            lambda: "" if self._ready else "the start of this term is not durable yet",
        )
        async with server.served(listen.host, listen.metrics), asyncio.TaskGroup() as tasks:
            owned = [tasks.create_task(work) for work in self._tasks()]
            try:
                failure = await self._first_commit(stop) or await self._until(stop)
            finally:
                notify("STOPPING=1")
                self._request_server.close()
                for task in owned:
                    task.cancel()
        if failure is not None:
            raise failure

    async def _first_commit(self, stop: asyncio.Event) -> OnesError | None:
        """Wait until the start of this term is durable, then report readiness. Return any failure.

        A release that cannot commit never reports readiness, so an upgrade does not continue. All
        ports are open by then. Connections to the relay's wait until the relay serves them.
        """
        begun = asyncio.create_task(self._commit_loop.begun())
        failed = asyncio.create_task(self._failure())
        tasks = (begun, failed, asyncio.create_task(stop.wait()))
        while not any(task.done() for task in tasks):  # a full disk delays the commit
            notify(f"EXTEND_TIMEOUT_USEC={EXTENSION_US}")
            await asyncio.wait(
                tasks, timeout=EXTENSION_US / 4e6, return_when=asyncio.FIRST_COMPLETED
            )
        is_ready, failure = begun.done(), failed.result() if failed.done() else None
        for task in tasks:
            task.cancel()
        if not is_ready:
            return failure
        log.info("controller ready", term=self.term, jobs=len(self._state().jobs))
        self._ready = True
        notify("READY=1")
        return None

    async def _until(self, stop: asyncio.Event) -> OnesError | None:
        stopped = asyncio.create_task(stop.wait())
        failed = asyncio.create_task(self._failure())
        done, waiting = await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return failed.result() if failed in done else None

    async def _failure(self) -> OnesError:
        """Wait until this process cannot go on, and return the reason."""
        failures: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._commit_loop.failure()),
            self._relay.failed,
        ]
        if self._active is not None:
            failures.append(self._active.lost)
        done, _ = await asyncio.wait(failures, return_when=asyncio.FIRST_COMPLETED)
        failure: OnesError = done.pop().result()
        return failure

    def close(self) -> None:
        """Make all handled inputs durable, and close the sockets."""
        self._commit_loop.close()
        self._link.close()
        for listening in self._listening:
            listening.close()

    async def release_lease(self) -> None:
        """Let a standby claim the lease at once, after `close`."""
        if self._active is not None:
            await self._active.release()

    # --- parts

    def _tasks(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return the tasks that run until cancelled, in the order in which they start.

        A failed task is started again, unless an input was handled only in part.
        """
        core, search = (lambda: self._commit_loop.committed), self._search_info
        works: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "keys": self._keys.watch,
            "audit": self._audit.log_suppressed,
            "connections": lambda: self._link.guard_connections(
                partial(self._audit.refused, "connection")
            ),
            "messages": self._node_sessions.receive_messages,
            "events": self._node_sessions.receive_events,
            "silence": self._node_sessions.watch_silence,
            "deadlines": lambda: self._commit_loop.keep_deadlines(self._telemetry.due),
            "journal": self._journal_keeper.run,
            "archives": lambda: tidy_repeatedly(self._archive_keeper.tidy),
            "planner": self._plans.run,
            "metrics": lambda: self._metrics.keep(core, search, self._figures),
            "subscribers": self._feed.admit_subscribers,
            "relay": self._relay.run,
            "requests": self._request_server.serve,
            "webhooks": self._webhooks.run,
            "watchdog": watchdog,
        }
        if self._active is not None:
            works |= self._active.works
        is_fatal = lambda: self._commit_loop.is_torn  # noqa: E731
        return (
            self._authority.run(),
            *(supervised(name, work, is_fatal) for name, work in works.items()),
        )

    async def _bind(
        self, kind: str, port: int, *, queued: int = HIGH_WATER, largest: int = MAX_BYTES
    ) -> Socket:
        address = f"tcp://{self._settings.listen.host}:{port}"
        bind = partial(self._link.bind, kind, address, queued=queued, largest=largest)
        return await when_free(bind)

    async def _listen(self, port: int) -> socket.socket:
        return await when_free(partial(listen_at, self._settings.listen.host, port))

    async def _rebind_feed(self) -> Socket:
        while True:
            try:
                return await self._bind("XPUB", self._settings.listen.feed, largest=MAX_TOPIC)
            except SettingsError as error:
                log.error("feed port cannot be bound, retrying", why=str(error))  # noqa: TRY400
                await asyncio.sleep(1.0)

    # --- callbacks between the parts

    def _perform(self, command: Command) -> None:
        match command:
            case RequestPlan():
                self._plans.request_plan()
            case SendDelta() | SendSweepDelta():
                self._node_sessions.send(command)
            case Announce(event=event):
                self._feed.publish(event)
                if event.job:
                    self._forget_secrets(event.job)

    def _forget_secrets(self, name: JobId) -> None:
        job = self._state().jobs.get(name)
        if job is not None and job.ended and job.spec.secret_names:
            self._secrets.forget(job.spec, self._live_specs())

    def _history(self) -> list[tuple[Seconds, PolicyEvent]]:
        left = self._commit_loop.reader.ended.latest(policy_events.KEPT_JOBS)
        jobs = sorted([*left, *self._state().jobs.values()], key=lambda job: number_of(job.job))
        return policy_events.history(jobs, self._commit_loop.records)

    def _record(self, record: Record) -> None:
        self._observer.recorded(record)
        if isinstance(record, PhaseChanged) and record.change.from_state == Phase.QUEUED.value:
            job = self._state().jobs.get(record.job)
            if job is not None and job.phase is Phase.STARTING:
                self._metrics.queue_wait.observe(job.accounting.queued_s)

    def _state(self) -> State:
        return self._commit_loop.committed.state

    def _needed_archives(self) -> set[str]:
        """Return the archives of jobs that have not ended, including jobs not yet durable."""
        state = self._commit_loop.reactor.state
        return {state.jobs[name].snapshot for name in state.active}

    def _live_specs(self) -> Iterator[JobSpec]:
        """Yield the specs of jobs that have not ended, including jobs not yet durable."""
        state = self._commit_loop.reactor.state
        return (state.jobs[name].spec for name in state.active)

    def _cluster_info(self, who: Identity) -> Cluster:
        return Cluster(
            release=__version__,
            next_key=self._node_sessions.next_key,
            term=self.term,
            policy=self._policy.name,
            user=who.name,
            role=who.role,
            feed_port=self._settings.listen.feed,
            log_port=self._settings.listen.followers,
            agents_port=self._settings.listen.agents,
            last_seq=self._feed.last_seq,
            stalled=self._commit_loop.stalled or self._state().outdated,
            projects=() if sees_all(who) else projects_of(who),
            topics=topics_of(who),
            now=self._commit_loop.now(),
        )

    async def _files_stored(self) -> None:
        """Wait until the standbys have the files that were announced."""
        if self._active is not None:
            await self._active.files_stored()

    def _figures(self) -> ServiceFigures:
        loop, at = self._commit_loop, self._journal_keeper.snapshot_at
        rows = (row for row in self._keys.rows() if row.state == "valid")
        return ServiceFigures(
            stalled=bool(loop.stalled),
            outdated=bool(self._state().outdated),
            tail_inputs=loop.tail.inputs,
            tail_s=loop.tail.seconds,
            snapshot_age_s=None if at is None else loop.now() - at,
            snapshot_failures=self._journal_keeper.failures,
            journal_bytes=loop.journal_bytes(),
            commit_s=loop.longest_commit_s(),
            requests=self._request_server.requests,
            webhooks=self._webhooks.waiting(),
            relay_up=self._relay.is_up,
            relay_restarts=self._relay.restarts,
            standbys=self._active.missing_inputs() if self._active else {},
            key_ends={row.name: row.expires for row in rows if row.expires is not None},
        )

    def _search_info(self) -> SearchInfo:
        totals, policy = self._commit_loop.committed.totals, self._policy.name
        return replies.search_info(totals, policy, self._planner)


def _timings(settings: ControllerSettings) -> SessionTimings:
    return SessionTimings(**msgspec.structs.asdict(settings.silence))


def _listener(listening: socket.socket) -> messages.Listener:
    host, port, *_ = listening.getsockname()
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return messages.Listener(address=address, descriptor=listening.fileno())
