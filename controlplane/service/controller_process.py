"""Builds the controller's parts, owns their tasks, shuts down in order."""

from __future__ import annotations

import asyncio
import os
import signal
from importlib.metadata import version
from pathlib import Path

import structlog

from controlplane.core import policy_events
from controlplane.core.commands import Announce, Command, SendDelta
from controlplane.policy.api import JobEnded
from controlplane.policy.registry import check_for_cluster, check_options, entry, make
from controlplane.service.client_api import replies
from controlplane.service.client_api.request_server import RequestServer
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.controller_settings import ControllerSettings, PolicyChoice
from controlplane.service.event_feed import EventFeed
from controlplane.service.logs.log_relay import LogRelay
from controlplane.service.logs.log_store import LogStore
from controlplane.service.node_sessions import NodeSessions
from controlplane.service.planner.search_planner import InlinePlanner, Planner, SearchPlanner
from controlplane.service.prometheus_metrics import Metrics
from controlplane.service.telemetry import TelemetryTable
from controlplane.service.workdir_snapshots import SnapshotStore
from schemas.daemon import Audit, notify, watchdog
from schemas.errors import SettingsError
from schemas.link import Identity, Link, Socket, load_authorised, load_keys
from schemas.messages.agent import StepsReported
from schemas.messages.client import Cluster, SearchInfo
from schemas.messages.feed import FeedEvent
from schemas.session import SessionTimings

log = structlog.get_logger("controller")
BIND_WAIT_S = 10.0  # a predecessor that was killed may still be closing


async def run(settings: ControllerSettings, home: Path) -> None:
    """Be the controller until a signal asks to stop.

    Args:
        settings: what the settings file says.
        home: the folder that relative paths in it are relative to.

    Raises:
        SettingsError: if keys or addresses cannot be used.
        JournalError: if the journal cannot be used.
    """
    state = home / settings.state
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    audit = Audit()
    loop = asyncio.get_running_loop()
    stop = _end_signal(loop)

    link = Link(load_keys(home / settings.keys.server))
    authority = link.authority(
        load_authorised(home / settings.keys.authorised),
        lambda key: audit.refused("key", f"{key} is not authorised", loop.time()),
    )

    def perform(command: Command) -> None:
        if isinstance(command, SendDelta):
            agents.perform(command)
        elif isinstance(command, Announce):
            feed.publish(command.event)
            if command.event.job:
                relay.job_changed(command.event.job)
            _learn(command.event, commit_loop, planner, telemetry)

    def told(steps: StepsReported) -> None:
        telemetry.take(steps, commit_loop.now())
        learnt = policy_events.of_steps(steps, commit_loop.reactor.state)
        if learnt is not None:
            planner.observe(learnt, commit_loop.now())

    commit_loop = CommitLoop(state / "journal.sqlite", perform)
    planner = commit_loop.planner = _planner(settings.policy, commit_loop)
    listen = settings.listen
    telemetry = TelemetryTable()
    snapshots = SnapshotStore(state / "snapshots", settings.store.snapshot_bytes)
    try:
        feed = EventFeed(
            await _bind(link, "XPUB", listen.host, listen.feed),
            audit,
            commit_loop.reactor.state.feed_seq,
        )
        term = commit_loop.begin(version("ones"))
        relay = LogRelay(
            shippers=await _bind(link, "ROUTER", listen.host, listen.shippers),
            followers=await _bind(link, "ROUTER", listen.host, listen.followers),
            store=LogStore(state / "logs", settings.store.log_bytes_per_job),
            snapshots=snapshots,
            state=lambda: commit_loop.reactor.state,
            now=commit_loop.now,
            audit=audit,
        )
        agents = NodeSessions(
            commit_loop=commit_loop,
            orders=await _bind(link, "ROUTER", listen.host, listen.agents),
            events=await _bind(link, "SUB", listen.host, listen.events),
            term=term,
            timings=SessionTimings(
                suspect_s=settings.silence.suspect_s, lost_s=settings.silence.lost_s
            ),
            ports=(listen.shippers, listen.events),
            told=told,
            audit=audit,
        )

        def about(who: Identity) -> Cluster:
            return Cluster(
                release=version("ones"),
                term=term,
                policy=settings.policy.name,
                user=who.name,
                role=who.role,
                feed_port=listen.feed,
                log_port=listen.followers,
                last_seq=feed.last_seq,
            )

        def search() -> SearchInfo:
            return replies.search_info(commit_loop.reactor.state, settings.policy.name, planner)

        api = RequestServer(
            commit_loop=commit_loop,
            wire=await _bind(link, "ROUTER", listen.host, listen.clients),
            feed=feed,
            snapshots=snapshots,
            telemetry=telemetry,
            audit=audit,
            about=about,
            search=search,
        )
        with (metrics := Metrics()).served(listen.host, listen.metrics):
            async with asyncio.TaskGroup() as tasks:
                owned = [
                    tasks.create_task(work)
                    for work in (
                        authority.run(),
                        agents.hear_orders(),
                        agents.hear_events(),
                        agents.keep_time(),
                        commit_loop.keep_deadlines(),
                        planner.run(),
                        metrics.keep(lambda: commit_loop.reactor.state, search),
                        feed.admit(),
                        relay.hear_shippers(),
                        relay.hear_followers(),
                        api.serve(),
                        watchdog(lambda: not commit_loop.stalled),
                    )
                ]
                _write_pid(home, settings.pid_file)
                log.info("controller ready", term=term, jobs=len(commit_loop.reactor.state.jobs))
                notify("READY=1")
                await stop.wait()
                notify("STOPPING=1")
                for task in owned:
                    task.cancel()
    finally:
        commit_loop.close()
        link.close()
    log.info("controller stopped", term=term)


def _end_signal(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Set when somebody asks to stop."""
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    return stop


def _learn(
    event: FeedEvent, commit_loop: CommitLoop, planner: Planner, telemetry: TelemetryTable
) -> None:
    """Tell the policy what an announcement teaches; of an ended job nothing more is shown."""
    learnt = policy_events.of_event(event, commit_loop.reactor.state)
    if learnt is not None:
        planner.observe(learnt, commit_loop.now())
    if isinstance(learnt, JobEnded):
        telemetry.forget(learnt.job)


def _planner(choice: PolicyChoice, commit_loop: CommitLoop) -> Planner:
    """Whoever plans: this process, or one of its own.

    Raises:
        SettingsError: if there is no such policy or option.
    """
    if not entry(choice.name).searches:
        return InlinePlanner(
            make(choice.name, choice.options), commit_loop.look, commit_loop.propose
        )
    check_for_cluster(choice.name, choice.options)
    check_options(choice.name, choice.options)
    return SearchPlanner(
        policy=choice.name,
        options=choice.options,
        seed=int(choice.options.get("seed", 0)),
        history=lambda: policy_events.history(commit_loop.reactor.state),
        look=commit_loop.look,
        propose=commit_loop.propose,
    )


async def _bind(link: Link, kind: str, host: str, port: int) -> Socket:
    address = f"tcp://{host}:{port}"
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BIND_WAIT_S
    while True:
        try:
            return link.bind(kind, address)
        except SettingsError:
            if loop.time() > deadline:
                raise
            await asyncio.sleep(0.1)


def _write_pid(home: Path, name: str) -> None:
    if name:
        (home / name).write_text(f"{os.getpid()}\n", encoding="ascii")
