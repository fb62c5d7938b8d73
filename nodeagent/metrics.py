"""Metrics of a node for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nodeagent.health import free_bytes
from schemas.host.metrics_server import Registry

UPDATE_INTERVAL_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFigures:
    """Condition of a node."""

    slots: int
    workers: Counter[str]  # by phase
    problems: int  # that keep workers from starting
    events_waiting: int  # that the controller has not confirmed
    unconfirmed_s: float  # since the controller's last reply


class NodeMetrics:
    """Metrics of the agent and its node, updated about once a second."""

    def __init__(self) -> None:
        self.registry = Registry()
        gauge = self.registry.gauge
        self._slots = gauge("ones_node_slots", "Slots of this node.")
        self._workers = gauge("ones_node_workers", "Worker processes by phase.", "phase")
        self._problems = gauge("ones_node_problems", "Problems that keep workers from starting.")
        self._waiting = gauge("ones_node_events_waiting", "Reports that await confirmation.")
        self._unconfirmed = gauge(
            "ones_node_unconfirmed_seconds", "Time since the controller's last reply."
        )
        self._free = gauge("ones_node_free_bytes", "Free space of a folder's disk.", "folder")
        self._lag = gauge("ones_node_event_loop_lag_seconds", "Delay of the event loop.")

    def write(self, figures: NodeFigures) -> None:
        """Update the metrics."""
        self._slots.set(figures.slots)
        self._problems.set(figures.problems)
        self._waiting.set(figures.events_waiting)
        self._unconfirmed.set(figures.unconfirmed_s)
        self._workers.clear()
        for phase, number in figures.workers.items():
            self._workers.labels(phase).set(number)

    async def keep(self, figures: Callable[[], NodeFigures], folders: Mapping[str, Path]) -> None:
        """Update the metrics until cancelled. `folders` are named by their settings."""
        loop = asyncio.get_running_loop()
        asking: asyncio.Task[None] | None = None
        while True:
            self.write(figures())
            if asking is None or asking.done():  # a hung file system never replies
                asking = asyncio.create_task(asyncio.to_thread(self._ask_disks, folders))
            due = loop.time() + UPDATE_INTERVAL_S
            await asyncio.sleep(UPDATE_INTERVAL_S)
            self._lag.set(max(0.0, loop.time() - due))

    def _ask_disks(self, folders: Mapping[str, Path]) -> None:
        for name, path in folders.items():
            with contextlib.suppress(OSError):  # the health watch reports the node
                self._free.labels(name).set(free_bytes(path))
