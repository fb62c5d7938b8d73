from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from controlplane.service.planner.plan_coordinator import OTHERS, PlanExchange


class Planner:
    """Takes so many seconds of a clock for an answer."""

    def __init__(self, took_s: float) -> None:
        self.took_s = took_s
        self.clock = 100.0
        self.asked: list[float] = []  # of the loop
        self.news = asyncio.Event()

    def ask(self) -> None:
        self.clock += self.took_s
        self.asked.append(asyncio.get_running_loop().time())
        self.news.set()

    async def next(self) -> None:
        """When it was asked once more."""
        self.news.clear()
        await asyncio.wait_for(self.news.wait(), 60.0)


def exchange_with(planner: Planner) -> PlanExchange:
    exchange = PlanExchange(cast("Any", SimpleNamespace()), clock=lambda: planner.clock)
    exchange.planner = cast("Any", planner)
    return exchange


async def test_all_that_happens_at_a_moment_is_one_question() -> None:
    planner = Planner(0.001)
    exchange = exchange_with(planner)

    for _ in range(3):
        exchange.request()
    await planner.next()

    assert len(planner.asked) == 1


async def test_a_planner_that_holds_up_the_loop_is_asked_when_others_had_their_turn() -> None:
    planner = Planner(0.02)
    exchange = exchange_with(planner)

    for _ in range(2):
        exchange.request()
        await planner.next()

    assert planner.asked[1] - planner.asked[0] >= OTHERS * 0.02
