"""The autoscaler's process: reports of engine and controller in, orders to both out."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from controlplane.autoscaler import settings as settings_
from controlplane.autoscaler.decision import (
    Action,
    Allocation,
    Bounds,
    Drain,
    Forget,
    Memory,
    Release,
    Request,
    Undrain,
    decide,
)
from controlplane.autoscaler.ray import Ray
from controlplane.autoscaler.slurm import Slurm
from controlplane.client import Client
from schemas.errors import OnesError, one_line_error
from schemas.host.files import replace_file, take_pid_file

STATUS_FILE: Final = "autoscaler.json"  # in `run`, for `ones cluster status`
MAX_DECISIONS: Final = 50  # in the status
WAITING: Final = ("queued", "paused")
log = structlog.get_logger("autoscaler")


class Engine(Protocol):
    """What provides machines. Its methods raise OnesError if the engine does not reply."""

    prefix: str  # the nodes are named PREFIX-MACHINE

    @property
    def most(self) -> int | None:
        """Number of machines that there are, at the latest report; None: unknown."""

    async def allocations(self) -> list[Allocation]:
        """Return the machines and requests of this cluster, oldest first."""

    async def request(self, count: int, exclude: Sequence[str]) -> None:
        """Request machines, with an agent on each; none of them is a node in `exclude`."""

    async def release(self, allocation: str) -> None:
        """Return a machine, after TERM to its agent, or withdraw its request."""

    async def controller_host(self) -> str:
        """Return the address of the engine's controller, by which this host's own is found."""

    async def on_term_s(self) -> float:
        """Return the seconds that jobs have to leave a machine after TERM to its agent."""

    async def aclose(self) -> None:
        """Disconnect from the engine."""


class Decided(msgspec.Struct, frozen=True):
    """One order of the autoscaler, with its reason."""

    time: float  # seconds since the epoch
    action: str
    target: str
    why: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What `ones cluster status` shows."""

    time: float
    engine: str
    min_nodes: int
    max_nodes: int
    problem: str  # why the latest round failed; empty: it did not
    note: str  # why no more nodes are requested
    allocations: tuple[Allocation, ...]
    decisions: tuple[Decided, ...]  # latest last


class Autoscaler:
    """Loop over decisions. All state is that of the engine and the controller."""

    def __init__(self, settings: settings_.AutoscalerSettings, home: Path, engine: Engine) -> None:
        self._settings = settings
        self._home = home
        self._engine = engine
        self._bounds = settings.bounds
        self._memory = Memory()
        self._note = ""
        self._allocations: list[Allocation] = []
        self._decisions: deque[Decided] = deque(maxlen=MAX_DECISIONS)

    async def run(self) -> None:
        """Decide every few seconds, until cancelled."""
        async with Client(self._home) as client:
            while True:
                problem = ""
                try:
                    await self._decide(client)
                except OnesError as error:
                    problem = str(error)
                    log.warning("no decision", problem=problem)
                except Exception as error:  # the next round decides again
                    problem = one_line_error(error)
                    log.exception("no decision")
                self._write_status(problem)
                await asyncio.sleep(self._settings.interval_s)

    async def _decide(self, client: Client) -> None:
        self._allocations = await self._engine.allocations()
        nodes = await client.nodes()
        jobs = (await client.find_jobs(states=WAITING)).jobs
        now = time.time()
        prefix = f"{self._engine.prefix}-"
        mine = {str(one.node): one for one in nodes if one.node.startswith(prefix)}
        self._bounds = _within(self._settings.bounds, self._engine.most)
        outcome = decide(self._allocations, mine, jobs, self._bounds, self._memory, now=now)
        self._memory, self._note = outcome.memory, outcome.note
        for action in outcome.actions:
            log.info(type(action).__name__.lower(), target=_target(action), why=action.why)
            name = type(action).__name__.lower()
            self._decisions.append(Decided(now, name, _target(action), action.why))
            try:
                await self._apply(action, client)
            except OnesError as error:  # the next round decides again
                log.warning("order failed", action=name, problem=str(error))

    async def _apply(self, action: Action, client: Client) -> None:
        match action:
            case Request(count=count, exclude=exclude):
                await self._engine.request(count, exclude)
            case Release(allocation=allocation):
                await self._engine.release(allocation)
            case Drain(node=node, why=why, within_s=within_s):
                await client.drain(node, within_s, why)
            case Undrain(node=node):
                await client.undrain(node)
            case Forget(node=node):
                await client.forget_node(node)

    def _write_status(self, problem: str) -> None:
        status = Status(
            time=time.time(), engine=self._settings.engine, min_nodes=self._bounds.min_nodes,
            max_nodes=self._bounds.max_nodes, problem=problem, note=self._note,
            allocations=tuple(self._allocations), decisions=tuple(self._decisions),
        )  # fmt: skip
        try:
            replace_file(self._home / "run" / STATUS_FILE, msgspec.json.encode(status))
        except OSError as error:
            log.warning("status not written", problem=str(error))


def _target(action: Action) -> str:
    match action:
        case Request(count=count):
            return f"{count} node{'s' if count > 1 else ''}"
        case Release(allocation=allocation):
            return f"allocation {allocation}"
        case _:
            return action.node


def engine_of(settings: settings_.AutoscalerSettings, home: Path) -> Engine:
    """Return the engine that the settings name."""
    return Ray(settings, home) if settings.engine == "ray" else Slurm(settings, home)


def _within(bounds: Bounds, most: int | None) -> Bounds:
    """Return the bounds for an engine that has `most` machines."""
    if most is None:
        return bounds
    limits = min(bounds.min_nodes, most), min(bounds.max_nodes, most)
    return replace(bounds, min_nodes=limits[0], max_nodes=limits[1])


async def run(path: Path) -> None:
    """Run the autoscaler until TERM; what it has requested stays.

    Raises:
        SettingsError: if the settings are invalid.
    """
    settings, home = settings_.load(path), path.parent
    if settings.pid_file:
        take_pid_file(home / settings.pid_file)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = engine_of(settings, home)
    work = asyncio.create_task(Autoscaler(settings, home, engine).run())
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if work in done:
        work.result()
    work.cancel()
    await asyncio.wait({work})
    await engine.aclose()
