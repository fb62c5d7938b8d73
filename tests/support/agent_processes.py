"""Simulated agents in several processes, because one process has too few descriptors for all."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from math import inf
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

import uvloop
import zmq.asyncio

from schemas.ids import JobId, NodeId, Rank, Version
from schemas.transport import sockets
from schemas.wire.agent import GroupDelta, ToAgent, Welcome, WorkerSeen
from tests.support.fleet import Seen, SimulatedAgent, Watch, open_all

AGENTS_PER_PROCESS: Final = 2500  # each has three connections, with two descriptors each
LIMIT_S: Final = 120.0
SPAWN: Final = multiprocessing.get_context("spawn")


class Arrivals(Watch):
    def __init__(self) -> None:
        self.welcomed: dict[NodeId, float] = {}
        self.deltas: dict[NodeId, float] = {}

    def heard(self, agent: SimulatedAgent, message: ToAgent, at: float) -> None:
        if isinstance(message, Welcome):
            self.welcomed.setdefault(agent.node, at)
        elif isinstance(message, GroupDelta):
            self.deltas[agent.node] = at

    def forget(self) -> None:
        self.welcomed.clear()
        self.deltas.clear()


class BusyAgent(SimulatedAgent):
    jobs: tuple[JobId, ...] = ()

    def seen(self) -> Seen:
        return tuple(
            WorkerSeen(
                job=job, version=Version(1), rank=Rank(0), slot=slot, pid=100 + slot,
                started_ticks=7, ended=False,
            )
            for slot, job in enumerate(self.jobs)
        )  # fmt: skip


class AgentProcess:
    """Process that simulates some of the agents."""

    def __init__(self, agents: Sequence[SimulatedAgent]) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        given = [
            (one.node, one.keys, one.server_key, one.ports, one.slots, getattr(one, "jobs", ()))
            for one in agents
        ]
        self._process = SPAWN.Process(target=_run_agents, args=(theirs, given), daemon=True)
        self._process.start()

    def ask(self, request: str) -> Any:
        """Send a request to `_serve`, and return its reply."""
        self._pipe.send(request)
        return self._pipe.recv()

    def end(self) -> None:
        self._process.terminate()
        self._process.join()


def _run_agents(pipe: Pipe, given: Sequence[tuple[Any, ...]]) -> None:
    sockets.CONNECT_TIMEOUT_MS = 20_000  # thousands of sockets share a thread of libzmq here
    watch = Arrivals()
    agents = [BusyAgent(*rest, watch=watch) for *rest, _ in given]
    for agent, (*_, jobs) in zip(agents, given, strict=True):
        agent.jobs = jobs
    uvloop.run(_serve(pipe, agents, watch))


async def _serve(pipe: Pipe, agents: Sequence[BusyAgent], watch: Arrivals) -> None:
    context = zmq.asyncio.Context(4)
    context.set(zmq.MAX_SOCKETS, 4 * len(agents) + 100)
    tasks: list[asyncio.Task[None]] = []
    while True:
        match await asyncio.to_thread(pipe.recv):
            case "open":
                tasks += open_all(agents, context)
                pipe.send(time.monotonic())
            case "forget":
                watch.forget()
                pipe.send(None)
            case "welcomed":
                pipe.send([*watch.welcomed.values()])
            case "deltas":
                pipe.send([*watch.deltas.values()])
            case "in session":
                pipe.send(sum(agent.session.session is not None for agent in agents))


def processes_of(agents: Sequence[SimulatedAgent]) -> list[AgentProcess]:
    """Start processes that simulate these agents."""
    firsts = range(0, len(agents), AGENTS_PER_PROCESS)
    return [AgentProcess(agents[first : first + AGENTS_PER_PROCESS]) for first in firsts]


async def all_welcomed(
    parts: Sequence[AgentProcess], count: int, *, partly: bool = False
) -> list[float]:
    """Wait until all agents are welcomed, and return the times in order.

    After `LIMIT_S` this fails, or has infinity for each agent that is not welcomed if `partly`.
    """
    until = time.monotonic() + LIMIT_S
    while len(times := [at for part in parts for at in part.ask("welcomed")]) < count:
        if time.monotonic() > until:
            if not partly:
                raise SystemExit(f"{len(times)} of {count} in session after {LIMIT_S} s")
            break
        await asyncio.sleep(0.25)
    return sorted(times) + [inf] * (count - len(times))
