"""The policy that plans: set by an admin while the controller runs, kept, and told of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from controlplane.core.inputs import PolicyChosen
from controlplane.policy.api import JobEnded
from controlplane.service import settings
from controlplane.service.app import Controller
from controlplane.service.planner.plan_coordinator import PlanCoordinator, make_planner
from controlplane.service.planner.planner import InlinePlanner
from controlplane.service.planner.policy_check import check_policy
from controlplane.service.planner.search_planner import SearchPlanner
from schemas.ids import Seconds
from schemas.wire.client import ChoosePolicy, ExplainJob, Failed, GetPolicy, PolicyInfo, ReadEvents
from tests.support.builders import A
from tests.support.schemas_links import connected
from tests.support.service import NONE, House, LiveService, Person

LIMITS = {"limits": [60.0]}


def text_of(options: dict[str, Any]) -> str:
    return msgspec.json.encode(options).decode()


@pytest.fixture
async def root(house: House) -> AsyncIterator[Person]:
    made = Person(house, house.keys["root"])
    await connected(made.requests)
    yield made
    made.close()


async def test_an_admin_sets_a_policy_that_plans_at_once_and_the_feed_tells_it(
    house: House, root: Person
) -> None:
    first = house.controller._planner

    told: PolicyInfo = await root.ask(ChoosePolicy(name="tiresias", options=text_of(LIMITS)))

    assert (told.name, told.options, told.by) == ("tiresias", text_of(LIMITS), "root")
    assert told.in_file == "fifo"
    assert await root.ask(GetPolicy()) == told
    assert house.controller._planner is not first
    assert house.controller._plans.planner is house.controller._planner
    assert house.controller._search_info().policy == "tiresias"
    events = (await root.ask(ReadEvents())).events
    assert [event.detail for event in events if event.event == "policy.chosen"] == [
        {"policy": "fifo", "by": "the settings file", "former": ""},
        {"policy": "tiresias", "by": "root", "former": "fifo"},
    ]


@pytest.mark.slow
async def test_a_policy_with_a_search_gets_its_process_and_gives_it_back(
    house: House, root: Person
) -> None:
    await root.ask(ChoosePolicy(name="optimus"))
    searching = house.controller._planner
    assert isinstance(searching, SearchPlanner)
    async with asyncio.timeout(120.0):
        while not searching.running:
            await asyncio.sleep(0.01)
        process = searching._process
        assert process is not None

        await root.ask(ChoosePolicy(name="fair"))
        await process.wait()

    assert isinstance(house.controller._planner, InlinePlanner)


@pytest.mark.parametrize(
    ("name", "options", "says", "helps"),
    [
        ("lottery", {}, "unknown policy 'lottery'", "choose one of drl, fair, fifo, gittins"),
        ("tiresias", {"limit": 3}, "unknown field `limit`", "known: limits"),
        ("srtf", {}, "needs to know how long jobs will last", "choose another one"),
        ("os:Policy", {}, "'os:Policy' is code from outside", "`outside = true`"),
    ],
)
async def test_a_policy_that_cannot_be_used_is_refused_before_it_is_stored(
    root: Person, name: str, options: dict[str, Any], says: str, helps: str
) -> None:
    while not (before := await root.ask(GetPolicy())).name:  # until the start is durable
        pass

    refused: Failed = await root.ask(ChoosePolicy(name=name, options=text_of(options)))

    assert says in refused.message
    assert helps in refused.hint
    assert await root.ask(GetPolicy()) == before


async def test_only_an_admin_sets_a_policy(people: tuple[Person, Person]) -> None:
    refused: Failed = await people[0].ask(ChoosePolicy(name="fair"))

    assert refused.message == "user ann may not manage keys, quotas and the policy"


@asynccontextmanager
async def controller_of(house: House, policy: str) -> AsyncIterator[Controller]:
    """A controller of the same folder that has started, but does not serve."""
    house.file.write_text(f"{house.settings}[policy]\n{policy}\n")
    made = Controller(settings.load(house.file), house.file.parent)
    await made.open()
    yield made
    made.close()


async def test_the_choice_stays_until_the_settings_file_says_something_else(tmp_path: Path) -> None:
    house = House(tmp_path / "cluster")
    house.controller.close()
    async with controller_of(house, 'name = "fifo"') as first:
        first._commit_loop.handle(PolicyChosen(name="tiresias", options=LIMITS, user="root"))

    async with controller_of(house, 'name = "fifo"') as second:
        assert second._policy == PolicyChosen(name="tiresias", options=LIMITS, user="root")
    async with controller_of(house, 'name = "fair"') as third:
        assert third._policy == PolicyChosen(name="fair")
    async with controller_of(house, 'name = "fifo"') as fourth:
        assert fourth._policy == PolicyChosen(name="fifo")
        await fourth._commit_loop.caught_up()
        inputs = [event for _, event in fourth._commit_loop.reader.inputs()]
        assert [one.name for one in inputs if isinstance(one, PolicyChosen)] == [
            "fifo", "tiresias", "fair", "fifo",
        ]  # fmt: skip


@pytest.mark.slow
async def test_a_choice_that_can_no_longer_be_used_gives_way_to_the_settings_file(
    tmp_path: Path,
) -> None:
    house = House(tmp_path / "cluster")
    house.controller.close()
    async with controller_of(house, 'name = "fifo"') as first:
        first._commit_loop.handle(PolicyChosen(name="gone:Policy", user="root"))

    async with controller_of(house, 'name = "fifo"') as second:
        assert second._policy == PolicyChosen(name="fifo")
        assert second._commit_loop.reactor.state.policy == PolicyChosen(name="fifo")


async def test_explain_says_that_an_admin_chose_the_policy(service: LiveService) -> None:
    service.take(PolicyChosen(name="fifo"))
    await service.loop.caught_up()
    assert (await service.ask(ExplainJob(job=A))).notes == ()

    service.take(PolicyChosen(name="fair", user="root"))
    await service.loop.caught_up()

    (note,) = (await service.ask(ExplainJob(job=A))).notes
    assert note.startswith("policy fair plans since ")
    assert note.endswith(" UTC, chosen by root")


class Turn:
    """A planner that says when it runs and when it has ended."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name = name
        self._told = told
        self.runs = asyncio.Event()

    async def run(self) -> None:
        self._told.append(f"{self._name} runs")
        self.runs.set()
        try:
            await asyncio.Event().wait()
        finally:
            self._told.append(f"{self._name} ended")


async def test_a_planner_has_ended_before_the_next_one_runs() -> None:
    told: list[str] = []
    plans = PlanCoordinator(cast("Any", SimpleNamespace()))
    first, second = Turn("first", told), Turn("second", told)
    plans.use(cast("Any", first), gangs=False)
    running = asyncio.create_task(plans.run())
    async with asyncio.timeout(60.0):
        await first.runs.wait()

        plans.use(cast("Any", second), gangs=True)
        await second.runs.wait()

    running.cancel()
    await asyncio.wait([running])
    assert told == ["first runs", "first ended", "second runs", "second ended"]


async def test_a_planner_that_fails_ends_the_run() -> None:
    async def fail() -> None:
        raise OSError("no process")

    plans = PlanCoordinator(cast("Any", SimpleNamespace()))
    plans.use(cast("Any", SimpleNamespace(run=fail)), gangs=False)

    with pytest.raises(OSError, match="no process"):
        await plans.run()


def test_a_new_policy_hears_the_past() -> None:
    ended = JobEnded(job=A, family="a", samples_done=1, succeeded=True, slot_s=60.0)

    planner = make_planner(
        PolicyChosen(name="gittins"),
        check_policy("gittins", {}),
        history=lambda: [(Seconds(5.0), ended)],
        view_now=NONE,
        propose=NONE,
        request_again=NONE,
    )

    assert cast("Any", planner).policy.policy._history.size == 1
