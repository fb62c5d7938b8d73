from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from controlplane.service.planner.plan_coordinator import COOLDOWN_RATIO, PlanCoordinator


class Planner:
    """Takes so many seconds of a clock for an answer."""

    def __init__(self, took_s: float) -> None:
        self.took_s = took_s
        self.clock = 100.0
        self.asked: list[float] = []  # of the loop
        self.news = asyncio.Event()

    def request_plan(self) -> None:
        self.clock += self.took_s
        self.asked.append(asyncio.get_running_loop().time())
        self.news.set()

    async def next(self) -> None:
        """When it was asked once more."""
        self.news.clear()
        await asyncio.wait_for(self.news.wait(), 60.0)


def coordinator_of(planner: Planner) -> PlanCoordinator:
    coordinator = PlanCoordinator(cast("Any", SimpleNamespace()), clock=lambda: planner.clock)
    coordinator.planner = cast("Any", planner)
    return coordinator


async def test_events_of_a_moment_cause_a_single_request() -> None:
    planner = Planner(0.001)
    coordinator = coordinator_of(planner)

    for _ in range(3):
        coordinator.request_plan()
    await planner.next()

    assert len(planner.asked) == 1


async def test_a_slow_planner_is_asked_again_after_a_pause() -> None:
    planner = Planner(0.02)
    coordinator = coordinator_of(planner)

    for _ in range(2):
        coordinator.request_plan()
        await planner.next()

    assert planner.asked[1] - planner.asked[0] >= COOLDOWN_RATIO * 0.02
